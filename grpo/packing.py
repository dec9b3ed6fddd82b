"""Training forwards without padding: real tokens in one row, every distinct prompt once, attention in short rows.

A row of the batch is its prompt and its completion. Laid out side by side, with each prompt stored once for all of its
rows, the linear layers see each real token once; only attention needs to know which tokens belong together. It gathers
the keys and queries of each row, attends as the model always does, and puts the results back. Values and gradients are
those of the padded layout up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Packed", "Rows", "Span", "micro_batches", "pack", "padded_micro_batches"]

MAX_BUCKETS = 4
ROWS_PER_BUCKET = 4


@dataclass(frozen=True)
class Span:
    """Where a row lies among the packed tokens: its prompt, and its completion without the last token."""

    prompt: int
    prompt_length: int
    completion: int
    length: int


@dataclass(frozen=True)
class Rows:
    """Rows of like length that attend together; each index points into the packed tokens.

    Args:
        queries: (R, Lq) tokens that look.
        keys: (R, Lk) tokens that are looked at, in order.
        start: (R,) number of keys before the row's first query, or None where queries and keys are the same tokens.
    """

    queries: Tensor
    keys: Tensor
    start: Tensor | None


@dataclass(frozen=True)
class Packed:
    """B rows side by side: N tokens, M of them to be predicted.

    Args:
        input_ids, position_ids: (1, N).
        predicting: (M,) the token that predicts each completion token, row by row; the last of a prompt predicts the
            first token of all of its rows.
        rows: what attends to what.
        place: (N,) where each token's result lies among the queries of ``rows``, one bucket after the other.
        again, again_place: further queries of the same tokens (a prompt's, once for each other row), and their places.
        spans: of the B rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    predicting: Tensor
    rows: tuple[Rows, ...]
    place: Tensor
    again: Tensor
    again_place: Tensor
    spans: tuple[Span, ...]

    @property
    def longest(self) -> int:
        """Tokens in the longest row, its last completion token aside."""
        return max(span.prompt_length + span.length for span in self.spans)

    def to(self, device: torch.device) -> Packed:
        """The same with its tensors on ``device``."""

        def moved(owner: Any) -> dict[str, Any]:
            return {name: value.to(device) for name, value in vars(owner).items() if isinstance(value, Tensor)}

        return replace(self, rows=tuple(replace(part, **moved(part)) for part in self.rows), **moved(self))


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Packed:
    """The layout of some rows; equal prompts are stored once.

    The last token of a completion predicts nothing and is left out.

    >>> packed = pack([[5, 6], [5, 6]], [[7, 8, 9], [4]])
    >>> packed.input_ids.tolist(), packed.position_ids.tolist(), packed.predicting.tolist()
    ([[5, 6, 7, 8]], [[0, 1, 2, 3]], [1, 2, 3, 1])
    """
    prompt_at: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for prompt, completion in zip(map(tuple, prompts), completions, strict=True):
        if not completion:
            raise ValueError(f"row {len(spans)}: an empty completion cannot be scored")
        if prompt not in prompt_at:
            prompt_at[prompt] = len(ids)
            ids.extend(prompt)
            positions.extend(range(len(prompt)))
        spans.append(Span(prompt_at[prompt], len(prompt), len(ids), len(completion) - 1))
        ids.extend(completion[:-1])
        positions.extend(range(len(prompt), len(prompt) + len(completion) - 1))
    predicting = chain.from_iterable(
        (span.prompt + span.prompt_length - 1, *range(span.completion, span.completion + span.length)) for span in spans
    )
    rows = _apart(spans) if _pays_apart(spans) else _joint(spans)
    place, again, again_place = _places(rows, len(ids))
    return Packed(
        torch.tensor([ids]),
        torch.tensor([positions]),
        torch.tensor(list(predicting)),
        rows,
        place,
        again,
        again_place,
        tuple(spans),
    )


def _pays_apart(spans: Sequence[Span]) -> bool:
    """Whether prompts should attend once, at the price of a mask for their completions: by the products formed."""
    joint = sum((span.prompt_length + span.length) ** 2 / 2 for span in spans)
    prompts = {span.prompt: span.prompt_length for span in spans}
    tails = sum(span.length * (span.prompt_length + span.length) for span in spans)
    return sum(length**2 / 2 for length in prompts.values()) + tails < joint


def _joint(spans: Sequence[Span]) -> tuple[Rows, ...]:
    """Prompt and completion attend as one causal row; a shared prompt does so in each of its rows."""
    return tuple(Rows(index := _index(bucket), index, None) for bucket in _buckets([_keys(span) for span in spans]))


def _apart(spans: Sequence[Span]) -> tuple[Rows, ...]:
    """Prompts attend once; completions, which look back at them, in rows of their own."""
    prompts = {span.prompt: span.prompt_length for span in spans}
    heads = [list(range(at, at + length)) for at, length in prompts.items()]
    rows = [Rows(index := _index(bucket), index, None) for bucket in _buckets(heads)]
    for bucket in _cut(sorted((span for span in spans if span.length), key=lambda s: (s.length, s.prompt_length))):
        queries = [list(range(span.completion, span.completion + span.length)) for span in bucket]
        start = torch.tensor([span.prompt_length for span in bucket])
        rows.append(Rows(_index(queries), _index([_keys(span) for span in bucket]), start))
    return tuple(rows)


def _keys(span: Span) -> list[int]:
    prompt = range(span.prompt, span.prompt + span.prompt_length)
    return [*prompt, *range(span.completion, span.completion + span.length)]


def _buckets(tokens: list[list[int]]) -> list[list[list[int]]]:
    return _cut(sorted(tokens, key=len))


def _cut(ordered: list[Any]) -> list[list[Any]]:
    """Up to four buckets of about as many rows."""
    count = min(MAX_BUCKETS, -(-len(ordered) // ROWS_PER_BUCKET))
    edges = [round(part * len(ordered) / count) for part in range(count + 1)] if count else [0]
    return [ordered[start:stop] for start, stop in pairwise(edges)]


def _index(bucket: list[list[int]]) -> Tensor:
    """(R, L); behind its end a row repeats its last token, whom no earlier token sees. See :func:`_places`."""
    width = max(map(len, bucket))
    return torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in bucket])


def _places(rows: Sequence[Rows], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """First place of each of ``count`` tokens among the queries, and the other places where a token looks again."""
    tokens, places, offset = [], [], 0
    for part in rows:
        fresh = torch.ones_like(part.queries, dtype=torch.bool)
        fresh[:, 1:] = part.queries[:, 1:] != part.queries[:, :-1]  # a repeated last token is padding
        at = fresh.flatten().nonzero()[:, 0]
        tokens.append(part.queries.flatten()[at])
        places.append(at + offset)
        offset += part.queries.numel()
    token, place = torch.cat(tokens), torch.cat(places)
    order = token.argsort(stable=True)
    token, place = token[order], place[order]
    first = torch.ones_like(token, dtype=torch.bool)
    first[1:] = token[1:] != token[:-1]
    if int(first.sum()) != count:
        raise AssertionError("every token must look once")
    return place[first], token[~first], place[~first]


# --- micro-batches ---------------------------------------------------------------------------------------------------


def micro_batches(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, rows: int, tokens: int | None = None
) -> list[list[int]]:
    """Rows cut into micro-batches: those of one prompt together where they fit, longest first within a prompt.

    Args:
        prompts, lengths: prompt ids and number of completion tokens of each row.
        rows: at most so many rows in one.
        tokens: at most so many tokens in one, a prompt counted once; a longer row stands alone. None: no such limit.

    >>> micro_batches([[1], [2], [1], [2]], [3, 3, 3, 3], rows=3)
    [[0, 2], [1, 3]]
    >>> micro_batches([[1], [2], [1], [2]], [3, 3, 3, 3], rows=4, tokens=8)
    [[0, 2], [1, 3]]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(row)
    parts: list[list[int]] = [[]]
    free_rows, free_tokens = rows, float("inf") if tokens is None else float(tokens)
    budget = free_tokens
    for prompt, members in groups.items():
        for piece in _pieces(members, lengths, rows, budget - len(prompt)):
            size = len(prompt) + sum(lengths[row] for row in piece)
            if parts[-1] and (len(piece) > free_rows or size > free_tokens):
                parts.append([])
                free_rows, free_tokens = rows, budget
            parts[-1] += piece
            free_rows, free_tokens = free_rows - len(piece), free_tokens - size
    return [part for part in parts if part]


def _pieces(members: list[int], lengths: Sequence[int], rows: int, tokens: float) -> Iterator[list[int]]:
    """The rows of one prompt in as few pieces as fit the limits, longest rows first."""
    piece: list[int] = []
    size = 0
    for row in sorted(members, key=lambda row: -lengths[row]):
        if piece and (len(piece) == rows or size + lengths[row] > tokens):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += lengths[row]
    yield piece


def padded_micro_batches(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, rows: int, tokens: int | None = None
) -> list[list[int]]:
    """As :func:`micro_batches`, for rows that are padded to the longest: rows of like length together.

    >>> padded_micro_batches([[1], [1], [1]], [3, 9, 2], rows=2)
    [[2, 0], [1]]
    >>> padded_micro_batches([[1], [1], [1]], [3, 9, 2], rows=3, tokens=10)
    [[2, 0], [1]]
    """
    sizes = [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
    parts: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=sizes.__getitem__):
        full = not parts or len(parts[-1]) == rows
        if full or (tokens is not None and (len(parts[-1]) + 1) * sizes[row] > tokens):
            parts.append([])
        parts[-1].append(row)
    return parts
