"""A beginning that answers share counts once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch
from apportion.credit.prefix_weights import PrefixShare, prefix_counts
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def spelled(*words: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows of letters; a blank is a token of a tool."""
    width = max(map(len, words), default=0)
    ids = torch.tensor([[ord(char) for char in word.ljust(width, "\0")] for word in words]).reshape(len(words), width)
    return ids, (ids != 0) & (ids != ord(" "))


def test_the_published_example(batch: Batch) -> None:
    ids, _ = spelled("abcd", "abef", "axyz")
    made = batch(*({"tokens": 4, "reward": reward} for reward in (1.0, 0.0, 0.0)))
    credit = PrefixShare()(replace(made, completion_ids=ids))
    expected = torch.tensor([[1 / 3, 1 / 2, 1, 1], [1 / 3, 1 / 2, 1, 1], [1 / 3, 1, 1, 1]])
    torch.testing.assert_close(credit.loss_weight, expected)
    assert torch.equal(credit.advantages, Uniform()(made).advantages)
    assert credit.metrics["shared_prefix"] == pytest.approx(5 / 12)


def test_each_beginning_of_a_group_weighs_one_in_all() -> None:
    ids, mask = spelled("abab", "abba", "abab", "ba", "b", "")
    counts = prefix_counts(ids, mask, torch.zeros(6, dtype=torch.long))
    beginnings = {word[:n] for word in ("abab", "abba", "abab", "ba", "b") for n in range(1, len(word) + 1)}
    assert float((1 / counts[mask].double()).sum()) == pytest.approx(len(beginnings))


def test_copies_share_their_whole_length() -> None:
    ids, mask = spelled("aba", "aba")
    assert prefix_counts(ids, mask, torch.zeros(2, dtype=torch.long)).tolist() == [[2, 2, 2]] * 2


def test_groups_are_kept_apart_and_their_rows_may_lie_anywhere() -> None:
    ids, mask = spelled("ab", "ab", "ac", "ab")
    counts = prefix_counts(ids, mask, torch.tensor([9, 3, 9, 3]))
    assert counts.tolist() == [[2, 1], [2, 2], [2, 1], [2, 2]]


def test_a_tools_tokens_are_part_of_the_beginning() -> None:
    ids, mask = spelled("a b", "a b", "acb")
    ids[1, 1] = ord("x")  # the tool wrote something else
    mask[:, 1] = False
    assert prefix_counts(ids, mask, torch.zeros(3, dtype=torch.long)).tolist() == [[3, 1, 1]] * 3


def test_an_answer_that_ended_is_no_beginning_of_the_padding() -> None:
    ids, mask = spelled("ab", "ab\0", "ab\0\0")
    assert prefix_counts(ids, mask, torch.zeros(3, dtype=torch.long))[:, :2].tolist() == [[3, 3]] * 3
    longer, mask = spelled("ab", "abc")
    assert prefix_counts(longer, mask, torch.zeros(2, dtype=torch.long)).tolist() == [[2, 2, 1], [2, 2, 1]]


def test_rows_left_out_of_training_do_not_share() -> None:
    ids, mask = spelled("ab", "ab")
    mask[1] = False
    assert prefix_counts(ids, mask, torch.zeros(2, dtype=torch.long)).tolist() == [[1, 1], [1, 1]]


words = st.lists(st.tuples(st.text("ab", max_size=5), st.integers(0, 1)), min_size=1, max_size=7)


@settings(deadline=None, max_examples=80)
@given(rows=words)
def test_the_counts_are_the_slow_loops(rows: list[tuple[str, int]]) -> None:
    ids, mask = spelled(*(word for word, _ in rows))
    counts = prefix_counts(ids, mask, torch.tensor([group for _, group in rows]))
    for row, (word, group) in enumerate(rows):
        for place in range(len(word)):
            start = word[: place + 1]
            assert counts[row, place] == sum(g == group and other.startswith(start) for other, g in rows)
        assert counts[row, len(word) :].eq(1).all()


def test_an_inner_weight_is_multiplied_and_the_claims_are_on_the_advantages(batch: Batch) -> None:
    ids, _ = spelled("abcd", "abef")
    made = replace(batch({"tokens": 4, "reward": 1.0}, {"tokens": 4, "reward": 0.0}), completion_ids=ids)
    twice = PrefixShare(PrefixShare())(made)
    assert twice.loss_weight is not None
    assert twice.loss_weight[0].tolist() == [0.25, 0.25, 1, 1]
    assert PrefixShare().conserves == "sign"
    assert PrefixShare().requires == {"reward", "completion_ids"}
    with pytest.raises(InputError, match="credit needs completion_ids of every token"):
        PrefixShare()(replace(made, completion_ids=None))
