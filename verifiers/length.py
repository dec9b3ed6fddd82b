"""Penalties on the length and the repetitiveness of a completion."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = ["Repetition", "SoftOverlong", "repetition_penalty", "soft_overlong_penalty"]

_UNITS = {"words": re.compile(r"\S+"), "characters": re.compile(r"\S")}


def soft_overlong_penalty(length: int, max_length: int | None, buffer: int | None) -> float:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).

    ``0`` up to ``max_length - buffer``, then linear, ``(max_length - buffer - length) / buffer``, down to ``-1`` at
    ``max_length``, and ``-1`` beyond. Without a buffer it is a step behind ``max_length``.

    Args:
        length: of the completion, in tokens.
        max_length: in tokens; None switches the penalty off.
        buffer: length of the slope, in tokens; None switches the penalty off.

    >>> [soft_overlong_penalty(length, 100, 20) for length in (80, 81, 90, 100, 101)]
    [0.0, -0.05, -0.5, -1.0, -1.0]
    >>> [soft_overlong_penalty(length, 100, 0) for length in (100, 101)]
    [0.0, -1.0]
    """
    if max_length is None or buffer is None:
        return 0.0
    if not 0 <= buffer <= max_length:
        raise InputError(f"buffer: {buffer} does not lie between 0 and max_length, {max_length}")
    over = length - (max_length - buffer)
    return 0.0 if over <= 0 else -1.0 if over >= buffer else -over / buffer


def repetition_penalty(items: Sequence[Hashable], ngram: int, max_penalty: float) -> float:
    """``(1 - distinct / total) * max_penalty`` over the n-grams of ``items``; 0 where there is none.

    Args:
        items: words, token ids or the like.
        ngram: items in an n-gram, at least 1.
        max_penalty: what endless repetition comes near to, at most 0.

    >>> [repetition_penalty(ids, 2, -1.0) for ids in ([1, 2, 3, 4], [5, 5, 5, 5, 5], [7])]
    [0.0, -0.75, 0.0]
    """
    _check_repetition(ngram, max_penalty)
    total = len(items) - ngram + 1
    repeated = 0 if total < 1 else total - len(set(_ngrams(items, ngram)))
    return repeated / total * max_penalty if repeated else 0.0


@dataclass(frozen=True)
class SoftOverlong:
    """The soft overlong punishment on ``num_tokens`` of the sample's metadata; abstains where that is absent.

    Args:
        max_length: in tokens, where the penalty reaches -1; None switches it off.
        buffer: in tokens, how long before that it sets in; None switches it off.

    >>> SoftOverlong(100, 20)([Sample("", "…", metadata={"num_tokens": 90}), Sample("", "…")])
    [Verdict(score=-0.5, spans=()), Verdict(score=None, spans=())]
    """

    spans: ClassVar[bool] = False

    max_length: int | None
    buffer: int | None

    def __post_init__(self) -> None:
        soft_overlong_penalty(0, self.max_length, self.buffer)

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        lengths = [sample.metadata.get("num_tokens") for sample in samples]
        return [
            Verdict(None if length is None else soft_overlong_penalty(length, self.max_length, self.buffer))
            for length in lengths
        ]


@dataclass(frozen=True)
class Repetition:
    """The repetition penalty, with a span of score 0 on every stretch that repeats earlier n-grams.

    Args:
        ngram: items in an n-gram.
        max_penalty: what endless repetition comes near to, at most 0.
        unit: what the items are: ``words`` between blanks, or ``characters`` (for scripts without blanks), without
            regard to case.

    >>> text = "so we add so we add one"
    >>> verdict, = Repetition(ngram=2, max_penalty=-1.0)([Sample("", text)])
    >>> round(verdict.score, 4), [text[span.start : span.stop] for span in verdict.spans]
    (-0.3333, ['so we add'])
    """

    ngram: int
    max_penalty: float
    unit: Literal["words", "characters"] = "words"

    def __post_init__(self) -> None:
        _check_repetition(self.ngram, self.max_penalty)
        if self.unit not in _UNITS:
            raise InputError(f"unit: {self.unit!r} is unknown; give one of {', '.join(_UNITS)}")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample.completion) for sample in samples]

    def _judge(self, text: str) -> Verdict:
        places = [match.span() for match in _UNITS[self.unit].finditer(text)]
        items = [text[start:stop].casefold() for start, stop in places]
        stretches = _repeated(items, self.ngram)
        spans = (Span(places[a][0], places[b - 1][1], 0.0, f"repeated {self.ngram}-gram") for a, b in stretches)
        return Verdict(repetition_penalty(items, self.ngram, self.max_penalty), tuple(spans))


def _check_repetition(ngram: int, max_penalty: float) -> None:
    if ngram < 1:
        raise InputError(f"ngram: {ngram} items make no n-gram; give 1 or more")
    if not max_penalty <= 0:
        raise InputError(f"max_penalty: {max_penalty} would be a reward; give 0 or less")


def _ngrams(items: Sequence[Hashable], ngram: int) -> zip[tuple[Hashable, ...]]:
    return zip(*(islice(items, start, None) for start in range(ngram)))


def _repeated(items: Sequence[Hashable], ngram: int) -> list[tuple[int, int]]:
    """Item ranges covered by n-grams that were seen before, as few as possible."""
    seen: set[tuple[Hashable, ...]] = set()
    ranges: list[tuple[int, int]] = []
    for start, gram in enumerate(_ngrams(items, ngram)):
        if gram in seen:
            first = ranges.pop()[0] if ranges and ranges[-1][1] >= start else start
            ranges.append((first, start + ngram))
        seen.add(gram)
    return ranges
