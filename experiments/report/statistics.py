"""Intervals and tests between strategies; seeds are the replicates. Each is explained in docs/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...prm.intervals import Interval

__all__ = [
    "LEVEL",
    "Comparison",
    "Interval",
    "Verdict",
    "bootstrap_interval",
    "compare_paired",
    "correct",
    "detectable_effect",
    "expanded_tail",
    "holm",
    "mean",
    "median",
    "paired_t_p",
    "share_interval",
    "sign_flip_p",
    "smallest_sign_flip_p",
    "verdict",
]

Verdict = Literal["better", "worse", "no difference shown"]
RESAMPLES = 20_000
LEVEL = 0.05
_EXACT_SIGN_FLIPS = 16


@dataclass(frozen=True)
class Comparison:
    """One strategy against another, paired by seed.

    Args:
        seeds: the n seeds that both have.
        differences: (n,) strategy minus other.
        mean: of the differences.
        interval: 95% bootstrap interval of that mean.
        p_t: paired t-test.
        p_sign_flip: exact sign-flip permutation test.
        p_adjusted: ``p_t`` after Holm's correction; NaN until :func:`correct`.
        p_sign_flip_adjusted: ``p_sign_flip`` after the same.
        detectable: difference that n seeds with this spread find with 80% power.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    interval: Interval
    p_t: float
    p_sign_flip: float
    p_adjusted: float
    p_sign_flip_adjusted: float
    detectable: float


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    """Middle value, infinities counted as large; NaN of nothing.

    >>> median([30.0, 20.0, math.inf])
    30.0
    """
    ordered, middle = sorted(values), len(values) // 2
    if not ordered:
        return math.nan
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def expanded_tail(n: int, level: float = LEVEL) -> float:
    """Tail share of a percentile interval, widened for small n: ``Phi(-sqrt(n/(n-1)) t_{level/2, n-1})``.

    The plain percentile interval is too short by about ``sqrt((n-1)/n)`` and by normal instead of t quantiles
    (Hesterberg 2015, doi:10.1080/00031305.2015.1089789, section 5.3).

    >>> round(expanded_tail(5), 6), round(expanded_tail(10_000), 4)
    (0.000954, 0.025)
    """
    if n < 2:
        raise ValueError(f"an interval needs two values or more, not {n}")
    from scipy import stats

    return float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf(1 - level / 2, n - 1)))


@lru_cache(maxsize=64)
def _resamples(n: int, resamples: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def bootstrap_interval(
    values: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Bootstrap interval of the mean, expanded percentile (see :func:`expanded_tail`).

    Args:
        values: (n,) one number for each seed. Fewer than two give no interval.
        level: 1 minus the confidence.
        resamples: number of bootstrap samples.
        seed: of the resampling; the same values always give the same interval.

    >>> bootstrap_interval([0.5])
    Interval(low=nan, high=nan)
    >>> low, high = bootstrap_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    >>> round(low, 2), round(high, 2)
    (0.12, 0.48)
    """
    n = len(values)
    if n < 2 or any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan)
    means = np.asarray(values, dtype=np.float64)[_resamples(n, resamples, seed)].mean(axis=1)
    tail = expanded_tail(n, level)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def paired_t_p(differences: Sequence[float]) -> float:
    """Two-sided p of the t-test that the mean difference is zero; NaN of fewer than two.

    Where all differences are zero it is 1. Where all are the same and not zero, t has no value (on a coarse scale of
    success this happens by chance), and the exact sign-flip p stands in.

    >>> round(paired_t_p([0.1, 0.2, 0.3]), 4), paired_t_p([0.0, 0.0]), paired_t_p([0.25, 0.25])
    (0.0742, 1.0, 0.5)
    """
    if len(differences) < 2:
        return math.nan
    spread = max(differences) - min(differences)
    if spread <= 1e-12 * max(1.0, *map(abs, differences)):
        return 1.0 if abs(differences[0]) <= 1e-12 else sign_flip_p(differences)
    from scipy import stats

    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the sign-flip permutation test of the mean: share of sign patterns at least as extreme.

    Exact up to 16 differences; beyond, 100,000 random patterns, the observed one counted in.

    >>> sign_flip_p([0.1, 0.2, 0.3])
    0.25
    """
    n = len(differences)
    if n == 0:
        return math.nan
    values = np.asarray(differences, dtype=np.float64)
    if n <= _EXACT_SIGN_FLIPS:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    else:
        patterns = np.random.default_rng(0).integers(0, 2, (100_000, n))
        patterns[0] = 1
    sums = np.abs((2 * patterns - 1) @ values)
    observed = abs(values.sum())
    return float(np.mean(sums >= observed - 1e-9 * max(1.0, observed)))


def smallest_sign_flip_p(n: int) -> float:
    """The smallest p that the exact sign-flip test can give with n pairs: ``2 / 2^n``.

    >>> smallest_sign_flip_p(5)
    0.0625
    """
    return 2.0 ** (1 - n) if n else math.nan


def share_interval(count: int, of: int, level: float = LEVEL) -> Interval:
    """Wilson's interval of a share (Wilson 1927): no width is ever zero, also of 0 or all of a few; NaNs of nothing.

    ``(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)``

    >>> low, high = share_interval(3, 3)
    >>> round(low, 3), round(high, 3)
    (0.439, 1.0)
    """
    if of < 1:
        return Interval(math.nan, math.nan)
    from scipy import stats

    z, p = float(stats.norm.ppf(1 - level / 2)), count / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return Interval(max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction; NaNs stay NaN and are no part of the family (Holm 1979).

    >>> holm([0.01, 0.04, 0.03, float("nan")])
    [0.03, 0.06, 0.06, nan]
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, floor = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        floor = max(floor, min(1.0, (len(known) - rank) * p))
        adjusted[index] = floor
    return adjusted


def detectable_effect(n: int, *, power: float = 0.8, level: float = LEVEL) -> float:
    """Smallest true mean difference that a paired t-test of n seeds finds, in standard deviations of the differences.

    Solves ``P(|T| > t_{level/2, n-1}) = power`` for ``T`` noncentral t with ``n-1`` degrees and noncentrality
    ``effect * sqrt(n)``; NaN of fewer than two seeds.

    >>> round(detectable_effect(5), 3), round(detectable_effect(10), 3)
    (1.682, 0.996)
    """
    if n < 2:
        return math.nan
    from scipy import optimize, stats

    critical = stats.t.ppf(1 - level / 2, n - 1) ** 2

    def shortfall(effect: float) -> float:
        return float(stats.ncf.sf(critical, 1, n - 1, n * effect**2)) - power

    return float(optimize.brentq(shortfall, 1e-3, 100.0))


def compare_paired(values: Mapping[int, float], other: Mapping[int, float]) -> Comparison:
    """Differences ``values - other`` for the seeds that both have, with their interval and tests.

    >>> compare_paired({0: 0.6, 1: 0.7, 2: 0.9}, {0: 0.5, 1: 0.5, 3: 0.5}).seeds
    (0, 1)
    """
    seeds = tuple(s for s in values if s in other and not math.isnan(values[s]) and not math.isnan(other[s]))
    differences = tuple(values[seed] - other[seed] for seed in seeds)
    spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else math.nan
    return Comparison(
        seeds=seeds,
        differences=differences,
        mean=mean(differences),
        interval=bootstrap_interval(differences),
        p_t=paired_t_p(differences),
        p_sign_flip=sign_flip_p(differences),
        p_adjusted=math.nan,
        p_sign_flip_adjusted=math.nan,
        detectable=detectable_effect(len(seeds)) * spread,
    )


def correct(comparisons: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """The comparisons as one family, with both p Holm-adjusted."""
    adjusted = holm([comparison.p_t for comparison in comparisons.values()])
    flipped = holm([comparison.p_sign_flip for comparison in comparisons.values()])
    return {
        name: replace(c, p_adjusted=p, p_sign_flip_adjusted=q)
        for (name, c), p, q in zip(comparisons.items(), adjusted, flipped, strict=True)
    }


def verdict(comparison: Comparison) -> Verdict:
    """ "better" or "worse" only if the interval leaves out zero *and* the adjusted p is below .05."""
    if comparison.interval.excludes_zero and comparison.p_adjusted < LEVEL:
        return "better" if comparison.mean > 0 else "worse"
    return "no difference shown"
