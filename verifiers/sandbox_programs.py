"""Runs the answer as a whole program, once per input, in a fresh process each; the output is compared outside."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any

from .sandbox_data import ANSWER, line_of
from .sandbox_setup import close_all_but, label, limit_answer, new_module, quiet, report, run_answer

__all__ = ["run_programs"]


def run_programs(job: dict[str, Any], settings: dict[str, Any], results: int) -> None:
    quiet()
    report(results, loaded=True)
    for number, text in enumerate(job["inputs"]):
        report(results, unit=number, **_run_program(job["source"], text, settings))


def _run_program(source: str, text: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the answer as a program on one input; its output is cut at the limit, and no process of it is left behind.

    What it writes to ``/tmp`` is there for the runs that follow.
    """
    given = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    data = text.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(given, data) :]
    os.lseek(given, 0, os.SEEK_SET)
    output, written = os.pipe()
    errors, noted = os.pipe()
    child = os.fork()
    if child == 0:
        for descriptor, place in ((given, 0), (written, 1)):
            os.dup2(descriptor, place)
        close_all_but(0, 1, 2, noted)
        _be_program(source, noted, settings)
    for descriptor in (given, written, noted):
        os.close(descriptor)
    kept, code = _collect(output, child, settings["output"])
    note = os.read(errors, 65536) if select.select([errors], [], [], 0)[0] else b""
    os.close(output)
    os.close(errors)
    return {"status": code, "output": kept.decode("latin-1"), **_note(note)}


def _note(note: bytes) -> dict[str, Any]:
    try:
        found = json.loads(note)
        line = found["line"]
        return {"error": str(found["error"])[:200], "line": line if type(line) is int else None}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {"error": None, "line": None}


def _collect(output: int, child: int, limit: int) -> tuple[bytes, int | None]:
    """Output until the program itself ends, whoever else holds the pipe, and its exit status; None if cut off."""
    os.set_blocking(output, False)
    kept, code, ended = bytearray(), None, False
    watch = os.pidfd_open(child)
    while not ended and len(kept) <= limit:
        readable, _, _ = select.select([output, watch], [], [])
        ended = watch in readable
        while len(kept) <= limit:
            try:
                chunk = os.read(output, 65536)
            except BlockingIOError:
                break
            if not chunk:
                select.select([watch], [], [])
                ended = True
                break
            kept += chunk
    os.close(watch)
    if ended:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _kill_all()
    return bytes(kept), code if len(kept) <= limit else None


def _kill_all() -> None:
    """End every process of the sandbox but this one, which is process 1 and inherits all orphans."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except (ProcessLookupError, ChildProcessError):
            return


def _be_program(source: str, noted: int, settings: dict[str, Any]) -> None:
    """Run the answer as ``__main__``; leaves by SystemExit, so that buffers are flushed as at any program's end."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit_answer(settings)
    module = new_module("__main__")
    sys.argv = [ANSWER]
    try:
        run_answer(source, module)
    except SystemExit:
        raise
    except BaseException as error:
        os.write(noted, json.dumps({"error": label(error), "line": line_of(error)}).encode())
        raise SystemExit(1) from None
    raise SystemExit(0)
