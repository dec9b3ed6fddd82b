"""Logistic regression on features of steps: layer and penalty chosen, and judged, by folds grouped by problem."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..verifiers import InputError
from .features import StepFeatures
from .steps import StepExample

__all__ = [
    "FOLDS",
    "STRENGTHS",
    "LinearProbe",
    "OutOfFold",
    "as_predictions",
    "fit_probe",
    "grouped_folds",
    "out_of_fold",
    "step_columns",
]

STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
FOLDS = 5
_CONSTANT = 1e-7  # spread, relative to the mean, that is rounding only
_EDGE = 1e-7  # nearest to 0 and 1 of a constant answer, so that its log-odds are finite


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """``p = sigmoid(w h + v x + b)``: h the state of one layer at the step, x its place.

    Args:
        layer: of the model, 0 the embeddings.
        weights: (D,) w.
        place_weights: (P,) v, or (0,) where the place is not looked at.
        intercept: b.
        strength: C of the fit, the inverse of the penalty.
    """

    layer: int
    weights: np.ndarray
    place_weights: np.ndarray
    intercept: float
    strength: float

    def __call__(self, features: StepFeatures) -> np.ndarray:
        """(N,) probability that each step is right; NaN where the model did not read it."""
        odds = features.states[:, features.layers.index(self.layer)].astype(np.float64) @ self.weights
        if len(self.place_weights):
            odds = odds + features.places @ self.place_weights
        chances: np.ndarray = 0.5 * (1 + np.tanh((odds + self.intercept) / 2))
        return chances


@dataclass(frozen=True)
class OutOfFold:
    """Predictions for every step by probes that never saw its problem.

    Args:
        predictions: for each example the probability of "right" for each step; None where the model did not read it.
        probes: one for each fold.
    """

    predictions: list[list[float | None]]
    probes: tuple[LinearProbe, ...]


def fit_probe(
    features: StepFeatures,
    labels: np.ndarray,
    problems: np.ndarray,
    *,
    position: bool = False,
    strengths: Sequence[float] = STRENGTHS,
    folds: int = FOLDS,
) -> LinearProbe:
    """Logistic regression on standardised features; layer and strength have the least inner log loss.

    The inner folds are grouped by problem as the outer ones are. States and places are two blocks: every column has
    mean 0 and variance 1, divided by the number of columns of its block, so that hundreds of columns of one do not
    drown the few of the other in one penalty. A soft label counts as two steps, one of each class, weighted.

    Args:
        features: N steps.
        labels: (N,) probability of "right"; NaN where nobody knows.
        problems: (N,) number of the problem.
        position: look at the place as well.
        strengths: values of C to choose from; of equals, the smallest.
        folds: inner ones.
    """
    known = features.known & ~np.isnan(labels)
    if not known.any():
        raise InputError("probe: no labelled step that the model has read")
    features, labels, problems = features.where(known), labels[known], problems[known]
    layer, strength = _choice(features, labels, problems, position, sorted(strengths), folds)
    return _fit(features, labels, layer, position, [strength])[0]


def out_of_fold(
    examples: Sequence[StepExample],
    features: StepFeatures,
    *,
    position: bool = False,
    strengths: Sequence[float] = STRENGTHS,
    folds: int = FOLDS,
) -> OutOfFold:
    """Predictions by grouped folds, the same as the baselines': each fold's probe is fitted on the other problems.

    Args:
        examples: E solutions, with labels.
        features: of all their steps.
        position, strengths: see :func:`fit_probe`.
        folds: outer and inner ones.
    """
    labels, problems, owners = step_columns(examples)
    chances, probes = np.full(len(labels), math.nan), []
    for train, test in grouped_folds([example.problem_id for example in examples], folds):
        fitted_on, held_out = np.isin(owners, train), np.isin(owners, test)
        probe = fit_probe(
            features.where(fitted_on),
            labels[fitted_on],
            problems[fitted_on],
            position=position,
            strengths=strengths,
            folds=folds,
        )
        chances[held_out] = probe(features.where(held_out))
        probes.append(probe)
    return OutOfFold(as_predictions(examples, chances), tuple(probes))


def grouped_folds(groups: Sequence[Any], folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices to fit on and indices held out; no group is on both sides. As many folds as groups if those are fewer."""
    from sklearn.model_selection import GroupKFold

    count = min(folds, len(set(groups)))
    if count < 2:
        raise InputError("probe: cross-validation needs two problems, and folds=2 or more")
    yield from GroupKFold(count).split(groups, groups=groups)


