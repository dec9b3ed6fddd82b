"""Ctrl-C and SIGTERM ask a run to stop at the next safe place; a second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Called, it says whether somebody asked to stop; ``signal_number`` is the signal that did."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __call__(self) -> bool:
        return self.signal_number is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM inside the block; outside the main thread it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
