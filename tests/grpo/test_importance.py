"""Answers that another engine sampled: what their weights are, and that they undo the difference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import Credit, CreditBatch, collate
from apportion.grpo.importance import importance_metrics, importance_weights, weighed, with_trainer_logprobs

MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
TRAINER = torch.tensor([[0.5, 0.3, 0.2, 0.9], [0.25, 0.8, 0.1, 0.1]]).log()
SAMPLER = torch.tensor([[0.5, 0.1, 0.4, 0.1], [0.5, 0.4, 0.9, 0.9]]).log()


def batch_of(rollout_of: Any, **facts: Any) -> CreditBatch:
    batch = collate([rollout_of([5, 6, 7]), rollout_of([5, 6])])
    return replace(batch, old_logprobs=SAMPLER[:, :3].where(batch.completion_mask, 0.0), **facts)


def test_a_weight_is_the_ratio_cut_at_the_cap() -> None:
    weights = importance_weights(TRAINER, SAMPLER, MASK, cap=2.5)
    assert weights.flatten().tolist() == pytest.approx([1.0, 2.5, 0.5, 1.0, 0.5, 2.0, 1.0, 1.0])
    assert weights.dtype == torch.float32
    rows = importance_weights(TRAINER, SAMPLER, MASK, cap=1.25, level="sequence")
    assert rows.flatten().tolist() == pytest.approx([1.25, 1.25, 1.25, 1.0, 1.0, 1.0, 1.0, 1.0])
    uncut = importance_weights(TRAINER, SAMPLER, MASK, cap=1e9, level="sequence")
    assert uncut[:, 0].tolist() == pytest.approx([1.5, 1.0])


def test_weights_carry_no_gradient_and_equal_probabilities_weigh_one() -> None:
    trainer = TRAINER.clone().requires_grad_()
    assert not importance_weights(trainer, SAMPLER, MASK, cap=2.0).requires_grad
    assert importance_weights(TRAINER, TRAINER, MASK, cap=1.0).eq(1).all()
    assert importance_weights(TRAINER, TRAINER, MASK, cap=0.5).flatten()[:3].tolist() == [0.5] * 3


def test_a_token_that_the_trainer_holds_for_impossible_weighs_nothing_and_a_huge_ratio_does_not_overflow() -> None:
    trainer, sampler = torch.tensor([[-1e4, 0.0]]), torch.tensor([[0.0, -1e4]])
    weights = importance_weights(trainer, sampler, torch.ones(1, 2, dtype=torch.bool), cap=3.0)
    assert weights.tolist() == [[0.0, pytest.approx(3.0)]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=12),
    st.floats(0.1, 10),
    st.sampled_from(["token", "sequence"]),
)
def test_weights_lie_between_nothing_and_the_cap_and_leave_masked_tokens_alone(
    tokens: list[tuple[float, float, bool]], cap: float, level: Any
) -> None:
    trainer, sampler, kept = (torch.tensor([list(column)]) for column in zip(*tokens))
    weights = importance_weights(trainer, sampler, kept.bool(), cap=cap, level=level)
    assert weights[~kept.bool()].eq(1).all()
    assert ((weights >= 0) & (weights <= cap * (1 + 1e-6)))[kept.bool()].all()
    seen = importance_metrics(trainer, sampler, kept.bool(), weights, cap)
    if kept.any():
        assert 0 <= seen["sampling/importance_truncated"] <= 1
        assert seen["sampling/importance_ess"] <= 1 + 1e-9 or math.isnan(seen["sampling/importance_ess"])


def test_weighted_by_their_ratio_samples_of_one_distribution_give_the_means_of_the_other() -> None:
    """E_mu[min(pi / mu, cap) f] is E_pi[f] where nothing is cut, by summing over all tokens."""
    generator = torch.Generator().manual_seed(0)
    pi, mu = torch.rand(2, 50, generator=generator).add(0.1).log().log_softmax(dim=1)
    value = torch.randn(50, generator=generator)
    weights = importance_weights(pi[None], mu[None], torch.ones(1, 50, dtype=torch.bool), cap=1e6)[0]
    assert float((mu.exp() * weights * value).sum()) == pytest.approx(float((pi.exp() * value).sum()), abs=1e-5)
    cut = importance_weights(pi[None], mu[None], torch.ones(1, 50, dtype=torch.bool), cap=1.5)[0]
    assert (mu.exp() * cut).sum() < 1


def test_metrics_by_hand() -> None:
    weights = importance_weights(TRAINER, SAMPLER, MASK, cap=2.0)  # 1, 2 (cut from 3), .5, .5, 2
    seen = importance_metrics(TRAINER, SAMPLER, MASK, weights, 2.0)
    assert seen == pytest.approx(
        {
            "sampling/logprob_gap": math.log(3),
            "sampling/importance_mean": 6 / 5,
            "sampling/importance_truncated": 2 / 5,
            "sampling/importance_ess": 36 / (5 * 9.5),
        }
    )
    uncorrected = importance_metrics(TRAINER, SAMPLER, MASK, None, None)
    assert uncorrected == pytest.approx({"sampling/logprob_gap": math.log(3)})
    assert importance_metrics(TRAINER, SAMPLER, torch.zeros_like(MASK), weights, 2.0) == {}


def test_the_trainers_log_probabilities_become_the_old_ones_and_the_engines_the_weights(rollout_of: Any) -> None:
    batch = batch_of(rollout_of)
    changed, weights, seen = with_trainer_logprobs(batch, TRAINER[:, :3].requires_grad_(), cap=2.0)
    assert changed.old_logprobs is not None
    assert not changed.old_logprobs.requires_grad
    assert changed.old_logprobs.tolist() == TRAINER[:, :3].where(batch.completion_mask, 0.0).tolist()
    assert weights is not None
    assert weights.flatten().tolist() == pytest.approx([1.0, 2.0, 0.5, 0.5, 2.0, 1.0])
    assert seen["sampling/importance_truncated"] == pytest.approx(2 / 5)
    _, none, seen = with_trainer_logprobs(batch, TRAINER[:, :3], cap=None)
    assert none is None
    assert set(seen) == {"sampling/logprob_gap"}
    with pytest.raises(ValueError, match="gave no log-probabilities"):
        with_trainer_logprobs(replace(batch, old_logprobs=None), TRAINER[:, :3], cap=2.0)


def test_credit_keeps_its_own_weight_and_its_advantages() -> None:
    credit = Credit(torch.tensor([[1.0, -2.0]]), loss_weight=torch.tensor([[0.5, 1.0]]), metrics={"x": 1.0})
    assert weighed(credit, None) is credit
    both = weighed(credit, torch.tensor([[2.0, 0.25]]))
    assert both.loss_weight is not None
    assert both.loss_weight.tolist() == [[1.0, 0.25]]
    assert both.advantages is credit.advantages
    assert both.metrics == {"x": 1.0}


@pytest.mark.parametrize(("options", "message"), [({"cap": 0.0}, "cap must"), ({"cap": 1.0, "level": "row"}, "level")])
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance_weights(TRAINER, SAMPLER, MASK, **options)
