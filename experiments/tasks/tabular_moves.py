"""Moves that several tabular tasks share: steps that decide, and filler."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from ...verifiers import InputError
from .tabular_tables import Move

__all__ = ["Place", "check_counts", "decision", "filler_words"]


class Place(NamedTuple):
    """Where an answer stands: the token or step that comes next, and whether all is well so far."""

    position: int
    fine: bool = True


def decision(state: Any, last: bool, choices: int, repair: float | None) -> list[Move]:
    """Tokens of a step that decides: the first one is right, or repairs; the others break the answer, or go on.

    Where nothing can be repaired a policy goes on with the first one as surely as if all were well.

    Args:
        state: has ``position`` and ``fine``, like :class:`Place`.
        last: the answer ends with this step, and is solved if it is fine then.
        choices: tokens to choose from.
        repair: logit by which a policy leans to the token that repairs; None: a broken answer stays broken.
    """
    moves = []
    for index in range(choices):
        fine = index == 0 and (state.fine or repair is not None)
        right, other = ("right", f"slip{index}") if state.fine else ("mend", f"on{index}")
        mends = fine and not state.fine
        moves.append(
            Move(
                right if fine else other,
                after=None if last else state._replace(position=state.position + 1, fine=fine),
                reward=float(last and fine),
                lean=float(index == 0 and not mends),
                habit=repair or 0.0 if mends else 0.0,
                wrong=state.fine and not fine,
                solves=last and fine,
            )
        )
    return moves


def filler_words(after: Hashable, words: int, habit: float) -> list[Move]:
    """Words that all lead to the same state; ``habit`` is added to the logit of the first one."""
    return [Move(f"um{index}", after, habit=habit if index == 0 else 0.0) for index in range(words)]


def check_counts(**counts: tuple[int, int]) -> None:
    """Refuse an option of a task, given as its value and the least that it may be.

    >>> check_counts(steps=(0, 1))
    Traceback (most recent call last):
    apportion.verifiers.errors.InputError: task.steps=0: must be 1 or more
    """
    for name, (value, least) in counts.items():
        if value < least:
            raise InputError(f"task.{name}={value}: must be {least} or more")
