"""Progress under a prover."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.pav import ProcessAdvantage
from apportion.credit.process import StepDifference
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def steps(*scores: float) -> list[tuple[int, int, float]]:
    return [(i, i + 1, score) for i, score in enumerate(scores)]


def test_progress_of_the_best_of_four_by_hand(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0, "spans": steps(0.5, 0.25, 0.9)}, {"tokens": 1, "reward": 0.0})
    progress = ProcessAdvantage(alpha=1.0)(made).parts["progress"]
    # V = .5 (the group's mean), .5, .25, then the reward; Q = .9375, .9375, .6836, 1
    expected = torch.tensor([[0.0, -0.2539, 0.3164], [-0.9375, 0.0, 0.0]])
    torch.testing.assert_close(progress, expected, rtol=0, atol=1e-4)


def test_the_progress_of_an_answer_sums_to_outcome_less_start_under_the_prover(batch: Batch) -> None:
    rows = [(1.0, [0.9, 0.1, 0.4]), (0.0, [0.2, 0.8]), (0.25, [])]
    made = batch(*({"tokens": max(len(v), 1), "reward": r, "spans": steps(*v)} for r, v in rows))
    progress = ProcessAdvantage(alpha=3.0)(made).parts["progress"].sum(dim=1)
    start = sum(r for r, _ in rows) / 3
    expected = [3 * ((1 - (1 - r) ** 4) - (1 - (1 - start) ** 4)) for r, _ in rows]
    assert progress.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_values_as_they_are_are_step_differences_on_top_of_the_outcome(batch: Batch) -> None:
    made = batch(
        {"tokens": 2, "reward": 1.0, "spans": steps(0.75, 0.5)},
        {"tokens": 3, "reward": 0.0, "spans": steps(0.25, 0.5, 0.5)},
    )
    credit = ProcessAdvantage(alpha=2.0, best_of=1)(made)
    torch.testing.assert_close(credit.parts["progress"], 2 * StepDifference()(made).advantages)
    torch.testing.assert_close(credit.parts["outcome"], Uniform(scale="none")(made).advantages)


def test_no_chance_is_over_one(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 0.0}, {"tokens": 1, "reward": 1.2, "scores": {"answer": 1.0}})
    with pytest.raises(InputError, match=r"reward gave 1\.2 in row 1; name a verifier of such scores in source, or"):
        ProcessAdvantage()(made)
    by_answer = ProcessAdvantage(source="answer")
    assert by_answer.requires == {"score:answer", "spans:steps"}
    assert by_answer(made).advantages[:, 0].tolist() == pytest.approx([-0.5 - 5 * 0.9375, 0.5 + 5 * 0.0625])
    assert ProcessAdvantage(best_of=1)(made).advantages[:, 0].tolist() == pytest.approx([-3.6, 3.6])
    wild = batch({"tokens": 1, "reward": 0.0, "spans": steps(-2.0)})
    with pytest.raises(InputError, match="steps gave -2 in row 0"):
        ProcessAdvantage()(wild)


def test_only_values_have_progress() -> None:
    with pytest.raises(InputError, match=r"score_kind=correctness: .* use credit=process/own_step"):
        ProcessAdvantage(score_kind="correctness")
    with pytest.raises(InputError, match="best_of must be at least 1 try, not 0"):
        ProcessAdvantage(best_of=0)
