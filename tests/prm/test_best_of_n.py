"""Best of N: closed forms against brute force over all subsets, ties by expectation, votes."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm import best_of_n
from apportion.prm.best_of_n import (
    RULES,
    Candidate,
    CandidateGroup,
    aggregate_scores,
    best_of,
    majority_vote,
    measure_best_of_n,
    oracle,
    random_pick,
)


def group(problem: str, *rows: tuple[list[float], str | None, bool]) -> CandidateGroup:
    return CandidateGroup(problem, tuple(Candidate(tuple(scores), answer, right) for scores, answer, right in rows))


def test_products_of_many_steps_stay_apart_in_logs() -> None:
    low, high = aggregate_scores([0.001] * 400, "prod"), aggregate_scores([0.002] * 400, "prod")
    assert math.exp(high) == 0.0
    assert low is not None
    assert high == pytest.approx(400 * math.log(0.002))
    assert low < high
    assert aggregate_scores([0.5, 0.0], "prod") == -math.inf
    assert aggregate_scores([], "min") is None


rows = st.lists(
    st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=7
)


@given(rows, st.data())
@settings(max_examples=80, deadline=None)
def test_closed_forms_equal_the_mean_over_all_subsets(
    drawn: list[tuple[float, str, bool]], data: st.DataObject
) -> None:
    scores, correct = [row[0] for row in drawn], [row[2] for row in drawn]
    answers = [row[1] for row in drawn]
    worth = {a: [c for b, c in zip(answers, correct, strict=True) if a == b] for a in answers}
    n = data.draw(st.integers(1, len(drawn)))
    best, any_right, voted = [], [], []
    for chosen in combinations(range(len(drawn)), n):
        top = [correct[i] for i in chosen if scores[i] == max(scores[j] for j in chosen)]
        best.append(sum(top) / len(top))
        any_right.append(any(correct[i] for i in chosen))
        votes = {a: sum(answers[i] == a for i in chosen) for a in answers}
        winners = [a for a, count in votes.items() if count == max(votes.values())]
        voted.append(sum(sum(worth[a]) / len(worth[a]) for a in winners) / len(winners))
    assert best_of(scores, correct, n) == pytest.approx(sum(best) / len(best))
    assert oracle(correct, n) == pytest.approx(sum(any_right) / len(any_right))
    assert majority_vote(answers, correct, n) == pytest.approx(sum(voted) / len(voted))


def test_one_answer_is_a_random_pick_whatever_the_rule() -> None:
    groups = [group("p", ([0.9], "a", True), ([0.2], "b", False), ([0.4], "b", False))]
    measured = measure_best_of_n(groups, [1], resamples=10)
    assert {rule: round(values[0], 9) for rule, values in measured.accuracy.items()} == dict.fromkeys(
        RULES, 0.333333333
    )


def test_rules_differ_as_they_should() -> None:
    groups = [
        group("p", ([0.9, 0.6], "a", True), ([0.95, 0.5], "b", False), ([0.2, 0.8], "b", False)),
    ]
    accuracy = {rule: values[0] for rule, values in measure_best_of_n(groups, [3], resamples=10).accuracy.items()}
    assert accuracy["best_min"] == 1.0
    assert accuracy["best_prod"] == 1.0  # .54 against .475 and .16
    assert accuracy["best_mean"] == 1.0
    assert accuracy["best_last"] == 0.0
    assert accuracy["majority"] == 0.0
    assert accuracy["weighted_min"] == 0.0  # .6 against .5 + .2
    assert accuracy["oracle"] == 1.0
    assert accuracy["random"] == pytest.approx(1 / 3)


def test_ties_are_shared_by_expectation() -> None:
    assert majority_vote(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert best_of([0.5, 0.5], [True, False], 2) == 0.5
    thirds = [math.log(w) for w in (0.1, 0.2, 0.3)]  # .1 + .2 and .3 tie, but not in floating point
    assert majority_vote(["a", "a", "b"], [True, True, False], 3, thirds) == 0.5


def test_answers_of_none_have_no_vote() -> None:
    assert majority_vote([None, None, "a"], [False, False, True], 3) == 1.0
    assert majority_vote([None, None], [False, False], 2) == 0.0
    assert majority_vote([None, "a"], [False, True], 1) == 0.5  # alone, None is a wrong pick


def test_votes_of_weight_zero_elect_as_equals() -> None:
    assert majority_vote(["a", "b"], [True, False], 2, [-math.inf, -math.inf]) == 0.5


def test_sampled_subsets_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["a"] * 5 + ["b"] * 4 + ["c"] * 3
    correct = [a == "a" for a in answers]
    exact = majority_vote(answers, correct, 5)  # 792 subsets
    monkeypatch.setattr(best_of_n, "MOST_SUBSETS", 700)
    sampled = majority_vote(answers, correct, 5, seed=3)
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=0.06)
    assert sampled == majority_vote(answers, correct, 5, seed=3)


def test_answers_without_steps_are_left_out_and_counted() -> None:
    groups = [group("p", ([], "a", True), ([0.5], "b", False)), group("q", ([0.5], "a", True), ([0.1], "b", False))]
    measured = measure_best_of_n(groups, resamples=50)
    assert measured.excluded == 1
    assert measured.sizes == (1, 2)
    assert measured.problems == (2, 1)
    assert measured.accuracy["oracle"] == (0.25, 1.0)
    assert not measured.intervals["oracle"][1].known  # one problem


def test_no_candidates_give_no_sizes_and_too_large_an_n_no_number() -> None:
    assert measure_best_of_n([]).sizes == ()
    measured = measure_best_of_n([group("p", ([0.5], "a", True))], [1, 8], resamples=10)
    assert measured.problems == (1, 0)
    assert math.isnan(measured.accuracy["majority"][1])


def test_random_pick_is_the_share_of_right_answers() -> None:
    assert random_pick([True, False, False, True]) == 0.5


def test_one_answer_alone_wins_the_weighted_vote_however_low_its_score() -> None:
    answers, correct = ["a", "b", None], [True, False, False]
    for low in (-math.inf, -5000.0):
        assert majority_vote(answers, correct, 1, [low, 0.0, 0.0]) == pytest.approx(1 / 3)
        assert majority_vote(answers, correct, 1, [low, low, 0.0]) == pytest.approx(1 / 3)
    assert majority_vote(answers, correct, 2, [-5001.0, -5000.0, 0.0]) == pytest.approx(1 / 3)
