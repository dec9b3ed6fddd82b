"""Step labels by continuations: how often the policy still reaches the right answer from the end of a step.

Such a label (arXiv 2312.08935) estimates the *value* of a prefix, V(s) = P(right answer | s), under this policy. It is
low for a right step from which the policy fails, and high for a wrong one that it mends (arXiv 2501.07301).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..verifiers import InputError, Sample, Verdict
from .labels import Ask, Complete, Labeled, Solution, StepLabels

__all__ = ["MonteCarlo", "SuccessCount", "Successes", "check_options", "evidence", "passed"]


@dataclass(frozen=True)
class SuccessCount:
    """Right answers among the continuations of a prefix.

    Args:
        right: continuations with the right answer.
        judged: continuations of which the verifier gave a verdict; the others count for nothing.

    >>> count = SuccessCount(2, 8)
    >>> count.share, round(count.standard_error, 4)
    (0.25, 0.1531)
    """

    right: int
    judged: int

    @property
    def share(self) -> float | None:
        """p = right / judged; None where nothing was judged."""
        return self.right / self.judged if self.judged else None

    @property
    def standard_error(self) -> float | None:
        """``sqrt(p (1 - p) / K)``. It is 0 at p = 0 and 1, where V may still be as far off as 3 / K."""
        p = self.share
        return None if p is None else math.sqrt(p * (1 - p) / self.judged)


class Successes:
    """Counts successes from prefixes; equal prefixes of one problem are sampled once.

    Args:
        answer: verifier of the answer; a score of 0.5 or more is a success, None counts for nothing.
        num_samples: K continuations of each prefix.
        ask, complete: see :mod:`apportion.prm.labels`.

    The attribute ``known`` holds what was sampled, by problem and prefix.
    """

    def __init__(self, answer: Any, num_samples: int, ask: Ask, complete: Complete) -> None:
        self._answer, self._num_samples, self._ask, self._complete = answer, num_samples, ask, complete
        self.known: dict[tuple[str, str, str], SuccessCount] = {}

    def __call__(self, prefixes: Sequence[tuple[Solution, int]]) -> list[SuccessCount]:
        """One count for each prefix: a solution and the number of its first steps kept."""
        keys = [_key(solution, count) for solution, count in prefixes]
        new = {key: prefix for key, prefix in reversed(list(zip(keys, prefixes))) if key not in self.known}
        wanted = [key for key in dict.fromkeys(keys) if key in new]
        if wanted:
            endings = self._complete([new[key] for key in wanted], self._num_samples)
            verdicts = iter(passed(self._ask(self._answer, [sample for group in endings for sample in group])))
            for key, group in zip(wanted, endings, strict=True):
                told = [right for right in (next(verdicts) for _ in group) if right is not None]
                self.known[key] = SuccessCount(sum(told), len(told))
        return [self.known[key] for key in keys]

    @property
    def counts(self) -> Counter[str]:
        """Prefixes and continuations sampled, and how many of the latter nobody could judge."""
        continuations = len(self.known) * self._num_samples
        judged = sum(count.judged for count in self.known.values())
        return Counter(prefixes=len(self.known), continuations=continuations, unjudged=continuations - judged)


@dataclass(frozen=True)
class MonteCarlo:
    """Labels every step by K continuations from its end.

    A step that ends the answer is not continued: its label is whether the answer is right.

    Args:
        answer: verifier of the answer.
        num_samples: K.
        threshold: None gives soft labels, the share p of successes; a number gives hard ones, 1 where p exceeds it. 0
            is "any success" (arXiv 2312.08935, 2501.07301).
    """

    source: ClassVar[str] = "monte_carlo"
    continues: ClassVar[bool] = True

    answer: Any
    num_samples: int = 8
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_options(self.answer, self.num_samples, self.threshold)

    def __call__(self, solutions: Sequence[Solution], ask: Ask, complete: Complete) -> Labeled:
        successes = Successes(self.answer, self.num_samples, ask, complete)
        outcomes = passed(ask(self.answer, [solution.sample for solution in solutions]))
        places = [
            (solution, count)
            for solution in solutions
            for count in range(1, len(solution.steps) + 1)
            if not solution.ends_with(count)
        ]
        told = iter(successes(places))
        labelled = []
        for solution, outcome in zip(solutions, outcomes):
            counts = [
                outcome if solution.ends_with(count) else next(told) for count in range(1, len(solution.steps) + 1)
            ]
            labels = tuple(self._label(count) for count in counts)
            labelled.append(StepLabels(labels, evidence(counts, self.num_samples)))
        return Labeled(labelled, successes.counts)

    def _label(self, count: SuccessCount | bool | None) -> float | None:
        share = count.share if isinstance(count, SuccessCount) else count
        if share is None:
            return None
        return float(share) if self.threshold is None else float(share > self.threshold)


def passed(verdicts: Sequence[Verdict]) -> list[bool | None]:
    """Whether each answer is right: a score of 0.5 or more; None where the verifier abstains.

    >>> passed([Verdict(1.0), Verdict(0.0), Verdict(None)])
    [True, False, None]
    """
    return [None if verdict.score is None else verdict.score >= 0.5 for verdict in verdicts]


def evidence(counts: Sequence[SuccessCount | bool | None], num_samples: int) -> dict[str, Any]:
    """Columns about a solution's steps.

    Args:
        counts: per step its continuations; or the outcome, which needs none; or None where nothing was sampled.
        num_samples: K asked for.

    >>> evidence([SuccessCount(2, 8), True], 8)["success_shares"]
    [0.25, 1.0]
    """
    sampled = [count if isinstance(count, SuccessCount) else None for count in counts]
    shares = [count.share if isinstance(count, SuccessCount) else count for count in counts]
    errors = [
        count.standard_error if isinstance(count, SuccessCount) else None if count is None else 0.0 for count in counts
    ]
    return {
        "k": num_samples,
        "success_shares": [None if share is None else float(share) for share in shares],
        "standard_errors": errors,
        "num_samples": [0 if count is None else count.judged for count in sampled],
    }


def check_options(answer: Any, num_samples: int, threshold: float | None) -> None:
    """Refuse options under which no label can be made."""
    if not callable(answer):
        raise InputError("answer: there is no verifier of the answer; set verifier@verifiers.answer=NAME")
    if num_samples < 1:
        raise InputError(f"num_samples={num_samples}: must be at least 1")
    if threshold is not None and not 0 <= threshold < 1:
        raise InputError(f"threshold={threshold}: is a share of successes to be exceeded; give 0 <= threshold < 1")


def _key(solution: Solution, count: int) -> tuple[str, str, str]:
    sample: Sample = solution.sample
    return solution.problem_id, sample.prompt, solution.prefix(count)
