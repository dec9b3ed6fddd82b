"""Unit tests for code: the answer's program runs in a sandbox, and the tests that it passes are its score."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from .code_tests import Outcome, Programs, Suite, read_tests
from .errors import InputError
from .fences import fenced_blocks
from .monty import open_monty
from .sandbox import Limits, find_sandbox, run_cpython
from .verdict import Sample, Span, Verdict

__all__ = ["Code", "PythonTests", "extract_code"]

_ENGINES = ("cpython", "monty")
_EXTRACTS = ("auto", "last_block", "text")
_SCORES = ("fraction", "all")
_LANGUAGES = frozenset({"", "python", "python3", "py", "py3"})
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")

Run = Callable[[str, Suite | Programs, Limits], Outcome]


class Code(NamedTuple):
    """Where the code stands in a completion: a half-open range of characters."""

    start: int
    stop: int


@dataclass(frozen=True)
class PythonTests:
    """The share of tests that the code of an answer passes, with the lines on which it failed.

    The tests stand in a column of the problem, in one of the forms of :func:`.code_tests.read_tests`: asserts,
    ``check(candidate)``, test functions, ``unittest`` classes, inputs and outputs of a program, or calls with their
    results. A sample without tests gets no score. An answer without code, one that does not compile, crashes, runs
    out of time or memory, or leaves early, fails the tests that it has not passed by then. When the sandbox itself
    fails, the sample gets no score, and the fault is counted.

    The code never shares a process with the tests. It is asked for values by a process that it cannot reach, read or
    end, and plain values are compared there; so patched builtins, altered comparisons, early exits and printed
    successes change nothing. What remains is this: an object of the answer's own class speaks for itself where a
    test asks it rather than its data (``assert f(2).is_right()``, ``assert Money(1) == Money(1)``), and a program that
    knows the problem may know the right values. The code sees the standard library only. Tests cannot reach into
    the answer's process: no patched ``input()``, no captured output, no change to its modules.

    Args:
        engine: ``cpython`` under bubblewrap (Linux), or ``monty``: fast, but a part of Python; what that cannot run is
            a fault without a score, so a policy can escape a 0 by writing it. Nothing runs outside of a sandbox.
        extract: the code is the last fenced block of Python, or else of no language (``last_block``), the whole
            ``text``, or the last block where there is one, else the text (``auto``).
        prefix: column with code that comes before the answer's, ``prompt`` for the prompt itself; None for none.
            Tests take the complete functions of the prefix from there, not from the answer.
        tests: column with the tests.
        entry_point: column with the name of the function under test, if any.
        score: ``fraction`` of the tests passed, or 1 where ``all`` passed, else 0.
        seconds, cpu_seconds, memory_mb, processes, file_mb, output_kb: see :class:`.sandbox.Limits`.
        workers: answers that run at one time; None for as many as there are processors.

    >>> code = "Sure:\\n```python\\ndef half(x):\\n    return x / 0\\n```"
    >>> sample = Sample("", code, metadata={"tests": "assert half(4) == 2"})
    >>> verdict, = PythonTests(engine="monty")([sample])  # doctest: +SKIP
    >>> verdict.score, [code[span.start : span.stop] for span in verdict.spans]  # doctest: +SKIP
    (0.0, ['    return x / 0'])
    """

    background: ClassVar[bool] = True

    engine: Literal["cpython", "monty"] = "cpython"
    extract: Literal["auto", "last_block", "text"] = "auto"
    prefix: str | None = None
    tests: str = "tests"
    entry_point: str = "entry_point"
    score: Literal["fraction", "all"] = "fraction"
    seconds: float = 20.0
    cpu_seconds: int = 5
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 1024
    workers: int | None = None

    def __post_init__(self) -> None:
        for key, value, known in (
            ("engine", self.engine, _ENGINES),
            ("extract", self.extract, _EXTRACTS),
            ("score", self.score, _SCORES),
        ):
            if value not in known:
                raise InputError(f"{key}: {value!r} is unknown; give one of {', '.join(known)}")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers: {self.workers} run nothing; give 1 or more")
        self._limits()

    def _limits(self) -> Limits:
        return Limits(self.seconds, self.cpu_seconds, self.memory_mb, self.processes, self.file_mb, self.output_kb)

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        replies: list[Verdict | Exception] = [Verdict(None)] * len(samples)
        jobs: dict[int, Suite | Programs] = {}
        for row, sample in enumerate(samples):
            try:
                tests = self._tests_of(sample)
            except InputError as error:
                replies[row] = error
                continue
            if tests is not None:
                jobs[row] = tests
        if jobs:
            workers = min(len(jobs), self.workers or os.cpu_count() or 1)
            with self._open(workers) as run, ThreadPoolExecutor(workers) as pool:
                try:
                    done = pool.map(lambda row: self._judge(samples[row], jobs[row], run), jobs)
                    for row, reply in zip(jobs, done):
                        replies[row] = reply
                except BaseException:  # the user's interrupt does not wait for what has not begun
                    pool.shutdown(cancel_futures=True)
                    raise
        return replies

    @contextmanager
    def _open(self, workers: int) -> Iterator[Run]:
        if self.engine == "monty":
            with open_monty(workers) as run:
                yield run
        else:
            find_sandbox()
            yield run_cpython

    def prepare(self) -> None:
        """Find the sandbox now, so that a machine without one is refused before anything costs time."""
        with self._open(1):
            pass

    def _tests_of(self, sample: Sample) -> Suite | Programs | None:
        entry = sample.metadata.get(self.entry_point)
        if entry is not None and not isinstance(entry, str):
            raise InputError(f"{self.entry_point}: {entry!r} is no name of a function")
        return read_tests(sample.metadata.get(self.tests), entry, self._prefix_of(sample))

    def _prefix_of(self, sample: Sample) -> str:
        if self.prefix is None:
            return ""
        prefix = sample.prompt if self.prefix == "prompt" else sample.metadata.get(self.prefix)
        if not isinstance(prefix, str):
            raise InputError(f"prefix: the sample has no text in the column {self.prefix}")
        return prefix

    def _judge(self, sample: Sample, tests: Suite | Programs, run: Run) -> Verdict | Exception:
        code = extract_code(sample.completion, self.extract)
        if code is None:
            return Verdict(0.0)
        prefix = self._prefix_of(sample)
        try:
            outcome = run(prefix + sample.completion[code.start : code.stop], tests, self._limits())
            share = outcome.passed / outcome.total
            score = share if self.score == "fraction" else float(share == 1.0)
            return Verdict(score, _spans(sample, prefix, code, outcome))
        except Exception as error:  # the sandbox's, and this sample's alone
            return error


def extract_code(text: str, policy: Literal["auto", "last_block", "text"] = "auto") -> Code | None:
    """Where the code of an answer stands; None where it holds none.

    >>> extract_code("Use this:\\n```py\\nx = 1\\n```\\nDone.")
    Code(start=16, stop=22)
    """
    blocks = [] if policy == "text" else [block for block in fenced_blocks(text) if block.language in _LANGUAGES]
    if blocks:
        last = [block for block in blocks if block.language][-1:] or blocks[-1:]  # what no language is named for may
        start, stop = last[0].start, last[0].stop  # be what the program prints
    elif policy == "last_block":
        return None
    else:
        start, stop = 0, len(text)
    return Code(start, stop) if text[start:stop].strip() else None


def _spans(sample: Sample, prefix: str, code: Code, outcome: Outcome) -> tuple[Span, ...]:
    """The lines of the answer that are to blame, one span each."""
    source = prefix + sample.completion[code.start : code.stop]
    labels: dict[int, str] = {}
    for fault in outcome.faults:
        if fault.line is not None:
            labels.setdefault(fault.line, fault.label)
    if not labels:
        return ()
    lines = [match.span() for match in _LINE.finditer(source)]
    shift = code.start - len(prefix)
    places: dict[tuple[int, int], str] = {}
    for number, label in labels.items():
        place = _line_range(source, lines, number)
        if place is not None and place[1] > len(prefix):
            start = max(place[0], len(prefix))
            places.setdefault((start + shift, place[1] + shift), label)
    return tuple(Span(start, stop, 0.0, label) for (start, stop), label in sorted(places.items()))


def _line_range(source: str, lines: Sequence[tuple[int, int]], number: int) -> tuple[int, int] | None:
    """Range of a line counted from 1, or of the last one before it with something on it, as at the end of the file."""
    if number < 1:
        return None
    for start, stop in reversed(lines[: min(number, len(lines))]):
        stop = start + len(source[start:stop].rstrip("\r\n"))
        if source[start:stop].strip():
            return start, stop
    return None
