"""Group statistics: hand numbers and laws."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit.ops import (
    dead_group_share,
    group_mean,
    group_normalize,
    group_normalize_steps,
    group_std,
    leave_one_out,
    normalize_then_sum,
)

NAN = float("nan")


def one_group(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.long)


def normalized(rewards: list[float], **options: object) -> list[float]:
    values = torch.tensor(rewards, dtype=torch.float64)
    return group_normalize(values, one_group(len(rewards)), **options).tolist()  # type: ignore[arg-type]


# --- group_normalize -------------------------------------------------------------------------------------------------


def test_two_right_and_two_wrong_answers_are_one_standard_deviation_apart() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert group_normalize(rewards, one_group(4), eps=0).tolist() == [-1.0, -1.0, 1.0, 1.0]
    sample = group_normalize(rewards, one_group(4), ddof=1, eps=0)
    torch.testing.assert_close(sample, torch.tensor([-1, -1, 1, 1]) * 0.8660254)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.7, 60000.0])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(dtype: torch.dtype, size: int, value: float, scale: str) -> None:
    rewards = torch.full((size,), value).to(dtype)
    for ddof, eps in product((0, 1), (0.0, 1e-6)):
        out = group_normalize(rewards, one_group(size), ddof=ddof, eps=eps, scale=scale)  # type: ignore[arg-type]
        assert out.tolist() == [0.0] * size
    assert leave_one_out(rewards, one_group(size)).tolist() == [0.0] * size
    assert leave_one_out(rewards, one_group(size), normalize=True, eps=0).tolist() == [0.0] * size


def test_a_spread_that_is_rounding_counts_as_none() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert rewards[0] != rewards[1]
    for scale in ("group", "batch", "none"):
        assert normalized(rewards, eps=0, scale=scale) == [0.0] * 4
    assert dead_group_share(torch.tensor(rewards, dtype=torch.float64), one_group(4)) == 1.0


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], [1.0, -1.0]),
        ([1.0, -1.0], [1.0, -1.0]),
        ([1.0, 1.0, 2.0], [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)]),
    ],
)
def test_shift_and_scale_of_the_rewards_do_not_matter(rewards: list[float], expected: list[float]) -> None:
    for factor, shift in product((1.0, 100.0, 0.01), (0.0, -5.0)):
        moved = [factor * reward + shift for reward in rewards]
        assert normalized(moved, eps=0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("eps", "expected"),
    [
        (0.0, [-1.3416407865, -0.4472135955, 0.4472135955, 1.3416407865]),
        (1e-6, [-1.2314927283, -0.4104975761, 0.4104975761, 1.2314927283]),
        (1e-4, [-0.1349159394, -0.0449719798, 0.0449719798, 0.1349159394]),
    ],
)
def test_eps_is_added_to_the_standard_deviation_in_every_function(eps: float, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 1.00001, 1.00002, 1.00003], dtype=torch.float64)
    ids = one_group(4)
    pooled = group_normalize_steps(rewards[:, None], torch.ones(4, 1, dtype=torch.bool), ids, eps=eps)[:, 0]
    summed = normalize_then_sum(rewards[:, None], ids, eps=eps)
    batch_wide = group_normalize(rewards, ids, eps=eps, scale="batch")
    for out in (group_normalize(rewards, ids, eps=eps), pooled, summed, batch_wide):
        assert out.tolist() == pytest.approx(expected, abs=1e-3)


def test_groups_are_their_ids_not_neighbouring_blocks() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1])
    ids = torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])
    assert group_normalize(rewards, ids, eps=0).tolist() == [1, -1, -1, -1, 1, 1, -1, 1]


def test_another_prompt_of_other_difficulty_does_not_matter() -> None:
    rewards, ids = torch.tensor([0.0, 1, 10, 11]), torch.tensor([4, 4, 9, 9])
    assert group_normalize(rewards, ids, eps=0).tolist() == [-1, 1, -1, 1]


def test_scale_none_only_subtracts_the_mean() -> None:
    assert normalized([1, 0, 0, 0], scale="none") == [0.75, -0.25, -0.25, -0.25]


def test_scale_batch_divides_by_the_spread_of_all_rewards() -> None:
    rewards, ids = torch.tensor([0.0, 1, 10, 11]), torch.tensor([0, 0, 1, 1])
    out = group_normalize(rewards, ids, eps=0, scale="batch")
    torch.testing.assert_close(out, torch.tensor([-0.5, 0.5, -0.5, 0.5]) / math.sqrt(25.25))


def test_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="group, batch or none, not 'max'"):
        normalized([0, 1], scale="max")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_rewards_get_nothing_and_move_nobody(scale: str) -> None:
    rewards, ids = torch.tensor([1.0, NAN, 0.0, 1.0, NAN]), torch.tensor([0, 0, 0, 0, 5])
    out = group_normalize(rewards, ids, scale=scale)  # type: ignore[arg-type]
    kept = torch.tensor([0, 2, 3])
    alone = group_normalize(rewards[kept], ids[kept], scale=scale)  # type: ignore[arg-type]
    torch.testing.assert_close(out[kept], alone, rtol=0, atol=0)
    assert out[1] == out[4] == 0


def test_a_row_alone_in_its_group_gets_nothing() -> None:
    for ddof in (0, 1):
        assert group_normalize(torch.tensor([0.7]), one_group(1), ddof=ddof, eps=0).tolist() == [0.0]


def test_half_precision_rewards_neither_overflow_nor_lose_their_spread_inside() -> None:
    large = torch.tensor([60000.0, 60000, 0, 0], dtype=torch.float16)  # their sum is infinite in float16
    out = group_normalize(large, one_group(4), eps=0)
    assert out.dtype == torch.float32
    assert out.tolist() == [1, 1, -1, -1]
    near = torch.tensor([1000.25, 1000.25, 1000, 1000], dtype=torch.float32)  # equal if cast to float16
    assert group_normalize(near, one_group(4), eps=0).tolist() == [1, 1, -1, -1]
    close = torch.tensor([2048.0, 2049, 2048, 2049], dtype=torch.float64)
    out = group_normalize(close, one_group(4), eps=0)
    assert out.dtype == torch.float64
    assert out.tolist() == [-1, 1, -1, 1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 1.0, NAN])), max_size=9), st.randoms())
def test_order_of_rows_and_names_of_groups_do_not_matter(rows: list[tuple[int, float]], random) -> None:  # type: ignore[no-untyped-def]
    ids = torch.tensor([group for group, _ in rows], dtype=torch.long)
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    order = torch.tensor(random.sample(range(len(rows)), len(rows)), dtype=torch.long)
    renamed = torch.tensor([17, -3, 5, 0])[ids]
    for function in (group_normalize, leave_one_out, lambda r, g: group_normalize(r, g, scale="batch")):
        out = function(rewards, ids)
        torch.testing.assert_close(function(rewards[order], renamed[order]), out[order], rtol=0, atol=1e-12)
        assert torch.isfinite(out).all()


def test_no_rows_give_no_rows() -> None:
    none, ids = torch.zeros(0), one_group(0)
    assert group_normalize(none, ids).tolist() == leave_one_out(none, ids).tolist() == []
    assert group_normalize_steps(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), ids).shape == (0, 3)
    assert group_normalize_steps(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), one_group(2)).shape == (2, 0)


def test_wrong_shapes_and_infinite_rewards_are_named() -> None:
    with pytest.raises(ValueError, match=r"not \(3,\) and \(2,\)"):
        group_normalize(torch.zeros(3), one_group(2))
    with pytest.raises(ValueError, match=r"need rewards \(B,\), not \(2, 2\)"):
        leave_one_out(torch.zeros(2, 2), one_group(2))
    with pytest.raises(ValueError, match="row 1 holds an infinite value"):
        group_normalize(torch.tensor([0.0, float("-inf")]), one_group(2))
    with pytest.raises(ValueError, match="differ"):
        group_normalize_steps(torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool), one_group(2))


# --- group_mean and group_std ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 7, 8, 11])
def test_the_mean_of_equal_values_is_the_value_itself(size: int) -> None:
    values = torch.full((size,), 0.1, dtype=torch.float64)
    assert group_mean(values, one_group(size)).tolist() == [0.1] * size
    assert group_std(values, one_group(size)).tolist() == [0.0] * size


def test_mean_and_deviation_leave_out_missing_values() -> None:
    values, ids = torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([0, 0, 0, 1])
    assert group_mean(values, ids)[:3].tolist() == [2.0] * 3
    assert math.isnan(float(group_mean(values, ids)[3]))
    assert group_std(values, ids).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert group_std(values, ids, ddof=1)[0].item() == pytest.approx(math.sqrt(2))


def test_columns_are_pooled_with_their_group() -> None:
    table = torch.tensor([[0.0, 2.0], [4.0, NAN], [7.0, 9.0]])
    ids = torch.tensor([0, 0, 1])
    assert group_mean(table, ids).tolist() == [2.0, 2.0, 8.0]
    assert group_std(table, ids).tolist() == pytest.approx([math.sqrt(8 / 3), math.sqrt(8 / 3), 1.0])
    flat = group_normalize(table.flatten(), ids.repeat_interleave(2))
    torch.testing.assert_close(group_normalize(table, ids).flatten(), flat)


def test_variance_far_from_zero_is_not_lost() -> None:
    values = torch.tensor([1e8, 1e8 + 1, 1e8, 1e8 + 1], dtype=torch.float64)
    assert group_std(values, one_group(4)).tolist() == [0.5] * 4


# --- steps -----------------------------------------------------------------------------------------------------------


def test_step_scores_are_pooled_over_the_group() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.9, 5.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    out = group_normalize_steps(scores, mask, one_group(2), eps=0)
    torch.testing.assert_close(out, torch.tensor([[0.7350, 0.4009, -1.9376], [0.0668, 0.7350, 0.0]]), rtol=0, atol=1e-4)


# --- leave_one_out ---------------------------------------------------------------------------------------------------


def test_leave_one_out_by_hand() -> None:
    out = leave_one_out(torch.tensor([0.0, 0, 1, 1]), one_group(4))
    torch.testing.assert_close(out, torch.tensor([-2.0, -2, 2, 2]) / 3)
    assert leave_one_out(torch.tensor([0.3]), one_group(1)).tolist() == [0.0]
    with_gap = leave_one_out(torch.tensor([1.0, NAN, 0.0, 0.5]), torch.tensor([0, 0, 0, 1]))
    assert with_gap.tolist() == [1.0, 0.0, -1.0, 0.0]


def test_leave_one_out_is_the_centred_reward_times_g_over_g_less_one() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.0, 1.0, 0.5], dtype=torch.float64)
    ids = torch.tensor([0, 1, 0, 0, 1, 0])
    size = torch.tensor([4, 2, 4, 4, 2, 4])
    expected = group_normalize(rewards, ids, scale="none") * size / (size - 1)
    torch.testing.assert_close(leave_one_out(rewards, ids), expected)


def test_leave_one_out_divides_by_the_spread_of_the_others() -> None:
    out = leave_one_out(torch.tensor([3.0, 0.0, 2.0]), one_group(3), normalize=True, eps=0)
    torch.testing.assert_close(out, torch.tensor([2.0, -5.0, 1 / 3]))  # 2/1, -2.5/.5, .5/1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_the_odd_one_out_of_equal_rewards_is_not_blown_up(dtype: torch.dtype, factor: float) -> None:
    rewards = factor * torch.tensor([0.35] * 7 + [0.95], dtype=dtype)
    out = leave_one_out(rewards, one_group(8), normalize=True)
    assert out[-1].item() == pytest.approx(0.6 * factor, rel=1e-6)  # the others have no spread: no scale
    assert out.abs().max() < 10 * factor


# --- channels --------------------------------------------------------------------------------------------------------


def test_channels_are_normalised_apart_and_a_missing_value_stays_in_its_place() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.0, NAN], [1.0, 2.0], [0.0, 1.0]])
    out = normalize_then_sum(scores, one_group(4), eps=0)
    torch.testing.assert_close(out, torch.tensor([-0.2247448714, -1.0, 2.2247448714, -1.0]))


def test_channels_weigh_what_they_are_told() -> None:
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    out = normalize_then_sum(scores, one_group(2), weights=torch.tensor([1.0, 0.25]), eps=0)
    assert out.tolist() == [-0.75, 0.75]


def test_two_channels_tell_what_their_sum_hides() -> None:
    ids = one_group(2)
    one, both = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    summed = [group_normalize(scores.sum(dim=1), ids, ddof=1, eps=0)[1].item() for scores in (one, both)]
    apart = [normalize_then_sum(scores, ids, ddof=1, eps=0)[1].item() for scores in (one, both)]
    assert summed == pytest.approx([0.7071, 0.7071], abs=1e-4)
    assert apart == pytest.approx([0.7071, 1.4142], abs=1e-4)


# --- dead groups -----------------------------------------------------------------------------------------------------


def test_channels_that_cancel_are_seen_as_a_dead_total_of_living_channels() -> None:
    scores, ids = torch.tensor([[-3.0, 2], [2, -3], [0, -1], [-1, 0]]), one_group(4)
    assert group_normalize(scores.sum(dim=1), ids, eps=0).tolist() == [0.0] * 4
    assert dead_group_share(scores.sum(dim=1), ids) == 1.0
    assert [dead_group_share(channel, ids) for channel in scores.T] == [0.0, 0.0]


def test_dead_groups_leave_out_what_was_not_judged() -> None:
    values, ids = torch.tensor([1.0, NAN, 1.0, 0.0, NAN]), torch.tensor([0, 0, 1, 1, 2])
    assert dead_group_share(values, ids) == 0.5
    assert math.isnan(dead_group_share(torch.tensor([NAN]), one_group(1)))
    assert math.isnan(dead_group_share(torch.zeros(0), one_group(0)))


@pytest.mark.parametrize(("size", "expected"), [(2, 0.70237522), (4, 0.44904069), (8, 0.20065673)])
def test_expected_share_of_dead_groups(size: int, expected: float) -> None:
    p = 0.1819
    patterns = torch.tensor(list(product((0.0, 1.0), repeat=size)), dtype=torch.float64)  # every group there can be
    chance = (p**patterns * (1 - p) ** (1 - patterns)).prod(dim=1)
    ids = torch.arange(len(patterns)).repeat_interleave(size)
    dead = group_std(patterns.flatten(), ids).view_as(patterns)[:, 0] == 0
    assert chance[dead].sum().item() == pytest.approx(expected, abs=1e-8)
    assert p**size + (1 - p) ** size == pytest.approx(expected, abs=1e-8)
    assert dead_group_share(patterns.flatten(), ids) == 2 / 2**size
