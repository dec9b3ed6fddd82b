"""Units of measure behind a number: what counts as one, which are the same, and how they convert."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["conversion", "is_known", "read_unit"]

# By dimension: the unit's names, separated by "|", with its size. Names in full also take an "s".
_TABLE: dict[str, dict[str, Fraction]] = {
    "length": {
        "mm|millimeter|millimetre": Fraction(1, 1000), "cm|centimeter|centimetre": Fraction(1, 100),
        "dm": Fraction(1, 10), "m|meter|metre": Fraction(1), "km|kilometer|kilometre": Fraction(1000),
        "in|inch|inches": Fraction(254, 10000), "ft|foot|feet": Fraction(3048, 10000), "yd|yard": Fraction(9144, 10000),
        "mi|mile": Fraction(1609344, 1000),
    },
    "mass": {
        "mg|milligram": Fraction(1, 1000), "g|gram|gramme": Fraction(1), "kg|kilogram": Fraction(1000),
        "lb|lbs|pound": Fraction(45359237, 100000),
    },
    "time": {
        "ms|millisecond": Fraction(1, 1000), "s|sec|second": Fraction(1), "min|minute": Fraction(60),
        "h|hr|hour": Fraction(3600), "day": Fraction(86400), "week": Fraction(604800),
    },
    "volume": {"ml|mL|milliliter|millilitre": Fraction(1, 1000), "l|L|liter|litre": Fraction(1)},
    "money": {"cent|¢": Fraction(1, 100), "dollar|USD|usd|buck": Fraction(1)},
    "angle": {"degree|deg": Fraction(1)},
}  # fmt: skip
_LETTERS = frozenset("mgshlLNJWVKACF")  # units of one letter; any other letter is a variable
_SIZES = {
    name: (dimension, size, names.partition("|")[0])
    for dimension, units in _TABLE.items()
    for names, size in units.items()
    for name in names.split("|")
}
_NO_UNIT = re.compile(
    r"(?:and|or|plus|minus|times|over|mod|modulo|to|from|with|remainder|r|if|when|where|is|are|not|no|but|more|less|than|at|least|most"
    r"|for|by|as|choose|factorial|squared|cubed|half|halves|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,5}teen|hundred|thousand|million)ths?|hundreds|thousands|millions|billions|below|under|negative|e|i|pi|x|y|z|n|k)",
    re.I,
)
_WORD = re.compile(r"[^\W\d_]+")
_UNIT = re.compile(
    r"[^\W\d_]+\.?(?:\s?\^\s?\{?-?[1-9]\}?)?(?:(?:\s|\s?/\s?|\s?\\cdot\s?|-)[^\W\d_]+\.?(?:\s?\^\s?\{?-?[1-9]\}?)?){0,4}"
)


def read_unit(tail: str, *, glued: bool) -> str | None:
    r"""The unit that makes up the whole tail of a number, in one spelling; "" for an empty tail, None for no unit.

    Args:
        tail: what stands behind the number, in canonical spelling.
        glued: whether no blank stands between them; then one letter is a variable ("5m").

    >>> [read_unit(tail, glued=False) for tail in ("square centimeters", "cm^{2}", "apples", "or 13", "x")]
    ['cm^2', 'cm^2', 'apple', None, None]
    """
    tail = tail.strip()
    if not tail:
        return ""
    if tail.startswith("^\\circ"):
        scale = tail.removeprefix("^\\circ").strip()
        return {"": "degree", "C": "degree C", "F": "degree F"}.get(scale)
    if base := re.fullmatch(r"_\s?\{?\s?([0-9]{1,2}|two|eight|sixteen)\s?\}?", tail):
        return f"base {base[1]}"
    if glued and re.fullmatch(r"\^?\s?\{?\s?(?:st|nd|rd|th)\s?\}?", tail):
        return "place"
    words = _WORD.findall(tail)
    if len(tail) > 60 or not _UNIT.fullmatch(tail) or any(_NO_UNIT.fullmatch(word) for word in words):
        return None
    if any(len(word) == 1 and (word not in _LETTERS or (glued and len(words) == 1)) for word in words):
        return None
    tail = re.sub(r"\b(square|sq\.?|cubic|cu\.?)\s([^\W\d_]+)", _powered, tail)
    tail = re.sub(r"\s?\bper\b\s?|\s?/\s?", "/", tail)
    return re.sub(r"\s?\^\s?\{?(-?[1-9])\}?", r"^\1", re.sub(r"[^\W\d_]+\.?", _name, tail))


def conversion(given: str, wanted: str) -> Fraction | None:
    """The factor that turns a number of ``given`` into ``wanted``; None where they measure different things.

    >>> conversion("cm^2", "m^2"), conversion("h", "min"), conversion("cm", "g"), conversion("apple", "apple")
    (Fraction(1, 10000), Fraction(60, 1), None, Fraction(1, 1))
    """
    if given == wanted:
        return Fraction(1)
    (left, power), (right, other) = _parts(given), _parts(wanted)
    if power != other or left not in _SIZES or right not in _SIZES or _SIZES[left][0] != _SIZES[right][0]:
        return None
    return (_SIZES[left][1] / _SIZES[right][1]) ** power


def is_known(unit: str) -> bool:
    """Whether the unit, or the one it is a power of, measures something; "apple" does not."""
    return _parts(unit)[0] in _SIZES


def _parts(unit: str) -> tuple[str, int]:
    name, _, power = unit.partition("^")
    return name, int(power) if power.isdigit() else 1


def _powered(match: re.Match[str]) -> str:
    return f"{match[2]}^{2 if match[1].startswith('s') else 3}"


def _name(match: re.Match[str]) -> str:
    word = match.group().rstrip(".")
    for name in (word, word.lower(), word.lower().removesuffix("s")):
        if name in _SIZES and (len(word) > 1 or name == word):
            return _SIZES[name][2]
    return word.lower().removesuffix("s") if len(word) > 2 else word
