"""Blame where a verifier found the fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.localized import FirstError, WrongSteps, first_fault, from_first_fault
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def steps(text: str) -> list[tuple[int, int, float]]:
    """``steps("110")``: two right steps and a wrong one, of a token each."""
    return [(i, i + 1, float(char)) for i, char in enumerate(text)]


def four_answers(batch: Batch, **options: object) -> CreditBatch:
    """Two right answers of four tokens; two wrong ones of five, first error at token 2 and 3."""
    return batch(
        {"tokens": 4, "reward": 1.0, "spans": steps("1111")},
        {"tokens": 4, "reward": 1.0, "spans": steps("1101")},  # a fault in a right answer is not blamed
        {"tokens": 5, "reward": 0.0, "spans": steps("11010")},
        {"tokens": 5, "reward": 0.0, "spans": steps("11100")},
        **options,
    )


# --- first error -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lam", "right", "prefix", "wrong"), [(0, 0.8333, -0.1667, -1.1667), (0.5, 0.6944, 0.1944, -1.3056)]
)
def test_first_error_by_hand(batch: Batch, lam: float, right: float, prefix: float, wrong: float) -> None:
    credit = FirstError(lam=lam)(four_answers(batch))
    expected = [[right] * 4 + [0], [right] * 4 + [0], [prefix] * 2 + [wrong] * 3, [prefix] * 3 + [wrong] * 2]
    torch.testing.assert_close(credit.advantages, torch.tensor(expected), rtol=0, atol=1e-4)
    assert credit.metrics == {"located_share": 1.0}


def test_without_centring_the_right_prefix_gets_nothing(batch: Batch) -> None:
    out = FirstError(center=False)(four_answers(batch)).advantages
    assert out.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, -1, -1, -1], [0, 0, 0, -1, -1]]


def test_blame_can_begin_some_tokens_earlier(batch: Batch) -> None:
    out = FirstError(center=False, boundary_slack=3)(four_answers(batch)).advantages
    assert out[2:].tolist() == [[-1] * 5, [-1] * 5]
    with pytest.raises(InputError, match="boundary_slack must be 0 or more tokens, not -1"):
        FirstError(boundary_slack=-1)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_first_error_gives_nothing_in_a_group_of_equal_rewards(batch: Batch, reward: float) -> None:
    made = batch(*({"tokens": 3, "reward": reward, "spans": steps(s)} for s in ("110", "011", "111")))
    credit = FirstError()(made)
    assert credit.advantages.eq(0).all()
    assert credit.metrics == {"located_share": 0.0}


def test_wrong_answers_without_a_located_error_are_blamed_as_a_whole(batch: Batch) -> None:
    made = batch(
        {"tokens": 3, "reward": 1.0, "spans": steps("111")},
        {"tokens": 3, "reward": 0.0, "spans": steps("111")},
        {"tokens": 3, "reward": 0.0},
        {"tokens": 3, "reward": 0.0, "spans": steps("110")},
        {"tokens": 3, "reward": 1.0, "group": 1},  # a group without signal is no part of the share
    )
    credit = FirstError(center=False)(made)
    assert credit.advantages[1].lt(0).all()
    assert torch.equal(credit.advantages[1], credit.advantages[2])
    assert credit.metrics == {"located_share": pytest.approx(1 / 3)}


def test_with_equal_lengths_and_no_located_error_it_is_the_outcome_rule(batch: Batch) -> None:
    made = batch(*({"tokens": 3, "reward": r} for r in (1.0, 0.0, 0.0, 1.0, 1.0)))
    torch.testing.assert_close(FirstError()(made).advantages, Uniform(eps=0)(made).advantages)


def test_a_reward_at_the_groups_mean_counts_as_wrong_and_is_not_passed_over(batch: Batch) -> None:
    made = batch(*({"tokens": 2, "reward": r, "spans": steps("10")} for r in (0.0, 0.5, 1.0)))
    out = FirstError(center=False)(made).advantages
    low, high = -((1 / 3) ** 0.5) / (2 / 3) ** 0.5, (2 / 3) ** 0.5 / (1 / 3) ** 0.5
    torch.testing.assert_close(out, torch.tensor([[0, low], [0, low], [high, high]]))


def test_the_earliest_fault_in_the_text_is_the_first_whatever_its_place_in_the_verdict(batch: Batch) -> None:
    made = batch({"tokens": 4, "reward": 0.0, "spans": [(3, 4, 0.0), (1, 2, 0.4), (0, 1, 0.5)]}, {"tokens": 4})
    table = made.spans["steps"]
    assert first_fault(table, 0.5).tolist() == [[False, True, False], [False] * 3]
    tail = from_first_fault(table, 0.5, made.completion_mask)
    assert tail.tolist() == [[False, True, True, True], [True] * 4]
    assert from_first_fault(table, 0.45, made.completion_mask)[0].tolist() == [False, True, True, True]
    assert from_first_fault(table, 0.3, made.completion_mask)[0].tolist() == [False, False, False, True]


# --- wrong steps -----------------------------------------------------------------------------------------------------


def test_wrong_steps_by_hand(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 1.0, "spans": steps("11")}, {"tokens": 2, "reward": 0.0, "spans": steps("10")})
    credit = WrongSteps(eps=0)(made)  # r = 2, 2, 0, -1: mean .75, std 1.29904
    expected = torch.tensor([[0.96225, 0.96225], [-0.57735, -1.34715]])
    torch.testing.assert_close(credit.advantages, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        credit.parts["penalty"], torch.tensor([[0.25, 0.25], [0.25, -0.75]]) / 1.29904, atol=1e-5, rtol=0
    )
    assert credit.metrics == {"blamed_tokens": 0.25}


def test_wrong_steps_are_blamed_where_all_answers_fail(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 0.0, "spans": steps("10")}, {"tokens": 2, "reward": 0.0, "spans": steps("11")})
    out = WrongSteps(eps=0)(made).advantages  # r = 0, -1, 0, 0: mean -.25, std .43301
    torch.testing.assert_close(out, torch.tensor([[0.57735, -1.73205], [0.57735, 0.57735]]), rtol=0, atol=1e-5)
    assert FirstError()(made).advantages.eq(0).all()


def test_a_wrong_step_in_a_right_answer_is_blamed_too_and_every_one_unless_only_the_first(batch: Batch) -> None:
    made = batch({"tokens": 4, "reward": 1.0, "spans": steps("1010")}, {"tokens": 1, "reward": 0.0})
    penalty = WrongSteps(normalize="outcome")(made).parts["penalty"]
    assert penalty[0].tolist() == [0, -1, 0, -1]
    first = WrongSteps(normalize="outcome", first_only=True, penalty=0.5)(made).parts["penalty"]
    assert first[0].tolist() == [0, -0.5, 0, 0]


def test_graded_penalties_go_by_the_score_and_add_up_to_one_penalty(batch: Batch) -> None:
    rule = WrongSteps(graded=True, threshold=1.0, normalize="outcome", penalty=2.0)
    apart = [(0, 1, 1.0), (1, 2, 0.75), (2, 4, 0.0)]
    made = batch({"tokens": 5, "reward": 1.0, "spans": apart}, {"tokens": 1, "reward": 0.0})
    assert rule(made).parts["penalty"][0].tolist() == [0, -0.5, -2, -2, 0]
    over = [(0, 3, 0.75), (1, 4, 0.5), (2, 4, 0.25)]
    made = batch({"tokens": 5, "reward": 1.0, "spans": over}, {"tokens": 1, "reward": 0.0})
    assert rule(made).parts["penalty"][0].tolist() == [-0.5, -1.5, -2, -2, 0]


def test_graded_or_not_is_one_where_scores_are_0_and_1(batch: Batch) -> None:
    made = four_answers(batch)
    torch.testing.assert_close(WrongSteps(graded=True)(made).advantages, WrongSteps()(made).advantages)


def test_normalising_the_outcome_alone_leaves_clean_tokens_unpraised(batch: Batch) -> None:
    made = four_answers(batch)
    credit = WrongSteps(normalize="outcome", outcome_weight=1.0)(made)
    torch.testing.assert_close(credit.parts["outcome"], Uniform()(made).advantages)
    no_penalty = WrongSteps(normalize="outcome", outcome_weight=1.0, penalty=0.0)(made)
    torch.testing.assert_close(no_penalty.advantages, Uniform()(made).advantages)
    dead = batch(*({"tokens": 2, "reward": 0.0, "spans": steps("10")} for _ in range(2)))
    assert WrongSteps(normalize="outcome")(dead).advantages.tolist() == [[0, -1], [0, -1]]


def test_what_is_conserved_depends_on_the_options() -> None:
    assert [FirstError().conserves, FirstError(center=False).conserves] == ["zero_mean", "none"]
    assert [WrongSteps().conserves, WrongSteps(normalize="outcome").conserves] == ["zero_mean", "none"]
    with pytest.raises(InputError, match="normalize must be tokens or outcome, not 'both'"):
        WrongSteps(normalize="both")  # type: ignore[arg-type]
