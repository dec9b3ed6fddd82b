"""Exact verifiers of chained modular arithmetic, the embedded task.

The prompt ``7+9-a*1=?`` is worked from left to right, modulo 11, with the digits 0-9 and a (ten). The answer is ::

    [T]7+9=5
    5-a=6
    6*1=6
    [/T][A]6[/A]

Each line is judged given the result that the line before *stated*, and lines are matched to the prompt's steps by a
shortest edit, so that one error does not make later steps wrong. Every step and the tail are right if and only if the
answer is, character for character, the one above.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .chain_reading import TAGS, Part, layout, read_steps
from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = [
    "DIGITS",
    "MODULUS",
    "ChainAnswer",
    "ChainFormat",
    "ChainReversal",
    "ChainSteps",
    "ChainTruth",
    "apply",
    "parse_prompt",
]

DIGITS = "0123456789a"
MODULUS = len(DIGITS)
OPERATORS = "+-*"
_PROMPT = re.compile(r"([0-9a])((?:[-+*][0-9a])+)=\?")
_ANSWER = re.compile(r"\[A\]([0-9a])\[/A\]")
_BRACKET = re.compile(r"\[/?[TA]\]|[\[\]]")
_STRICT = re.compile(r"\[T\](?:[^\n\[\]]+\n)+\[/T\]\[A\][0-9a]\[/A\]")


def apply(operator: str, left: str, right: str) -> str:
    """One operation modulo 11 on digits.

    >>> apply("+", "7", "9"), apply("-", "5", "a"), apply("*", "6", "1")
    ('5', '6', '6')
    """
    x, y = DIGITS.index(left), DIGITS.index(right)
    value = x + y if operator == "+" else x - y if operator == "-" else x * y
    return DIGITS[value % MODULUS]


def parse_prompt(prompt: str) -> tuple[str, list[tuple[str, str]]]:
    """First digit and the (operator, digit) steps.

    >>> parse_prompt("7+9-a=?")
    ('7', [('+', '9'), ('-', 'a')])
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise InputError(
            f"the prompt {prompt[:60]!r} is not a chain such as '7+9-a*1=?', as the chain verifiers need; for other "
            "problems use verifier@verifiers.answer=number and verifier@verifiers.steps=arithmetic"
        )
    rest = match[2]
    return match[1], [(rest[i], rest[i + 1]) for i in range(0, len(rest), 2)]


@dataclass(frozen=True)
class ChainSteps:
    """Every line and the tail, each right (1) or wrong (0).

    The score is the share of right ones among those written and those left out: skipping a step does not raise it.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        steps, missing = read_steps(sample.completion, *parse_prompt(sample.prompt), apply)
        spans = tuple(step.span("step") for step in steps)
        return Verdict(sum(span.score for span in spans) / (len(spans) + missing), spans)


@dataclass(frozen=True)
class ChainTruth:
    """The task's truth: the very characters that are right or wrong. For the oracle and for measuring credit.

    The score is 1 for the one right answer, else 0.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        steps, _ = read_steps(sample.completion, *parse_prompt(sample.prompt), apply)
        spans = tuple(part.span("right") for step in steps for part in step.parts)
        return Verdict(float(all(span.score for span in spans)), spans)


@dataclass(frozen=True)
class ChainAnswer:
    """1 for the right answer, else 0, with the answer's place; the last answer counts.

    Args:
        strict: the whole format must be right as well; without it, outcome training erodes the format.
    """

    strict: bool = True

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        if sample.reference is None:
            return Verdict(None)
        answers = list(_ANSWER.finditer(sample.completion))
        if not answers:
            return Verdict(0.0)
        right = answers[-1][1] == sample.reference
        if self.strict:
            right = right and _STRICT.fullmatch(sample.completion) is not None
        start, stop = answers[-1].span(1)
        return Verdict(float(right), (Span(start, stop, float(right), "answer"),))


@dataclass(frozen=True)
class ChainFormat:
    """1 for the exact layout of tags and lines, else 0, whatever the lines say.

    Spans are the tags at 1, and at 0 what does not belong, or what stands where something is missing.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample.completion) for sample in samples]

    def _judge(self, text: str) -> Verdict:
        page = layout(text)
        lines = (fault for start, stop in page.lines for fault in _line_faults(text, start, stop))
        parts = [*page.opening, *lines, *page.tail]
        spans = tuple(p.span("tag") for p in parts if p.fault or text[p.start : p.stop] in TAGS)
        return Verdict(float(all(span.score for span in spans)), spans)


def _line_faults(text: str, start: int, stop: int) -> list[Part]:
    """What must not stand in a line: nothing at all, and brackets."""
    if text[start:stop] == "\n":
        return [Part(start, stop, "empty line")]
    return [Part(*bracket.span(), f"misplaced {bracket[0]}") for bracket in _BRACKET.finditer(text, start, stop)]


@dataclass(frozen=True)
class ChainReversal:
    """The retention skill: 1 where the completion is exactly ``[A]<reference>[/A]``."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(float(s.completion == f"[A]{s.reference}[/A]")) for s in samples]
