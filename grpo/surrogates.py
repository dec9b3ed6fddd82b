"""The policy term of the objective under each published surrogate.

A surrogate turns the log ratio of a token's new and old probability and its advantage into its gain, (B, T), to be
maximised. B rollouts, T completion tokens; ``l`` is the log ratio, ``r = exp(l)`` the ratio, ``A`` the advantage,
``sg`` stops the gradient. Log ratios are cut to +-``LOG_RATIO_LIMIT``, so values and gradients stay finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..verifiers import InputError

__all__ = [
    "LOG_RATIO_LIMIT",
    "SURROGATES",
    "PolicyTerm",
    "Surrogate",
    "cispo_surrogate",
    "clipped_surrogate",
    "delta_clip_surrogate",
    "dual_clip_surrogate",
    "importance_ratio",
    "policy_term",
    "refuse_cancelled_credit",
    "sapo_surrogate",
    "sequence_ratio",
    "sequence_token_ratio",
    "vespo_surrogate",
]

Surrogate = Literal["clip", "dual-clip", "delta-clip", "gspo", "gspo-token", "cispo", "sapo", "vespo"]
SURROGATES: tuple[Surrogate, ...] = (
    "clip",
    "dual-clip",
    "delta-clip",
    "gspo",
    "gspo-token",
    "cispo",
    "sapo",
    "vespo",
)

LOG_RATIO_LIMIT = 20.0


# --- ratios ----------------------------------------------------------------------------------------------------------


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``exp(logprobs - old_logprobs)`` with the log ratio cut to +-``limit``: finite, and so is its gradient.

    The cut is a plain clamp: beyond it the gradient is zero, so that one token 20 nats away cannot outweigh the batch.

    >>> importance_ratio(torch.tensor(-1.0), torch.tensor(-1.0)).item()
    1.0
    """
    return (logprobs - old_logprobs).clamp(-limit, limit).exp()


def sequence_ratio(log_ratio: Tensor, completion_mask: Tensor) -> Tensor:
    """The geometric mean of a row's token ratios, on each of its tokens: ``s = exp(mean_t l_t)`` (GSPO, 2507.18071).

    Args:
        log_ratio: (B, T), carries the gradient.
        completion_mask: (B, T) bool.

    Returns:
        (B, T), equal within a row.

    >>> mask = torch.tensor([[True, True, False]])
    >>> [round(s, 4) for s in sequence_ratio(torch.tensor([[0.1, 0.3, 9.0]]), mask)[0].tolist()]
    [1.2214, 1.2214, 1.2214]
    """
    mean = _mean_of_rows(log_ratio, completion_mask)
    return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().expand_as(log_ratio)


def sequence_token_ratio(log_ratio: Tensor, completion_mask: Tensor) -> Tensor:
    """The row's ratio with the gradient of each token's own: ``sg[s] exp(l - sg[l])`` (GSPO-token, 2507.18071).

    Its value is that of :func:`sequence_ratio`, so a row is clipped as a whole; its gradient falls on the token alone,
    so credit that differs between tokens is kept. Arguments and result as there.
    """
    mean = _mean_of_rows(log_ratio.detach(), completion_mask)
    return (mean + (log_ratio - log_ratio.detach())).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _mean_of_rows(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): the mean over each row's masked tokens; 0 for a row without any."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


# --- surrogates ------------------------------------------------------------------------------------------------------


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The gain of each token, to be maximised: ``min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``.

    (PPO, arXiv 1707.06347.) The clip depends on the advantage's sign; it does not limit the model's probabilities.

    Args:
        ratio: (B, T), new over old probability of each token, or of its row (GSPO).
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


def dual_clip_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 3.0
) -> Tensor:
    """The clipped gain, bounded from below where A < 0: ``max(clipped, max_ratio A)`` (dual clip, arXiv 1912.09729).

    >>> dual_clip_surrogate(torch.tensor([10.0, 10.0, 2.0]), torch.tensor([-1.0, 1.0, -1.0])).tolist()
    [-3.0, 1.2000000476837158, -2.0]
    """
    gain = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantages < 0, torch.maximum(gain, max_ratio * advantages), gain)


def delta_clip_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 4.0
) -> Tensor:
    """``min(min(r, max_ratio) A, clip(r) A)``: two-sided clipping (INTELLECT-2, arXiv 2505.07291; TRL's ``delta``).

    With ``max_ratio >= 1 + clip_high`` the same as the dual clip; a smaller one cuts praise as well.

    >>> delta_clip_surrogate(torch.tensor([10.0, 1.3]), torch.tensor([-1.0, 1.0]), max_ratio=1.1).tolist()
    [-1.2000000476837158, 1.100000023841858]
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(ratio.clamp(max=max_ratio) * advantages, clipped)


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """``sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi`` (CISPO, MiniMax-M1, arXiv 2506.13585).

    The ratio is a bounded weight, and no token loses its gradient. ``clip_low = 1`` sets no lower bound, as published;
    ``clip_high = 4`` is the largest weight of 5 in ScaleRL (arXiv 2510.13786), which TRL writes as ``epsilon_high=5``.

    >>> cispo_surrogate(torch.tensor([9.0, 0.5]), torch.tensor([1.0, -1.0]), torch.tensor([-1.0, -2.0])).tolist()
    [-5.0, 1.0]
    """
    return ratio.clamp(1 - clip_low, 1 + clip_high).detach() * advantages * logprobs


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """``(4 / tau) sigmoid(tau (r - 1)) A``: a soft gate in place of the clip (SAPO, arXiv 2511.20347).

    Its slope in r is A at r = 1 and fades on both sides, sooner where A is not positive, with the larger tau.

    >>> [round(gain, 4) for gain in sapo_surrogate(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])).tolist()]
    [2.0, -1.9048]
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio)
    return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


