"""Named random streams: every draw is a pure function of (seed, name, indices), so nothing hidden must be restored."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["named_generator", "named_seed", "named_torch_generator", "row_uniforms"]


def named_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream that ``names`` spell; different names give independent streams.

    >>> named_seed(0, "rollout", 3) == named_seed(0, "rollout", 3), named_seed(0, "rollout") == named_seed(0, "data")
    (True, False)
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def named_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for the named stream."""
    return np.random.Generator(np.random.PCG64(named_seed(seed, *names)))


def named_torch_generator(seed: int, *names: str | int) -> torch.Generator:
    """A torch CPU generator for the named stream."""
    return torch.Generator().manual_seed(named_seed(seed, *names))


def row_uniforms(row_seeds: list[int], num_steps: int) -> NDArray[np.float64]:
    """One uniform in [0, 1) per (row, step): (B, num_steps). A row's numbers depend on its own seed alone.

    A longer limit extends a row's numbers and does not change the first ones.
    """
    return np.stack([np.random.Generator(np.random.PCG64(s)).random(num_steps) for s in row_seeds])
