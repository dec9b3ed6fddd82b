r"""The outer form of an answer: a list, a set, a pair or interval, a relation, a matrix, or one expression.

Read by its brackets and separators alone, so that open and closed ends, order and number of elements are kept exactly.
Texts are in the spelling of :func:`apportion.verifiers.math_notation.canonical`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .math_numbers import read_quantity

__all__ = ["Group", "Leaf", "Matrix", "Node", "Operation", "Relation", "read_structure"]


class Leaf(NamedTuple):
    """One expression, number or text."""

    text: str


class Group(NamedTuple):
    """Elements between brackets: ``opening`` and ``closing`` are "(" "[" ")" "]" "{" "}", or "" for a bare list."""

    opening: str
    closing: str
    items: tuple[Node, ...]


class Relation(NamedTuple):
    """A chain of sides: ``a < b = c``. Operators are "=", "<", ">", "<=", ">=", "!="."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


class Operation(NamedTuple):
    r"""Sets joined by ``cup``, ``cap`` or ``setminus``."""

    name: str
    items: tuple[Node, ...]


class Matrix(NamedTuple):
    """Rows of elements."""

    rows: tuple[tuple[Node, ...], ...]


Node = Leaf | Group | Relation | Operation | Matrix

_MAX_DEPTH = 12
_MAX_ITEMS = 200
_BRACKET = re.compile(r"\\\{|\\\}|\\begin\b|\\end\b|\\[A-Za-z]+|[()\[\]{}]")
_OPENING, _CLOSING = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}
_LIST = re.compile(
    r"\s?(?:[,;]\s?(?:(?:and|or)(?![A-Za-z]))?|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:text)?(?:and|or|land|lor)\b)\s?"
)
_COMMA = re.compile(r"\s?[,;]\s?")
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_RELATION = re.compile(r"\s?(?:\\(?:le|ge|ne|lt|gt|in|approx)(?![A-Za-z])|[=<>])\s?")
_RELATION_NAMES = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\lt": "<", r"\gt": ">", r"\in": "=", r"\approx": "="}
_OPERATION = re.compile(r"\s?\\(cup|cap|setminus|backslash)(?![A-Za-z])\s?")
_MATRIX = re.compile(r"\\begin\s?\{([pbBvV]?matrix|array)\}(?:\s?\{[lcr| ]*\})?(.*)\\end\s?\{\1\}", re.S)
_BUILDER = re.compile(r"[A-Za-z](?:\s?\\in\s?\\mathbb\s?\{?R\}?)?\s?(?:\\mid(?![A-Za-z])|\||:)(.+)", re.S)
_FRENCH = re.compile(r"[\](\[]([^\[\](){}]*)[\[)\]]")  # "]1,2[" is open at both ends


def read_structure(text: str, depth: int = 0) -> Node:
    r"""The outer form of a text.

    >>> read_structure("(1,2]").opening, [leaf.text for leaf in read_structure("1331 and 1,728").items]
    ('(', ['1331', '1728'])
    >>> read_structure("y = 2x")
    Relation(operators=('=',), sides=(Leaf(text='y'), Leaf(text='2x')))
    """
    text = text.strip()
    if depth >= _MAX_DEPTH or not text or read_quantity(text):
        return Leaf(text)
    if text in (r"\emptyset", r"\varnothing"):
        return Group("{", "}", ())
    matrix = _MATRIX.fullmatch(text)
    if matrix and matrix[1] not in ("vmatrix", "Vmatrix") and r"\begin" not in matrix[2]:
        return _matrix(matrix[2], depth)
    grouped = _group(text, depth)  # before the list: "]1,2[" has no outer comma either
    if grouped is not None:
        return grouped
    parts, _ = _split(text, _LIST)
    if len(parts) > 1:
        parts = _with_thousands(text, parts)
    if len(parts) > 1:
        return Group("", "", tuple(read_structure(part, depth + 1) for part in parts))
    sides, operators = _split(text, _RELATION)
    if len(sides) > 1 and all(sides):
        names = tuple(_RELATION_NAMES.get(operator, operator) for operator in operators)
        return Relation(names, tuple(read_structure(side, depth + 1) for side in sides))
    operands, found = _split(text, _OPERATION)
    if len(operands) > 1 and all(operands) and len(set(found)) == 1:
        name = found[0].removeprefix("\\").replace("backslash", "setminus")
        return Operation(name, tuple(read_structure(operand, depth + 1) for operand in operands))
    branches = _plus_minus(text)
    return Group("", "", tuple(Leaf(branch) for branch in branches)) if branches else Leaf(text)


