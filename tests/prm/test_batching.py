"""Laws of batching: every example once an epoch, within the limits, the same for a seed, shared fairly."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.batching import Batching, EpochBatches, cut_batches, epoch_batches, parts_by_length
from apportion.verifiers import InputError

LENGTHS = np.random.default_rng(0).lognormal(4.4, 0.6, 500).astype(int).tolist()
KINDS: tuple[Batching, ...] = ("random", "length_grouped")


def padded(batches: list[list[int]], lengths: list[int]) -> int:
    return sum(len(batch) * max(lengths[example] for example in batch) for batch in batches)


def least_padding(lengths: list[int], most: int) -> int:
    """By trying every cut of the sorted lengths."""
    order, found = sorted(lengths, reverse=True), []
    for parts in range(1, min(most, len(order)) + 1):
        for cuts in combinations(range(1, len(order)), parts - 1):
            edges = [0, *cuts, len(order)]
            found.append(sum((stop - start) * order[start] for start, stop in pairwise(edges)))
    return min(found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_parts_hold_every_row_once_with_the_least_padding(lengths: list[int], most: int) -> None:
    parts = parts_by_length(lengths, most)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) <= most
    assert padded(parts, lengths) == least_padding(lengths, most)


def test_rows_of_one_length_stay_in_one_part() -> None:
    assert parts_by_length([7, 7, 7], 3) == [[0, 1, 2]]
    assert parts_by_length([], 3) == []


def test_a_batch_is_as_large_as_its_limits_allow() -> None:
    assert cut_batches([3, 0, 1, 2], [2, 2, 2, 9], rows=2, tokens=None) == [[3, 0], [1, 2]]
    assert cut_batches([3, 0, 1, 2], [2, 2, 2, 9], rows=None, tokens=6) == [[3], [0, 1, 2]]
    assert cut_batches([0, 1, 2], [2, 3, 3], rows=2, tokens=6) == [[0, 1], [2]]


@pytest.mark.parametrize("batching", KINDS)
@pytest.mark.parametrize(("rows", "tokens"), [(32, None), (None, 2000), (16, 3000)])
@pytest.mark.parametrize("multiple", [1, 4])
def test_an_epoch_holds_every_example_once(
    batching: Batching, rows: int | None, tokens: int | None, multiple: int
) -> None:
    generator = np.random.default_rng(0)
    batches = epoch_batches(LENGTHS, batching, rows=rows, tokens=tokens, generator=generator, multiple=multiple)
    assert sorted(example for batch in batches for example in batch) == list(range(500))
    assert len(batches) % multiple == 0
    for batch in batches:
        assert rows is None or len(batch) <= rows
        assert tokens is None or len(batch) == 1 or padded([batch], LENGTHS) <= tokens


def test_grouping_by_length_saves_padding_and_begins_with_the_largest_batch() -> None:
    batches = {
        kind: epoch_batches(LENGTHS, kind, rows=32, tokens=None, generator=np.random.default_rng(0)) for kind in KINDS
    }
    assert padded(batches["random"], LENGTHS) > 1.7 * sum(LENGTHS)
    assert padded(batches["length_grouped"], LENGTHS) < 1.25 * sum(LENGTHS)
    assert max(LENGTHS) in [LENGTHS[example] for example in batches["length_grouped"][0]]


def test_a_random_batch_in_parts_has_little_padding() -> None:
    batches = epoch_batches(LENGTHS, "random", rows=32, tokens=None, generator=np.random.default_rng(0))
    parts = [
        [batch[row] for row in part] for batch in batches for part in parts_by_length([LENGTHS[e] for e in batch], 8)
    ]
    assert padded(parts, LENGTHS) < 1.15 * sum(LENGTHS)


@pytest.mark.parametrize("batching", KINDS)
def test_the_order_depends_on_seed_and_epoch_alone(batching: Batching) -> None:
    def run(seed: int, epochs: int = 2) -> list[list[int]]:
        return list(EpochBatches(LENGTHS, batching, rows=None, tokens=3000, epochs=epochs, seed=seed))

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1)[: len(run(1, epochs=1))] == run(1, epochs=1)
    first, second = run(1, epochs=1), run(1)[len(run(1, epochs=1)) :]
    assert first != second


@pytest.mark.parametrize("batching", KINDS)
def test_processes_share_the_batches_of_one_epoch_evenly(batching: Batching) -> None:
    each = [
        EpochBatches(LENGTHS, batching, rows=7, tokens=None, epochs=2, seed=0, process=p, processes=3) for p in range(3)
    ]
    assert len({len(batches) for batches in each}) == 1
    found = [example for batches in each for batch in list(batches)[: len(batches) // 2] for example in batch]
    assert sorted(found) == list(range(500))


def test_epochs_are_counted_in_batches_of_different_number() -> None:
    batches = EpochBatches(LENGTHS, "random", rows=50, tokens=None, epochs=2, seed=0)
    assert [batches.epochs_after(number) for number in (0, 5, 10, 20)] == [0.0, 0.5, 1.0, 2.0]


def test_fewer_examples_than_processes_are_an_error() -> None:
    with pytest.raises(InputError, match="2 examples are too few for 3 processes"):
        EpochBatches([5, 5], "random", rows=1, tokens=None, epochs=1, seed=0, processes=3)
