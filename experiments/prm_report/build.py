"""Write ``prm_report.html`` and, beside it, the files that its numbers can be computed from again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...prm.best_of_n import RULES, BestOfN
from ...prm.metrics import PositionRow
from ...verifiers import InputError
from ..report.build import page_environment, write_whole
from . import words
from .charts import SHOWN_RULES, best_of_n_chart, quality_charts
from .evaluation import Evaluation
from .records import evaluation_record, score_lines
from .solutions import show_solutions

__all__ = ["build_prm_report"]

_HERE = Path(__file__).parent
# measure -> heading, whether higher is better
HEADINGS = {
    "roc_auc": ("ROC-AUC", True),
    "error_average_precision": ("error AP", True),
    "error_f1": ("error F1", True),
    "prm_score": ("PRMScore", True),
    "balanced_accuracy": ("balanced accuracy", True),
    "accuracy": ("accuracy", True),
    "brier": ("Brier", False),
    "ece_width": ("ECE, equal width", False),
    "ece_mass": ("ECE, equal mass", False),
    "first_error_f1": ("ProcessBench F1", True),
    "first_error_f1_tuned": ("the same, tuned", True),
}
RANKING = ("roc_auc", "error_average_precision", "error_f1", "prm_score", "balanced_accuracy", "accuracy")
CALIBRATION = ("brier", "ece_width", "ece_mass")
DIFFERENCES = ("roc_auc", "error_average_precision", "error_f1", "brier", "first_error_f1", "first_error_f1_tuned")
RULE_NAMES = {
    "oracle": "oracle (any of them right)",
    "majority": "majority vote",
    "random": "random pick",
    **{f"best_{how}": f"highest {how}" for how in ("min", "prod", "mean", "last")},
    **{f"weighted_{how}": f"vote weighted by {how}" for how in ("min", "prod", "mean", "last")},
}


def build_prm_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page, and into its folder ``scores.jsonl`` and ``evaluation.json``.

    Args:
        evaluation: of :func:`~.evaluate.evaluate_steps`.
        path: of the page, as a rule ``.../prm_report.html``. Each file appears whole or not at all.

    Raises:
        InputError: the folder cannot be written to.
    """
    page = _page(evaluation)
    record = json.dumps(evaluation_record(evaluation), indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.with_name("scores.jsonl"), score_lines(evaluation))
        write_whole(path.with_name("evaluation.json"), record + "\n")
        write_whole(path, page)
    except OSError as problem:
        raise InputError(f"{path}: cannot write the report there ({problem.strerror}); free the place") from problem
    return path


def _page(evaluation: Evaluation) -> str:
    from jinja2 import FileSystemLoader
    from markupsafe import Markup

    environment = page_environment()
    environment.loader = FileSystemLoader(_HERE)
    environment.globals["page_style"] = Markup((_HERE / "page.css").read_text("utf-8"))
    best = evaluation.best_of_n
    return str(
        environment.get_template("page.html.j2").render(
            e=evaluation,
            headline=words.headline(evaluation),
            findings=words.findings(evaluation)[1:],
            cautions=words.cautions(evaluation),
            verdict=lambda d: words.verdict(evaluation, d.name, d.other),
            headings=HEADINGS,
            ranking=RANKING,
            calibration=CALIBRATION,
            compared=DIFFERENCES,
            charts=quality_charts(evaluation),
            positions=_positions(evaluation),
            first_errors=_first_errors(evaluation),
            best=_best_of_n(best) if best else None,
            best_chart=best_of_n_chart(best) if best else None,
            rule_colours=SHOWN_RULES,
            solutions=show_solutions(evaluation),
        )
    )


def _positions(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One row for each place: counts, then for each predictor its row there, or None."""
    found = [{row.position: row for row in p.positions} for p in evaluation.predictors]
    rows = []
    for place in sorted({place for rows in found for place in rows}):
        cells: list[PositionRow | None] = [by_place.get(place) for by_place in found]
        told = max((cell for cell in cells if cell), key=lambda cell: cell.steps)
        name = f"{place + 1}+" if told.and_later else str(place + 1)
        rows.append({"name": name, "steps": told.steps, "share": told.wrong / told.steps, "cells": cells})
    return rows


def _first_errors(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The two ways of choosing the threshold, each with its sentence and a row for each predictor."""
    if not evaluation.counts.first_errors:
        return []
    how = (
        f"tuned on {evaluation.tune_on}, which therefore flatters that subset"
        if evaluation.tune_on
        else "tuned on the other folds’ problems, five folds in turn"
    )
    return [
        {"name": name, "rows": rows, "subsets": list(rows[0][1].scores)}
        for name, rows in (
            (f"Threshold {evaluation.threshold:g} for all", [(p, p.fixed) for p in evaluation.predictors]),
            (f"Threshold {how}", [(p, p.tuned) for p in evaluation.predictors]),
        )
    ]


def _best_of_n(best: BestOfN) -> list[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    """For each rule its key, its name and, for each N, accuracy and interval."""
    return [
        (rule, RULE_NAMES[rule], [
            {"value": value, "interval": interval}
            for value, interval in zip(best.accuracy[rule], best.intervals[rule], strict=True)
        ])
        for rule in RULES
    ]  # fmt: skip
