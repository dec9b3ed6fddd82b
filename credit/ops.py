"""Pure tensor functions that credit strategies are made of.

Statistics are computed in float64, from centred values, and leave out NaN (an abstaining verifier, a row left out).
Shapes: B rollouts, S steps, T completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "broadcast_rows",
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
]

Scale = Literal["group", "batch", "none"]
Reduction = Literal["min", "product", "mean", "last"]


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of each row's group, NaN left out; NaN for a group without values.

    Args:
        values: (B,) of any float type.
        group_ids: (B,) long.

    Returns:
        (B,) float64.

    >>> group_mean(torch.tensor([0.0, 1.0, 4.0]), torch.tensor([7, 7, 9])).tolist()
    [0.5, 0.5, 4.0]
    """
    values = _checked(values, group_ids).double()
    index, groups = _group_index(group_ids)
    present = ~values.isnan()
    total = _group_sum(values.nan_to_num(), index, groups)
    return (total / _group_sum(present.double(), index, groups))[index]


def group_std(values: Tensor, group_ids: Tensor, *, ddof: int = 0) -> Tensor:
    """Standard deviation of each row's group, from centred values; exactly 0 where all values are equal.

    Args:
        values: (B,).
        group_ids: (B,) long.
        ddof: 0 divides by n (population), 1 by n - 1 (sample).

    Returns:
        (B,) float64; 0 for a group of at most ``ddof`` values.

    >>> group_std(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long)).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    values = _checked(values, group_ids).double()
    index, groups = _group_index(group_ids)
    present = ~values.isnan()
    centred = (values - group_mean(values, group_ids)).nan_to_num()
    variance = _group_sum(centred.square(), index, groups) / (_group_sum(present.double(), index, groups) - ddof).clamp(
        min=1
    )
    std = variance.sqrt()[index]
    return std.masked_fill(_is_constant(values, index, groups), 0.0)


def group_normalize(
    rewards: Tensor, group_ids: Tensor, *, ddof: int = 0, eps: float = 1e-6, scale: Scale = "group"
) -> Tensor:
    """Rewards against their group: ``(r - mean_g) / (std + eps)`` (GRPO, arXiv 2402.03300).

    A group whose rewards are all equal gives exactly zero, whatever the precision. NaN rewards give zero and do not
    enter the statistics.

    Args:
        rewards: (B,) of any float type.
        group_ids: (B,) long; rows of a group need not be neighbours.
        ddof: 0 divides the variance by n (population), 1 by n - 1.
        eps: added to the standard deviation.
        scale: divide by the ``group``'s standard deviation, by that of the centred rewards of the whole ``batch``, or
            by ``none`` (Dr.GRPO, arXiv 2503.20783).

    Returns:
        (B,) in the type of ``rewards``, at least float32.

    >>> group_normalize(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long), eps=0).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    out_dtype = torch.promote_types(rewards.dtype, torch.float32)
    values = _checked(rewards, group_ids).double()
    index, groups = _group_index(group_ids)
    centred = values - group_mean(values, group_ids)
    centred = centred.masked_fill(_is_constant(values, index, groups), 0.0).nan_to_num()
    if scale == "none":
        return centred.to(out_dtype)
    if scale == "group":
        std = group_std(values, group_ids, ddof=ddof)
    elif scale == "batch":
        one_group = torch.zeros_like(group_ids)
        std = group_std(centred.masked_fill(values.isnan(), float("nan")), one_group, ddof=ddof)
    else:
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    alive = centred != 0
    return torch.where(alive, centred / (std + eps).masked_fill(~alive, 1.0), 0.0).to(out_dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor, *, normalize: bool = False, eps: float = 1e-6) -> Tensor:
    """Each reward minus the mean of the *other* rewards of its group (RLOO, arXiv 2402.14740).

    Args:
        rewards: (B,).
        group_ids: (B,) long.
        normalize: divide by the population standard deviation of the others; where the others are all equal there is no
            scale, and the difference stays as it is.
        eps: added to that standard deviation.

    Returns:
        (B,); zero for a row alone in its group and for NaN.

    >>> leave_one_out(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long)).tolist()
    [-0.6666666865348816, -0.6666666865348816, 0.6666666865348816, 0.6666666865348816]
    """
    out_dtype = torch.promote_types(rewards.dtype, torch.float32)
    values = _checked(rewards, group_ids).double()
    others = (group_ids[:, None] == group_ids[None, :]) & ~values.isnan()[None, :]
    others = others.fill_diagonal_(False) if len(values) else others
    count = others.sum(dim=1)
    difference = values[:, None] - values[None, :]  # differences first: equal rewards cancel exactly
    mean_difference = difference.where(others, 0.0).sum(dim=1) / count.clamp(min=1)
    advantage = mean_difference.masked_fill(count == 0, 0.0).nan_to_num()
    if not normalize:
        return advantage.to(out_dtype)
    spread = (difference - mean_difference[:, None]).where(others, 0.0)
    std = (spread.square().sum(dim=1) / count.clamp(min=1)).sqrt()
    low = values[None, :].where(others, float("inf")).amin(dim=1)
    high = values[None, :].where(others, float("-inf")).amax(dim=1)
    flat = low >= high
    return torch.where(flat, advantage, advantage / (std + eps).masked_fill(flat, 1.0)).to(out_dtype)


