"""Finds every equation between numbers in free text, checks it exactly and locates the false ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from .expressions import Expression, expressions
from .numerals import Token, tokenize, unit_name
from .verdict import Sample, Span, Verdict

__all__ = ["Arithmetic", "Equation", "equations"]

_MODULO = re.compile(r"[ \t]{0,3}(?:\([ ]?)?\\?[bp]?mod(?:ulo)?\b", re.I)
_MAX_LABEL = 100  # characters of a quoted equation
_LIST_MARK = re.compile(r"[^\S\n]*+(?:(?:[-*+•–]|\(?[0-9]{1,3}[.)]|\(?[A-Za-z][.)]|\#{1,6}|>+)[^\S\n]++)*+")


class Equation(NamedTuple):
    """One checked equation: half-open range of characters in the text, and whether it holds."""

    start: int
    stop: int
    holds: bool


@dataclass(frozen=True)
class Arithmetic:
    """The share of equations that hold, with one span per equation; abstains where there is nothing to check.

    Read are ``+ - * / ^``, parentheses, their typographic and LaTeX signs, percentages ("20% of 50 = 10"), currency
    and thousands marks; all is computed in fractions. In a chain ``a = b = c`` each neighbouring pair is an equation
    of its own, so that only the false link is blamed. Units are read where
    they agree ("3 apples + 4 apples = 7 apples") and never converted. An equation with a variable is left alone, and
    so is anything else whose meaning is in doubt (a date, a remainder, a congruence, a question) and, where
    the sample's metadata says ``truncated``, an equation that reaches the end of the text.

    Args:
        allow_rounding: a number written with decimals also holds where it is the other side's correct rounding to
            these decimals ("10 / 3 = 3.33"); a whole number never does.

    >>> text = "He has 12 + 7 = 19 apples. He sells 4 × 2.5 = 12."
    >>> verdict, = Arithmetic()([Sample("", text)])
    >>> verdict.score, [(text[s.start : s.stop], s.score) for s in verdict.spans]
    (0.5, [('12 + 7 = 19', 1.0), ('4 × 2.5 = 12', 0.0)])
    """

    allow_rounding: bool = False

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        text = sample.completion
        found = equations(text, allow_rounding=self.allow_rounding)
        if sample.metadata.get("truncated"):
            found = [equation for equation in found if equation.stop < len(text)]  # its last number may be cut short
        if not found:
            return Verdict(None)
        spans = tuple(Span(e.start, e.stop, float(e.holds), _label(text, e)) for e in found)
        return Verdict(sum(span.score for span in spans) / len(spans), spans)


def equations(text: str, *, allow_rounding: bool = False) -> list[Equation]:
    """Every equation of the text that can be checked, in order; neighbours in a chain share a side.

    >>> [(found.stop, found.holds) for found in equations("2 + 3 = 5 - 1 = 4")]
    [(13, False), (17, True)]
    """
    found: list[Equation] = []
    start = 0
    for line in text.split("\n"):
        stop = start + len(line)
        if "=" in line:
            mark = _LIST_MARK.match(text, start, stop)
            tokens = tokenize(text, mark.end() if mark else start, stop)
            for chain in _chains(tokens, text):
                if not _MODULO.match(text, chain[-1].stop):  # "2^5 = 32 = 2 (mod 5)"
                    found += _links(chain, tokens, allow_rounding)
        start = stop + 1
    return found


def _chains(tokens: list[Token], text: str) -> Iterator[list[Expression]]:
    """Runs of expressions joined by equals signs, in which something is computed."""
    chain: list[Expression] = []
    for side in expressions(tokens, text):
        joined = bool(chain) and tokens[side.first - 1].kind == "equals" and chain[-1].last == side.first - 1
        if not joined:
            if _computes(chain):
                yield chain
            chain = []
        chain.append(side)
    if _computes(chain):
        yield chain


def _computes(chain: list[Expression]) -> bool:
    return len(chain) > 1 and any(side.operators or side.percent for side in chain)


def _links(chain: list[Expression], tokens: list[Token], allow_rounding: bool) -> Iterator[Equation]:
    for left, right in pairwise(chain):
        holds = _holds(left, right, allow_rounding) if _same_units(left, right, tokens) else None
        if holds is not None:
            yield Equation(left.start, right.stop, holds)


def _same_units(left: Expression, right: Expression, tokens: list[Token]) -> bool:
    """Whether no unit is converted on the way: "2 * 30 minutes = 60 minutes", but not "= 1 hour"."""
    if len(left.currencies | right.currencies) > 1:
        return False
    if not left.units:
        return True
    word = unit_name(tokens[right.last].text) if right.after == "prose" else None
    given = right.units or (frozenset([word]) if word else frozenset())
    return given <= left.units and right.currencies <= left.currencies


def _holds(left: Expression, right: Expression, allow_rounding: bool) -> bool | None:
    """Whether the two sides are equal; None where that cannot be said."""
    if not (left.clear and right.clear) or "none" in (left.before, right.after):
        return None
    if not left.operators and not left.bare_percent and left.before != "hard":
        return None  # "we need 5 = 2 + 3": the number may belong to the words before it
    if left.value is None or right.value is None:
        return False
    if left.value == right.value:
        return True
    if left.bare_percent != right.bare_percent:
        share, other = (left, right) if left.bare_percent else (right, left)
        parts, hundredths = (left.value, right.value) if share is left else (right.value, left.value)
        if parts * 100 == hundredths:
            return None  # "3 / 4 * 100 = 75%" is how many write it
        if share is left and (other.operators or other.currencies or other.after == "prose"):
            return None  # "20% = 10 apples" speaks of a part of something
    return allow_rounding and (_rounds(left.value, right) or _rounds(right.value, left))


def _rounds(exact: Fraction, written: Expression) -> bool:
    """Whether ``written`` is one number with decimals and no other number of so many decimals is nearer to exact."""
    if written.numeral is None or written.numeral.decimals == 0 or written.value is None:
        return False
    places = written.numeral.decimals + (2 if written.numeral.percent else 0)
    return abs(exact - written.value) <= Fraction(1, 2 * 10**places)


def _label(text: str, equation: Equation) -> str:
    if equation.holds:
        return "right equation"
    quoted = text[equation.start : equation.stop]
    return f"wrong equation: {quoted if len(quoted) <= _MAX_LABEL else quoted[: _MAX_LABEL - 1] + '…'}"
