"""What runs inside the sandbox: a judge that holds the tests, and the answer's own process that it asks.

The first process of the sandbox is the judge. It never runs a line of the answer. Before it reads the tests it forks
the player, which keeps nothing but one socket; the player runs the answer and is asked for values
(:mod:`.sandbox_values`). So the tests cannot be read, patched or counted by the answer, and a verdict reaches the
outside over a pipe that only the judge holds. As process 1 of its own process space the judge cannot be killed from
inside, and its end takes every other process along.

Programs that read standard input run in a fresh process per input; the judge only sends their output outside, where
it is compared. The expected output never enters the sandbox.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import types
from typing import Any

from .sandbox_programs import run_programs
from .sandbox_setup import (
    become,
    close_all_but,
    label,
    limit,
    limit_answer,
    new_module,
    quiet,
    read_all,
    report,
    run_answer,
)
from .sandbox_values import ENDED, Closed, Peer, Uncrossable

__all__ = ["main"]

TESTS = "tests"


def main() -> None:
    """Read the settings from the command line, put up the limits, and judge one answer."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    job, results = settings["job"], settings["results"]
    close_all_but(0, 1, 2, job, results)
    become(settings["user"])
    limit(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_outside(results, settings["seconds"] + 5)
    report(results, ready=True)
    if settings["mode"] == "programs":
        run_programs(json.loads(read_all(job)), settings, results)
    else:
        here, there = socket.socketpair()
        player = os.fork()
        if player == 0:
            _play(there, settings)
        there.close()
        _judge(json.loads(read_all(job)), here, player, results)
    report(results, done=True)
    os._exit(0)


def _watch_outside(results: int, seconds: float) -> None:
    """Leave, and so end the sandbox, once nobody reads the results any more, or when all should long be over."""
    outside = select.poll()
    outside.register(results, 0)  # tells of errors only
    deadline = time.monotonic() + seconds

    def look(*_: object) -> None:
        if outside.poll(0) or time.monotonic() > deadline:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def _play(line: socket.socket, settings: dict[str, Any]) -> None:
    """Take the answer, run it, and serve what the tests ask; never returns."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    close_all_but(0, 1, 2, line.fileno())
    limit_answer(settings)
    module = new_module("answer")
    peer = Peer(line, guard=None)
    peer.exports.append(_Loader(module))
    try:
        peer.serve()
    except Closed:
        pass
    finally:
        os._exit(0)


class _Loader:
    """The first thing that the tests can ask for: it runs the answer and looks up its names."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def load(self, source: str) -> list[str]:
        run_answer(source, self.module)
        return [name for name in vars(self.module) if isinstance(name, str) and not name.startswith("__")]

    def look_up(self, name: str) -> Any:
        return vars(self.module)[name]


def _judge(job: dict[str, Any], line: socket.socket, player: int, results: int) -> None:
    peer = Peer(line, guard=TESTS)
    loader = peer._stand_in(["object", 0])
    quiet()
    namespace = vars(new_module(TESTS))
    try:
        names = loader.load(job["source"])
        _bind(job, namespace, loader, {str(name) for name in names})
    except BaseException as error:
        report(results, loaded=False, **_why(error, peer, player))
        return
    report(results, loaded=True)
    for number, unit in enumerate(job["units"]):
        try:
            exec(compile(unit, "<tests>", "exec", dont_inherit=True), namespace)
        except BaseException as error:
            report(results, unit=number, passed=False, **_why(error, peer, player))
        else:
            report(results, unit=number, passed=peer.broken is None, **_why(None, peer, player))
        if peer.broken is not None:
            return


def _bind(job: dict[str, Any], namespace: dict[str, Any], loader: Any, names: set[str]) -> None:
    """Give the tests the names they use: from the answer, but functions that came with the problem from there."""
    given: dict[str, Any] = {"__name__": "given"}
    if job["given"]:
        exec(compile(job["given"], "<problem>", "exec", dont_inherit=True), given)
    for name in job["names"]:
        if name in job["given_names"]:
            namespace[name] = given[name]
        elif name in names:
            namespace[name] = loader.look_up(name)
    entry = job["entry_point"]
    if entry is not None:
        if entry not in names:
            raise NameError(f"the answer defines no {entry}")
        namespace["candidate"] = namespace[entry] = loader.look_up(entry)


def _why(error: BaseException | None, peer: Peer, player: int) -> dict[str, Any]:
    """What went wrong, in words, and on which line of the answer."""
    if peer.uncrossable is not None or isinstance(error, Uncrossable):
        return {"fault": peer.uncrossable}
    if peer.broken is not None:
        ended = _ending(player) if peer.broken == ENDED else None
        return {"error": ended or peer.broken, "line": None}
    if error is None:
        return {}
    line = peer.error_line[1] if peer.error_line is not None and peer.error_line[0] is error else None
    return {"error": label(error), "line": line}


def _ending(player: int) -> str | None:
    """How the answer's process ended, where it has."""
    for _ in range(100):
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == player:
            code = os.waitstatus_to_exitcode(status)
            return f"killed by signal {-code}" if code < 0 else f"left with status {code}"
        if pid == 0:
            time.sleep(0.001)
    return None
