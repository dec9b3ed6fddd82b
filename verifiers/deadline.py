"""A wall-clock limit on a call of somebody's verifier, so that one that hangs does not hang the run."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["call_within"]

Result = TypeVar("Result")


class _Expired(BaseException):
    """Raised inside the call; no ``except Exception`` of a verifier swallows it."""


def call_within(function: Callable[[], Result], seconds: float | None) -> Result:
    """The function's result; ``TimeoutError`` where it takes longer than ``seconds`` (None: no limit).

    In the main thread a timer signal interrupts the call, also inside ``time.sleep``, a pure Python loop or a regular
    expression. A verifier that sets the same signal itself (``signal.alarm``) takes the limit off; it has its own. In
    any other thread, and where there is no such signal, the call runs in a daemon thread that is left behind when the
    time is up. What never gives the interpreter back (one huge power, a C library) can only be killed from outside:
    :mod:`apportion.verifiers.isolated`.

    >>> call_within(lambda: "done", seconds=5)
    'done'
    """
    if seconds is None or math.isinf(seconds):
        return function()
    try:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _alarm(seconds):
                return function()
        return _in_daemon(function, seconds)
    except _Expired:
        raise TimeoutError(f"gave no answer in {seconds:g} s") from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    # It fires again each second: a bare ``except:`` in a loop must not get away with the first one.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_daemon(function: Callable[[], Result], seconds: float) -> Result:
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="verifier", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _Expired
    if "error" in outcome:
        raise outcome["error"]
    result: Result = outcome["result"]
    return result
