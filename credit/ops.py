"""Pure tensor functions that credit strategies are made of; those on groups come from :mod:`apportion.credit.groups`.

Shapes: B rollouts, S steps, T completion tokens. A row's steps are the True columns of its ``step_mask``; columns in
between may be False (a judged span that no token covers).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .groups import (
    FLAT,
    Scale,
    dead_group_share,
    group_mean,
    group_normalize,
    group_normalize_steps,
    group_std,
    leave_one_out,
    normalize_then_sum,
)

__all__ = [
    "FLAT",
    "Over",
    "Reduction",
    "Scale",
    "batch_moments",
    "broadcast_rows",
    "dead_group_share",
    "group_mean",
    "group_normalize",
    "group_normalize_steps",
    "group_std",
    "leave_one_out",
    "normalize_then_sum",
    "reduce_steps",
    "return_to_go",
    "spread_steps",
    "step_differences",
    "whiten",
]

Reduction = Literal["min", "product", "mean", "last"]
Over = Literal["token", "sequence"]


def return_to_go(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of each position's own and later values: ``R_j = sum_{k >= j} r_k`` (no discount).

    Args:
        values: (B, S) or (B, T).
        mask: same shape, bool; masked positions add nothing and get zero.

    >>> return_to_go(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, True]])).tolist()
    [[7.0, 6.0, 4.0]]
    """
    kept = values.where(mask, 0.0)
    return kept.flip(-1).cumsum(-1).flip(-1).where(mask, 0.0)


def step_differences(step_values: Tensor, step_mask: Tensor, outcome: Tensor, start: Tensor) -> Tensor:
    """Value gained by each step, the last one ending at the outcome: ``A_j = V_{j+1} - V_j``, ``V_S := R``.

    The sum over a row is ``R - V_0``: a potential-based form that keeps the expected policy gradient.

    Args:
        step_values: (B, S), value *after* step j (the last one is not used: the outcome replaces it).
        step_mask: (B, S) bool; a step's gain counts from the row's step before it.
        outcome: (B,) reward R.
        start: (B,) value V_0 before the first step.

    >>> values, mask = torch.tensor([[0.75, 0.25, 0.9]]), torch.tensor([[True, True, True]])
    >>> step_differences(values, mask, torch.tensor([0.0]), torch.tensor([0.5])).tolist()
    [[0.25, -0.5, -0.25]]
    """
    if step_values.shape[1] == 0:
        return torch.zeros_like(step_values)
    position = torch.arange(step_values.shape[1], device=step_values.device).expand_as(step_values)
    latest = torch.where(step_mask, position, -1).cummax(dim=1).values
    previous = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)
    before = step_values.gather(1, previous.clamp(min=0))
    before = torch.where(previous >= 0, before, start[:, None].to(step_values))
    after = torch.where(position == latest[:, -1:], outcome[:, None].to(step_values), step_values)
    return (after - before).where(step_mask, 0.0)


def reduce_steps(step_scores: Tensor, step_mask: Tensor, how: Reduction) -> Tensor:
    """One number per row from its step scores; 0 for a row without steps.

    ``product`` favours short answers, ``min`` does not: the reduction decides the winner, so it is always named.

    Args:
        step_scores: (B, S).
        step_mask: (B, S) bool.
        how: min, product, mean or last.

    Returns:
        (B,).

    >>> scores, mask = torch.tensor([[0.5, 0.25]]), torch.tensor([[True, True]])
    >>> [round(float(reduce_steps(scores, mask, how)), 3) for how in ("min", "product", "mean", "last")]
    [0.25, 0.125, 0.375, 0.25]
    """
    if how not in ("min", "product", "mean", "last"):
        raise ValueError(f"reduction must be min, product, mean or last, not {how!r}")
    if step_scores.shape[1] == 0:
        return step_scores.new_zeros(len(step_scores))
    if how == "min":
        value = step_scores.where(step_mask, float("inf")).amin(dim=1)
    elif how == "product":
        value = step_scores.where(step_mask, 1.0).prod(dim=1)
    elif how == "mean":
        value = step_scores.where(step_mask, 0.0).sum(dim=1) / step_mask.sum(dim=1).clamp(min=1)
    else:
        last = step_mask.shape[1] - 1 - step_mask.flip(1).to(torch.int8).argmax(dim=1)
        value = step_scores.gather(1, last[:, None])[:, 0]
    return value.where(step_mask.any(dim=1), 0.0)


