"""What a verifier sees and what it says: text in, character spans and scores out. No tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Reply", "Sample", "Span", "Verdict", "Verifier"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be judged.

    Args:
        prompt: the problem as text.
        completion: what the policy wrote after it, special tokens removed.
        reference: the right answer, or None where the task has none.
        metadata: columns of the problem, plus ``num_tokens`` and ``truncated`` of the completion.
    """

    prompt: str
    completion: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A judged piece of a completion.

    Args:
        start, stop: half-open range of characters (Unicode code points) in the completion.
        score: the verdict on this piece, on the verifier's scale (1 right, 0 wrong unless it says otherwise).
        label: what was seen, for people ("step", "wrong result").

    >>> Span(0, 5, score=0.0, label="wrong result").score
    0.0
    """

    start: int
    stop: int
    score: float = 0.0
    label: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) is not a half-open range of characters")
        if not math.isfinite(self.score):
            raise ValueError(f"span [{self.start}, {self.stop}) has the score {self.score}; give a finite number")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of one completion.

    Args:
        score: for the whole completion; None where the verifier abstains (never 0 for "don't know").
        spans: judged pieces, in any order; they may leave gaps.
    """

    score: float | None
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a verdict's score is a finite number or None, not {self.score}")


Reply = Verdict | float | int | bool | None


@runtime_checkable
class Verifier(Protocol):
    """A batch of samples in, as many verdicts out. A plain number stands for a verdict without spans, None abstains.

    Callables of TRL's shape, ``(prompts, completions, **columns) -> list[float | None]``, work unchanged
    (see :mod:`apportion.verifiers.panel`). A verifier may further have

    - ``spans = False``, where it never locates its verdicts,
    - ``background = True``, where it waits on processes or the network: it is asked about finished answers while
      others are still being generated, from another thread, one call at a time; it should limit the time of each
      sample itself,
    - ``prepare()``, called once before anything costs time: it loads what is slow to load, and raises an InputError
      where the verifier cannot work.
    """

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Reply]: ...
