"""A format score for numbered steps that cannot be farmed with empty ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from .errors import InputError
from .segmenters import NumberedSteps
from .verdict import Sample, Span, Verdict

__all__ = ["StepMarkers"]

_STEP_WORD = {"step": r"step[ \t]*+", "list": ""}


@dataclass(frozen=True)
class StepMarkers:
    """``min(1, n / wanted)`` for n numbered steps; only those with text and a higher number than all before count.

    Words such as "First" and "Finally" are no markers: they would pay for a list of empty ones. Steps that count get
    a span of score 1, the others one of score 0. Steps in fenced code are none.

    Args:
        wanted: steps for the full score.
        mode: ``step`` reads "Step 3:" at the start of a line, ``list`` reads "3." (see
            :class:`apportion.verifiers.segmenters.NumberedSteps`).

    >>> text = "Step 1: halve it.\\nStep 2:\\nStep 2: add 1."
    >>> verdict, = StepMarkers(wanted=4)([Sample("", text)])
    >>> verdict.score, [span.label for span in verdict.spans]
    (0.5, ['step', 'step without text', 'step'])
    """

    wanted: int = 3
    mode: Literal["step", "list"] = "step"

    def __post_init__(self) -> None:
        NumberedSteps(self.mode)
        if self.wanted < 1:
            raise InputError(f"wanted: {self.wanted} steps cannot be counted; give 1 or more")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample.completion) for sample in samples]

    def _judge(self, text: str) -> Verdict:
        spans: list[Span] = []
        pattern = _marker_pattern(self.mode)
        highest = (0, "")
        for start, stop in NumberedSteps(self.mode)(text):
            marker = pattern.match(text, start, stop)
            if marker is None:  # the whole text, where no step is numbered
                continue
            digits = marker["number"].lstrip("0")
            number = (len(digits), digits)  # as a number, of any length
            fault = "" if number > highest else "number does not rise"
            if not any(map(str.isalnum, text[marker.end() : stop])):
                fault = "step without text"
            highest = highest if fault else number
            spans.append(Span(start, stop, float(not fault), fault or "step"))
        return Verdict(min(1.0, sum(span.score for span in spans) / self.wanted), tuple(spans))


@cache
def _marker_pattern(mode: str) -> re.Pattern[str]:
    """The number of a step, and further ones that follow it in place of a text."""
    mark = rf"[ \t#*_]*+{_STEP_WORD[mode]}{{}}[ \t]*+[.):*_]++\s*+"
    return re.compile(rf"{mark.format('(?P<number>[0-9]++)')}(?:{mark.format('[0-9]++')})*+", re.I)
