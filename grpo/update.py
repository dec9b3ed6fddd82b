"""One optimiser step on some rows of a window, in micro-batches, with a guard against numbers that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .forward import score_completions
from .loss import LOG_RATIO_LIMIT, LossConfig, aggregation_weights, token_loss
from .policy import Policy
from .window import Window

__all__ = ["NonFinite", "OptimConfig", "accumulate_gradients", "build_optimizer", "optimizer_step", "update_metrics"]


class NonFinite(Exception):
    """A loss or gradient is not a finite number; the message names step, row and token (or the parameter)."""


@dataclass(frozen=True)
class OptimConfig:
    """Options of the update.

    Args:
        lr: learning rate of AdamW.
        beta1, beta2, weight_decay: of AdamW.
        schedule: ``constant``, ``linear`` or ``cosine`` decay over the run, after ``warmup_steps`` optimiser steps.
        warmup_steps: linear rise of the learning rate.
        max_grad_norm: the gradient's norm is cut to it.
        epochs: passes over each rollout batch.
        minibatches: optimiser steps in a pass; whole groups stay together.
        micro_batch_rows: rows in one forward and backward; changes memory, not the result.
        max_skipped: stop once this many updates were skipped for a loss or gradient that is not finite.
    """

    lr: float = 2.0e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 2
    micro_batch_rows: int = 16
    max_skipped: int = 5

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule must be constant, linear or cosine, not {self.schedule!r}")
        for name in ("epochs", "minibatches", "micro_batch_rows", "max_skipped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lr < 0 or self.max_grad_norm <= 0:
            raise ValueError("need lr >= 0 and max_grad_norm > 0")

    @property
    def steps_per_window(self) -> int:
        return self.epochs * self.minibatches


def build_optimizer(policy: Policy, config: OptimConfig, total_steps: int) -> tuple[Any, Any]:
    """AdamW over the trainable parameters, and its learning-rate schedule over ``total_steps`` optimiser steps."""
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW(
        [p for p in policy.model.parameters() if p.requires_grad],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    return optimizer, get_scheduler(name, optimizer, config.warmup_steps, total_steps)


def accumulate_gradients(
    policy: Policy,
    window: Window,
    rows: Tensor,
    loss_config: LossConfig,
    *,
    micro_batch_rows: int,
    max_tokens: int,
    temperature: float,
) -> dict[str, float]:
    """Add the gradient of the loss over ``rows`` to the parameters, in micro-batches; the split changes nothing.

    Returns:
        Sums over the rows' tokens (and extremes) for :func:`update_metrics`.

    Raises:
        NonFinite: a token's loss is not finite.
    """
    weights = aggregation_weights(
        window.batch.completion_mask[rows], mode=loss_config.aggregation, max_tokens=max_tokens
    )
    lengths = torch.tensor([len(window.rollouts[int(row)].completion_ids) for row in rows])
    order = lengths.argsort(stable=True)  # rows of like length share a forward: less padding
    sums: dict[str, float] = {}
    for part in order.split(micro_batch_rows):
        if not window.batch.completion_mask[rows[part]].any():
            continue
        loss, seen = _micro_batch(policy, window, rows[part], weights[part], loss_config, temperature)
        loss.backward()
        for key, value in seen.items():
            merge = max if key.startswith("max/") else min if key.startswith("min/") else lambda a, b: a + b
            sums[key] = merge(sums[key], value) if key in sums else value
    return sums


def _micro_batch(
    policy: Policy, window: Window, rows: Tensor, weights: Tensor, config: LossConfig, temperature: float
) -> tuple[Tensor, dict[str, float]]:
    rollouts = [window.rollouts[int(row)] for row in rows]
    width, device = max(len(r.completion_ids) for r in rollouts), policy.device

    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows][:, :width].to(device)

    prompts, completions = [r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts]
    scored = score_completions(policy, prompts, completions, width=width, temperature=temperature)
    mask, old = cut(window.batch.completion_mask), cut(window.batch.old_logprobs)
    advantages, ref = cut(window.credit.advantages), cut(window.ref_logprobs)
    assert mask is not None
    assert old is not None
    assert advantages is not None
    tokens = token_loss(
        scored.logprobs, old, advantages, config, ref_logprobs=ref, loss_weight=cut(window.credit.loss_weight)
    )
    bad = (~torch.isfinite(tokens.loss) & mask).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        token_id = rollouts[row].completion_ids[token]
        raise NonFinite(
            f"step {window.step}: loss is not finite in row {int(rows[row])} at token {token} (id {token_id})"
        )
    loss = (tokens.loss.where(mask, 0.0) * weights[:, :width].to(device)).sum()
    return loss, _statistics(loss, tokens.ratio, tokens.log_ratio, scored.entropy, advantages, mask, config)


def _statistics(
    loss: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
) -> dict[str, float]:
    ratio, log_ratio, entropy, advantages = ratio[mask], log_ratio[mask], entropy[mask], advantages[mask]
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    return {
        "loss": float(loss.detach()),
        "tokens": float(mask.sum()),
        "entropy": float(entropy.sum()),
        "approx_kl": float((ratio - 1 - log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum()),
        "clipped_low": float(low.sum()),
        "clipped_high": float(high.sum()),
        "log_ratio_clamped": float((log_ratio.abs() > LOG_RATIO_LIMIT).sum()),
        "max/ratio": float(ratio.max()),
        "min/ratio": float(ratio.min()),
        "max/log_ratio_abs": float(log_ratio.abs().max()),
    }


def optimizer_step(policy: Policy, optimizer: Any, schedule: Any, *, max_grad_norm: float, step: int) -> float:
    """Cut the gradient, step, clear; the gradient's norm before the cut.

    Raises:
        NonFinite: the norm is not finite; names a parameter. Nothing was changed but the gradients, which are cleared.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm))
    if norm != norm or norm in (float("inf"), float("-inf")):
        named = policy.model.named_parameters()
        bad = next(
            (name for name, p in named if p.grad is not None and not torch.isfinite(p.grad).all()), "their total norm"
        )
        optimizer.zero_grad(set_to_none=True)
        raise NonFinite(f"step {step}: the gradient is not finite in {bad}")
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def update_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means over all tokens of all optimiser steps of a window, from the sums."""
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    low, high = sums["clipped_low"] / tokens, sums["clipped_high"] / tokens
    return {
        "policy/loss": sums["loss"] / max(sums.get("updates", 1.0), 1.0),
        "policy/entropy": sums["entropy"] / tokens,
        "policy/approx_kl": sums["approx_kl"] / tokens,
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        "policy/clip_fraction": low + high,
        "policy/log_ratio_clamped": sums["log_ratio_clamped"],
        "policy/ratio_max": sums["max/ratio"],
        "policy/ratio_min": sums["min/ratio"],
    }
