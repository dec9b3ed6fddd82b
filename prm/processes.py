"""What several processes of one run need to know of each other; alone, everything is as with one."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import time
import warnings
from typing import Any

import torch.distributed as dist

__all__ = ["all_processes", "is_main_process", "part_at_exit", "process_count", "process_number"]


PARTING = 0.5  # seconds


def process_count() -> int:
    """How many there are, as ``torchrun`` started them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_number() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is the one that writes files."""
    return process_number() == 0


def part_at_exit() -> None:
    """Have several processes disconnect before the interpreter ends; call it before they meet.

    Threads of Gloo that outlive the interpreter abort, and the launcher takes a finished run for a failed one. They end
    with the process group, unless default arguments of ``torch.distributed.nn`` hold it, as they do where that module
    is imported later; what else may hold it gets a moment to let go.
    """
    if process_count() == 1 or not dist.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_part)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(PARTING)


def all_processes(found: list[Any]) -> list[Any]:
    """The lists of all processes, one after the other; each waits for all.

    >>> all_processes([1, 2])
    [1, 2]
    """
    if not (dist.is_available() and dist.is_initialized()):
        return found
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, found)
    return [item for some in lists for item in some]
