"""Advantages weighted by how much the update so far has changed what comes after a token (FIPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit
from .uniform import Uniform
from .wrapping import also_told, evidence, keeps_sign, masked_share, reweighted

__all__ = ["FutureKL", "discounted_return"]


def discounted_return(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """``F_t = v_t + discount * F_{t+1}`` over the masked positions of a row; others are skipped, not counted.

    Args:
        values: (B, T).
        mask: (B, T) bool.
        discount: over 0, at most 1.

    Returns:
        (B, T) float64, zero outside the mask.

    >>> out = discounted_return(torch.tensor([[0.1, -0.2, 0.05]]), torch.ones(1, 3, dtype=torch.bool), 2 ** (-1 / 32))
    >>> [round(value, 4) for value in out[0].tolist()]
    [-0.0478, -0.1511, 0.05]
    """
    log_weight = mask.cumsum(dim=1).double() * math.log(discount)  # of the n-th masked position: n log(discount)
    kept = values.double().where(mask, 0.0)

    def later(part: Tensor) -> Tensor:
        """Sum over each position and later ones of discount^n times a part that is not negative, in logarithms."""
        return (part.log() + log_weight).flip(1).logcumsumexp(dim=1).flip(1)

    total = (later(kept.clamp(min=0)) - log_weight).exp() - (later((-kept).clamp(min=0)) - log_weight).exp()
    return total.where(mask, 0.0)


@dataclass(frozen=True)
class FutureKL:
    """Tokens after which the policy has become more likely to go on as it did get more (FIPO, arXiv 2603.19835).

    With ``d_t = log pi(y_t) - log pi_old(y_t)`` and ``gamma = 2^(-1 / half_life)``::

        F_t = sum over k >= t of gamma^(k - t) * d_k,    A[t] * clip(exp(F_t), low, 1 + clip)

    Computed again at each optimiser step, without a gradient. **At the first step on a batch the policy has not changed
    and the weight is 1**: it needs several steps a batch (``optim.epochs``, ``optim.minibatches``).

    Args:
        inner: hands out the advantages; the outcome's by default.
        half_life: of the weight of later tokens, in tokens.
        clip: how far the weight may go from 1.
        high_only: the weight never goes under 1; otherwise low is ``1 - clip``.
        drop_over: tokens whose ratio pi / pi_old is over this do not count in the sum.
        tame_over: where a blamed token's ratio is over this its weight is cut to ``[1 - clip, 1]``.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    half_life: float = 32.0
    clip: float = 0.2
    high_only: bool = True
    drop_over: float = 10.0
    tame_over: float = 4.0
    phase: ClassVar[Phase] = "update"

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise InputError(f"half_life must be over 0 tokens, not {self.half_life}")
        if not 0 <= self.clip <= 1:
            raise InputError(f"clip must lie between 0 and 1, not {self.clip}")
        for name in ("drop_over", "tame_over"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be a ratio over 0, not {getattr(self, name)}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"logprobs", "old_logprobs"}

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "how the update changes the policy's probabilities")

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        change = (evidence(batch, "logprobs").double() - evidence(batch, "old_logprobs").double()).where(mask, 0.0)
        counted = change.where(change <= math.log(self.drop_over), 0.0)
        future = discounted_return(counted, mask, 2 ** (-1 / self.half_life))
        low = 1.0 if self.high_only else 1 - self.clip
        weight = future.clamp(-20, 20).exp().clamp(low, 1 + self.clip)
        credit = assign_credit(self.inner, batch)
        tamed = (credit.advantages < 0) & (change > math.log(self.tame_over))
        weight = torch.where(tamed, weight.clamp(1 - self.clip, 1), weight)
        metrics = {
            "future_weight": float(weight[mask].mean()) if mask.any() else 1.0,
            "tamed_tokens": masked_share(tamed, mask),
        }
        return reweighted(credit, weight, metrics)
