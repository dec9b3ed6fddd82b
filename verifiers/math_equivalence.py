r"""Whether an answer says the same as the reference: structure first, then its parts. Runs in worker processes only."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from .math_numbers import Quantity, Rules, close_to_decimal, factor_of_units, read_quantity, same_quantity
from .math_sets import as_interval, same_sets
from .math_structure import Group, Leaf, Matrix, Node, Operation, Relation, read_structure
from .math_units import read_unit
from .math_values import TooLarge, Unreadable, parse_value, rational, same_value
from .math_words import chosen_letter, is_text, same_words

__all__ = ["Judgement", "judge_answer", "serve"]

Judgement = Literal["right", "wrong", "no reference", "too large", "undecided"]

_LETTER = re.compile(r"[A-Za-z]")
_OPTION = re.compile(r"[A-Ja-j]")
_PRODUCT = re.compile(r"(?![A-Z]{3})[A-Za-z]{2,4}")  # "xy" may be one; "BAC" is an order of letters
_LOOSE_BLANK = re.compile(r"(?<![0-9.,])\s|\s(?![0-9.,])")  # one that does not part two numbers
_NAME = re.compile(
    r"(?:\\[a-z]+|[A-Za-z])(?:\s?_\s?(?:[0-9A-Za-z]|\{[^{}]*\}))?'?(?:\s?\(\s?[a-z]\s?\))?|[A-Za-z][A-Za-z ]{2,30}"
)
_CALL = re.compile(r"[A-Za-z]+'?\s?\([^()]*\)")
_DEGREES = re.compile(r"(?P<body>.*[0-9A-Za-z)}\]])(?P<tail>\s?\^\\circ(?:\s?[CF])?)", re.S)
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")  # its argument is in degrees, not its value
_QUANTIFIER = re.compile(
    r"(?:,|\s)\s?\(?[a-z]\s?\\in\s?\\(?:mathbb\s?\{?[ZNR]\}?|Z|N|R)\)?\s?$"
)  # "k\pi, k \in \mathbb{Z}"
_MAX_UNORDERED = 60
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def serve(**options: Any) -> Callable[[tuple[str, str | None]], Judgement]:
    """In the child: a function of (reference, answer) by these rules; repeated pairs are remembered."""
    rules = Rules(**options)
    judge_answer("x^2+1", r"\sin(x)", rules)  # loads sympy and the grammar before the first clock runs
    remembered = lru_cache(maxsize=8192)(judge_answer)
    return lambda pair: remembered(*pair, rules)


def judge_answer(reference: str, answer: str | None, rules: Rules) -> Judgement:
    """Compare two texts in canonical spelling. Without an answer only the reference is looked at.

    >>> judge_answer("1331 and 1728", "1728", Rules()), judge_answer(r"\\{1,2\\}", r"\\{2,1\\}", Rules())
    ('wrong', 'right')
    """
    try:
        wanted = read_structure(_QUANTIFIER.sub("", reference) or reference)
        _check(wanted, rules)
    except (TooLarge, Unreadable, RecursionError):
        return "no reference"
    if answer is None:
        return "wrong"
    try:
        letter = chosen_letter(answer) if isinstance(wanted, Leaf) and _OPTION.fullmatch(wanted.text) else None
        given = Leaf(letter) if letter else read_structure(_QUANTIFIER.sub("", answer) or answer)
        return "right" if _Comparison(rules).same(wanted, given) else "wrong"
    except TooLarge:
        return "too large"
    except (Unreadable, RecursionError):
        return "wrong"
    except MemoryError:
        raise
    except Exception:  # a computer algebra system has many ways to give up
        return "undecided"


def _check(node: Node, rules: Rules) -> None:
    """Raise Unreadable where any part of a reference has no meaning."""
    match node:
        case Leaf(text):
            if not (read_quantity(text) or is_text(text) or text == r"\mathbb{R}"):
                _value(text, rules)
        case Group(_, _, items) | Operation(_, items) | Relation(_, items):
            for item in items:
                _check(item, rules)
        case Matrix(rows):
            for row in rows:
                for cell in row:
                    _check(cell, rules)


def _value(text: str, rules: Rules) -> Any:
    return parse_value(text, positive=rules.assume_positive)


def _measured(text: str) -> tuple[str, str, bool]:
    """An expression without its unit, the unit, and whether it is a percentage."""
    if text.endswith("%"):
        return text[:-1].strip(), "", True
    degrees = _DEGREES.fullmatch(text)
    if degrees and not _ANGLE.search(text):
        return degrees["body"], read_unit(degrees["tail"], glued=False) or "", False
    for blank in list(re.finditer(r"\s(?=[A-Za-z])", text))[-6:]:
        if unit := read_unit(text[blank.end() :], glued=False):
            return text[: blank.start()], unit, False
    return text, "", False


class _Comparison:
    """The comparison of two structures by the rules; the reference always stands first."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def same(self, wanted: Node, given: Node) -> bool:
        if wanted == given:
            return True
        if isinstance(wanted, Relation) or isinstance(given, Relation):
            return self._relation(wanted, given)
        if _has_sets(wanted) or _has_sets(given):
            return same_sets(wanted, given, lambda text: _value(text, self._rules))
        if isinstance(wanted, Matrix) and isinstance(given, Matrix):
            return [len(row) for row in wanted.rows] == [len(row) for row in given.rows] and all(
                self.same(*cells) for rows in zip(wanted.rows, given.rows) for cells in zip(*rows)
            )
        if isinstance(wanted, Group) or isinstance(given, Group):
            return self._group(wanted, given)
        return isinstance(wanted, Leaf) and isinstance(given, Leaf) and self._leaf(wanted.text, given.text)

    def _group(self, wanted: Node, given: Node) -> bool:
        if isinstance(given, Leaf) and isinstance(wanted, Group) and wanted.opening in ("", "{"):
            given = _without_thousands(given)
        if isinstance(wanted, Leaf) and isinstance(given, Group):  # one answer given twice, or in braces
            return (
                given.opening in ("", "{")
                and bool(given.items)
                and all(self.same(wanted, item) for item in given.items)
            )
        if isinstance(given, Leaf) and isinstance(wanted, Group):
            return wanted.opening == "{" and len(wanted.items) == 1 and self.same(wanted.items[0], given)
        if not (isinstance(wanted, Group) and isinstance(given, Group)):
            return False
        loose = ("", "{")
        if wanted.opening in loose and given.opening in loose and not _assigns_all(wanted, given):
            return self._unordered(wanted.items, given.items, as_set="{" in (wanted.opening, given.opening))
        brackets = (wanted.opening, wanted.closing) == (given.opening, given.closing)
        if not brackets and (("" not in (wanted.opening, given.opening)) or "{" in (wanted.opening, given.opening)):
            return False
        return len(wanted.items) == len(given.items) and all(map(self.same, wanted.items, given.items))

    def _unordered(self, wanted: tuple[Node, ...], given: tuple[Node, ...], as_set: bool) -> bool:
        """Each element of either side is among the other's, in a list as often as the reference repeats it."""
        if not wanted or not given:
            return not wanted and not given
        if max(len(wanted), len(given)) > _MAX_UNORDERED:
            return len(wanted) == len(given) and all(map(self.same, wanted, given))
        hits = [[self.same(left, right) for right in given] for left in wanted]
        repeats = not as_set and len(set(map(tuple, hits))) < len(wanted)
        if repeats and not all(sum(row) == hits.count(row) for row in hits):
            return False
        return all(map(any, hits)) and all(map(any, zip(*hits)))

    def _leaf(self, wanted: str, given: str) -> bool:
        if _LOOSE_BLANK.sub("", wanted) == _LOOSE_BLANK.sub("", given):
            return True
        left, right = read_quantity(wanted), read_quantity(given)
        if left and right:
            return same_quantity(left, right, self._rules)
        if is_text(wanted) or is_text(given) or (_LETTER.fullmatch(wanted) and _LETTER.fullmatch(given)):
            if same_words(wanted, given):
                return True
            if not _PRODUCT.fullmatch(wanted) and (is_text(wanted) or _LETTER.fullmatch(wanted)):
                return False
        return self._expression(wanted, given, left, right)

    def _expression(self, wanted: str, given: str, left: Quantity | None, right: Quantity | None) -> bool:
        (body, unit, percent), (other, given_unit, given_percent) = _measured(wanted), _measured(given)
        one, two = _value(body, self._rules), _value(other, self._rules)
        one, two = (one / 100 if percent else one), (two / 100 if given_percent else two)
        if "degree" in (unit, given_unit) and unit != given_unit and "" in (unit, given_unit):
            radian = _value(r"\frac{\pi}{180}", self._rules)
            if same_value(one * (radian if unit else 1), two * (radian if given_unit else 1)):
                return True
        factor = factor_of_units(unit, given_unit, self._rules)
        if factor is None:
            return False
        if same_value(one, two * rational(factor)):
            return True
        return self._near(left, two * rational(factor)) or (
            right is not None and not unit and self._printed(right, one)
        )

    def _near(self, wanted: Quantity | None, exact: Any) -> bool:
        if wanted is None or exact.free_symbols:
            return False
        if self._rules.decimals == "reference_precision" and wanted.places:
            value = _as_fraction(exact)
            return value is not None and abs(wanted.value - value) <= Fraction(1, 2 * 10**wanted.places)
        return self._printed(wanted, exact)

    def _printed(self, written: Quantity, exact: Any) -> bool:
        """Whether a long decimal is this irrational number as a computer prints it."""
        value = None if exact.free_symbols or exact.doit().is_Rational else _as_fraction(exact)
        return value is not None and close_to_decimal(written, value)

    def _relation(self, wanted: Node, given: Node) -> bool:
        if isinstance(wanted, Relation) and isinstance(given, Relation):
            return self._relations(wanted, given)
        if isinstance(wanted, Relation):
            if _is_assignment(wanted):
                return self.same(wanted.sides[-1], given)
            interval = as_interval(wanted)
            return interval is not None and self.same(interval, given)
        assert isinstance(given, Relation)
        interval = as_interval(given)
        if interval is not None:
            return self.same(wanted, interval)
        if set(given.operators) != {"="}:
            return False
        last = given.sides[-1]
        named = _is_assignment(given) or (_is_constant(wanted) and _names_quantity(given.sides[0]))
        steps = given.sides[1:-1] if named else given.sides[:-1]
        return self.same(wanted, last) and all(self.same(last, side) for side in steps)

    def _relations(self, wanted: Relation, given: Relation) -> bool:
        for one, other in ((wanted, given), (given, wanted)):  # "1 < x < 2" and "x in (1, 2)"
            interval = as_interval(one)
            if interval is not None and _is_assignment(other):
                return self.same(interval, other.sides[-1])
        if _is_assignment(wanted) and _is_assignment(given) and self.same(wanted.sides[0], given.sides[0]):
            return self.same(wanted.sides[-1], given.sides[-1])
        left, right = self._differences(wanted), self._differences(given)
        hits = [[_proportional(one, two) for two in right] for one in left]
        return all(map(any, hits)) and all(map(any, zip(*hits)))

    def _differences(self, relation: Relation) -> list[tuple[str, Any]]:
        """Each neighbouring pair as (operator, left minus right)."""
        if not all(isinstance(side, Leaf) for side in relation.sides):
            raise Unreadable("a relation between sets")
        values = [_value(_measured(side.text)[0], self._rules) for side in relation.sides if isinstance(side, Leaf)]
        return [(name, left - right) for name, (left, right) in zip(relation.operators, pairwise(values))]


