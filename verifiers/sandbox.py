"""Runs an answer's code against its tests in CPython under bubblewrap; never without.

Inside there is no network, no home folder, no project, no ``/proc``: a read-only copy of the system's libraries and
of the running interpreter's standard library, an empty ``/tmp`` in memory, an empty environment, own process, IPC,
host-name and user spaces, and a system-call filter (:mod:`.sandbox_filter`). When the run is over, or late, the
first process is killed, and the kernel ends all others with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .bubblewrap import Sandbox, bwrap_path, command, interpreter_command, unused_user
from .code_tests import Fault, Outcome, Programs, Suite, Unit, same_output
from .errors import InputError
from .sandbox_filter import system_call_filter

__all__ = ["Limits", "SandboxError", "find_sandbox", "run_cpython"]

_START_SECONDS = 30.0  # for the sandbox to come up, which a busy machine delays
_REMEDY = "pip install 'apportion[code]', allow user namespaces, or set engine=monty"


class SandboxError(RuntimeError):
    """The sandbox failed, for no fault of the answer's."""


@dataclass(frozen=True)
class Limits:
    """What one answer may use up.

    Args:
        seconds: wall clock for all its tests together.
        cpu_seconds: computing time of each of its processes; of each run where the tests are whole programs.
        memory_mb: address space of each of its processes.
        processes: processes and threads at one time. Memory in all is at most this times ``memory_mb``.
        file_mb: size of a file, and of all files together.
        output_kb: what a program may print in one run.
    """

    seconds: float = 20.0
    cpu_seconds: int = 5
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name}: {value} is no limit; give a number above 0")


# An answer that tells whether the limit on processes holds; it does not for root in a name space of users.
_TRIAL = """
import os, time
def f():
    for _ in range(8):
        try:
            child = os.fork()
        except BlockingIOError:
            return "limited"
        if child == 0:
            time.sleep(9)
            os._exit(0)
    return "unlimited"
"""


def run_cpython(source: str, tests: Suite | Programs, limits: Limits) -> Outcome:
    """Passed tests of one answer; SandboxError where the sandbox rather than the answer failed.

    >>> from .code_tests import read_tests
    >>> tests = read_tests("assert f(2) == 4\\nassert f(3) == 9")
    >>> run_cpython("def f(x): return x * 2", tests, Limits())  # doctest: +SKIP
    Outcome(passed=1, total=2, faults=(Fault(label='AssertionError', line=None),))
    """
    return _run_in(find_sandbox(), source, tests, limits)


