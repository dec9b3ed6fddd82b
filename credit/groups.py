"""Statistics of rewards within their group.

They are computed in float64 from centred values and leave out NaN (an abstaining verifier, a row left out of training).
Shapes: B rollouts, K values of each (steps, tokens) that are pooled with those of its group, C reward channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "FLAT",
    "Scale",
    "dead_group_share",
    "group_mean",
    "group_normalize",
    "group_normalize_steps",
    "group_std",
    "leave_one_out",
    "normalize_then_sum",
]

Scale = Literal["group", "batch", "none"]

FLAT = 1e-8
"""A standard deviation up to this is rounding (0.1 + 0.2 beside 0.3) and counts as none."""


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of each row's group; exactly the value itself where all values are equal.

    Args:
        values: (B,) or, pooled over rows and columns, (B, K), of any float type; NaN is left out.
        group_ids: (B,) long; rows of a group need not be neighbours.

    Returns:
        (B,) float64; NaN for a group without values.

    >>> group_mean(torch.tensor([0.0, 1.0, 4.0]), torch.tensor([7, 7, 9])).tolist()
    [0.5, 0.5, 4.0]
    """
    table, index, groups = _by_group(values, group_ids)
    return _mean(table, index, groups)


def group_std(values: Tensor, group_ids: Tensor, *, ddof: int = 0) -> Tensor:
    """Standard deviation of each row's group; exactly 0 where the values are equal or differ by rounding (``FLAT``).

    Args:
        values: (B,) or, pooled over rows and columns, (B, K); NaN is left out.
        group_ids: (B,) long.
        ddof: 0 divides by n (population), 1 by n - 1 (sample).

    Returns:
        (B,) float64; 0 for a group of at most ``ddof`` values.

    >>> group_std(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long)).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    table, index, groups = _by_group(values, group_ids)
    return _std(table, _mean(table, index, groups), index, groups, ddof)


def group_normalize(
    rewards: Tensor, group_ids: Tensor, *, ddof: int = 0, eps: float = 1e-6, scale: Scale = "group"
) -> Tensor:
    """Rewards against their group: ``(r - mean_g) / (std + eps)`` (GRPO, arXiv 2402.03300).

    A group whose rewards are all equal gives exactly zero, whatever the precision. NaN rewards give zero and do not
    enter the statistics.

    Args:
        rewards: (B,) of any float type; (B, K) values are pooled over rows and columns.
        group_ids: (B,) long; rows of a group need not be neighbours.
        ddof: 0 divides the variance by n (population), 1 by n - 1.
        eps: added to the standard deviation.
        scale: divide by the standard deviation of the ``group``, of all rewards of the ``batch`` (Lite-PPO,
            arXiv 2508.08221), or by ``none`` (Dr.GRPO, arXiv 2503.20783).

    Returns:
        The shape of ``rewards``, in its type, at least float32.

    >>> group_normalize(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4, dtype=torch.long), eps=0).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    table, index, groups = _by_group(rewards, group_ids)
    mean = _mean(table, index, groups)
    std = _std(table, mean, index, groups, ddof)
    scaled = (table - mean[:, None]).where((std > 0)[:, None], 0.0).nan_to_num(nan=0.0)
    if scale != "none":
        unit = group_std(rewards, torch.zeros_like(group_ids), ddof=ddof) if scale == "batch" else std
        scaled = scaled / (unit + eps).masked_fill(unit == 0, 1.0)[:, None]
    wanted = torch.promote_types(rewards.dtype, torch.float32)
    return (scaled[:, 0] if rewards.ndim == 1 else scaled[:, : rewards.shape[1]]).to(wanted)


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
    return group_normalize(step_scores.masked_fill(~step_mask, float("nan")), group_ids, ddof=ddof, eps=eps)


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
    if rewards.ndim != 1:
        raise ValueError(f"need rewards (B,), not {tuple(rewards.shape)}")
    column, index, groups = _by_group(rewards, group_ids)
    place, size = _place_in_group(index, groups)
    table = column.new_full((groups, size), float("nan"))  # (N, G), NaN where a group is smaller
    table[index, place] = column[:, 0]
    others = ~table.isnan()[:, None, :] & ~torch.eye(size, dtype=torch.bool, device=table.device)
    count = others.sum(dim=2).clamp(min=1)
    difference = table[:, :, None] - table[:, None, :]  # differences first: equal rewards cancel exactly
    advantage = difference.where(others, 0.0).sum(dim=2) / count
    if normalize:
        spread = (difference - advantage[:, :, None]).where(others, 0.0)
        std = (spread.square().sum(dim=2) / count).sqrt()
        advantage = torch.where(std > FLAT, advantage / (std + eps), advantage)
    out = advantage.masked_fill(table.isnan(), 0.0)[index, place]
    return out.to(torch.promote_types(rewards.dtype, torch.float32))


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
    columns = [group_normalize(column, group_ids, ddof=ddof, eps=eps) for column in scores.unbind(dim=1)]
    stacked = torch.stack(columns, dim=1)
    return stacked.sum(dim=1) if weights is None else stacked @ weights.to(stacked)


