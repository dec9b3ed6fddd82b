"""From spans of characters to masks of tokens, on the offsets of the sampled ids or on a library's, once repaired."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ..verifiers import Span
from .offsets import OffsetArrays, Offsets, decode_text, token_offsets

__all__ = [
    "SpanTable",
    "decode_text",
    "fill_holes",
    "repair_offsets",
    "spans_table",
    "spans_to_tokens",
    "token_offsets",
    "trim_span",
]


@dataclass(frozen=True)
class SpanTable:
    """Judged spans of B rows in tokens, S columns in the order of their first character.

    Args:
        start: (B, S) long, first token of each span.
        stop: (B, S) long, one past its last token.
        score: (B, S) float32, the verifier's score.
        mask: (B, S) bool, False for padding and for spans that no token covers.
        uncovered: how many spans no token covers.
    """

    start: Tensor
    stop: Tensor
    score: Tensor
    mask: Tensor
    uncovered: int = 0

    def step_ids(self, completion_mask: Tensor) -> Tensor:
        """Column of the step that each token belongs to, (B, T) long; -1 outside the mask and in rows without spans.

        A token that overlaps two steps belongs to the step of its first character, a token between steps (separator,
        end token) to the step before it, a leading token to the first step.

        >>> table = spans_table([[(0, 2), (2, 5), (5, 6)]], [[Span(0, 2), Span(2, 6)]])
        >>> table.step_ids(torch.ones(1, 4, dtype=torch.bool))
        tensor([[0, 1, 1, 1]])
        """
        rows, columns = self.mask.shape
        width = completion_mask.shape[1]
        if not columns:
            return torch.full((rows, width), -1, device=completion_mask.device)
        taken = torch.where(self.mask, self.stop, 0).cummax(dim=1).values
        before = torch.cat([torch.zeros_like(taken[:, :1]), taken[:, :-1]], dim=1)
        # The first token that a step may call its own; steps without tokens take over the next step's and lose to it.
        own = torch.where(self.mask, torch.maximum(self.start, before), width)
        own = own.flip(1).cummin(dim=1).values.flip(1).contiguous()
        tokens = torch.arange(width, device=own.device).expand(rows, width).contiguous()
        steps = torch.searchsorted(own, tokens, right=True) - 1
        first = self.mask.to(torch.int8).argmax(dim=1, keepdim=True)
        steps = torch.maximum(steps, first)
        return torch.where(completion_mask & self.mask.any(dim=1, keepdim=True), steps, -1)

    def token_mask(self, select: Tensor, num_tokens: int) -> Tensor:
        """Tokens inside any selected span, (B, num_tokens) bool; ``select`` is (B, S) bool."""
        if select.shape != self.mask.shape:
            raise ValueError(f"select must have the shape {tuple(self.mask.shape)}, not {tuple(select.shape)}")
        change = (select & self.mask).to(torch.int32)
        edges = torch.zeros(len(change), num_tokens + 1, dtype=torch.int32, device=change.device)
        edges.scatter_add_(1, self.start.clamp(max=num_tokens), change)
        edges.scatter_add_(1, self.stop.clamp(max=num_tokens), -change)
        return edges[:, :num_tokens].cumsum(dim=1) > 0


def spans_table(
    offsets: Sequence[Offsets], spans: Sequence[Sequence[Span]], texts: Sequence[str] | None = None
) -> SpanTable:
    """Tokens of every span of B rows.

    A span owns the tokens from the first to the last one that overlaps it, special tokens between them included.

    Args:
        offsets: per row the character range of each token.
        spans: per row the judged spans, in any order.
        texts: per row the text; where given, white space at a span's ends does not count.
    """
    if len(spans) != len(offsets):
        raise ValueError(f"{len(spans)} rows of spans for {len(offsets)} rows of offsets")
    counts = np.array([len(row_spans) for row_spans in spans], dtype=np.int64)
    row_texts = [None] * len(spans) if texts is None else texts
    pairs = [_extent(span, text) for row_spans, text in zip(spans, row_texts, strict=True) for span in row_spans]
    extents = np.fromiter(chain.from_iterable(pairs), np.int64, count=2 * len(pairs)).reshape(-1, 2)
    scores = torch.tensor([span.score for row_spans in spans for span in row_spans], dtype=torch.float32).numpy()
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((extents[:, 1], extents[:, 0], row))
    first, last = _token_ranges(offsets, row, extents[order])
    start, stop = np.zeros((2, len(counts), counts.max(initial=0)), dtype=np.int64)
    score, mask = np.zeros(start.shape, dtype=np.float32), np.zeros(start.shape, dtype=bool)
    start[row, column], stop[row, column] = first, last
    score[row, column], mask[row, column] = scores[order], last > first
    return SpanTable(
        start=torch.from_numpy(start),
        stop=torch.from_numpy(stop),
        score=torch.from_numpy(score),
        mask=torch.from_numpy(mask),
        uncovered=int(np.count_nonzero(last <= first)),
    )


def spans_to_tokens(offsets: Offsets, spans: Sequence[Span | tuple[int, int]], text: str | None = None) -> Tensor:
    """Which tokens overlap each span, (S, T) bool, rows in the order of ``spans``.

    Args:
        offsets: character range of each of the T tokens.
        spans: S spans, or (start, stop) pairs of characters.
        text: where given, white space at a span's ends does not count.

    >>> spans_to_tokens([(0, 3), (3, 7)], [(4, 7), (0, 4)], text="the cat").tolist()
    [[False, True], [True, False]]
    """
    extents = np.array([_extent(span, text) for span in spans], dtype=np.int64).reshape(-1, 2)
    first, last = _token_ranges([offsets], np.zeros(len(spans), dtype=np.int64), extents)
    tokens = np.arange(len(offsets))
    return torch.from_numpy((tokens >= first[:, None]) & (tokens < last[:, None]))


def trim_span(text: str, start: int, stop: int) -> tuple[int, int]:
    """The range without white space at its ends; a range of only white space stays, so that no penalty vanishes.

    >>> trim_span("the cat", 0, 4), trim_span("the cat", 3, 4)
    ((0, 3), (3, 4))
    """
    if start < stop <= len(text) and not (text[start].isspace() or text[stop - 1].isspace()):
        return start, stop
    piece = text[start:stop]
    body = piece.lstrip()
    if not body:
        return start, stop
    left = start + len(piece) - len(body)
    return left, left + len(body.rstrip())


def repair_offsets(offsets: Offsets, text_length: int) -> list[tuple[int, int]]:
    """Give zero-width tokens the characters up to the next token's start, where no other token has them.

    Some tokenizers report zero widths for ordinary tokens; every span would then miss every token.

    >>> repair_offsets([(0, 0), (2, 2), (5, 5), (8, 8), (9, 9)], 9)
    [(0, 2), (2, 5), (5, 8), (8, 9), (9, 9)]
    """
    covered = _covered(offsets, text_length)
    borders = [*sorted({start for start, _ in offsets}), text_length]
    repaired = []
    for start, stop in offsets:
        if stop <= start < text_length and not covered[start]:
            stop = borders[bisect_right(borders, start)]
        repaired.append((start, stop))
    return repaired


def fill_holes(offsets: Offsets, text_length: int) -> list[tuple[int, int]]:
    """Extend tokens over characters that no token covers: up to the next token's start, the first token back to 0.

    Libraries leave such holes where a normaliser composed two characters into one.

    >>> fill_holes([(0, 1), (0, 1), (2, 3)], 3)
    [(0, 2), (0, 2), (2, 3)]
    """
    covered = _covered(offsets, text_length)
    first = covered.find(1)
    filled = []
    for start, stop in offsets:
        if stop > start:
            following = covered.find(1, stop)
            start, stop = 0 if start == first else start, text_length if following < 0 else following
        filled.append((start, stop))
    return filled


def _extent(span: Span | tuple[int, int], text: str | None) -> tuple[int, int]:
    start, stop = (span.start, span.stop) if isinstance(span, Span) else span
    return (start, stop) if text is None else trim_span(text, start, stop)


def _token_ranges(offsets: Sequence[Offsets], rows: np.ndarray, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First token and one past the last token of K extents (K, 2) in the given rows; (0, 0) where no token overlaps.

    An empty extent marks a place where something is missing: it goes to the token that stands there instead, the first
    one that begins at or after it (an end token included), else to the row's last token.
    """
    if not len(span):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    counts = np.array([len(row) for row in offsets])
    begin, end = (np.concatenate(sides) for sides in zip(*map(_sides, offsets)))
    # One sorted axis for the whole batch: each row has its own stretch of it.
    stride = max(int(begin.max(initial=0)), int(end.max(initial=0)), int(span.max())) + 2
    shift = np.repeat(np.arange(len(offsets)) * stride, counts)
    real = np.flatnonzero(end > begin)
    starts, stops = (begin + shift)[real], (end + shift)[real]
    wrong = np.flatnonzero((starts[1:] < starts[:-1]) | (stops[1:] < stops[:-1]))
    if len(wrong) or min(begin.min(initial=0), end.min(initial=0)) < 0:
        row = shift[real[wrong[0]] if len(wrong) else np.minimum(begin, end).argmin()] // stride
        raise ValueError(f"offsets of row {row} are not in order; give character ranges that never step back")
    low = np.searchsorted(stops, span[:, 0] + rows * stride, side="right")
    high = np.searchsorted(starts, span[:, 1] + rows * stride, side="left")
    covered = (high > low) & (span[:, 1] > span[:, 0])
    first, last = np.zeros(len(span), dtype=np.int64), np.zeros(len(span), dtype=np.int64)
    row_begin = np.cumsum(counts) - counts
    first[covered] = real[low[covered]] - row_begin[rows[covered]]
    last[covered] = real[high[covered] - 1] + 1 - row_begin[rows[covered]]
    for index in np.flatnonzero((span[:, 1] == span[:, 0]) & (counts[rows] > 0)):
        place, count = span[index, 0], counts[rows[index]]
        begins = begin[row_begin[rows[index]] :][:count]
        first[index] = min(int(np.searchsorted(begins, place, side="left")), count - 1)
        last[index] = first[index] + 1
    return first, last


def _sides(offsets: Offsets) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of one row."""
    if isinstance(offsets, OffsetArrays):
        return offsets.start, offsets.stop
    flat = np.fromiter(chain.from_iterable(offsets), np.int64, count=2 * len(offsets))
    return flat[0::2], flat[1::2]


def _covered(offsets: Offsets, text_length: int) -> bytearray:
    covered = bytearray(text_length)
    for start, stop in offsets:
        covered[start:stop] = b"\x01" * (min(stop, text_length) - start)
    return covered
