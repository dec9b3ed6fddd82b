"""A penalty on spans, scaled and never centred."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from apportion.credit import CreditBatch
from apportion.credit.penalty import SpanPenalty
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def test_one_failure_among_eight_loses_on_its_span_and_nobody_wins(batch: Batch) -> None:
    clean = [{"tokens": 4, "reward": 1.0, "spans": [(0, 4, 1.0)]}] * 7
    made = batch({"tokens": 4, "reward": 0.0, "spans": [(1, 3, 0.0)]}, *clean)
    credit = SpanPenalty(eps=0)(made)
    size = 1 / (7 / 64) ** 0.5  # the population's standard deviation of one 1 and seven 0: 3.02 of it
    assert credit.advantages[0].tolist() == pytest.approx([0, -size, -size, 0])
    assert credit.advantages[1:].eq(0).all()
    assert credit.metrics == {"dead_groups": 0.0, "blamed_tokens": 2 / 32}
    assert SpanPenalty(eps=0, max_abs=2.0)(made).advantages[0].tolist() == [0, -2, -2, 0]


def test_answers_that_are_equally_bad_teach_nothing_unless_the_scale_is_none(batch: Batch) -> None:
    made = batch(*({"tokens": 2, "reward": 0.0, "spans": [(0, 1, 0.0)]} for _ in range(3)))
    credit = SpanPenalty()(made)
    assert credit.advantages.eq(0).all()
    assert credit.metrics["dead_groups"] == 1.0
    assert SpanPenalty(scale="none")(made).advantages.tolist() == [[-1, 0]] * 3


def test_the_batchs_spread_reaches_groups_without_one_of_their_own(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": 0.0, "spans": [(0, 1, 0.0)]}] * 2
    rows += [{"tokens": 1, "reward": 1.0, "group": 1}] * 2
    assert SpanPenalty(scale="batch", eps=0)(batch(*rows)).advantages[:, 0].tolist() == [-2, -2, 0, 0]


def test_severity_is_what_the_score_lacks_and_overlapping_faults_add_up(batch: Batch) -> None:
    spans = [(0, 2, 0.25), (1, 3, 0.0), (3, 4, 0.75)]
    made = batch({"tokens": 5, "reward": 0.0, "spans": spans}, {"tokens": 1, "reward": 1.0})
    assert SpanPenalty(scale="none")(made).advantages[0].tolist() == [-0.75, -1.75, -1.0, 0, 0]


def test_a_failure_that_nobody_located_falls_on_all_tokens(batch: Batch) -> None:
    rows = [
        {"tokens": 2, "reward": 0.25, "spans": [(0, 1, 1.0)]},
        {"tokens": 2, "reward": 0.25, "spans": [(0, 1, 0.0)], "written": [False, True]},  # the fault is a tool's
        {"tokens": 2, "reward": 1.0},
        {"tokens": 2, "reward": None},  # abstained
    ]
    got = SpanPenalty(scale="none")(batch(*rows)).advantages
    assert got.tolist() == [[-0.75, -0.75], [0, -0.75], [0, 0], [0, 0]]


def test_an_abstention_is_not_a_clean_answer_in_the_groups_spread(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": 0.0, "spans": [(0, 1, 0.0)]}, {"tokens": 1, "reward": None}]
    assert SpanPenalty()(batch(*rows)).advantages.eq(0).all()


def test_penalties_are_taken_without_their_sign(batch: Batch) -> None:
    rows = [{"tokens": 2, "reward": -0.5, "spans": [(0, 1, -2.0), (1, 2, 0.0)]}, {"tokens": 2, "reward": 0.0}]
    strategy = SpanPenalty(score_kind="penalty", scale="none")
    assert strategy(batch(*rows)).advantages.tolist() == [[-2, 0], [0, 0]]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match=r"score_kind=value: .* use a located verifier"):
        SpanPenalty(score_kind="value")
    with pytest.raises(InputError, match="scale must be group, batch or none, not 'token'"):
        SpanPenalty(scale="token")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_abs must be over 0, not 0"):
        SpanPenalty(max_abs=0)
