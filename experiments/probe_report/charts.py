"""The noise curves: a small chart for each kind of noise and figure, one line for each strategy, uniform dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..probe.record import Figure
from ..report.charts import Chart, short_number
from ..report.curves import Line
from ..report.figures import draw, label_ends, paint_lines
from .heat import shown
from .noise import MEASURES, Sweep

__all__ = ["noise_chart"]

WIDTH = 340.0
MOST_LETTERS = 48  # of the name of an axis
_LETTER, _GAP = 5.2, 11.5  # points: a letter of a label, and labels from one another


def noise_chart(number: int, sweep: Sweep, places: Mapping[str, int]) -> Chart | None:
    """One sweep; None for a figure that is not drawn, and where no strategy has two levels.

    Args:
        number: unique within the page.
        sweep: what to draw.
        places: of the strategies among the colours.
    """
    curves = dict(sweep.curves)
    if sweep.reference:
        curves.setdefault("uniform", sweep.reference)
    lines = [_line(places[name], name, sweep.levels, curve) for name, curve in curves.items()]
    lines = sorted((line for line in lines if len(line.x) > 1), key=lambda line: line.index)
    if sweep.key not in MEASURES or not lines:
        return None
    room = min(96.0, max(48.0, _LETTER * max(len(line.label) for line in lines) + 6))
    height = max(210.0, _GAP * len(lines) + 44)

    def paint(axes: Any) -> None:
        paint_lines(axes, lines, markers=len(lines) <= 8, width=1.4)
        _axes(axes, sweep)
        label_ends(axes, lines, room=room)

    heading = f"{shown(sweep.kind.heading)}: {shown(sweep.measure)}"
    title = f"{heading}, by {shown(sweep.kind.axis)}; one line for each strategy, with its 95% band"
    svg = draw(f"noise{number}", title, WIDTH, height, paint, pad=(32, 32, room + 22, 8))
    return Chart(f"noise{number}", heading, svg)


def _line(index: int, name: str, levels: Sequence[float], curve: Sequence[Figure]) -> Line:
    known = [(x, f) for x, f in zip(levels, curve, strict=True) if not math.isnan(f.value)]
    banded = all(not math.isnan(f.low + f.high) for _, f in known)
    return Line(
        index,
        shown(name),
        [x for x, _ in known],
        [f.value for _, f in known],
        [f.low for _, f in known] if banded else (),
        [f.high for _, f in known] if banded else (),
    )


def _axes(axes: Any, sweep: Sweep) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, 0.0))
    axes.axhline(0.0, color="#020202", linewidth=0.7, zorder=1)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(short_number))
    axes.set_xlabel(shown(sweep.kind.axis)[:MOST_LETTERS], labelpad=3)
    axes.margins(x=0.01)
