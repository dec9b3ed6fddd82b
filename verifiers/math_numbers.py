r"""Plain numbers of answers, read and compared exactly: integers, decimals, fractions, mixed, percent, e-notation.

Most answers are such numbers; they need no computer algebra. Texts are in the spelling of
:func:`apportion.verifiers.math_notation.canonical`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from .math_units import conversion, is_known, read_unit

__all__ = ["FLOAT_DIGITS", "Quantity", "Rules", "close_to_decimal", "factor_of_units", "read_quantity", "same_quantity"]

FLOAT_DIGITS = 10  # significant digits from which a decimal is taken for a computed value, not for a rounded answer


@dataclass(frozen=True)
class Rules:
    """The named switches; see :class:`apportion.verifiers.math_answer.MathAnswer`."""

    percent: Literal["exact", "lenient"] = "exact"
    units: Literal["optional", "require"] = "optional"
    decimals: Literal["exact", "reference_precision"] = "exact"
    assume_positive: bool = False


class Quantity(NamedTuple):
    """A number as written.

    Attributes:
        value: exact; a percentage is divided by 100.
        percent: whether a percent sign follows.
        unit: in one spelling, or "".
        places: decimal places of ``value`` as written; None for a fraction or an integer.
        digits: significant digits as written.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    places: int | None = None
    digits: int = 0


_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,300}(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3}){1,20}(?![0-9])|[0-9]{1,1000}(?![0-9]))"
_EXPONENT = r"\s?\^\s?(?:\{\s?(?P<%s>[+-]?[0-9]{1,4})\s?\}|(?P<%s>[+-]?[0-9]{1,4}))(?![0-9])"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+])?\s?(?:¤(?P<money>[a-z]+)\s)?\s?(?P<late_sign>[-+])?
    (?:
        (?:(?P<whole>{_INT})\s?)?\\frac\s?\{{\s?(?P<top>[-+]?{_INT})\s?\}}\s?\{{\s?(?P<bottom>[-+]?{_INT})\s?\}}
        | (?:(?P<whole2>[0-9]{{1,9}})\s)?(?P<top2>{_INT})\s?/\s?(?P<bottom2>{_INT})(?![.])
        | (?P<base>[0-9]{{1,4}}){_EXPONENT % ("power", "power2")}
        | (?P<decimal>{_INT}(?:\.[0-9]{{0,1000}})?|\.[0-9]{{1,1000}})
          (?: (?P<dots>(?:\.|\\ldots)\.\.)|\\(?:overline|bar|dot)\s?\{{\s?(?P<repeated>[0-9]{{1,50}})\s?\}}
            | [eE](?P<exp>[+-]?[0-9]{{1,4}})(?![0-9])
            | \s?(?:\\times|\\cdot|[xX])\s?10{_EXPONENT % ("ten", "ten2")} )?
    )
    (?P<scale>\s(?:hundred|thousand|million|billion|trillion|dozen)(?![A-Za-z]))?
    (?:\s?(?P<percent>%))?
    (?P<tail>.{{0,80}})
    """,
    re.X | re.S,
)
_COMPOUND = re.compile(r"([0-9]{1,9}\s?[A-Za-z]{1,12}\.?)(?:,?\sand)?\s([0-9].{1,60})", re.S)
_SCALE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}


def read_quantity(text: str) -> Quantity | None:
    r"""The number, with its unit, that makes up the whole text; None where the text is anything else.

    >>> read_quantity("-1,234.50").value, read_quantity(r"1\frac{1}{2} cm")[:3], read_quantity("3e8").value
    (Fraction(-2469, 2), (Fraction(3, 2), False, 'cm'), Fraction(300000000, 1))
    >>> read_quantity("28%").value, read_quantity(r"0.1\overline{6}").value, read_quantity("12,34"), read_quantity("4x")
    (Fraction(7, 25), Fraction(1, 6), None, None)
    """
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["late_sign"]):
        return None
    tail = match["tail"]
    unit = read_unit(tail, glued=bool(tail) and not tail[0].isspace())
    if unit is None:
        return _compound(text)
    if match["money"] and unit and not (unit == match["money"] or unit.startswith("/") or not is_known(unit)):
        return None
    read = _magnitude(match)
    if read is None:
        return None
    value, places, digits = read
    if match["scale"]:
        value, places = value * _SCALE[match["scale"].strip()], None
    if match["percent"]:
        value, places = value / 100, None if places is None else places + 2
    if "-" in (match["sign"], match["late_sign"]):
        value = -value
    if match["money"]:
        unit = match["money"] + (unit if unit.startswith("/") else "")
    return Quantity(value, match["percent"] is not None, unit, places, digits)


def _compound(text: str) -> Quantity | None:
    """ "1 hour 30 minutes", "5 feet and 6 inches": a whole number of a unit, and a part of it in a smaller one."""
    parts = _COMPOUND.fullmatch(text)
    whole, part = (read_quantity(parts[1]), read_quantity(parts[2])) if parts else (None, None)
    if not (whole and part and whole.unit and part.unit) or whole.value < 0 or whole.value.denominator > 1:
        return None
    factor = conversion(part.unit, whole.unit)
    if factor is None or whole.unit == part.unit or not 0 <= part.value * factor < 1:
        return None
    return Quantity(whole.value + part.value * factor, unit=whole.unit)


def same_quantity(reference: Quantity, answer: Quantity, rules: Rules) -> bool:
    """Whether the answer is the reference's number, by the rules."""
    factor = factor_of_units(reference.unit, answer.unit, rules)
    if factor is None:
        return False
    value = answer.value * factor
    if _same_value(reference, value, answer, rules):
        return True
    if rules.percent == "lenient" and reference.percent != answer.percent:
        bare, sign = (answer.value, reference.value) if reference.percent else (reference.value, answer.value)
        return bare == sign * 100
    return False