def _proportional(wanted: tuple[str, Any], given: tuple[str, Any]) -> bool:
    """Whether two relations ``d ? 0`` differ by a constant factor only, whose sign turns an inequality round."""
    (operator, left), (other, right) = wanted, given
    symbols = left.free_symbols
    if symbols != right.free_symbols or not symbols:
        return operator == other and not symbols and same_value(left, right)
    for shift in (2, 5, 9):
        point = {symbol: shift + 3 * place for place, symbol in enumerate(sorted(symbols, key=str))}
        ratio = (right.subs(point) / left.subs(point)).doit()
        if ratio.is_number and ratio.is_finite and ratio.is_nonzero:
            expected = operator if ratio.is_positive else _FLIPPED[operator]
            return other == expected and same_value(left * ratio, right)
    return False


def _as_fraction(exact: Any) -> Fraction | None:
    """A real number to 40 digits."""
    value = exact.evalf(40)
    return Fraction(str(value)) if value.is_Float or value.is_Rational else None


def _is_assignment(relation: Relation) -> bool:
    return set(relation.operators) == {"="} and _is_name(relation.sides[0])


def _is_name(node: Node) -> bool:
    """A variable, or a pair of them: "(x, y)"."""
    if isinstance(node, Leaf):
        return bool(_NAME.fullmatch(node.text))
    return isinstance(node, Group) and node.opening == "(" and all(map(_is_name, node.items))


