"""A realised update is the step by hand, and leaves the policy bit for bit as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from apportion.credit import Credit, CreditBatch, Rollout, collate
from apportion.grpo.forward import score_in_parts
from apportion.grpo.loss import LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.realised import RealisedUpdate, class_means, realised_update
from apportion.grpo.update import NonFinite, OptimConfig, build_optimizer

LENGTHS = (4, 1, 7, 3, 5, 6)
NAMES = ("error", "other", "nothing")
Rollouts = tuple[list[list[int]], list[list[int]], CreditBatch]


@pytest.fixture
def rollouts(policy: Policy, rollout_of: Callable[..., Rollout]) -> Rollouts:
    """Six rows of the policy's own, in two groups; one left out, one with a token of another writer."""
    draw = torch.Generator().manual_seed(0)
    made = [
        rollout_of(
            torch.randint(3, 24, (length,), generator=draw).tolist(),
            prompt=torch.randint(3, 24, (1 + row % 2,), generator=draw).tolist(),
            group=row % 2,
            truncated=row == 3,
            model_mask=[at != 2 for at in range(length)] if row == 4 else None,
        )
        for row, length in enumerate(LENGTHS)
    ]
    batch = collate(made, mask_truncated=True)
    prompts, completions = [list(r.prompt_ids) for r in made], [list(r.completion_ids) for r in made]
    old = score_in_parts(policy, prompts, completions, temperature=0.8, rows=8).logprobs
    return prompts, completions, replace(batch, old_logprobs=old, ref_logprobs=old - 0.1)


def credit_of(batch: CreditBatch) -> Credit:
    draw = torch.Generator().manual_seed(1)
    return Credit(torch.randn(batch.completion_mask.shape, generator=draw).where(batch.completion_mask, 0.0))


def classes_of(batch: CreditBatch) -> torch.Tensor:
    classes = torch.ones(batch.completion_mask.shape, dtype=torch.long)
    classes[:, 1] = 0
    classes[:, 3] = -1
    return classes


def update(policy: Policy, rollouts: Rollouts, **options: Any) -> RealisedUpdate:
    prompts, completions, batch = rollouts
    return realised_update(
        policy,
        prompts,
        completions,
        batch,
        options.pop("credit", credit_of(batch)),
        options.pop("loss", LossConfig()),
        options.pop("optim", OptimConfig(lr=0.02)),
        max_tokens=9,
        temperature=0.8,
        classes=classes_of(batch),
        class_names=NAMES,
        **options,
    )


def distributions(policy: Policy, rollouts: Rollouts, row: int) -> torch.Tensor:
    prompts, completions, _ = rollouts
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompts[row] + completions[row]])).logits[0]
    return (logits[len(prompts[row]) - 1 : -1].double() / 0.8).log_softmax(dim=-1)


def test_the_step_is_that_of_a_hand_written_loss_and_adamw(policy: Policy, rollouts: Rollouts) -> None:
    prompts, completions, batch = rollouts
    mask, credit = batch.completion_mask, credit_of(batch)
    optim = OptimConfig(lr=0.02, max_grad_norm=0.05, weight_decay=0.1, schedule="linear", warmup_steps=7)
    found = update(policy, rollouts, optim=optim)
    mine = replace(policy, model=copy.deepcopy(policy.model))
    loss = torch.zeros(())
    for row in range(len(prompts)):
        logits = mine.model(input_ids=torch.tensor([prompts[row] + completions[row]])).logits[0] / 0.8
        for at, token in enumerate(completions[row]):
            if mask[row, at]:
                logprob = logits[len(prompts[row]) - 1 + at].log_softmax(-1)[token]
                loss = loss - credit.advantages[row, at] * (logprob - logprob.detach()).exp() / mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(mine.model.parameters(), 0.05)
    torch.optim.AdamW(mine.model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1).step()
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert found.grad_norm > 0.05
    kls, changes, k3 = [], [], []
    for row in range(len(prompts)):
        old, new = distributions(policy, rollouts, row), distributions(mine, rollouts, row)
        for at, token in enumerate(completions[row]):
            change = float(new[at, token] - old[at, token]) if mask[row, at] else 0.0
            assert found.change[row, at].item() == pytest.approx(change, abs=1e-4)
            if mask[row, at]:
                kls.append(float((old[at].exp() * (old[at] - new[at])).sum()))
                k3.append(math.exp(change) - change - 1)
                changes.append(change)
    assert max(map(abs, changes)) > 0.05
    assert found.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert found.kl_k3 == pytest.approx(sum(k3) / len(k3), rel=1e-2)
    assert not found.change[~mask].any()


