"""What each answer adds to the sums that figures of credit quality are made of; see :mod:`apportion.credit.quality`.

Every figure is a function of sums over answers, so that resamples of answers are weighted sums of a few numbers. All
functions also take many shuffles of the credit at once, as leading dimensions ``...``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .batch import CreditBatch
from .intervals import ratio
from .strategy import check_choice
from .truth import Truth

__all__ = [
    "FIGURES",
    "UNIT_FIGURES",
    "Case",
    "Grading",
    "answer_figures",
    "answer_sums",
    "shuffle",
    "unit_credit",
    "unit_figures",
    "unit_sums",
]

UNIT_FIGURES: tuple[str, ...] = ("quality/pearson", "quality/sign_accuracy", "quality/sign_ties", "quality/blame_at_1")
FIGURES: tuple[str, ...] = (*UNIT_FIGURES, "quality/error_auc", "quality/inert_mass")
ROUNDING = 1e-6
"""Numbers that differ by less than this share of the largest one count as equal: credit is computed in float32."""


@dataclass(frozen=True)
class Grading:
    """What counts, and how much.

    Args:
        tau: the sign of a unit's credit is judged where its true advantage is over this in size, and an answer has a
            harmful unit where one is below ``-tau``; in units of reward.
        passing: an answer with a reward below this failed. One without a reward did not.
        weighting: in the correlation and in the accuracy of signs every ``unit`` counts once, or as often as it has
            trained tokens (``token``), as it does in a loss that is a mean over tokens.
    """

    tau: float = 0.05
    passing: float = 0.5
    weighting: Literal["unit", "token"] = "unit"

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, ("unit", "token"))


@dataclass(frozen=True)
class Case:
    """What credit is held against: B answers of T tokens in up to U units, on the CPU.

    ``unit_ids`` (B, T) is -1 outside the mask, ``tokens`` (B, U) counts each unit's trained tokens, and ``known``
    (B, U) says which units have any, and a true advantage.
    """

    mask: Tensor
    unit_ids: Tensor
    tokens: Tensor
    known: Tensor
    true: Tensor
    wrong: Tensor
    inert: Tensor
    failed: Tensor
    grading: Grading

    @classmethod
    def of(cls, truth: Truth, batch: CreditBatch, grading: Grading | None = None) -> Case:
        """The truth of the tokens that the batch trains."""
        mask = batch.completion_mask.cpu()
        if truth.unit_ids.shape != mask.shape:
            raise ValueError(f"the truth is of {tuple(truth.unit_ids.shape)} tokens, the batch of {tuple(mask.shape)}")
        grading = grading or Grading()
        unit_ids = truth.unit_ids.cpu().where(mask, -1)
        true = truth.advantage.cpu().double()
        tokens = _by_unit(mask.double(), unit_ids, true.shape[1])
        known = (tokens > 0) & ~true.isnan()
        return cls(
            mask=mask,
            unit_ids=unit_ids,
            tokens=tokens,
            known=known,
            true=true.where(known, 0.0),
            wrong=truth.wrong.cpu() & mask,
            inert=truth.inert.cpu() & mask,
            failed=batch.outcome().cpu() < grading.passing,
            grading=grading,
        )

    def on(self, advantages: Tensor) -> Tensor:
        """The advantages (B, T) as float64, zero outside the mask."""
        if advantages.shape != self.mask.shape:
            raise ValueError(f"the advantages are {tuple(advantages.shape)}, the batch is {tuple(self.mask.shape)}")
        return advantages.detach().cpu().double().where(self.mask, 0.0)


def _by_unit(values: Tensor, unit_ids: Tensor, units: int) -> Tensor:
    """Sums over the tokens of each unit, (..., B, U)."""
    sums = values.new_zeros(*values.shape[:-1], units + 1)  # the first place takes the tokens of no unit
    return sums.scatter_add_(-1, (unit_ids + 1).expand(values.shape), values)[..., 1:]


def unit_credit(advantages: Tensor, case: Case) -> Tensor:
    """Mean advantage of each unit, (..., B, U); exactly 0 where the advantages cancel, and in unknown units."""
    units = case.true.shape[1]
    total = _by_unit(advantages, case.unit_ids, units)
    cancelled = total.abs() <= ROUNDING * _by_unit(advantages.abs(), case.unit_ids, units)
    return (total / case.tokens.clamp(min=1)).masked_fill(cancelled | ~case.known, 0.0)


def shuffle(values: Tensor, mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count, B, N): the masked values of each row in ``count`` random orders."""
    keys = torch.rand(count, *values.shape, generator=generator).masked_fill(~mask, 2.0)
    shuffled = keys.argsort(dim=-1)  # the masked places come first, in random order
    places = (~mask).to(torch.int8).argsort(dim=-1, stable=True).expand(shuffled.shape)
    moved = values.expand(shuffled.shape).gather(-1, shuffled)
    return torch.zeros_like(moved).scatter_(-1, places, moved)


