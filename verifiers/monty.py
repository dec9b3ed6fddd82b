"""Runs an answer's functions against its tests in Monty, a Python interpreter of its own without files or network.

Faster than the sandbox of :mod:`.sandbox` and at home on every system, but it knows a part of Python only. What it
cannot run is a :class:`MontyError`, so that the answer gets no score; it is never called wrong for it.

The answer runs in one session, the tests in another. A call goes from the tests through this process to the answer and
back, as plain data: so the answer can neither replace a function that the tests use nor return an object that equals
everything.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .code_tests import Fault, Outcome, Programs, Suite
from .errors import InputError
from .sandbox import Limits

__all__ = ["MontyError", "open_monty"]

_ANSWER = "<python-input-0>"  # how a session names the first text it is fed
_UNKNOWN = re.compile(r"No module named '(\w+)|module '(\w+)' has no attribute|name '(\w+)' is not defined")
_DATA = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
# What Monty hands out as a text where a value is no data.
_SHOWN = re.compile(r"<(function|class|module|bound method|\w+ object)\b.*>|(range|dict_\w+)\(.*\)", re.S)


class MontyError(RuntimeError):
    """Monty cannot run this answer or these tests; CPython perhaps can."""


@contextmanager
def open_monty(workers: int) -> Iterator[Callable[[str, Suite | Programs, Limits], Outcome]]:
    """A pool of interpreters, as a function from an answer, its tests and limits to the outcome.

    Args:
        workers: answers that may be tried at one time.
    """
    try:
        from pydantic_monty import Monty
    except ImportError:
        raise InputError("engine=monty: pydantic-monty is missing; pip install 'apportion[code]'") from None
    with Monty(max_processes=2 * workers) as pool:
        yield lambda source, tests, limits: _run(pool, source, tests, limits)


def _run(pool: Any, source: str, tests: Suite | Programs, limits: Limits) -> Outcome:
    if isinstance(tests, Programs):
        raise InputError("tests: Monty has no standard input; set engine=cpython for inputs and outputs")
    options = {
        "limits": {
            "max_feed_duration_secs": float(limits.cpu_seconds),
            "max_memory": limits.memory_mb << 20,
            "max_suspensions": 1_000_000,
        },
        "os_policy": {"sleep": "zero", "random_start": {"seed": 0}},
        "assert_message_annotations": False,
    }
    with pool.checkout(**options) as answer, pool.checkout(**options) as judge:
        return _Trial(answer, judge, tests, limits).run(source)


class _Trial:
    """One answer and its tests, each in its session."""

    def __init__(self, answer: Any, judge: Any, tests: Suite, limits: Limits) -> None:
        self.answer, self.judge, self.tests, self.limits = answer, judge, tests, limits
        self.deadline = time.monotonic() + limits.seconds
        self.last: tuple[str, int | None] | None = None  # last exception of the answer's, and its line
        self.dead: Fault | None = None
        self.unsupported: str | None = None
        self.changed = False  # whether the answer changed an argument, which the tests cannot see

    def run(self, source: str) -> Outcome:
        total = sum(unit.counts for unit in self.tests.units)
        fault = self._load(source)
        if fault is not None:
            return Outcome(0, total, (fault,))
        known = {name: self._find(name) for name in self.tests.names - self.tests.given_names}
        if self.tests.given:
            self._ask_judge(self.tests.given, {})
            for name in known:
                with suppress(Exception):
                    self.judge.feed_run(f"del {name}")
        known = {name: value for name, value in known.items() if value is not _ABSENT}
        if (entry := self.tests.entry_point) is not None:
            known["candidate"] = known[entry] = self._caller(entry)
        passed, faults = 0, []
        for unit in self.tests.units:
            fault = self._ask_judge(unit.code, known)
            if fault is None:
                passed += unit.counts
            elif self.changed:
                raise MontyError(
                    "the answer changes its arguments, which Monty keeps from the tests; set engine=cpython"
                )
            else:
                faults.append(fault)
            if self.dead is not None:
                break
        return Outcome(passed, total, tuple(dict.fromkeys(faults)))

    def _load(self, source: str) -> Fault | None:
        """Run the answer's text; the fault it ends with."""
        try:
            self._feed_answer(source)
        except _MontyFault as fault:
            self._refuse_unsupported()
            return Fault(_label(fault.error), fault.line)
        entry = self.tests.entry_point
        if entry is not None and self._find(entry) is _ABSENT:
            return Fault(f"NameError: the answer defines no {entry}", None)
        return None

    def _feed_answer(self, code: str, **inputs: Any) -> Any:
        """Run a text in the answer's session; its faults come as _MontyFault, with the line of the answer."""
        from pydantic_monty import MontyCrashedError, MontyRuntimeError, MontySyntaxError

        if time.monotonic() > self.deadline:
            self.dead = Fault(f"not done in {self.limits.seconds:g} s", None)
        if self.dead is not None:
            raise _MontyFault(TimeoutError(self.dead.label), None)
        try:
            return self.answer.feed_run(code, inputs=inputs or None, print_callback=_ignore)
        except MontyCrashedError as error:
            self.dead = Fault(f"the interpreter crashed: {error}"[:200], None)
            raise _MontyFault(RuntimeError(self.dead.label), None) from None
        except (MontyRuntimeError, MontySyntaxError) as error:
            inner = error.exception()
            self._note_unsupported(inner)
            lines = [frame.line for frame in error.traceback() if frame.filename in (_ANSWER, "main.py")]
            self.last = (repr(inner), lines[-1] if lines else None)
            if isinstance(inner, TimeoutError | MemoryError) and "limit exceeded" in str(inner):
                self.dead = Fault(_label(inner), self.last[1])  # the session is not to be used again
            raise _MontyFault(inner, self.last[1]) from None

    def _find(self, name: str) -> Any:
        """The answer's value of this name: data as it is, a function as one that calls it there."""
        try:
            value = self._feed_answer(name)
        except _MontyFault as fault:
            if isinstance(fault.error, NameError):
                self.unsupported = None
                return _ABSENT
            raise MontyError(_label(fault.error)) from None
        if isinstance(value, str) and (shown := re.match(r"<module '(\w+)'>", value)):
            self._ask_judge(f"import {shown[1]}", {})
            return _ABSENT
        return self._caller(name) if not _is_data(value) else value

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_data([args, kwargs]):
                self.unsupported = f"the tests hand {name} something other than data"
                raise RuntimeError(self.unsupported)
            given = {"apportion_args": list(args), "apportion_kwargs": kwargs}
            code = f"({name}(*apportion_args, **apportion_kwargs), apportion_args, apportion_kwargs)"
            try:
                result, *after = self._feed_answer(code, **given)
            except _MontyFault as fault:
                raise fault.error from None
            self.changed = self.changed or repr(after) != repr([list(args), kwargs])
            if not _is_data(result):
                self.unsupported = f"{name} gives something other than data"
                raise RuntimeError(self.unsupported)
            return result

        return call

    def _ask_judge(self, code: str, known: dict[str, Any]) -> Fault | None:
        """Run a piece of the tests; None where it passes."""
        from pydantic_monty import MontyError as AnyMontyError

        fault = None
        try:
            self.judge.feed_run(code, external_lookup=known, print_callback=_ignore)
        except AnyMontyError as error:
            inner = error.exception()
            self._note_unsupported(inner)
            here = self.last is not None and self.last[0] == repr(inner)
            fault = Fault(_label(inner), self.last[1] if here and self.last else None)
        self._refuse_unsupported()
        return self.dead or fault

    def _refuse_unsupported(self) -> None:
        if self.unsupported is not None:
            raise MontyError(f"{self.unsupported}; set engine=cpython")

    def _note_unsupported(self, error: BaseException) -> None:
        """Remember what Monty lacks, so that nobody is called wrong for it."""
        text = str(error)
        missing = _UNKNOWN.search(text)
        if isinstance(error, NotImplementedError | RuntimeError) and "monty" in text.lower():
            self.unsupported = text
        elif missing and (
            (missing[1] or missing[2]) in sys.stdlib_module_names or missing[3] in dir(__import__("builtins"))
        ):
            self.unsupported = f"Monty: {text}"


class _MontyFault(Exception):
    def __init__(self, error: BaseException, line: int | None) -> None:
        super().__init__(str(error))
        self.error, self.line = error, line


_ABSENT = object()


def _ignore(stream: str, text: str) -> None:
    """Printed text is no part of a verdict."""


def _label(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:200]


def _is_data(value: Any) -> bool:
    """Whether a value from Monty is what it seems, at any depth that a value can have there."""
    rest = [value]
    while rest:
        item = rest.pop()
        if type(item) not in _DATA or (type(item) is str and _SHOWN.fullmatch(item)):
            return False
        if isinstance(item, dict):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            rest += item
    return True
