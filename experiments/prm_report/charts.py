"""The charts of the report: reliability, ROC, precision and recall of the error class, best of N."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...prm.best_of_n import BestOfN
from ..report.charts import Chart
from ..report.curves import Line
from ..report.figures import draw, look, paint_lines
from .evaluation import Evaluation, Predictor

__all__ = ["SHOWN_RULES", "best_of_n_chart", "quality_charts"]

MOST_POINTS = 200
WIDTH, HEIGHT, PAD = 290, 260, (30, 32, 8, 20)
# rule -> place among the colours
SHOWN_RULES = {
    "random": 0,
    "majority": 1,
    "best_min": 2,
    "best_prod": 3,
    "best_mean": 4,
    "best_last": 5,
    "weighted_min": 6,
    "oracle": 7,
}


def quality_charts(evaluation: Evaluation) -> list[Chart]:
    """Reliability diagram, ROC curve and precision-recall curve of all predictors; none where one class is missing."""
    predictors = [p for p in evaluation.predictors if len(p.steps.labels)]
    charts = [_reliability(predictors)] if predictors else []
    ranked = [p for p in predictors if p.steps.right.any() and not p.steps.right.all()]
    if ranked:
        charts += [_roc(ranked), _precision_recall(ranked, evaluation.counts.wrong / evaluation.counts.labelled)]
    return charts


def best_of_n_chart(best: BestOfN) -> Chart | None:
    """Accuracy of the picks by N; none where there is no problem or only one N."""
    sizes = [n for n, problems in zip(best.sizes, best.problems, strict=True) if problems]
    if len(sizes) < 2:
        return None
    lines = [Line(index, rule, sizes, best.accuracy[rule][: len(sizes)]) for rule, index in SHOWN_RULES.items()]

    def paint(axes: Any) -> None:
        paint_lines(axes, lines)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.minorticks_off()
        axes.set_xlabel("answers to pick from", labelpad=3)
        axes.margins(x=0.03)

    title = "Accuracy of the picked answer by number of answers, one line for each rule"
    return Chart("best_of_n", "Best of N", draw("best_of_n", title, 420, 250, paint, pad=(34, 32, 8, 8)))


def _reliability(predictors: Sequence[Predictor]) -> Chart:
    lines = []
    for p in predictors:
        filled = [b for b in p.bins if b.steps]
        lines.append(Line(p.index, p.name, [b.probability for b in filled], [b.right for b in filled]))
    first = predictors[0]
    total = sum(b.steps for b in first.bins)

    def paint(axes: Any) -> None:
        for b in first.bins:  # how many steps stand behind each point
            height, colour = 0.25 * b.steps / total, look(first.index).placeholder
            axes.bar((b.low + b.high) / 2, height, 0.9 * (b.high - b.low), color=colour, alpha=0.18, zorder=1)
        _diagonal(axes)
        paint_lines(axes, lines, width=1.4)
        _unit_square(axes, "probability of “right”", "share that is right")

    title = "Reliability: share of right steps by predicted probability, one line for each predictor"
    note = f"bars: share of the steps of {first.name}, a quarter of the height for all of them"
    return Chart("reliability", "Reliability", draw("reliability", title, WIDTH, HEIGHT, paint, pad=PAD), note=note)


def _roc(predictors: Sequence[Predictor]) -> Chart:
    from sklearn.metrics import roc_curve

    def curve(p: Predictor) -> tuple[np.ndarray, np.ndarray]:
        alarms, found, _ = roc_curve(~p.steps.right, -p.steps.probabilities)
        return alarms, found

    def paint(axes: Any) -> None:
        _diagonal(axes)
        paint_lines(axes, _lines(predictors, curve), markers=False, width=1.5)
        _unit_square(axes, "right steps called wrong", "wrong steps found")

    title = "ROC curve: wrong steps found by right steps called wrong, one line for each predictor"
    return Chart("roc", "ROC", draw("roc", title, WIDTH, HEIGHT, paint, pad=PAD))


def _precision_recall(predictors: Sequence[Predictor], base_rate: float) -> Chart:
    from sklearn.metrics import precision_recall_curve

    def curve(p: Predictor) -> tuple[np.ndarray, np.ndarray]:
        precision, recall, _ = precision_recall_curve(~p.steps.right, -p.steps.probabilities)
        # Steps, whose area is the average precision; the last point, of no alarm at all, is no measurement.
        x, y = np.repeat(recall[-2::-1], 2), np.repeat(precision[-2::-1], 2)
        return np.concatenate([[0.0], x[:-1]]), y

    def paint(axes: Any) -> None:
        axes.axhline(base_rate, color="#020202", linewidth=0.8, dashes=(1, 2.5), zorder=1)
        paint_lines(axes, _lines(predictors, curve), markers=False, width=1.5)
        _unit_square(axes, "wrong steps found (recall)", "alarms that are true (precision)")

    title = "Precision by recall of the wrong steps, one line for each predictor"
    note = f"dotted: share of wrong steps, {base_rate:.3f}"
    heading = "Precision and recall of wrong steps"
    return Chart("precision_recall", heading, draw("precision_recall", title, WIDTH, HEIGHT, paint, pad=PAD), note=note)


def _lines(predictors: Sequence[Predictor], curve: Callable[[Predictor], tuple[np.ndarray, np.ndarray]]) -> list[Line]:
    lines = []
    for p in predictors:
        x, y = _thinned(*curve(p))
        lines.append(Line(p.index, p.name, x, y))
    return lines


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """At most some hundred points of a curve, evenly along its length, its ends among them."""
    if len(x) > MOST_POINTS:
        along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
        chosen = np.unique(np.searchsorted(along, np.linspace(0.0, along[-1], MOST_POINTS)))
        chosen = np.union1d(chosen, [0, len(x) - 1])
        x, y = x[chosen], y[chosen]
    return x.tolist(), y.tolist()


def _diagonal(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], color="#020202", linewidth=0.8, dashes=(1, 2.5), zorder=1)


def _unit_square(axes: Any, x: str, y: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(-0.01, 1.01)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(x, labelpad=3)
    axes.annotate(y, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", color="#020202")
