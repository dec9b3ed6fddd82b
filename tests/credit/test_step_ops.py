"""What several step rules share: hand numbers, laws, and steps that are not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import step_ops
from apportion.credit.ops import leave_one_out
from apportion.credit.step_ops import (
    best_of,
    check_score_kind,
    discounted_return,
    mean_of_others,
    min_from_here,
    soft_min_weights,
    tokens_per_step,
)
from apportion.verifiers import InputError

NAN = float("nan")
ROWS = st.lists(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=5, max_size=5), min_size=1, max_size=4)


def unzip(rows: list[list[tuple[float, bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64)
    return values, torch.tensor([[there for _, there in row] for row in rows])


def test_every_public_name_is_there() -> None:
    assert all(hasattr(step_ops, name) for name in step_ops.__all__)


@settings(deadline=None, max_examples=50)
@given(ROWS, st.floats(0, 1))
def test_discounted_return_agrees_with_the_recursion(rows: list, decay: float) -> None:
    got = discounted_return(*unzip(rows), decay)
    for row, line in zip(rows, got):
        later = 0.0
        for column in reversed(range(len(row))):
            value, there = row[column]
            later = value + decay * later if there else later
            assert float(line[column]) == pytest.approx(later if there else 0.0, abs=1e-9)


def test_no_decay_is_the_return_and_full_decay_the_value_itself() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, True]])
    assert discounted_return(values, mask, 1.0).tolist() == [[7.0, 6.0, 4.0]]
    assert discounted_return(values, mask, 0.0).tolist() == [[1.0, 2.0, 4.0]]
    assert discounted_return(values[:, :0], mask[:, :0], 0.5).shape == (1, 0)


@settings(deadline=None, max_examples=50)
@given(ROWS, st.floats(0.01, 10))
def test_soft_min_lies_between_the_minimum_and_the_mean(rows: list, temperature: float) -> None:
    values, mask = unzip(rows)
    weights = soft_min_weights(values, mask, temperature)
    assert weights[~mask].eq(0).all()
    for row, weight, line in zip(rows, weights, values):
        there = [value for value, kept in row if kept]
        if not there:
            assert weight.eq(0).all()
            continue
        assert float(weight.sum()) == pytest.approx(1)
        assert min(there) - 1e-9 <= float((weight * line).sum()) <= sum(there) / len(there) + 1e-9


def test_soft_min_by_hand() -> None:
    weights = soft_min_weights(torch.tensor([[0.8, -0.6, 0.4]]), torch.ones(1, 3, dtype=torch.bool), 0.1)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0, 0.0]]), rtol=0, atol=1e-4)
    far = soft_min_weights(torch.tensor([[1e4, -1e4]]), torch.ones(1, 2, dtype=torch.bool), 1e-3)
    assert far.tolist() == [[0.0, 1.0]]


def test_the_minimum_from_here_looks_past_steps_that_are_not_there() -> None:
    values = torch.tensor([[0.8, -9.0, -0.5, 0.5], [1.0, 1.0, 1.0, -9.0]])
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    assert min_from_here(values, mask).tolist() == [[-0.5, 0.0, -0.5, 0.5], [0.0, 1.0, 0.0, 0.0]]
    assert min_from_here(values[:, :0], mask[:, :0]).shape == (2, 0)


def test_best_of_four_by_hand() -> None:
    before, after = best_of(torch.tensor([0.5, 0.25], dtype=torch.float64), 4)
    assert float(after - before) == pytest.approx(-0.2539, abs=1e-4)
    ends = torch.tensor([0.0, 1.0])
    assert best_of(ends, 4).tolist() == best_of(ends, 1).tolist() == [0.0, 1.0]


def test_mean_of_others_by_hand() -> None:
    groups = torch.tensor([3, 3, 3, 8, 8, 9])
    values = torch.tensor([1.0, 2.0, 4.0, 7.0, NAN, 5.0])
    weights = torch.tensor([1, 1, 3, 2, 0, 1])
    got = mean_of_others(values, weights, groups)
    torch.testing.assert_close(got, torch.tensor([3.5, 3.25, 1.5, NAN, 7.0, NAN], dtype=torch.float64), equal_nan=True)
    pooled = mean_of_others(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]), groups[:2])
    assert pooled.tolist() == [5.0, 2.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 2)), min_size=1, max_size=8))
def test_equal_weights_make_the_leave_one_out_baseline(rows: list[tuple[float, int]]) -> None:
    values, groups = (torch.tensor(column) for column in zip(*rows))
    values = values.double()
    others = mean_of_others(values, torch.ones_like(values), groups)
    torch.testing.assert_close((values - others).nan_to_num(nan=0.0), leave_one_out(values, groups))


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7])
def test_equal_values_are_their_own_mean_without_rounding(value: float) -> None:
    values = torch.full((7,), value, dtype=torch.float32)
    others = mean_of_others(values, torch.arange(1, 8), torch.zeros(7, dtype=torch.long))
    assert (values.double() - others).eq(0).all()


def test_tokens_of_each_step() -> None:
    assert tokens_per_step(torch.tensor([[0, 0, 2, -1], [-1, -1, -1, 1]]), 3).tolist() == [[2, 0, 1], [0, 1, 0]]
    assert tokens_per_step(torch.full((2, 3), -1), 0).shape == (2, 0)


def test_a_kind_of_score_is_known_and_fits() -> None:
    check_score_kind("penalty", {"value": "never"})
    with pytest.raises(InputError, match="score_kind=value: never"):
        check_score_kind("value", {"value": "never"})
    with pytest.raises(InputError, match="score_kind must be correctness, penalty or value, not 'level'"):
        check_score_kind("level", {})
