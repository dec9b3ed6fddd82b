"""Exact verifiers of chained modular arithmetic, the embedded task.

The prompt ``7+9-a*1=?`` is worked from left to right, modulo 11, with the digits 0-9 and a (ten). The answer is ::

    [T]7+9=5
    5-a=6
    6*1=6
    [/T][A]6[/A]

Each line is judged given the result that the line before *stated*, so that one error does not make later steps wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
_LINE = re.compile(r"([0-9a])([-+*])([0-9a])=([0-9a])")
_TAIL = re.compile(r"\[/T\]\[A\]([0-9a])\[/A\]")
_ANSWER = re.compile(r"\[A\]([0-9a])\[/A\]")
_TAG = re.compile(r"\[/?[TA]\]")
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
        raise InputError(f"chain verifier: the prompt {prompt[:60]!r} is not a chain such as '7+9-a*1=?'")
    rest = match[2]
    return match[1], [(rest[i], rest[i + 1]) for i in range(0, len(rest), 2)]


@dataclass(frozen=True)
class _Part:
    """A piece of the completion: where, right or not, and what is wrong with it."""

    start: int
    stop: int
    fault: str = ""

    def span(self, label: str) -> Span:
        return Span(self.start, self.stop, score=0.0 if self.fault else 1.0, label=self.fault or label)


@dataclass(frozen=True)
class _Step:
    """One line, or the tail, with its judged parts."""

    start: int
    stop: int
    parts: tuple[_Part, ...]

    def span(self, label: str) -> Span:
        fault = next((part.fault for part in self.parts if part.fault), "")
        return _Part(self.start, self.stop, fault).span(label)


def _read(prompt: str, text: str) -> list[_Step]:
    """The lines and the tail of a completion, each part judged."""
    first, operations = parse_prompt(prompt)
    begin = 3 if text.startswith("[T]") else 0
    close = text.find("[/T]", begin)
    end = close if close >= 0 else len(text)
    steps: list[_Step] = []
    stated: str | None = first
    for number, (start, stop) in enumerate(_lines(text, begin, end)):
        wanted = operations[number] if number < len(operations) else None
        step, stated = _judge_line(text, start, stop, stated, wanted)
        steps.append(step)
    steps.append(_judge_tail(text, end, stated, missing=len(steps) < len(operations)))
    return steps


def _lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        newline = text.find("\n", begin, end)
        stop = end if newline < 0 else newline
        yield (begin, stop) if stop > begin else (begin, begin + 1)  # an empty line is judged by its line break
        begin = stop + 1


def _judge_line(
    text: str, start: int, stop: int, stated: str | None, wanted: tuple[str, str] | None
) -> tuple[_Step, str | None]:
    match = _LINE.fullmatch(text, start, stop)
    if match is None:
        return _Step(start, stop, (_Part(start, stop, "malformed step"),)), None
    left, operator, right, result = match.groups()
    if wanted is None:
        return _Step(start, stop, (_Part(start, stop, "extra step"),)), result
    faults = (
        "" if stated in (None, left) else "wrong left operand",
        "" if operator == wanted[0] else "wrong operator",
        "" if right == wanted[1] else "wrong right operand",
        "" if result == apply(operator, left, right) else "wrong result",
    )
    places = (start, start + 1, start + 2, start + 4)
    return _Step(start, stop, tuple(_Part(p, p + 1, fault) for p, fault in zip(places, faults))), result


def _judge_tail(text: str, start: int, stated: str | None, *, missing: bool) -> _Step:
    match = _TAIL.fullmatch(text, start)
    if missing:
        # The close came too early: blame the close itself, or, where there is none, the end (an empty span).
        return _Step(start, len(text), (_Part(start, min(start + 4, len(text)), "missing step"),))
    if match is None:
        return _Step(start, len(text), (_Part(start, len(text), "malformed answer"),))
    answer = match.start(1)
    fault = "" if stated in (None, match[1]) else "answer differs from the last result"
    parts = (_Part(start, start + 4), _Part(start + 4, answer), _Part(answer, answer + 1, fault))
    return _Step(start, len(text), (*parts, _Part(answer + 1, len(text))))


@dataclass(frozen=True)
class ChainSteps:
    """Every line and the tail, each right (1) or wrong (0); the score is the share of right ones."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        spans = tuple(step.span("step") for step in _read(sample.prompt, sample.completion))
        return Verdict(sum(span.score for span in spans) / len(spans), spans)


@dataclass(frozen=True)
class ChainTruth:
    """The task's truth: the very characters that are right or wrong. For the oracle and for measuring credit."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        steps = _read(sample.prompt, sample.completion)
        spans = tuple(part.span("right") for step in steps for part in step.parts)
        return Verdict(float(all(span.score for span in spans)), spans)


@dataclass(frozen=True)
class ChainAnswer:
    """1 for the right answer, else 0, with the answer's place.

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
    """1 for the exact layout, else 0; spans are the tags, the misplaced ones and the place of a missing one at 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample.completion) for sample in samples]

    def _judge(self, text: str) -> Verdict:
        right = _STRICT.fullmatch(text) is not None
        spans, expected = [], ["[T]", "[/T]", "[A]", "[/A]"]
        for tag in _TAG.finditer(text):
            in_order = bool(expected) and tag[0] == expected[0]
            if in_order:
                expected.pop(0)
            spans.append(Span(tag.start(), tag.end(), float(in_order), "tag" if in_order else f"misplaced {tag[0]}"))
        if expected:
            spans.append(Span(len(text), len(text), 0.0, f"missing {expected[0]}"))
        elif not right and all(span.score for span in spans):
            spans.append(Span(*_stray(text), 0.0, "stray text"))
        return Verdict(float(right), tuple(spans))


def _stray(text: str) -> tuple[int, int]:
    """Where the layout breaks although the tags are in order."""
    close, answer, end = text.index("[/T]"), text.index("[A]"), text.index("[/A]")
    if not text.startswith("[T]"):
        return 0, text.index("[T]")
    if answer != close + 4:
        return close + 4, answer
    if end + 4 != len(text):
        return end + 4, len(text)
    if _ANSWER.fullmatch(text, answer) is None:
        return answer, end + 4
    return 3, close + 4


@dataclass(frozen=True)
class ChainReversal:
    """The retention skill: 1 where the completion is exactly ``[A]<reference>[/A]``."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(float(s.completion == f"[A]{s.reference}[/A]")) for s in samples]
