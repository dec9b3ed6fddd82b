"""Inner products of the gradients of K strategies in N groups, and every figure that follows from them.

``g[k, n]`` is what group n adds to the gradient of strategy k; the whole gradient is ``sum_n g[k, n]``. Each function
takes ``weights``: how often each group counts, (N,), or (R, N) for R resamples at once; None counts each once. The
result has R in front where the weights have it. A strategy without a gradient gives NaN.

A group drawn twice is one group with one noise: added up like two, its noise would count fourfold, and the resampled
gradient would be longer than that of as many different groups. Weights therefore say how often a group counts in two
means, that of ``<g[k, n], g[l, n]>`` over groups and that of ``<g[k, n], g[l, m]>`` over pairs of different groups,
and what is resampled are the products of N *different* groups, N times the one and N (N - 1) times the other. With
weights of one this is the plain sum. A resample that holds a single group has no pairs, and its figures are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "GradientGram",
    "ReferenceGram",
    "Work",
    "agreement",
    "bias",
    "cosines",
    "group_cosines",
    "norms",
    "reference_cosines",
    "reference_is_noise",
    "resample_groups",
    "signal_to_noise",
]


@dataclass(frozen=True)
class Work:
    """What it took: calls of the model, backward passes, and the completion tokens that these ran over.

    Args:
        forwards, backwards: passes over a block of rows.
        forward_tokens, backward_tokens: completion tokens in them.
        rounds: how often all was done, because memory held only a part of the parameters' gradients.
    """

    forwards: int = 0
    backwards: int = 0
    forward_tokens: int = 0
    backward_tokens: int = 0
    rounds: int = 1


@dataclass(frozen=True)
class ReferenceGram:
    """A reference gradient from other rollouts, in two halves of its groups.

    Args:
        cross: (K, N, 2) float64, inner products of the strategies' groups with the halves.
        halves: (2, 2) float64, of the halves with each other. The reference is their sum.
    """

    cross: Tensor
    halves: Tensor


@dataclass(frozen=True)
class GradientGram:
    """Inner products of gradients.

    Args:
        names: of the K strategies.
        groups: (N,) long, ids of the groups.
        gram: (K, N, K, N) float64, ``<g[k, n], g[l, m]>``.
        reference: of a gradient from other rollouts, or None.
        work: what it took.
    """

    names: tuple[str, ...]
    groups: Tensor
    gram: Tensor
    reference: ReferenceGram | None = None
    work: Work = Work()


def resample_groups(groups: int, resamples: int, seed: int) -> Tensor:
    """How often each group is drawn in each bootstrap resample, (resamples, groups) float64.

    The draws are those of :func:`apportion.credit.intervals.bootstrap`: figures of credit and of gradients on the same
    groups are paired. A single group has no spread, and every figure of its resamples is NaN.

    >>> resample_groups(4, 3, seed=0).sum(dim=1).tolist()
    [4.0, 4.0, 4.0]
    """
    draws = torch.randint(groups, (resamples, groups), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(resamples, groups).double().scatter_add_(1, draws, torch.ones_like(draws).double())


# --- whole gradients -------------------------------------------------------------------------------------------------


def norms(gram: GradientGram, weights: Tensor | None = None) -> Tensor:
    """(..., K): length of each strategy's gradient."""
    return _lengths(gram, weights).reshape(*_front(weights), -1)


def cosines(gram: GradientGram, weights: Tensor | None = None) -> Tensor:
    """(..., K, K): cosine between the gradients of every two strategies."""
    number, length = len(gram.names), _lengths(gram, weights)
    totals = torch.stack([_totals(gram, products.transpose(0, 1), weights) for products in gram.gram], dim=1)
    found = _cosine(totals, length[:, :, None] * length[:, None, :])
    return found.reshape(*_front(weights), number, number)


def reference_cosines(gram: GradientGram, weights: Tensor | None = None) -> Tensor:
    """(..., K): cosine between each strategy's gradient and the reference from other rollouts, which stays as it is."""
    counts, reference = _counts(gram, weights), _reference(gram)
    product = torch.einsum("rn,kn->rk", counts, reference.cross.sum(dim=2))
    length = _lengths(gram, weights) * reference.halves.sum().clamp(min=0).sqrt()
    return _cosine(product, length).reshape(*_front(weights), -1)


