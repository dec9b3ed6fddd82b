"""Step measures: hand numbers, scikit-learn's own, and what happens where a measure has no value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

from apportion.prm import StepExample
from apportion.prm.metrics import (
    MEASURES,
    Measure,
    accuracy,
    balanced_accuracy,
    brier,
    by_position,
    error_average_precision,
    error_f1,
    flatten_steps,
    min_at_last_rate,
    min_at_last_step,
    prm_score,
    right_f1,
    roc_auc,
    step_measures,
)
from apportion.verifiers import InputError


def example(labels: list[float | None], problem: str = "p") -> StepExample:
    steps = tuple((2 * step, 2 * step + 1) for step in range(len(labels)))
    return StepExample("q", "x\n" * len(labels), steps, tuple(labels), problem)


RIGHT, WRONG = np.ones(95), np.zeros(5)
SKEWED = np.concatenate([RIGHT, WRONG])


def test_calling_every_step_right_on_skewed_data_is_accurate_and_useless() -> None:
    always = np.ones(100)
    assert accuracy(SKEWED, always) == 0.95
    assert balanced_accuracy(SKEWED, always) == 0.5
    assert error_f1(SKEWED, always) == 0.0
    assert right_f1(SKEWED, always) == pytest.approx(2 * 95 / (2 * 95 + 5))
    assert prm_score(SKEWED, always) == pytest.approx(95 / 195)
    assert roc_auc(SKEWED, always) == 0.5
    assert error_average_precision(SKEWED, always) == pytest.approx(0.05)  # its base rate


def test_error_class_is_the_positive_one() -> None:
    labels, scores = np.array([1, 1, 1, 0, 0]), np.array([0.9, 0.8, 0.2, 0.1, 0.6])
    assert error_f1(labels, scores) == 0.5  # one of two alarms true, one of two errors found
    assert right_f1(labels, scores) == pytest.approx(2 / 3)
    assert prm_score(labels, scores, error_weight=0.25) == pytest.approx(0.25 * 0.5 + 0.75 * 2 / 3)
    assert error_average_precision(labels, scores) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert roc_auc(labels, scores) == pytest.approx(5 / 6)


def test_step_at_the_threshold_is_called_right() -> None:
    assert error_f1(np.array([0]), np.array([0.5])) == 0.0
    assert error_f1(np.array([0]), np.array([0.5]), threshold=0.51) == 1.0


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([1.0, 1.0], "no labelled step is wrong"),
        ([0.0, 0.0], "no labelled step is right"),
        ([None, None], "no step has"),
    ],
)
def test_one_class_gives_reasons_and_no_number(labels: list[float | None], reason: str) -> None:
    measures = step_measures(flatten_steps([example(labels)], [[0.9, 0.4]]))
    assert tuple(measures) == MEASURES
    for name in ("roc_auc", "error_average_precision", "prm_score", "balanced_accuracy"):
        assert math.isnan(measures[name].value)
        assert measures[name].reason.startswith(reason)
    for measure in measures.values():
        assert math.isnan(measure.value) == bool(measure.reason)
    if labels != [None, None]:
        assert measures["brier"].reason == ""


def test_no_wrong_step_means_no_error_f1_even_with_false_alarms() -> None:
    assert math.isnan(error_f1(np.ones(3), np.array([0.1, 0.9, 0.9])))


def test_soft_labels_are_kept_for_brier_and_cut_for_the_rest() -> None:
    soft, hard, scores = [0.7, 0.5, 0.4, 0.0], [1.0, 1.0, 0.0, 0.0], [[0.6, 0.7, 0.3, 0.2]]
    steps = flatten_steps([example(soft)], scores)
    assert steps.soft == 3
    measures, cut = step_measures(steps), step_measures(flatten_steps([example(hard)], scores))
    assert measures["brier"].value == pytest.approx((0.01 + 0.04 + 0.01 + 0.04) / 4)
    assert {k: v for k, v in measures.items() if k != "brier"} == {k: v for k, v in cut.items() if k != "brier"}


def test_brier_of_hard_labels_is_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    labels, scores = generator.integers(0, 2, 50).astype(float), generator.random(50)
    assert brier(labels, scores) == pytest.approx(brier_score_loss(labels, scores))


def test_unlabelled_and_unscored_steps_are_counted_and_left_out() -> None:
    steps = flatten_steps([example([1.0, None, 0.0]), example([0.0, 1.0], "q")], [[0.9, 0.1, None], [0.2, 0.8]])
    assert steps.labels.tolist() == [1.0, 0.0, 1.0]
    assert steps.probabilities.tolist() == [0.9, 0.2, 0.8]
    assert (steps.unlabelled, steps.unscored, steps.problem_count) == (1, 1, 2)
    assert steps.problems.tolist() == [0, 1, 1]
    assert steps.positions.tolist() == [0, 0, 1]


@pytest.mark.parametrize("score", [1.2, -0.1, math.nan, math.inf])
def test_score_that_is_no_probability_is_named_with_its_row(score: float) -> None:
    with pytest.raises(InputError, match=r"^mine, row 1, step 0: .* is no probability"):
        flatten_steps([example([1.0]), example([1.0])], [[0.5], [score]], name="mine")


def test_misfitting_predictions_are_refused() -> None:
    with pytest.raises(InputError, match="1 rows for 2 examples"):
        flatten_steps([example([1.0]), example([1.0])], [[0.5]])
    with pytest.raises(InputError, match="row 0: 2 scores for 1 steps"):
        flatten_steps([example([1.0])], [[0.5, 0.5]])


def test_positions_have_a_row_each_and_late_ones_share_the_last() -> None:
    examples = [example([1.0, 0.0, 1.0, 0.0]), example([0.0, 1.0], "q")]
    rows = by_position(flatten_steps(examples, [[0.9, 0.2, 0.8, 0.6], [0.3, 0.7]]), most=2)
    assert [(r.position, r.and_later, r.steps, r.wrong) for r in rows] == [
        (0, False, 2, 1),
        (1, False, 2, 1),
        (2, True, 2, 1),
    ]
    assert [r.roc_auc for r in rows] == [1.0, 1.0, 1.0]
    assert [r.error_f1 for r in rows] == [1.0, 1.0, 0.0]


def test_lowest_of_equal_scores_is_the_first() -> None:
    assert min_at_last_step([0.5, 0.5]) is False
    assert min_at_last_step([0.5, 0.4, 0.4]) is False
    assert min_at_last_step([0.4, 0.3]) is True


def test_min_at_last_rate_leaves_out_single_steps_and_holes() -> None:
    rate, chance = min_at_last_rate([[0.9, 0.1], [0.1, 0.9, 0.9], [0.2], [], [None, 0.1]])
    assert rate == Measure(0.5)
    assert chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    nothing, chance = min_at_last_rate([[0.2]])
    assert math.isnan(nothing.value)
    assert math.isnan(chance)
    assert nothing.reason
