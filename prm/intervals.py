"""Bootstrap intervals with problems as the replicates: steps of one problem, and its solutions, are not independent.

A statistic here is a function of one weight for each problem: how often the resample drew it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .metrics import MEASURES, FlatSteps
from .reliability import BINS, bin_edges, bin_of

__all__ = ["Interval", "Statistic", "bootstrap_samples", "percentile_interval", "step_statistic"]

Statistic = Callable[[np.ndarray], np.ndarray]
RESAMPLES = 2_000
LEVEL = 0.95
MOST_UNDEFINED = 0.1


class Interval(NamedTuple):
    """A range of values; both ends NaN where no interval can be given."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def bootstrap_samples(statistic: Statistic, problems: int, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """The statistic on resamples of the problems, drawn with replacement (cluster bootstrap).

    The draws depend on ``problems``, ``resamples`` and ``seed`` alone, so two statistics of the same problems are
    paired: subtract their samples to get those of the difference.

    Args:
        statistic: from weights (P,) to values (M,), NaN where a value does not exist.
        problems: P.

    Returns:
        (resamples, M).

    >>> values = np.array([0.0, 1.0, 2.0])
    >>> samples = bootstrap_samples(lambda w: np.array([w @ values / w.sum()]), 3, resamples=500)
    >>> samples.shape, bool(samples.min() >= 0.0)
    ((500, 1), True)
    """
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, problems, problems) for _ in range(resamples if problems else 0))
    rows = [statistic(np.bincount(draw, minlength=problems).astype(np.float64)) for draw in draws]
    return np.stack(rows) if rows else np.empty((0, len(statistic(np.zeros(problems)))))


def percentile_interval(samples: np.ndarray, problems: int, *, level: float = LEVEL) -> Interval:
    """Percentile interval of bootstrap samples (R,), its tails widened for few problems.

    The tail ``a = (1-level)/2`` becomes ``Phi(sqrt(n/(n-1)) t_{a, n-1})`` (Hesterberg 2015, section 5.3,
    doi:10.1080/00031305.2015.1089789), which for many problems is ``a``. Resamples without a value are left out; where
    they are more than one in ten, or there are fewer than two problems, there is no interval.

    >>> [round(end, 4) for end in percentile_interval(np.arange(1001) / 1000, 10_000)]
    [0.025, 0.975]
    """
    known = samples[~np.isnan(samples)]
    if problems < 2 or not len(known) or len(known) < (1 - MOST_UNDEFINED) * len(samples):
        return Interval(math.nan, math.nan)
    from scipy import stats

    quantile = stats.t.ppf((1 - level) / 2, problems - 1)
    tail = float(stats.norm.cdf(math.sqrt(problems / (problems - 1)) * quantile))
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(low), float(high))


def step_statistic(steps: FlatSteps, *, threshold: float = 0.5, bins: int = BINS) -> Statistic:
    """The measures of :data:`~.metrics.MEASURES` as a function of the problems' weights.

    It gives what :func:`~.metrics.step_measures` gives on steps repeated as often as the weights say, but sorts and
    bins once, so that thousands of resamples are cheap. The edges of the bins stay those of the whole sample.
    """
    y, p, problems = steps.labels, steps.probabilities, steps.problems
    right, said = steps.right, p >= threshold
    order = np.argsort(p, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(p[order]) > 0, True)) if len(p) else np.empty(0, np.int64)
    # Sums of these columns over the weighted steps are all that the thresholded measures need.
    columns = np.stack([right & said, right & ~said, ~right & said, ~right & ~said, (p - y) ** 2], axis=1)
    sums = _by_problem(columns, problems, steps.problem_count)
    gaps = [_bin_gaps(p, right, problems, steps.problem_count, bin_edges(p, kind, bins)) for kind in ("width", "mass")]

    def statistic(weights: np.ndarray) -> np.ndarray:
        kept, missed, passed, caught, squares = weights @ sums
        total = kept + missed + passed + caught
        if not total:
            return np.full(len(MEASURES), math.nan)
        each = weights[problems[order]]
        rights = np.cumsum(each * right[order])[ends]
        wrongs = np.cumsum(each * ~right[order])[ends]
        wrong_f1 = _ratio(2 * caught, 2 * caught + missed + passed) if passed + caught else math.nan
        good_f1 = _ratio(2 * kept, 2 * kept + missed + passed) if kept + missed else math.nan
        values = {
            "roc_auc": _area(rights, wrongs),
            "error_average_precision": _average_precision(rights, wrongs),
            "error_f1": wrong_f1,
            "prm_score": (wrong_f1 + good_f1) / 2,
            "balanced_accuracy": (_ratio(kept, kept + missed) + _ratio(caught, passed + caught)) / 2,
            "accuracy": (kept + caught) / total,
            "brier": squares / total,
            "ece_width": np.abs(weights @ gaps[0]).sum() / total,
            "ece_mass": np.abs(weights @ gaps[1]).sum() / total,
        }
        return np.array([values[name] for name in MEASURES], dtype=np.float64)

    return statistic


def _by_problem(columns: np.ndarray, problems: np.ndarray, count: int) -> np.ndarray:
    """(P, C) sums of the columns (N, C) over the steps of each problem."""
    sums = np.zeros((count, columns.shape[1]))
    np.add.at(sums, problems, columns.astype(np.float64))
    return sums


def _bin_gaps(p: np.ndarray, right: np.ndarray, problems: np.ndarray, count: int, edges: np.ndarray) -> np.ndarray:
    """(P, K) sum of ``right - probability`` in each bin over the steps of each problem."""
    gaps = np.zeros((count, len(edges) - 1))
    np.add.at(gaps, (problems, bin_of(p, edges)), right - p)
    return gaps


def _area(rights: np.ndarray, wrongs: np.ndarray) -> float:
    """ROC-AUC from the cumulative weights of both classes by rising probability."""
    if not (rights[-1] and wrongs[-1]):
        return math.nan
    before = np.concatenate([[0.0], wrongs[:-1]])
    steps = np.diff(rights, prepend=0.0)
    return float(steps @ (before + wrongs) / 2 / (rights[-1] * wrongs[-1]))


def _average_precision(rights: np.ndarray, wrongs: np.ndarray) -> float:
    """Sum of precision times gain in recall, the steps of lowest probability taken first."""
    if not (rights[-1] and wrongs[-1]):
        return math.nan
    found = np.diff(wrongs, prepend=0.0)
    taken = rights + wrongs
    precision = np.divide(wrongs, taken, out=np.zeros_like(wrongs), where=taken > 0)
    return float(found @ precision / wrongs[-1])


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan
