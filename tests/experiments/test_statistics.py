"""Laws of the report's statistics, by hand numbers and against scipy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from apportion.experiments.report.curves import area_under_curve, first_crossing
from apportion.experiments.report.statistics import (
    Comparison,
    Interval,
    bootstrap_interval,
    compare_paired,
    correct,
    detectable_effect,
    expanded_tail,
    holm,
    median,
    paired_t_p,
    sign_flip_p,
    smallest_sign_flip_p,
    verdict,
)

DIFFERENCES = [0.14, 0.21, 0.13, 0.19, 0.16]


def test_area_of_a_constant_is_the_constant_on_any_axis() -> None:
    assert area_under_curve([0, 7, 60], [0.3, 0.3, 0.3], 0, 60) == pytest.approx(0.3, abs=1e-15)
    assert area_under_curve([0, 9_000, 70_000], [0.3, 0.3, 0.3], 1_000, 50_000) == pytest.approx(0.3, abs=1e-15)


def test_area_is_clipped_by_interpolation() -> None:
    # rises from 0 to 1 over [0, 10]; over [0, 5] its mean is a quarter, over [5, 10] three quarters
    assert area_under_curve([0, 10], [0.0, 1.0], 0, 5) == pytest.approx(0.25)
    assert area_under_curve([0, 10], [0.0, 1.0], 5, 10) == pytest.approx(0.75)


def test_area_is_unknown_where_the_curve_does_not_reach() -> None:
    assert math.isnan(area_under_curve([0, 10], [0.0, 1.0], 0, 11))
    assert math.isnan(area_under_curve([1, 10], [0.0, 1.0], 0, 10))
    assert math.isnan(area_under_curve([0], [0.5], 0, 0))
    assert math.isnan(area_under_curve([], [], math.nan, math.nan))


def test_threshold_is_crossed_between_evaluations() -> None:
    assert first_crossing([0, 10, 20, 30], [0.2, 0.7, 0.9, 0.6], 0.8) == pytest.approx(15.0)
    assert first_crossing([0, 10], [0.9, 0.95], 0.8) == 0.0
    assert first_crossing([0, 10], [0.2, 0.8], 0.8) == pytest.approx(10.0)
    assert first_crossing([0, 10], [0.2, 0.79], 0.8) == math.inf
    assert math.isnan(first_crossing([], [], 0.8))


def test_median_counts_those_that_never_arrive_as_late() -> None:
    assert median([20.0, math.inf, 30.0]) == 30.0
    assert median([20.0, math.inf, math.inf]) == math.inf
    assert median([20.0, 30.0]) == 25.0


def test_one_seed_gives_no_interval() -> None:
    for values in ([], [0.7]):
        interval = bootstrap_interval(values)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert not interval.known
        assert not interval.excludes_zero


def test_interval_is_the_same_every_time_and_moves_with_the_values() -> None:
    interval = bootstrap_interval(DIFFERENCES)
    assert bootstrap_interval(list(DIFFERENCES)) == interval
    moved = bootstrap_interval([2 * d - 1 for d in DIFFERENCES])
    assert moved == pytest.approx((2 * interval.low - 1, 2 * interval.high - 1))


def test_interval_agrees_with_scipy_at_the_expanded_level() -> None:
    values = [0.11, 0.35, 0.18, 0.42, 0.27, 0.30, 0.08, 0.21]
    level = 1 - 2 * expanded_tail(len(values))
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=level, n_resamples=100_000, method="percentile", rng=1
    ).confidence_interval
    assert bootstrap_interval(values) == pytest.approx((theirs.low, theirs.high), abs=0.004)


def test_interval_of_three_seeds_is_their_range() -> None:
    assert bootstrap_interval([0.1, 0.4, 0.2]) == pytest.approx((0.1, 0.4), abs=1e-4)


def test_expansion_widens_small_samples_and_fades() -> None:
    # t_{.025,4} = 2.776445; Phi(-sqrt(5/4) * 2.776445) = Phi(-3.104160)
    assert expanded_tail(5) == pytest.approx(0.00095411, rel=1e-4)
    assert expanded_tail(10**6) == pytest.approx(0.025, abs=1e-5)
    with pytest.raises(ValueError, match="two values"):
        expanded_tail(1)


@pytest.mark.parametrize(("n", "documented"), [(2, 0.50), (3, 0.72), (5, 0.92), (10, 0.95)])
def test_coverage_on_normal_data_is_as_documented(n: int, documented: float) -> None:
    rng = np.random.default_rng(7)
    intervals = [bootstrap_interval(list(rng.normal(size=n)), resamples=10_000) for _ in range(400)]
    covered = np.mean([low <= 0 <= high for low, high in intervals])
    assert covered == pytest.approx(documented, abs=0.05)  # two standard errors of 400 draws at p = .5


def test_paired_t_is_scipys() -> None:
    other = [0.5, 0.61, 0.48, 0.55, 0.57]
    mine = [a + d for a, d in zip(other, DIFFERENCES, strict=True)]
    assert paired_t_p(DIFFERENCES) == pytest.approx(stats.ttest_rel(mine, other).pvalue, rel=1e-9)


def test_sign_flip_is_scipys_exact_permutation_test() -> None:
    values = [0.1, -0.04, 0.2, 0.07, -0.01, 0.13]
    theirs = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(values) == pytest.approx(theirs.pvalue)
    assert sign_flip_p(DIFFERENCES) == smallest_sign_flip_p(5) == 0.0625


def test_sign_flip_of_many_seeds_is_drawn_and_never_zero() -> None:
    assert sign_flip_p([0.1] * 30) == pytest.approx(1e-5, rel=1e-6)
    assert sign_flip_p([0.1, -0.1] * 15) == 1.0


def test_equal_differences_are_no_proof() -> None:
    assert paired_t_p([0.0] * 5) == 1.0
    assert paired_t_p([0.0625] * 2) == 0.5  # where t would be infinite and p zero
    assert paired_t_p([0.1 + 1e-17, 0.1, 0.1]) == 0.25


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    unknown = holm([math.nan, 0.04])
    assert math.isnan(unknown[0])
    assert unknown[1] == 0.04
    assert holm([]) == []


def test_detectable_effect_has_eighty_percent_power() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 5, 10):
        draws = rng.normal(detectable_effect(n), 1.0, (40_000, n))
        t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / math.sqrt(n))
        assert np.mean(np.abs(t) > stats.t.ppf(0.975, n - 1)) == pytest.approx(0.8, abs=0.008)
    assert math.isnan(detectable_effect(1))


def test_comparison_uses_the_common_seeds() -> None:
    comparison = compare_paired({0: 0.7, 1: 0.9, 3: 0.8, 4: math.nan}, {0: 0.5, 1: 0.6, 2: 0.1, 4: 0.2})
    assert comparison.seeds == (0, 1)
    assert comparison.differences == pytest.approx((0.2, 0.3))
    assert comparison.mean == pytest.approx(0.25)
    assert comparison.detectable == pytest.approx(11.5499 * 0.0707107, rel=1e-4)


def test_identical_curves_show_no_difference() -> None:
    same = {seed: 0.5 + 0.01 * seed for seed in range(5)}
    comparison = correct({"copy": compare_paired(same, same)})["copy"]
    assert comparison.interval == Interval(0.0, 0.0)
    assert comparison.p_adjusted == 1.0
    assert comparison.detectable == 0.0
    assert verdict(comparison) == "no difference shown"


def test_no_common_seed_is_no_comparison() -> None:
    comparison = compare_paired({0: 0.5}, {1: 0.5})
    assert comparison.seeds == ()
    assert math.isnan(comparison.mean)
    assert math.isnan(comparison.p_t)
    assert verdict(comparison) == "no difference shown"


def comparison(interval: tuple[float, float], p: float, mean: float = 0.1) -> Comparison:
    blank = compare_paired({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.5})
    return replace(blank, interval=Interval(*interval), p_adjusted=p, mean=mean)


def test_a_winner_needs_the_interval_and_the_corrected_p() -> None:
    assert verdict(comparison((0.05, 0.2), 0.01)) == "better"
    assert verdict(comparison((-0.2, -0.05), 0.01, mean=-0.1)) == "worse"
    assert verdict(comparison((-0.01, 0.2), 0.01)) == "no difference shown"
    assert verdict(comparison((0.0, 0.2), 0.01)) == "no difference shown"
    assert verdict(comparison((0.05, 0.2), 0.05)) == "no difference shown"
    assert verdict(comparison((0.05, 0.2), math.nan)) == "no difference shown"
    assert verdict(comparison((math.nan, math.nan), 0.01)) == "no difference shown"


def test_correction_leaves_everything_else_alone() -> None:
    one = compare_paired({0: 0.6, 1: 0.75, 2: 0.7}, {0: 0.5, 1: 0.5, 2: 0.5})
    two = correct({"a": one, "b": one})
    assert two["a"].p_adjusted == pytest.approx(2 * one.p_t)
    assert replace(two["a"], p_adjusted=math.nan).differences == one.differences
