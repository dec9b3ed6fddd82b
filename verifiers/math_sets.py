r"""Intervals, unions and differences of sets, compared as sets of real numbers. Runs in worker processes only."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .math_structure import Group, Leaf, Node, Operation, Relation

__all__ = ["as_interval", "same_sets"]

_VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+")
_ENDS = {"<": (")", "("), "<=": ("]", "["), ">": ("(", ")"), ">=": ("[", "]")}
_CONSTANTS = {r"\pi", r"\infty", "e", "i"}


def as_interval(relation: Relation) -> Group | None:
    r"""An inequality of one variable as its interval; None for any other relation.

    >>> as_interval(Relation(("<", "<="), (Leaf("1"), Leaf("x"), Leaf("2"))))
    Group(opening='(', closing=']', items=(Leaf(text='1'), Leaf(text='2')))
    """
    if any(operator not in _ENDS for operator in relation.operators):
        return None
    if len(relation.sides) == 2:
        (operator,), (left, right) = relation.operators, relation.sides
        if _is_variable(right):
            left, right, operator = right, left, {"<": ">", ">": "<", "<=": ">=", ">=": "<="}[operator]
        if not _is_variable(left):
            return None
        if operator in ("<", "<="):
            return Group("(", _ENDS[operator][0], (Leaf(r"-\infty"), right))
        return Group(_ENDS[operator][0], ")", (right, Leaf(r"\infty")))
    if len(relation.sides) != 3 or not _is_variable(relation.sides[1]):
        return None
    low, _, high = relation.sides
    below, above = relation.operators
    if below[0] != above[0]:
        return None
    if below[0] == ">":
        low, high, below, above = high, low, above.replace(">", "<"), below.replace(">", "<")
    return Group(_ENDS[below][1], _ENDS[above][0], (low, high))


def same_sets(wanted: Node, given: Node, value: Callable[[str], Any]) -> bool:
    """Whether two unions, intersections or differences hold the same real numbers.

    Args:
        value: reads an expression.
    """
    left, right = _as_set(wanted, value), _as_set(given, value)
    return bool(left == right or left.symmetric_difference(right).is_empty)


def _as_set(node: Node, value: Callable[[str], Any]) -> Any:
    import sympy

    match node:
        case Leaf(r"\mathbb{R}"):
            return sympy.S.Reals
        case Leaf(text):
            return sympy.FiniteSet(value(text).doit())
        case Relation() if interval := as_interval(node):
            return _as_set(interval, value)
        case Relation(("=",), (_, last)):
            return _as_set(last, value)
        case Operation(name, items):
            sets = [_as_set(item, value) for item in items]
            if name == "setminus":
                return sympy.Complement(sets[0], sympy.Union(*sets[1:]))
            return (sympy.Union if name == "cup" else sympy.Intersection)(*sets)
        case Group("(" | "[" as opening, closing, (Leaf(low), Leaf(high))):
            return sympy.Interval(value(low).doit(), value(high).doit(), opening == "(", closing == ")")
        case Group("{", "}", items):
            return sympy.FiniteSet(*(value(item.text).doit() for item in items if isinstance(item, Leaf)))
        case Group("", "", items):
            return sympy.Union(*(_as_set(item, value) for item in items))
    raise ValueError("no set of numbers")


def _is_variable(node: Node) -> bool:
    return isinstance(node, Leaf) and bool(_VARIABLE.fullmatch(node.text)) and node.text not in _CONSTANTS