def test_the_change_of_a_class_is_the_mean_over_its_trained_tokens(policy: Policy, rollouts: Rollouts) -> None:
    found, mask = update(policy, rollouts), rollouts[2].completion_mask
    second = mask[:, 1]
    assert found.by_class["error"] == pytest.approx(float(found.change[second, 1].mean()))
    other = mask.clone()
    other[:, [1, 3]] = False
    assert found.by_class["other"] == pytest.approx(float(found.change[other].mean()))
    assert math.isnan(found.by_class["nothing"])
    assert class_means(torch.tensor([[1.0, 4.0]]), torch.tensor([[1, 1]]), ("a", "b"))["b"] == 2.5


def test_what_is_praised_becomes_more_likely_and_what_is_blamed_less(policy: Policy, rollouts: Rollouts) -> None:
    batch = rollouts[2]
    praise = Credit(batch.completion_mask.float())
    more = update(policy, rollouts, credit=praise, optim=OptimConfig(lr=0.002))
    less = update(policy, rollouts, credit=Credit(-praise.advantages), optim=OptimConfig(lr=0.002))
    assert more.change.sum() > 0 > less.change.sum()
    assert more.grad_norm == pytest.approx(less.grad_norm)
    assert more.kl > 0
    assert less.kl > 0


def test_the_clip_fraction_counts_ratios_beyond_the_range_on_the_side_of_the_advantage(
    policy: Policy, rollouts: Rollouts
) -> None:
    batch = rollouts[2]
    mask, advantages = batch.completion_mask, credit_of(batch).advantages
    assert batch.old_logprobs is not None
    # Half of the tokens were sampled by a policy 0.5 nats off: after the step too their ratios lie outside.
    off = torch.zeros(mask.shape)
    off[:, ::2] = 0.5
    moved = (*rollouts[:2], replace(batch, old_logprobs=batch.old_logprobs - off))
    found = update(policy, moved, optim=OptimConfig(lr=1e-6))
    assert found.clip_fraction == pytest.approx(float((off.gt(0) & advantages.gt(0))[mask].double().mean()))
    assert 0 < found.clip_fraction < 1
    wide = update(policy, moved, optim=OptimConfig(lr=1e-6), loss=LossConfig(clip_high=0.7))
    assert wide.clip_fraction == 0.0
    assert update(policy, moved, loss=LossConfig(surrogate="sapo")).clip_fraction == 0.0
    with_kl = update(policy, moved, optim=OptimConfig(lr=1e-6), loss=LossConfig(kl_coef=0.1, kl_off_policy=True))
    assert with_kl.clip_fraction == found.clip_fraction


def test_nothing_of_the_policy_changes(policy: Policy, rollouts: Rollouts) -> None:
    optimizer, _ = build_optimizer(policy, OptimConfig(), 10)
    policy.model.train()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    streams = torch.get_rng_state()
    with torch.no_grad():
        first = update(policy, rollouts)
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert torch.equal(torch.get_rng_state(), streams)
    assert policy.model.training
    assert not optimizer.state
    for parameter in policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    again = update(policy, rollouts)  # the gradients of the policy's own do not leak into the step
    assert torch.equal(again.change, first.change)
    assert all(bool((parameter.grad == 1).all()) for parameter in policy.model.parameters())


def test_the_result_does_not_depend_on_the_size_of_the_micro_batches(policy: Policy, rollouts: Rollouts) -> None:
    whole = update(policy, rollouts)
    parts = update(policy, rollouts, optim=OptimConfig(lr=0.02, micro_batch_rows=1))
    assert torch.allclose(whole.change, parts.change, atol=1e-3)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-2)


def test_credit_of_zeros_changes_nothing(policy: Policy, rollouts: Rollouts) -> None:
    found = update(policy, rollouts, credit=Credit(torch.zeros(rollouts[2].completion_mask.shape)))
    assert not found.change.any()
    assert (found.kl, found.kl_k3, found.clip_fraction, found.grad_norm) == (0.0, 0.0, 0.0, 0.0)
    assert found.by_class["other"] == 0.0


def test_a_loss_that_is_not_finite_and_a_batch_without_its_sampler_are_refused(
    policy: Policy, rollouts: Rollouts
) -> None:
    prompts, completions, batch = rollouts
    assert batch.old_logprobs is not None
    with pytest.raises(ValueError, match="old_logprobs"):
        update(policy, (prompts, completions, replace(batch, old_logprobs=None)), credit=credit_of(batch))
    broken = batch.old_logprobs.clone()
    broken[0, 0] = math.nan
    with pytest.raises(NonFinite, match="row 0 at token 0"):
        update(policy, (prompts, completions, replace(batch, old_logprobs=broken)))
    with pytest.raises(NonFinite, match=f"after the step .* in row 0 at token 0 .id {completions[0][0]}"):
        update(policy, rollouts, optim=OptimConfig(lr=1e20, weight_decay=1e20))
