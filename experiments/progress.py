"""Progress on the terminal: one bar with the few numbers that matter; elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from .rundir import read_status

__all__ = ["StepProgress", "console"]

SHOWN = {
    "eval/success": "held-out",
    "task/success": "sampled",
    "policy/ref_kl": "KL",
    "length/mean": "length",
    "optim/grad_norm": "grad",
}


class _Cell(Protocol):
    @property
    def folder(self) -> Path: ...


def console() -> Any:
    """Where progress goes: standard error, so that standard output stays clean."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


class StepProgress:
    """A progress bar with named sections on a terminal, lines in a log, nothing where it is not wanted."""

    def __init__(self, visible: bool) -> None:
        self._screen = console() if visible else None
        self._bars: Any = None
        if self._screen is not None and self._screen.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description:11}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._screen,
            )

    def __enter__(self) -> StepProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def section(self, name: str, total: int) -> Callable[[int, float | None], None] | None:
        """A section told (steps done, loss or None), shown from the first call on, and on a terminal only."""
        if self._bars is None:
            return None
        bar = self._bars.add_task(name, total=total, numbers="", visible=False)

        def update(done: int, loss: float | None) -> None:
            numbers = "" if loss is None else f"loss {loss:.3f}"
            self._bars.update(bar, completed=done, numbers=numbers, visible=True)

        return update

    def counting(self, name: str, total: int) -> Callable[[int], None] | None:
        """A section that is told the number of things done."""
        section = self.section(name, total)
        return None if section is None else lambda done: section(done, None)

    def fitting(self) -> Callable[[Mapping[str, float]], None]:
        """A section that is told the figures of :func:`apportion.prm.fitting.fit`; it shows updates and loss."""
        sections: dict[int, Callable[[int, float | None], None] | None] = {}

        def told(figures: Mapping[str, float]) -> None:
            updates = int(figures["updates"])
            if updates not in sections:
                sections[updates] = self.section("training", updates)
            section = sections[updates]
            if section is not None and "train/loss" in figures:
                section(int(figures["update"]), figures["train/loss"])

        return told

    def training(self, total: int) -> Callable[[int, Mapping[str, float]], None] | None:
        """The main section: success (held-out and sampled), KL, length and gradient norm. A log gets evaluations."""
        if self._screen is None:
            return None
        screen, bars = self._screen, self._bars
        bar = None if bars is None else bars.add_task("training", total=total, numbers="")
        latest: dict[str, float] = {}

        def update(step: int, metrics: Mapping[str, float]) -> None:
            latest.update({key: metrics[key] for key in SHOWN if key in metrics})
            numbers = "  ".join(f"{label} {latest[key]:.3g}" for key, label in SHOWN.items() if key in latest)
            if bar is not None:
                bars.update(bar, completed=step, numbers=numbers)
            elif "eval/success" in metrics or step == total:
                screen.print(f"step {step}/{total}  {numbers}", markup=False)

        return update

    @contextlib.contextmanager
    def cells(self, cells: Sequence[_Cell], tick: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While the block runs, watch the cells' folders and count those that are over.

        Args:
            tick: called each second.
        """
        if self._screen is None:
            yield
            return
        bar = None if self._bars is None else self._bars.add_task("cells", total=len(cells), numbers="")
        over, shown = threading.Event(), -1

        def look() -> None:
            nonlocal shown
            states = Counter(read_status(cell.folder).get("state") for cell in cells)
            done = states["finished"] + states["failed"]
            numbers = "  ".join(f"{states[state]} {state}" for state in ("running", "failed") if states[state])
            if bar is not None:
                self._bars.update(bar, completed=done, numbers=numbers)
            elif done > shown and self._screen is not None:
                self._screen.print(f"cells {done}/{len(cells)}  {numbers}", markup=False)
            shown = done

        def watch() -> None:
            while not over.wait(1.0):
                tick()
                look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            look()
