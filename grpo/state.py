"""Everything that changes while a run goes on, and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..credit import CreditStrategy
from ..credit.adaptive import load_state, state_of
from ..verifiers import InputError
from .checkpoint import global_rng_state, restore_global_rng
from .files import one_line
from .scorers import LearningScorer
from .sharding import load_optimizer, optimizer_state
from .window import Window

__all__ = ["RunState"]


@dataclass
class RunState:
    """The moment that a run has reached, the weights aside.

    Args:
        optimizer, schedule: of the weights that learn.
        strategy: what it has learned, where it adapts (see :mod:`apportion.credit.adaptive`).
        step: rollout batches that are done with.
        tokens: generated so far, the batch in progress included.
        seconds: of wall time so far.
        skipped: updates left out because a number was not finite.
        window: the rollout batch in progress.
        scorers: those that learn, by name.
        torn: scorers may have learned from a rollout batch that is no window yet; not a moment to be saved.
        alarms: what the latest rollout batches gave, see :mod:`apportion.grpo.alarms`.
    """

    optimizer: Any
    schedule: Any
    strategy: CreditStrategy
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: Window | None = None
    scorers: Mapping[str, LearningScorer] = field(default_factory=dict)
    torn: bool = False
    alarms: list[tuple[float, float]] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Something is there to go on from: at least a sampled rollout batch."""
        return self.step > 0 or self.window is not None

    @property
    def is_sound(self) -> bool:
        """A moment to go on from."""
        return self.has_begun and not self.torn

    @property
    def name(self) -> str:
        """Of a checkpoint of this moment."""
        return f"step_{self.step:06d}" + ("" if self.window is None else f"_update_{self.window.done:04d}")

    def content(self) -> dict[str, Any]:
        """What a checkpoint of this moment holds, the window in progress and every global generator included.

        All processes take part, since each may have a part of the optimiser's state only.
        """
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "optimizer": optimizer_state(self.optimizer),
            "schedule": self.schedule.state_dict(),
            "strategy": state_of(self.strategy),
            "scorers": {name: scorer.state_dict() for name, scorer in self.scorers.items()},
            "alarms": [list(entry) for entry in self.alarms],
            "rng": global_rng_state(),
            "window": None if self.window is None else self.window.state(),
        }

    def restore(self, state: Mapping[str, Any], path: Path) -> None:
        """Go to the moment of a checkpoint, global generators included: nothing may be seeded after it.

        Args:
            state: its :meth:`content`.
            path: where it lies, for messages.
        """
        try:
            self.step, self.tokens, self.skipped = state["step"], state["tokens"], state["skipped"]
            self.seconds = state["seconds"]
            load_optimizer(self.optimizer, state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.window = None if state["window"] is None else Window.from_state(state["window"])
            load_state(self.strategy, state["strategy"])
            self.alarms = [(prm, reference) for prm, reference in state["alarms"]]
            if state["scorers"].keys() != self.scorers.keys():
                raise ValueError(f"scorers that learn: it has {sorted(state['scorers'])}, not {sorted(self.scorers)}")
            for name, scorer in self.scorers.items():
                scorer.load_state_dict(state["scorers"][name])
            restore_global_rng(state["rng"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"checkpoint {path} is of another kind of run or another version ({type(error).__name__}: "
                f"{one_line(error)}); start again in another run.dir"
            ) from error