def normalize_then_sum(
    scores: Tensor, group_ids: Tensor, *, weights: Tensor | None = None, ddof: int = 0, eps: float = 1e-6
) -> Tensor:
    """Normalise each reward channel within its group, then add them up (GDPO's first stage, arXiv 2601.05242).

    A missing value (NaN) counts neither in its channel's statistics nor in its row's sum.

    Args:
        scores: (B, C), one column a channel.
        group_ids: (B,) long.
        weights: (C,), default one.
        ddof, eps: see :func:`group_normalize`.

    Returns:
        (B,).

    >>> two = torch.zeros(2, dtype=torch.long)
    >>> normalize_then_sum(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), two, eps=0).tolist()
    [-2.0, 2.0]
    """
    columns = [group_normalize(scores[:, c], group_ids, ddof=ddof, eps=eps) for c in range(scores.shape[1])]
    stacked = torch.stack(columns, dim=1)
    return stacked.sum(dim=1) if weights is None else stacked @ weights.to(stacked)


def group_normalize_steps(
    step_scores: Tensor, step_mask: Tensor, group_ids: Tensor, *, ddof: int = 0, eps: float = 1e-6
) -> Tensor:
    """Step scores against all steps of all rows of the group, pooled (GRPO process supervision, arXiv 2402.03300).

    Args:
        step_scores: (B, S).
        step_mask: (B, S) bool, False where the row has no such step.
        group_ids: (B,) long.
        ddof, eps: see :func:`group_normalize`.

    Returns:
        (B, S), zero outside ``step_mask``.

    >>> scores = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> mask = torch.tensor([[True, True, False], [True, True, True]])
    >>> group_normalize_steps(scores, mask, torch.zeros(2, dtype=torch.long), eps=0)[0].tolist()
    [0.8164966106414795, -1.2247449159622192, 0.0]
    """
    if step_scores.shape != step_mask.shape:
        raise ValueError(f"step_scores {tuple(step_scores.shape)} and step_mask {tuple(step_mask.shape)} differ")
    pooled = step_scores.masked_fill(~step_mask, float("nan")).flatten()
    pooled_groups = group_ids[:, None].expand_as(step_scores).flatten()
    return group_normalize(pooled, pooled_groups, ddof=ddof, eps=eps).view_as(step_scores)


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
        step_mask: (B, S) bool; a row's steps are its leading True entries.
        outcome: (B,) reward R.
        start: (B,) value V_0 before the first step.

    >>> values, mask = torch.tensor([[0.75, 0.25, 0.9]]), torch.tensor([[True, True, True]])
    >>> step_differences(values, mask, torch.tensor([0.0]), torch.tensor([0.5])).tolist()
    [[0.25, -0.5, -0.25]]
    """
    num_steps = step_mask.sum(dim=1, keepdim=True)
    position = torch.arange(step_values.shape[1], device=step_values.device)[None, :]
    after = torch.where(position == num_steps - 1, outcome[:, None].to(step_values), step_values)
    before = torch.cat([start[:, None].to(step_values), step_values[:, :-1]], dim=1)
    return (after - before).where(step_mask, 0.0)


def reduce_steps(step_scores: Tensor, step_mask: Tensor, how: Reduction) -> Tensor:
    """One number per row from its step scores; 0 for a row without steps.

    ``product`` favours short answers, ``min`` does not: the reduction decides the winner, so it is always named.

    Args:
        step_scores: (B, S).
        step_mask: (B, S) bool.
        how: min, product, mean or last.

    >>> scores, mask = torch.tensor([[0.5, 0.25]]), torch.tensor([[True, True]])
    >>> [round(float(reduce_steps(scores, mask, how)), 3) for how in ("min", "product", "mean", "last")]
    [0.25, 0.125, 0.375, 0.25]
    """
    num_steps = step_mask.sum(dim=1)
    if how == "min":
        value = step_scores.where(step_mask, float("inf")).amin(dim=1) if step_scores.shape[1] else num_steps.float()
    elif how == "product":
        value = step_scores.where(step_mask, 1.0).prod(dim=1)
    elif how == "mean":
        value = step_scores.where(step_mask, 0.0).sum(dim=1) / num_steps.clamp(min=1)
    elif how == "last":
        padded = torch.cat([step_scores, step_scores.new_zeros(len(step_scores), 1)], dim=1)
        value = padded.gather(1, (num_steps - 1).clamp(min=0)[:, None])[:, 0]
    else:
        raise ValueError(f"reduction must be min, product, mean or last, not {how!r}")
    return value.where(num_steps > 0, 0.0)


def broadcast_rows(values: Tensor, completion_mask: Tensor) -> Tensor:
    """A number per row on every one of its tokens: (B,) and (B, T) to float32 (B, T)."""
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


def _checked(values: Tensor, group_ids: Tensor) -> Tensor:
    if values.ndim != 1 or values.shape != group_ids.shape:
        raise ValueError(f"values {tuple(values.shape)} and group_ids {tuple(group_ids.shape)} must both be (B,)")
    return values


def _group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    groups, index = torch.unique(group_ids, return_inverse=True)
    return index, len(groups)


def _group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def _is_constant(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """(B,) bool: all values of the row's group are the same number (exactly, so that rounding cannot hide it)."""
    fill = torch.zeros(groups, dtype=values.dtype, device=values.device)
    high = fill.scatter_reduce(
        0, index, values.nan_to_num(nan=-torch.inf, posinf=torch.inf), "amax", include_self=False
    )
    low = fill.scatter_reduce(0, index, values.nan_to_num(nan=torch.inf, neginf=-torch.inf), "amin", include_self=False)
    return (low >= high)[index]
