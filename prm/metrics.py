"""How well predicted probabilities tell right steps from wrong ones, step by step.

A prediction is the probability that a step is right; the *error* class is the positive one wherever a measure needs
one. A measure that has no value for the data at hand (one class only) is NaN with a reason, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..verifiers import InputError
from .reliability import BINS, RIGHT, calibration_bins, expected_calibration_error
from .steps import StepExample

__all__ = [
    "MEASURES",
    "FlatSteps",
    "Measure",
    "PositionRow",
    "Predictions",
    "accuracy",
    "balanced_accuracy",
    "brier",
    "by_position",
    "error_average_precision",
    "error_f1",
    "flatten_steps",
    "min_at_last_rate",
    "min_at_last_step",
    "prm_score",
    "right_f1",
    "roc_auc",
    "step_measures",
]

# For each example the probability of "right" for each step; None where a step was not scored.
Predictions = Sequence[Sequence[float | None]]

# The order of every table and of every vector of measures.
MEASURES = (
    *("roc_auc", "error_average_precision", "error_f1", "prm_score", "balanced_accuracy", "accuracy"),
    *("brier", "ece_width", "ece_mass"),
)


class Measure(NamedTuple):
    """A number, or NaN and why there is none."""

    value: float
    reason: str = ""


class PositionRow(NamedTuple):
    """The labelled steps at one place in their solutions; ``position`` counts from 0."""

    position: int
    and_later: bool
    steps: int
    wrong: int
    roc_auc: float
    error_f1: float
    brier: float


@dataclass(frozen=True, eq=False)
class FlatSteps:
    """The N steps that have both a label and a score, one after the other.

    Args:
        labels: (N,) probability of "right" as labelled, 0 and 1 for hard labels.
        probabilities: (N,) as predicted.
        positions: (N,) place of the step in its solution, from 0.
        problems: (N,) number of its problem, from 0 up to ``problem_count``, which counts problems without steps too.
        unlabelled: steps left out because nobody knows whether they are right.
        unscored: labelled steps left out because the predictor gave no score.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    positions: np.ndarray
    problems: np.ndarray
    problem_count: int
    unlabelled: int
    unscored: int

    @property
    def right(self) -> np.ndarray:
        """(N,) labels cut at .5: True is right."""
        return self.labels >= RIGHT

    @property
    def soft(self) -> int:
        """Steps whose label lies between 0 and 1 and had to be cut."""
        return int(np.sum((self.labels > 0) & (self.labels < 1)))

    def where(self, chosen: np.ndarray) -> FlatSteps:
        """The steps of a boolean mask (N,)."""
        columns = (self.labels, self.probabilities, self.positions, self.problems)
        labels, probabilities, positions, problems = (column[chosen] for column in columns)
        return replace(self, labels=labels, probabilities=probabilities, positions=positions, problems=problems)


def flatten_steps(examples: Sequence[StepExample], predictions: Predictions, *, name: str = "predictions") -> FlatSteps:
    """Line up labels and predictions; steps without a label, or without a score, are counted and left out.

    Args:
        examples: E solutions.
        predictions: for each of them one probability a step, or None.
        name: of the predictor, for errors.

    Raises:
        InputError: numbers of examples or steps differ, or a score is no probability; it names the row.

    >>> example = StepExample("", "a b", ((0, 1), (2, 3)), (1.0, None), "p")
    >>> steps = flatten_steps([example], [[0.9, 0.2]])
    >>> steps.probabilities.tolist(), steps.unlabelled
    ([0.9], 1)
    """
    if len(examples) != len(predictions):
        raise InputError(f"{name}: {len(predictions)} rows for {len(examples)} examples; give one for each")
    numbers: dict[str, int] = {}
    rows: list[tuple[float, float, int, int]] = []
    unlabelled = unscored = 0
    for row, (example, scores) in enumerate(zip(examples, predictions, strict=True)):
        if len(scores) != len(example.labels):
            raise InputError(
                f"{name}, row {row}: {len(scores)} scores for {len(example.labels)} steps; give one a step"
            )
        problem = numbers.setdefault(example.problem_id, len(numbers))
        for place, (label, score) in enumerate(zip(example.labels, scores, strict=True)):
            if score is not None and not 0 <= score <= 1:  # NaN fails too
                raise InputError(f"{name}, row {row}, step {place}: {score} is no probability; give 0 to 1, or None")
            if label is None:
                unlabelled += 1
            elif score is None:
                unscored += 1
            else:
                rows.append((label, score, place, problem))
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 4)
    places, problems = table[:, 2].astype(np.int64), table[:, 3].astype(np.int64)
    return FlatSteps(table[:, 0], table[:, 1], places, problems, len(numbers), unlabelled, unscored)


