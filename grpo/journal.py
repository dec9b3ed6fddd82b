"""Where a run says how it goes: metrics.jsonl, status.json, further loggers, and whoever watches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .files import write_text
from .metrics import drop_missing
from .records import MetricsFile, drop_rollouts_after
from .state import RunState

__all__ = ["Journal", "Logger", "Unwritten"]


class Logger(Protocol):
    """An optional second home for the metrics, such as TensorBoard."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Journal:
    """The diary of one run in its folder.

    Args:
        folder: run folder; what it holds of steps after ``state.step`` is dropped, all of it where the run is new.
        steps: that the run is to have.
        state: of the run; its counters are written along.
        resumed: the run goes on from a checkpoint.
        loggers: further homes of the metrics.
        on_step: told after every logged step.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        state: RunState,
        *,
        resumed: bool,
        loggers: Sequence[Logger],
        on_step: Callable[[int, Mapping[str, float]], None] | None,
    ) -> None:
        self._folder, self._steps, self._state = folder, steps, state
        self._loggers, self._on_step = loggers, on_step
        self._metrics = MetricsFile(folder / "metrics.jsonl", state.step if resumed else None)
        drop_rollouts_after(folder, (state.step if state.window is None else state.window.step) if resumed else 0)

    @property
    def is_empty(self) -> bool:
        """Nothing was logged yet, not even step 0."""
        return self._metrics.is_empty

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics; those that were not measured are left out."""
        measured = drop_missing(metrics)
        seconds = round(self._state.seconds, 3)
        self._metrics.log({"step": step, "tokens": self._state.tokens, "seconds": seconds, **measured})
        for logger in self._loggers:
            logger.log(step, measured)
        if self._on_step is not None:
            self._on_step(step, measured)

    def status(self, state: str, error: str | None = None) -> None:
        """``running``, ``finished``, ``interrupted`` or ``failed``."""
        status = {
            "state": state,
            "step": self._state.step,
            "steps": self._steps,
            "tokens": self._state.tokens,
            "seconds": round(self._state.seconds, 3),
            "error": error,
        }
        write_text(self._folder / "status.json", json.dumps(status, indent=2) + "\n")

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()


class Unwritten:
    """The journal of a process that leaves the writing to the main one."""

    is_empty = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The main process logs them."""

    def status(self, state: str, error: str | None = None) -> None:
        """The main process tells it."""

    def close(self) -> None:
        """Nothing is open."""
