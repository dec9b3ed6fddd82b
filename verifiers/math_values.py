r"""Expressions as sympy values, and whether two of them are equal. Runs in worker processes only.

Text becomes a value through the LaTeX grammar that comes with ``math-verify``; it is never evaluated as Python. That
grammar forgives much (it reads "2(3)" as a mixed number and drops a prime), so what it would misread is rewritten or
refused first.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

__all__ = ["TooLarge", "Unreadable", "parse_value", "rational", "same_value"]


class Unreadable(ValueError):
    """A text that is no expression, or none with a single meaning."""


class TooLarge(ValueError):
    """A value with too many digits to be computed."""


_MAX_LENGTH = 2_000  # characters of one expression
_MAX_NESTING = 20
_PARTNER = {"(": ")", "[": "]", "{": "}"}
_MAX_BITS = 200_000.0  # of an integer
_REFUSED = re.compile(
    r"[\"'?:;#&@%¤=<>~`$]|\.\.\.|\\(?:[pb]?mod|ldots|cdots|dots|mid|to|text|begin|end|pm|mp)(?![A-Za-z])"
    r"|[0-9.]\s+[0-9.]|[0-9]\.[0-9]*\.|(?<![A-Za-z\\])[A-Za-z]{8,}"
)
_DECIMAL = re.compile(r"[0-9]*\.[0-9]+|[0-9]+\.(?![0-9])")
_MIXED = re.compile(r"(?<![0-9.}^_])([0-9]+)\s?\\frac\s?\{\s?([0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}")
_SHARE = re.compile(r"(?<![0-9.}^_/)A-Za-z])([0-9]+)\s?/\s?([0-9]+)(?=\s?[A-Za-z\\(])")  # "2/3x": from the left
_NAMES_OF_E_AND_I = {"e": "E", "math{e}": "E", "i": "I", "math{i}": "I"}
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def parse_value(text: str, *, positive: bool = False) -> Any:
    r"""The sympy expression of a text in canonical spelling; decimals are exact fractions.

    Args:
        text: one expression, without relation or separator.
        positive: whether variables stand for positive numbers only; else for real ones.

    Raises:
        Unreadable, TooLarge

    >>> parse_value(r"1.5\sqrt{8}").doit()
    3*sqrt(2)
    """
    value = _parsed(text, positive)
    if isinstance(value, Exception):
        raise value
    return value


def same_value(left: Any, right: Any) -> bool:
    """Whether two expressions are equal: exactly where numbers allow it, else wherever both are real.

    Constants are compared in exact arithmetic, or by 60 digits *relative* to their size, so that tiny numbers do not
    melt into zero. Rational functions are compared exactly; other functions at fixed points, those where only one
    side is real left out: ``sqrt(1/n) = 1/sqrt(n)``, but ``sqrt(x^2)`` is not ``x``.
    """
    import sympy

    if left == right:
        return True
    left, right = left.doit(), right.doit()
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    if any(side.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) for side in (left, right)):
        return False
    if left.atoms(sympy.core.function.AppliedUndef) or right.atoms(sympy.core.function.AppliedUndef):
        return bool(sympy.simplify(left - right) == 0)
    if left.free_symbols or right.free_symbols:
        return _same_function(left, right)
    return _same_constant(left, right)


def rational(value: Fraction) -> Any:
    """A fraction for sympy."""
    import sympy

    return sympy.Rational(value.numerator, value.denominator)


@lru_cache(maxsize=8192)
def _parsed(text: str, positive: bool) -> Any:
    """The expression, or the exception to raise: failures are remembered, too."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    try:
        value = latex2sympy(
            _spelled_out(text),
            is_real=True,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False),
        )
        if isinstance(value, sympy.FiniteSet) and len(value.args) == 1:  # how the grammar reads "{...}"
            value = value.args[0]
        if not isinstance(value, sympy.Expr):
            return Unreadable(f"{text[:60]!r} is no expression")
        _bits(value)
        return value.xreplace({symbol: _variable(symbol, positive) for symbol in value.free_symbols})
    except MemoryError:
        raise
    except TooLarge as fault:
        return fault
    except (Exception, RecursionError):
        return Unreadable(f"{text[:60]!r} cannot be read")


def _variable(symbol: Any, positive: bool) -> Any:
    import sympy

    name = _NAMES_OF_E_AND_I.get(symbol.name)
    if name:
        return getattr(sympy, name)
    return sympy.Symbol(symbol.name, positive=True) if positive else sympy.Symbol(symbol.name, real=True)


