"""Labels by continuations: their numbers, what is sampled and what is not."""

import math

import pytest

from apportion.prm.labels import Solution
from apportion.prm.monte_carlo import MonteCarlo, SuccessCount, Successes, passed
from apportion.verifiers import InputError, Sample, Verdict

TEXT = "one\ntwo\nthree"
STEPS = ((0, 3), (4, 7), (8, 13))


def solution(text=TEXT, steps=STEPS, problem="p"):
    return Solution(problem, Sample(f"{problem}?", text, "right"), tuple(steps))


def ask(verifier, samples):
    return verifier(samples)


def answer(samples):
    """The last word is the answer; a completion that says so cannot be judged."""
    return [Verdict(None if "unclear" in s.completion else float(s.completion.endswith(s.reference))) for s in samples]


class Policy:
    """Continues a prefix with the endings that its text is told to have, and keeps what it was asked."""

    def __init__(self, endings):
        self.endings, self.asked = endings, []

    def __call__(self, prefixes, k):
        self.asked.append([(one.problem_id, one.prefix(count)) for one, count in prefixes])
        return [
            [Sample("", f"{one.prefix(count)} {ending}", "right") for ending in self.endings[one.prefix(count)][:k]]
            for one, count in prefixes
        ]


def policy():
    return Policy({"one": ["right", "wrong", "wrong", "wrong"], "one\ntwo": ["wrong"] * 4, "else": ["right"] * 4})


def test_a_soft_label_is_the_share_of_successes_with_its_standard_error():
    told = MonteCarlo(answer, num_samples=4)([solution()], ask, policy())
    assert told.solutions[0].labels == (0.25, 0.0, 0.0)
    assert told.solutions[0].evidence == {
        "k": 4,
        "success_shares": [0.25, 0.0, 0.0],
        "standard_errors": [math.sqrt(0.25 * 0.75 / 4), 0.0, 0.0],
        "num_samples": [4, 4, 0],
    }


@pytest.mark.parametrize(("threshold", "labels"), [(0.0, (1.0, 0.0, 0.0)), (0.25, (0.0, 0.0, 0.0))])
def test_a_hard_label_says_whether_the_share_exceeds_the_threshold(threshold, labels):
    told = MonteCarlo(answer, 4, threshold)([solution()], ask, policy())
    assert told.solutions[0].labels == labels
    assert told.solutions[0].evidence["success_shares"] == [0.25, 0.0, 0.0]


@pytest.mark.parametrize("threshold", [None, 0.0, 0.9])
def test_the_step_that_ends_the_answer_has_the_outcome_for_a_label_and_is_not_continued(threshold):
    text = "else\nright"
    sampler = policy()
    told = MonteCarlo(answer, 4, threshold)([solution(text, [(0, 4), (5, 10)])], ask, sampler)
    assert told.solutions[0].labels == (1.0, 1.0)
    assert sampler.asked == [[("p", "else")]]


def test_a_last_step_with_text_behind_it_is_continued():
    sampler = Policy({"one": ["right", "wrong"]})
    told = MonteCarlo(answer, 2)([solution("one more", [(0, 3)])], ask, sampler)
    assert told.solutions[0].labels == (0.5,)


def test_equal_prefixes_of_one_problem_are_sampled_once_and_those_of_two_problems_twice():
    sampler = policy()
    others = [solution(), solution("one\ntwo\nelse", ((0, 3), (4, 7), (8, 12))), solution(problem="q")]
    told = MonteCarlo(answer, 4)(others, ask, sampler)
    assert sampler.asked == [[("p", "one"), ("p", "one\ntwo"), ("q", "one"), ("q", "one\ntwo")]]
    assert [one.labels[:2] for one in told.solutions] == [(0.25, 0.0)] * 3
    assert (told.counts["prefixes"], told.counts["continuations"]) == (4, 16)


def test_all_prefixes_of_a_batch_are_sampled_in_one_call_and_judged_in_one():
    calls = []

    def judge(verifier, samples):
        calls.append(len(samples))
        return verifier(samples)

    sampler = policy()
    MonteCarlo(answer, 4)([solution(problem=name) for name in "abc"], judge, sampler)
    assert (len(sampler.asked), calls) == (1, [3, 24])


def test_continuations_that_nobody_can_judge_count_for_nothing():
    sampler = Policy({"one": ["right", "unclear", "unclear", "wrong"], "one\ntwo": ["unclear"] * 4})
    told = MonteCarlo(answer, 4)([solution()], ask, sampler)
    assert told.solutions[0].labels == (0.5, None, 0.0)
    assert told.solutions[0].evidence["num_samples"] == [2, 0, 0]
    assert told.solutions[0].evidence["standard_errors"] == [math.sqrt(0.125), None, 0.0]
    assert told.counts["unjudged"] == 6


def test_an_outcome_that_nobody_can_judge_leaves_the_last_step_unlabelled():
    told = MonteCarlo(answer, 4)([solution("one\ntwo\nunclear", ((0, 3), (4, 7), (8, 15)))], ask, policy())
    assert told.solutions[0].labels == (0.25, 0.0, None)
    assert told.solutions[0].evidence["standard_errors"][2] is None


def test_no_solution_asks_for_nothing():
    sampler = policy()
    assert MonteCarlo(answer)([], ask, sampler).solutions == []
    assert sampler.asked == []


def test_a_count_says_what_it_knows():
    assert SuccessCount(3, 4).share == 0.75
    assert SuccessCount(0, 0).share is SuccessCount(0, 0).standard_error is None
    assert SuccessCount(8, 8).standard_error == 0.0


def test_what_was_sampled_is_remembered_between_calls():
    sampler = policy()
    successes = Successes(answer, 4, ask, sampler)
    first = successes([(solution(), 1)])
    assert successes([(solution(), 1), (solution(), 2)]) == [*first, SuccessCount(0, 4)]
    assert sampler.asked == [[("p", "one")], [("p", "one\ntwo")]]


def test_a_score_of_a_half_passes_and_an_abstention_is_no_failure():
    assert passed([Verdict(0.5), Verdict(0.49), Verdict(None)]) == [True, False, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": None}, "set verifier@verifiers.answer=NAME"),
        ({"num_samples": 0}, "num_samples=0: must be at least 1"),
        ({"threshold": 1.0}, r"threshold=1\.0: .*0 <= threshold < 1"),
        ({"threshold": -0.1}, r"threshold=-0\.1"),
        ({"threshold": float("nan")}, "threshold=nan"),
    ],
)
def test_options_under_which_no_label_can_be_made_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        MonteCarlo(**{"answer": answer, **options})