def _is_constant(node: Node) -> bool:
    return isinstance(node, Leaf) and not re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", node.text)


def _names_quantity(node: Node) -> bool:
    """What is asked for rather than an equation to be solved: "m + n", "AB", "f(3)", "P(A)", "\\angle A", not "3x"."""
    text = node.text if isinstance(node, Leaf) else ""
    letters = set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+|_\s?(?:\{[^{}]*\}|\w)", " ", text)))
    return len(letters) > 1 or bool(_CALL.fullmatch(text) or (letters and r"\angle" in text))


def _assigns_all(wanted: Group, given: Group) -> bool:
    """Whether the reference gives a value to each of several variables, and the answer only values, in that order."""
    assigned = [item.sides[0] for item in wanted.items if isinstance(item, Relation) and _is_assignment(item)]
    bare = not any(isinstance(item, Relation) for item in given.items) and "{" not in (wanted.opening, given.opening)
    return bare and len(set(assigned)) == len(wanted.items) > 1


def _has_sets(node: Node) -> bool:
    return isinstance(node, Operation) or node == Leaf(r"\mathbb{R}")


def _without_thousands(leaf: Leaf) -> Node:
    """ "100,200,300" as three numbers, where the reference shows that a list is meant."""
    if re.fullmatch(r"[0-9]{1,3}(?:,[0-9]{3})+", leaf.text):
        return Group("", "", tuple(Leaf(part) for part in leaf.text.split(",")))
    return leaf
