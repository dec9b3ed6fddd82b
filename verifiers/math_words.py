"""Answers in words: names, letters of choice, times of day, dates. Texts are in canonical spelling."""

from __future__ import annotations

import re

__all__ = ["chosen_letter", "is_text", "same_words"]

_WORDS = re.compile(r"[^\W\d_](?:[^\W_]|[\s\-'’.,&/])*")
_CLOCK = re.compile(
    r"[0-9]+(?:(?::[0-9]+)+|(?:\.[0-9]+){2,}|([-/])[0-9]{1,2}\1[0-9]+)(?:\s?[ap]\.?\s?m\.?)?|[0-9]{1,2}\s?[ap]\.?\s?m\.?",
    re.I,
)
_CHOICE = re.compile(
    r"\s?(?:(?:option|choice|answer)\s)?\(?\s?([A-Ja-j])\s?(?:\)\s?[.:]?|[.:])\s?(?![A-Za-z0-9]?\s?$).*", re.I | re.S
)
_OPTION = re.compile(r"\s?(?:option|choice)\s\(?\s?([A-J])\s?\)?\s?", re.I)
_ANOTHER = re.compile(r"[\s).:,/]*+(?:(?:or|and)\s?)?\(?[A-Ja-j]\s?[).:]")  # "(A) or (B)" chooses nothing


def chosen_letter(answer: str) -> str | None:
    """The letter of a multiple choice: of "(C) 42", "C. Paris", "option C"; None where there is none, or several.

    >>> chosen_letter("(C) 42"), chosen_letter("(A) or (B)"), chosen_letter("Cat")
    ('C', None, None)
    """
    match = _OPTION.fullmatch(answer) or _CHOICE.fullmatch(answer)
    return match[1] if match and not _ANOTHER.match(answer, match.end(1)) else None


def is_text(text: str) -> bool:
    """Words, a time of day, a date: compared letter by letter."""
    return bool(_CLOCK.fullmatch(text)) or bool(_WORDS.fullmatch(text) and re.search(r"[^\W\d_]{2}", text))


def same_words(left: str, right: str) -> bool:
    """Whether two texts are one but for case, blanks and marks; in times and dates marks count.

    >>> same_words("the U.S.", "us"), same_words("3 p.m.", "03:00 PM"), same_words("3-4-5", "345")
    (True, True, False)
    """
    return _folded(left) == _folded(right)


def _folded(text: str) -> str:
    folded = text.casefold().strip()
    if _CLOCK.fullmatch(folded):
        folded = re.sub(r"([ap])\.?\s?m\.?$", r"\1m", folded)
        folded = re.sub(r"^([0-9]{1,2})\s?(?=[ap]m$)", r"\1:00", folded)
    else:
        folded = re.sub(r"[.,'’\-]+", " ", folded).strip().removeprefix("the ")
        folded = re.sub(r"\b([ap]) m\b", r"\1m", folded)
    return re.sub(r"(?<![0-9])0+(?=[0-9])", "", "".join(folded.split()))
