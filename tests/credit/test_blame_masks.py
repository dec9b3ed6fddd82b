"""Masks that say which tokens keep the credit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.blame_masks import BoundarySlack, SparedPrefix, WrongStepsOnly, near
from apportion.credit.localized import FirstError, WrongSteps
from apportion.credit.process import ProcessReward
from apportion.credit.subreward import SubReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def steps(text: str) -> list[tuple[int, int, float]]:
    return [(i, i + 1, float(char)) for i, char in enumerate(text)]


def two_answers(batch: Batch) -> CreditBatch:
    return batch(
        {"tokens": 5, "reward": 1.0, "spans": steps("11011")},
        {"tokens": 5, "reward": 0.0, "spans": steps("11010")},
    )


# --- wrong steps only ------------------------------------------------------------------------------------------------


def test_wrong_steps_lose_and_nothing_else_is_touched(batch: Batch) -> None:
    credit = WrongStepsOnly(penalty=0.5)(two_answers(batch))
    assert credit.advantages.tolist() == [[0, 0, -0.5, 0, 0], [0, 0, -0.5, 0, -0.5]]
    assert credit.metrics == {"blamed_tokens": 0.3}


def test_the_reward_plays_no_part(batch: Batch) -> None:
    alone = batch({"tokens": 2, "reward": None, "spans": steps("01")})
    assert WrongStepsOnly()(alone).advantages.tolist() == [[-1, 0]]
    assert WrongStepsOnly().requires == {"spans:steps"}


# --- spared prefix ---------------------------------------------------------------------------------------------------


def test_a_wrong_answer_is_spared_before_its_first_error(batch: Batch) -> None:
    credit = SparedPrefix(Uniform(eps=0))(two_answers(batch))
    assert credit.advantages.tolist() == [[1] * 5, [0, 0, -1, -1, -1]]
    assert credit.parts["outcome"].tolist() == credit.advantages.tolist()
    assert credit.metrics == {"dead_groups": 0.0, "spared_tokens": 0.4}


def test_a_wrong_answer_without_a_located_error_keeps_its_blame(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 2, "reward": 0.0, "spans": steps("11")})
    assert torch.equal(SparedPrefix()(made).advantages, Uniform()(made).advantages)


def test_praise_in_the_prefix_of_a_wrong_answer_goes_too(batch: Batch) -> None:
    inner = ProcessReward(accumulate="own")
    made = two_answers(batch)
    assert inner(made).advantages[1, 0] > 0
    out = SparedPrefix(inner)(made).advantages
    assert out[1, :2].tolist() == [0, 0]
    assert torch.equal(out[1, 2:], inner(made).advantages[1, 2:])


def test_what_a_mask_needs_tells_and_conserves() -> None:
    assert SparedPrefix().requires == {"reward", "spans:steps"}
    assert SparedPrefix().extra_information == "where the first error is"
    claims = [SparedPrefix(inner).conserves for inner in (Uniform(), Uniform(source="format"), SubReward())]
    assert claims == ["sign", "none", "none"]


# --- boundary slack --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, "000000"), (1, "001100"), (2, "011110"), (3, "111111"), (9, "111111")]
)
def test_tokens_near_a_boundary(tokens: int, expected: str) -> None:
    boundaries = torch.tensor([[False, False, False, True, False, False]])
    assert near(boundaries, tokens).int()[0].tolist() == [int(char) for char in expected]


def long_answers(batch: Batch) -> CreditBatch:
    return batch(
        {"tokens": 8, "reward": 1.0, "spans": [(0, 8, 1.0)]},
        {"tokens": 8, "reward": 0.0, "spans": [(0, 3, 1.0), (3, 5, 0.0), (5, 8, 1.0)]},
    )


@pytest.mark.parametrize(("around", "kept"), [("faults", [0, 1, 6, 7]), ("first_error", [0, 1, 4, 5, 6, 7])])
def test_tokens_around_a_boundary_get_nothing_and_the_group_still_sums_to_zero(
    batch: Batch, around: Any, kept: list[int]
) -> None:
    rule = BoundarySlack(FirstError(), tokens=1, around=around)
    out = rule(long_answers(batch)).advantages
    assert out[1].nonzero()[:, 0].tolist() == kept
    assert out[0].ne(0).all()
    assert abs(float(out.sum())) < 1e-5
    assert rule.conserves == "zero_mean"


def test_dropped_tokens_enter_no_statistic(batch: Batch) -> None:
    made = long_answers(batch)
    without = batch(
        {"tokens": 8, "reward": 1.0, "spans": [(0, 8, 1.0)]},
        {
            "tokens": 8,
            "reward": 0.0,
            "spans": [(0, 3, 1.0), (3, 5, 0.0), (5, 8, 1.0)],
            "written": [t in (0, 1, 6, 7) for t in range(8)],
        },
    )
    assert torch.equal(BoundarySlack(WrongSteps(), tokens=1)(made).advantages, WrongSteps()(without).advantages)


def test_the_ends_of_an_answer_are_no_boundary(batch: Batch) -> None:
    made = batch(
        {"tokens": 4, "reward": 0.0, "spans": [(0, 4, 0.0)]},
        {"tokens": 9, "reward": 1.0, "spans": [(0, 9, 1.0)]},
    )
    credit = BoundarySlack(Uniform())(made)
    assert credit.metrics["slack_tokens"] == 0
    assert torch.equal(credit.advantages, Uniform()(made).advantages)


def test_a_row_that_would_lose_all_tokens_keeps_them(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 0.0, "spans": steps("10")}, {"tokens": 2, "reward": 1.0, "spans": steps("11")})
    assert torch.equal(BoundarySlack(Uniform())(made).advantages, Uniform()(made).advantages)


def test_no_slack_changes_nothing(batch: Batch) -> None:
    made = two_answers(batch)
    assert torch.equal(BoundarySlack(WrongSteps(), tokens=0)(made).advantages, WrongSteps()(made).advantages)


def test_claims_that_count_every_token_do_not_survive() -> None:
    claims = [BoundarySlack(inner).conserves for inner in (Uniform(), FirstError(center=False), SubReward())]
    assert claims == ["sign", "none", "none"]
    with pytest.raises(InputError, match="tokens must be 0 or more, not -1"):
        BoundarySlack(tokens=-1)
