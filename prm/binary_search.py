"""The first wrong step by bisection (OmegaPRM, arXiv 2406.06592): O(K log M) continuations instead of O(K M).

It assumes that correctness is *monotone*: once a prefix is wrong no continuation of it reaches the right answer, and
before that some do. A policy that mends its own errors breaks the assumption, and so does a right prefix from which it
never succeeds in K tries; the step that is found is then not the first wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .formats import labels_from_first_error
from .labels import Ask, Complete, Labeled, Solution, StepLabels
from .monte_carlo import SuccessCount, Successes, check_options, evidence, passed

__all__ = ["BinarySearch"]


@dataclass(frozen=True)
class BinarySearch:
    """Labels steps up to the first wrong one: 1 before it, 0 at it, None after it.

    All steps of a right answer are right. In a wrong answer the first error lies after the longest prefix that is known
    to succeed and not after the shortest one that fails; the prefix half-way between is continued until they are
    neighbours. Where the search ends at the first step, the bare problem is continued too: if the policy fails from
    there as well, nothing is known of the solution.

    Args:
        answer: verifier of the answer.
        num_samples: K continuations of a prefix.
        threshold: a prefix succeeds where its share of right answers exceeds this; 0 is "any success".
    """

    source: ClassVar[str] = "binary_search"
    continues: ClassVar[bool] = True

    answer: Any
    num_samples: int = 8
    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_options(self.answer, self.num_samples, self.threshold)

    def __call__(self, solutions: Sequence[Solution], ask: Ask, complete: Complete) -> Labeled:
        successes = Successes(self.answer, self.num_samples, ask, complete)
        outcomes = passed(ask(self.answer, [solution.sample for solution in solutions]))
        searches = [_Search(solution, outcome) for solution, outcome in zip(solutions, outcomes)]
        # All searches go on side by side, so that each round is one batch.
        while asking := [search for search in searches if search.wants is not None]:
            counts = successes([(search.solution, search.wants or 0) for search in asking])
            for search, count in zip(asking, counts):
                search.tell(count, self.threshold)
        counts_sampled = successes.counts
        # What sampling from the end of every step of these solutions takes, equal prefixes once there too.
        every = {
            (search.solution.problem_id, search.solution.prefix(count))
            for search in searches
            for count in range(1, len(search.solution.steps) + 1)
            if not search.solution.ends_with(count)
        }
        counts_sampled["continuations at every step"] = len(every) * self.num_samples
        return Labeled([search.labels(self.num_samples) for search in searches], counts_sampled)


@dataclass
class _Search:
    """The search in one solution of M steps.

    Args:
        good: the longest prefix, in steps, that is known or assumed to succeed.
        bad: the shortest that fails; M + 1 stands for text after the last step.
        checked: whether ``good`` is more than an assumption.
        probes: what was sampled, by the number of steps kept.
    """

    solution: Solution
    outcome: bool | None
    good: int = 0
    bad: int = 0
    checked: bool = False
    known: bool = True
    probes: dict[int, SuccessCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_steps = len(self.solution.steps)
        self.known = self.outcome is not None
        self.bad = num_steps if self.solution.ends_with(num_steps) else num_steps + 1

    @property
    def wants(self) -> int | None:
        """The prefix to be continued next, in steps; None where the search is over."""
        if self.outcome is not False or not self.known:
            return None
        if self.bad - self.good > 1:
            return (self.good + self.bad) // 2
        return None if self.checked else 0

    def tell(self, count: SuccessCount, threshold: float) -> None:
        """Take what the prefix in ``wants`` gave."""
        place = self.wants
        assert place is not None
        self.probes[place] = count
        if count.share is None or (place == 0 and not count.share > threshold):
            self.known = False
        elif count.share > threshold:
            self.good, self.checked = place, True
        else:
            self.bad = place

    def labels(self, num_samples: int) -> StepLabels:
        """The labels that follow, with the shares of successes where they were sampled."""
        num_steps = len(self.solution.steps)
        steps: list[SuccessCount | bool | None] = [self.probes.get(count) for count in range(1, num_steps + 1)]
        if num_steps and self.solution.ends_with(num_steps):
            steps[-1] = self.outcome
        found = evidence(steps, num_samples)
        if not self.known:
            return StepLabels((None,) * num_steps, found)
        wrong = None if self.outcome or self.bad > num_steps else self.bad - 1
        return StepLabels(tuple(labels_from_first_error(num_steps, wrong)), found)
