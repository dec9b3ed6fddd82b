"""What to do about answers that another engine sampled, with probabilities that are not quite the trainer's.

An inference engine computes the same model in other kernels and often in another precision, so its tokens come from a
distribution ``mu`` a little beside the policy ``pi`` that the trainer computes. The ratio of PPO then has to be taken
against the trainer's own ``pi_old``, and what is left of the difference is a weight on each token's objective, cut so
that no single token rules the batch::

    E_mu[ min(pi_old / mu, cap) * surrogate(pi / pi_old, A) ]

(truncated importance sampling, Ionides 2008; for language models Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch

__all__ = ["Level", "importance_metrics", "importance_weights", "weighed", "with_trainer_logprobs"]

Level = Literal["token", "sequence"]
LEVELS: tuple[Level, ...] = ("token", "sequence")


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float, level: Level = "token"
) -> Tensor:
    """``min(exp(trainer - sampler), cap)`` of each token, or of the sum over each row.

    The ratio of a row is right where that of a token is biased (the state was reached by ``mu`` too), but it has a
    variance that grows with the row's length.

    Args:
        trainer_logprobs, sampler_logprobs: (B, T), nats, of the same tokens under the same weights.
        mask: (B, T) bool, tokens that the policy wrote.
        cap: largest weight, over 0.
        level: ``token``, or ``sequence`` for one weight a row.

    Returns:
        (B, T) float32 without gradient; 1 outside the mask.

    >>> trainer = torch.tensor([[0.5, 0.25, 0.9]]).log()
    >>> sampler = torch.tensor([[0.4, 0.05, 0.1]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> [round(w, 2) for w in importance_weights(trainer, sampler, mask, cap=2.0)[0].tolist()]
    [1.25, 2.0, 1.0]
    >>> importance_weights(trainer, sampler, mask, cap=8.0, level="sequence")[0].tolist()[:2]
    [6.25, 6.25]
    """
    if not cap > 0:
        raise ValueError(f"cap must be over 0, not {cap}")
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    log_ratio = (trainer_logprobs.detach().double() - sampler_logprobs.detach().double()).where(mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    limit = torch.tensor(cap, dtype=torch.float64, device=log_ratio.device).log()
    return torch.minimum(log_ratio, limit).exp().float().where(mask, 1.0)


def importance_metrics(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, weights: Tensor | None, cap: float | None
) -> dict[str, float]:
    """How far the sampler is from the trainer, and what the weights do about it.

    Args:
        trainer_logprobs, sampler_logprobs, mask: see :func:`importance_weights`.
        weights: (B, T) of it, or None where nothing is corrected.
        cap: that they were made with.

    Returns:
        ``sampling/logprob_gap``: largest absolute difference; ``sampling/importance_mean``: mean weight;
        ``sampling/importance_truncated``: share of tokens at the cap; ``sampling/importance_ess``: effective sample
        size over tokens, ``(sum w)^2 / (n sum w^2)``. Empty without a token; NaN where a log-probability is none.
    """
    if not bool(mask.any()):
        return {}
    gap = (trainer_logprobs.detach().double() - sampler_logprobs.double())[mask].abs()
    metrics = {"sampling/logprob_gap": float(gap.max())}
    if weights is not None and cap is not None:
        kept = weights.double()[mask]
        metrics["sampling/importance_mean"] = float(kept.mean())
        metrics["sampling/importance_truncated"] = float((kept >= cap * (1 - 1e-6)).double().mean())
        metrics["sampling/importance_ess"] = float(kept.sum().square() / (len(kept) * kept.square().sum()))
    return metrics


def with_trainer_logprobs(
    batch: CreditBatch, trainer_logprobs: Tensor, *, cap: float | None, level: Level = "token"
) -> tuple[CreditBatch, Tensor | None, dict[str, float]]:
    """A batch that another engine sampled, made ready for the update.

    Args:
        batch: ``old_logprobs`` are the engine's.
        trainer_logprobs: (B, T) of the trainer, under the weights that sampled.
        cap, level: see :func:`importance_weights`; a ``cap`` of None corrects nothing.

    Returns:
        The batch with the trainer's log-probabilities as old ones, so that the ratio is 1 at the first update; the
        weights (B, T), or None; and what was measured.
    """
    sampled, mask = batch.old_logprobs, batch.completion_mask
    if sampled is None:
        raise ValueError("the engine gave no log-probabilities")
    old = trainer_logprobs.detach().to(sampled.dtype).where(mask, 0.0)
    weights = None if cap is None else importance_weights(old, sampled, mask, cap=cap, level=level)
    return replace(batch, old_logprobs=old), weights, importance_metrics(old, sampled, mask, weights, cap)


def weighed(credit: Credit, weights: Tensor | None) -> Credit:
    """Credit whose tokens count by ``weights`` (B, T) in the loss, besides what the strategy itself says; None: as is.

    >>> credit = Credit(torch.ones(1, 2), loss_weight=torch.tensor([[2.0, 1.0]]))
    >>> weighed(credit, torch.tensor([[0.5, 1.0]])).loss_weight
    tensor([[1., 1.]])
    """
    if weights is None:
        return credit
    return replace(credit, loss_weight=weights if credit.loss_weight is None else credit.loss_weight * weights)