def roc_auc(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Chance that a right step scores above a wrong one, ties counted half; NaN where one class is missing.

    >>> roc_auc(np.array([1, 1, 0, 0]), np.array([0.9, 0.4, 0.6, 0.1]))
    0.75
    """
    from sklearn.metrics import roc_auc_score

    right = labels >= RIGHT
    return float(roc_auc_score(right, probabilities)) if _both(right) else math.nan


def error_average_precision(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Average precision of finding *wrong* steps by low probability; its base rate is the share of wrong steps.

    >>> error_average_precision(np.array([1, 0, 1, 0]), np.array([0.9, 0.1, 0.3, 0.4]))
    0.8333333333333333
    """
    from sklearn.metrics import average_precision_score

    wrong = labels < RIGHT
    return float(average_precision_score(wrong, -probabilities)) if _both(wrong) else math.nan


def error_f1(labels: np.ndarray, probabilities: np.ndarray, threshold: float = 0.5) -> float:
    """F1 of the error class, a step being called wrong where its probability is *below* the threshold.

    NaN where no step is wrong: there is nothing to be found.

    >>> error_f1(np.array([1] * 95 + [0] * 5), np.ones(100))
    0.0
    """
    return _f1(labels < RIGHT, probabilities < threshold)


def right_f1(labels: np.ndarray, probabilities: np.ndarray, threshold: float = 0.5) -> float:
    """F1 of the right steps; NaN where there are none."""
    return _f1(labels >= RIGHT, probabilities >= threshold)


def prm_score(
    labels: np.ndarray, probabilities: np.ndarray, threshold: float = 0.5, *, error_weight: float = 0.5
) -> float:
    """``w F1(error) + (1-w) F1(right)``: PRMBench's PRMScore (Song et al. 2025, arXiv:2501.03124), w = .5.

    >>> round(prm_score(np.array([1, 1, 0, 0]), np.array([0.9, 0.4, 0.6, 0.1])), 9)
    0.5
    """
    wrong, right = error_f1(labels, probabilities, threshold), right_f1(labels, probabilities, threshold)
    return error_weight * wrong + (1 - error_weight) * right


def balanced_accuracy(labels: np.ndarray, probabilities: np.ndarray, threshold: float = 0.5) -> float:
    """Mean of the accuracies on right and on wrong steps: .5 for any constant answer.

    >>> balanced_accuracy(np.array([1] * 95 + [0] * 5), np.ones(100))
    0.5
    """
    from sklearn.metrics import balanced_accuracy_score

    right = labels >= RIGHT
    return float(balanced_accuracy_score(right, probabilities >= threshold)) if _both(right) else math.nan


def accuracy(labels: np.ndarray, probabilities: np.ndarray, threshold: float = 0.5) -> float:
    """Share of steps judged as labelled. Most steps are right, so a constant does well here."""
    return float(np.mean((labels >= RIGHT) == (probabilities >= threshold))) if len(labels) else math.nan


def brier(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean squared distance of probability and label, soft labels as they are (Brier 1950); 0 is best.

    >>> round(brier(np.array([1.0, 0.7]), np.array([0.8, 0.5])), 9)
    0.04
    """
    return float(np.mean((probabilities - labels) ** 2)) if len(labels) else math.nan


def step_measures(steps: FlatSteps, *, threshold: float = 0.5, bins: int = BINS) -> dict[str, Measure]:
    """Every measure of :data:`MEASURES`, each a value or a reason why there is none."""
    y, p = steps.labels, steps.probabilities
    values = {
        "roc_auc": roc_auc(y, p),
        "error_average_precision": error_average_precision(y, p),
        "error_f1": error_f1(y, p, threshold),
        "prm_score": prm_score(y, p, threshold),
        "balanced_accuracy": balanced_accuracy(y, p, threshold),
        "accuracy": accuracy(y, p, threshold),
        "brier": brier(y, p),
        "ece_width": expected_calibration_error(calibration_bins(y, p, "width", bins)),
        "ece_mass": expected_calibration_error(calibration_bins(y, p, "mass", bins)),
    }
    reason = _why(steps)
    return {name: Measure(values[name], reason if math.isnan(values[name]) else "") for name in MEASURES}


def by_position(steps: FlatSteps, *, threshold: float = 0.5, most: int = 10) -> list[PositionRow]:
    """The measures at each place in the solution; place ``most`` and all later ones share the last row."""
    rows = []
    for place in range(most + 1):
        later = place == most
        here = steps.where(steps.positions >= most if later else steps.positions == place)
        if len(here.labels):
            y, p = here.labels, here.probabilities
            wrong = int(np.sum(~here.right))
            rows.append(PositionRow(place, later, len(y), wrong, roc_auc(y, p), error_f1(y, p, threshold), brier(y, p)))
    return rows


def min_at_last_step(scores: Sequence[float | None]) -> bool | None:
    """Whether the lowest score is the last step's; None for one step, or where a step has no score.

    Of equal scores the *first* counts as the lowest, so a constant predictor is never said to look at the end only.

    >>> [min_at_last_step(s) for s in ([0.9, 0.2], [0.2, 0.2], [0.1], [0.3, None])]
    [True, False, None, None]
    """
    known = [score for score in scores if score is not None]
    if len(scores) < 2 or len(known) < len(scores):
        return None
    return known.index(min(known)) == len(known) - 1


def min_at_last_rate(predictions: Predictions) -> tuple[Measure, float]:
    """Share of solutions whose lowest score is their last step's, and what chance would give, ``mean(1/steps)``.

    A high rate says that a step model has become a judge of answers (Zhang et al. 2025, arXiv:2501.07301).
    Solutions of one step, and those with a step that has no score, are left out.

    >>> min_at_last_rate([[0.9, 0.2], [0.1, 0.5], [0.3]])
    (Measure(value=0.5, reason=''), 0.5)
    """
    told = [(at_last, len(scores)) for scores in predictions if (at_last := min_at_last_step(scores)) is not None]
    if not told:
        return Measure(math.nan, "no solution has two scored steps"), math.nan
    return Measure(sum(last for last, _ in told) / len(told)), sum(1 / count for _, count in told) / len(told)


def _f1(positive: np.ndarray, said: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(positive, said, zero_division=0.0)) if positive.any() else math.nan


def _both(classes: np.ndarray) -> bool:
    return bool(classes.any() and not classes.all())


def _why(steps: FlatSteps) -> str:
    if not len(steps.labels):
        return "no step has both a label and a score"
    if _both(steps.right):
        return ""
    return "no labelled step is wrong" if steps.right.all() else "no labelled step is right"
