"""The GRPO objective in small pieces: clipped surrogate, KL estimates, aggregation.

Shapes: B rollouts, T completion tokens; log-probabilities in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .importance import LEVELS, Level
from .kl import KL_KINDS, KLKind, corrected_kl, kl_estimate
from .surrogates import LOG_RATIO_LIMIT, SURROGATES, Surrogate, clipped_surrogate, importance_ratio, policy_term

__all__ = [
    "AGGREGATIONS",
    "LOG_RATIO_LIMIT",
    "Aggregation",
    "KLKind",
    "LossConfig",
    "TokenLoss",
    "aggregate",
    "aggregation_weights",
    "clipped_surrogate",
    "importance_ratio",
    "kl_estimate",
    "live_rows",
    "token_loss",
]

Aggregation = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[Aggregation, ...] = (
    "seq-mean-token-mean",
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class LossConfig:
    """Options of the objective.

    Args:
        surrogate: the policy term, see :mod:`apportion.grpo.surrogates`: clip (PPO, GRPO), dual-clip, delta-clip, gspo,
            gspo-token, cispo, sapo or vespo.
        clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``; a ``clip_low`` of 1 is no bound.
        max_ratio: of dual-clip and delta-clip.
        tau_positive, tau_negative: of sapo.
        aggregation: see :func:`aggregation_weights`.
        kl_coef: weight of the KL to the frozen reference; 0 leaves it out of the objective.
        kl_kind: k1, k2, k3 or k3+, see :func:`kl_estimate`.
        kl_in: ``loss`` adds it per token to the loss; ``reward`` subtracts its sum from the answer's reward.
        kl_off_policy: multiply the KL by the ratio, which makes value and gradient right off-policy (k1 and k3 only).
        mask_dead_groups: leave the KL term off groups in which no token has an advantage.
        importance_cap: weigh answers that another engine sampled by the trainer's probability over the engine's, cut at
            this; None leaves them as they are. The built-in sampler's need no weight.
        importance_level: a weight for each ``token``, or one for the whole ``sequence``.
    """

    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_ratio: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: Aggregation = "token-mean"
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_off_policy: bool = False
    mask_dead_groups: bool = False
    importance_cap: float | None = None
    importance_level: Level = "token"

    def __post_init__(self) -> None:
        choices = (
            ("surrogate", self.surrogate, SURROGATES),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("kl_kind", self.kl_kind, KL_KINDS),
            ("kl_in", self.kl_in, ("loss", "reward")),
            ("importance_level", self.importance_level, LEVELS),
        )
        for name, value, known in choices:
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.kl_coef < 0:
            raise ValueError("need 0 <= clip_low <= 1, clip_high >= 0 and kl_coef >= 0")
        if self.max_ratio < 1 or self.tau_positive <= 0 or self.tau_negative <= 0:
            raise ValueError("need max_ratio >= 1 and tau_positive, tau_negative > 0")
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(f"importance_cap must be over 0 or null, not {self.importance_cap}")
        if self.kl_off_policy and (self.kl_kind not in ("k1", "k3") or self.kl_in != "loss"):
            raise ValueError("kl_off_policy is right for kl_kind k1 or k3 with kl_in=loss only")


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


def live_rows(advantages: Tensor, group_ids: Tensor) -> Tensor:
    """Which rows belong to a group in which any token has an advantage, (B,) bool.

    Args:
        advantages: (B, T).
        group_ids: (B,) long.

    >>> live_rows(torch.tensor([[0.0, 0.0], [0.0, -1.0], [0.0, 0.0]]), torch.tensor([4, 4, 7])).tolist()
    [True, True, False]
    """
    return torch.isin(group_ids, group_ids[advantages.ne(0).any(dim=1)])


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
    completion_mask: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    loss_weight: Tensor | None = None,
    live_rows: Tensor | None = None,
) -> TokenLoss:
    """Minus the gain of the surrogate, plus the weighted KL to the reference, of each token.

    Args:
        logprobs: (B, T), carries the gradient.
        old_logprobs: (B, T), of the policy that sampled.
        advantages: (B, T).
        config: see :class:`LossConfig`.
        completion_mask: (B, T) bool, for the surrogates of whole rows; None where every token is real.
        ref_logprobs: (B, T), of the frozen reference; needed where the KL is in the loss.
        loss_weight: (B, T) factor on the whole token objective.
        live_rows: (B,) bool, see :func:`live_rows`; needed where ``config.mask_dead_groups`` is set.
    """
    term = policy_term(
        logprobs,
        old_logprobs,
        advantages,
        torch.ones_like(advantages, dtype=torch.bool) if completion_mask is None else completion_mask,
        surrogate=config.surrogate,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        max_ratio=config.max_ratio,
        tau_positive=config.tau_positive,
        tau_negative=config.tau_negative,
    )
    loss = -term.gain
    if config.kl_coef and config.kl_in == "loss":
        if ref_logprobs is None:
            raise ValueError("kl_coef > 0 with kl_in=loss needs ref_logprobs")
        kl = config.kl_coef * kl_estimate(logprobs, ref_logprobs, kind=config.kl_kind)
        if config.kl_off_policy:
            kl = corrected_kl(kl, term.ratio)
        if config.mask_dead_groups:
            if live_rows is None:
                raise ValueError("mask_dead_groups needs live_rows")
            kl = kl.where(live_rows[:, None], 0.0)
        loss = loss + kl
    if loss_weight is not None:
        loss = loss * loss_weight
    return TokenLoss(loss, term.ratio.detach(), (logprobs - old_logprobs).detach())
