"""Reads an answer of the chain task: where its tags, lines and digit are, and every fault in its own place.

Tags and lines are matched to the wanted ones by a shortest edit, so that one tag or step too many or too few is one
fault, and what follows it is judged on its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .verdict import Span

__all__ = ["TAGS", "Layout", "Part", "Step", "align", "layout", "read_steps"]

TAGS = ("[T]", "[/T]", "[A]", "[/A]")
GAP = 3  # cost of leaving out a wanted item or having one too many
_TAG = re.compile(r"\[/?[TA]\]")
_EQUATION = re.compile(r"([0-9a])([-+*])([0-9a])=([0-9a])")
_DIGIT = re.compile(r"[0-9a]")

Wanted = TypeVar("Wanted")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Part:
    """A piece of the answer; ``fault`` says what is wrong with it, or is empty."""

    start: int
    stop: int
    fault: str = ""

    def span(self, label: str) -> Span:
        """Judged 0 or 1, labelled with the fault or else with ``label``."""
        return Span(self.start, self.stop, score=0.0 if self.fault else 1.0, label=self.fault or label)

    def blamed(self, fault: str) -> Part:
        """The same with this fault, unless it has one already."""
        return self if self.fault or not fault else replace(self, fault=fault)


@dataclass(frozen=True)
class Layout:
    """The frame around the steps.

    Args:
        opening: what stands before ``[T]``, and ``[T]`` or the place where it is missing.
        lines: ranges of the chain's lines, without their line breaks; of an empty line its line break.
        tail: everything from the end of the chain on, in order: tags, the answer, and what does not belong there.
        answer: index in ``tail`` of the answer's digit, or None.
    """

    opening: tuple[Part, ...]
    lines: tuple[tuple[int, int], ...]
    tail: tuple[Part, ...]
    answer: int | None


@dataclass(frozen=True)
class Step:
    """One step, or the tail, with its judged parts."""

    start: int
    stop: int
    parts: tuple[Part, ...]

    def span(self, label: str) -> Span:
        """Wrong where any part is; labelled with the first fault."""
        fault = next((part.fault for part in self.parts if part.fault), "")
        return Part(self.start, self.stop, fault).span(label)


def align(found: Sequence[Found], wanted: Sequence[Wanted], cost: Callable[[Found, Wanted], int]) -> list[int | None]:
    """For each found item the index of the wanted one that it stands for, or None where it is one too many.

    The pairing of least cost: ``cost`` of each pair, ``GAP`` for each item without a partner on either side; of equal
    ones the pairing that pairs earliest. Time and space are the product of the lengths.

    >>> align("abbc", "abc", lambda f, w: 0 if f == w else 9)
    [0, 1, None, 2]
    """
    width = len(wanted)
    rows = [[GAP * (width - j) for j in range(width + 1)]]
    for item in reversed(found):
        below, row = rows[-1], [0] * (width + 1)
        row[width] = below[width] + GAP
        for j in range(width - 1, -1, -1):
            row[j] = min(below[j + 1] + cost(item, wanted[j]), row[j + 1] + GAP, below[j] + GAP)
        rows.append(row)
    rows.reverse()
    pairs: list[int | None] = []
    j = 0
    for i, item in enumerate(found):

        def paired(j: int, i: int = i, item: Found = item) -> bool:
            return j < width and rows[i][j] == rows[i + 1][j + 1] + cost(item, wanted[j])

        while j < width and not paired(j) and rows[i][j] == rows[i][j + 1] + GAP:
            j += 1  # wanted[j] is left out
        pairs.append(j if paired(j) else None)
        j += pairs[-1] is not None
    return pairs


def layout(text: str) -> Layout:
    """Find the frame of an answer.

    >>> layout("[T]7+9=5\\n[/T][A]5[/A]").lines
    ((3, 8),)
    """
    opens, closes, answers, ends = _tag_places(text)
    begin = 0 if opens is None else opens + 3
    end = next((place for place in (closes, answers, ends) if place is not None), len(text))
    lines = tuple(_lines(text, begin, end))
    fault = "" if lines else "no lines"
    if lines and text[end - 1] != "\n":
        fault = "missing line break"
    if opens is not None:
        opening = (*([Part(0, opens, "stray text")] if opens else []), Part(opens, begin))
    elif lines:
        opening = (Part(0, 1, "missing [T]"),)
    else:
        opening, fault = (), "missing [T]"
    pieces = [("[/T]", closes, 4), ("[A]", answers, 3), ("answer", None, 1), ("[/A]", ends, 4)]
    if closes is not None or answers is not None:
        after = answers + 3 if answers is not None else end + 4
        digit = _DIGIT.search(text, after, len(text) if ends is None else ends)
        pieces[2] = ("answer", digit.start() if digit else None, 1)
    return Layout(opening, lines, *_tail(text, end, fault, pieces))


def _tail(
    text: str, start: int, fault: str, pieces: Iterable[tuple[str, int | None, int]]
) -> tuple[tuple[Part, ...], int | None]:
    """Parts from ``start`` on, and the index of the answer; a missing piece is the fault of what stands in its place.

    Args:
        fault: of what comes first.
        pieces: name, place and length of what should come, in order.
    """
    parts: list[Part] = []
    answer = None
    for name, place, length in pieces:
        if place is None:
            fault = fault or f"missing {name}"
            continue
        if place > start:
            parts.append(Part(start, place, fault or "stray text"))
            fault = ""
        if name == "answer":
            answer = len(parts)
        start = place + length
        parts.append(Part(place, start, fault))
        fault = ""
    if start < len(text):
        parts.append(Part(start, len(text), fault or "text after [/A]"))
    elif fault:
        parts.append(Part(start, start, fault))
    return tuple(parts), answer


def read_steps(
    text: str, first: str, operations: Sequence[tuple[str, str]], apply: Callable[..., str]
) -> tuple[list[Step], int]:
    """The steps and the tail of an answer, each part judged given what was stated before it, and the steps left out.

    Args:
        text: the answer.
        first: the prompt's first digit.
        operations: (operator, right operand) of each step.
        apply: (operator, left, right) to the result.
    """
    page = layout(text)
    segments = [segment for start, stop in page.lines for segment in _segments(text, start, stop)]
    lines = [segment for segment in segments if not segment.empty]
    pairs = align([segment.operation for segment in lines], operations, _cost)
    standing = iter(pairs)
    steps: list[Step] = []
    stated: str | None = first
    done = 0  # operations worked off or passed over
    for segment in segments:
        place = None if segment.empty else next(standing)
        skipped = place is not None and place > done
        wanted = operations[done] if place is not None else None
        done = done if place is None else place + 1
        parts = segment.judge(stated, wanted, skipped, apply)
        stated = stated if segment.empty else segment.result
        steps.append(Step(segment.start, segment.stop, parts))
    tail = list(page.tail)
    if done < len(operations):
        tail[0] = replace(tail[0], fault="missing step")
    if page.answer is not None and stated not in (None, text[tail[page.answer].start]):
        tail[page.answer] = tail[page.answer].blamed("answer differs from the last result")
    steps.append(Step(tail[0].start, len(text), tuple(tail)))
    steps[0] = _with_opening(steps[0], page.opening)
    return steps, len(operations) - sum(pair is not None for pair in pairs)


@dataclass(frozen=True)
class _Segment:
    """An equation with what clings to it, or a line without one."""

    start: int
    stop: int
    equation: re.Match[str] | None
    joined: bool  # no line break before it
    empty: bool

    @property
    def operation(self) -> tuple[str, str] | None:
        return None if self.equation is None else (self.equation[2], self.equation[3])

    @property
    def result(self) -> str | None:
        return None if self.equation is None else self.equation[4]

    def judge(
        self, stated: str | None, wanted: tuple[str, str] | None, skipped: bool, apply: Callable[..., str]
    ) -> tuple[Part, ...]:
        if self.equation is None:
            return (Part(self.start, self.stop, "empty line" if self.empty else "malformed step"),)
        if wanted is None:
            return (Part(self.start, self.stop, "extra step"),)
        left, operator, right, result = self.equation.groups()
        faults = (
            "missing line break" if self.joined else "" if stated in (None, left) else "wrong left operand",
            "" if operator == wanted[0] else "skipped step" if skipped else "wrong operator",
            "" if right == wanted[1] else "skipped step" if skipped else "wrong right operand",
            "" if result == apply(operator, left, right) else "wrong result",
        )
        begin, end = self.equation.span()
        before = [Part(self.start, begin, "stray text")] if begin > self.start else []
        after = [Part(end, self.stop, "stray text")] if self.stop > end else []
        inner = (Part(begin + i, begin + i + 1, fault) for i, fault in zip((0, 1, 2, 4), faults))
        return (*before, *inner, *after)


def _segments(text: str, start: int, stop: int) -> Iterator[_Segment]:
    """The equations of a line: the first with what stands before it, each with what stands after it."""
    equations = list(_EQUATION.finditer(text, start, stop))
    if not equations:
        yield _Segment(start, stop, None, joined=False, empty=text[start:stop] == "\n")
    edges = [start, *(equation.start() for equation in equations[1:]), stop]
    for index, equation in enumerate(equations):
        joined = index > 0 and equations[index - 1].end() == equation.start()
        yield _Segment(edges[index], edges[index + 1], equation, joined, empty=False)


def _cost(found: tuple[str, str] | None, wanted: tuple[str, str]) -> int:
    """Of taking a line for a step: less than two gaps, so that a changed step is not one left out and one too many."""
    return 2 if found is None else 2 * ((found[0] != wanted[0]) + (found[1] != wanted[1]))


def _with_opening(step: Step, opening: Sequence[Part]) -> Step:
    """The first step answers for what is wrong before it."""
    if not opening:
        return step
    *stray, tag = opening
    if tag.fault:
        return replace(step, parts=(step.parts[0].blamed(tag.fault), *step.parts[1:]))
    return Step(stray[0].start if stray else step.start, step.stop, (*opening, *step.parts))


def _tag_places(text: str) -> list[int | None]:
    """Where each of the four tags stands, or None."""
    found = list(_TAG.finditer(text))
    places: list[int | None] = [None] * 4
    for match, index in zip(found, align([tag[0] for tag in found], TAGS, lambda f, w: 0 if f == w else 2 * GAP + 1)):
        if index is not None:
            places[index] = match.start()
    if places[0] is not None and _EQUATION.search(text, 0, places[0]):
        places[0] = None  # it opens nothing: the chain has begun
    return places


def _lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        newline = text.find("\n", begin, end)
        stop = end if newline < 0 else newline
        yield (begin, stop) if stop > begin else (begin, begin + 1)
        begin = stop + 1
