"""Write ``probe.html``: everything that a probe found, in one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

from ...verifiers import InputError
from ..probe.record import Probe
from ..report.build import page_environment, write_whole
from . import words
from .bars import bar, scale_of
from .board import CLASSES, NOTHING, Board, Cell, board, decimals, digits_of, place_of, written
from .charts import noise_chart
from .heat import draw_rollout, shown
from .noise import sweeps

__all__ = ["build_probe_report"]

_HERE = Path(__file__).parent
# files that the command leaves beside the page -> what is in them
FILES = {
    "figures.csv": "every figure of every strategy with its interval",
    "noise.csv": "every point of the noise sweeps",
    "probe.parquet": "the answers: tokens, true advantages, and the credit of every strategy",
    "gradients.npz": "inner products of the gradients, by strategy and problem",
    "config.yaml": "the settings of the command",
}


def build_probe_report(probe: Probe, path: Path) -> Path:
    """Write the page of a probe.

    Args:
        probe: what was found.
        path: of the page, as a rule ``.../probe.html``; the file appears whole or not at all. Files of the command
            that lie beside it by then are named in it.

    Raises:
        InputError: the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = {name: says for name, says in FILES.items() if (path.parent / name).exists()}
        write_whole(path, _page(probe, beside))
    except OSError as problem:
        raise InputError(f"{path}: cannot write the report there ({problem.strerror}); free the place") from problem
    return path


def _page(probe: Probe, files: dict[str, str]) -> str:
    from jinja2 import FileSystemLoader
    from markupsafe import Markup

    environment = page_environment()
    environment.loader = FileSystemLoader(_HERE)
    environment.filters.update(shown=shown, written=written, level=words.level_text, percent=_percent)
    script = (_HERE / "page.js").read_text("utf-8")
    table = board(probe)
    drawings = [draw_rollout(rollout, probe) for rollout in probe.rollouts]
    return str(
        environment.get_template("page.html.j2").render(
            probe=probe,
            page_style=Markup((_HERE / "page.css").read_text("utf-8")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            places=place_of(probe),
            headline=words.headline(probe),
            how_compared=words.how_compared(probe),
            shuffled_finding=words.shuffled_finding(probe),
            cautions=words.cautions(probe),
            verdicts={s.name: words.verdict(s, probe) for s in probe.strategies},
            told=words.told(probe),
            alike=words.alike(probe),
            board=table,
            drawings=drawings,
            columns=max((drawing.count for drawing in drawings), default=0),
            first_drawn=next((place for place, r in enumerate(probe.rollouts) if any(r.wrong)), 0),
            floor=_floor(table),
            column_groups=[place for place, group in enumerate(table.groups) for _ in group.columns],
            decimals=decimals,
            files=files,
            **_quality(probe),
            **_update(probe),
            **_noise(probe),
        )
    )


def _percent(value: float) -> str:
    return f"{value:.2f}%"


def _floor(table: Board) -> list[tuple[str, Cell]]:
    """The noise floor's numbers with their headings."""
    columns = [column for group in table.groups for column in group.columns]
    return [(c.heading, cell) for c, cell in zip(columns, table.floor, strict=False) if not math.isnan(cell.value)]


def _quality(probe: Probe) -> dict[str, Any]:
    """The correlation of each strategy as a bar on one scale, with uniform and the noise floor as lines across it."""
    figures = {s.name: s.figures.get(words.MEASURE, NOTHING) for s in probe.strategies}
    floor = probe.noise_floor.get(words.MEASURE, NOTHING)
    scale = scale_of([*figures.values(), floor], most_ticks=6)
    if scale is None:
        return {"quality": None}
    marks = {"uniform": bar(figures.get("uniform", NOTHING), scale), "floor": bar(floor, scale)}
    bars = {name: bar(figure, scale) for name, figure in figures.items()}
    return {"quality": {"scale": scale, "bars": bars, "figures": figures, "marks": marks}}


def _update(probe: Probe) -> dict[str, Any]:
    """The change of log-probability by class of token, as bars on one scale."""
    keys = [key for key in CLASSES if any(f"update/{key}" in s.figures for s in probe.strategies)]
    figures = {s.name: [s.figures.get(f"update/{key}", NOTHING) for key in keys] for s in probe.strategies}
    every = [figure for row in figures.values() for figure in row]
    scale = scale_of(every, most_ticks=3)
    if scale is None:
        return {"update": None}
    digits = decimals(figure.value for figure in every)
    rows = {
        name: [(bar(f, scale), written(f.value, digits, signed=True)) for f in row] for name, row in figures.items()
    }
    return {"update": {"scale": scale, "classes": [CLASSES[key] for key in keys], "rows": rows}}


def _noise(probe: Probe) -> dict[str, Any]:
    """For each kind of noise its sweeps, each with a chart (where drawn), where it meets uniform, and its numbers."""
    places = place_of(probe)
    noises: dict[str, list[dict[str, Any]]] = {}
    for number, sweep in enumerate(sweeps(probe)):
        met = words.meetings(sweep, probe)
        digits = digits_of(sweep.key, (figure.value for curve in sweep.curves.values() for figure in curve))
        noises.setdefault(sweep.noise, []).append(
            {
                "sweep": sweep,
                "chart": noise_chart(number, sweep, places),
                "met": met,
                "words": words.crossings(sweep, met),
                "digits": digits,
            }
        )
    return {"noises": noises}
