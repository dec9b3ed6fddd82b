"""Marks the phrases with which an answer plans, as spans for credit that favours planning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = ["PlanGrams", "phrase_pattern"]


@dataclass(frozen=True)
class PlanGrams:
    """Every place of a strategic phrase ("let's try another way"), with score 1; it judges nothing and never scores.

    HICRA (arXiv 2509.03646) calls such phrases of three to five words strategic grams: they deduce, branch or go back,
    where other tokens calculate. The text is searched as decoded, since a phrase may be cut into tokens in many ways.
    Case, the kind of apostrophe and the width of blanks do not matter; a phrase matches whole words only. Where two
    match in the same place the longer one counts.

    Args:
        phrases: what to look for, in plain words.

    >>> text = "Let’s  try a smaller case. Letters, wait."
    >>> verdict, = PlanGrams(["let's try", "let's try a smaller case", "wait", "let"])([Sample("", text)])
    >>> verdict.score, [text[span.start : span.stop] for span in verdict.spans]
    (None, ['Let’s  try a smaller case', 'wait'])
    """

    phrases: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.phrases, str) or not self.phrases:
            raise InputError(f"phrases must be a list of at least one phrase, not {self.phrases!r}")
        for phrase in self.phrases:
            if not phrase.strip():
                raise InputError(f"phrases: {phrase!r} is blank and would match everywhere; drop it")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        pattern = phrase_pattern(tuple(self.phrases))
        return [
            Verdict(None, tuple(Span(*match.span(), 1.0, "plan") for match in pattern.finditer(sample.completion)))
            for sample in samples
        ]


@cache
def phrase_pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds any of the phrases as whole words, the longest first."""
    longest_first = sorted({" ".join(phrase.split()) for phrase in phrases}, key=lambda text: (-len(text), text))
    words = (r"\s++".join(map(_word, phrase.split())) for phrase in longest_first)
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", re.I)


def _word(word: str) -> str:
    return "['’]".join(map(re.escape, re.split("['’]", word)))
