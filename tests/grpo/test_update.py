"""One optimiser step: the split into micro-batches changes nothing, and numbers that are not finite change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from apportion.credit import Credit, Rollout, collate
from apportion.grpo import update
from apportion.grpo.loss import AGGREGATIONS, LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.update import (
    NonFinite,
    OptimConfig,
    accumulate_gradients,
    build_optimizer,
    optimizer_step,
    update_metrics,
)
from apportion.grpo.window import Window, minibatch_rows

LENGTHS = (4, 1, 7, 3, 5, 5, 2, 6)


@pytest.fixture
def window(policy: Policy, rollout_of: Callable[..., Rollout]) -> Window:
    """Eight rows in three groups, the fourth left out, the sixth with a token that the policy did not write."""
    draw = torch.Generator().manual_seed(0)
    rollouts = [
        rollout_of(
            torch.randint(3, 24, (length,), generator=draw).tolist(),
            prompt=torch.randint(3, 24, (1 + row % 3,), generator=draw).tolist(),
            group=row % 3,
            truncated=row == 3,
            model_mask=[at != 2 for at in range(length)] if row == 5 else None,
        )
        for row, length in enumerate(LENGTHS)
    ]
    batch = collate(rollouts, mask_truncated=True)
    mask = batch.completion_mask
    old = -3.4 + 0.3 * torch.randn(mask.shape, generator=draw)
    window = Window.open(5, rollouts, replace(batch, old_logprobs=old))
    window.credit = Credit(
        torch.randn(mask.shape, generator=draw).where(mask, 0.0), torch.rand(mask.shape, generator=draw)
    )
    window.ref_logprobs = old + 0.2 * torch.randn(mask.shape, generator=draw)
    return window


ALL = torch.arange(len(LENGTHS))


def gradient(policy: Policy, window: Window, config: LossConfig, rows: torch.Tensor = ALL, size: int = 16) -> Any:
    policy.model.zero_grad(set_to_none=True)
    seen = accumulate_gradients(policy, window, rows, config, micro_batch_rows=size, max_tokens=9, temperature=0.8)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]), seen


def slow_gradient(policy: Policy, window: Window, config: LossConfig, rows: list[int]) -> torch.Tensor:
    """The objective spelled out: one row, one token at a time."""
    policy.model.zero_grad(set_to_none=True)
    mask, trained = window.batch.completion_mask, [row for row in rows if window.batch.completion_mask[row].any()]
    tokens_in_all = sum(int(mask[row].sum()) for row in trained)
    total = torch.zeros(())
    for row in trained:
        prompt, completion = window.prompt_ids[row], window.completion_ids[row]
        logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0] / 0.8
        count = int(mask[row].sum())
        weight = {
            "token-mean": 1 / tokens_in_all,
            "seq-mean-token-mean": 1 / len(trained) / count,
            "seq-mean-token-sum": 1 / len(trained),
            "seq-mean-token-sum-norm": 1 / len(trained) / 9,
        }[config.aggregation]
        for at, token in enumerate(completion):
            if not mask[row, at]:
                continue
            logprob = logits[len(prompt) - 1 + at].log_softmax(-1)[token]
            ratio = (logprob - window.batch.old_logprobs[row, at]).exp()
            advantage = window.credit.advantages[row, at]
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            if config.kl_coef:
                gap = window.ref_logprobs[row, at] - logprob
                loss = loss + config.kl_coef * (gap.exp() - gap - 1)
            total = total + weight * window.credit.loss_weight[row, at] * loss
    total.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_a_slow_loop_however_the_rows_are_cut(
    policy: Policy, window: Window, aggregation: Any
) -> None:
    config = LossConfig(aggregation=aggregation, kl_coef=0.1, clip_high=0.28)
    slow = slow_gradient(policy, window, config, ALL.tolist())
    for size in (1, 3, 8, 16):
        fast, seen = gradient(policy, window, config, size=size)
        assert torch.allclose(fast, slow, atol=1e-6 * float(slow.abs().max().clamp(min=1)))
        assert seen["tokens"] == sum(LENGTHS) - LENGTHS[3] - 1


def test_rows_are_weighed_within_their_optimiser_step(policy: Policy, window: Window) -> None:
    rows = [0, 2, 7]
    slow = slow_gradient(policy, window, LossConfig(), rows)
    fast, _ = gradient(policy, window, LossConfig(), torch.tensor(rows), size=2)
    assert torch.allclose(fast, slow, atol=1e-6)


def test_statistics_do_not_depend_on_the_cut_and_are_those_of_the_trained_tokens(
    policy: Policy, window: Window
) -> None:
    config = LossConfig()
    _, whole = gradient(policy, window, config)
    _, parts = gradient(policy, window, config, size=1)
    assert whole == pytest.approx(parts, rel=1e-5)
    batch, mask = window.batch, window.batch.completion_mask
    with torch.no_grad():
        rows = []
        for prompt, completion in zip(window.prompt_ids, window.completion_ids):
            logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            rows.append(torch.nn.functional.pad(chosen, (0, mask.shape[1] - len(completion))))
    log_ratio = (torch.stack(rows) - batch.old_logprobs)[mask].double()
    ratio, advantages = log_ratio.exp(), window.credit.advantages[mask]
    metrics = update_metrics({**whole, "updates": 1.0, "grad_norm": 2.5})
    assert metrics == pytest.approx(
        {
            "policy/loss": whole["loss"],
            "policy/entropy": whole["entropy"] / len(ratio),
            "policy/approx_kl": float((ratio - 1 - log_ratio).mean()),
            "policy/clip_fraction_low": float(((ratio < 0.8) & (advantages < 0)).float().mean()),
            "policy/clip_fraction_high": float(((ratio > 1.2) & (advantages > 0)).float().mean()),
            "policy/clip_fraction": float(
                (((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0))).float().mean()
            ),
            "policy/log_ratio_clamped": 0.0,
            "policy/ratio_max": float(ratio.max()),
            "policy/ratio_min": float(ratio.min()),
            "optim/grad_norm": 2.5,
        },
        rel=1e-4,
    )
    assert 0 < metrics["policy/clip_fraction_low"] < 1
    assert 0 < metrics["policy/clip_fraction_high"] < 1


def test_an_advantage_on_a_token_that_the_policy_did_not_write_moves_nothing(policy: Policy, window: Window) -> None:
    before, _ = gradient(policy, window, LossConfig())
    window.credit.advantages[5, 2] = 100.0
    after, _ = gradient(policy, window, LossConfig())
    assert torch.equal(before, after)


def test_groups_without_advantages_keep_the_kl_unless_they_are_spared(policy: Policy, window: Window) -> None:
    window.credit.advantages[window.batch.group_ids == 1] = 0.0
    rows = torch.tensor([1, 4, 7])  # group 1
    kept, _ = gradient(policy, window, LossConfig(kl_coef=0.1), rows)
    spared, _ = gradient(policy, window, LossConfig(kl_coef=0.1, mask_dead_groups=True), rows)
    assert kept.any()
    assert not spared.any()


FURTHER: tuple[dict[str, Any], ...] = (
    {},
    {"surrogate": "gspo-token"},
    {"surrogate": "cispo"},
    {"surrogate": "sapo"},
    {"surrogate": "vespo"},
    {"aggregation": "seq-mean-token-sum", "kl_coef": 0.1, "mask_dead_groups": True},
)


@pytest.mark.parametrize("options", FURTHER)
def test_rows_that_can_move_nothing_are_left_out_and_the_gradient_stays(
    policy: Policy, window: Window, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    window.credit.advantages[window.batch.group_ids == 1] = 0.0  # rows 1, 4, 7
    config, read = LossConfig(**options), []
    whole = update.score_completions

    def watching(policy: Policy, prompts: Any, completions: Any, **facts: Any) -> Any:
        read.extend(completions)
        return whole(policy, prompts, completions, **facts)

    monkeypatch.setattr(update, "score_completions", watching)
    fast, seen = gradient(policy, window, config)
    assert sorted(map(len, read)) == sorted(LENGTHS[row] for row in (0, 2, 5, 6))
    monkeypatch.setattr(update, "_moving", lambda has, live, config: torch.ones_like(live))
    slow, expected = gradient(policy, window, config)
    assert torch.allclose(fast, slow, atol=1e-6 * float(slow.abs().max()))
    for name in ("loss", "tokens", "clipped_low", "clipped_high"):
        assert seen[name] == pytest.approx(expected[name], rel=1e-6)
    assert seen["scored_tokens"] == expected["scored_tokens"] - LENGTHS[1] - LENGTHS[4] - LENGTHS[7]


def test_a_kl_in_the_loss_keeps_every_row(policy: Policy, window: Window) -> None:
    window.credit.advantages[window.batch.group_ids == 1] = 0.0
    _, seen = gradient(policy, window, LossConfig(kl_coef=0.1))
    assert seen["scored_tokens"] == seen["tokens"] == sum(LENGTHS) - LENGTHS[3] - 1


def test_where_no_row_can_move_anything_the_gradient_is_zero_and_all_rows_are_described(
    policy: Policy, window: Window
) -> None:
    _, before = gradient(policy, window, LossConfig())
    window.credit.advantages[:] = 0.0
    found, seen = gradient(policy, window, LossConfig())
    assert len(found) == sum(p.numel() for p in policy.model.parameters())  # zeros, so that the optimiser steps as ever
    assert not found.any()
    assert seen["loss"] == 0
    for name in ("entropy", "approx_kl", "scored_tokens", "tokens", "max/ratio"):
        assert seen[name] == pytest.approx(before[name], rel=1e-5)


def test_a_limit_of_tokens_cuts_micro_batches_and_changes_nothing(policy: Policy, window: Window) -> None:
    whole, seen = gradient(policy, window, LossConfig())
    for packing in (True, False):
        some = replace(policy, packing=packing)
        some.model.zero_grad(set_to_none=True)
        calls: list[int] = []
        hook = some.model.register_forward_hook(
            lambda *call, calls=calls: calls.append(call[2]["input_ids"].numel()), with_kwargs=True
        )
        facts = accumulate_gradients(
            some,
            window,
            ALL,
            LossConfig(),
            micro_batch_rows=16,
            micro_batch_tokens=12,
            max_tokens=9,
            temperature=0.8,
        )
        hook.remove()
        assert len(calls) > 1
        assert max(calls) <= 12
        parts = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
        assert torch.allclose(parts, whole, atol=1e-6)
        assert facts == pytest.approx(seen, rel=1e-5)


def test_rows_without_a_trained_token_take_no_step(policy: Policy, window: Window) -> None:
    policy.model.zero_grad(set_to_none=True)
    seen = accumulate_gradients(
        policy, window, torch.tensor([3]), LossConfig(), micro_batch_rows=4, max_tokens=9, temperature=1.0
    )
    assert seen == update_metrics(seen) == {}
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_token_beyond_the_log_ratio_limit_is_counted(policy: Policy, window: Window) -> None:
    assert window.batch.old_logprobs is not None
    window.batch.old_logprobs[0, 1] = -100.0
    found, seen = gradient(policy, window, LossConfig())
    assert seen["log_ratio_clamped"] == 1.0
    assert torch.isfinite(found).all()


def test_a_loss_that_is_not_finite_names_step_row_and_token(policy: Policy, window: Window) -> None:
    assert window.batch.old_logprobs is not None
    window.batch.old_logprobs[2, 6] = float("nan")
    token = window.completion_ids[2][6]
    with pytest.raises(NonFinite, match=rf"step 5: the loss is not finite in row 2 at token 6 \(id {token}\)"):
        gradient(policy, window, LossConfig(), size=3)
    window.batch.old_logprobs[3, 0] = float("nan")  # left out of training, so nobody asks
    found, seen = gradient(policy, window, LossConfig(), torch.tensor([0, 1, 3]))
    assert torch.isfinite(found).all()
    assert math.isfinite(seen["loss"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_names_its_parameter_and_moves_nothing(policy: Policy, value: float) -> None:
    optimizer, schedule = build_optimizer(policy, OptimConfig(lr=0.1), 10)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    for parameter in policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    name, third = list(policy.model.named_parameters())[2]
    assert third.grad is not None
    third.grad.view(-1)[0] = value
    with pytest.raises(NonFinite, match=f"step 7: the gradient is not finite in {name}$"):
        optimizer_step(policy, optimizer, schedule, max_grad_norm=1.0, step=7)
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())
    assert not optimizer.state
    assert schedule.last_epoch == 0


def test_the_gradient_is_cut_to_its_longest_norm_and_reported_uncut(policy: Policy) -> None:
    optimizer, schedule = build_optimizer(policy, OptimConfig(lr=0.0), 10)
    cut: list[float] = []

    def look(*_: Any) -> None:
        cut.append(float(torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters()])))

    optimizer.register_step_pre_hook(look)
    count = sum(p.numel() for p in policy.model.parameters())
    for size, wanted in ((2.0, 1.5), (1e-3, 1e-3 * count**0.5)):
        for parameter in policy.model.parameters():
            parameter.grad = torch.full_like(parameter, size)
        norm = optimizer_step(policy, optimizer, schedule, max_grad_norm=1.5, step=1)
        assert norm == pytest.approx(size * count**0.5, rel=1e-4)
        assert cut.pop() == pytest.approx(wanted, rel=1e-4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_the_learning_rate_warms_up_and_falls(policy: Policy) -> None:
    optimizer, schedule = build_optimizer(policy, OptimConfig(lr=1.0, schedule="linear", warmup_steps=2), 6)
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])


def test_minibatches_hold_whole_groups_each_once_an_epoch_in_changing_order() -> None:
    group_ids = torch.arange(6).repeat_interleave(2).roll(1)
    parts = minibatch_rows(group_ids, minibatches=4, seed=0, step=1, epoch=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(12))
    for part in parts:
        groups = group_ids[part]
        assert all(int((group_ids == group).sum()) == int((groups == group).sum()) for group in groups)
    again = minibatch_rows(group_ids, minibatches=4, seed=0, step=1, epoch=0)
    other = minibatch_rows(group_ids, minibatches=4, seed=0, step=1, epoch=1)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]
    assert [part.tolist() for part in other] != [part.tolist() for part in parts]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "step"},
        {"epochs": 0},
        {"minibatches": 0},
        {"micro_batch_tokens": 0},
        {"lr": float("nan")},
        {"weight_decay": -1.0},
        {"warmup_steps": -1},
        {"max_grad_norm": 0.0},
        {"beta2": 1.0},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimConfig(**options)