def _levels(values: Tensor, mask: Tensor) -> Tensor:
    """(..., N) long: rank of each masked value among its row's distinct ones, from 0; up to rounding they are equal."""
    gap = ROUNDING * values.abs().where(mask, 0.0).amax(dim=-1, keepdim=True) if values.shape[-1] else 0.0
    ordered, order = values.masked_fill(~mask, math.inf).sort(dim=-1)
    rises = (ordered.diff(dim=-1) > gap).cumsum(dim=-1)
    return torch.zeros_like(order).scatter_(-1, order, torch.nn.functional.pad(rises, (1, 0))[..., : order.shape[-1]])


def answer_sums(advantages: Tensor, case: Case, /) -> Tensor:
    """(..., B, C): what each answer adds to the sums that :func:`answer_figures` reads."""
    return torch.cat([unit_sums(unit_credit(advantages, case), case), _token_sums(advantages, case)], dim=-1)


def answer_figures(sums: Tensor) -> Tensor:
    """(..., 6): the ``FIGURES`` from sums (..., C)."""
    *_, area, answers, on_inert, size, inert = sums.unbind(dim=-1)
    inert_mass = ratio(on_inert, size).where(inert > 0, math.nan)
    of_tokens = torch.stack([ratio(area, answers), inert_mass], dim=-1)
    return torch.cat([unit_figures(sums[..., :-5]), of_tokens], dim=-1)


def unit_sums(credit: Tensor, case: Case, /) -> Tensor:
    """(..., B, 11): moments of credit and truth, signs, and blame, from the units' credit (..., B, U)."""
    weight = case.known.double() if case.grading.weighting == "unit" else case.tokens.where(case.known, 0.0)
    x, y = _standard(credit, weight), _standard(case.true, weight)
    moments = [weight, weight * x, weight * y, weight * x * x, weight * y * y, weight * x * y]
    judged = weight.where(case.true.abs() > case.grading.tau, 0.0)
    silent = judged.where(credit == 0, 0.0)
    right = judged.where(credit.sign() == case.true.sign(), 0.0) + silent / 2
    columns = torch.stack(torch.broadcast_tensors(*moments, judged, right, silent), dim=-1).sum(dim=-2)
    return torch.cat([columns, _blame(credit, case)], dim=-1)


def _blame(credit: Tensor, case: Case) -> Tensor:
    """(..., B, 2): share of the least credited units that are the truly worst one, and 1, where an answer counts."""
    if not case.true.shape[1]:
        return credit.new_zeros(*credit.shape[:-1], 2)
    worst = case.known & (_levels(case.true, case.known) == 0)
    blamed = case.known & (_levels(credit, case.known) == 0)
    hit = (worst & blamed).sum(dim=-1).double() / blamed.sum(dim=-1).clamp(min=1)
    counts = case.failed & (case.true.amin(dim=-1) < -case.grading.tau)
    return torch.stack([hit.where(counts, 0.0), counts.double().expand(hit.shape)], dim=-1)


def _standard(values: Tensor, weight: Tensor) -> Tensor:
    """Values over their largest size and less their mean, so that sums of squares lose nothing to rounding."""
    both = (-2, -1)
    largest = (values.abs() * (weight > 0)).flatten(-2).amax(dim=-1)[..., None, None] if values.numel() else 1.0
    scaled = values / (largest + (largest == 0)) if values.numel() else values
    return scaled - (scaled * weight).sum(dim=both, keepdim=True) / weight.sum(dim=both, keepdim=True).clamp(min=1)


def unit_figures(sums: Tensor) -> Tensor:
    """(..., 4): the ``UNIT_FIGURES`` from sums (..., 11)."""
    count, x, y, xx, yy, xy, judged, right, silent, hits, counted = sums.unbind(dim=-1)
    mean_x, mean_y = ratio(x, count), ratio(y, count)
    var_x, var_y = ratio(xx, count) - mean_x.square(), ratio(yy, count) - mean_y.square()
    both = var_x.where(var_x > ROUNDING**2, math.nan) * var_y.where(var_y > ROUNDING**2, math.nan)
    pearson = ((ratio(xy, count) - mean_x * mean_y) / both.sqrt()).clamp(-1, 1)
    return torch.stack([pearson, ratio(right, judged), ratio(silent, judged), ratio(hits, counted)], dim=-1)


def _token_sums(advantages: Tensor, case: Case) -> Tensor:
    """(..., B, 5): error AUC and 1 where an answer counts, ``|A|`` on inert and on all tokens, inert tokens."""
    other = case.mask & ~case.wrong
    pairs = (case.wrong.sum(dim=-1) * other.sum(dim=-1)).double()
    counts = (pairs > 0) & case.failed
    level = _levels(advantages, case.mask)
    zeros = torch.zeros_like(advantages)
    wrong_at = zeros.scatter_add(-1, level, case.wrong.double().expand(level.shape))
    other_at = zeros.scatter_add(-1, level, other.double().expand(level.shape))
    above = other_at.sum(dim=-1, keepdim=True) - other_at.cumsum(dim=-1)
    area = (wrong_at * (above + other_at / 2)).sum(dim=-1) / pairs.clamp(min=1)
    size = advantages.abs()
    inert = case.inert.sum(dim=-1).double()
    columns = (area.where(counts, 0.0), counts.double(), (size * case.inert).sum(dim=-1), size.sum(dim=-1), inert)
    return torch.stack(torch.broadcast_tensors(*columns), dim=-1)
