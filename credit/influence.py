"""The outcome weighted by what the answer's own ending depends on: more on tokens and spans that decided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_normalize
from .redistribution import check_share, effective_share, row_lengths, token_scores
from .strategy import Conserves, Phase, check_choice

__all__ = ["InfluenceWeight", "SpanWeight", "influence_weights", "row_quantile", "span_weights"]


@dataclass(frozen=True)
class InfluenceWeight:
    """The outcome on tokens that the final answer depends on, less of it on the others (OAR, arXiv 2601.07408).

    ``A[t] = Z_i w_t`` with ``Z_i = (r_i - mean_g) / (std_g + eps)`` and the weights of :func:`influence_weights`, whose
    mean over an answer is 1.

    Args:
        scores: name of the scorer that gives the influence, 0 or more.
        quantile: share of an answer's tokens under the threshold; the paper's is not confirmed, nor its ``boost``.
        boost: b, what the most influential token gets above 1.
        floor: least weight before rescaling.
        ddof, eps: of the normalisation.
    """

    scores: str = "influence"
    quantile: float = 0.5
    boost: float = 1.0
    floor: float = 0.1
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = "which tokens the policy's own final answer depends on"

    def __post_init__(self) -> None:
        check_share("quantile", self.quantile)
        check_share("floor", self.floor)
        check_choice("ddof", self.ddof, (0, 1))
        if not self.boost >= 0 or self.floor == 0:
            raise InputError(f"boost must be 0 or more and floor over 0, not {self.boost} and {self.floor}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"token_scores:{self.scores}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        influence = token_scores(self.scores, batch)
        weights = influence_weights(
            influence, batch.completion_mask, quantile=self.quantile, boost=self.boost, floor=self.floor
        )
        return _weighted(batch, weights, self.ddof, self.eps)


def influence_weights(influence: Tensor, mask: Tensor, *, quantile: float, boost: float, floor: float) -> Tensor:
    """Weights from influence I: ``u = minmax(log(1 + I))`` in each row, with its ``quantile`` as the threshold q,
    ``w = max(u / q, floor)`` under it and ``1 + boost (u - q) / (1 - q)`` from it on, scaled to the mean 1.

    Args:
        influence: (B, T), 0 or more.
        mask: (B, T) bool.

    >>> one = torch.ones(1, 4, dtype=torch.bool)
    >>> w = influence_weights(torch.tensor([[0.0, 1.0, 3.0, 7.0]]), one, quantile=0.5, boost=1.0, floor=0.1)
    >>> [round(value, 4) for value in w[0].tolist()]
    [0.0976, 0.6504, 1.3008, 1.9512]
    """
    level = influence.double().clamp(min=0).log1p()
    low = level.masked_fill(~mask, torch.inf).amin(dim=1, keepdim=True) if mask.shape[1] else level
    high = level.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True) if mask.shape[1] else level
    u = ((level - low) / (high - low).masked_fill(~(high > low), 1.0)).where(mask, 0.0)
    threshold = row_quantile(u, mask, quantile)[:, None]
    under = (u / threshold.masked_fill(threshold == 0, 1.0)).clamp(min=floor)
    above = 1 + boost * (u - threshold) / (1 - threshold).masked_fill(threshold == 1, 1.0)
    return _to_mean_one(torch.where(u < threshold, under, above), mask)


@dataclass(frozen=True)
class SpanWeight:
    """The outcome on spans without which the final answer would be less likely (counterfactuals, arXiv 2602.09331).

    ``A[t] = Z_i w_t`` with ``Z_i = (r_i - mean_g) / (std_g + eps)`` and the weights of :func:`span_weights`, whose
    mean over an answer is 1.

    Args:
        scores: name of the scorer that gives each token its span's importance: the answer's log-probability less that
            without the span; under 0 for a distractor.
        strength: what the most important span gets above 1, before rescaling.
        floor: least weight before rescaling.
        invert: the control: importance with the opposite sign.
        ddof, eps: of the normalisation.
    """

    scores: str = "counterfactual"
    strength: float = 1.0
    floor: float = 0.1
    invert: bool = False
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = "which spans the policy's own final answer depends on"

    def __post_init__(self) -> None:
        check_share("floor", self.floor)
        check_choice("ddof", self.ddof, (0, 1))
        if not self.strength >= 0 or self.floor == 0:
            raise InputError(f"strength must be 0 or more and floor over 0, not {self.strength} and {self.floor}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"token_scores:{self.scores}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        importance = token_scores(self.scores, batch) * (-1 if self.invert else 1)
        weights = span_weights(importance, batch.completion_mask, strength=self.strength, floor=self.floor)
        return _weighted(batch, weights, self.ddof, self.eps)


def span_weights(importance: Tensor, mask: Tensor, *, strength: float, floor: float) -> Tensor:
    """``w = max(1 + strength I / max|I|, floor)`` in each row, scaled to the mean 1.

    Args:
        importance: (B, T), equal within a span.
        mask: (B, T) bool.

    >>> span_weights(torch.tensor([[2.0, 0.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool), strength=1.0, floor=0.1)
    tensor([[1.7143, 0.8571, 0.4286]], dtype=torch.float64)
    """
    importance = importance.double().where(mask, 0.0)
    largest = importance.abs().amax(dim=1, keepdim=True) if mask.shape[1] else importance
    return _to_mean_one((1 + strength * importance / largest.masked_fill(largest == 0, 1.0)).clamp(min=floor), mask)


def row_quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """The ``q``-quantile of each row's values inside the mask, linear between two of them: (B,); 0 for none.

    >>> row_quantile(torch.tensor([[4.0, 1.0, 2.0, 9.0]]), torch.tensor([[True, True, True, False]]), 0.75).tolist()
    [3.0]
    """
    if not mask.shape[1]:
        return values.new_zeros(len(values))
    ordered = values.masked_fill(~mask, torch.inf).sort(dim=1).values
    place = q * (mask.sum(dim=1, keepdim=True) - 1).clamp(min=0).to(values)
    low, high = (ordered.gather(1, edge.long()) for edge in (place.floor(), place.ceil()))
    return torch.where(mask.any(dim=1), (low + (high - low) * (place - place.floor()))[:, 0], 0.0)


def _weighted(batch: CreditBatch, weights: Tensor, ddof: int, eps: float) -> Credit:
    """The group-normalised outcome times weights of mean 1; the parts tell the even share from what was moved."""
    mask = batch.completion_mask
    unit = group_normalize(batch.outcome(), batch.group_ids, ddof=ddof, eps=eps)
    advantages = (unit[:, None] * weights).where(mask, 0.0).float()
    even = broadcast_rows(unit, mask)
    metrics = {"effective_tokens": effective_share(weights, mask)}
    return Credit(advantages, parts={"outcome": even, "moved": advantages - even}, metrics=metrics)


def _to_mean_one(weights: Tensor, mask: Tensor) -> Tensor:
    weights = weights.where(mask, 0.0)
    return weights * (
        row_lengths(mask) / weights.sum(dim=1, keepdim=True).masked_fill(~mask.any(dim=1, keepdim=True), 1.0)
    )
