"""The bootstrap over problems: its statistic is the measures themselves, and its intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm import StepExample
from apportion.prm.intervals import Interval, bootstrap_samples, percentile_interval, step_statistic
from apportion.prm.metrics import FlatSteps, flatten_steps, step_measures


def steps_of(seed: int, problems: int = 12, digits: int = 2) -> FlatSteps:
    """Steps with ties among their scores, soft labels, and problems of different size."""
    generator = np.random.default_rng(seed)
    examples, scores = [], []
    for problem in range(problems):
        count = int(generator.integers(1, 6))
        labels = tuple(float(x) for x in np.round(generator.random(count), 1))
        spans = tuple((2 * k, 2 * k + 1) for k in range(count))
        examples.append(StepExample("", "x " * count, spans, labels, f"p{problem}"))
        scores.append([float(x) for x in np.round((generator.random(count) + labels) / 2, digits)])
    return flatten_steps(examples, scores)


@pytest.mark.parametrize("seed", range(5))
def test_statistic_at_weights_of_one_is_the_measures(seed: int) -> None:
    steps = steps_of(seed)
    values = [measure.value for measure in step_measures(steps, threshold=0.4, bins=5).values()]
    assert step_statistic(steps, threshold=0.4, bins=5)(np.ones(12)) == pytest.approx(values, nan_ok=True)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=12, max_size=12))
@settings(max_examples=60, deadline=None)
def test_weights_are_repetitions(seed: int, weights: list[int]) -> None:
    steps = steps_of(seed, digits=1)
    rows = np.repeat(np.arange(len(steps.labels)), np.array(weights)[steps.problems])
    repeated = FlatSteps(
        *(c[rows] for c in (steps.labels, steps.probabilities, steps.positions, steps.problems)), 12, 0, 0
    )
    expected = {name: measure.value for name, measure in step_measures(repeated).items()}
    found = step_statistic(steps)(np.array(weights, dtype=float))
    del expected["ece_mass"]  # its edges stay those of the whole sample
    assert found[:-1] == pytest.approx(list(expected.values()), nan_ok=True)


def test_statistics_of_the_same_problems_are_paired() -> None:
    values = np.random.default_rng(0).random(30)
    one = bootstrap_samples(lambda w: np.array([w @ values / w.sum()]), 30, resamples=200)
    other = bootstrap_samples(lambda w: np.array([w @ (values + 0.25) / w.sum()]), 30, resamples=200)
    assert other - one == pytest.approx(np.full((200, 1), 0.25))
    assert np.array_equal(one, bootstrap_samples(lambda w: np.array([w @ values / w.sum()]), 30, resamples=200))


def test_steps_of_one_problem_do_not_count_as_independent() -> None:
    """100 equal steps in each of 10 problems say no more than one step in each."""
    outcome = np.array([1.0, 0.0] * 5)

    def width(steps_each: int) -> float:
        samples = bootstrap_samples(lambda w: np.array([steps_each * w @ outcome / (steps_each * w.sum())]), 10)
        interval = percentile_interval(samples[:, 0], 10)
        return interval.high - interval.low

    assert width(100) == pytest.approx(width(1))
    assert width(1) > 0.5


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        values = generator.normal(0.3, 1.0, 15)
        samples = bootstrap_samples(lambda w, v=values: np.array([w @ v / w.sum()]), 15, resamples=400, seed=trial)
        low, high = percentile_interval(samples[:, 0], 15)
        inside += low <= 0.3 <= high
    assert 0.9 <= inside / 200 <= 0.99


def test_no_interval_of_one_problem_or_of_undefined_samples() -> None:
    assert not percentile_interval(np.ones(100), 1).known
    mostly = np.array([1.0] * 80 + [math.nan] * 20)
    assert not percentile_interval(mostly, 50).known
    assert percentile_interval(np.array([1.0] * 95 + [math.nan] * 5), 50) == (1.0, 1.0)
    assert not percentile_interval(np.array([]), 50).known


def test_nothing_to_measure_gives_empty_samples_of_the_right_width() -> None:
    steps = flatten_steps([], [])
    assert bootstrap_samples(step_statistic(steps), 0).shape == (0, 9)


def test_interval_leaves_out_zero_only_on_one_side() -> None:
    assert Interval(0.1, 0.2).excludes_zero
    assert Interval(-0.2, -0.1).excludes_zero
    assert not Interval(-0.1, 0.1).excludes_zero
    assert not Interval(math.nan, math.nan).excludes_zero