def _spelled_out(text: str) -> str:
    """The text with everything written out that the grammar would guess at; raises on what has no clear meaning."""
    text = re.sub(r"\\log\s?_\s?([0-9]|\{[^{}]*\})\s", r"\\log_{\1}", text)
    if not text or len(text) > _MAX_LENGTH or _REFUSED.search(re.sub(r"_\{[^{}]*\}", "_a", text)):
        raise Unreadable(text[:60])
    _refuse_nesting(text)
    _refuse_towers(text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    text = _MIXED.sub(_sum, text)
    text = _SHARE.sub(r"\\frac{\1}{\2}", text)
    text = _DECIMAL.sub(_fraction, text)
    text = re.sub(r"\^\s*(-\s*(?:[0-9]+|[A-Za-z])|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})", r"^{\1}", text)
    text = re.sub(r"\)\s*(?=[(0-9])|(?<![0-9^_])([0-9]+)\s*(?=\()", lambda m: f"{m.group().strip()}\\cdot ", text)
    return text.strip()


def _sum(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else match.group()


def _fraction(match: re.Match[str]) -> str:
    value = Fraction(match.group().removesuffix("."))
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}" if value.denominator > 1 else str(value.numerator)


def _refuse_nesting(text: str) -> None:
    """Brackets that do not close, or so many in each other that the grammar would take minutes."""
    opened: list[str] = []
    for bracket in re.findall(r"[()\[\]{}]", text):
        if bracket in _PARTNER:
            opened.append(_PARTNER[bracket])
        elif not opened or opened.pop() != bracket:
            raise Unreadable("brackets that do not match")
        if len(opened) > _MAX_NESTING:
            raise Unreadable("brackets in brackets")
    if opened:
        raise Unreadable("an open bracket")


def _refuse_towers(text: str) -> None:
    """Powers of powers of powers of numbers: the grammar itself would compute them under a fraction line."""
    levels: list[bool] = []
    for match in re.finditer(r"(?P<power>\^\s*)?[({]|[)}]|(?P<number>[0-9)])\s*\^", text):
        if match.group() in (")", "}"):
            levels = levels[:-1]
        elif match["number"] is None:
            levels.append(match["power"] is not None)
        if "^" in match.group() and sum(levels) >= 3 - (match["number"] is not None):
            raise TooLarge("a tower of powers")


def _bits(value: Any) -> float:
    """An upper bound on log2 of the size of an expression, variables counted as 2; raises TooLarge."""
    if value.is_Rational:
        return math.log2(max(abs(int(value.p)), int(value.q), 2))
    parts = [_bits(part) for part in value.args]
    bits = 1.0
    if value.is_Pow or value.is_Mul or value.is_Add:
        if value.is_Pow:
            bits = parts[0] * 2 ** min(parts[1], 1000.0)
        else:
            bits = sum(parts) if value.is_Mul else max(parts) + math.log2(len(parts))
    elif type(value).__name__ in ("factorial", "factorial2", "gamma", "binomial", "exp", "fibonacci"):
        bits = 2 ** min(max(parts), 1000.0) * max(1.0, min(parts[0], 64.0))
    elif parts:
        bits = max(parts)
    if bits > _MAX_BITS:
        raise TooLarge(f"a value of about {bits:.0g} bits")
    return bits


def _same_constant(left: Any, right: Any) -> bool:
    import sympy

    sizes = [abs(side.evalf(60)) for side in (left, right)]
    gap = abs((left - right).evalf(60))
    if not all(number.is_Float or number.is_Rational for number in (*sizes, gap)):
        return bool(sympy.simplify(left - right) == 0)
    size = max(sizes)
    if size < sympy.Float("1e-60"):  # zero, or so near to it that rounding may have made the difference
        return bool(sympy.simplify(left - right) == 0)
    return bool(gap <= size * sympy.Float("1e-40"))


def _same_function(left: Any, right: Any) -> bool:
    import sympy

    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    rational_functions = left.is_rational_function(*symbols) and right.is_rational_function(*symbols)
    wholly_complex = left.has(sympy.I) or right.has(sympy.I)
    agreeing = 0
    for point in _points(symbols):
        values = [side.subs(point).evalf(30) for side in (left, right)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        if not wholly_complex and not all(value.is_real for value in values):
            continue
        gap = abs(values[0] - values[1])
        if gap > max(abs(value) for value in values) * 1e-20:
            if gap > 1e-25:
                return False
            continue
        agreeing += 1
        if rational_functions:
            return bool(sympy.cancel(sympy.together(left - right)) == 0)
    return agreeing >= 3 or bool(sympy.simplify(left - right) == 0)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Fixed test points: positive fractions, whole numbers and, where variables may be negative, mixed signs."""
    import sympy

    points = []
    for row in range(11):
        point = {}
        for column, symbol in enumerate(symbols):
            whole = 2 + row % 4 + 2 * column
            share = sympy.Rational(_PRIMES[(3 * column + row) % 13], _PRIMES[(column + 2 * row + 5) % 13])
            size = whole if row in (3, 6, 8, 9) else share
            negative = not symbol.is_positive and row in (1, 4, 5, 8) and (row != 4 or column % 2 == 0)
            point[symbol] = -size if negative else size
        points.append(point)
    return points
