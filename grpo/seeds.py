"""Named random streams: every draw is a pure function of (seed, name, indices), so nothing hidden must be restored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["named_generator", "named_seed", "row_uniforms"]


def named_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream that ``names`` spell; different names give independent streams.

    A name may hold anything: ``/``, which parts the names, is escaped inside them.

    >>> named_seed(0, "rollout", 3) == named_seed(0, "rollout", 3), named_seed(0, "rollout") == named_seed(0, "data")
    (True, False)
    """
    text = "/".join([str(seed), *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def named_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for the named stream."""
    return np.random.Generator(np.random.PCG64(named_seed(seed, *names)))


def row_uniforms(row_seeds: Sequence[int], num_steps: int) -> NDArray[np.float64]:
    """One uniform in [0, 1) per (row, step): (B, num_steps). A row's numbers depend on its own seed alone.

    A longer limit extends a row's numbers and does not change the first ones. They stay so far under 1 that a product
    ``uniform * total`` is never rounded up to ``total``.
    """
    rows = [np.random.Generator(np.random.PCG64(seed)).random(num_steps) for seed in row_seeds]
    return np.minimum(np.stack(rows), 1 - 2.0**-52)
