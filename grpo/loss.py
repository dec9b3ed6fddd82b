"""The GRPO objective in small pieces: clipped surrogate, KL estimates, aggregation.

Shapes: B rollouts, T completion tokens; log-probabilities in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "KLKind",
    "LossConfig",
    "TokenLoss",
    "aggregate",
    "aggregation_weights",
    "clipped_surrogate",
    "importance_ratio",
    "kl_estimate",
    "token_loss",
]

Aggregation = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[Aggregation, ...] = (
    "seq-mean-token-mean",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
KLKind = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossConfig:
    """Options of the objective.

    Args:
        clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
        aggregation: see :func:`aggregation_weights`.
        kl_coef: weight of the KL to the frozen reference; 0 leaves it out of the objective.
        kl_kind: k1, k2 or k3, see :func:`kl_estimate`.
        kl_in: ``loss`` adds it per token to the loss; ``reward`` subtracts its sum from the answer's reward.
        mask_dead_groups: leave the KL term off rows whose advantages are all zero.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    mask_dead_groups: bool = False

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {self.aggregation!r}")
        if self.kl_kind not in ("k1", "k2", "k3"):
            raise ValueError(f"kl_kind must be k1, k2 or k3, not {self.kl_kind!r}")
        if self.kl_in not in ("loss", "reward"):
            raise ValueError(f"kl_in must be loss or reward, not {self.kl_in!r}")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0 or self.kl_coef < 0:
            raise ValueError("need 0 <= clip_low < 1, clip_high >= 0 and kl_coef >= 0")


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``exp(logprobs - old_logprobs)`` with the log ratio cut to +-``limit``: finite, and so is its gradient.

    The cut is a plain clamp: beyond it the gradient is zero, so that one token 20 nats away cannot outweigh the batch.

    >>> importance_ratio(torch.tensor(-1.0), torch.tensor(-1.0)).item()
    1.0
    """
    return (logprobs - old_logprobs).clamp(-limit, limit).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The gain of each token, to be maximised: ``min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``.

    (PPO, arXiv 1707.06347.) The clip depends on the advantage's sign; it does not limit the model's probabilities.

    Args:
        ratio: (B, T), new over old probability of each token.
        advantages: (B, T).

    Returns:
        (B, T).

    >>> ratio, advantages = torch.tensor([1.4, 0.6, 1.4]), torch.tensor([1.0, -1.0, -1.0])
    >>> [round(gain, 4) for gain in clipped_surrogate(ratio, advantages).tolist()]
    [1.2, -0.8, -1.4]
    """
    if ratio.shape != advantages.shape:
        raise ValueError(f"ratio {tuple(ratio.shape)} and advantages {tuple(advantages.shape)} differ in shape")
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, with ``l = logprobs - ref_logprobs``.

    ``k1 = l``, ``k2 = l^2 / 2``, ``k3 = exp(-l) + l - 1`` (never negative). k1 and k3 have the right expected *value*;
    as a loss on the policy's own samples only k2 has the right expected *gradient*, k1 has none and k3 that of the
    reverse KL. (Schulman, "Approximating KL divergence", 2020.) ``-l`` is cut to at most 20 in k3.

    Args:
        logprobs, ref_logprobs: (B, T).
        kind: k1, k2 or k3.

    >>> one, two = torch.tensor(-1.0), torch.tensor(-2.0)
    >>> [round(kl_estimate(one, two, kind=k).item(), 4) for k in ("k1", "k2", "k3")]
    [1.0, 0.5, 0.3679]
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ in shape"
        )
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        backward = (-log_ratio).clamp(max=LOG_RATIO_LIMIT)
        return backward.exp() - backward - 1
    raise ValueError(f"kind must be k1, k2 or k3, not {kind!r}")


