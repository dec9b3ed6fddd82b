"""Charts as SVG that takes its colours from the page: matplotlib draws placeholders, CSS variables replace them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from .curves import Line
from .statistics import mean

__all__ = ["COLOURS", "Look", "draw", "label_ends", "look", "paint_lines", "spread_labels", "standalone"]

# (light, dark) by place; the first is the baseline's. Found by maximising the smallest difference in OKLab between any
# two under normal, deutan, protan and tritan vision (Machado et al. 2009): .108 on either ground.
COLOURS = (
    ("#5b6570", "#a9b3bd"),
    ("#0165ce", "#3d86ee"),
    ("#b33c00", "#e8743a"),
    ("#009b6e", "#13a479"),
    ("#e060a6", "#c47ee7"),
    ("#9a9e10", "#f0d264"),
    ("#2fa2f8", "#94eefe"),
    ("#7f124d", "#c9489f"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "<")
DASHES = ((1, 0), (5, 1.6), (1.4, 1.4), (6, 1.5, 1.4, 1.5))
_INK, _MUTED, _GRID, _PAPER = "#010101", "#020202", "#030303", "#040404"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.7,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn everywhere: place among the colours, marker and dashes."""

    colour: int
    marker: str
    dashes: tuple[float, ...]

    @property
    def placeholder(self) -> str:
        return f"#0500{self.colour:02x}"


def look(index: int) -> Look:
    """The look of the strategy at ``index`` (0 is the baseline). Colours repeat after seven with other dashes."""
    if index == 0:
        return Look(0, "o", (3.2, 1.6))
    turn, place = divmod(index - 1, len(COLOURS) - 1)
    return Look(1 + place, MARKERS[place % len(MARKERS)], DASHES[turn % len(DASHES)])