def _group(text: str, depth: int) -> Node | None:
    """What stands between one pair of brackets around the whole text."""
    opening = r"\{" if text.startswith(r"\{") else text[0]
    if opening == "]" or (opening in "([" and text.endswith("[")):
        match = _FRENCH.fullmatch(text)
        if match is None:
            return None
        ends = ("(" if text[0] in "](" else "["), (")" if text[-1] in "[)" else "]")
        return _filled(*ends, match[1], depth)
    if opening not in ("(", "[", "{", r"\{") or _end_of_bracket(text) != len(text):
        return None
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    inner = text[len(opening) : len(text) - len(closing)].strip()
    if opening == "{" and closing == "}":
        return read_structure(inner, depth + 1)
    if (opening == r"\{") != (closing == r"\}") or closing == "}":
        return None
    if opening == r"\{":
        described = _BUILDER.fullmatch(inner)  # "{x | x > 3}"
        return read_structure(described[1], depth + 1) if described else _filled("{", "}", inner, depth)
    return _filled(opening, closing, inner, depth)


def _filled(opening: str, closing: str, inner: str, depth: int) -> Node | None:
    parts, _ = _split(inner, _LIST if opening == "{" else _COMMA)
    if re.search(r",\s", inner):  # "(1,000, 2,000)"; but "(1,234)" is a pair
        parts = _with_thousands(inner, parts)
    if len(parts) < 2 and opening != "{":
        return read_structure(inner, depth + 1) if (opening, closing) == ("(", ")") and inner else None
    if opening == "{" and not inner:
        return Group("{", "}", ())
    items = [read_structure(part, depth + 1) for part in parts]
    flat = [
        leaf for item in items for leaf in (item.items if isinstance(item, Group) and not item.opening else (item,))
    ]
    return Group(opening, closing, tuple(flat))


def _with_thousands(text: str, parts: list[str]) -> list[str]:
    """Read "1,234, 5,678" and "1,331 and 1,728" as two numbers: another separator shows that the commas are marks."""
    merged = _THOUSANDS.sub(lambda number: number[1].replace(",", ""), text)
    if merged == text or not re.search(r",\s|;|and|or", merged):
        return parts
    return _split(merged, _LIST)[0]


def _matrix(inner: str, depth: int) -> Node:
    rows = [row for row in re.split(r"\\\\", inner) if row.strip()]
    cells = tuple(tuple(read_structure(cell, depth + 1) for cell in row.split("&")) for row in rows)
    return Matrix(cells)


def _plus_minus(text: str) -> list[str]:
    r"""Both readings of ``\pm`` and ``\mp``, upper signs first."""
    if r"\pm" not in text and r"\mp" not in text:
        return []
    upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    return [side.strip().removeprefix("+").strip() for side in (upper, lower)]


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Parts of the text between separators that stand outside all brackets, and these separators."""
    parts: list[str] = []
    found: list[str] = []
    start = 0
    depths = _depths(text)
    for match in separator.finditer(text):
        if len(parts) < _MAX_ITEMS and match.group().strip() and depths(match.start()) == 0:
            parts.append(text[start : match.start()].strip())
            found.append(match.group().strip())
            start = match.end()
    parts.append(text[start:].strip())
    return parts, found


class _depths:
    """How many brackets are open at a position; positions are asked in ascending order."""

    def __init__(self, text: str) -> None:
        self._brackets = _BRACKET.finditer(text)
        self._next = next(self._brackets, None)
        self._depth = 0

    def __call__(self, position: int) -> int:
        while self._next is not None and self._next.start() < position:
            sign = self._next.group()
            self._depth += (sign in _OPENING) - (sign in _CLOSING)
            self._next = next(self._brackets, None)
        return self._depth


def _end_of_bracket(text: str) -> int:
    """Where the bracket that opens the text is closed; -1 if never. Half-open intervals close with another kind."""
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += (match.group() in _OPENING) - (match.group() in _CLOSING)
        if depth == 0:
            return match.end()
    return -1
