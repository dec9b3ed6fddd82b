"""Killable worker processes: work that may hang, crash or eat memory is done where it can be ended.

Plain child processes over pipes rather than ``multiprocessing``: nothing of the trainer is forked (CUDA and threads do
not survive that) and nothing of it is imported again (a script without a main guard would start anew). Items travel as
pickles to the child; what comes back is JSON only, so that a child turned hostile cannot run code here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from .errors import InputError
from .worker_main import FRAME

__all__ = ["WorkerFailure", "WorkerPool", "shared_pool"]

Kind = Literal["timeout", "memory", "died", "raised"]
_START_S = 120.0  # for the imports of a target
_MAX_REPLY = 64 << 20  # bytes
_RECYCLE = 20_000  # items, after which a worker is replaced: libraries keep caches


class WorkerFailure(RuntimeError):
    """Why an item has no result: ``timeout``, ``memory``, ``died`` (the process ended) or ``raised`` an exception."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: Kind = kind


class WorkerPool:
    """Runs ``target(**options)`` once per process, then that callable on every item, one at a time.

    Processes start when first needed, are killed with their process group when an item runs over its time, and are
    replaced. They end with this process, however it ends. Several threads may call one pool.

    Args:
        target: dotted path of a factory; what it returns takes one item and gives plain JSON values.
        options: of the factory, plain JSON values.
        workers: processes side by side.
        timeout_s: wall seconds for one item, without the start of the process.
        memory_mb: limit of each process's address space; 0 for none.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
    ) -> None:
        if workers < 1:
            raise InputError(f"workers: {workers} processes can do nothing; give 1 or more")
        if not 0 < timeout_s < float("inf"):
            raise InputError(f"timeout_s: {timeout_s} is no time limit; give seconds above 0")
        if memory_mb < 0:
            raise InputError(f"memory_mb: {memory_mb} is below 0; give megabytes, or 0 for no limit")
        settings = {"target": target, "options": dict(options or {}), "memory_mb": memory_mb, "recycle": _RECYCLE}
        self._settings = settings | {"timeout_s": timeout_s}
        self._workers = [_Worker(self._settings) for _ in range(workers)]
        self._idle, self._owner = list(self._workers), os.getpid()
        self._free = threading.Condition()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())  # also at interpreter exit

    def map(self, items: Sequence[Any]) -> list[Any]:
        """One entry per item, in order: what the callable gave, or a :class:`WorkerFailure`.

        Raises:
            InputError: the target cannot be imported or built.
        """
        results: list[Any] = [None] * len(items)
        waiting = iter(enumerate(items))
        lock, stop = threading.Lock(), threading.Event()
        if len(self._workers) == 1 or len(items) < 2:
            self._drain(waiting, results, lock, stop)
            return results
        side_by_side = min(len(self._workers), len(items))
        with ThreadPoolExecutor(side_by_side) as threads:
            try:
                drains = [threads.submit(self._drain, waiting, results, lock, stop) for _ in range(side_by_side)]
                for drain in drains:
                    drain.result()
            finally:
                stop.set()  # after Ctrl-C, or a target that cannot be built, the others start nothing new
        return results

    def close(self) -> None:
        """End all processes; the next call of :meth:`map` starts new ones."""
        _kill_all(self._workers, self._owner)

    def _drain(
        self, waiting: Iterator[tuple[int, Any]], results: list[Any], lock: threading.Lock, stop: threading.Event
    ) -> None:
        with self._worker() as worker:
            while not stop.is_set():
                with lock:
                    place, item = next(waiting, (-1, None))
                if place < 0:
                    return
                results[place] = worker.ask(item)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        if self._owner != os.getpid():  # this process was forked off: the pipes belong to its parent
            self._workers[:] = [_Worker(self._settings) for _ in self._workers]
            self._idle, self._owner, self._free = list(self._workers), os.getpid(), threading.Condition()
        with self._free:
            self._free.wait_for(lambda: self._idle)
            worker = self._idle.pop()
        try:
            yield worker
        finally:
            with self._free:
                self._idle.append(worker)
                self._free.notify()


@functools.cache
def _pool(target: str, options: str, workers: int, timeout_s: float, memory_mb: int) -> WorkerPool:
    return WorkerPool(target, json.loads(options), workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)


_POOLS_LOCK = threading.Lock()


def shared_pool(
    target: str, options: Mapping[str, Any] | None = None, *, workers: int, timeout_s: float, memory_mb: int
) -> WorkerPool:
    """The pool of this process for these settings, so that verifiers stay plain values that can be copied."""
    try:
        written = json.dumps(dict(options or {}), sort_keys=True)
    except (TypeError, ValueError) as fault:
        raise InputError(f"options: of {target} must be plain JSON values ({fault})") from None
    with _POOLS_LOCK:
        return _pool(target, written, workers, timeout_s, memory_mb)


class _Worker:
    """One child process, started when it is first asked."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, item: Any) -> Any:
        """The result for one item, or a failure; whatever happens, the next item finds a worker in order."""
        try:
            body = pickle.dumps(item)
        except Exception as fault:
            return WorkerFailure("raised", f"the item cannot be sent to another process ({fault})")
        limit = self._settings["timeout_s"]
        process = self._started()
        if process is None:
            return WorkerFailure("died", f"the worker process did not start within {_START_S:g} s")
        try:
            reply = _exchange(process, body, limit)
        except TimeoutError:
            self.kill()
            return WorkerFailure("timeout", f"no result within {limit:g} s")
        except (OSError, EOFError, ValueError):
            self.kill()
            return WorkerFailure("died", _last_words(process))
        except BaseException:  # Ctrl-C in the midst of a reply
            self.kill()
            raise
        if reply.get("last"):
            self.kill()
        failure = reply.get("failure")
        if failure is None:
            return reply.get("ok")
        return WorkerFailure("memory" if failure == "memory" else "raised", str(reply.get("message")))

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):  # the group is named after its first process, which is not reaped yet
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The process, ready to serve; None where it does not come up."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]  # noqa: PTH109 plain text
        # Fixed hashing: the order of a set must not change a verdict from run to run.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "apportion.verifiers.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        settings = json.dumps(dict(self._settings) | {"path": path}).encode("ascii")
        try:
            reply = _exchange(process, settings, _START_S)
        except (OSError, EOFError, ValueError):
            self.kill()
            return None
        except BaseException:
            self.kill()
            raise
        if reply.get("failure"):
            self.kill()
            raise InputError(f"target: {self._settings['target']} cannot be loaded: {reply.get('message')}")
        return process