def agreement(gram: GradientGram) -> tuple[float, float]:
    """Cosine between the two halves of the reference, and the largest that a strategy could show against the whole.

    With the halves' cosine c, the whole has a cosine of ``sqrt(2 c / (1 + c))`` with the gradient of endlessly many
    such rollouts (Spearman and Brown); NaN where the halves do not agree at all.
    """
    halves = _reference(gram).halves
    between = halves[0, 1] / (halves[0, 0] * halves[1, 1]).sqrt()
    return float(between), float((2 * between / (1 + between)).sqrt())


def reference_is_noise(gram: GradientGram) -> bool:
    """Whether the halves of the reference agree no better than noise would: what is compared with it means nothing.

    The cosine c of two independent vectors with covariance S, of however many groups they are the sum, is spread like
    that of random directions in ``d = (tr S)^2 / tr S^2`` dimensions, where ``c sqrt(d - 1) / sqrt(1 - c^2)`` has
    Student's t-distribution with d - 1 degrees. It is noise unless c is over the 97.5% point, near ``2 / sqrt(d)``.
    The noise of the reference's groups is taken to be like that of the strategies' (median of d). Where fewer than
    four groups, or groups all alike, do not tell d, it is noise unless c is over zero.
    """
    from scipy import stats

    between, chance = agreement(gram)[0], float(_chance(_own(gram)).nanmedian())
    if not chance > 0:
        return not between > 0
    freedom = 1 / chance**2 - 1
    limit = float(stats.t.ppf(0.975, freedom))
    return not between > limit / math.sqrt(freedom + limit**2)


# --- groups as samples -----------------------------------------------------------------------------------------------


def signal_to_noise(gram: GradientGram, weights: Tensor | None = None) -> Tensor:
    """(..., K): ``||E g||^2 / tr Cov(g)`` of one group's gradient g; N groups have N times as much.

    Both parts without bias. The signal is the mean inner product of two *different* groups, ``s = mean_{n != m}
    <g_n, g_m>``; the noise is ``mean_n ||g_n||^2 - s``, which is the sum of the sample variances (ddof 1). The signal
    may come out below zero: then these groups do not show any. Groups without a gradient count. The reciprocal is the
    noise scale in groups (McCandlish et al., arXiv 1812.06162). NaN with fewer than two groups.

    In a resample, pairs of a group with itself are left out, which else would pass for signal.
    """
    counts, own = _counts(gram, weights), _own(gram)
    signal, power = _of_pairs(own, counts), _of_groups(own, counts)
    return (signal / (power - signal)).reshape(*_front(weights), -1)


def group_cosines(gram: GradientGram, weights: Tensor | None = None) -> Tensor:
    """(..., K): mean cosine between the gradients of two different groups, of those that have any."""
    counts, own = _counts(gram, weights), _own(gram)
    length = own.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    alive = length > 0
    found = own / torch.where(alive, length, 1.0)[:, :, None] / torch.where(alive, length, 1.0)[:, None, :]
    counts_alive = counts[:, None, :] * alive
    return _of_pairs(found, counts_alive).reshape(*_front(weights), -1)


def bias(gram: GradientGram, to: str | None = None, weights: Tensor | None = None) -> Tensor:
    """(..., K): how far the expected gradient points elsewhere than a reference r: ``min_c ||c E g - r|| / ||r||``.

    The sine of the angle between ``E g`` and r, without the noise of the batch: of each group's gradient the part
    along r is taken out, and ``bias^2 = s(rest) / s(whole)``, with s the mean inner product of two different groups
    (see :func:`signal_to_noise`), cut to [0, 1]. 0: the expected gradient is a multiple of the reference. NaN where
    the groups show no signal at all.

    Args:
        to: name of the strategy whose gradient on the same rollouts is the reference; None: that of other rollouts.
            It is resampled as a plain weighted sum, with the noise of a group drawn twice: take no interval of it.
    """
    counts, own = _counts(gram, weights), _own(gram)
    if to is None:
        reference = _reference(gram)
        along = reference.cross.sum(dim=2).expand(len(counts), -1, -1)
        square = reference.halves.sum().expand(len(counts))
    else:
        at = gram.names.index(to)
        along = torch.einsum("knm,rm->rkn", gram.gram[:, :, at, :], counts)
        square = torch.einsum("rn,rn->r", along[:, at], counts)
    whole = _of_pairs(own, counts)
    # s(rest) = s(whole) - mean_{n != m} along_n along_m / r^2
    pairs = torch.einsum("rkn,rn->rk", along, counts).square() - torch.einsum("rkn,rn->rk", along**2, counts**2)
    taken = pairs / _number_of_pairs(counts)[:, None] / square[:, None]
    found = (1 - taken / whole).clamp(0, 1).sqrt()
    return found.where(whole > 0, torch.nan).reshape(*_front(weights), -1)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _counts(gram: GradientGram, weights: Tensor | None) -> Tensor:
    """(R, N)."""
    number = len(gram.groups)
    counts = torch.ones(1, number).double() if weights is None else weights.double().reshape(-1, weights.shape[-1])
    if counts.shape[1] != number:
        raise ValueError(f"weights of {counts.shape[1]} groups for a Gram matrix of {number}")
    return counts


