"""Credit from the worst step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.min_form import MinForm
from apportion.credit.ops import leave_one_out
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
A, B = (0.8, -0.6, 0.4), (0.5,)


def steps(*scores: float, width: int = 1) -> list[tuple[int, int, float]]:
    return [(i * width, (i + 1) * width, score) for i, score in enumerate(scores)]


def two_answers(batch: Batch, **more: object) -> CreditBatch:
    """Three steps of one token beside one step of two tokens."""
    return batch(
        {"tokens": 3, "reward": 0.0, "spans": steps(*A)}, {"tokens": 2, "reward": 1.0, "spans": steps(*B, width=2)}
    )


def process_part(strategy: MinForm, made: CreditBatch) -> list[list[float]]:
    return strategy(made).parts["process"].tolist()


def assert_near(got: list[list[float]], want: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=1e-4)


def test_blame_covers_the_worst_step_and_all_before_it_and_nothing_after(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 0.0, "spans": steps(*A)})
    plain = MinForm(signed=True, baseline="none", outcome_weight=0)
    assert_near(plain(made).advantages.tolist(), [[-0.6, -0.6, 0.0]])
    strict = MinForm(form="strict", signed=True, baseline="none", outcome_weight=0)
    assert_near(strict(made).advantages.tolist(), [[-0.6, -0.6, 0.4]])


@pytest.mark.parametrize(
    ("form", "baseline", "expected"),
    [
        ("soft", "token", [[-1.35, -1.1, -0.25], [0.9, 0.9, 0.0]]),  # .25 and -.2 a token
        ("soft", "step", [[-2.1, -1.6, -0.5], [0.7, 0.7, 0.0]]),  # .5 and -.2 a step
        ("strict", "token", [[-1.1, -1.1, -0.1], [0.7667, 0.7667, 0.0]]),  # .5, and -.6 -.6 .4 in the mean
        ("strict", "step", [[-1.1, -1.1, -0.1], [0.7667, 0.7667, 0.0]]),
    ],
)
def test_baselines_by_hand(batch: Batch, form: str, baseline: str, expected: list) -> None:
    strategy = MinForm(form=form, baseline=baseline, signed=True)  # type: ignore[arg-type]
    assert_near(process_part(strategy, two_answers(batch)), expected)


def test_the_strict_baseline_counts_tokens_and_not_padding(batch: Batch) -> None:
    rows = [
        {"tokens": 5, "reward": 0.0, "spans": [(0, 4, 0.8), (4, 5, -0.6)]},
        {"tokens": 2, "reward": 1.0, "spans": steps(0.5, -0.1)},
    ]
    strategy = MinForm(form="strict", signed=True)
    alone = process_part(strategy, batch(*rows))
    assert_near(alone, [[-0.5] * 5, [0.5, 0.5, 0, 0, 0]])  # lowest -.6 five times, against -.1 twice
    beside = strategy(batch(*rows, {"tokens": 40, "reward": 1.0, "group": 1})).parts["process"]
    assert_near(beside[:2, :5].tolist(), alone)


def test_a_probability_becomes_the_difference_of_two_classes(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 0.0, "spans": steps(0.9, 0.2, 0.7)})
    assert_near(process_part(MinForm(baseline="none"), made), [[-0.6, -0.6, 0.0]])
    penalty = batch({"tokens": 2, "reward": 0.0, "spans": steps(-1.0, 0.0)})
    assert_near(process_part(MinForm(baseline="none", score_kind="penalty"), penalty), [[-1.0, 0.0]])


@pytest.mark.parametrize("form", ["soft", "strict"])
def test_one_step_per_answer_is_leave_one_out_of_the_outcome(batch: Batch, form: str) -> None:
    rewards = [0.0, 0.25, 1.0, 1.0]
    made = batch(*({"tokens": n + 1, "reward": r, "spans": [(0, n + 1, r)]} for n, r in enumerate(rewards)))
    strategy = MinForm(form=form, baseline="step", signed=True)  # type: ignore[arg-type]
    expected = leave_one_out(torch.tensor(rewards), torch.zeros(4, dtype=torch.long))
    for row, (got, want) in enumerate(zip(process_part(strategy, made), expected.tolist())):
        assert got == pytest.approx([want] * (row + 1) + [0.0] * (3 - row))


def test_steps_that_score_alike_are_the_outcome_rule(batch: Batch) -> None:
    made = batch(*({"tokens": 4, "reward": r, "spans": steps(r, r, width=2)} for r in (0.0, 0.25, 1.0)))
    credit = MinForm(form="strict", signed=True)(made)
    torch.testing.assert_close(credit.parts["process"], credit.parts["outcome"])


def test_the_reward_is_added_on_all_tokens(batch: Batch) -> None:
    credit = MinForm(signed=True, outcome_weight=2.0)(two_answers(batch))
    assert credit.parts["outcome"].tolist() == [[-2, -2, -2], [2, 2, 0]]
    assert MinForm().requires == {"spans:steps", "reward"}
    assert MinForm(outcome_weight=0).requires == {"spans:steps"}


def test_separators_are_spared_and_the_end_token_is_not(batch: Batch) -> None:
    row = {"tokens": 5, "reward": 0.0, "spans": [(0, 1, -0.5), (2, 4, 0.5)]}
    plain = MinForm(form="strict", signed=True, baseline="none", outcome_weight=0)
    assert plain(batch(row)).advantages.tolist() == [[-0.5, 0, 0.5, 0.5, 0.5]]
    theirs = MinForm(form="strict", signed=True, baseline="none", outcome_weight=0, spare_separators=False)
    assert theirs(batch(row)).advantages.tolist() == [[-0.5, -0.5, 0.5, 0.5, 0.5]]


def test_answers_without_steps_get_nothing_and_are_in_nobodys_baseline(batch: Batch) -> None:
    rows = [{"tokens": 2, "reward": 0.0, "spans": steps(0.5, 0.5)}, {"tokens": 9, "reward": 1.0}]
    for form in ("soft", "strict"):
        got = MinForm(form=form, signed=True)(batch(*rows)).parts["process"]  # type: ignore[arg-type]
        assert got.eq(0).all()


def test_how_often_the_worst_step_is_the_last(batch: Batch) -> None:
    rows = [steps(1.0, 0.0), steps(0.0, 1.0), steps(1.0, 0.5, 0.25), steps(0.0), steps(0.5, 0.5)]
    made = batch(*({"tokens": 3, "reward": 0.0, "spans": spans} for spans in rows))
    assert MinForm()(made).metrics == {"steps": 2.0, "worst_step_last": 0.5}


def test_a_value_and_a_temperature_of_zero_are_refused() -> None:
    with pytest.raises(InputError, match=r"score_kind=value: .* must not be summed; use credit=process/difference"):
        MinForm(score_kind="value")
    with pytest.raises(InputError, match="temperature must be over 0, not 0; for the minimum use form=strict"):
        MinForm(temperature=0)
    with pytest.raises(InputError, match="baseline must be token, step or none, not 'group'"):
        MinForm(baseline="group")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="form must be soft or strict, not 'hard'"):
        MinForm(form="hard")  # type: ignore[arg-type]
