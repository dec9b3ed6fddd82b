"""Progress on the terminal: one bar with the few numbers that matter."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from .rundir import read_status

__all__ = ["StepProgress", "console"]


class _Cell(Protocol):
    @property
    def folder(self) -> Path: ...


def console() -> Any:
    """Where progress goes: standard error, so that standard output stays clean."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class StepProgress:
    """A progress bar with named sections; silent where it is not wanted."""

    def __init__(self, visible: bool) -> None:
        self._progress: Any = None
        if visible:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description:11}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=console(),
            )

    def __enter__(self) -> StepProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def section(self, name: str, total: int) -> Callable[[int, float], None] | None:
        """A section that is told (steps done, loss); it shows from the first call on."""
        if self._progress is None:
            return None
        bar = self._progress.add_task(name, total=total, numbers="", visible=False)

        def update(done: int, loss: float) -> None:
            self._progress.update(bar, completed=done, numbers=f"loss {loss:.3f}", visible=True)

        return update

    def training(self, total: int) -> Callable[[int, Mapping[str, float]], None] | None:
        """The main section: success (held-out and sampled), KL, length and gradient norm."""
        if self._progress is None:
            return None
        bar = self._progress.add_task("training", total=total, numbers="")
        latest: dict[str, float] = {}
        shown = {
            "eval/success": "held-out",
            "task/success": "sampled",
            "policy/ref_kl": "KL",
            "length/mean": "length",
            "optim/grad_norm": "grad",
        }

        def update(step: int, metrics: Mapping[str, float]) -> None:
            latest.update({key: metrics[key] for key in shown if key in metrics})
            numbers = "  ".join(f"{label} {latest[key]:.3g}" for key, label in shown.items() if key in latest)
            self._progress.update(bar, completed=step, numbers=numbers)

        return update

    @contextlib.contextmanager
    def cells(self, plans: Sequence[_Cell], finished: int) -> Iterator[None]:
        """While the block runs, watch the cells' folders and count the finished ones."""
        if self._progress is None:
            yield
            return
        bar = self._progress.add_task("cells", total=len(plans), completed=finished, numbers="")
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                states = [read_status(plan.folder).get("state") for plan in plans]
                numbers = "  ".join(f"{states.count(s)} {s}" for s in ("running", "failed") if s in states)
                done = sum(state in ("finished", "failed") for state in states)
                self._progress.update(bar, completed=done, numbers=numbers)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._progress.update(bar, completed=len(plans), numbers="")
