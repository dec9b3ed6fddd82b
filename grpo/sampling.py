"""Group sampling: each prompt is read once, its samples share the cache, finished rows leave the batch.

A token is drawn by inverting the cumulative distribution at one uniform number per (row, step). The number belongs to
the row's own stream, so a row's text depends on no neighbour, and two strategies with one seed share random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .policy import Policy
from .seeds import row_uniforms

__all__ = ["Generation", "Interrupted", "RolloutConfig", "filtered", "sample_groups"]

SMALL = 512  # vocabulary whose weights are added up one by one
BLOCK = 64  # ids of a larger one that are added up first


class Interrupted(Exception):
    """The run was asked to stop while it sampled."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled.

    Args:
        prompts_per_step: N prompts in a rollout batch.
        group_size: G completions of each.
        max_new_tokens: longest completion, its end token included.
        temperature: logits are divided by it, in sampling and in training alike; 0 is greedy (evaluation only).
        top_k, top_p: draw only among the k likeliest tokens, or the likeliest that make up p; 0 and 1 are off. The kept
            log-probabilities are those of the full distribution.
        truncated: ``keep`` trains completions that hit the limit as they are; ``mask`` leaves them out of the loss and
            of the baseline.
        compact_below: drop finished rows from the batch once at most this share is still running.
    """

    prompts_per_step: int = 4
    group_size: int = 8
    max_new_tokens: int = 48
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    truncated: Literal["keep", "mask"] = "keep"
    compact_below: float = 0.75

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise InputError(
                f"rollout.group_size={self.group_size}: a group of one has nothing to compare with; use at least 2"
            )
        for name in ("prompts_per_step", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"rollout.{name}={getattr(self, name)}: must be at least 1")
        if not self.temperature > 0:
            raise InputError(f"rollout.temperature={self.temperature}: must be over 0; exploration needs chance")
        if self.truncated not in ("keep", "mask"):
            raise InputError(f"rollout.truncated={self.truncated!r}: must be keep or mask")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InputError(f"rollout.top_p={self.top_p}, rollout.top_k={self.top_k}: need 0 < top_p <= 1, top_k >= 0")


@dataclass(frozen=True)
class Generation:
    """One completion: its ids with the end token, their log-probabilities, and whether the limit cut it.

    ``model_mask`` is False for ids that an engine put in, such as tool output; None means that the policy wrote all.
    """

    ids: list[int]
    logprobs: list[float]
    truncated: bool
    model_mask: list[bool] | None = None


@torch.no_grad()
def sample_groups(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    row_seeds: Sequence[int],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    compact_below: float = 0.75,
    should_stop: Callable[[], bool] | None = None,
    on_finished: Callable[[Mapping[int, Generation]], None] | None = None,
) -> list[Generation]:
    """``group_size`` completions of every prompt, in order: all of the first prompt, then of the second, ...

    Args:
        policy: the model to sample from.
        prompts: N lists of ids.
        row_seeds: N * group_size seeds, one per completion.
        max_new_tokens: longest completion, its end token included.
        temperature: 0 takes the likeliest token.
        top_k, top_p, compact_below: see :class:`RolloutConfig`.
        should_stop: asked before each token; True raises :class:`Interrupted`.
        on_finished: gets the completions that leave the batch, by row, while the others go on; those of the last
            rows are only in what is returned.
    """
    if len(row_seeds) != len(prompts) * group_size:
        raise ValueError(f"{len(row_seeds)} row_seeds for {len(prompts)} prompts x {group_size}")
    if not prompts:
        return []
    from .decoding import read_prompts  # needs transformers

    was_training = policy.model.training
    policy.model.eval()
    try:
        logits, state = read_prompts(policy, prompts, group_size, max_new_tokens)
        uniforms = torch.from_numpy(row_uniforms(row_seeds, max_new_tokens)).to(policy.device) if temperature else None
        rows = torch.arange(len(row_seeds), device=policy.device)  # original row of each row still in the batch
        ids = torch.zeros(len(row_seeds), max_new_tokens, dtype=torch.long, device=policy.device)
        logprobs = torch.zeros(len(row_seeds), max_new_tokens, device=policy.device)
        ends = torch.tensor(policy.eos_ids, device=policy.device)
        running = torch.ones(len(rows), dtype=torch.bool, device=policy.device)
        with state.attending(policy):
            for step in range(max_new_tokens):
                if should_stop is not None and should_stop():
                    raise Interrupted
                point = None if uniforms is None else uniforms[rows, step]
                token, logprob = _draw(logits, point, temperature, top_k, top_p)
                ids[rows, step], logprobs[rows, step] = token, logprob  # what follows a row's end is cut off below
                running = running & ~torch.isin(token, ends)
                left = int(running.sum())
                if left == 0 or step + 1 == max_new_tokens:
                    break
                if left <= compact_below * len(rows):
                    keep = running.nonzero()[:, 0]
                    if on_finished is not None:
                        done = rows[~running]
                        on_finished(dict(zip(done.tolist(), _generations(ids[done], logprobs[done], ends))))
                    state.keep(keep)
                    rows, token, running = rows[keep], token[keep], running[keep]
                logits = state.advance(policy, token)
    finally:
        policy.model.train(was_training)
    return _generations(ids, logprobs, ends)


def _generations(ids: Tensor, logprobs: Tensor, ends: Tensor) -> list[Generation]:
    """Rows (B, T) cut behind their first end token."""
    ended = torch.isin(ids, ends)
    complete = ended.any(dim=1)
    lengths = torch.where(complete, ended.int().argmax(dim=1) + 1, ids.shape[1])
    rows_of = zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), complete.tolist())
    return [Generation(row[:length], kept[:length], truncated=not whole) for row, kept, length, whole in rows_of]


def _draw(
    logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF, and its log-probability under the full (tempered) distribution.

    Args:
        logits: (B, V).
        uniforms: (B,) in [0, 1); None takes the likeliest token.
    """
    if uniforms is None:
        token = logits.argmax(dim=-1)
        return token, logits.float().log_softmax(dim=-1).gather(1, token[:, None])[:, 0]
    logits = logits.float()
    probabilities = (logits if temperature == 1 else logits / temperature).softmax(dim=-1)
    token = _invert(filtered(probabilities, top_k, top_p), uniforms)
    return token, probabilities.gather(1, token[:, None])[:, 0].log()


