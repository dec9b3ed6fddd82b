"""Which kinds of token right answers have and wrong ones have not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import fisher_exact

from apportion.credit import CreditBatch
from apportion.credit.token_types import KeyTokens, count_types, fisher_p, information_gain
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def answers(batch: Batch, rows: Sequence[tuple[float | None, Sequence[int]]], group: Sequence[int] = ()) -> CreditBatch:
    """Rows of (reward, token ids)."""
    groups = group or [0] * len(rows)
    made = batch(
        *({"tokens": len(ids), "reward": reward, "group": g} for (reward, ids), g in zip(rows, groups, strict=True))
    )
    ids = torch.zeros(made.completion_mask.shape, dtype=torch.long)
    for row, (_, tokens) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    return replace(made, completion_ids=ids)


def key(batch: CreditBatch, **options: object) -> torch.Tensor:
    return KeyTokens(**options)(batch).parts["key_tokens"]  # type: ignore[arg-type]


@settings(deadline=None, max_examples=80)
@given(cells=st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=6))
def test_the_p_value_is_scipys(cells: list[tuple[int, int, int, int]]) -> None:
    mine = fisher_p(*torch.tensor(cells).T)
    for p, (a, b, c, d) in zip(mine.tolist(), cells):
        assert p == pytest.approx(fisher_exact([[a, b], [c, d]])[1], abs=1e-9)


def test_no_types_have_no_p_value() -> None:
    assert fisher_p(*torch.zeros(4, 0, dtype=torch.long)).shape == (0,)


def test_information_in_bits() -> None:
    def entropy(*shares: float) -> float:
        return -sum(share * math.log2(share) for share in shares if share)

    gain = information_gain(*torch.tensor([[3], [1], [1], [3]])).item()
    assert gain == pytest.approx(1 - entropy(0.25, 0.75))
    uneven = information_gain(*torch.tensor([[2], [0], [1], [5]])).item()
    assert uneven == pytest.approx(entropy(3 / 8, 5 / 8) - 0.75 * entropy(1 / 6, 5 / 6))


def test_counts_by_hand(batch: Batch) -> None:
    made = answers(batch, [(1.0, [5, 5, 7]), (1.0, [5]), (0.0, [7, 7, 8, 9]), (0.0, [5])], group=[0, 0, 0, 1])
    counts = count_types(
        made.completion_ids, made.completion_mask, torch.tensor([True, True, False, False]), made.group_ids
    )
    assert counts.ids.tolist() == [5, 7, 8, 9, 5]
    assert counts.right_with.tolist() == [2, 1, 0, 0, 0]
    assert counts.right_without.tolist() == [0, 1, 2, 2, 0]
    assert counts.wrong_with.tolist() == [0, 1, 1, 1, 1]
    assert counts.wrong_without.tolist() == [1, 0, 0, 0, 0]
    assert counts.right_share.tolist() == [0.75, 0.25, 0, 0, 0]
    assert counts.wrong_share.tolist() == [0, 0.5, 0.25, 0.25, 1]
    assert counts.places.tolist() == [[0, 0, 1, -1], [0, -1, -1, -1], [1, 1, 2, 3], [4, -1, -1, -1]]


def test_key_tokens_by_hand(batch: Batch) -> None:
    made = answers(batch, [(1.0, [1, 3]), (1.0, [1, 3]), (1.0, [1, 3]), (0.0, [2, 3]), (0.0, [2, 3]), (0.0, [2, 3])])
    out = key(made, frequency=False)
    strength = (math.exp(-2 * 0.1) + 2 * 1.0) / 3  # p = .1, one bit
    worth = 2 * (1 / (1 + math.exp(-strength * math.pi / 2)) - 0.5)
    expected = torch.tensor([[worth, 0.0]] * 3 + [[-worth, 0.0]] * 3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(key(made, frequency=False, top=0.5), 0.5 * expected)
    only_fisher = 2 * (1 / (1 + math.exp(-math.exp(-0.2) * math.pi / 2)) - 0.5)
    assert key(made, frequency=False, gain=0.0)[0, 0].item() == pytest.approx(only_fisher)


def test_it_is_added_to_the_inner_advantage(batch: Batch) -> None:
    made = answers(batch, [(1.0, [1, 3]), (0.0, [2, 3])])
    credit = KeyTokens(Uniform(eps=0))(made)
    torch.testing.assert_close(credit.advantages, Uniform(eps=0)(made).advantages + credit.parts["key_tokens"])
    assert credit.metrics["key_token_size"] == pytest.approx(float(credit.parts["key_tokens"].abs().mean()))


def test_with_frequencies_a_type_of_one_side_counts_in_full(batch: Batch) -> None:
    made = answers(batch, [(1.0, [1, 3]), (1.0, [1, 3]), (0.0, [2, 3]), (0.0, [2, 3])])
    torch.testing.assert_close(key(made), torch.tensor([[1.0, 0.0]] * 2 + [[-1.0, 0.0]] * 2))


def test_the_frequency_ratio_by_hand(batch: Batch) -> None:
    made = answers(batch, [(1.0, [1, 1, 3]), (1.0, [1, 2, 3]), (0.0, [1, 2]), (0.0, [2, 2])])
    out = key(made, gain=0.0)[0, 0].item()  # type 1: in both right answers, in one of two wrong ones
    p = fisher_exact([[2, 1], [0, 1]])[1]
    assert p == 1.0
    assert out == 0  # no strength, whatever the direction
    out = key(made, fisher=0.0)[0, 0].item()
    right, wrong = 3 / 6, 1 / 4  # of 6 and 4 tokens, mean 5
    damped = [share * 3 / (share + 2 * (0.5 + 0.5 * tokens / 5)) for share, tokens in ((right, 6), (wrong, 4))]
    direction = math.pi / 2 - math.pi / 4 + damped[0] / (damped[1] + 1e-5) - damped[1] / (damped[0] + 1e-5)
    gain = information_gain(*torch.tensor([[2], [1], [0], [1]])).item()
    assert out == pytest.approx(2 / (1 + math.exp(-gain * direction)) - 1, abs=1e-6)


def test_the_end_token_can_be_left_out(batch: Batch) -> None:
    made = answers(batch, [(1.0, [1, 9]), (0.0, [2, 3])])
    out = key(made, end_ids=[9, 2])
    assert out[:, 0].tolist() == [pytest.approx(1, abs=1e-6), 0]
    assert out[:, 1].tolist() == [0, pytest.approx(-1, abs=1e-6)]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equal_rewards_adds_nothing(batch: Batch, reward: float) -> None:
    rows = [(reward, [1, 2]), (reward, [3, 4]), (1.0, [1, 2]), (0.0, [3, 4])]
    out = key(answers(batch, rows, group=[0, 0, 1, 1]))
    assert out[:2].eq(0).all()
    assert out[2:].ne(0).all()


def test_groups_and_tools_tokens_are_kept_apart(batch: Batch) -> None:
    rows: list[tuple[float | None, list[int]]] = [(1.0, [1, 2]), (0.0, [3, 4]), (1.0, [3, 4]), (0.0, [1, 2])]
    out = key(answers(batch, rows, group=[0, 0, 1, 1]))
    assert out.sign().tolist() == [[1, 1], [-1, -1], [1, 1], [-1, -1]]
    made = answers(batch, [(1.0, [1, 2]), (0.0, [3, 2])])
    by_tool = made.completion_mask.clone()
    by_tool[1, 1] = False
    assert key(replace(made, completion_mask=by_tool))[0, 1] > 0  # the other row's 2 is not the policy's


def test_rows_without_a_reward_do_not_count(batch: Batch) -> None:
    rows: list[tuple[float | None, list[int]]] = [(1.0, [1, 2]), (0.0, [3, 2]), (None, [1, 1])]
    out = key(answers(batch, rows))
    torch.testing.assert_close(out[:2], key(answers(batch, rows[:2])))
    assert out[2].eq(0).all()


def test_weights_that_say_nothing_are_refused() -> None:
    with pytest.raises(InputError, match=r"fisher and gain must not be negative nor both 0, not 0\.0 and 0\.0"):
        KeyTokens(fisher=0.0, gain=0.0)
