"""What several processes of one run need to know of each other; alone, everything is as with one."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

__all__ = ["all_processes", "is_main_process", "process_count", "process_number"]


def process_count() -> int:
    """How many there are, as ``torchrun`` started them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_number() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is the one that writes files."""
    return process_number() == 0


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
