"""Which examples go through the model together: little padding, every example once an epoch, the same for a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from ..verifiers import InputError

__all__ = ["Batching", "EpochBatches", "cut_batches", "epoch_batches", "parts_by_length"]

Batching = Literal["random", "length_grouped"]

POOL = 50
"""Batches' worth of examples, drawn at random, within which ``length_grouped`` sorts."""


def parts_by_length(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Cut a batch into parts of like length, each padded for itself, so that the padded size is the least possible.

    The sum over the rows, and so the gradient, is that of the whole batch. Parts come longest first, rows within a
    part too. ``sum over parts of rows * longest`` is minimised exactly, O(most * B^2).

    Args:
        lengths: B tokens a row.
        most: parts at most; fewer where more would save nothing.

    >>> parts_by_length([3, 9, 2, 8], 2)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sizes = np.array([lengths[row] for row in order])
    count = len(order)
    if most <= 1 or count <= 1 or sizes[0] == sizes[-1]:
        return [order] if order else []
    # cost[i, j] of rows i to j as one part; rows are sorted, so that i is the longest
    start, stop = np.arange(count)[:, None], np.arange(1, count + 1)
    cost = np.where(stop > start, (stop - start) * sizes[:, None], np.iinfo(np.int64).max // 2)
    best, choices = cost[0], []
    for _ in range(min(most, count) - 1):
        # the last part begins at row i, the others make up the rows before it
        with_one_more = cost + np.concatenate([[0], best[:-1]])[:, None]
        choice = with_one_more.argmin(axis=0)
        better = with_one_more.min(axis=0)
        choices.append(np.where(better < best, choice, -1))
        best = np.minimum(best, better)
    parts, stop_at = [], count
    for choice in reversed(choices):
        begin = int(choice[stop_at - 1])
        if begin > 0:
            parts.append(order[begin:stop_at])
            stop_at = begin
    return [order[:stop_at], *reversed(parts)]


def cut_batches(order: Sequence[int], lengths: Sequence[int], rows: int | None, tokens: int | None) -> list[list[int]]:
    """Cut an order of examples into batches, each as large as the limits allow.

    Args:
        order: examples, as indices into ``lengths``.
        lengths: tokens of each example.
        rows: most examples of a batch; None for no limit.
        tokens: most tokens of a batch, padding to its longest row included; a longer example goes alone. None for no
            limit.

    >>> cut_batches([0, 1, 2, 3], [2, 2, 5, 9], rows=None, tokens=8)
    [[0, 1], [2], [3]]
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for example in order:
        padded = (len(batch) + 1) * max(longest, lengths[example])
        if batch and ((rows is not None and len(batch) == rows) or (tokens is not None and padded > tokens)):
            batches.append(batch)
            batch, longest = [], 0
        batch.append(example)
        longest = max(longest, lengths[example])
    return [*batches, batch] if batch else batches


def epoch_batches(
    lengths: Sequence[int],
    batching: Batching,
    *,
    rows: int | None,
    tokens: int | None,
    generator: np.random.Generator,
    multiple: int = 1,
) -> list[list[int]]:
    """Every example once, in batches of an order drawn anew.

    ``random`` cuts a random order. ``length_grouped`` sorts random pools of examples by length, cuts these, and draws
    the order of the batches; the largest comes first, so that memory runs out at once or never.

    Args:
        lengths: N tokens an example.
        batching: see above.
        rows, tokens: limits of a batch; see :func:`cut_batches`.
        generator: of the order.
        multiple: the number of batches is a multiple of this, the number of processes; neighbours of like length go
            to the processes at the same time. The largest batches are halved where need be.
    """
    order = generator.permutation(len(lengths)).tolist()
    if batching == "random":
        return _to_multiple(cut_batches(order, lengths, rows, tokens), lengths, multiple)
    batches = []
    pool = POOL * _rows_of_a_batch(lengths, rows, tokens)
    for start in range(0, len(order), pool):
        some = sorted(order[start : start + pool], key=lambda example: -lengths[example])
        batches += cut_batches(some, lengths, rows, tokens)
    batches = _to_multiple(batches, lengths, multiple)
    groups = [batches[start : start + multiple] for start in range(0, len(batches), multiple)]
    shuffled = [groups[index] for index in generator.permutation(len(groups))]
    largest = max(range(len(shuffled)), key=lambda index: max(_padded(batch, lengths) for batch in shuffled[index]))
    shuffled.insert(0, shuffled.pop(largest))
    return [batch for group in shuffled for batch in group]


class EpochBatches:
    """The batches of a whole run, one epoch after the other: a batch sampler for ``torch.utils.data.DataLoader``.

    The epochs are one sequence, because their numbers of batches differ where the tokens are limited.

    Args:
        lengths: N tokens an example.
        batching, rows, tokens: see :func:`epoch_batches`.
        epochs: how often each example is seen.
        seed: of the order; each epoch has its own.
        process, processes: this process gets every ``processes``-th batch, from ``process`` on.

    >>> batches = EpochBatches([2, 1, 2], "random", rows=2, tokens=None, epochs=1, seed=0)
    >>> len(batches), sorted(example for batch in batches for example in batch)
    (2, [0, 1, 2])
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batching: Batching,
        *,
        rows: int | None,
        tokens: int | None,
        epochs: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self._lengths, self._batching, self._rows, self._tokens = list(lengths), batching, rows, tokens
        self._seed, self._process, self._processes = seed, process, processes
        self._counts = [len(self._epoch(epoch)) // processes for epoch in range(epochs)]

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in range(len(self._counts)):
            yield from self._epoch(epoch)[self._process :: self._processes]

    def epochs_after(self, batches: int) -> float:
        """How many epochs the first ``batches`` batches of each process are."""
        for epoch, count in enumerate(self._counts):
            if batches < count:
                return epoch + batches / count
            batches -= count
        return float(len(self._counts))

    def _epoch(self, epoch: int) -> list[list[int]]:
        generator = np.random.default_rng([self._seed, epoch])
        limits = {"rows": self._rows, "tokens": self._tokens}
        return epoch_batches(self._lengths, self._batching, **limits, generator=generator, multiple=self._processes)


def _rows_of_a_batch(lengths: Sequence[int], rows: int | None, tokens: int | None) -> int:
    """About how many examples fit in a batch."""
    mean = max(1.0, sum(lengths) / max(1, len(lengths)))
    fit = len(lengths) if tokens is None else max(1, int(tokens / mean))
    return max(1, fit if rows is None else min(rows, fit))


def _padded(batch: Sequence[int], lengths: Sequence[int]) -> int:
    return len(batch) * max(lengths[example] for example in batch)


def _to_multiple(batches: list[list[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    while len(batches) % multiple:
        index = max(range(len(batches)), key=lambda i: (len(batches[i]) > 1, _padded(batches[i], lengths)))
        half = len(batches[index]) // 2
        if not half:
            raise InputError(f"{len(lengths)} examples are too few for {multiple} processes; start fewer")
        batches[index : index + 1] = [batches[index][:half], batches[index][half:]]
    return batches
