"""Finding the first wrong step of a solution: ProcessBench F1 (Zheng et al. 2024, arXiv:2412.06559) and its kin.

A solution's label, and a prediction of it, is the index of the earliest wrong step from 0, or -1 where none is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .intervals import Statistic
from .reliability import RIGHT

__all__ = [
    "FirstErrorScore",
    "Threshold",
    "cross_fitted_first_errors",
    "first_error_label",
    "first_error_prediction",
    "first_error_scores",
    "first_error_statistic",
    "harmonic_mean",
    "mean_f1",
    "scores_by_subset",
    "tune_threshold",
]


class FirstErrorScore(NamedTuple):
    """ProcessBench's figures of one subset.

    Args:
        error_accuracy: percent of the erroneous solutions whose first error was named exactly.
        correct_accuracy: percent of the correct solutions in which no error was named.
        f1: their harmonic mean in percent; NaN where either kind of solution is missing.
        errors, correct: how many erroneous and correct solutions there are.
        match, less, more, fail: shares of the erroneous solutions, adding up to 1. The named error is the true one;
            or lies before it (the prefix taken for right is too short); or after it (that prefix holds an error); or
            none was named at all.
    """

    error_accuracy: float
    correct_accuracy: float
    f1: float
    errors: int
    correct: int
    match: float
    less: float
    more: float
    fail: float


class Threshold(NamedTuple):
    """A step is called wrong below ``value``; ``f1`` in percent is what it reached where it was tuned."""

    value: float
    f1: float


def first_error_label(labels: Sequence[float | None]) -> int | None:
    """The true first error; None where an unknown step may be wrong before it, or may be the only wrong one.

    >>> first_error_label([1, 0.2, None]), first_error_label([1, 1]), first_error_label([1, None, 0])
    (1, -1, None)
    """
    for step, label in enumerate(labels):
        if label is None:
            return None
        if label < RIGHT:
            return step
    return -1


def first_error_prediction(scores: Sequence[float | None], threshold: float = 0.5) -> int:
    """The first step whose probability is below the threshold, else -1; a step without a score is not called wrong.

    >>> first_error_prediction([0.9, 0.4, 0.1]), first_error_prediction([0.9, 0.5])
    (1, -1)
    """
    return next((step for step, score in enumerate(scores) if score is not None and score < threshold), -1)


def harmonic_mean(first: float, second: float) -> float:
    """``2ab/(a+b)``, and 0 where both are 0.

    >>> round(harmonic_mean(0.5, 0.9), 4), harmonic_mean(0.0, 0.0)
    (0.6429, 0.0)
    """
    return 2 * first * second / (first + second) if first + second else 0.0


def first_error_scores(labels: Sequence[int], predictions: Sequence[int]) -> FirstErrorScore:
    """ProcessBench's accuracies and F1 in percent, and where the misses lie.

    ``100 mean(prediction = label | label != -1)`` and ``100 mean(prediction = -1 | label = -1)``.

    Args:
        labels, predictions: (E,) index of the first wrong step, or -1.

    >>> first_error_scores([0, 2, 1, -1], [0, 1, -1, -1])[:3]
    (33.33333333333333, 100.0, 50.0)
    """
    wrong = [(label, said) for label, said in zip(labels, predictions, strict=True) if label != -1]
    right = [said for label, said in zip(labels, predictions, strict=True) if label == -1]

    def share(hits: int, of: int) -> float:
        return hits / of if of else math.nan

    match = share(sum(label == said for label, said in wrong), len(wrong))
    passed = share(sum(said == -1 for said in right), len(right))
    return FirstErrorScore(
        100 * match,
        100 * passed,
        100 * harmonic_mean(match, passed),
        len(wrong),
        len(right),
        match,
        less=share(sum(-1 < said < label for label, said in wrong), len(wrong)),
        more=share(sum(said > label for label, said in wrong), len(wrong)),
        fail=share(sum(said == -1 for _, said in wrong), len(wrong)),
    )


def scores_by_subset(
    labels: Sequence[int], predictions: Sequence[int], subsets: Sequence[str]
) -> dict[str, FirstErrorScore]:
    """:func:`first_error_scores` of each subset, in order of first appearance."""
    rows = list(zip(labels, predictions, subsets, strict=True))
    chosen = {name: [(label, said) for label, said, of in rows if of == name] for name in dict.fromkeys(subsets)}
    return {name: first_error_scores(*zip(*pairs, strict=True)) for name, pairs in chosen.items()}


def mean_f1(scores: Mapping[str, FirstErrorScore]) -> float:
    """Unweighted mean of the subsets' F1, as ProcessBench reports it; NaN where one of them has no F1."""
    return math.fsum(score.f1 for score in scores.values()) / len(scores) if scores else math.nan


