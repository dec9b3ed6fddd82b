"""First errors: ProcessBench's F1 by hand, its edge cases, and thresholds that are exact and honest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.process_bench import (
    cross_fitted_first_errors,
    first_error_label,
    first_error_prediction,
    first_error_scores,
    first_error_statistic,
    harmonic_mean,
    mean_f1,
    scores_by_subset,
    tune_threshold,
)


def test_harmonic_mean_of_published_pairs() -> None:
    assert harmonic_mean(0.5, 0.9) == pytest.approx(0.6429, abs=5e-5)
    assert harmonic_mean(0.6, 0.9) == pytest.approx(0.72)
    assert harmonic_mean(0.0, 0.0) == 0.0
    assert harmonic_mean(0.0, 1.0) == 0.0


def test_only_the_exact_step_counts_on_erroneous_solutions() -> None:
    score = first_error_scores([2, 2, 2, 2, -1, -1], [2, 1, 3, -1, -1, 0])
    assert score.error_accuracy == 25.0
    assert score.correct_accuracy == 50.0
    assert score.f1 == pytest.approx(100 / 3)
    assert (score.errors, score.correct) == (4, 2)
    assert (score.match, score.less, score.more, score.fail) == (0.25, 0.25, 0.25, 0.25)


def test_f1_is_zero_where_both_accuracies_are() -> None:
    assert first_error_scores([0, -1], [-1, 0]).f1 == 0.0


def test_golden_number_in_percent() -> None:
    labels, said = [0] * 10 + [-1] * 10, [0] * 5 + [1] * 5 + [-1] * 9 + [0]
    assert first_error_scores(labels, said).f1 == pytest.approx(64.29, abs=5e-3)


@pytest.mark.parametrize(("labels", "said"), [([0, 1], [0, 1]), ([-1], [-1]), ([], [])])
def test_f1_needs_both_kinds_of_solutions(labels: list[int], said: list[int]) -> None:
    assert math.isnan(first_error_scores(labels, said).f1)


def test_mean_over_subsets_is_unweighted() -> None:
    labels, said = [0, -1, 0, -1, 0, -1, -1, -1], [0, -1, 1, -1, -1, -1, -1, -1]
    scores = scores_by_subset(labels, said, ["a", "a", *["b"] * 6])
    assert list(scores) == ["a", "b"]
    assert (scores["a"].f1, scores["b"].f1) == (100.0, 0.0)
    assert mean_f1(scores) == 50.0
    assert math.isnan(mean_f1(scores_by_subset([0, -1, 0], [0, -1, 0], ["a", "a", "b"])))
    assert math.isnan(mean_f1({}))


def test_minus_one_is_no_index() -> None:
    assert first_error_label([1, 1, 1]) == -1
    assert first_error_label([0, None, None]) == 0
    assert first_error_label([1, 1, 0, None]) == 2
    assert first_error_label([1, 0.4, 0]) == 1


def test_first_error_behind_an_unknown_step_is_unknown() -> None:
    assert first_error_label([None, 0]) is None
    assert first_error_label([1, None]) is None


def test_step_without_score_is_not_called_wrong() -> None:
    assert first_error_prediction([None, 0.1]) == 1
    assert first_error_prediction([None, None]) == -1
    assert first_error_prediction([0.5], threshold=0.5) == -1


solutions = st.lists(
    st.tuples(st.lists(st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.7, 1.0]), min_size=1, max_size=5), st.integers(-1, 4)),
    min_size=1,
    max_size=12,
)


@given(solutions)
@settings(max_examples=100, deadline=None)
def test_tuned_threshold_is_the_best_of_all(rows: list[tuple[list[float], int]]) -> None:
    scores, labels = [row for row, _ in rows], [min(label, len(row) - 1) for row, label in rows]

    def f1(threshold: float) -> float:
        return first_error_scores(labels, [first_error_prediction(row, threshold) for row in scores]).f1

    value, reached = tune_threshold(labels, scores)
    if math.isnan(reached):
        assert math.isnan(f1(value))
    else:
        assert reached == pytest.approx(f1(value))
        assert reached == pytest.approx(max(f1(t / 100) for t in range(102)))


def test_of_equally_good_thresholds_the_one_nearest_a_half_is_taken() -> None:
    assert tune_threshold([0, -1], [[0.0], [1.0]]).value == 0.5
    assert tune_threshold([], []).value == 0.5


def test_cross_fitting_never_tunes_on_the_problem_it_judges() -> None:
    """Each problem's two solutions can only be told apart with its own threshold, so honest tuning fails on them."""
    labels = [0, -1] * 2
    scores = [[0.1], [0.3], [0.7], [0.9]]
    problems = ["low", "low", "high", "high"]
    said, thresholds = cross_fitted_first_errors(labels, scores, problems, folds=2)
    assert thresholds == pytest.approx([0.8, 0.2])
    assert said == [0, 0, -1, -1]
    assert tune_threshold(labels, scores).f1 == pytest.approx(200 / 3)
    said, thresholds = cross_fitted_first_errors([0, -1], [[0.1], [0.9]], ["one", "one"])
    assert (said, thresholds) == ([0, -1], [0.5])


def test_statistic_at_weights_of_one_is_the_scores() -> None:
    labels, said = [0, -1, 2, -1, 1, -1], [0, -1, 1, -1, 1, 0]
    subsets, problems = ["a", "a", "b", "b", "b", "a"], np.array([0, 1, 2, 2, 0, 1])
    scores = scores_by_subset(labels, said, subsets)
    statistic = first_error_statistic(labels, said, subsets, problems, 3)
    assert statistic(np.ones(3)) == pytest.approx([scores["a"].f1, scores["b"].f1, mean_f1(scores)])
    assert np.isnan(statistic(np.array([1.0, 0.0, 0.0]))[0])  # no correct solution of subset a is left
