"""Signals ask; they do not break off."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from apportion.grpo.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    stop = StopRequest()
    with stop.listening():
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert {n: signal.getsignal(n) for n in before} == before


def test_outside_the_main_thread_nothing_is_listened_to_and_nothing_breaks() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequest().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
