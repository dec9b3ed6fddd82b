"""Implicit rewards of a second language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.implicit import ImplicitReward, pairwise_accuracy
from apportion.credit.ops import leave_one_out
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
PLAIN = ImplicitReward(rm_coef=1.0, batch_norm=False, whiten=False)


def with_scores(batch: CreditBatch, *rows: list[float]) -> CreditBatch:
    width = batch.completion_mask.shape[1]
    table = torch.tensor([row + [99.0] * (width - len(row)) for row in rows])  # what lies outside must not count
    return replace(batch, token_scores={"implicit": table.reshape(len(rows), width)})


def test_the_return_of_rewards_less_the_others_mean_by_hand(batch: Batch) -> None:
    made = with_scores(batch({"tokens": 2, "reward": 0.0}, {"tokens": 1, "reward": 1.0}), [1.0, 3.0], [4.0])
    # n = 2: r = 2 q - (2 + 4); [-4, 0] and [2]; the returns [-4, 0] and [2]
    credit = PLAIN(made)
    assert credit.parts["implicit"].tolist() == [[-4, 0], [2, 0]]
    assert credit.parts["outcome"].tolist() == [[-1, -1], [1, 0]]
    assert credit.metrics == {"pairwise_accuracy": 0.5}  # 1 + 3 against 4: a tie


def test_the_batchs_largest_return_is_the_unit(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 0.0}, {"tokens": 1, "reward": 1.0})
    strategy = replace(PLAIN, batch_norm=True)
    here = strategy(with_scores(made, [1.0, -8.0], [4.0])).parts["implicit"]  # the returns: -7 -8 | 4
    there = PLAIN(with_scores(made, [0.125, -1.0], [0.5])).parts["implicit"]
    torch.testing.assert_close(here, there)
    assert strategy(with_scores(made, [0.0, 0.0], [0.0])).parts["implicit"].eq(0).all()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from([0.0, 1.0]),
            st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), max_size=5),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_against_a_slow_loop(rollout: Callable[..., Rollout], rows: list[tuple[int, float, list[float]]]) -> None:
    made = collate([rollout(len(q), reward, group) for group, reward, q in rows])
    made = with_scores(made, *(q for _, _, q in rows))
    credit = ImplicitReward(whiten=False)(made)
    largest = max((abs(sum(q[t:])) for _, _, q in rows for t in range(len(q))), default=0) or 1.0
    for index, (group, _, q) in enumerate(rows):
        means = [sum(p) / len(p) / largest for other, _, p in rows if other == group and p]
        n = len(means)
        for t in range(len(q)):
            rewards = [(n * x / largest - sum(means)) / (n - 1) if n > 1 else 0.0 for x in q]
            assert float(credit.parts["implicit"][index, t]) == pytest.approx(5 * sum(rewards[t:]), abs=1e-4)
    outcome = leave_one_out(made.outcome(), made.group_ids)
    assert credit.parts["outcome"].sum(dim=1).tolist() == pytest.approx(
        [float(value) * len(q) for value, (_, _, q) in zip(outcome, rows)]
    )


def test_whitening_leaves_mean_zero_and_spread_one_over_tokens(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 0.0}, {"tokens": 2, "reward": 1.0}, {"tokens": 1, "reward": 1.0})
    credit = ImplicitReward()(with_scores(made, [0.3, -0.2, 0.1], [0.5, 0.4], [-0.6]))
    tokens = credit.advantages[made.completion_mask].double()
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-5)
    assert set(credit.parts) == {"implicit", "outcome", "centring"}


def test_the_sum_of_log_ratios_ranks_answers(batch: Batch) -> None:
    groups = torch.tensor([0, 0, 0, 1, 1])
    outcome = torch.tensor([1.0, 0.0, 0.0, 1.0, float("nan")])
    assert pairwise_accuracy(torch.tensor([2.0, 1.0, 3.0, 9.0, 0.0]), outcome, groups) == 0.5
    assert math.isnan(pairwise_accuracy(torch.zeros(2), torch.ones(2), groups[:2]))


def test_a_missing_scorer_and_a_score_without_a_number_are_named(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 0.0}, {"tokens": 2, "reward": 1.0})
    with pytest.raises(InputError, match=r"credit needs token_scores of scorers\.implicit; .*: none"):
        ImplicitReward()(made)
    with pytest.raises(InputError, match="token scores of implicit: row 1 holds a number that is not finite"):
        ImplicitReward()(with_scores(made, [0.0], [0.0, float("nan")]))
    assert ImplicitReward(scorer="mine").requires == {"reward", "token_scores:mine"}
