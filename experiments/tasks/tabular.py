"""Six token processes small enough for exact values, each with a difficulty of its own for rules of credit.

Every one is a frozen dataclass whose fields are its options and whose ``tables`` are the process. Tokens lead to one
next state, as in text. The outcome is in [0, 1]. A *step* is what a step verifier judges; a perfect one calls it wrong
where it holds a token that is wrong by the task's own truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...verifiers import InputError
from .tabular_moves import Place, check_counts, decision, filler_words
from .tabular_tables import Move, TokenTables, build_tables

__all__ = [
    "ErrorRepairChain",
    "FillerChain",
    "FormatSpan",
    "KeyAndLock",
    "SelfCorrectingChain",
    "UniquePathTree",
]

_LARGEST_TREE = 10_000


@dataclass(frozen=True)
class ErrorRepairChain:
    """Steps of one token each: one choice is right, the others break the answer until a later step repairs it.

    Solved where the answer is not broken at its end. A token is wrong where it breaks an answer that was fine; going on
    in a broken one is not wrong by itself, repairing it is right.

    Args:
        steps: tokens of an answer.
        choices: tokens that a step offers; one is right, and in a broken answer one repairs.
        repair: logit by which a policy leans to the token that repairs, whatever its skill; None: none does, and all
            after the first error is lost. The default makes repairs rarer than right steps, so that errors matter.
    """

    steps: int = 8
    choices: int = 3
    repair: float | None = -1.0

    def __post_init__(self) -> None:
        check_counts(steps=(self.steps, 1), choices=(self.choices, 2))

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables(Place(0), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        return decision(state, state.position + 1 == self.steps, self.choices, self.repair)


@dataclass(frozen=True)
class UniquePathTree:
    """A tree in which one path alone leads to the reward: after the first wrong turn nothing matters any more.

    Every node is a state of its own, so that the policy has nothing to share between beginnings that differ.

    Args:
        depth: turns of an answer.
        branching: ways at every turn.
    """

    depth: int = 5
    branching: int = 3

    def __post_init__(self) -> None:
        check_counts(depth=(self.depth, 1), branching=(self.branching, 2))
        if self.branching**self.depth > _LARGEST_TREE:
            raise InputError(f"task.depth={self.depth}, task.branching={self.branching}: over {_LARGEST_TREE} leaves")

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables((), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        last, on_path = len(state) + 1 == self.depth, not any(state)
        ways = []
        for way in range(self.branching):
            right = on_path and way == 0
            after = None if last else (*state, way)
            reward, wrong = float(last and right), on_path and not right
            ways.append(Move(f"turn{way}", after, reward, float(right), wrong=wrong, solves=last and right))
        return ways


@dataclass(frozen=True)
class FillerChain:
    """An :class:`ErrorRepairChain` in which part of the steps are filler: whatever word is chosen, nothing changes.

    Few of the others can repair: a broken answer goes on without effect until it comes to one (a place where one
    checks).

    Args:
        steps: tokens of an answer, filler included.
        filler: how many of them are filler; they are spread evenly, and the last step is none.
        checks: how many of the steps that are no filler can repair, spread evenly as well.
        choices: tokens that a step offers.
        repair: logit by which a policy leans to repairing at a check, whatever its skill.
        habit: added to the logit of one word of each filler step: text between decisions is predictable.
    """

    steps: int = 12
    filler: int = 6
    checks: int = 1
    choices: int = 3
    repair: float = -1.0
    habit: float = 4.0

    def __post_init__(self) -> None:
        check_counts(steps=(self.steps, 1), filler=(self.filler, 0), checks=(self.checks, 0), choices=(self.choices, 2))
        if self.filler >= self.steps:
            raise InputError(f"task.filler={self.filler}: an answer of {self.steps} steps needs one that is none")

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables(Place(0), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        place, deciding = state.position, self.steps - self.filler
        if (place + 1) * deciding % self.steps >= deciding:
            return filler_words(state._replace(position=place + 1), self.choices, self.habit)
        index = place * deciding // self.steps  # among the steps that decide
        checks = {number * deciding // (self.checks + 1) for number in range(1, self.checks + 1)}
        return decision(state, place + 1 == self.steps, self.choices, self.repair if index in checks else None)


@dataclass(frozen=True)
class KeyAndLock:
    """The first token chooses a key, the last one turns it in the lock; what lies between is filler.

    Solved with the right key and the right turn. The key is long past when it shows whether it was right.

    Args:
        length: tokens of an answer.
        keys: keys to choose from.
        turns: ways to turn a key.
        words: words to choose from at each filler token.
        habit: see :class:`FillerChain`.
    """

    length: int = 10
    keys: int = 3
    turns: int = 2
    words: int = 3
    habit: float = 4.0

    def __post_init__(self) -> None:
        check_counts(length=(self.length, 2), keys=(self.keys, 2), turns=(self.turns, 2), words=(self.words, 1))

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables(Place(0), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        last = state.position + 1 == self.length
        if state.position > 0 and not last:
            return filler_words(state._replace(position=state.position + 1), self.words, self.habit)
        return decision(state, last, self.turns if last else self.keys, repair=None)


class _Page(NamedTuple):
    """Where an answer in tags stands: tokens written, and whether the task and the tags are right so far."""

    position: int
    fine: bool = True
    tagged: bool = True


@dataclass(frozen=True)
class FormatSpan:
    """A task inside two tags: the outcome is a weighted sum of the task and the format, told by two verifiers.

    Each step of the task is some words that copy what is given, which are filler, and a result that is right or breaks
    the answer. The tags belong to no step.

    Args:
        steps: steps of the task.
        words: filler words before the result of a step.
        choices: tokens that each place offers; of the results and of the tags one is right.
        format_weight: share of the format in the outcome, in [0, 1].
        repair: see :class:`ErrorRepairChain`.
        habit: see :class:`FillerChain`.
    """

    steps: int = 4
    words: int = 2
    choices: int = 3
    format_weight: float = 0.3
    repair: float | None = -1.0
    habit: float = 4.0

    def __post_init__(self) -> None:
        check_counts(steps=(self.steps, 1), words=(self.words, 0), choices=(self.choices, 2))
        if not 0 <= self.format_weight <= 1:
            raise InputError(f"task.format_weight={self.format_weight}: is a share, so between 0 and 1")

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables(_Page(0), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        length = self.steps * (self.words + 1)
        if state.position in (0, length + 1):
            return [self._tag(state, state.position > 0, index == 0) for index in range(self.choices)]
        place = (state.position - 1) % (self.words + 1)
        if place < self.words:
            words = filler_words(state._replace(position=state.position + 1), self.choices, self.habit)
            return [word._replace(step="begins" if place == 0 else "continues") for word in words]
        results = decision(state, False, self.choices, self.repair)
        return [result._replace(step="continues" if self.words else "begins") for result in results]

    def _tag(self, state: _Page, closing: bool, right: bool) -> Move:
        tagged, word = state.tagged and right, "[/T]" if closing else "[T]"
        after = None if closing else state._replace(position=1, tagged=tagged)
        reward = (1 - self.format_weight) * state.fine + self.format_weight * tagged if closing else 0.0
        return Move(
            word if right else "(T)",
            after,
            reward,
            lean=float(right),
            wrong=not right,
            malformed=not right,
            solves=closing and state.fine,
            step="none",
        )


class _Draft(NamedTuple):
    """Where a self-correcting answer stands: results written, whether the last one is right, doubts that are left."""

    position: int
    doubts: int
    fine: bool = True
    doubting: bool = False


@dataclass(frozen=True)
class SelfCorrectingChain:
    """Long thoughts: errors are common, and a doubt (wait) followed by a second try often mends them.

    A result on top of a wrong one is wrong as well, unless the answer was doubted first; then the second try decides.
    Steps after the first error are so right as often as not, and what comes before the last error hardly matters: rules
    that blame all from the first error on blame the repairs too. A doubt begins a step of its own and is right.

    Args:
        results: results of an answer, second tries not counted.
        doubts: how often an answer may be doubted.
        choices: tokens that a result offers.
        care: how much a trained policy leans to doubting a wrong result, in units of its lean to right ones.
    """

    results: int = 6
    doubts: int = 3
    choices: int = 3
    care: float = 1.5

    def __post_init__(self) -> None:
        check_counts(results=(self.results, 1), doubts=(self.doubts, 0), choices=(self.choices, 2))

    @cached_property
    def tables(self) -> TokenTables:
        return build_tables(_Draft(0, self.doubts), self._moves)

    def _moves(self, state: Any) -> Sequence[Move]:
        if state.fine or state.doubting:
            return [self._result(state, right=index == 0) for index in range(self.choices)]
        if state.position == self.results:
            follow = [Move("stop", None, wrong=True)]
        else:
            follow = [self._result(state, right=False) for _ in range(self.choices - 1)]
        wait = state._replace(doubts=state.doubts - 1, doubting=True)
        return [*follow, Move("wait", wait, lean=self.care)] if state.doubts else follow

    def _result(self, state: _Draft, *, right: bool) -> Move:
        position = state.position + (not state.doubting)
        ends = position == self.results and (right or not state.doubts)
        after = None if ends else _Draft(position, state.doubts, right)
        word = "right" if right else "slip" if state.fine or state.doubting else "so"
        return Move(word, after, float(ends and right), float(right), wrong=not right, solves=ends and right)