def dead_group_share(values: Tensor, group_ids: Tensor) -> float:
    """Share of the groups whose values are all equal, so that normalising gives them nothing; NaN without any value.

    With independent answers of success rate p it is ``p^G + (1 - p)^G`` in the mean.

    Args:
        values: (B,) rewards or scores of one channel; NaN is left out, and so are groups without a value.
        group_ids: (B,) long.

    >>> dead_group_share(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    0.5
    """
    table, index, groups = _by_group(values, group_ids)
    mean = _mean(table, index, groups)
    std = _std(table, mean, index, groups, ddof=0)
    judged = torch.zeros(groups, dtype=torch.bool, device=index.device).index_fill_(0, index[~mean.isnan()], True)
    alive = torch.zeros_like(judged).index_fill_(0, index[std > 0], True)
    return 1.0 - int(alive.sum()) / int(judged.sum()) if judged.any() else float("nan")


def _by_group(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values as (B, K >= 1) float64, the index of each row's group, and the number of groups."""
    if values.ndim not in (1, 2) or values.shape[:1] != group_ids.shape:
        shapes = f"{tuple(values.shape)} and {tuple(group_ids.shape)}"
        raise ValueError(f"need values (B,) or (B, K) and group_ids (B,), not {shapes}")
    table = (values[:, None] if values.ndim == 1 else values).double()
    if table.shape[1] == 0:
        table = table.new_full((len(table), 1), float("nan"))
    infinite = torch.isinf(table).any(dim=1).nonzero()
    if len(infinite):
        raise ValueError(f"row {int(infinite[0])} holds an infinite value; give a finite one, or NaN for none")
    ids, index = torch.unique(group_ids, return_inverse=True)
    return table, index, len(ids)


def _mean(table: Tensor, index: Tensor, groups: int) -> Tensor:
    """(B,): measured from the group's lowest value on, so that equal values give themselves without rounding."""
    lowest_of_row = table.nan_to_num(nan=torch.inf).amin(dim=1)
    low = table.new_full((groups,), torch.inf).scatter_reduce(0, index, lowest_of_row, "amin")[index]
    above = (table - low[:, None]).nan_to_num(nan=0.0).sum(dim=1)
    return low + _total(above, index, groups) / _total((~table.isnan()).sum(dim=1).double(), index, groups)


def _std(table: Tensor, mean: Tensor, index: Tensor, groups: int, ddof: int) -> Tensor:
    squares = (table - mean[:, None]).nan_to_num(nan=0.0).square().sum(dim=1)
    count = _total((~table.isnan()).sum(dim=1).double(), index, groups)
    std = (_total(squares, index, groups) / (count - ddof).clamp(min=1)).sqrt()
    return std.where(std > FLAT, 0.0)


def _total(row_values: Tensor, index: Tensor, groups: int) -> Tensor:
    """(B,): the sum over each row's group."""
    return row_values.new_zeros(groups).index_add_(0, index, row_values)[index]


def _place_in_group(index: Tensor, groups: int) -> tuple[Tensor, int]:
    """(B,): a row's number among the rows of its group; and the size of the largest group."""
    sizes = torch.bincount(index, minlength=groups)
    before = (sizes.cumsum(dim=0) - sizes).repeat_interleave(sizes)
    place = torch.empty_like(index)
    place[index.argsort(stable=True)] = torch.arange(len(index), device=index.device) - before
    return place, int(sizes.max()) if groups else 0
