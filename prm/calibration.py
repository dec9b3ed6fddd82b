"""Step probabilities set right on held-out labels: of the steps scored 0.8, four in five should be right.

A calibration is a few plain numbers, kept in a model's ``prm.json``. It never turns the order of two steps round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..verifiers import InputError

__all__ = ["Calibration", "Isotonic", "Platt", "calibration_from_json", "calibration_to_json", "fit_calibration"]

Array = NDArray[np.float64]
Method = Literal["isotonic", "platt"]
_EDGE = 1e-7  # nearest to 0 and 1 that a probability counts as, so that its log-odds are finite


@dataclass(frozen=True)
class Isotonic:
    """A line through points that never falls; beyond its ends the end's value holds.

    Args:
        x: probabilities, strictly rising.
        y: what each becomes, in [0, 1], never falling.

    >>> Isotonic((0.2, 0.6), (0.0, 0.5))([0.1, 0.4, 0.9]).tolist()
    [0.0, 0.25, 0.5]
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.x)) and all(a <= b for a, b in pairwise(self.y))
        if len(self.x) != len(self.y) or not self.x or not rising or not 0 <= self.y[0] <= self.y[-1] <= 1:
            raise InputError("calibration: isotonic needs as many x as y, x rising and y not falling within [0, 1]")

    def __call__(self, probabilities: ArrayLike) -> Array:
        return np.interp(np.asarray(probabilities, dtype=np.float64), self.x, self.y)


@dataclass(frozen=True)
class Platt:
    """``sigmoid(slope * logit(p) + intercept)``, slope at least 0 (Platt 1999, on log-odds).

    >>> Platt(1.0, 0.0)([0.25, 0.9]).round(9).tolist()
    [0.25, 0.9]
    """

    slope: float
    intercept: float

    def __post_init__(self) -> None:
        if not (0 <= self.slope < float("inf") and abs(self.intercept) < float("inf")):
            raise InputError(f"calibration: platt has slope {self.slope} and intercept {self.intercept}; fit it anew")

    def __call__(self, probabilities: ArrayLike) -> Array:
        odds = self.slope * _log_odds(np.asarray(probabilities, dtype=np.float64)) + self.intercept
        calibrated: Array = 0.5 * (1 + np.tanh(odds / 2))  # the sigmoid, without overflow
        return calibrated


Calibration = Isotonic | Platt


def fit_calibration(
    probabilities: Sequence[float], labels: Sequence[float | None], method: Method = "isotonic"
) -> Calibration:
    """A calibration from steps that the model was not trained on.

    Isotonic regression follows any rising curve and wants hundreds of steps; Platt scaling has two numbers, with
    his targets ``(n1 + 1) / (n1 + 2)`` and ``1 / (n0 + 2)`` in place of 1 and 0, so that no label set drives it to
    infinity. Where labels fall as the scores rise, both become the share of right steps.

    Args:
        probabilities: n scores in [0, 1].
        labels: whether each step is right, soft or hard; steps with None are left out.
        method: ``isotonic`` or ``platt``.

    >>> fit_calibration([0.1, 0.2, 0.8, 0.9], [0, 1, 0, 1])([0.1, 0.5]).tolist()
    [0.0, 0.5]
    """
    if len(probabilities) != len(labels):
        raise ValueError(f"{len(probabilities)} probabilities and {len(labels)} labels")
    known = [(p, label) for p, label in zip(probabilities, labels) if label is not None]
    if not known:
        raise InputError("calibration: no labelled step to fit it on; give held-out examples with labels")
    x, y = np.array(known, dtype=np.float64).T
    if not (np.isfinite(known).all() and x.min() >= 0 and x.max() <= 1 and y.min() >= 0 and y.max() <= 1):
        raise ValueError("probabilities and labels must lie in [0, 1]")
    if method == "isotonic":
        return _fit_isotonic(x, y)
    if method == "platt":
        return _fit_platt(x, y)
    raise InputError(f"calibration={method}: give isotonic or platt")


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """Plain numbers.

    >>> calibration_to_json(Platt(2.0, -1.0))
    {'method': 'platt', 'slope': 2.0, 'intercept': -1.0}
    """
    return {"method": type(calibration).__name__.lower(), **asdict(calibration)}


def calibration_from_json(record: Mapping[str, Any]) -> Calibration:
    """What :func:`calibration_to_json` wrote."""
    try:
        if record["method"] == "isotonic":
            return Isotonic(tuple(map(float, record["x"])), tuple(map(float, record["y"])))
        if record["method"] == "platt":
            return Platt(float(record["slope"]), float(record["intercept"]))
    except (KeyError, TypeError) as error:
        raise InputError(f"calibration: {error} is missing or no number; fit it anew") from error
    raise InputError(f"calibration: method {record['method']!r} is unknown; give isotonic or platt")


def _fit_isotonic(x: Array, y: Array) -> Isotonic:
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x, y)
    return Isotonic(tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist()))


def _fit_platt(x: Array, y: Array) -> Platt:
    from sklearn.linear_model import LogisticRegression

    right, wrong = y.sum(), (1 - y).sum()
    target = y * (right + 1) / (right + 2) + (1 - y) / (wrong + 2)
    # A soft target is two examples, one of each class, weighted.
    odds = np.tile(_log_odds(x), 2)[:, None]
    classes, weights = np.repeat([1, 0], len(x)), np.concatenate([target, 1 - target])
    fitted = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(odds, classes, sample_weight=weights)
    slope, intercept = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
    if slope > 0:
        return Platt(slope, intercept)
    return Platt(0.0, float(_log_odds(np.array(target.mean()))))


def _log_odds(probabilities: Array) -> Array:
    inside = np.clip(probabilities, _EDGE, 1 - _EDGE)
    odds: Array = np.log(inside) - np.log1p(-inside)
    return odds
