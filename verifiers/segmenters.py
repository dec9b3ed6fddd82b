"""Cut a text into steps: half-open character spans of their content, shared by reward models and training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from .errors import InputError

__all__ = ["BlankLines", "Lines", "NumberedSteps", "Segmenter", "Sentences", "tile"]


class Segmenter(Protocol):
    """Text in, (start, stop) spans of its steps out: in order, disjoint, not empty, without surrounding blanks."""

    def __call__(self, text: str) -> list[tuple[int, int]]: ...


def tile(text: str, steps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extend steps until they cover the text: a separator belongs to the step before it, leading text to the first.

    A text without any step is one tile; the empty text has none.

    >>> tile("Step 1: add.\\nStep 2: done.\\n", [(0, 12), (13, 26)])
    [(0, 13), (13, 27)]
    """
    edges = [0, *(edge for step in steps for edge in step), len(text)]
    if any(left > right for left, right in pairwise(edges)) or any(start == stop for start, stop in steps):
        raise ValueError(f"steps of a text of {len(text)} characters must be in order, disjoint, inside and not empty")
    starts = [0, *(start for start, _ in steps[1:]), len(text)]
    return [] if not text else list(pairwise(starts))


@dataclass(frozen=True)
class Lines:
    """Every line that is not blank is a step.

    Only ``\\n`` and ``\\r\\n`` end a line: not U+2028, form feed or the others at which ``str.splitlines`` cuts.

    Args:
        lone_cr: a ``\\r`` without ``\\n`` ends a line too.
        ignore: lines that are no steps, such as ``<think>``; blanks around them do not count.

    >>> Lines()("a = 2\\n\\nb = 3\\r\\n")
    [(0, 5), (7, 12)]
    """

    lone_cr: bool = False
    ignore: tuple[str, ...] = ()

    def __call__(self, text: str) -> list[tuple[int, int]]:
        ends = (match.start() for match in re.finditer(r"[\r\n]" if self.lone_cr else r"\n", text))
        return [(start, stop) for start, stop in _between(text, ends) if text[start:stop] not in self.ignore]


@dataclass(frozen=True)
class BlankLines:
    """Paragraphs: steps end at blank lines, but not at those inside fenced code, display maths or a LaTeX environment.

    A code fence that is never closed runs to the end of the text (a truncated answer); an unclosed formula protects
    nothing.

    Args:
        ignore: paragraphs that are no steps; blanks around them do not count.

    >>> BlankLines()("A.\\n\\n```\\na\\n\\nb\\n```\\n\\nB.")
    [(0, 2), (4, 16), (18, 20)]
    """

    ignore: tuple[str, ...] = ()

    def __call__(self, text: str) -> list[tuple[int, int]]:
        edges = _outside(_protected(text), (start for start, stop in _lines(text) if text[start:stop].strip() == ""))
        return [(start, stop) for start, stop in _between(text, edges) if text[start:stop] not in self.ignore]


@dataclass(frozen=True)
class NumberedSteps:
    """A step runs from one number at the start of a line to the next; a text without numbers is one step.

    Markdown emphasis and headings around the number are allowed; numbers inside fenced code or display maths are not
    steps.

    Args:
        mode: ``step`` reads "Step 3:" (also "Step 3." and "Step 3)"); ``list`` reads "3." and "3)".

    >>> NumberedSteps()("Step 1: use Step 2 of the hint.\\nStep 2: done.")
    [(0, 31), (32, 45)]
    >>> NumberedSteps(mode="list")("1. Add 2.5 and 3.\\n2. Get 5.5.")
    [(0, 17), (18, 29)]
    """

    mode: Literal["step", "list"] = "step"

    def __post_init__(self) -> None:
        if self.mode not in _MARKERS:
            raise InputError(f"mode: {self.mode!r} is unknown; give one of {', '.join(_MARKERS)}")

    def __call__(self, text: str) -> list[tuple[int, int]]:
        starts = list(_outside(_protected(text), (match.start(1) for match in _MARKERS[self.mode].finditer(text))))
        steps = _between(text, starts)
        leading = bool(starts) and text[: starts[0]].strip() != ""
        return steps[1:] if leading else steps


