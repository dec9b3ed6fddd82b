"""Bootstrap intervals of figures about credit, with the groups (problems) as the replicates.

Answers to one problem are not independent, so a resample draws whole groups. Every figure is a function of sums over
answers. Sums are added up once for each group, and a resample is then a weighted sum of a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RESAMPLES", "Estimate", "bootstrap", "estimates", "ratio"]

RESAMPLES = 1_000
LEVEL = 0.95
MOST_UNDEFINED = 0.1

Figures = Callable[[Tensor], Tensor]


class Estimate(NamedTuple):
    """A figure with its 95% interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def bootstrap(
    rows: Tensor, group_ids: Tensor, figures: Figures, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Figures of a batch, and of resamples of its groups with replacement.

    The draws depend on the number of groups, ``resamples`` and ``seed`` alone. Two strategies on the same rollouts are
    therefore paired: subtract their samples to get those of the difference.

    Args:
        rows: (B, C) float64, what each answer adds to each of C sums.
        group_ids: (B,) long.
        figures: from sums (..., C) to figures (..., F), NaN where one is undefined.
        resamples: R.
        seed: of the draws.

    Returns:
        (F,) and (R, F). No samples where there are fewer than two groups: their spread is not known.

    >>> rows = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    >>> value, samples = bootstrap(rows, torch.tensor([0, 1, 1]), lambda sums: sums, resamples=500)
    >>> value.tolist(), sorted(set(samples[:, 0].tolist()))  # the second group twice, each once, the first twice
    ([3.0], [0.0, 3.0, 6.0])
    """
    names, owner = group_ids.unique(return_inverse=True)
    groups = len(names)
    sums = rows.new_zeros(groups, rows.shape[1]).index_add_(0, owner, rows)
    value = figures(sums.sum(dim=0))
    if groups < 2:
        return value, value.new_zeros(0, len(value))
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(groups, (resamples, groups), generator=generator)
    weights = torch.zeros(resamples, groups, dtype=rows.dtype).scatter_add_(1, draws, torch.ones_like(draws).to(rows))
    return value, figures(weights @ sums)


def estimates(names: Sequence[str], value: Tensor, samples: Tensor, group_ids: Tensor) -> dict[str, Estimate]:
    """Each figure with its percentile interval, the tails widened for few groups.

    The tail ``a = .025`` becomes ``Phi(sqrt(n/(n-1)) t_{a, n-1})`` for n groups (Hesterberg 2015, section 5.3,
    doi:10.1080/00031305.2015.1089789). Resamples without a value are left out; where they are more than one in ten,
    there is no interval.

    Args:
        names: F names.
        value: (F,) figures.
        samples: (R, F) of resamples, see :func:`bootstrap`.
        group_ids: (B,) long.
    """
    groups = len(group_ids.unique())
    columns = zip(names, value.tolist(), samples.unbind(dim=1))
    return {name: Estimate(number, *_interval(column, groups, number)) for name, number, column in columns}


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``; NaN where the whole is not positive."""
    return part / whole.where(whole > 0, math.nan)


def _interval(samples: Tensor, groups: int, value: float) -> tuple[float, float]:
    known = samples[~samples.isnan()]
    if math.isnan(value) or not len(known) or len(known) < (1 - MOST_UNDEFINED) * len(samples):
        return math.nan, math.nan
    from scipy import stats

    quantile = stats.t.ppf((1 - LEVEL) / 2, groups - 1)
    tail = float(stats.norm.cdf(math.sqrt(groups / (groups - 1)) * quantile))
    low, high = known.quantile(torch.tensor([tail, 1 - tail], dtype=known.dtype)).tolist()
    return low, high
