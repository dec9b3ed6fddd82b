"""The first wrong step by bisection: found where correctness is monotone, in a logarithm of the steps."""

import math
from itertools import pairwise

import pytest

from apportion.prm.binary_search import BinarySearch
from apportion.prm.labels import Solution
from apportion.verifiers import InputError, Sample, Verdict


def solution(num_steps, right=False, problem="p", after=""):
    """Steps "0", "1", ...; the verifier finds the outcome in the metadata."""
    words = [f"s{step}" for step in range(num_steps)]
    text, stops = " ".join(words), []
    for word in words:
        stops.append((stops[-1] + 1 if stops else 0) + len(word))
    steps = tuple((stop - len(word), stop) for word, stop in zip(words, stops))
    return Solution(problem, Sample("?", text + after, None, {"right": right}), steps)


def answer(samples):
    return [Verdict(None if s.metadata["right"] is None else float(s.metadata["right"])) for s in samples]


def ask(verifier, samples):
    return verifier(samples)


class Policy:
    """Succeeds from the prefixes that ``good`` says, and keeps which ones it was asked, round by round."""

    def __init__(self, good):
        self.good, self.rounds = good, []

    def __call__(self, prefixes, k):
        self.rounds.append([count for _, count in prefixes])
        return [[Sample("?", "", None, {"right": self.good(count)})] * k for _, count in prefixes]


def search(solutions, good, **options):
    policy = Policy(good)
    return BinarySearch(answer, **{"num_samples": 2, **options})(solutions, ask, policy), policy


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 8, 20])
def test_the_first_error_is_found_wherever_it_is(num_steps):
    for wrong in range(num_steps):
        told, policy = search([solution(num_steps)], lambda count, wrong=wrong: count <= wrong)
        expected = (1.0,) * wrong + (0.0,) + (None,) * (num_steps - wrong - 1)
        assert told.solutions[0].labels == expected
        bare = wrong == 0  # then the problem itself is continued too
        assert len(policy.rounds) <= math.ceil(math.log2(num_steps)) + bare
        assert told.counts["continuations"] == 2 * len(policy.rounds)


def test_the_prefix_half_way_is_continued():
    _, policy = search([solution(8)], lambda count: count <= 2)
    assert policy.rounds == [[4], [2], [3]]


def test_all_steps_of_a_right_answer_are_right_and_nothing_is_sampled():
    told, policy = search([solution(5, right=True)], lambda count: False)
    assert (told.solutions[0].labels, policy.rounds) == ((1.0,) * 5, [])


def test_a_problem_that_the_policy_never_solves_says_nothing_of_its_solutions():
    told, policy = search([solution(4)], lambda count: False)
    assert told.solutions[0].labels == (None,) * 4
    assert policy.rounds == [[2], [1], [0]]


def test_an_answer_of_which_nobody_knows_whether_it_is_right_is_not_searched():
    told, policy = search([solution(4, right=None)], lambda count: True)
    assert (told.solutions[0].labels, policy.rounds) == ((None,) * 4, [])


def test_a_prefix_whose_continuations_nobody_can_judge_ends_the_search():
    told, policy = search([solution(4)], lambda count: None)
    assert (told.solutions[0].labels, policy.rounds) == ((None,) * 4, [[2]])


def test_the_error_may_lie_behind_the_last_step():
    told, policy = search([solution(3, after=" and so nothing")], lambda count: True)
    assert (told.solutions[0].labels, policy.rounds) == ((1.0,) * 3, [[2], [3]])
    told, _ = search([solution(3, after=" and so nothing")], lambda count: count < 3)
    assert told.solutions[0].labels == (1.0, 1.0, 0.0)


def test_searches_go_on_side_by_side_and_equal_prefixes_are_sampled_once():
    told, policy = search([solution(8), solution(8), solution(8, problem="q"), solution(2)], lambda count: count <= 2)
    assert policy.rounds == [[4, 4, 1], [2, 2], [3, 3]]
    assert told.counts["prefixes"] == 7
    assert [one.labels.index(0.0) for one in told.solutions] == [2, 2, 2, 1]


def test_the_saving_is_against_continuing_every_step_but_the_last():
    told, _ = search([solution(8), solution(8), solution(8, problem="q")], lambda count: count <= 2)
    assert told.counts["continuations"] == 2 * 6
    assert told.counts["continuations at every step"] == 2 * 14


def test_the_sampled_shares_stay_beside_the_labels():
    told, _ = search([solution(8)], lambda count: count <= 2, num_samples=4)
    assert told.solutions[0].evidence == {
        "k": 4,
        "success_shares": [None, 1.0, 0.0, 0.0, None, None, None, 0.0],
        "standard_errors": [None, 0.0, 0.0, 0.0, None, None, None, 0.0],
        "num_samples": [0, 4, 4, 4, 0, 0, 0, 0],
    }


def test_where_correctness_is_not_monotone_some_change_from_good_to_bad_is_found():
    good = [True, False, True, True, False, True, False, False, False]  # of prefixes of 0 to 8 steps
    told, _ = search([solution(8)], lambda count: good[count])
    wrong = told.solutions[0].labels.index(0.0)
    assert (good[wrong], good[wrong + 1]) in list(pairwise([True, False]))


def test_the_threshold_is_a_share_to_be_exceeded():
    class Half(Policy):
        def __call__(self, prefixes, k):
            self.rounds.append([count for _, count in prefixes])
            return [[Sample("?", "", None, {"right": place % 2}) for place in range(k)] for _ in prefixes]

    for threshold, labels in ((0.0, (1.0, 0.0)), (0.5, (None, None))):
        found = BinarySearch(answer, 2, threshold)([solution(2)], ask, Half(None))
        assert found.solutions[0].labels == labels


def test_options_under_which_nothing_can_be_found_are_refused():
    with pytest.raises(InputError, match="num_samples=0"):
        BinarySearch(answer, 0)
    with pytest.raises(InputError, match="threshold=1"):
        BinarySearch(answer, 8, 1.0)
    with pytest.raises(InputError, match=r"set verifier@verifiers\.answer=NAME"):
        BinarySearch(None)
