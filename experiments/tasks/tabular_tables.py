"""Tables of a token process, written down as the moves that each state offers."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...credit.truth import TokenProcess

__all__ = ["Move", "TabularTask", "TokenTables", "build_tables"]


class Move(NamedTuple):
    """One token that a state offers.

    Args:
        word: the token as text.
        after: the next state; None ends the answer.
        reward: earned with the token, so that an answer's rewards sum to its outcome in [0, 1].
        lean: how much a trained policy prefers the token: its logit is higher by this many times the policy's skill.
        habit: added to its logit whatever the skill, for words that follow each other by habit.
        wrong: the token is in error by the task's own truth.
        malformed: the token breaks the format.
        solves: the answer that ends with the token solves the task.
        step: the token begins a step, belongs to the step before it, or to none (a tag).
    """

    word: str
    after: Hashable | None
    reward: float = 0.0
    lean: float = 0.0
    habit: float = 0.0
    wrong: bool = False
    malformed: bool = False
    solves: bool = False
    step: Literal["begins", "continues", "none"] = "begins"


@dataclass(frozen=True)
class TokenTables:
    """A token process with what is known of its tokens; all tables are (X, V), X states, V tokens.

    Args:
        process: transitions and rewards.
        words: the tokens as text; empty where a state does not offer one.
        lean, habit: float64, see :class:`Move`.
        wrong, malformed, solves: bool.
        begins, in_step: bool, the token begins a step; it belongs to one.
    """

    process: TokenProcess
    words: tuple[tuple[str, ...], ...]
    lean: Tensor
    habit: Tensor
    wrong: Tensor
    malformed: Tensor
    solves: Tensor
    begins: Tensor
    in_step: Tensor


class TabularTask(Protocol):
    """A frozen dataclass whose fields are its options; :mod:`.tabular` has six."""

    @property
    def tables(self) -> TokenTables: ...


def build_tables(start: Hashable, moves: Callable[[Hashable], Sequence[Move]]) -> TokenTables:
    """Write every state that can be reached from ``start`` into tables, each before its successors.

    The tokens of a state stand in a fixed random order, so that no token id is the right one everywhere.

    Args:
        start: the state of the bare prompt.
        moves: what a state offers; equal states offer equal moves, and none leads back.

    >>> offers = {"prompt": [Move("go", "end"), Move("stop", None)], "end": [Move("on", None, reward=1.0)]}
    >>> build_tables("prompt", lambda state: offers[state]).process.reward.tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    offers: dict[Hashable, list[Move]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state not in offers:
            offers[state] = _mixed(state, moves(state))
            waiting += [move.after for move in offers[state] if move.after is not None]
    before: dict[Hashable, dict[Hashable, None]] = {state: {} for state in offers}  # ordered, unlike a set
    for state, offered in offers.items():
        for move in offered:
            if move.after is not None:
                before[move.after][state] = None
    order = list(TopologicalSorter(before).static_order())
    number = {state: index for index, state in enumerate(order)}
    rows = [offers[state] for state in order]
    width = max(map(len, rows))

    def table(read: Callable[[Move], float], missing: float = 0.0) -> Tensor:
        padded = [[*map(read, row), *[missing] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.float64)

    process = TokenProcess(
        successor=table(lambda move: -1 if move.after is None else number[move.after], -1).long(),
        reward=table(lambda move: move.reward),
        allowed=table(lambda _: True).bool(),
    )
    return TokenTables(
        process=process,
        words=tuple((*(move.word for move in row), *[""] * (width - len(row))) for row in rows),
        lean=table(lambda move: move.lean),
        habit=table(lambda move: move.habit),
        wrong=table(lambda move: move.wrong).bool(),
        malformed=table(lambda move: move.malformed).bool(),
        solves=table(lambda move: move.solves).bool(),
        begins=table(lambda move: move.step == "begins").bool(),
        in_step=table(lambda move: move.step != "none").bool(),
    )


def _mixed(state: Hashable, offered: Sequence[Move]) -> list[Move]:
    """The moves in an order that the state decides; the same on every machine and in every process."""
    mixed = list(offered)
    random.Random(repr(tuple(state) if isinstance(state, tuple) else state)).shuffle(mixed)
    return mixed
