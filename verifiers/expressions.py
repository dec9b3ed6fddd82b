"""Arithmetic expressions in a row of tokens, computed exactly and within bounds. Nothing is ever handed to ``eval``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from .numerals import Edge, Numeral, Token, edge_after, edge_before, unit_of

__all__ = ["Expression", "expressions"]

_MAX_DEPTH = 16  # nested parentheses
_MAX_BITS = 1024  # of a numerator or denominator
_NO_UNITS: frozenset[str] = frozenset()


class Expression(NamedTuple):
    """An expression and how it was written.

    Args:
        first, last: half-open range of its tokens.
        start, stop: half-open range of its characters.
        value: exact; None where it divides by zero.
        clear: whether it has one reading, within the bounds.
        operators: how many it has; 0 for a number.
        percent: whether a percentage stands in it.
        numeral: the number that it is, or None.
        currencies: symbols in it.
        units: words behind its numbers, without the endings of the plural.
        before, after: what stands around it.
    """

    first: int
    last: int
    start: int
    stop: int
    value: Fraction | None
    clear: bool
    operators: int
    percent: bool
    numeral: Numeral | None
    currencies: frozenset[str]
    units: frozenset[str]
    before: Edge
    after: Edge

    @property
    def bare_percent(self) -> bool:
        return self.numeral is not None and self.numeral.percent


def expressions(tokens: list[Token], text: str) -> Iterator[Expression]:
    """The longest expressions, from left to right."""
    place, previous_end = 0, -1
    unreadable: set[int] = set()
    while place < len(tokens):
        side = _read(tokens, place, text, unreadable) if _may_start(tokens, place) else None
        if side is None:
            place += 1
            continue
        yield side._replace(before="none") if previous_end == side.first else side
        place = previous_end = side.last


def _may_start(tokens: list[Token], place: int) -> bool:
    token = tokens[place]
    if token.kind != "op":
        return token.kind in ("number", "open")
    if token.text != "-" or place + 1 == len(tokens):
        return False
    glued = tokens[place + 1].start == token.stop
    before = tokens[place - 1] if place else None
    return before is None or before.kind == "equals" or (glued and before.kind in ("open", "other", "wide"))


def _read(tokens: list[Token], place: int, text: str, unreadable: set[int]) -> Expression | None:
    reader = _Reader(tokens, place, unreadable)
    total = reader.sum(0)
    if total is None:
        return None
    last = reader.place
    end = last - 1 if tokens[last - 1].kind == "word" else last  # a unit at the end is not part of the range
    return Expression(
        first=place,
        last=last,
        start=tokens[place].start,
        stop=tokens[end - 1].stop,
        value=None if reader.undefined else total.value,
        clear=reader.clear,
        operators=reader.operators,
        percent=any(numeral.percent for numeral in reader.numerals),
        numeral=reader.numerals[0] if len(reader.numerals) == 1 and not reader.operators else None,
        currencies=frozenset(numeral.currency for numeral in reader.numerals if numeral.currency),
        units=total.units,
        before=edge_before(tokens, place),
        after=edge_after(tokens, last, text),
    )


class _Term(NamedTuple):
    """A value on its way; ``kind`` is how it may combine: "percent", "ratio" (a / b), or "plain"."""

    value: Fraction
    kind: str = "plain"
    units: frozenset[str] = _NO_UNITS


class _Reader:
    """Recursive descent over tokens; on failure it stops before what it cannot read.

    sum     := product (("+" | "-") product)*
    product := signed (("*" | "/" | "÷" | "of") signed | group)*
    signed  := "-"? power
    power   := primary ("^" "-"? primary | "²" | "³")?     (a tower of powers is not read)
    primary := number unit? | "(" sum ")"

    ``unreadable`` collects the parentheses that were tried in vain, so that none is tried twice and the time stays
    linear.
    """

    def __init__(self, tokens: list[Token], place: int, unreadable: set[int]) -> None:
        self.tokens, self.place, self.unreadable = tokens, place, unreadable
        self.clear, self.undefined = True, False
        self.operators = 0
        self.numerals: list[Numeral] = []

    def sum(self, depth: int) -> _Term | None:
        total = self._product(depth)
        while total is not None and (sign := self._operator("+-")):
            place, self.place = self.place, self.place + 1
            term = self._product(depth)
            if term is None:
                self.place = place
                break
            self.operators += 1
            percent = "percent" in (total.kind, term.kind)
            self.clear &= not percent or total.kind == term.kind  # "200 - 10%" has two readings
            self.clear &= total.units == term.units  # "3 apples + 4 pears", "1 hour + 30"
            value = total.value + (term.value if sign == "+" else -term.value)
            total = _Term(self._bounded(value), "percent" if percent else "plain", total.units)
        return total

    def _product(self, depth: int) -> _Term | None:
        product = self._signed(depth)
        divisions = ""
        spaced = False
        while product is not None:
            place, sign = self.place, self._operator("*/÷") or self._of(product)
            if sign:
                glued = self.tokens[place - 1].stop == self.tokens[place].start
                self.clear &= not (spaced and glued)  # "1/2 / 3/4" has two readings
                self.clear &= not (sign == "/" and "÷" in divisions)  # and so has "14 ÷ 1/2"
                spaced |= sign in "/÷" and not glued
                divisions += sign if sign in "/÷" and sign not in divisions else ""
                self.place += 1
                factor = self._signed(depth)
            elif self._glued_group():
                sign, factor = "(", self._power(depth)
                self.clear &= not divisions  # "6/2(1+2)"
            else:
                break
            if factor is None:
                self.place = place
                self.clear &= sign != "("
                break
            self.operators += 1
            product = self._multiply(product, factor, sign in "/÷")
        return product

    def _multiply(self, left: _Term, right: _Term, divide: bool) -> _Term:
        self.undefined |= divide and right.value == 0
        if divide:
            value = left.value / right.value if right.value else Fraction(0)
        else:
            value = left.value * right.value
        units = left.units | right.units if left.units or right.units else _NO_UNITS
        return _Term(self._bounded(value), "ratio" if divide else "plain", units)

    def _signed(self, depth: int) -> _Term | None:
        return self._negated(self._power, depth)

    def _negated(self, read: Callable[[int], _Term | None], depth: int) -> _Term | None:
        minus = self._operator("-")
        self.place += minus is not None
        term = read(depth)
        return term._replace(value=-term.value) if term and minus else term

    def _power(self, depth: int) -> _Term | None:
        base = self._primary(depth)
        sign = self._operator("^²³") if base else None
        if base is None or not sign:
            return base
        place, self.place = self.place, self.place + 1
        exponent = self._negated(self._primary, depth) if sign == "^" else _Term(Fraction("²³".index(sign) + 2))
        if exponent is None or self._operator("^²³"):
            self.place = place
            return base
        self.operators += 1
        return _Term(self._raised(base.value, exponent.value), "plain", base.units)

    def _primary(self, depth: int) -> _Term | None:
        token = self._token()
        if token is not None and token.numeral is not None:
            self.place += 1
            value, _, percent, _ = token.numeral
            self.numerals.append(token.numeral)
            self.clear &= value is not None
            unit = unit_of(self.tokens, self.place)
            self.place += unit is not None
            return _Term(
                value or Fraction(0), "percent" if percent else "plain", frozenset([unit]) if unit else _NO_UNITS
            )
        if token is None or token.kind != "open" or self.place in self.unreadable:
            return None
        opened, self.place = self.place, self.place + 1
        inner = self.sum(depth + 1) if depth < _MAX_DEPTH else None
        closing = self._token()
        if inner is None or closing is None or closing.kind != "close":
            self.unreadable.add(opened)
            return None
        self.place += 1
        return inner

    def _token(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _operator(self, signs: str) -> str | None:
        token = self._token()
        return token.text if token is not None and token.kind == "op" and token.text in signs else None

    def _of(self, product: _Term) -> str | None:
        """The word "of" multiplies a percentage or a fraction; in "3 of 4" it does not."""
        token = self._token()
        is_of = token is not None and token.kind == "word" and token.text == "of"
        return "of" if is_of and product.kind in ("percent", "ratio") else None

    def _glued_group(self) -> bool:
        here = self._token()
        return here is not None and here.kind == "open" and self.tokens[self.place - 1].stop == here.start

    def _raised(self, base: Fraction, exponent: Fraction) -> Fraction:
        self.undefined |= base == 0 and exponent < 0
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or abs(exponent) * bits > _MAX_BITS or (base == 0 and exponent == 0):
            self.clear = False
            return Fraction(0)
        return Fraction(0) if base == 0 else base ** int(exponent)

    def _bounded(self, value: Fraction) -> Fraction:
        if max(value.numerator.bit_length(), value.denominator.bit_length()) <= _MAX_BITS:
            return value
        self.clear = False
        return Fraction(0)