def _exchange(process: subprocess.Popen[bytes], body: bytes, limit: float) -> dict[str, Any]:
    """Send one message and read one reply within ``limit`` seconds; TimeoutError, EOFError or OSError otherwise."""
    if process.stdin is None or process.stdout is None:
        raise EOFError("no pipes")
    deadline = time.monotonic() + limit
    source, sink = process.stdout.fileno(), process.stdin.fileno()
    unsent = memoryview(FRAME.pack(len(body)) + body)
    while unsent:
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[os.write(sink, unsent[: 1 << 16]) :]
            continue
        _wait(sink, select.POLLOUT, deadline)
    size = FRAME.unpack(_receive(source, FRAME.size, deadline))[0]
    if size > _MAX_REPLY:
        raise ValueError(f"a reply of {size} bytes")
    reply = json.loads(_receive(source, size, deadline))
    if not isinstance(reply, dict):
        raise ValueError("a reply that is no object")
    return reply


def _receive(source: int, size: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _wait(source, select.POLLIN, deadline)
        part = os.read(source, size - len(received))
        if not part:
            raise EOFError("the pipe was closed")
        received += part
    return bytes(received)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """How a process ended by itself: its own status outlives the kill that came after it."""
    status = process.wait()
    if status >= 0:
        return f"the worker process ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"the worker process was ended by signal {names.get(-status, -status)}"


def _kill_all(workers: Iterable[_Worker], owner: int) -> None:
    if owner == os.getpid():
        for worker in workers:
            worker.kill()
