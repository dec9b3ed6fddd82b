"""Write the report of an ablation: report.html, its tables as CSV, metrics.parquet and figures/*.svg."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...verifiers import InputError
from . import charts, costs, maps, notes
from .costs import axes, equal_cost, equal_cost_rows
from .curves import window
from .figures import standalone
from .load import Ablation, load_ablation
from .outcomes import ALARMS, OUTCOMES
from .page import page_environment, replacing, signed, write_whole
from .rollouts import exhibit
from .stability import COLUMNS, Stability, area_columns, setting_text, stability, stability_rows
from .summary import StrategySummary, Summary, summarise, summary_rows

__all__ = ["build_report", "page_environment", "write_whole"]

PHASES = (*costs.TRAINING, "eval")
CREDIT_SHAPE = (
    ("credit/abs_mean", "mean |A|"),
    ("credit/nonzero_tokens", "tokens with credit"),
    ("credit/sign_flips", "sign flips"),
    ("credit/mass_on_errors", "mass on errors"),
    ("credit/mass_on_right_steps", "mass on right steps"),
)


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
    summary, found, at_cost = summarise(ablation), stability(ablation), equal_cost(ablation)
    curves, versus, panels, by_cost = (
        charts.learning_curves(summary),
        charts.against_baseline(summary),
        charts.stability(summary),
        charts.against_cost(summary, axes(ablation.cells)),
    )
    try:
        (folder / "figures").mkdir(exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder}: cannot write the report there ({problem.strerror}); free the place") from problem
    for chart in (*curves, *versus, *panels, *by_cost):
        write_whole(folder / "figures" / f"{chart.name}.svg", standalone(chart.svg, chart.heading))
    _write_tables(folder, summary, found, at_cost)
    with replacing(folder / "metrics.parquet") as path:
        _write_metrics(ablation, path)
    page = page_environment().get_template("template.html.j2").render(
        summary=summary,
        ablation=ablation,
        curves=curves,
        versus=versus,
        panels=panels,
        by_cost=by_cost,
        at_cost=at_cost,
        exhibition=exhibit(ablation),
        **_words(summary),
        **_where(summary, found),
        **_tables(summary),
    )  # fmt: skip
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def _write_tables(folder: Path, summary: Summary, found: Stability | None, at_cost: Sequence[costs.EqualCost]) -> None:
    rows: list[dict[str, Any]] = list(summary_rows(summary))
    if found is not None:
        areas = {region.strategy: area_columns(region) for region in found.regions}
        rows = [row | areas[str(row["strategy"])] for row in rows]
        columns = ("strategy", *summary.ablation.settings, *COLUMNS)
        write_whole(folder / "stability.csv", _csv(columns, stability_rows(found)))
    write_whole(folder / "summary.csv", _csv(list(rows[0]) if rows else [], rows))
    write_whole(folder / "equal_cost.csv", _csv(costs.COLUMNS, equal_cost_rows(at_cost)))


def _where(summary: Summary, found: Stability | None) -> dict[str, Any]:
    """What the page says of the grid of settings, if there is one, and of the alarms."""
    cells = summary.ablation.cells
    told = {
        "alarm_heads": list(ALARMS.values()),
        "alarm_rows": maps.alarm_table(cells, summary.ablation.strategies),
        "found": found,
        "maps": [],
    }
    if found is None:
        return told
    return told | {
        "kinds": OUTCOMES,
        "maps": [maps.draw_map(region, found.ablation) for region in found.regions],
        "where_headline": maps.stability_headline(found, notes.ceilings(summary)),
        "where_remarks": maps.remarks(found),
        "where_rule": maps.rule_sentence(found.ablation),
        "reference": setting_text(found.ablation.reference),
    }


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
        "left_out": sum(not cell.counts for cell in ablation.grid),
        "failed": any(cell.state == "failed" for cell in ablation.grid),
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
        "ledger": {
            s.name: [s.verifier_seconds, s.spent("cost/forwards"), s.spent("cost/forward_tokens")] for s in every
        },
        "has_forward_tokens": "cost/forward_tokens" in measured,
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
    ticks = [(signed(tick, 2) if tick else "0", place(tick)) for tick in _ticks(low, high)]
    return {"bars": bars, "scale": {"zero": place(0.0), "ticks": ticks}}


def _ticks(low: float, high: float) -> list[float]:
    """Round values between low and high, zero among them, three to six of them.

    >>> _ticks(-0.04, 0.26)
    [0.0, 0.1, 0.2]
    """
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if (high - low) / step <= 5 or step == 1.0)
    return [round(step * k, 2) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def _write_metrics(ablation: Ablation, path: Path) -> None:
    """All rows of all cells, also of those that do not count, with strategy, settings, seed and state before them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(cell, row) for cell in ablation.grid for row in cell.metrics]
    first = ("step", "tokens", "seconds")
    keys = [*first, *sorted({key for _, row in rows for key in row} - set(first))]
    columns: dict[str, Any] = {
        "strategy": pa.array([cell.strategy for cell, _ in rows], pa.string()),
        **{key: pa.array([str(cell.setting[key]) for cell, _ in rows], pa.string()) for key in ablation.settings},
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