def draw(
    name: str, title: str, width: float, height: float, paint: Callable[[Any], None], *, pad: Sequence[float]
) -> str:
    """One chart as an ``<svg>`` element, to be put into the page.

    Args:
        name: unique within the page; prefixes every id.
        title: what it shows, for those who cannot see it.
        width, height: in points; the element scales to its box.
        paint: draws on the axes it is given.
        pad: left, bottom, right and top margin in points.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    left, bottom, right, top = pad
    text = StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser has its own fonts
        figure = Figure(figsize=(width / 72, height / 72))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
        paint(axes)
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue(), name, title)


def standalone(svg: str, title: str) -> str:
    """A figure of the page as a file of its own: with a title and both sets of colours."""
    from markupsafe import escape

    light = {"ink": "#1c2126", "muted": "#5b6570", "grid": "#dfe3e6", "paper": "#ffffff"}
    dark = {"ink": "#e6e9ec", "muted": "#a3adb7", "grid": "#343b43", "paper": "#14171b"}
    for place, (on_light, on_dark) in enumerate(COLOURS):
        light[f"s{place}"], dark[f"s{place}"] = on_light, on_dark
    rules = ["".join(f"--{key}:{value};" for key, value in theme.items()) for theme in (light, dark)]
    style = (
        f"svg{{{rules[0]}background:var(--paper);font-family:system-ui,sans-serif}}"
        "*{stroke-linejoin:round;stroke-linecap:butt}"
        f"@media(prefers-color-scheme:dark){{svg{{{rules[1]}}}}}"
    )
    head, body = svg.split(">", 1)
    return f"{head}><title>{escape(title)}</title><style>{style}</style>{body}"


def _for_page(svg: str, name: str, title: str) -> str:
    """Without prolog, metadata and fonts; ids made unique; placeholders turned into variables."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)  # would rule the whole page
    svg = re.sub(r"<svg [^>]*?viewBox=\"([^\"]+)\"[^>]*>", _open_tag(title), svg, count=1)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'id="series-(\d+)[^"]*"', r'class="series series-\1"', svg)
    used = set(re.findall(r"url\(#([^)]+)\)", svg)) | set(re.findall(r'href="#([^"]+)"', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", svg)
    svg = re.sub(r"; ?font-family: [^;\"]+", "", svg)
    variables = {_INK: "ink", _MUTED: "muted", _GRID: "grid", _PAPER: "paper"}
    variables |= {f"#0500{place:02x}": f"s{place}" for place in range(len(COLOURS))}
    for placeholder, variable in variables.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg)


def _open_tag(title: str) -> Callable[[re.Match[str]], str]:
    from markupsafe import escape

    attributes = f'class="chart" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg"'
    return lambda m: f'<svg viewBox="{m[1]}" {attributes}>'


def paint_lines(axes: Any, lines: Sequence[Line], *, markers: bool = True, width: float = 1.7) -> None:
    """Bands below, then runs that do not count, single seeds, and the means on top."""
    for line in lines:
        style, group = look(line.index), f"series-{line.index}"
        if len(line.low):
            axes.fill_between(
                line.x, line.low, line.high, color=style.placeholder, alpha=0.11, linewidth=0, gid=f"{group}b"
            )
        for number, (x, y) in enumerate(line.unfinished):
            axes.plot(x, y, color=style.placeholder, linewidth=0.9, dashes=(1, 1.5), gid=f"{group}u{number}")
            axes.plot(x[-1:], y[-1:], color=style.placeholder, marker="x", markersize=4, gid=f"{group}x{number}")
        for number, (x, y) in enumerate(line.seeds):
            axes.plot(x, y, color=style.placeholder, linewidth=0.7, alpha=0.4, gid=f"{group}t{number}")
    for line in lines:
        style = look(line.index)
        (curve,) = axes.plot(line.x, line.y, color=style.placeholder, linewidth=width, gid=f"series-{line.index}m")
        if style.dashes != (1, 0):
            curve.set_dashes(style.dashes)
        if markers:
            curve.set(marker=style.marker, markersize=4, markeredgecolor=_PAPER, markeredgewidth=0.6)


def label_ends(axes: Any, lines: Sequence[Line], *, room: float) -> None:
    """Name each curve beside its right end, in ``room`` points, with a leader to it; names keep apart."""
    drawn = [line for line in lines if len(line.x)]
    if not drawn:
        return
    _, _, _, height = axes.get_position().bounds
    points = height * axes.figure.get_figheight() * 72
    low, high = axes.get_ylim()
    wanted = [(line.y[-1] - low) / (high - low) * points for line in drawn]
    for line, at in zip(drawn, spread_labels(wanted, 11.5, points), strict=True):
        style, group = look(line.index), f"series-{line.index}"
        y = low + at / points * (high - low)
        right = axes.transAxes.transform((1, 0))[0]
        start = axes.transData.inverted().transform((right + 5, 0))[0]
        stop = axes.transData.inverted().transform((right + 15, 0))[0]
        axes.plot(
            [line.x[-1], start, stop], [line.y[-1], y, y], color=style.placeholder, linewidth=0.8, clip_on=False,
            gid=f"{group}l",
        )  # fmt: skip
        text = line.label if len(line.label) * 5.2 < room else line.label[: int(room / 5.2) - 1] + "…"
        axes.annotate(
            text, (stop, y), (2.5, 0), textcoords="offset points", va="center", annotation_clip=False, gid=f"{group}n"
        )


def spread_labels(wanted: Sequence[float], gap: float, room: float) -> list[float]:
    """Positions near the wanted ones, at least ``gap`` apart and inside [0, room] as far as they fit.

    >>> spread_labels([50.0, 52.0, 10.0], 10.0, 100.0)
    [46.0, 56.0, 10.0]
    """
    clusters: list[list[int]] = []
    centres: list[float] = []
    for index in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        clusters.append([index])
        while True:
            members = clusters[-1]
            half = gap * (len(members) - 1) / 2
            centre = mean([wanted[i] for i in members])
            centre = max(half, min(room - half, centre))
            if len(clusters) > 1 and centre - half < centres[-1] + gap * (len(clusters[-2]) - 1) / 2 + gap:
                clusters[-2:] = [clusters[-2] + members]
                centres.pop()
                continue
            centres.append(centre)
            break
    placed = [0.0] * len(wanted)
    for members, centre in zip(clusters, centres, strict=True):
        for rank, index in enumerate(members):
            placed[index] = centre + gap * (rank - (len(members) - 1) / 2)
    return placed