def filtered(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities (B, V) with zero for tokens that must not come; the others keep their weight.

    Args:
        top_k, top_p: see :class:`RolloutConfig`. Of equal tokens the lower id counts as likelier for ``top_p``.
    """
    if top_k:
        kth = probabilities.topk(min(top_k, probabilities.shape[-1]), dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < kth, 0.0)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ordered = ordered / ordered.sum(dim=-1, keepdim=True)
        before = ordered.cumsum(dim=-1) - ordered
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        probabilities = probabilities.masked_fill(dropped, 0.0)
    return probabilities


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id of each row whose cumulative weight exceeds its uniform's share of the whole, (B,).

    In a large vocabulary the block of ids is found first, by the sums of the blocks, then the id in it: to add up
    everything one by one in double precision would cost more than the rest of sampling.

    Args:
        weights: (B, V), not negative; an id without weight is never chosen.
        uniforms: (B,) float64 in [0, 1).
    """
    last = weights.shape[1] - 1  # where weights are not finite, no sum exceeds the point
    if last < SMALL:
        sums = weights.cumsum(dim=1, dtype=torch.float64)
        return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0].clamp(max=last)
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    point = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp(max=ends.shape[1] - 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(len(blocks), device=block.device), block[:, 0]].cumsum(dim=1, dtype=torch.float64)
    rest = torch.minimum(point - before, inside[:, -1:] * (1 - 2.0**-52))  # the two sums may differ by rounding
    at = torch.searchsorted(inside, rest, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + at)[:, 0].clamp(max=last)
