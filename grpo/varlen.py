"""Attention of packed tokens by the flash kernels for sequences of varying length: no padding, no masks.

Prompts and completions are sequences of their own. A completion's queries come after its prompt: its keys are the
prompt's and its own, and the causal edge is aligned to the end of both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from .packing import Span

__all__ = ["Sequences", "attend", "fits", "sequences"]

MAX_WIDTH = 256  # of a head, in these kernels


@dataclass(frozen=True)
class Sequences:
    """Packed tokens as sequences, in the order of the tokens.

    Args:
        keys: (K,) packed tokens that the sequences look at, one sequence after the other.
        query_ends, key_ends: (S + 1,) int32, where each sequence ends, from 0 on.
        max_queries, max_keys: longest sequence.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


def sequences(spans: Sequence[Span], device: torch.device) -> Sequences:
    """The sequences of packed rows.

    >>> found = sequences([Span(0, 2, 2, 1), Span(0, 2, 3, 2)], torch.device("cpu"))
    >>> found.keys.tolist(), found.query_ends.tolist(), found.key_ends.tolist()
    ([0, 1, 0, 1, 2, 0, 1, 3, 4], [0, 2, 3, 5], [0, 2, 5, 9])
    """
    looks = sorted(_looks(spans))
    queries, keys = [len(own) for _, own, _ in looks], [len(own) + len(before) for _, own, before in looks]
    index = [token for _, own, before in looks for token in (*before, *own)]

    def ends(lengths: Sequence[int]) -> Tensor:
        return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)

    return Sequences(torch.tensor(index, device=device), ends(queries), ends(keys), max(queries), max(keys))


def _looks(spans: Sequence[Span]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Of each sequence its first token, its tokens, and those before it."""
    prompts = {span.prompt: list(range(span.prompt, span.prompt + span.prompt_length)) for span in spans}
    for start, tokens in prompts.items():
        yield start, tokens, []
    for span in spans:
        if span.length:
            yield span.completion, list(range(span.completion, span.completion + span.length)), prompts[span.prompt]


@cache
def _available() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def fits(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether the kernels take such states (N, H, D)."""
    half = query.dtype in (torch.float16, torch.bfloat16) and query.dtype == value.dtype
    width = query.shape[-1]
    return query.is_cuda and half and not dropout and width == value.shape[-1] <= MAX_WIDTH and _available()


def attend(
    found: Sequences, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """(N, H, D) of packed queries (N, H, D), keys and values (N, H', D).

    Args:
        window: each token sees so many, itself included; None: all before it.
    """
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query.contiguous(),
        key.index_select(0, found.keys),
        value.index_select(0, found.keys),
        found.query_ends,
        found.key_ends,
        found.max_queries,
        found.max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output