def vespo_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    completion_mask: Tensor,
    *,
    k_positive: float = 2.0,
    decay_positive: float = 3.0,
    k_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Tensor:
    """``sg[phi(W)] A log pi`` with ``phi(W) = e^d W^k e^(-d W)``, W the product of a row's ratios (VESPO, 2602.10693).

    phi(1) = 1; k and the decay d depend on the advantage's sign. log W is cut to [log 1e-8, 20].

    >>> logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    >>> vespo_surrogate(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), logprobs, mask).tolist()
    [[-1.0, 2.0]]
    """
    kept = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).where(completion_mask, 0.0)
    log_weight = kept.sum(dim=1, keepdim=True).clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    praised = advantages >= 0
    k = torch.where(praised, k_positive, k_negative).to(log_ratio)
    decay = torch.where(praised, decay_positive, decay_negative).to(log_ratio)
    return (decay + k * log_weight - decay * log_weight.exp()).exp() * advantages * logprobs


# --- choosing one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyTerm:
    """The gain of each token and the ratio that its surrogate looked at, both (B, T); the gradient is in both."""

    gain: Tensor
    ratio: Tensor


def policy_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    surrogate: Surrogate = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 3.0,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyTerm:
    """The gain of each token under the surrogate of that name.

    Args:
        logprobs: (B, T), carries the gradient.
        old_logprobs: (B, T), of the policy that sampled.
        advantages: (B, T).
        completion_mask: (B, T) bool; the surrogates of whole rows read it.
        surrogate: one of ``SURROGATES``.
        clip_low, clip_high: of clip, dual-clip, delta-clip, gspo, gspo-token and cispo.
        max_ratio: of dual-clip and delta-clip.
        tau_positive, tau_negative: of sapo.

    >>> one, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    >>> policy_term(one, one, torch.tensor([[1.0, -1.0]]), mask, surrogate="gspo-token").gain.tolist()
    [[1.0, -1.0]]
    """
    log_ratio, clip = logprobs - old_logprobs, {"clip_low": clip_low, "clip_high": clip_high}
    ratio = importance_ratio(logprobs, old_logprobs)
    if surrogate == "clip":
        return PolicyTerm(clipped_surrogate(ratio, advantages, **clip), ratio)
    if surrogate == "dual-clip":
        return PolicyTerm(dual_clip_surrogate(ratio, advantages, **clip, max_ratio=max_ratio), ratio)
    if surrogate == "delta-clip":
        return PolicyTerm(delta_clip_surrogate(ratio, advantages, **clip, max_ratio=max_ratio), ratio)
    if surrogate == "cispo":
        return PolicyTerm(cispo_surrogate(ratio, advantages, logprobs, **clip), ratio)
    if surrogate == "sapo":
        gain = sapo_surrogate(ratio, advantages, tau_positive=tau_positive, tau_negative=tau_negative)
        return PolicyTerm(gain, ratio)
    if surrogate == "vespo":
        return PolicyTerm(vespo_surrogate(log_ratio, advantages, logprobs, completion_mask), ratio)
    if surrogate in ("gspo", "gspo-token"):
        of_rows = sequence_ratio if surrogate == "gspo" else sequence_token_ratio
        ratio = of_rows(log_ratio, completion_mask)
        return PolicyTerm(clipped_surrogate(ratio, advantages, **clip), ratio)
    raise ValueError(f"surrogate must be one of {', '.join(SURROGATES)}, not {surrogate!r}")


def refuse_cancelled_credit(
    surrogate: str, advantages: Tensor, completion_mask: Tensor, loss_weight: Tensor | None = None
) -> None:
    """Refuse credit that differs between the tokens of a row under a surrogate that would average it away.

    Under gspo a row has one ratio: on the policy's own samples its gradient is the mean credit on every token.

    Raises:
        InputError: names the row and the remedy.
    """
    if surrogate != "gspo" or not completion_mask.any():
        return
    credit = advantages if loss_weight is None else advantages * loss_weight
    high = credit.masked_fill(~completion_mask, -torch.inf).amax(dim=1)
    low = credit.masked_fill(~completion_mask, torch.inf).amin(dim=1)
    rows = (high - low > 1e-6 * (1 + high.abs())).nonzero()
    if len(rows):
        raise InputError(
            f"loss.surrogate=gspo has one ratio for a whole answer, so that credit which differs between its tokens "
            f"(row {int(rows[0])}) would cancel; use loss.surrogate=gspo-token"
        )
