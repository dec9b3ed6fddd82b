"""What the processes inside the sandbox have in common: their limits, their descriptors, how they run an answer."""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import types
from typing import Any

from .sandbox_data import ANSWER

__all__ = [
    "become",
    "close_all_but",
    "label",
    "limit",
    "limit_answer",
    "new_module",
    "quiet",
    "read_all",
    "report",
    "run_answer",
]

_LABEL = 200  # characters of an error's message that are kept


def close_all_but(*kept: int) -> None:
    bound = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)
    edges = [-1, *sorted(kept), max(bound, *kept) + 1]
    for left, right in itertools.pairwise(edges):
        if left + 1 < right:  # an empty range would close everything
            os.closerange(left + 1, right)


def become(user: int | None) -> None:
    """Turn from root into a user that nobody else is; the process limit counts by user."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_NPROC: settings["processes"] + 1,  # and the judge
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def limit_answer(settings: dict[str, Any]) -> None:
    seconds = settings["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["file"], settings["file"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def report(results: int, **facts: Any) -> None:
    data = json.dumps(facts).encode() + b"\n"
    while data:
        data = data[os.write(results, data) :]


def label(error: BaseException) -> str:
    try:
        text = error.msg if isinstance(error, SyntaxError) else error
        words = f"{type(error).__name__}: {text}"
    except BaseException:
        words = type(error).__name__
    return words.removesuffix(": ")[:_LABEL]


def quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def new_module(name: str) -> types.ModuleType:
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    module = sys.modules[name] = types.ModuleType(name)
    return module


def run_answer(source: str, module: types.ModuleType) -> None:
    """Compile the answer alone, so that its lines count from 1, and run it."""
    exec(compile(source, ANSWER, "exec", dont_inherit=True), vars(module))
