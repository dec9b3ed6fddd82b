"""Checks the final number of an answer to a worded problem, exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from .errors import InputError
from .numerals import Edge, Token, edge_after, edge_before, tokenize
from .verdict import Sample, Span, Verdict

__all__ = ["Extracted", "NumberAnswer", "Quantity", "extract_number", "parse_quantity", "quantities"]

Policy = Literal["answer_line", "boxed", "last_number"]
_POLICIES = ("answer_line", "boxed", "last_number")

_ANSWER_LINE = re.compile(
    r"^[ \t>#*_-]*+(?:the[ \t]++)?(?:final[ \t]++)?answer(?:[ \t]++is)?[ \t*_]*+[:=](?P<answer>[^\n]*)", re.M | re.I
)
_BRACE = re.compile(r"\\.|[{}]", re.S)


class Quantity(NamedTuple):
    """A signed number in a text: its range, its exact value, whether it is a percentage, and the tokens it spans."""

    start: int
    stop: int
    value: Fraction
    percent: bool
    first: int
    last: int


class Extracted(NamedTuple):
    """Where an answer stands in the text, and the number it is; None where it is not one readable number."""

    start: int
    stop: int
    quantity: Quantity | None


@dataclass(frozen=True)
class NumberAnswer:
    """1 where the final number equals the reference, else 0; the answer is located.

    Numbers are compared as fractions: "1,200" = "$1200.00" = "1200". The percent sign is part of the answer: "28%"
    is neither "28" nor "0.28". A completion without an answer scores 0 and gets no span; without a reference that is
    a number the verdict is an abstention.

    Args:
        extract: ``answer_line`` takes the last line "Answer: N" (also "Final answer: **N**"), ``boxed`` the last
            ``\\boxed{N}``, ``last_number`` the last number of the text. The first two want exactly one number there.

    >>> text = "20 - 7 = 13\\nAnswer: 13 apples"
    >>> verdict, = NumberAnswer()([Sample("", text, reference="13.0")])
    >>> verdict.score, text[verdict.spans[0].start : verdict.spans[0].stop]
    (1.0, '13')
    """

    extract: Policy = "answer_line"

    def __post_init__(self) -> None:
        if self.extract not in _POLICIES:
            raise InputError(f"extract: {self.extract!r} is no policy; give one of {', '.join(_POLICIES)}")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        wanted = None if sample.reference is None else parse_quantity(sample.reference)
        if wanted is None:
            return Verdict(None)
        found = extract_number(sample.completion, self.extract)
        if found is None:
            return Verdict(0.0)
        given = found.quantity
        if given is None:
            return Verdict(0.0, (Span(found.start, found.stop, 0.0, "not one number"),))
        right = (given.value, given.percent) == (wanted.value, wanted.percent)
        return Verdict(
            float(right), (Span(found.start, found.stop, float(right), f"{'right' if right else 'wrong'} answer"),)
        )


def extract_number(text: str, policy: Policy) -> Extracted | None:
    """The final answer of the text by the named policy; None where there is none.

    >>> extract_number("First \\\\boxed{2}, no: \\\\boxed{3}.", "boxed")[:2]
    (28, 29)
    """
    if policy == "last_number":
        found = [quantity for quantity, _, _ in quantities(text)]
        return Extracted(found[-1].start, found[-1].stop, found[-1]) if found else None
    place = _answer_line(text) if policy == "answer_line" else _last_box(text)
    if place is None:
        return None
    start, stop = place
    candidates = quantities(text, start, stop)
    if len(candidates) == 1 and "none" not in candidates[0][1:]:
        quantity = candidates[0][0]
        return Extracted(quantity.start, quantity.stop, quantity)
    written = text[start:stop]
    start += len(written) - len(written.lstrip())
    return Extracted(start, start + len(written.strip()), None)


def quantities(text: str, start: int = 0, stop: int | None = None) -> list[tuple[Quantity, Edge, Edge]]:
    """Every number of ``text[start:stop]`` with its sign, and what stands before and behind it.

    "2/3" is one number, "2 - 3" are two; numbers within words, dates or versions are none.

    >>> [(float(found.value), found.percent) for found, _, _ in quantities("from 2 to -3, or $1,234.50 (5%)")]
    [(2.0, False), (-3.0, False), (1234.5, False), (0.05, True)]
    """
    return list(_quantities(text, tokenize(text, start, stop)))


def parse_quantity(text: str) -> Quantity | None:
    """The one number that makes up the whole text, or None.

    >>> parse_quantity(" 12.0 ").value, parse_quantity("12 apples")
    (Fraction(12, 1), None)
    """
    found = quantities(text)
    stripped = text.strip()
    if len(found) != 1 or text[found[0][0].start : found[0][0].stop] != stripped:
        return None
    return found[0][0]


def _answer_line(text: str) -> tuple[int, int] | None:
    """Range behind the colon of the last answer line that holds a digit."""
    place = None
    for match in _ANSWER_LINE.finditer(text):
        if re.search(r"[0-9]", match["answer"]):
            place = match.span("answer")
    return place


def _last_box(text: str) -> tuple[int, int] | None:
    """Range of the content of the last box; None where it is empty or was cut off before its closing brace."""
    opened = text.rfind(r"\boxed{")
    if opened < 0:
        return None
    start, depth = opened + len(r"\boxed{"), 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return (start, match.start()) if text[start : match.start()].strip() else None
    return None


def _quantities(text: str, tokens: list[Token]) -> Iterator[tuple[Quantity, Edge, Edge]]:
    place = 0
    while place < len(tokens):
        token, first, last = tokens[place], place, place + 1
        place += 1
        if token.numeral is None or token.numeral.value is None:
            continue
        value = token.numeral.value
        if _glued_to_word(tokens, first, last):
            continue
        sign = tokens[first - 1] if first else None
        if sign and sign.kind == "op" and sign.text in "+-" and sign.stop == token.start:
            before = tokens[first - 2] if first > 1 else None
            joined = before.kind if before and before.stop == sign.start else ""
            if joined == "word":  # "GPT-4"
                continue
            if joined not in ("number", "close", "opaque"):  # "3-5" is no negative number
                value, first = (-value if sign.text == "-" else value), first - 1
        if last + 1 < len(tokens) and tokens[last].text == "/" and tokens[last + 1].numeral:
            below = tokens[last + 1]
            adjacent = token.stop == tokens[last].start and tokens[last].stop == below.start
            if adjacent and below.numeral and below.numeral.value and not token.numeral.percent:
                value, last = value / below.numeral.value, last + 2
        place = last
        quantity = Quantity(tokens[first].start, tokens[last - 1].stop, value, token.numeral.percent, first, last)
        yield quantity, edge_before(tokens, first), edge_after(tokens, last, text)


def _glued_to_word(tokens: list[Token], first: int, last: int) -> bool:
    left = first > 0 and tokens[first - 1].kind == "word" and tokens[first - 1].stop == tokens[first].start
    right = last < len(tokens) and tokens[last].kind == "word" and tokens[last].start == tokens[last - 1].stop
    return left or right
