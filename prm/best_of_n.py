"""Picking one of N answers by step scores, against majority vote, a random pick and the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from .intervals import RESAMPLES, Interval, bootstrap_samples, percentile_interval

__all__ = [
    "RULES",
    "BestOfN",
    "Candidate",
    "CandidateGroup",
    "aggregate_scores",
    "best_of",
    "majority_vote",
    "measure_best_of_n",
    "oracle",
    "random_pick",
]

Aggregation = Literal["min", "prod", "mean", "last"]
AGGREGATIONS: tuple[Aggregation, ...] = ("min", "prod", "mean", "last")
RULES = (
    "oracle",
    *(f"best_{name}" for name in AGGREGATIONS),
    "majority",
    *(f"weighted_{name}" for name in AGGREGATIONS),
    "random",
)
MOST_SUBSETS = 2_000


@dataclass(frozen=True)
class Candidate:
    """One sampled answer to a problem.

    Args:
        step_scores: probability of "right" for each step.
        answer: its final answer in a normal form, equal for equal answers; None where it gives none.
        correct: whether that answer is right.
    """

    step_scores: tuple[float, ...]
    answer: str | None
    correct: bool


@dataclass(frozen=True)
class CandidateGroup:
    """All sampled answers to one problem."""

    problem_id: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class BestOfN:
    """Accuracy of each rule at each size.

    Args:
        sizes: the N's, rising.
        accuracy: rule -> accuracy at each size, the mean over problems.
        intervals: rule -> its interval over problems at each size.
        problems: how many problems have that many answers; those with fewer are left out of that size.
        excluded: answers without any step score, left out for every rule.
    """

    sizes: tuple[int, ...]
    accuracy: Mapping[str, tuple[float, ...]]
    intervals: Mapping[str, tuple[Interval, ...]]
    problems: tuple[int, ...]
    excluded: int


def aggregate_scores(step_scores: Sequence[float], how: Aggregation) -> float | None:
    """One *log* score for an answer: log of the lowest, of the product, of the mean, or of the last; None of no steps.

    Logs keep products of many steps apart that would all round to 0.

    >>> [round(math.exp(aggregate_scores([0.5, 0.8], how)), 9) for how in ("min", "prod", "mean", "last")]
    [0.5, 0.4, 0.65, 0.8]
    """
    if not step_scores:
        return None
    if how == "prod":
        return math.fsum(map(_log, step_scores))
    if how == "mean":
        return _log(math.fsum(step_scores) / len(step_scores))
    return _log(min(step_scores) if how == "min" else step_scores[-1])


def best_of(scores: Sequence[float], correct: Sequence[bool], n: int) -> float:
    """Expected correctness of the highest score among n of the N answers drawn without replacement; exact.

    The highest of the n has score v in ``C(#<=v, n) - C(#<v, n)`` of ``C(N, n)`` draws; answers that tie at v are
    equally likely to be picked.

    >>> best_of([0.1, 0.9, 0.9, 0.2], [True, True, False, False], 4)
    0.5
    >>> round(best_of([0.1, 0.2, 0.3], [True, False, False], 2), 9)
    0.0
    """
    draws, below, expected = math.comb(len(scores), n), 0, 0.0
    for value in sorted(set(scores)):
        tied = [right for score, right in zip(scores, correct, strict=True) if score == value]
        chance = (math.comb(below + len(tied), n) - math.comb(below, n)) / draws
        expected += chance * sum(tied) / len(tied)
        below += len(tied)
    return expected


def oracle(correct: Sequence[bool], n: int) -> float:
    """Chance that any of n answers drawn without replacement is right: unbiased pass@n (Chen et al. 2021).

    >>> oracle([True, False, False, False], 2)
    0.5
    """
    return 1 - math.comb(len(correct) - sum(correct), n) / math.comb(len(correct), n)


def random_pick(correct: Sequence[bool]) -> float:
    """Expected correctness of one answer picked blindly, whatever the n."""
    return sum(correct) / len(correct)


def majority_vote(
    answers: Sequence[str | None],
    correct: Sequence[bool],
    n: int,
    log_weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
) -> float:
    """Expected correctness of the answer with most votes, or most weight, among n drawn without replacement.

    Answers that tie are equally likely. Answers of None have no vote; where nobody votes the pick is wrong. All
    subsets are counted where there are at most 2,000, else as many drawn with a fixed seed, which is unbiased.

    Args:
        answers, correct: (N,).
        log_weights: (N,) log of each vote's weight; every vote counts the same where left out.

    >>> majority_vote(["a", "a", "b", "b"], [True, True, False, False], 4)
    0.5
    >>> majority_vote(["a", "b", "b"], [True, False, False], 3, [math.log(0.9), math.log(0.2), math.log(0.3)])
    1.0
    """
    named = list(dict.fromkeys(answer for answer in answers if answer is not None))
    if not named:
        return 0.0
    votes = np.array([[answer == name for name in named] for answer in answers], dtype=np.float64)
    logs = np.zeros(len(answers)) if log_weights is None else np.array(log_weights, dtype=np.float64)
    chosen = _subsets(len(answers), n, seed)
    # A share, in case a checker judged one and the same answer differently.
    worth = np.array([np.mean([c for a, c in zip(answers, correct, strict=True) if a == name]) for name in named])
    weights = _relative(np.where(votes.any(axis=1), logs, -math.inf)[chosen])
    polls = (weights[:, :, None] * votes[chosen]).sum(axis=1)
    most = polls.max(axis=1, keepdims=True)
    winners = (polls >= most * (1 - 1e-12)) & (most > 0)  # sums in another order differ in the last digit
    return float(np.mean(winners @ worth / np.maximum(winners.sum(axis=1), 1)))


def measure_best_of_n(
    groups: Sequence[CandidateGroup],
    sizes: Sequence[int] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> BestOfN:
    """Accuracy of every rule of :data:`RULES` at each size, with intervals over problems.

    Args:
        groups: one for each problem.
        sizes: the N's; 1, 2, 4, ... up to the largest group, and that, where left out.
    """
    known = [tuple(c for c in group.candidates if c.step_scores) for group in groups]
    excluded = sum(len(group.candidates) for group in groups) - sum(map(len, known))
    largest = max(map(len, known), default=0)
    wanted = sorted(set(sizes)) if sizes is not None else [*_powers_below(largest), *([largest] if largest else [])]
    accuracy: dict[str, list[float]] = {rule: [] for rule in RULES}
    intervals: dict[str, list[Interval]] = {rule: [] for rule in RULES}
    problems = []
    for n in wanted:
        values = np.array([_rules(candidates, n, seed) for candidates in known if len(candidates) >= n])
        values = values.reshape(-1, len(RULES))
        problems.append(len(values))
        samples = bootstrap_samples(_mean_of(values), len(values), resamples=resamples, seed=seed)
        for place, rule in enumerate(RULES):
            accuracy[rule].append(float(values[:, place].mean()) if len(values) else math.nan)
            intervals[rule].append(percentile_interval(samples[:, place], len(values)))
    return BestOfN(
        tuple(wanted),
        {rule: tuple(row) for rule, row in accuracy.items()},
        {rule: tuple(row) for rule, row in intervals.items()},
        tuple(problems),
        excluded,
    )


def _rules(candidates: Sequence[Candidate], n: int, seed: int) -> list[float]:
    """Expected correctness under each rule of :data:`RULES`, in its order."""
    correct, answers = [c.correct for c in candidates], [c.answer for c in candidates]
    values = {
        "oracle": oracle(correct, n),
        "random": random_pick(correct),
        "majority": majority_vote(answers, correct, n, seed=seed),
    }
    for how in AGGREGATIONS:
        scores = [score for c in candidates if (score := aggregate_scores(c.step_scores, how)) is not None]
        values[f"best_{how}"] = best_of(scores, correct, n)
        values[f"weighted_{how}"] = majority_vote(answers, correct, n, scores, seed=seed)
    return [values[rule] for rule in RULES]


def _mean_of(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda weights: weights @ values / (weights.sum() or math.nan)


def _subsets(count: int, n: int, seed: int) -> np.ndarray:
    """(S, n) rows of n of the ``count`` answers: all of them, or a random choice of as many as are affordable."""
    if math.comb(count, n) <= MOST_SUBSETS:
        return np.array(list(combinations(range(count), n)), dtype=np.int64)
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((MOST_SUBSETS, count)), axis=1)[:, :n]


def _relative(logs: np.ndarray) -> np.ndarray:
    """Weights over the largest one of their row, which leaves every comparison as it is; all alike where all are 0.

    Over that of all answers the weights of a whole row could round to 0, and no answer of it would win.
    """
    top = logs.max(axis=1, keepdims=True)
    return np.exp(np.where(np.isfinite(top), logs, 0.0) - np.where(np.isfinite(top), top, 0.0))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _powers_below(largest: int) -> list[int]:
    return [2**k for k in range(largest.bit_length()) if 2**k < largest]