def aggregation_weights(
    completion_mask: Tensor, *, mode: Aggregation = "token-mean", max_tokens: int | None = None
) -> Tensor:
    """The weight of every token in the loss, so that ``loss = sum(weight * token_loss)``.

    With n_i tokens in row i, N in all, and R rows that have any token (masked rows leave the denominators too):

    - ``seq-mean-token-mean``: ``1 / (R n_i)`` (GRPO, arXiv 2402.03300);
    - ``token-mean``: ``1 / N`` (DAPO, arXiv 2503.14476);
    - ``seq-mean-token-sum``: ``1 / R``;
    - ``seq-mean-token-sum-norm``: ``1 / (R max_tokens)`` (Dr.GRPO, arXiv 2503.20783).

    Computed once for a whole optimiser step, the weights make the loss independent of its split into micro-batches.

    Args:
        completion_mask: (B, T) bool.
        mode: one of the four.
        max_tokens: the constant of the last mode: the longest completion that sampling allows.

    Returns:
        (B, T) float32, zero outside the mask; all zero where the mask is empty.

    >>> mask = torch.tensor([[True, True, False], [True, False, False]])
    >>> [round(w, 4) for w in aggregation_weights(mask, mode="seq-mean-token-mean").sum(dim=1).tolist()]
    [0.5, 0.5]
    >>> [round(w, 4) for w in aggregation_weights(mask, mode="token-mean").sum(dim=1).tolist()]
    [0.6667, 0.3333]
    """
    weights = completion_mask.float()
    per_row = weights.sum(dim=1, keepdim=True)
    rows = (per_row > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return weights / per_row.sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return weights / per_row.clamp(min=1) / rows
    if mode == "seq-mean-token-sum":
        return weights / rows
    if mode == "seq-mean-token-sum-norm":
        if max_tokens is None or max_tokens < 1:
            raise ValueError("seq-mean-token-sum-norm divides by max_tokens; give it")
        return weights / rows / max_tokens
    raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {mode!r}")


def aggregate(
    token_losses: Tensor,
    completion_mask: Tensor,
    *,
    mode: Aggregation = "token-mean",
    max_tokens: int | None = None,
) -> Tensor:
    """Token losses to one number; see :func:`aggregation_weights`. An empty mask gives zero.

    Args:
        token_losses: (B, T).
        completion_mask: (B, T) bool.

    Returns:
        Scalar.

    >>> losses = torch.tensor([[1.0, 1.0, 9.0], [0.0, 9.0, 9.0]])
    >>> aggregate(losses, torch.tensor([[True, True, False], [True, False, False]]), mode="seq-mean-token-mean").item()
    0.5
    """
    if token_losses.shape != completion_mask.shape:
        raise ValueError(
            f"token_losses {tuple(token_losses.shape)} and completion_mask {tuple(completion_mask.shape)} differ"
        )
    weights = aggregation_weights(completion_mask.bool(), mode=mode, max_tokens=max_tokens)
    return (token_losses.where(completion_mask.bool(), 0.0) * weights).sum()


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what was seen on the way; all (B, T)."""

    loss: Tensor
    ratio: Tensor
    log_ratio: Tensor


def token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: LossConfig,
    *,
    ref_logprobs: Tensor | None = None,
    loss_weight: Tensor | None = None,
) -> TokenLoss:
    """Minus the clipped gain, plus the weighted KL to the reference, of each token.

    Args:
        logprobs: (B, T), carries the gradient.
        old_logprobs: (B, T), of the policy that sampled.
        advantages: (B, T).
        config: see :class:`LossConfig`.
        ref_logprobs: (B, T), of the frozen reference; needed where the KL is in the loss.
        loss_weight: (B, T) factor on the whole token objective.
    """
    log_ratio = logprobs - old_logprobs
    ratio = importance_ratio(logprobs, old_logprobs)
    loss = -clipped_surrogate(ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
    if config.kl_coef and config.kl_in == "loss":
        if ref_logprobs is None:
            raise ValueError("kl_coef > 0 with kl_in=loss needs ref_logprobs")
        kl = config.kl_coef * kl_estimate(logprobs, ref_logprobs, kind=config.kl_kind)
        if config.mask_dead_groups:
            kl = kl.where(advantages.ne(0).any(dim=1, keepdim=True), 0.0)
        loss = loss + kl
    if loss_weight is not None:
        loss = loss * loss_weight
    return TokenLoss(loss, ratio.detach(), log_ratio.detach())
