"""The task's credit only where the format held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from apportion.credit import CreditBatch
from apportion.credit.gate import Gate
from apportion.credit.process import ProcessReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def judged(batch: Batch, *rows: tuple[float, float | None]) -> CreditBatch:
    return batch(*({"tokens": 1, "reward": r, "scores": {"format": f}} for r, f in rows))


ROWS = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))


def test_failed_answers_leave_the_baseline(batch: Batch) -> None:
    credit = Gate(Uniform(eps=0))(judged(batch, *ROWS))
    assert credit.advantages[:, 0].tolist() == [1, -1, 0, 0]
    assert credit.metrics == {"dead_groups": 0.0, "gated_rows": 0.5}


def test_failed_answers_stay_in_the_baseline_where_that_is_asked(batch: Batch) -> None:
    made = judged(batch, *ROWS)
    kept = Gate(Uniform(eps=0), baseline="keep")(made).advantages
    free = Uniform(eps=0)(made).advantages
    assert kept[:2].equal(free[:2])
    assert kept[2:].eq(0).all()


def test_one_answer_left_is_compared_with_nobody(batch: Batch) -> None:
    rows = ((1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    assert Gate(Uniform())(judged(batch, *rows)).advantages.eq(0).all()
    assert Gate(Uniform(), baseline="keep")(judged(batch, *rows)).advantages[0].gt(0).all()


def test_an_abstention_passes_and_a_gate_that_all_pass_is_not_there(batch: Batch) -> None:
    made = judged(batch, (1.0, None), (0.0, 1.0))
    for baseline in ("leave", "keep"):
        gated = Gate(Uniform(), baseline=baseline)(made)  # type: ignore[arg-type]
        assert gated.advantages.equal(Uniform()(made).advantages)


def test_steps_of_failed_answers_leave_the_pooled_statistics(batch: Batch) -> None:
    rows = [
        {"tokens": 2, "reward": 0.0, "scores": {"format": 1.0}, "spans": [(0, 1, 1.0), (1, 2, 0.0)]},
        {"tokens": 2, "reward": 0.0, "scores": {"format": 0.0}, "spans": [(0, 1, 9.0), (1, 2, 9.0)]},
    ]
    gate = Gate(ProcessReward(accumulate="own", eps=0))
    assert gate(batch(*rows)).advantages.tolist() == [[1, -1], [0, 0]]


def test_a_gate_says_what_it_needs_and_tells() -> None:
    assert Gate(Uniform()).requires == {"reward", "score:format"}
    assert Gate(ProcessReward(), source="tags").requires == {"spans:steps", "score:tags"}
    assert Gate(Uniform()).extra_information == "whether format held"
    assert Gate(ProcessReward()).extra_information == "a score for every step; whether format held"
    with pytest.raises(InputError, match="baseline must be leave or keep, not 'drop'"):
        Gate(Uniform(), baseline="drop")  # type: ignore[arg-type]