@dataclass(frozen=True)
class Sentences:
    """Sentences, which also end at a line break.

    A point inside a number or word, after a list number that opens the sentence, or after an abbreviation does not
    end one, nor does a mark before an operator ("5! = 120"). Fenced code and display maths are never cut.

    Args:
        abbreviations: lower-case words, without the last point, that do not end a sentence.

    >>> text = "1) Take 2.5, i.e. half. 2) Halve it."
    >>> [text[start:stop] for start, stop in Sentences()(text)]
    ['1) Take 2.5, i.e. half.', '2) Halve it.']
    """

    abbreviations: tuple[str, ...] = ("e.g", "i.e", "etc", "cf", "vs", "approx", "resp", "fig", "eq", "dr", "mr", "mrs")

    def __call__(self, text: str) -> list[tuple[int, int]]:
        return _between(text, _outside(_protected(text), self._ends(text)))

    def _ends(self, text: str) -> Iterator[int]:
        longest = max(map(len, self.abbreviations), default=0) + 1
        opened = _first_content(text, 0)
        for match in _SENTENCE_END.finditer(text):
            point = match.start()
            if match["stop"] == ".":
                word = text[max(opened, point - longest) : point].split()[-1:]
                abbreviated = bool(word) and word[0].lstrip("([{\"'*_").lower() in self.abbreviations
                if abbreviated or _LIST_NUMBER.fullmatch(text, opened, max(opened, point)):
                    continue
            if opened < match.end():
                opened = _first_content(text, match.end())
            yield match.end()


_MARKERS = {
    "step": re.compile(
        r"^[ \t]*+((?:\#{1,6}[ \t]++)?(?:\*\*|__)?step[ \t]++[0-9]++(?:\*\*|__)?[ \t]*+(?::|[.)](?![0-9])))",
        re.M | re.I,
    ),
    "list": re.compile(r"^[ ]{0,3}((?:\*\*|__)?[0-9]{1,3}[.)](?:\*\*|__)?(?=\s|\Z))", re.M),
}
_LIST_NUMBER = re.compile(r"[(\[*_]{0,3}[0-9]{1,3}")
_BLANKS = re.compile(r"\s*+")
# The look-behind and the possessive quantifiers keep a long run of points linear.
_SENTENCE_END = re.compile(
    r"(?<![.!?…])(?P<stop>[.!?…]++)[\"')\]}»”’*_]*+(?=\s++(?![\s=<>≤≥≈≠+/×÷·^])|\s*+\Z)|[。！？]++[”’」』）]*+|\n"
)
_BLOCK = re.compile(
    r"(?P<fence>^[ \t]*+(?P<ticks>`{3,}+|~{3,}+)(?P<info>[^\n]*))"
    r"|\\(?P<edge>begin|end)\{(?P<name>[^{}\n]{1,40})\}"
    r"|(?P<display>\\[\[\]]|\$\$)"
    r"|\\.",  # any other escape, so that the line break \\[2pt] opens no formula and \$ no display
    re.M | re.S,
)


def _between(text: str, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """The pieces between cut positions (in order), without blanks at their ends; pieces of blanks alone are dropped."""
    steps = []
    for start, stop in pairwise([0, *cuts, len(text)]):
        piece = text[start:stop]
        content = piece.strip()
        if content:
            first = start + len(piece) - len(piece.lstrip())
            steps.append((first, first + len(content)))
    return steps


def _first_content(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _lines(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for line in text.split("\n"):
        yield start, start + len(line)
        start += len(line) + 1


def _outside(blocks: Sequence[tuple[int, int]], positions: Iterable[int]) -> Iterator[int]:
    """The positions (in order) that no block (in order, may nest) holds."""
    covered, following = 0, 0
    for position in positions:
        while following < len(blocks) and blocks[following][0] < position:
            covered = max(covered, blocks[following][1])
            following += 1
        if position >= covered:
            yield position


def _protected(text: str) -> list[tuple[int, int]]:
    """Ranges of fenced code, display maths and LaTeX environments, by their start; they may nest.

    One pass: an opening mark waits on the stack of its own kind until its closing mark comes.
    """
    waiting: dict[str, list[int]] = {}
    blocks: list[tuple[int, int]] = []
    fence: tuple[str, int] | None = None
    for match in _BLOCK.finditer(text):
        ticks = match["ticks"]
        if fence is not None:
            if ticks and ticks.startswith(fence[0]) and not match["info"].strip():
                blocks.append((fence[1], match.end()))
                fence = None
        elif ticks:
            if ticks[0] == "~" or "`" not in match["info"]:
                fence = ticks, match.start()
        elif match["edge"] or match["display"]:
            kind = match["name"] or ("$$" if match["display"] == "$$" else "[]")
            opened = waiting.setdefault(kind, [])
            closes = match["edge"] == "end" or match["display"] == r"\]" or (kind == "$$" and bool(opened))
            if not closes:
                opened.append(match.start())
            elif opened:
                blocks.append((opened.pop(), match.end()))
    if fence is not None:
        blocks.append((fence[1], len(text)))
    return sorted(blocks)