def broadcast_rows(values: Tensor, completion_mask: Tensor) -> Tensor:
    """A number per row on every one of its tokens.

    Args:
        values: (B,).
        completion_mask: (B, T) bool.

    Returns:
        (B, T) float32, zero outside the mask.

    >>> broadcast_rows(torch.tensor([0.5, -1.0]), torch.tensor([[True, False], [True, True]])).tolist()
    [[0.5, 0.0], [-1.0, -1.0]]
    """
    return values.float()[:, None].where(completion_mask, 0.0)


def spread_steps(step_values: Tensor, step_ids: Tensor) -> Tensor:
    """Each token gets its step's value.

    Args:
        step_values: (B, S).
        step_ids: (B, T) long, -1 for no step.

    Returns:
        (B, T) float32, zero where ``step_ids`` is -1.

    >>> spread_steps(torch.tensor([[1.0, -1.0]]), torch.tensor([[0, 0, 1, -1]])).tolist()
    [[1.0, 1.0, -1.0, 0.0]]
    """
    if step_values.shape[1] == 0:
        return torch.zeros(step_ids.shape, device=step_ids.device)
    spread = step_values.float().gather(1, step_ids.clamp(min=0))
    return spread.where(step_ids >= 0, 0.0)


def batch_moments(values: Tensor, mask: Tensor, *, over: Over = "token", ddof: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the masked values of the whole batch.

    ``over="token"``: every token counts once, so that long answers decide. ``over="sequence"``: every row counts once,
    its tokens share its weight.

    Args:
        values: (B, T) of any float type.
        mask: (B, T) bool.
        over: token or sequence.
        ddof: 0 divides the squares by the number n of tokens (rows), 1 by n - 1.

    Returns:
        Two float64 scalars. The mean of equal values is exactly that value, and their deviation, like any up to
        ``FLAT``, is exactly 0; both are 0 for an empty mask.

    >>> values = torch.tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 9.0]])
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> [round(float(m), 4) for m in batch_moments(values, mask)]
    [0.75, 0.433]
    >>> [round(float(m), 4) for m in batch_moments(values, mask, over="sequence")]
    [0.5, 0.5]
    """
    if over not in ("token", "sequence"):
        raise ValueError(f"over must be token or sequence, not {over!r}")
    weight = mask.double()
    if over == "sequence":
        weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=1)
    number = mask.any(dim=1).sum() if over == "sequence" else mask.sum()
    if not mask.any():
        return number.double(), number.double()
    wide = values.double()
    lowest = wide.masked_fill(~mask, torch.inf).amin()  # measured from it, equal values cancel without rounding
    mean = lowest + ((wide - lowest).where(mask, 0.0) * weight).sum() / number
    squares = ((wide - mean).where(mask, 0.0).square() * weight).sum()
    std = (squares / (number - ddof).clamp(min=1)).sqrt()
    return mean, std.where(std > FLAT, 0.0)


def whiten(
    values: Tensor, mask: Tensor, *, over: Over = "token", center: bool = True, ddof: int = 0, eps: float = 1e-6
) -> Tensor:
    """Values less the batch's mean, over its standard deviation: ``(x - mean) / (std + eps)``.

    Args:
        values: (B, T).
        mask: (B, T) bool.
        over: see :func:`batch_moments`.
        center: subtract the mean.
        ddof: of the standard deviation.
        eps: added to it.

    Returns:
        (B, T) float64; zero outside the mask, and everywhere where the values are all equal.

    >>> whiten(torch.tensor([[1.0, 1.0, 3.0, 3.0]]), torch.ones(1, 4, dtype=torch.bool), eps=0).tolist()
    [[-1.0, -1.0, 1.0, 1.0]]
    """
    mean, std = batch_moments(values, mask, over=over, ddof=ddof)
    moved = values.double() - mean if center else values.double()
    return (moved / (std + eps).masked_fill(std == 0, 1.0)).where(mask & (std > 0), 0.0)