def _cosine(product: Tensor, lengths: Tensor) -> Tensor:
    """The product over the lengths, rounding errors cut off; NaN where a length is zero."""
    return (product / lengths).clamp(-1, 1).where(lengths > 0, torch.nan)


def _front(weights: Tensor | None) -> tuple[int, ...]:
    return () if weights is None else tuple(weights.shape[:-1])


def _reference(gram: GradientGram) -> ReferenceGram:
    if gram.reference is None:
        raise ValueError("this Gram matrix was made without a reference")
    return gram.reference


def _own(gram: GradientGram) -> Tensor:
    """(K, N, N): products within each strategy."""
    return gram.gram.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _lengths(gram: GradientGram, weights: Tensor | None) -> Tensor:
    """(R, K): of each strategy's gradient; zero where a resample's groups point apart by more than they are long."""
    return _totals(gram, _own(gram), weights).clamp(min=0).sqrt()


def _totals(gram: GradientGram, products: Tensor, weights: Tensor | None) -> Tensor:
    """(R, L): from products (L, N, N) of groups those of whole gradients; each group's own counts as one group's."""
    if weights is None:
        return products.sum(dim=(1, 2))[None]
    counts = _counts(gram, weights)
    number = counts.sum(dim=1, keepdim=True)
    return number * _of_groups(products, counts) + number * (number - 1) * _of_pairs(products, counts)


def _chance(own: Tensor) -> Tensor:
    """(K,): standard deviation of the cosine of two sums of groups without any signal, ``sqrt(tr S^2) / tr S``.

    ``tr S^2`` without bias and whatever the distribution is, from products of different groups (Li and Chen 2012,
    doi:10.1214/12-AOS993): the mean of ``<1,2>^2``, less twice that of ``<1,2><2,3>``, plus that of ``<1,2><3,4>``.
    NaN with fewer than four groups, and where these are all alike.
    """
    counts, number = own.new_ones(1, own.shape[1]), own.shape[1]
    if number < 4:
        return own.new_full((len(own),), torch.nan)
    apart = own - torch.diag_embed(own.diagonal(dim1=1, dim2=2))
    square, rows, whole = apart.square().sum(dim=(1, 2)), apart.sum(dim=2).square().sum(dim=1), apart.sum(dim=(1, 2))
    two, three, four = square, rows - square, whole.square() - 4 * rows + 2 * square
    ways = number * (number - 1)
    trace_of_square = two / ways - 2 * three / (ways * (number - 2)) + four / (ways * (number - 2) * (number - 3))
    power, signal = _of_groups(own, counts)[0], _of_pairs(own, counts)[0]
    trace = power - signal
    return (trace_of_square.clamp(min=0).sqrt() / trace).where(trace > 1e-9 * power, torch.nan)  # else rounding errors


def _number_of_pairs(counts: Tensor) -> Tensor:
    return counts.sum(dim=-1).square() - counts.square().sum(dim=-1)


def _of_pairs(products: Tensor, counts: Tensor) -> Tensor:
    """(R, K): weighted mean of (K, N, N) over pairs of different groups; ``counts`` (R, N) or (R, K, N)."""
    counts = counts[:, None, :] if counts.ndim == 2 else counts
    counts = counts.expand(-1, len(products), -1)
    apart = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    return torch.einsum("rkn,knm,rkm->rk", counts, apart, counts) / _number_of_pairs(counts)


def _of_groups(products: Tensor, counts: Tensor) -> Tensor:
    """(R, K): weighted mean of the diagonals of (K, N, N)."""
    return torch.einsum("rn,kn->rk", counts, products.diagonal(dim1=1, dim2=2)) / counts.sum(dim=1, keepdim=True)
