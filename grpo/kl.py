"""Estimates of the KL divergence to the reference at each sampled token, as a value and as a loss.

Shapes: B rollouts, T completion tokens; ``l = logprobs - ref_logprobs``, in nats.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .surrogates import LOG_RATIO_LIMIT

__all__ = ["KL_KINDS", "KLKind", "corrected_kl", "kl_estimate"]

KLKind = Literal["k1", "k2", "k3", "k3+"]
KL_KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3", "k3+")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, with ``l = logprobs - ref_logprobs``.

    ``k1 = l``, ``k2 = l^2 / 2``, ``k3 = exp(-l) + l - 1`` (never negative). k1 and k3 have the right expected *value*;
    as a loss on the policy's own samples only k2 has the right expected *gradient*: that of k1 is zero, that of k3 is
    the gradient of KL(reference || policy). (Schulman, "Approximating KL divergence", 2020.) ``k3+`` has the value of
    k3 and the gradient of k2. In k3 and k3+ ``-l`` is cut to at most 20; the gradient of k3 ends there too.

    Args:
        logprobs, ref_logprobs: (B, T).
        kind: k1, k2, k3 or k3+.

    >>> import torch
    >>> one, two = torch.tensor(-1.0), torch.tensor(-2.0)
    >>> [round(kl_estimate(one, two, kind=k).item(), 4) for k in ("k1", "k2", "k3", "k3+")]
    [1.0, 0.5, 0.3679, 0.3679]
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
    if kind not in ("k3", "k3+"):
        raise ValueError(f"kind must be one of {', '.join(KL_KINDS)}, not {kind!r}")
    backward = (-log_ratio).clamp(max=LOG_RATIO_LIMIT)
    k3 = backward.exp() - backward - 1
    if kind == "k3":
        return k3
    k2 = log_ratio.square() / 2
    return k3.detach() + (k2 - k2.detach())


def corrected_kl(kl: Tensor, ratio: Tensor) -> Tensor:
    """A KL estimate on samples of the old policy, weighted by the ratio: ``r kl`` (DeepSeek-V3.2, arXiv 2512.02556).

    The ratio keeps its gradient. With k1 or k3 value and gradient are then both right on average, on the policy's own
    samples and off them. With k2 or k3+, whose gradient is right by itself, the ratio's gradient would come on top.

    Args:
        kl: (B, T), k1 or k3 of :func:`kl_estimate`.
        ratio: (B, T), see :func:`apportion.grpo.surrogates.importance_ratio`.
    """
    return ratio * kl
