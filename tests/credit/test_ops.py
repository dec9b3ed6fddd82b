"""Step functions: hand numbers and laws."""

from __future__ import annotations

import pytest
import torch

from apportion.credit import ops
from apportion.credit.ops import (
    batch_moments,
    broadcast_rows,
    group_normalize_steps,
    reduce_steps,
    return_to_go,
    spread_steps,
    step_differences,
    whiten,
)

NAN = float("nan")


def flags(*rows: str) -> torch.Tensor:
    """``flags("110")``: a bool row."""
    return torch.tensor([[char == "1" for char in row] for row in rows])


def test_every_public_name_is_there() -> None:
    assert all(hasattr(ops, name) for name in ops.__all__)


def test_process_supervision_sums_normalised_scores_to_the_right() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.9, 0.0]])
    mask = flags("111", "110")
    out = return_to_go(group_normalize_steps(scores, mask, torch.zeros(2, dtype=torch.long), eps=0), mask)
    expected = torch.tensor([[-0.8018, -1.5368, -1.9376], [0.8018, 0.7350, 0.0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    scores, mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), flags("110", "111")
    out = return_to_go(group_normalize_steps(scores, mask, torch.zeros(2, dtype=torch.long), eps=0), mask)
    expected = torch.tensor([[-0.4082482905, -1.2247448714, 0.0], [0.4082482905, -0.4082482905, -1.2247448714]])
    torch.testing.assert_close(out, expected)


def test_return_to_go_skips_what_is_masked_and_adds_no_padding() -> None:
    values, mask = torch.tensor([[1.0, NAN, 2.0, 50.0]]), flags("1010")
    assert return_to_go(values, mask).tolist() == [[3.0, 0.0, 2.0, 0.0]]
    assert return_to_go(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


def test_step_differences_by_hand() -> None:
    values = torch.tensor([[0.75, 0.25, 0.9], [0.75, 9.0, 9.0], [9.0, 9.0, 9.0]])
    out = step_differences(values, flags("111", "100", "000"), torch.tensor([0.0, 1.0, 1.0]), torch.full((3,), 0.5))
    assert out.tolist() == [[0.25, -0.5, -0.25], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_step_differences_sum_to_the_outcome_less_the_start_whatever_is_missing_between() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(40, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, 6, generator=generator) < 0.6
    mask[0] = False
    outcome, start = torch.rand(2, 40, generator=generator, dtype=torch.float64)
    out = step_differences(values, mask, outcome, start)
    expected = (outcome - start).where(mask.any(dim=1), 0.0)
    torch.testing.assert_close(out.sum(dim=1), expected)
    assert out[~mask].eq(0).all()


def test_rows_of_different_length_end_at_their_own_last_step() -> None:
    scores = torch.tensor([[0.0, 1.0, 7.0, 7.0], [0.0, 0.0, 0.0, 2.0]])
    mask = flags("1100", "1111")
    assert reduce_steps(scores, mask, "last").tolist() == [1.0, 2.0]
    ends = step_differences(torch.zeros(2, 4), mask, torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert ends.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]


def test_no_columns_of_steps_give_none() -> None:
    none, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert step_differences(none, mask, torch.ones(2), torch.zeros(2)).shape == (2, 0)
    for how in ("min", "product", "mean", "last"):
        assert reduce_steps(none, mask, how).tolist() == [0.0, 0.0]


def test_the_reduction_decides_which_answer_is_better() -> None:
    scores, mask = torch.zeros(2, 10), torch.zeros(2, 10, dtype=torch.bool)
    scores[0], mask[0] = 0.95, True  # long
    scores[1, :5], mask[1, :5] = 0.92, True  # short
    product = reduce_steps(scores, mask, "product")
    torch.testing.assert_close(product, torch.tensor([0.5987369392, 0.6590815232]))
    torch.testing.assert_close(reduce_steps(scores, mask, "min"), torch.tensor([0.95, 0.92]))
    assert product[0] < product[1]


def test_reductions_leave_out_what_is_masked() -> None:
    scores = torch.tensor([[0.5, -9.0, 0.2, NAN], [NAN, NAN, NAN, NAN]])
    mask = flags("1010", "0000")
    out = {how: reduce_steps(scores, mask, how).tolist() for how in ("min", "product", "mean", "last")}  # type: ignore[arg-type]
    assert out["min"] == out["last"] == pytest.approx([0.2, 0.0])
    assert out["product"] == pytest.approx([0.1, 0.0])
    assert out["mean"] == pytest.approx([0.35, 0.0])


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="min, product, mean or last, not 'sum'"):
        reduce_steps(torch.zeros(1, 1), flags("1"), "sum")  # type: ignore[arg-type]


def test_rows_and_steps_spread_to_tokens_in_float32() -> None:
    rows = broadcast_rows(torch.tensor([0.1, NAN], dtype=torch.float64), flags("110", "000"))
    assert rows.dtype == torch.float32
    assert rows.tolist() == [[pytest.approx(0.1), pytest.approx(0.1), 0.0], [0.0, 0.0, 0.0]]
    steps = spread_steps(torch.tensor([[1.0, -1.0]], dtype=torch.float64), torch.tensor([[0, 0, 1, -1]]))
    assert steps.dtype == torch.float32
    assert steps.tolist() == [[1.0, 1.0, -1.0, 0.0]]
    assert spread_steps(torch.zeros(1, 0), torch.tensor([[-1, -1]])).tolist() == [[0.0, 0.0]]


def test_tokens_or_answers_count_once_in_the_moments_of_a_batch() -> None:
    values, mask = torch.tensor([[1.0, 3.0, 5.0, NAN], [7.0, NAN, NAN, NAN]]), flags("1110", "1000")
    by_token, by_row = batch_moments(values, mask), batch_moments(values, mask, over="sequence")
    assert [m.item() for m in by_token] == pytest.approx([4.0, 5**0.5])
    assert [m.item() for m in by_row] == pytest.approx([5.0, ((16 + 4 + 0) / 3 / 2 + 4 / 2) ** 0.5])
    assert batch_moments(values, mask, ddof=1)[1].item() == pytest.approx((20 / 3) ** 0.5)


def test_whitened_values_have_mean_zero_and_unit_spread() -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7)[None] < torch.tensor([[7], [3], [1], [0], [5]])
    for over in ("token", "sequence"):
        out = whiten(values, mask, over=over, eps=0)  # type: ignore[arg-type]
        assert [m.item() for m in batch_moments(out, mask, over=over)] == pytest.approx([0, 1])  # type: ignore[arg-type]
        assert not out[~mask].any()
        kept = whiten(values, mask, over=over, center=False, eps=0)  # type: ignore[arg-type]
        assert torch.allclose(kept[mask] / values[mask].double(), kept[0, 0] / values[0, 0].double())


def test_equal_values_and_an_empty_mask_whiten_to_zero() -> None:
    values, mask = torch.full((2, 3), 0.1), flags("111", "110")
    for center in (True, False):
        assert not whiten(values, mask, center=center, eps=0).any()
    assert not whiten(values, flags("000", "000")).any()
    with pytest.raises(ValueError, match="over must be token or sequence, not 'row'"):
        whiten(values, mask, over="row")  # type: ignore[arg-type]
