"""One solution cut into steps, with a label for each: what reward models are trained and measured on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

__all__ = ["StepExample", "first_error"]


@dataclass(frozen=True)
class StepExample:
    """A completion, its steps as character spans, and what is known of each.

    Args:
        prompt: the problem as text.
        completion: the solution; steps are cut out of it and never glued together anew.
        steps: half-open character ranges in the completion: in order, disjoint, not empty.
        labels: per step the probability that it is right: 1, 0, or a soft label between; None where nobody knows.
        problem_id: examples of one problem share it; splits and intervals go by it.
        metadata: further columns of the row.

    >>> StepExample("1+1+1=?", "1+1=2\\n2+1=4", ((0, 5), (6, 11)), (1.0, 0.0), "p1").step_texts
    ['1+1=2', '2+1=4']
    """

    prompt: str
    completion: str
    steps: tuple[tuple[int, int], ...]
    labels: tuple[float | None, ...]
    problem_id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.labels):
            raise ValueError(f"{len(self.steps)} steps and {len(self.labels)} labels")
        edges = [0, *(edge for step in self.steps for edge in step), len(self.completion)]
        if any(left > right for left, right in pairwise(edges)) or any(start == stop for start, stop in self.steps):
            raise ValueError("steps must be in order, disjoint, not empty and inside the completion")
        for label in self.labels:
            if label is not None and not (math.isfinite(label) and 0 <= label <= 1):
                raise ValueError(f"label {label} is not between 0 and 1")

    @property
    def step_texts(self) -> list[str]:
        """The steps as texts, in order."""
        return [self.completion[start:stop] for start, stop in self.steps]


def first_error(labels: Sequence[float | None], threshold: float = 0.5) -> int | None:
    """Index of the first step whose label is below the threshold; None where no step is.

    >>> first_error([1.0, 0.2, None, 0.0]), first_error([0.9, None])
    (1, None)
    """
    return next((step for step, label in enumerate(labels) if label is not None and label < threshold), None)
