"""The frozen reference: a copy of the starting weights, also of a model that lies only in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from .forward import score_completions
from .loss import LossConfig, kl_estimate
from .policy import Policy

__all__ = ["frozen_reference", "score_rollouts", "with_kl_in_reward"]


def frozen_reference(policy: Policy, saved: Path, *, resuming: bool) -> Policy:
    """A frozen copy of ``policy`` as it is now; kept in ``saved``, from where a resumed run takes it again."""
    from safetensors.torch import load_model, save_model

    reference = replace(policy, model=copy.deepcopy(policy.model).eval().requires_grad_(False))
    if resuming and saved.exists():
        load_model(reference.model, str(saved), device=str(policy.device))
    else:
        temporary = saved.with_suffix(".tmp")
        save_model(reference.model, str(temporary))
        temporary.replace(saved)
    return reference


@torch.no_grad()
def score_rollouts(policy: Policy, rollouts: Sequence[Rollout], *, temperature: float, rows: int) -> Tensor:
    """Log-probabilities (B, T) of the rollouts' tokens under ``policy``, ``rows`` rows at a time, on the CPU."""
    width = max(len(rollout.completion_ids) for rollout in rollouts)
    parts = []
    for start in range(0, len(rollouts), rows):
        part = rollouts[start : start + rows]
        prompts, completions = [r.prompt_ids for r in part], [r.completion_ids for r in part]
        scored = score_completions(policy, prompts, completions, width=width, temperature=temperature)
        parts.append(scored.logprobs.cpu())
    return torch.cat(parts)


def with_kl_in_reward(batch: CreditBatch, ref_logprobs: Tensor | None, config: LossConfig) -> CreditBatch:
    """The batch whose rewards are less ``kl_coef`` times their answer's summed KL, where the KL was asked for there."""
    if config.kl_coef == 0 or config.kl_in != "reward":
        return batch
    if ref_logprobs is None or batch.old_logprobs is None:
        raise ValueError("the KL in the reward needs old_logprobs and ref_logprobs")
    kl = kl_estimate(batch.old_logprobs, ref_logprobs, kind=config.kl_kind).where(batch.completion_mask, 0.0)
    return batch.with_reward(batch.reward - config.kl_coef * kl.double().sum(dim=1))
