"""Differences telescope, shares sum to one, and what is handed out is the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.redistribution import (
    AttentionShare,
    RewardDifference,
    mix_weights,
    reward_differences,
    token_scores,
)
from apportion.verifiers import InputError

MakeBatch = Callable[..., CreditBatch]
NAN = float("nan")
masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3)
numbers = st.lists(st.integers(-4, 4).map(lambda n: n / 4), min_size=15, max_size=15)


def scored(batch: CreditBatch, **scores: list[list[float]]) -> CreditBatch:
    return replace(batch, token_scores={name: torch.tensor(value) for name, value in scores.items()})


def close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


@given(mask=masks, levels=numbers, steps=st.lists(st.integers(0, 1), min_size=5, max_size=5))
def test_differences_telescope_to_the_last_level(mask: list[list[bool]], levels: list[float], steps: list[int]) -> None:
    inside = torch.tensor(mask)
    level = torch.tensor(levels, dtype=torch.float64).view(3, 5)[: len(mask)]
    ids = torch.tensor(steps).cumsum(0).expand(len(mask), 5).where(inside, -1)
    last = [row[m].tolist()[-1] if m.any() else 0.0 for row, m in zip(level, inside)]
    for step_ids in (None, ids):
        differences = reward_differences(level, inside, step_ids)
        assert differences[~inside].eq(0).all()
        close(differences.sum(dim=1)[:, None], [[value] for value in last])


def test_a_step_shares_what_it_added_among_its_tokens() -> None:
    levels = torch.tensor([[9.0, 1.0, 7.0, 8.0, 2.0]])
    step_ids = torch.tensor([[0, 0, 3, 3, 3]])
    close(reward_differences(levels, torch.ones(1, 5, dtype=torch.bool), step_ids), [[0.5, 0.5, 1 / 3, 1 / 3, 1 / 3]])


def test_the_returns_of_a_reward_model(batch: MakeBatch) -> None:
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 2, "reward": 0.0})
    made = scored(made, reward_model=[[0.5, 1.0], [0.25, 0.0]])
    # G of the model alone: 1, .5 and 0, -.25; the mean of the answers' G_0 is .5 and their deviation .5.
    close(assign_credit(RewardDifference(beta=1.0, eps=0.0), made).advantages, [[1.0, 0.0], [-1.0, -1.5]])
    # Half of it with half of the reward: G 1, .75 and 0, -.125.
    half = assign_credit(RewardDifference(eps=0.0), made)
    close(half.advantages, [[1.0, 0.5], [-1.0, -1.25]])
    close(half.parts["outcome"], [[0.5, 0.5], [-0.5, -0.5]])


def test_without_the_model_the_outcome_rule_remains(batch: MakeBatch) -> None:
    made = batch(*({"tokens": 3, "reward": r} for r in (0.0, 0.0, 1.0, 1.0)))
    made = scored(made, reward_model=[[3.0, -1.0, 2.0]] * 4)
    close(assign_credit(RewardDifference(beta=0.0, eps=0.0), made).advantages, [[-1.0] * 3] * 2 + [[1.0] * 3] * 2)


def test_own_changes_have_the_normalised_total_as_their_mean(batch: MakeBatch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 2, "reward": 0.0}, {"tokens": 2, "reward": 0.0})
    made = scored(made, reward_model=[[0.5, 0.0, 1.0], [0.25, 0.0, 0.0], [1.0, 0.5, 0.0]])
    total = torch.tensor([1.0, 0.0, 0.25])
    credit = assign_credit(RewardDifference(accumulate="own", eps=0.0), made).advantages
    means = credit.sum(dim=1) / torch.tensor([3.0, 2.0, 2.0])
    close(means[:, None], ((total - total.mean()) / total.std(correction=0))[:, None].tolist())


def test_levels_count_at_the_ends_of_steps_alone(batch: MakeBatch) -> None:
    spans = [(0, 2, 1.0), (2, 4, 1.0)]
    made = batch({"tokens": 4, "reward": 1.0, "spans": spans}, {"tokens": 4, "reward": 0.0, "spans": spans})
    made = scored(made, reward_model=[[99.0, 0.5, -99.0, 1.0], [55.0, 0.0, 55.0, 0.0]])
    own = RewardDifference(beta=1.0, accumulate="own", steps="steps", eps=0.0)
    close(assign_credit(own, made).advantages, [[1.0] * 4, [-1.0] * 4])


def test_a_group_of_equal_totals_keeps_the_plain_numbers(batch: MakeBatch) -> None:
    made = scored(batch(*[{"tokens": 2, "reward": 1.0}] * 2), reward_model=[[0.5, 0.0], [-0.5, 0.0]])
    close(assign_credit(RewardDifference(), made).advantages, [[0.0, -0.25], [0.0, 0.25]])


def test_a_model_without_differences_leaves_equal_rewards_without_credit(batch: MakeBatch) -> None:
    made = scored(batch(*[{"tokens": 2, "reward": 0.1}] * 3), reward_model=[[0.0, 0.0]] * 3)
    for strategy in (RewardDifference(), RewardDifference(accumulate="own")):
        assert assign_credit(strategy, made).advantages.eq(0).all()


@given(mask=masks, attention=numbers, beta=st.sampled_from([0.0, 0.5, 1.0]))
def test_shares_sum_to_one(mask: list[list[bool]], attention: list[float], beta: float) -> None:
    inside = torch.tensor(mask)
    weights = mix_weights(torch.tensor(attention).view(3, 5)[: len(mask)], inside, beta)
    assert weights[~inside].eq(0).all()
    assert weights.ge(0).all()
    torch.testing.assert_close(weights.sum(dim=1), inside.any(dim=1).float())


def test_attention_hands_the_outcome_out(batch: MakeBatch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 3, "reward": 0.0})
    made = scored(made, attention=[[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    close(
        assign_credit(AttentionShare(eps=0.0), made).advantages,  # shares .375, .125, .5 and 1/6, 1/6, 2/3
        [[1.0, 0.625, 0.5], [-1.0, -5 / 6, -2 / 3]],
    )
    own = assign_credit(AttentionShare(accumulate="own", eps=0.0), made)
    close(own.advantages, [[1.125, 0.375, 1.5], [-0.5, -0.5, -2.0]])
    assert own.metrics["effective_tokens"] == pytest.approx((1 / 0.40625 + 2) / 6)


def test_with_its_end_alone_an_answer_is_credited_as_a_whole(batch: MakeBatch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 2, "reward": 0.0})
    made = scored(made, attention=[[3.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    close(assign_credit(AttentionShare(beta=0.0, eps=0.0), made).advantages, [[1.0] * 3, [-1.0, -1.0, 0.0]])


def test_a_reward_that_is_not_there_is_handed_out_to_nobody(batch: MakeBatch) -> None:
    rows = [{"tokens": 2, "reward": r} for r in (1.0, None, 0.0)]
    made = scored(batch(*rows), attention=[[1.0, 1.0]] * 3, reward_model=[[5.0, 5.0]] * 3)
    for strategy in (AttentionShare(), RewardDifference()):
        assert assign_credit(strategy, made).advantages[1].eq(0).all()


def test_scores_that_are_not_there_are_named(batch: MakeBatch) -> None:
    made = scored(batch({"tokens": 2, "reward": 1.0}), other=[[1.0, 1.0]])
    with pytest.raises(InputError, match=r"needs token_scores of scorers\.attention; the batch has those of: other"):
        token_scores("attention", made)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RewardDifference(beta=1.5), "beta is a share from 0 to 1"),
        (lambda: AttentionShare(beta=-0.5), "beta is a share from 0 to 1"),
        (lambda: AttentionShare(accumulate="both"), "accumulate must be return or own"),
        (lambda: RewardDifference(accumulate="both"), "accumulate must be return or own"),
    ],
)
def test_bad_options_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build()
