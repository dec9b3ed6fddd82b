"""Write the report of an ablation: report.html, summary.csv, metrics.parquet and figures/*.svg."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...verifiers import InputError
from . import charts, notes
from .curves import window
from .figures import COLOURS, look, standalone
from .load import Ablation, load_ablation
from .rollouts import exhibit
from .summary import COLUMNS, StrategySummary, Summary, summarise, summary_rows

__all__ = ["build_report", "page_environment", "write_whole"]

PHASES = ("sample", "verify", "reference", "credit", "update", "eval")
CREDIT_SHAPE = (
    ("credit/abs_mean", "mean |A|"),
    ("credit/nonzero_tokens", "tokens with credit"),
    ("credit/sign_flips", "sign flips"),
    ("credit/mass_on_errors", "mass on errors"),
    ("credit/mass_on_right_steps", "mass on right steps"),
)
_HERE = Path(__file__).parent


def build_report(folder: Path) -> Path:
    """Build the report of a finished or running ablation from its folder alone.

    Args:
        folder: holds ``ablation.json`` and ``cells/``. All that is written goes there; each file appears whole or not
            at all.

    Returns:
        Path of ``report.html``.

    Raises:
        InputError: ``ablation.json`` is missing or broken, or the folder cannot be written to.
    """
    ablation = load_ablation(folder)
    summary = summarise(ablation)
    curves, versus, panels = (
        charts.learning_curves(summary),
        charts.against_baseline(summary),
        charts.stability(summary),
    )
    try:
        (folder / "figures").mkdir(exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder}: cannot write the report there ({problem.strerror}); free the place") from problem
    for chart in (*curves, *versus, *panels):
        write_whole(folder / "figures" / f"{chart.name}.svg", standalone(chart.svg, chart.heading))
    write_whole(folder / "summary.csv", _csv(summary))
    with _replacing(folder / "metrics.parquet") as path:
        _write_metrics(ablation, path)
    page = page_environment().get_template("template.html.j2").render(
        summary=summary,
        ablation=ablation,
        curves=curves,
        versus=versus,
        panels=panels,
        exhibition=exhibit(ablation),
        **_words(summary),
        **_tables(summary),
    )  # fmt: skip
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def _words(summary: Summary) -> dict[str, Any]:
    ablation = summary.ablation
    findings, cautions = notes.remarks(summary)
    return {
        "headline": notes.headline(summary),
        "interval_sentence": notes.interval_sentence(ablation),
        "power_sentence": notes.power_sentence(summary) if summary.others and summary.baseline else "",
        "findings": findings,
        "cautions": cautions,
        "ceilings": notes.ceilings(summary),
        "unfinished": notes.unfinished(ablation),
        "left_out": sum(not cell.counts for cell in ablation.cells),
        "failed": any(cell.state == "failed" for cell in ablation.cells),
        "retry": f"{ablation.command} ablate.retry_failed=true",
    }


def _tables(summary: Summary) -> dict[str, Any]:
    every = summary.strategies
    measured = {key for cell in summary.ablation.cells for row in cell.metrics for key in row}
    phases = [phase for phase in PHASES if f"cost/seconds_{phase}" in measured]
    seconds = {s.name: [_cell_mean(s, f"cost/seconds_{phase}", total=True) for phase in phases] for s in every}
    shape = {s.name: [_cell_mean(s, key) for key, _ in CREDIT_SHAPE] for s in every}
    return {
        "phases": phases,
        "phase_seconds": seconds,
        "forwards": {s.name: _cell_mean(s, "cost/forwards", total=True) for s in every},
        "shape_heads": [head for _, head in CREDIT_SHAPE],
        "shape": shape if any(not math.isnan(v) for row in shape.values() for v in row) else {},
        **_bars(summary),
        "window": window(max((len(c.metrics) for c in summary.ablation.cells), default=0)),
    }


def _cell_mean(strategy: StrategySummary, key: str, *, total: bool = False) -> float:
    """Mean over runs of a metric's mean over the run, or of its sum."""
    values = [cell.total(key) if total else cell.mean(key) for cell in strategy.counted]
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _bars(summary: Summary) -> dict[str, Any]:
    """Places in percent of each difference (dot), its interval (start, stop) and its seeds, on one scale with ticks."""
    compared = {s.name: s.against_baseline for s in summary.others if s.against_baseline and s.against_baseline.seeds}
    ends = [v for c in compared.values() for v in (*c.interval, *c.differences) if not math.isnan(v)]
    low, high = min(-0.01, *ends, 0.0), max(0.01, *ends, 0.0)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    bars = {
        name: {
            "dot": place(c.mean),
            "start": place(c.interval.low if c.interval.known else c.mean),
            "stop": place(c.interval.high if c.interval.known else c.mean),
            "seeds": [place(difference) for difference in c.differences],
        }
        for name, c in compared.items()
    }
    ticks = [(_signed(tick, 2) if tick else "0", place(tick)) for tick in _ticks(low, high)]
    return {"bars": bars, "scale": {"zero": place(0.0), "ticks": ticks}}


def _ticks(low: float, high: float) -> list[float]:
    """Round values between low and high, zero among them, three to six of them.

    >>> _ticks(-0.04, 0.26)
    [0.0, 0.1, 0.2]
    """
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if (high - low) / step <= 5 or step == 1.0)
    return [round(step * k, 2) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _csv(summary: Summary) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in summary_rows(summary):
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def _write_metrics(ablation: Ablation, path: Path) -> None:
    """All rows of all cells, also of those that do not count, with the columns strategy, seed and state before them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(cell, row) for cell in ablation.cells for row in cell.metrics]
    first = ("step", "tokens", "seconds")
    keys = [*first, *sorted({key for _, row in rows for key in row} - set(first))]
    columns: dict[str, Any] = {
        "strategy": pa.array([cell.strategy for cell, _ in rows], pa.string()),
        "seed": pa.array([cell.seed for cell, _ in rows], pa.int64()),
        "state": pa.array([cell.state for cell, _ in rows], pa.string()),
    }
    for key in keys:
        whole = key in ("step", "tokens")
        values = [row.get(key) for _, row in rows]
        columns[key] = pa.array(
            [None if v is None else int(v) for v in values] if whole else values, pa.int64() if whole else pa.float64()
        )
    pq.write_table(pa.table(columns), path, compression="zstd")


def page_environment() -> Any:
    """Where templates become pages: text is escaped, what is missing is an error, numbers have their filters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=_number, signed=_signed, p=_p, count=_count, duration=_duration, svg=Markup, listed=notes.listed
    )
    environment.globals.update(
        infinity=math.inf, look=look, palette=COLOURS, style=Markup((_HERE / "style.css").read_text("utf-8"))
    )
    return environment


def _number(value: float, digits: int = 3) -> str:
    """0.123; a dash where there is no number."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def _signed(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def _p(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "< .001" if value < 0.001 else "1" if value > 0.9995 else f"{value:.3f}".removeprefix("0")


def _count(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Seconds, or minutes and seconds.

    >>> _duration(8.31), _duration(125.0)
    ('8.3 s', '2 min 5 s')
    """
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that takes its place when all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    with _replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))  # JSON can hold halves of surrogate pairs