def tune_threshold(labels: Sequence[int], scores: Sequence[Sequence[float | None]]) -> Threshold:
    """The threshold of the best F1 on these solutions: use it on *other* solutions.

    Exact, in ``n log n``. A solution of label k is met for thresholds in ``(score_k, min(score_0..k-1)]``, a correct
    one for those up to its lowest score; the counts change only there. The middle of the best range is taken, and of
    equally good ranges the one nearest .5.

    >>> tune_threshold([1, -1], [[0.75, 0.25], [0.75, 0.5]])
    Threshold(value=0.375, f1=100.0)
    """
    met: list[tuple[float, float]] = []
    passed: list[float] = []
    for label, row in zip(labels, scores, strict=True):
        known = [1.0 if score is None else score for score in row]
        if label == -1:
            passed.append(min(known, default=1.0))
        elif known[label] < (before := min(known[:label], default=1.0)):
            met.append((known[label], before))
    errors = sum(label != -1 for label in labels)
    if not errors or not passed:
        return Threshold(0.5, math.nan)
    edges = np.unique(np.array([0.0, 1.0, *passed, *(end for pair in met for end in pair)]))
    middles = (edges[:-1] + edges[1:]) / 2
    starts, stops = np.sort([start for start, _ in met]), np.sort([stop for _, stop in met])
    hits = np.searchsorted(starts, middles) - np.searchsorted(stops, middles)
    passes = len(passed) - np.searchsorted(np.sort(passed), middles)
    f1 = np.array([100 * harmonic_mean(h / errors, q / len(passed)) for h, q in zip(hits, passes, strict=True)])
    best = min(range(len(f1)), key=lambda k: (-f1[k], abs(middles[k] - 0.5)))
    return Threshold(float(middles[best]), float(f1[best]))


def cross_fitted_first_errors(
    labels: Sequence[int], scores: Sequence[Sequence[float | None]], problems: Sequence[str], *, folds: int = 5
) -> tuple[list[int], list[float]]:
    """Predictions of the first error, each with a threshold tuned on the other folds' problems; and the thresholds.

    For data without a held-out part: no solution has a say in the threshold that judges it or its problem's others.

    Args:
        labels, scores, problems: (E,) solutions; problems never span two folds.
    """
    numbers = {problem: number for number, problem in enumerate(dict.fromkeys(problems))}
    fold = [numbers[problem] % min(folds, max(1, len(numbers))) for problem in problems]
    thresholds = []
    for held_out in range(max(fold, default=-1) + 1):
        rest = [row for row, of in enumerate(fold) if of != held_out]
        thresholds.append(tune_threshold([labels[row] for row in rest], [scores[row] for row in rest]).value)
    return [first_error_prediction(row, thresholds[of]) for row, of in zip(scores, fold, strict=True)], thresholds


def first_error_statistic(
    labels: Sequence[int], predictions: Sequence[int], subsets: Sequence[str], problems: np.ndarray, problem_count: int
) -> Statistic:
    """F1 of each subset and last their unweighted mean, in percent, as a function of the problems' weights.

    Args:
        labels, predictions, subsets: (E,) solutions.
        problems: (E,) number of each one's problem, below ``problem_count``.
    """
    names = list(dict.fromkeys(subsets))
    counts = np.zeros((problem_count, len(names), 4))
    for label, said, subset, problem in zip(labels, predictions, subsets, problems, strict=True):
        kind = 2 if label == -1 else 0
        counts[problem, names.index(subset), kind] += 1
        counts[problem, names.index(subset), kind + 1] += label == said
    flat = counts.reshape(problem_count, 4 * len(names))

    def statistic(weights: np.ndarray) -> np.ndarray:
        errors, met, correct, passed = (weights @ flat).reshape(len(names), 4).T
        with np.errstate(invalid="ignore", divide="ignore"):
            pairs = zip(met / errors, passed / correct, strict=True)
            f1 = np.array([100 * harmonic_mean(float(a), float(b)) for a, b in pairs])
        return np.append(f1, f1.mean() if len(f1) else math.nan)

    return statistic
