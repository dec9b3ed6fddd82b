"""States inside an answer from which continuations may be sampled, and what a segment between two of them gained.

A row's tokens are cut into segments 0, 1, ...; state c is the prefix before segment c, state 0 the bare prompt. A name
says how to cut: that of a verifier, whose spans are the segments, or one made by :func:`cutpoint_states`. The sampler
of continuations and the strategies both ask here, so that they mean the same states.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import CreditBatch, PrefixValues

__all__ = [
    "cutpoint_segments",
    "cutpoint_states",
    "prefix_lengths",
    "prefix_values",
    "segment_ids",
    "shrink",
    "state_gains",
]

_CUTPOINTS = re.compile(r"cutpoints\(([^,]+),([0-9]+)\)")


def cutpoint_states(probability: float, interval: int) -> str:
    """The name of the states that lie at every ``interval``-th token sampled with less than ``probability``.

    >>> cutpoint_states(0.9, 5)
    'cutpoints(0.9,5)'
    """
    return f"cutpoints({float(probability)!r},{int(interval)})"


def segment_ids(name: str, batch: CreditBatch) -> Tensor:
    """The segment that each token belongs to, (B, T) long; -1 outside the mask and in rows that are not cut.

    Args:
        name: of a verifier with spans, or from :func:`cutpoint_states`.
        batch: with that verifier's spans, or with ``old_logprobs``.
    """
    match = _CUTPOINTS.fullmatch(name)
    if match is None:
        return batch.judged(name).step_ids(batch.completion_mask)
    if batch.old_logprobs is None:
        raise InputError("credit needs old_logprobs to find its cutpoints, and the batch has none")
    return cutpoint_segments(batch.old_logprobs, batch.completion_mask, float(match[1]), int(match[2]))


def cutpoint_segments(old_logprobs: Tensor, completion_mask: Tensor, probability: float, interval: int) -> Tensor:
    """Cut rows where the policy had a choice (SPO-chain, arXiv 2505.23564): (B, T) long, -1 outside the mask.

    A cutpoint is a token sampled with less than ``probability``. A segment begins at the first cutpoint and at every
    ``interval``-th after it; segment 0 is what comes before the first, and has no token where the first token is one.

    Args:
        old_logprobs: (B, T) log-probabilities of the sampling policy.
        completion_mask: (B, T) bool; a token that the policy did not write is no cutpoint.

    >>> old = torch.tensor([[0.99, 0.5, 0.95, 0.2, 0.6]]).log()
    >>> cutpoint_segments(old, torch.ones(1, 5, dtype=torch.bool), 0.9, 2).tolist()
    [[0, 1, 1, 1, 2]]
    """
    cut = (old_logprobs.double().exp() < probability) & completion_mask
    count = cut.cumsum(dim=1)
    begins = cut & ((count - 1) % interval == 0)
    return begins.cumsum(dim=1).where(completion_mask, -1)


def prefix_lengths(segments: Tensor) -> Tensor:
    """Tokens before each state, (B, S + 1) long; -1 where there is no state.

    A state lies before the first token of every segment that has tokens; where the row ends, nothing is left to sample.

    Args:
        segments: (B, T) long, -1 for no segment; S is the highest segment plus one.

    >>> prefix_lengths(torch.tensor([[0, 0, 2, 2, -1]])).tolist()
    [[0, -1, 2, -1]]
    """
    rows, width = segments.shape
    columns = int(segments.max()) + 2 if segments.numel() else 1
    inside = segments >= 0
    place = torch.arange(width, device=segments.device).expand(rows, width).where(inside, width)
    first = torch.full((rows, columns), width, device=segments.device)
    first = first.scatter_reduce(1, segments.clamp(min=0), place, "amin")
    first[:, 0] = torch.where(inside.any(dim=1), 0, width)
    return first.where(first < width, -1)


def prefix_values(name: str, batch: CreditBatch) -> PrefixValues:
    """The values of the states ``name``; refuses a batch that has none."""
    if name not in batch.prefix_values:
        have = ", ".join(sorted(batch.prefix_values)) or "none"
        raise InputError(
            f"credit needs prefix_values of {name}, and the batch has those of: {have}; give the run a prefix_valuer"
        )
    return batch.prefix_values[name]


def shrink(values: PrefixValues, strength: float) -> Tensor:
    """Values drawn towards that of the prompt: ``(n V + k V_0) / (n + k)``, (B, S + 1) float64; NaN stays NaN.

    Args:
        values: of the states, with the number of continuations n.
        strength: k, in continuations.

    >>> two = PrefixValues(torch.tensor([[0.5, 1.0]]), torch.tensor([[9, 9]]), torch.tensor([[0.25, 0.0]]))
    >>> shrink(two, 3.0).tolist()
    [[0.5, 0.875]]
    """
    value, count = values.value.double(), values.count.double()
    start = value[:, :1]
    shrunk = (count * value + strength * start) / (count + strength).clamp(min=1e-9)
    return torch.where(start.isnan() | (strength == 0), value, shrunk)


def state_gains(values: Tensor, segments: Tensor, outcome: Tensor) -> Tensor:
    """What each token's segment gained: the value of the state after it less that of the state before it.

    ``A_j = V_{j+1} - V_j``, where the outcome stands for the value after the row's last segment, so that the gains of a
    row's segments sum to ``R - V_0``. Segments without a known state between them share one gain. What comes before the
    row's first known state gains nothing.

    Args:
        values: (B, S + 1), NaN where a state is not known; S at least the number of segments.
        segments: (B, T) long, -1 for no segment.
        outcome: (B,) reward R; a row with NaN gains nothing.

    Returns:
        (B, T) float64.

    >>> values, segments = torch.tensor([[0.5, 0.75, 0.25, float("nan")]]), torch.tensor([[0, 1, 1, 2]])
    >>> state_gains(values, segments, torch.tensor([0.0])).tolist()
    [[0.25, -0.5, -0.5, -0.25]]
    """
    if segments.numel() and int(segments.max()) >= values.shape[1]:
        raise ValueError(f"values of {values.shape[1]} states for {int(segments.max()) + 1} segments")
    rows, columns = values.shape
    state = torch.arange(columns, device=values.device).expand(rows, columns)
    latest = torch.where(values.isnan(), -1, state).cummax(dim=1).values
    before = latest.gather(1, segments.clamp(min=0)).where(segments >= 0, -1)  # the state that a token sets out from
    left = torch.zeros(rows, columns + 1, dtype=torch.bool, device=values.device)
    left = left.scatter(1, before + 1, True)[:, 1:]  # states that some token sets out from
    following = torch.where(left, state, columns).flip(1).cummin(dim=1).values.flip(1)
    following = torch.cat([following[:, 1:], torch.full_like(following[:, :1], columns)], dim=1)
    ends = torch.cat([values.double(), outcome.double()[:, None]], dim=1)
    gain = (ends.gather(1, following) - values.double()).where(left & ~outcome.isnan()[:, None], 0.0)
    return gain.gather(1, before.clamp(min=0)).where(before >= 0, 0.0)
