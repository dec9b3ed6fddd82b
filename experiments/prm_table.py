"""The figures of reward models on the terminal, the baselines always beside them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prm_report import Evaluation

__all__ = ["draw_measures"]

COLUMNS = {
    "roc_auc": "ROC-AUC",
    "error_average_precision": "error AP",
    "error_f1": "error F1",
    "prm_score": "PRMScore",
    "brier": "Brier",
    "ece_width": "ECE",
}


def draw_measures(evaluation: Evaluation) -> None:
    """One row per model and baseline: step measures and ProcessBench F1, with intervals over problems.

    Args:
        evaluation: of :func:`apportion.experiments.prm_report.evaluate_steps`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    counts = evaluation.counts
    title = (
        f"{counts.solutions:,} solutions of {counts.problems:,} problems, {counts.labelled:,} labelled steps, "
        f"{counts.wrong:,} of them wrong"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in (*COLUMNS.values(), "ProcessBench F1"):
        table.add_column(heading, justify="right")
    for predictor in evaluation.predictors:
        cells = [_cell(predictor.measures[key].value, predictor.intervals[key]) for key in COLUMNS]
        first = predictor.fixed
        cells.append(_cell(first.mean_f1, first.mean_interval, digits=1))
        table.add_row(predictor.name, *cells, style="dim" if predictor.is_baseline else "")
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    best = evaluation.best_of_n
    if best is None:
        return
    table = Table(title=f"best of N, scored by {evaluation.predictors[0].name}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    for size, problems in zip(best.sizes, best.problems):
        table.add_column(f"N = {size}\n{problems:,} problems", justify="right")
    for rule, accuracy in best.accuracy.items():
        table.add_row(rule, *(f"{value:.3f}" for value in accuracy))
    console.print(table)


def _cell(value: float, interval: object, digits: int = 3) -> str:
    low, high = (getattr(interval, edge, math.nan) for edge in ("low", "high"))
    if math.isnan(value):
        return "–"
    if math.isnan(low):  # too few problems
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f}\n[dim]{low:.{digits}f}–{high:.{digits}f}[/dim]"