@lru_cache(maxsize=1)
def find_sandbox() -> Sandbox:
    """A sandbox that works on this machine, tried with one small answer; InputError with the remedy where none does."""
    bwrap = bwrap_path()
    if not sys.platform.startswith("linux") or bwrap is None:
        raise InputError(f"engine=cpython: no bubblewrap here; {_REMEDY}")
    own_user = Sandbox(bwrap, ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"), True)
    own_space = Sandbox(bwrap, ("--unshare-user", "--uid", "65534", "--gid", "65534"), False)
    trial = Suite((Unit("assert f() == 'limited'", True),), frozenset({"f"}))
    why = ""
    for sandbox in (own_user, own_space) if os.geteuid() == 0 else (own_space,):
        try:
            outcome = _run_in(sandbox, _TRIAL, trial, Limits(processes=3))
        except SandboxError as error:
            why = why or str(error)
            continue
        if outcome.passed == 1:
            return sandbox
        why = why or f"a trial ended with {outcome.faults[0].label}"
    raise InputError(f"engine=cpython: bubblewrap makes no sandbox here ({why}); {_REMEDY}")


def _run_in(sandbox: Sandbox, source: str, tests: Suite | Programs, limits: Limits) -> Outcome:
    job: dict[str, Any] = {"source": source}
    if isinstance(tests, Programs):
        job["inputs"] = tests.inputs
    else:
        job["units"] = [unit.code for unit in tests.units]
        job["names"], job["given_names"] = sorted(tests.names), sorted(tests.given_names)
        job["given"], job["entry_point"] = tests.given, tests.entry_point
    killed_before = _killed_for_memory()
    reports, late, complaint = _converse(sandbox, job, limits)
    if {"ready": True} not in reports:
        raise SandboxError(f"bubblewrap: {complaint or 'no reply'}")
    for report in reports:
        if "fault" in report:
            raise InputError(f"tests: {report['fault']}")
    done = {"done": True} in reports
    ended_hard = (not done and not late) or any(
        report.get("status") == -9 or report.get("error") == "killed by signal 9" for report in reports
    )
    if ended_hard and _killed_for_memory() > killed_before:
        raise SandboxError("the machine ran out of memory and ended the process")
    loose_end = f"not done in {limits.seconds:g} s" if late else None if done else "the judge was ended"
    return (_count_runs if isinstance(tests, Programs) else _count_units)(tests, reports, loose_end)  # type: ignore[arg-type]


def _count_units(tests: Suite, reports: Sequence[dict[str, Any]], loose_end: str | None) -> Outcome:
    passed, faults = 0, []
    for report in reports:
        if report.get("passed") and tests.units[report["unit"]].counts:
            passed += 1
        if report.get("error"):
            faults.append(Fault(report["error"], report["line"]))
    return _outcome(passed, sum(unit.counts for unit in tests.units), faults, loose_end)


def _count_runs(tests: Programs, reports: Sequence[dict[str, Any]], loose_end: str | None) -> Outcome:
    passed, faults = 0, []
    for report in reports:
        if "unit" not in report:
            continue
        printed = report["output"].encode("latin-1").decode("utf-8", "replace")
        if report["status"] is None:
            faults.append(Fault("too much output", None))
        elif report["status"] != 0:
            how = "killed by signal" if report["status"] < 0 else "left with status"
            faults.append(Fault(report["error"] or f"{how} {abs(report['status'])}", report["line"]))
        elif same_output(tests.outputs[report["unit"]], printed):
            passed += 1
        else:
            faults.append(Fault("wrong output", None))
    return _outcome(passed, len(tests.inputs), faults, loose_end)


def _outcome(passed: int, total: int, faults: list[Fault], loose_end: str | None) -> Outcome:
    if loose_end is not None:
        faults.append(Fault(loose_end, None))
    return Outcome(passed, total, tuple(dict.fromkeys(faults)))


def _converse(sandbox: Sandbox, job: dict[str, Any], limits: Limits) -> tuple[list[dict[str, Any]], bool, str]:
    """Start the sandbox, collect the judge's reports, end the sandbox: reports, whether it was late, complaints."""
    with ExitStack() as stack:
        job_file = stack.enter_context(_in_memory(json.dumps(job).encode()))
        calls = stack.enter_context(_in_memory(system_call_filter()))
        (from_judge, results), (from_bwrap, info), (block, go) = (stack.enter_context(_pipe()) for _ in range(3))
        start = command(sandbox, limits.file_mb << 20, sum(len(text) for text in job.get("inputs", ())) * 4)
        descriptors = {"--seccomp": calls, "--info-fd": info, "--block-fd": block}
        start += [part for name, file in descriptors.items() for part in (name, str(file.fileno()))]
        start += interpreter_command(_settings(sandbox, job, job_file.fileno(), results.fileno(), limits))
        ours = (job_file, calls, results, info, block)
        with subprocess.Popen(
            start,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[file.fileno() for file in ours],
            start_new_session=True,
        ) as process:
            for file in ours:
                file.close()
            first = None
            try:
                first = _first_process(from_bwrap.fileno())
                if first is not None:
                    go.write(b"x")
                    go.close()
                reports, late = _read_reports(from_judge.fileno(), job, limits)
            finally:
                _end(process, first)
            assert process.stderr is not None
            complaint = os.read(process.stderr.fileno(), 4096).decode("utf-8", "replace")
        return reports, late, " ".join(complaint.split())[-300:]


@contextmanager
def _in_memory(data: bytes) -> Iterator[Any]:
    """A nameless file in memory that holds the data, to be read from its start."""
    with os.fdopen(os.memfd_create("apportion"), "w+b", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file


@contextmanager
def _pipe() -> Iterator[tuple[Any, Any]]:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as source, os.fdopen(write, "wb", buffering=0) as target:
        yield source, target


def _readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds; of a descriptor of any number."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _first_process(info: int) -> int | None:
    """Handle on the sandbox's process 1, made the first that the kernel ends when memory runs out."""
    told = b""
    while not told.rstrip().endswith(b"}"):
        chunk = os.read(info, 4096) if _readable(info, _START_SECONDS) else b""
        if not chunk:
            return None
        told += chunk
    pid = json.loads(told)["child-pid"]
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def _read_reports(source: int, job: dict[str, Any], limits: Limits) -> tuple[list[dict[str, Any]], bool]:
    """Reports until the judge is done, gone or late; the clock starts when it is ready."""
    count = len(job.get("inputs", ())) or len(job["units"])
    most = 65536 + count * (8192 + 6 * (limits.output_kb * 1024 + 65536 if "inputs" in job else 0))
    data, deadline = bytearray(), time.monotonic() + _START_SECONDS
    begun = late = False
    while len(data) < most:
        if not _readable(source, deadline - time.monotonic()):
            late = begun
            break
        chunk = os.read(source, 1 << 16)
        if not chunk:
            break
        data += chunk
        if not begun and b"\n" in data:
            begun, deadline = True, time.monotonic() + limits.seconds
    return [json.loads(line) for line in data.split(b"\n")[:-1]], late


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """Kill process 1 of the sandbox, which takes all others along, and wait until bubblewrap has seen it go."""
    if first is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        os.close(first)
    else:
        process.kill()
    try:
        process.wait(_START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _killed_for_memory() -> int:
    """How many processes the kernel has ended for want of memory since the machine started."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _settings(sandbox: Sandbox, job: dict[str, Any], job_file: int, results: int, limits: Limits) -> str:
    settings = {
        "job": job_file,
        "results": results,
        "mode": "programs" if "inputs" in job else "tests",
        "user": unused_user() if sandbox.as_root else None,
        "seconds": limits.seconds,
        "cpu_seconds": limits.cpu_seconds,
        "memory": limits.memory_mb << 20,
        "processes": limits.processes,
        "file": limits.file_mb << 20,
        "output": limits.output_kb << 10,
    }
    return json.dumps(settings)
