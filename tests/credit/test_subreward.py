"""A sub-reward on the spans that earned or lost it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.subreward import SubReward
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def test_blame_falls_on_faulty_spans_and_praise_on_right_ones(batch: Batch) -> None:
    tags = [(0, 1, 1.0), (2, 4, 0.0)]
    made = batch({"tokens": 5, "reward": 0.0, "spans": tags}, {"tokens": 5, "reward": 1.0, "spans": tags})
    assert SubReward(eps=0)(made).advantages.tolist() == [[0, 0, -1, -1, 0], [1, 0, 0, 0, 0]]


def test_a_row_without_spans_keeps_its_credit_on_all_tokens(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 0.0}, {"tokens": 3, "reward": 1.0, "spans": [(1, 2, 1.0)]})
    assert SubReward(eps=0)(made).advantages.tolist() == [[-1, -1, 0], [0, 1, 0]]


def test_right_spans_are_not_blamed_nor_faulty_ones_praised_for_what_nobody_located(batch: Batch) -> None:
    made = batch(
        {"tokens": 3, "reward": 0.0, "spans": [(0, 1, 1.0)]},  # lost its score, no fault located
        {"tokens": 3, "reward": 1.0, "spans": [(0, 1, 0.0)]},  # better than its group, nothing right located
    )
    assert SubReward(eps=0)(made).advantages.tolist() == [[-1, -1, -1], [1, 1, 1]]


def test_a_fault_inside_a_right_span_is_not_praised(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0, "spans": [(0, 3, 1.0), (1, 2, 0.0)]}, {"tokens": 1, "reward": 0.0})
    assert SubReward(eps=0)(made).advantages[0].tolist() == [1, 0, 1]


def test_spans_that_a_tool_wrote_leave_the_credit_to_the_policys_tokens(batch: Batch) -> None:
    made = batch(
        {"tokens": 3, "reward": 0.0, "spans": [(1, 2, 0.0)], "written": [True, False, True]},
        {"tokens": 1, "reward": 1.0},
    )
    assert SubReward(eps=0)(made).advantages[0].tolist() == [-1, 0, -1]


def test_one_failure_in_a_large_group_is_cut(batch: Batch) -> None:
    made = batch(*({"tokens": 1, "reward": float(i > 0)} for i in range(8)))
    assert SubReward(eps=0)(made).advantages[0].item() == pytest.approx(-(7**0.5))  # -2.65
    assert SubReward(eps=0, max_abs=2.0)(made).advantages[0].item() == -2.0
    with pytest.raises(InputError, match="max_abs must be over 0, not -1"):
        SubReward(max_abs=-1)


def test_the_sequence_form_takes_no_spans(batch: Batch) -> None:
    strategy = SubReward(project="sequence", eps=0)
    assert strategy.requires == {"score:format"}
    assert SubReward().requires == {"score:format", "spans:format"}
    made = batch({"tokens": 2, "reward": 0.0, "spans": [(0, 1, 0.0)]}, {"tokens": 2, "reward": 1.0})
    assert strategy(made).advantages.tolist() == [[-1, -1], [1, 1]]
    with pytest.raises(InputError, match="project must be spans or sequence, not 'token'"):
        SubReward(project="token")  # type: ignore[arg-type]


def test_an_abstention_is_not_a_zero(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": 0.0, "scores": {"format": s}} for s in (None, 0.0, 1.0)]
    credit = SubReward(eps=0)(batch(*rows))
    assert credit.advantages[:, 0].tolist() == [0, -1, 1]
    assert credit.metrics == {"dead_groups": 0.0}


def test_a_masked_row_leaves_the_scores_baseline(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": r, "truncated": r > 1} for r in (0.0, 1.0, 50.0)]
    out = SubReward(eps=0)(batch(*rows, mask_truncated=True)).advantages
    assert out.dtype == torch.float32
    assert out[:, 0].tolist() == [-1, 1, 0]
