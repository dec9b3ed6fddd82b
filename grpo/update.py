"""One optimiser step on some rows of a window, in micro-batches, with a guard against numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .forward import packs, score_completions
from .loss import LOG_RATIO_LIMIT, LossConfig, TokenLoss, aggregation_weights, live_rows, token_loss
from .packing import micro_batches, padded_micro_batches
from .policy import Policy
from .sampling import RolloutConfig
from .window import Window

__all__ = [
    "Diverged",
    "NonFinite",
    "OptimConfig",
    "accumulate_gradients",
    "build_optimizer",
    "check_minibatches",
    "merge_sums",
    "moving_rows",
    "optimizer_step",
    "update_metrics",
]


class NonFinite(Exception):
    """A loss or gradient is not a finite number; the message names step, row and token (or the parameter)."""


class Diverged(InputError):
    """Too many updates were skipped: the weights are not worth keeping."""


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
        micro_batch_rows: at most so many rows in one forward and backward; changes memory, not the result.
        micro_batch_tokens: at most so many tokens in one, padding included where there is any; null: no such limit.
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
    micro_batch_tokens: int | None = None
    max_skipped: int = 5

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule must be constant, linear or cosine, not {self.schedule!r}")
        for name in ("epochs", "minibatches", "micro_batch_rows", "max_skipped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1 or null, not {self.micro_batch_tokens}")
        for name in ("lr", "weight_decay", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be over 0, not {self.max_grad_norm}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"need 0 <= beta1, beta2 < 1, not {self.beta1} and {self.beta2}")

    @property
    def steps_per_window(self) -> int:
        return self.epochs * self.minibatches


def check_minibatches(optim: OptimConfig, rollout: RolloutConfig) -> None:
    """Refuse more optimiser steps in a pass than there are groups."""
    if optim.minibatches > rollout.prompts_per_step:
        raise InputError(
            f"optim.minibatches={optim.minibatches}: whole groups stay together, so at most "
            f"rollout.prompts_per_step={rollout.prompts_per_step}"
        )


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
    step_rows: Tensor | None = None,
    micro_batch_tokens: int | None = None,
    passes: Callable[[int], int] | None = None,
) -> dict[str, float]:
    """Add the gradient of the loss over ``rows`` to the parameters, in micro-batches; the split changes nothing.

    Rows that cannot move anything, as their advantages are zero and no KL is in their loss, are left out of forward and
    backward: the gradient, the loss and the clip fractions stay what they are, and the ratios are those of the other
    rows. Their part of the entropy is estimated without bias from what was sampled, ``-log p`` of each token, so that
    the entropy stays one of all rows and strategies can be compared. Where no row can move anything the gradient is
    zero, and the statistics are those of all rows.

    Args:
        window: the rollout batch with its credit.
        rows: the rows of this optimiser step, whole groups.
        micro_batch_rows, micro_batch_tokens: see :class:`OptimConfig`.
        max_tokens: see :func:`apportion.grpo.loss.aggregation_weights`.
        temperature: of sampling.
        step_rows: all rows of the optimiser step where other processes work off some of them: the loss is normalised
            over these, so that the processes' gradients add up to that of one process. None: ``rows`` are all.
        passes: from the number of forwards that ``rows`` need to the number to run, where the processes have to run
            equally often; those beyond need count for nothing.

    Returns:
        Sums over the rows' tokens, and extremes, for :func:`update_metrics`; empty where no token is trained.

    Raises:
        NonFinite: a token's loss is not finite.
    """
    mask = window.batch.completion_mask
    all_rows = rows if step_rows is None else step_rows
    whole = torch.zeros(mask.shape)
    whole[all_rows] = aggregation_weights(mask[all_rows], mode=loss_config.aggregation, max_tokens=max_tokens)
    weights = whole[rows]
    live = live_rows(window.credit.advantages, window.batch.group_ids)[rows]
    if not mask[all_rows].any():
        return {}
    learns = bool(moving_rows(window, all_rows, loss_config).any())
    chosen = moving_rows(window, rows, loss_config) if learns else mask[rows].any(dim=1)
    parts = _micro_batches(policy, window, rows, chosen, micro_batch_rows, micro_batch_tokens)
    empty = 0 if passes is None else passes(len(parts)) - len(parts)  # asked before anything that others wait for
    faults: list[NonFinite] = []
    sums: dict[str, float] = {}
    for part in parts:
        with torch.set_grad_enabled(learns):
            loss, seen, bad = _micro_batch(
                policy, window, rows[part], weights[part], live[part], loss_config, temperature
            )
        faults += bad
        if bad and passes is None:  # nobody waits for the other passes
            break
        if learns:
            loss.backward()
        merge_sums(sums, seen)
    for _ in range(empty):
        with torch.set_grad_enabled(learns):
            loss = _empty_pass(policy, window)
        if learns:
            loss.backward()
    if faults:
        raise faults[0]
    if not (learns and parts):
        for parameter in policy.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return {**sums, **_left_out(window, rows, chosen), "tokens": float(mask[rows].sum())}


def _left_out(window: Window, rows: Tensor, chosen: Tensor) -> dict[str, float]:
    """What the rows that were not scored add to the entropy: its estimate, and how many tokens it is of."""
    left = rows[~chosen]
    mask, old = window.batch.completion_mask[left], window.batch.old_logprobs
    assert old is not None
    return {"left_out_entropy": -float(old[left][mask].double().sum()), "left_out_tokens": float(mask.sum())}


def moving_rows(window: Window, rows: Tensor, config: LossConfig) -> Tensor:
    """Which of ``rows`` can move the policy, (R,) bool."""
    has_advantage = window.credit.advantages[rows].ne(0) & window.batch.completion_mask[rows]
    live = live_rows(window.credit.advantages, window.batch.group_ids)[rows]
    return window.batch.completion_mask[rows].any(dim=1) & _moving(has_advantage, live, config)


def _moving(has_advantage: Tensor, live: Tensor, config: LossConfig) -> Tensor:
    """Which rows may have a gradient, (B,) bool: every surrogate is a multiple of the advantage.

    Args:
        has_advantage: (B, T) bool.
        live: (B,) bool, rows whose groups have any advantage.
    """
    if not config.kl_coef or config.kl_in != "loss":
        return has_advantage.any(dim=1)
    return live if config.mask_dead_groups else torch.ones_like(live)


def _micro_batches(
    policy: Policy, window: Window, rows: Tensor, chosen: Tensor, at_most: int, tokens: int | None
) -> list[Tensor]:
    """Positions in ``rows`` of the chosen ones, cut into micro-batches."""
    positions = chosen.nonzero()[:, 0]
    prompts = [window.prompt_ids[row] for row in rows[positions].tolist()]
    lengths = [len(window.completion_ids[row]) for row in rows[positions].tolist()]
    cut = micro_batches if packs(policy) else padded_micro_batches
    return [positions[part] for part in cut(prompts, lengths, rows=at_most, tokens=tokens)]


def _micro_batch(
    policy: Policy, window: Window, rows: Tensor, weights: Tensor, live: Tensor, config: LossConfig, temperature: float
) -> tuple[Tensor, dict[str, float], list[NonFinite]]:
    """The loss of some rows, what was seen on the way, and the first token whose loss is not finite, if any."""
    prompts = [window.prompt_ids[int(row)] for row in rows]
    completions = [window.completion_ids[int(row)] for row in rows]
    width, device, batch = max(map(len, completions)), policy.device, window.batch

    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows, :width].to(device)

    scored = score_completions(policy, prompts, completions, width=width, temperature=temperature)
    mask, old, advantages = cut(batch.completion_mask), cut(batch.old_logprobs), cut(window.credit.advantages)
    assert mask is not None
    assert old is not None
    assert advantages is not None
    tokens = token_loss(
        scored.logprobs,
        old,
        advantages,
        config,
        completion_mask=mask,
        ref_logprobs=cut(window.ref_logprobs),
        loss_weight=cut(window.credit.loss_weight),
        live_rows=live.to(device),
    )
    faults = [
        NonFinite(
            f"step {window.step}: the loss is not finite in row {int(rows[row])} at token {token} "
            f"(id {completions[row][token]})"
        )
        for row, token in (~torch.isfinite(tokens.loss) & mask).nonzero()[:1].tolist()
    ]
    loss = (tokens.loss.where(mask, 0.0) * weights[:, :width].to(device)).sum()
    return loss, _statistics(loss, tokens, scored.entropy, advantages, mask, config), faults


def _empty_pass(policy: Policy, window: Window) -> Tensor:
    """A forward that counts for nothing: zero, with a gradient of zero."""
    prompt, completion = window.prompt_ids[0], window.completion_ids[0][:1]
    return 0.0 * score_completions(policy, [prompt], [completion], width=1).logprobs.sum()


def _statistics(
    loss: Tensor, tokens: TokenLoss, entropy: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> dict[str, float]:
    """Sums and extremes over the trained tokens, fetched from the device at once."""
    ratio, log_ratio, advantages = tokens.ratio[mask], tokens.log_ratio[mask], advantages[mask]
    cut = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clips = config.surrogate not in ("sapo", "vespo")  # these have no clip
    low = (ratio < 1 - config.clip_low) & (advantages < 0) & clips
    high = (ratio > 1 + config.clip_high) & (advantages > 0) & clips
    seen = {
        "loss": loss.detach(),
        "scored_tokens": mask.sum(),
        "entropy": entropy[mask].sum(),
        "approx_kl": (cut.exp() - 1 - cut).sum(),
        "clipped_low": low.sum(),
        "clipped_high": high.sum(),
        "log_ratio_clamped": (log_ratio.abs() > LOG_RATIO_LIMIT).sum(),
        "max/ratio": ratio.max(),
        "min/ratio": ratio.min(),
        "max/log_ratio_abs": log_ratio.abs().max(),
    }
    return dict(zip(seen, torch.stack([value.double() for value in seen.values()]).tolist()))


def optimizer_step(policy: Policy, optimizer: Any, schedule: Any, *, max_grad_norm: float, step: int) -> float:
    """Cut the gradient, step, clear; the gradient's norm before the cut.

    Raises:
        NonFinite: the norm is not finite; names a parameter. Weights and optimiser state are as before.
    """
    parameters = [(name, p) for name, p in policy.model.named_parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for _, p in parameters])
    if not torch.isfinite(_gathered(norm)):
        bad = next((name for name, p in parameters if not torch.isfinite(_gathered(p.grad)).all()), "their total norm")
        raise NonFinite(f"step {step}: the gradient is not finite in {bad}")
    torch.nn.utils.clip_grads_with_norm_([p for _, p in parameters], max_grad_norm, norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return float(_gathered(norm))


def _gathered(value: Any) -> Tensor:
    """A tensor whose shards may lie in several processes, which then all take part."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def merge_sums(total: dict[str, float], seen: Mapping[str, float]) -> None:
    """Add ``seen`` to ``total``; keys that begin with ``max/`` or ``min/`` keep the extreme.

    >>> total = {"tokens": 3.0, "max/ratio": 1.5}
    >>> merge_sums(total, {"tokens": 4.0, "max/ratio": 1.2, "min/ratio": 0.9})
    >>> total
    {'tokens': 7.0, 'max/ratio': 1.5, 'min/ratio': 0.9}
    """
    for key, value in seen.items():
        if key not in total:
            total[key] = value
        elif key.startswith("max/"):
            total[key] = max(total[key], value)
        elif key.startswith("min/"):
            total[key] = min(total[key], value)
        else:
            total[key] += value


def update_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over all tokens of all optimiser steps of a window, from the sums; empty where no token was trained.

    The KL is a mean over the tokens that were scored, see :func:`accumulate_gradients`.
    """
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    updates, scored = sums["updates"], sums["scored_tokens"]
    low, high = sums["clipped_low"] / tokens, sums["clipped_high"] / tokens
    return {
        "policy/loss": sums["loss"] / updates,
        "policy/entropy": (sums["entropy"] + sums["left_out_entropy"]) / (scored + sums["left_out_tokens"]),
        "policy/approx_kl": sums["approx_kl"] / scored,
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        "policy/clip_fraction": low + high,
        "policy/log_ratio_clamped": sums["log_ratio_clamped"],
        "policy/ratio_max": sums["max/ratio"],
        "policy/ratio_min": sums["min/ratio"],
        "optim/grad_norm": sums["grad_norm"] / updates,
    }
