"""The child's side of :mod:`apportion.verifiers.workers`: reads requests from a pipe, answers in JSON, dies with it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["FRAME", "load", "main"]

FRAME = struct.Struct(">I")  # length in bytes, before every message in either direction
_GRACE_S = 2.0  # behind the parent's own limit; counts only where the parent is gone
_MAX_MESSAGE = 300  # characters of an error that travel back


def main() -> int:
    """Serve until the pipe closes.

    The first frame says what to serve, ``{"path", "target", "options", "memory_mb", "timeout_s", "recycle"}``; every
    other one is an item. Each gets one reply: ``{"ok": ...}`` or ``{"failure": kind, "message": ...}``, with
    ``"last": true`` where this process wants to be replaced.
    """
    requests, replies = _own_channel()
    settings = _read(requests)
    if settings is None:
        return 0
    sys.path[:] = settings["path"]
    _limit_memory(settings["memory_mb"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        serve = load(settings["target"])(**settings["options"])
    except BaseException as fault:
        _write(replies, {"failure": "raised", "message": _in_words(fault)})
        return 1
    _write(replies, {"ok": None})
    served = 0
    while (item := _read(requests)) is not None:
        # Kept by the kernel: it also ends a task that holds the GIL when no parent is left to do so.
        signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"] + _GRACE_S)
        reply = _answer(serve, item)
        signal.setitimer(signal.ITIMER_REAL, 0)
        served += 1
        spent = served >= settings["recycle"] or _swollen(settings["memory_mb"])
        if spent or reply.get("failure") == "memory":
            reply["last"] = True
        _write(replies, reply)
        if "last" in reply:
            break
    return 0


def _own_channel() -> tuple[int, int]:
    """Move the pipes away from the standard descriptors, so that no print of a library gets in between."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return requests, replies


def load(target: str) -> Callable[..., Any]:
    """The object that a dotted path names.

    >>> load("os.path.basename")("a/b")
    'b'
    """
    module, _, name = target.rpartition(".")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def _answer(serve: Callable[[Any], Any], item: bytes) -> dict[str, Any]:
    try:
        reply = {"ok": serve(pickle.loads(item))}
        json.dumps(reply)
    except MemoryError as fault:
        return {"failure": "memory", "message": _in_words(fault)}
    except BaseException as fault:  # Ctrl-C does not come here; see main
        return {"failure": "raised", "message": _in_words(fault)}
    return reply


def _read(pipe: int) -> Any:
    """The next message, or None at the end: settings are a JSON object, items stay pickled until they are answered."""
    head = _read_exactly(pipe, FRAME.size)
    body = None if head is None else _read_exactly(pipe, FRAME.unpack(head)[0])
    if body is None:
        return None
    return json.loads(body) if body[:1] == b"{" else body


def _read_exactly(pipe: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(pipe, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(pipe: int, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode("ascii")
    view = memoryview(FRAME.pack(len(body)) + body)
    while view:
        view = view[os.write(pipe, view) :]


def _limit_memory(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = memory_mb << 20
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # some systems (macOS) have no such limit
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _swollen(memory_mb: int) -> bool:
    """Whether more than half the allowed memory is in use.

    The peak that ``getrusage`` gives will not do where there is ``/proc``: on Linux it begins with the peak of the
    parent, and the worker of a large trainer would be replaced after each item.
    """
    if not memory_mb:
        return False
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 asked after each item
            used = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes; bytes on macOS
        used = peak if sys.platform == "darwin" else peak << 10
    return used > memory_mb << 19


def _in_words(fault: BaseException) -> str:
    try:
        text = str(fault)
    except Exception:
        text = ""
    line = " ".join(text[: 4 * _MAX_MESSAGE].split())[:_MAX_MESSAGE]
    return f"{type(fault).__name__}: {line}" if line else type(fault).__name__


if __name__ == "__main__":
    sys.exit(main())
