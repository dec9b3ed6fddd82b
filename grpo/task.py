"""A problem source: what the trainer draws prompts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Problem", "Task"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Args:
        id: unique within its task; names the random stream of its samples.
        prompt: the text put before the completion (the user's turn where the policy uses a chat template).
        reference: the right answer, or None.
        metadata: further columns; verifiers see them.
    """

    id: str
    prompt: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Problems for training and for two kinds of evaluation. All three are disjoint.

    ``batch`` is a pure function of its arguments, so that a resumed run and another strategy with the same
    seed see the same problems.
    """

    def batch(self, step: int, num_prompts: int, seed: int) -> Sequence[Problem]:
        """The ``num_prompts`` training problems of ``step``."""
        ...

    def held_out(self) -> Sequence[Problem]:
        """Problems of the trained kind that are never trained on."""
        ...

    def retention(self) -> Sequence[Problem]:
        """Problems of a skill that the policy had at the start and is not trained on; may be empty."""
        ...