def factor_of_units(reference: str, answer: str, rules: Rules) -> Fraction | None:
    """What the answer's number is multiplied with; None where its unit makes it another answer."""
    if reference != answer and (not reference or not answer):
        return Fraction(1) if rules.units == "optional" else None
    return conversion(answer, reference)


def close_to_decimal(written: Quantity, exact: Fraction) -> bool:
    """Whether a decimal of many digits is that number as a computer prints it, rounded or cut off."""
    if written.places is None or written.digits < FLOAT_DIGITS:
        return False
    return abs(written.value - exact) <= max(Fraction(1, 10**written.places), abs(exact) / 10**15)


def _same_value(reference: Quantity, value: Fraction, answer: Quantity, rules: Rules) -> bool:
    if reference.value == value:
        return True
    if rules.decimals == "reference_precision" and reference.places:
        return abs(reference.value - value) <= Fraction(1, 2 * 10**reference.places)
    if not _terminates(value):
        return close_to_decimal(reference, value)
    return value == answer.value and not _terminates(reference.value) and close_to_decimal(answer, reference.value)


def _terminates(value: Fraction) -> bool:
    """Whether it can be written as a decimal, so that nothing but that decimal is right."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _magnitude(match: re.Match[str]) -> tuple[Fraction, int | None, int] | None:
    """Value without sign, decimal places and significant digits."""
    if match["top"] or match["top2"]:
        top, bottom = _integer(match["top"] or match["top2"]), _integer(match["bottom"] or match["bottom2"])
        whole = match["whole"] or match["whole2"]
        if not bottom or (whole and not 0 < top < bottom):
            return None
        return Fraction(top, bottom) + (_integer(whole) if whole else 0), None, 0
    if match["base"]:
        base, power = int(match["base"]), int(match["power"] or match["power2"])
        return (Fraction(base) ** power, None, 0) if base or power > 0 else None
    plain = match["decimal"].replace(",", "").replace(" ", "")
    head, _, behind = plain.partition(".")
    digits = len((head + behind).lstrip("0"))
    if match["dots"] or match["repeated"]:
        return _repeating(head, behind, match["repeated"])
    exponent = int(match["exp"] or match["ten"] or match["ten2"] or 0)
    value = Fraction(f"{head or 0}.{behind or 0}") * Fraction(10) ** exponent
    return value, max(len(behind) - exponent, 0) if behind else None, digits


def _repeating(head: str, behind: str, repeated: str | None) -> tuple[Fraction, int | None, int] | None:
    """ "0.333..." (a block seen three times, or one digit) and "0.1" with a bar over what repeats."""
    if repeated is None:
        tail = re.search(r"([0-9]{1,50}?)\1\1+$", behind)
        if tail is None:
            return None
        behind, repeated = behind[: tail.start()], tail[1]
    cycle = Fraction(int(repeated), 10 ** len(repeated) - 1) / 10 ** len(behind)
    return Fraction(f"{head or 0}.{behind or 0}") + cycle, None, 0


def _integer(text: str) -> int:
    return int(text.replace(",", "").replace(" ", ""))
