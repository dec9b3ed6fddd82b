"""Places that others name, found in a text: a quotation in another spelling, offsets counted in UTF-16 units."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from itertools import accumulate

__all__ = ["find_quote", "utf16_to_code_points"]

_MAX_TRIES = 64  # places that are looked at before a quotation counts as ambiguous


def find_quote(text: str, quote: str) -> tuple[int, int] | None:
    """The one place of the text that the quotation can mean; None where there is none, or more than one.

    Searched for as it stands; else with compatibility forms and combining marks decomposed on both sides (NFKD, under
    which composed and decomposed letters are one) and each run of blanks as one. Letters are never cut: "cafe" is not
    found in "café", in whichever form that is written.

    Args:
        text: where to look.
        quote: what to look for; blanks at its ends do not count.

    Returns:
        Half-open range of characters in the text as it stands.

    >>> find_quote("cafe\\u0301 is 3", "caf\\u00e9"), find_quote("cafe\\u0301 is 3", "cafe")
    ((0, 5), None)
    >>> find_quote("1 + 1 = 3,\\n so  x = 3", "so x = 3"), find_quote("x = 3, x = 3", "x = 3")
    ((12, 21), None)
    """
    quote = quote.strip()
    if not quote:
        return None

    def no_letter_is_cut(_start: int, stop: int) -> bool:
        return stop == len(text) or not unicodedata.combining(text[stop])

    found = _places(text, quote, no_letter_is_cut)
    if found:
        return found[0] if len(found) == 1 else None
    folded, sources = _folded(text)
    wanted, _ = _folded(quote)

    def whole_characters(start: int, stop: int) -> bool:
        cut_before = start > 0 and sources[start - 1] == sources[start]
        cut_behind = stop < len(folded) and (
            sources[stop] == sources[stop - 1] or unicodedata.combining(folded[stop]) > 0
        )
        return not cut_before and not cut_behind

    found = _places(folded, wanted.strip(), whole_characters)
    if len(found) != 1:
        return None
    start, stop = found[0]
    return min(sources[start:stop]), max(sources[start:stop]) + 1


def utf16_to_code_points(text: str, start: int, stop: int) -> tuple[int, int] | None:
    """A half-open range counted in UTF-16 units (JavaScript, Java) as one in characters.

    None where an end lies outside the text or within a character.

    >>> utf16_to_code_points("📷 .@M", 3, 4)
    (2, 3)
    >>> utf16_to_code_points("📷 .@M", 1, 4) is None
    True
    """
    if not 0 <= start <= stop:
        return None
    places = {start: -1, stop: -1}
    for place, units in enumerate(accumulate((1 + (char > "\uffff") for char in text), initial=0)):
        if units in places:
            places[units] = place
        if units >= stop:
            break
    first, last = places[start], places[stop]
    return None if first < 0 or last < 0 else (first, last)


def _places(text: str, quote: str, allowed: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """The first two allowed places; two where so many are refused that the quotation means nothing."""
    found: list[tuple[int, int]] = []
    start = text.find(quote) if quote else -1
    for _ in range(_MAX_TRIES):
        if start < 0 or len(found) == 2:
            return found
        if allowed(start, start + len(quote)):
            found.append((start, start + len(quote)))
        start = text.find(quote, start + 1)
    return [(0, 0), (0, 0)]


def _folded(text: str) -> tuple[str, list[int]]:
    """The text in NFKD with each run of blanks as one, and for every character of that its place in the text.

    NFKD takes each character apart by itself and then sorts runs of combining marks; so the places are known.
    """
    chars: list[str] = []
    sources: list[int] = []
    marks: list[tuple[int, str, int]] = []

    def close_marks() -> None:
        for _, char, source in sorted(marks, key=lambda mark: mark[0]):
            chars.append(char)
            sources.append(source)
        marks.clear()

    for source, original in enumerate(text):
        for char in original if original.isascii() else unicodedata.normalize("NFKD", original):
            order = unicodedata.combining(char)
            if order:
                marks.append((order, char, source))
                continue
            if marks:
                close_marks()
            if not char.isspace():
                chars.append(char)
                sources.append(source)
            elif not chars or chars[-1] != " ":
                chars.append(" ")
                sources.append(source)
    close_marks()
    return "".join(chars), sources
