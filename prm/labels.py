"""Labels for the steps of solutions: from a verifier's spans, where two sources agree, and as rows of a file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol, get_args

from ..verifiers import InputError, Sample, Span, Verdict
from ..verifiers.panel import gives_spans
from .steps import first_error

__all__ = [
    "Ask",
    "Complete",
    "Consensus",
    "Labeled",
    "Labeler",
    "Solution",
    "SpanLabels",
    "StepLabels",
    "first_error_agrees",
    "label_row",
    "labels_from_spans",
    "side",
    "steps_from_spans",
]

Place = tuple[int, int]
Keep = Literal["steps", "solutions"]


@dataclass(frozen=True)
class Solution:
    """A completion to be labelled.

    Args:
        problem_id: solutions of one problem share it.
        sample: prompt, completion and the right answer.
        steps: half-open character ranges in the completion, in order and disjoint.
    """

    problem_id: str
    sample: Sample
    steps: tuple[Place, ...]

    def prefix(self, count: int) -> str:
        """The completion up to the end of step ``count``; of step 0 it is empty."""
        return self.sample.completion[: self.steps[count - 1][1]] if count else ""

    def ends_with(self, count: int) -> bool:
        """Whether nothing but blanks follows step ``count``."""
        return not self.sample.completion[len(self.prefix(count)) :].strip()


@dataclass(frozen=True)
class StepLabels:
    """What a labeler says of one solution.

    Args:
        labels: per step 1, 0, a probability between, or None where it does not know.
        evidence: how they came about, as plain values; lists hold one value a step.
    """

    labels: tuple[float | None, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Labeled:
    """What a labeler says of several solutions.

    Args:
        solutions: in their order.
        counts: numbers to be summed over all calls, such as ``continuations``.
    """

    solutions: list[StepLabels]
    counts: Counter[str] = field(default_factory=Counter)


Ask = Callable[[Any, Sequence[Sample]], Sequence[Verdict]]
"""``(verifier, samples) -> verdicts``; the caller counts faults and gives an abstention for each."""

Complete = Callable[[Sequence[tuple[Solution, int]], int], Sequence[Sequence[Sample]]]
"""``(prefixes, k) -> k whole answers for each``; a prefix is a solution and the number of its first steps kept."""


class Labeler(Protocol):
    """Labels the steps of solutions.

    Args:
        source: its name in the file.
        continues: whether it calls ``complete``, which takes a policy.
    """

    @property
    def source(self) -> str: ...
    @property
    def continues(self) -> bool: ...
    def __call__(self, solutions: Sequence[Solution], ask: Ask, complete: Complete) -> Labeled: ...


@dataclass(frozen=True)
class SpanLabels:
    """Labels from a verifier that judges places: an exact step verifier, a critic, a reward model.

    Args:
        verifier: its spans are scored 1 (right) to 0 (wrong).
        source: name in the file.
    """

    continues: ClassVar[bool] = False

    verifier: Any
    source: str = "exact"

    def __post_init__(self) -> None:
        if not callable(self.verifier):
            raise InputError("verifier: there is none to take labels from; set verifier@verifiers.steps=NAME")
        if not gives_spans(self.verifier):
            raise InputError(f"{type(self.verifier).__name__} judges whole answers and marks no steps; take another")

    def __call__(self, solutions: Sequence[Solution], ask: Ask, complete: Complete) -> Labeled:  # noqa: ARG002
        verdicts = ask(self.verifier, [solution.sample for solution in solutions])
        labels = [
            StepLabels(labels_from_spans(one.sample.completion, one.steps, verdict.spans))
            for one, verdict in zip(solutions, verdicts)
        ]
        return Labeled(labels)


def labels_from_spans(text: str, steps: Sequence[Place], spans: Sequence[Span]) -> tuple[float | None, ...]:
    """Per step the lowest score among the spans that overlap it; None where none does.

    A span of no width or of blanks alone marks a place where something is missing, and judges no step.

    >>> labels_from_spans("1+1=2\\n2+1=4\\nSo 4.", [(0, 5), (6, 11), (12, 17)], [Span(0, 5, 1.0), Span(10, 11, 0.0)])
    (1.0, 0.0, None)
    """
    labels: list[float | None] = [None] * len(steps)
    starts, stops = [start for start, _ in steps], [stop for _, stop in steps]
    for span in spans:
        if not text[span.start : span.stop].strip():
            continue
        if not 0 <= span.score <= 1:
            raise InputError(f"labeler.verifier: a span has the score {span.score}; labels need scores of 0 to 1")
        for step in range(bisect_right(stops, span.start), bisect_left(starts, span.stop)):
            known = labels[step]
            labels[step] = span.score if known is None else min(known, span.score)
    return tuple(labels)


def steps_from_spans(text: str, spans: Sequence[Span]) -> tuple[Place, ...] | None:
    """The steps that a verifier's spans mark, in order; None where they overlap and so are no steps.

    >>> steps_from_spans("1+1=2\\n2+1=4", [Span(6, 11, 0.0), Span(0, 5, 1.0), Span(11, 11, 0.0, "missing")])
    ((0, 5), (6, 11))
    """
    steps = sorted((span.start, span.stop) for span in spans if text[span.start : span.stop].strip())
    overlap = any(before[1] > after[0] for before, after in pairwise(steps))
    return None if overlap else tuple(steps)


@dataclass(frozen=True)
class Consensus:
    """What two sources agree on; the labels are the first one's.

    Labels of continuations measure whether the answer can still be reached, not whether a step is right; a second
    source filters them (arXiv 2501.07301).

    Args:
        first, second: the sources.
        keep: ``steps`` keeps each label whose side of 0.5 both give; ``solutions`` keeps whole solutions in which both
            see the first error at the same step, or none, with the labels up to it.
    """

    first: Labeler
    second: Labeler
    keep: Keep = "steps"

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise InputError(f"keep: {self.keep!r} is unknown; give {' or '.join(get_args(Keep))}")
        if isinstance(self.first, Consensus) or isinstance(self.second, Consensus):
            raise InputError("first, second: a consensus has two plain sources, no other consensus")

    @property
    def source(self) -> str:
        return f"consensus of {self.first.source} and {self.second.source}"

    @property
    def continues(self) -> bool:
        return self.first.continues or self.second.continues

    def __call__(self, solutions: Sequence[Solution], ask: Ask, complete: Complete) -> Labeled:
        first, second = (labeler(solutions, ask, complete) for labeler in (self.first, self.second))
        counts = first.counts + second.counts
        kept = []
        for one, other in zip(first.solutions, second.solutions):
            agrees = first_error_agrees(one.labels, other.labels)
            counts.update(f"pair {side(a)} {side(b)}" for a, b in zip(one.labels, other.labels))
            counts["same first error"] += agrees
            labels = _same_side(one.labels, other.labels) if self.keep == "steps" else _up_to_error(one.labels, agrees)
            counts["kept steps"] += sum(label is not None for label in labels)
            kept.append(StepLabels(labels, {"sources": [self._told(self.first, one), self._told(self.second, other)]}))
        return Labeled(kept, counts)

    @staticmethod
    def _told(labeler: Labeler, said: StepLabels) -> dict[str, Any]:
        return {"label_source": labeler.source, "labels": list(said.labels), **said.evidence}


def side(label: float | None) -> Literal["right", "wrong", "unlabelled"]:
    """A label of 0.5 or more is right.

    >>> side(0.5), side(0.4), side(None)
    ('right', 'wrong', 'unlabelled')
    """
    return "unlabelled" if label is None else "right" if label >= 0.5 else "wrong"


def first_error_agrees(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Whether both labellings see the first error at the same step, or none; one that knows nothing agrees with none.

    >>> first_error_agrees([1.0, 0.25, 0.0], [1.0, 0.0, 1.0]), first_error_agrees([1.0, 1.0], [1.0, 0.0])
    (True, False)
    """
    known = all(any(label is not None for label in labels) for labels in (one, other))
    return known and first_error(one) == first_error(other)


def label_row(solution: Solution, said: StepLabels, **further: Any) -> dict[str, Any]:
    """A row of stepwise supervision from which :func:`apportion.prm.formats.stepwise` restores text, steps and labels.

    Args:
        solution, said: what is written.
        further: columns after those, such as ``label_source``.
    """
    text = solution.sample.completion
    return {
        "problem_id": solution.problem_id,
        "prompt": solution.sample.prompt,
        "completions": [text[start:stop] for start, stop in solution.steps],
        "labels": list(said.labels),
        "completion": text,
        "step_spans": [list(step) for step in solution.steps],
        "reference": solution.sample.reference,
        **further,
        **said.evidence,
    }


def _same_side(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float | None, ...]:
    return tuple(a if side(a) == side(b) else None for a, b in zip(one, other))


def _up_to_error(labels: Sequence[float | None], agrees: bool) -> tuple[float | None, ...]:
    """Labels up to the first error: of what follows it nothing was compared."""
    error = first_error(labels)
    known = 0 if not agrees else len(labels) if error is None else error + 1
    return (*labels[:known], *([None] * (len(labels) - known)))
