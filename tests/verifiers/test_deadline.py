"""A call ends in time, whatever it does, and leaves no timer behind."""

import re
import signal
import time

import pytest

from apportion.verifiers.deadline import call_within


def loop():
    while True:
        pass


def stubborn():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue_once.append(1)
            if len(continue_once) > 1:
                raise


continue_once: list[int] = []


@pytest.mark.parametrize("hang", [loop, lambda: time.sleep(60), lambda: re.match("(a+)+$", "a" * 64 + "b")])
def test_a_hanging_call_is_interrupted(hang):
    with pytest.raises(TimeoutError, match=r"gave no answer in 0\.05 s"):
        call_within(hang, 0.05)


def test_a_bare_except_does_not_get_away_with_it():
    with pytest.raises(TimeoutError):
        call_within(stubborn, 0.05)
    assert len(continue_once) == 2


def test_results_and_exceptions_pass():
    assert call_within(lambda: 3, 5) == 3
    assert call_within(lambda: 3, None) == 3
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, 5)


def test_the_timer_and_its_handler_are_put_back():
    before = signal.getsignal(signal.SIGALRM)
    call_within(lambda: 3, 5)
    with pytest.raises(TimeoutError):
        call_within(loop, 0.01)
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == (before, (0.0, 0.0))
