"""Rewards shaped by entropy within the right and the wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.gtpo import EntropyShaping, position_shares
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
EXACT = {"eps": 1e-12}


def four_answers(batch: Batch) -> CreditBatch:
    """Two right answers of two tokens and two wrong ones, of two and of one token."""
    made = batch(
        {"tokens": 2, "reward": 1.0},
        {"tokens": 2, "reward": 1.0},
        {"tokens": 2, "reward": 0.0},
        {"tokens": 1, "reward": 0.0},
    )
    return replace(made, entropy=torch.tensor([[1.0, 2.0], [3.0, 2.0], [1.0, 5.0], [0.25, 7.0]]))


def test_by_hand_with_the_outcomes_sign(batch: Batch) -> None:
    credit = EntropyShaping(entropy_weight=0.4, keep_sign=True, **EXACT)(four_answers(batch))
    # r+ = 1 + .4 * (2 * 1/4, 1; 2 * 3/4, 1) = 1.2, 1.4; 1.6, 1.4, mean 1.4.
    # r- = 1 + .4 * (2 * 1/5, 1; 2 * 4/5) = 1.16, 1.4; 1.64, mean 1.4.
    expected = torch.tensor([[1.2, 1.4], [1.6, 1.4], [-1.16, -1.4], [-1.64, 0]]) / 1.4
    torch.testing.assert_close(credit.advantages, expected)
    assert credit.metrics == {"flipped_tokens": 0.0}


def test_by_hand_as_published(batch: Batch) -> None:
    credit = EntropyShaping(**EXACT)(four_answers(batch))
    right = 2**0.5  # 1.05, 1.1, 1.15, 1.1: the deviations -.05, 0, .05, 0 over their standard deviation .05 / sqrt(2)
    low, mid, high = (0.06, 0.0, -0.06)  # -(1 + .1 * (.4, 1, 1.6)) against their mean
    std = (2 * 0.06**2 / 3) ** 0.5
    expected = [[-right, 0], [right, 0], [low / std, mid / std], [high / std, 0]]
    torch.testing.assert_close(credit.advantages, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_as_published_each_side_sums_to_zero_whatever_the_weights(batch: Batch) -> None:
    made = four_answers(batch)
    for a1, a2 in ((1.0, 0.1), (0.5, 0.5), (9.0, 0.01)):
        out = EntropyShaping(a1, a2, **EXACT)(made).advantages
        torch.testing.assert_close(out, EntropyShaping(**EXACT)(made).advantages, rtol=1e-4, atol=1e-4)
        for side in (slice(0, 2), slice(2, 4)):
            assert abs(float(out[side].sum())) < 1e-5


def test_as_published_half_of_the_tokens_of_right_answers_are_pushed_down(batch: Batch) -> None:
    made = batch(*({"tokens": 40, "reward": float(row < 4)} for row in range(8)))
    generator = torch.Generator().manual_seed(0)
    made = replace(made, entropy=torch.rand(8, 40, generator=generator))
    credit = EntropyShaping()(made)
    assert 0.4 < float(credit.advantages[:4].lt(0).double().mean()) < 0.6
    assert 0.35 < credit.metrics["flipped_tokens"] < 0.65
    assert EntropyShaping(keep_sign=True)(made).metrics["flipped_tokens"] == 0


def test_a_side_with_one_answer_gets_nothing_as_published_and_its_outcome_with_the_sign(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 3, "reward": 0.0}, {"tokens": 3, "reward": 0.0})
    made = replace(made, entropy=torch.tensor([[1.0, 2, 3], [1, 2, 3], [3, 1, 2]]))
    assert EntropyShaping()(made).advantages[0].eq(0).all()
    torch.testing.assert_close(EntropyShaping(keep_sign=True)(made).advantages[0], Uniform()(made).advantages[0])


def test_flat_entropy_with_the_sign_is_the_outcome(batch: Batch) -> None:
    for entropy in (0.0, 0.7):
        made = replace(four_answers(batch), entropy=torch.full((4, 2), entropy))
        out = EntropyShaping(keep_sign=True)(made).advantages
        torch.testing.assert_close(out, Uniform(eps=1e-8)(made).advantages)


def test_groups_of_equal_rewards_get_nothing(batch: Batch) -> None:
    for keep_sign in (False, True):
        made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 2, "reward": 1.0})
        made = replace(made, entropy=torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
        assert EntropyShaping(keep_sign=keep_sign)(made).advantages.eq(0).all()


def test_a_position_counts_the_rows_of_its_group_alive_there() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    out = position_shares(values, mask, torch.tensor([4, 4, 9]))
    assert out.tolist() == [[0.5, 1], [1.5, 0], [1, 1]]


def test_what_is_conserved_depends_on_the_sign_and_odd_weights_are_refused() -> None:
    assert [EntropyShaping().conserves, EntropyShaping(keep_sign=True).conserves] == ["zero_mean", "sign"]
    with pytest.raises(InputError, match="outcome_weight and eps must be over 0"):
        EntropyShaping(outcome_weight=0)