def as_predictions(examples: Sequence[StepExample], chances: np.ndarray) -> list[list[float | None]]:
    """Probabilities (N,) of all steps as rows, one for each example; NaN becomes None."""
    values = iter(None if math.isnan(chance) else chance for chance in chances.tolist())
    return [list(islice(values, len(example.steps))) for example in examples]


def step_columns(examples: Sequence[StepExample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N,) each: labels (NaN for None), number of the problem and number of the example of every step."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(example.problem_id for example in examples))}
    labels = [math.nan if label is None else label for example in examples for label in example.labels]
    problems = [numbers[example.problem_id] for example in examples for _ in example.steps]
    owners = [number for number, example in enumerate(examples) for _ in example.steps]
    return np.array(labels, dtype=np.float64), np.array(problems, dtype=np.int64), np.array(owners, dtype=np.int64)


def _choice(
    features: StepFeatures, labels: np.ndarray, problems: np.ndarray, position: bool, strengths: list[float], folds: int
) -> tuple[int, float]:
    """Layer and strength of the least log loss over all inner held-out steps."""
    if len(strengths) * len(features.layers) == 1 or len(set(problems.tolist())) < 2:
        return features.layers[-1], strengths[0]
    losses = np.zeros((len(features.layers), len(strengths)))
    for train, test in grouped_folds(problems.tolist(), folds):
        seen, unseen, truth = features.where(train), features.where(test), labels[test]
        for row, layer in enumerate(features.layers):
            for column, probe in enumerate(_fit(seen, labels[train], layer, position, strengths)):
                chances = np.clip(probe(unseen), _EDGE, 1 - _EDGE)
                losses[row, column] -= (truth * np.log(chances) + (1 - truth) * np.log1p(-chances)).sum()
    best = int(losses.argmin())
    return features.layers[best // len(strengths)], strengths[best % len(strengths)]


def _fit(
    features: StepFeatures, labels: np.ndarray, layer: int, position: bool, strengths: Sequence[float]
) -> list[LinearProbe]:
    """A probe for each strength, rising: each fit starts from the one before."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    states = features.states[:, features.layers.index(layer)].astype(np.float64)
    blocks = [states, features.places] if position else [states]
    columns = np.concatenate(blocks, axis=1)
    middle = columns.mean(axis=0)
    spread = columns.std(axis=0)
    scale = np.concatenate([np.full(block.shape[1], block.shape[1] ** 0.5) for block in blocks])
    scale *= np.where(spread > _CONSTANT * (1 + np.abs(middle)), spread, 1.0)
    classes, weights = np.repeat([1, 0], len(labels)), np.concatenate([labels, 1 - labels])
    rows = np.flatnonzero(weights > 0)
    scaled = ((columns - middle) / scale)[rows % len(labels)]
    if len(set(classes[rows].tolist())) < 2:  # a fold without errors: the constant of its class
        odds = math.log((1 - _EDGE) / _EDGE) * (1 if classes[rows][0] else -1)
        zeros = np.zeros(columns.shape[1])
        return [_split(layer, zeros, odds, strength, states.shape[1]) for strength in strengths]
    probes = []
    model = LogisticRegression(tol=1e-5, max_iter=1000, warm_start=True)
    with threadpool_limits(1):  # more threads only spin on matrices this small
        for strength in strengths:
            model.set_params(C=strength).fit(scaled, classes[rows], sample_weight=weights[rows])
            found = model.coef_[0] / scale
            probes.append(_split(layer, found, float(model.intercept_[0] - middle @ found), strength, states.shape[1]))
    return probes


def _split(layer: int, weights: np.ndarray, intercept: float, strength: float, width: int) -> LinearProbe:
    return LinearProbe(layer, weights[:width].copy(), weights[width:].copy(), intercept, strength)
