"""Pure tensor functions on steps that several step rules share; a row's steps are the True columns of its mask.

Shapes: B rollouts, S steps, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .ops import step_differences
from .strategy import check_choice

__all__ = [
    "DIFFERENCED",
    "SUMMED",
    "ScoreKind",
    "best_of",
    "check_score_kind",
    "discounted_return",
    "mean_of_others",
    "mean_steps",
    "min_from_here",
    "soft_min_weights",
    "tokens_per_step",
    "value_gains",
]

ScoreKind = Literal["correctness", "penalty", "value"]
"""What a step's score says.

- ``correctness``: whether the step itself is right, by convention in [0, 1];
- ``penalty``: what the step costs, at most 0, and 0 for a step without fault;
- ``value``: the chance of success from the state after the step: a level, which the next step starts from.
"""

SUMMED = "a value rates the state, not what the step earned, so it must not be summed; use credit=process/difference"
"""Why a rule that adds step scores up refuses a value, and the remedy."""

DIFFERENCED = (
    "the score of a step is no level that the next step starts from (a right step after a right one would earn 0), so "
    "its differences say nothing; use credit=process/own_step or credit=process/return"
)
"""Why a rule that takes differences refuses anything but a value, and the remedy."""


def check_score_kind(kind: str, refused: Mapping[str, str]) -> None:
    """Refuse a kind of step score that the rule would misread.

    Args:
        kind: of the scores, see ``ScoreKind``.
        refused: kinds that the rule does not take, each with the reason and the remedy.

    >>> check_score_kind("value", {"value": "levels must not be summed; use credit=process/difference"})
    Traceback (most recent call last):
    apportion.verifiers.errors.InputError: score_kind=value: levels must not be summed; use credit=process/difference
    """
    check_choice("score_kind", kind, ("correctness", "penalty", "value"))
    if kind in refused:
        raise InputError(f"score_kind={kind}: {refused[kind]}")


def discounted_return(values: Tensor, step_mask: Tensor, decay: float) -> Tensor:
    """Each step's own value and the later ones, faded by their distance in steps: ``sum_{k >= j} decay^(k - j) v_k``.

    ``decay`` 0 leaves the values as they are, 1 is the plain return.

    Args:
        values: (B, S).
        step_mask: (B, S) bool; masked columns add nothing, get zero and do not count as distance.
        decay: in [0, 1].

    >>> discounted_return(torch.tensor([[1.0, 9.0, 2.0, 4.0]]), torch.tensor([[True, False, True, True]]), 0.5).tolist()
    [[3.0, 0.0, 4.0, 4.0]]
    """
    columns = values.shape[1]
    order = (~step_mask).to(torch.int8).argsort(dim=1, stable=True)  # the row's steps first, in their order
    packed = values.where(step_mask, 0.0).gather(1, order)
    distance = torch.arange(columns, device=values.device)[:, None] - torch.arange(columns, device=values.device)
    weight = torch.pow(torch.full_like(distance, decay, dtype=values.dtype), distance.clamp(min=0)).tril()
    return torch.zeros_like(values).scatter(1, order, packed @ weight).where(step_mask, 0.0)


def soft_min_weights(scores: Tensor, step_mask: Tensor, temperature: float) -> Tensor:
    """Weights that gather on the lowest score: ``w_j = exp(-s_j / temperature) / sum_k exp(-s_k / temperature)``.

    Args:
        scores: (B, S).
        step_mask: (B, S) bool.
        temperature: over 0; the smaller, the harder the minimum.

    Returns:
        (B, S), 1 in sum over each row's steps; all zero in a row without steps.

    >>> soft_min_weights(torch.tensor([[0.8, -0.6, 0.4]]), torch.tensor([[True, True, True]]), 0.1).round(decimals=4)
    tensor([[0., 1., 0.]])
    """
    logits = (-scores / temperature).masked_fill(~step_mask, -torch.inf)
    top = logits.amax(dim=1, keepdim=True) if scores.shape[1] else logits
    raised = (logits - top.nan_to_num(neginf=0.0)).exp().where(step_mask, 0.0)
    return raised / raised.sum(dim=1, keepdim=True).clamp(min=torch.finfo(raised.dtype).tiny)


def min_from_here(values: Tensor, step_mask: Tensor) -> Tensor:
    """The lowest of each step's own and later values: ``min_{k >= j} v_k``.

    Args:
        values: (B, S).
        step_mask: (B, S) bool; masked columns get zero.

    >>> min_from_here(torch.tensor([[0.8, -0.6, 0.4]]), torch.tensor([[True, True, True]])).tolist()
    [[-0.6000000238418579, -0.6000000238418579, 0.4000000059604645]]
    """
    if values.shape[1] == 0:
        return values
    kept = values.masked_fill(~step_mask, torch.inf)
    return kept.flip(1).cummin(dim=1).values.flip(1).where(step_mask, 0.0)


def best_of(value: Tensor, count: int) -> Tensor:
    """Chance that the best of ``count`` independent tries succeeds: ``1 - (1 - V)^count``.

    >>> best_of(torch.tensor([0.5, 0.25]), 4).tolist()
    [0.9375, 0.68359375]
    """
    return 1 - (1 - value) ** count


def tokens_per_step(step_ids: Tensor, columns: int) -> Tensor:
    """(B, S) long: how many tokens belong to each of ``columns`` steps; ``step_ids`` is (B, T), -1 for none.

    >>> tokens_per_step(torch.tensor([[0, 0, 2, -1]]), 3).tolist()
    [[2, 0, 1]]
    """
    counts = torch.zeros(len(step_ids), columns + 1, dtype=torch.long, device=step_ids.device)
    return counts.scatter_add(1, step_ids + 1, torch.ones_like(step_ids))[:, 1:]


def value_gains(table: SpanTable, trained: Tensor, end: Tensor, start: Tensor) -> Tensor:
    """Value gained by each step that has a trained token, (B, S) float64: ``V_{j+1} - V_j``, ``V_S := end``.

    What happens in a step without a trained token (a tool wrote it, or it shares its only token) is added to the step
    before it.

    Args:
        table: span scores are the values after each step.
        trained: (B, S) bool, the steps that a trained token belongs to.
        end: (B,) value of the finished answer.
        start: (B,) value before the first step.
    """
    run = (trained.cumsum(dim=1) - 1).clamp(min=0)  # a trained step and its followers are one run
    column = torch.arange(trained.shape[1], device=trained.device).where(table.mask, 0)
    last = torch.zeros_like(run).scatter_reduce(1, run, column, "amax")
    after = table.score.double().gather(1, last.gather(1, run))
    return step_differences(after, trained, end, start)


def mean_of_others(values: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """Weighted mean over the *other* rows of the group: ``sum_{k != i} v_k w_k / sum_{k != i} w_k``.

    Args:
        values: (B,) or (B, K).
        weights: same shape, whole numbers from 0; a place of weight 0 does not count, whatever its value.
        group_ids: (B,) long.

    Returns:
        (B,) float64; NaN where the other rows have no weight.

    >>> two = torch.zeros(2, dtype=torch.long)
    >>> mean_of_others(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 9.0]), two).tolist()
    [1.0, 3.0]
    """
    if values.ndim == 1:
        values, weights = values[:, None], weights[:, None]
    _, index = torch.unique(group_ids, return_inverse=True)
    weights = weights.double()
    counted = values.double().masked_fill(weights == 0, torch.inf)
    lowest = counted.new_full((len(values),), torch.inf)
    if values.shape[1]:
        lowest = lowest.scatter_reduce(0, index, counted.amin(dim=1), "amin")
    low = lowest[index].nan_to_num(posinf=0.0)  # measured from the lowest: equal values give themselves exactly
    above = ((values.double() - low[:, None]) * weights).where(weights > 0, 0.0).sum(dim=1)
    total, own = (torch.stack([above, weights.sum(dim=1)]) for _ in range(2))
    total = torch.zeros_like(total).index_add(1, index, total)[:, index]
    rest, weight = total - own
    return torch.where(weight > 0, low + rest / weight, torch.nan)


def mean_steps(step_mask: Tensor) -> float:
    """Steps per row; 0 without rows."""
    return float(step_mask.sum(dim=1).double().mean()) if len(step_mask) else 0.0
