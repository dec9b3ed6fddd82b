"""Sequence-level credit with other baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from apportion.credit import CreditBatch
from apportion.credit.sequence import BestOfGroup, LeaveOneOut, LengthWeightedBaseline, RawReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def answers(rewards: Sequence[float | None], lengths: Sequence[int] | None = None, group: int = 0) -> list[dict]:
    lengths = lengths or [1] * len(rewards)
    return [{"tokens": n, "reward": r, "group": group} for n, r in zip(lengths, rewards)]


def first_tokens(strategy: object, made: CreditBatch) -> list[float]:
    return strategy(made).advantages[:, 0].tolist()  # type: ignore[operator]


def test_leave_one_out_by_hand(batch: Batch) -> None:
    made = batch(*answers([0, 0, 1, 1]), *answers([5.0], group=1))
    assert first_tokens(LeaveOneOut(), made) == pytest.approx([-2 / 3, -2 / 3, 2 / 3, 2 / 3, 0])


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_one(batch: Batch) -> None:
    made = batch(*answers([1.0, 0.25, 0.0, 0.5, 0.25]))
    centred = first_tokens(Uniform(scale="none"), made)
    assert first_tokens(LeaveOneOut(), made) == pytest.approx([5 / 4 * value for value in centred])


def test_the_odd_one_out_is_not_blown_up_by_others_that_are_equal(batch: Batch) -> None:
    made = batch(*answers([0.35] * 7 + [0.95]))
    out = first_tokens(LeaveOneOut(normalize=True), made)
    assert out[-1] == pytest.approx(0.6)
    assert max(map(abs, out)) < 10


def test_without_a_baseline_the_reward_itself_falls_on_every_token(batch: Batch) -> None:
    made = batch(*answers([0.5, -1.0, None], [2, 1, 1]))
    assert RawReward()(made).advantages.tolist() == [[0.5, 0.5], [-1.0, 0.0], [0.0, 0.0]]


def test_the_length_weighted_baseline_by_hand(batch: Batch) -> None:
    made = batch(*answers([1.0, 0.0], [1, 3]), *answers([1.0], [2], group=1))
    out = LengthWeightedBaseline()(made).advantages
    assert out.tolist() == [[0.75, 0, 0], [-0.25, -0.25, -0.25], [0, 0, 0]]  # the mean per token is 1/4


def test_with_equal_lengths_it_is_the_groups_mean(batch: Batch) -> None:
    made = batch(*answers([1.0, 0.0, 0.5, 0.25], [3] * 4))
    assert first_tokens(LengthWeightedBaseline(), made) == pytest.approx(first_tokens(Uniform(scale="none"), made))


def test_tokens_of_a_tool_have_no_weight_in_the_baseline(batch: Batch) -> None:
    rows = answers([1.0, 0.0], [2, 4])
    rows[1]["written"] = [True, False, False, True]
    assert first_tokens(LengthWeightedBaseline(), batch(*rows)) == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [2.0, 0, 0, 0]),  # sample deviation 1/2
        ([0.9, 0.6, 0.0], [0.3 / 0.4582576, 0, 0]),
        ([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0]),  # a shared best has no lead
        ([0.5, 0.5], [0, 0]),
        ([1.0], [0]),
        ([None, 1.0, 0.0], [0, 1 / 0.7071068, 0]),
        ([None, 1.0], [0, 0]),
        ([0.1 + 0.2, 0.3, 0.0], [0, 0, 0]),  # equal but for rounding
    ],
)
def test_only_a_single_best_answer_is_rewarded_by_its_lead(batch: Batch, rewards: list, expected: list[float]) -> None:
    assert first_tokens(BestOfGroup(), batch(*answers(rewards))) == pytest.approx(expected, abs=1e-4)


def test_the_lead_can_stay_unscaled_and_is_counted(batch: Batch) -> None:
    made = batch(*answers([0.75, 0.5, 0.0]), *answers([1.0, 1.0], group=1), *answers([-1.0, -3.0], group=2))
    credit = BestOfGroup(normalize=False)(made)
    assert credit.advantages[:, 0].tolist() == [0.25, 0, 0, 0, 0, 2.0, 0]
    assert credit.metrics == {"dead_groups": pytest.approx(1 / 3), "leads": pytest.approx(2 / 3)}


@pytest.mark.parametrize("strategy", [LeaveOneOut(), RawReward(), LengthWeightedBaseline(), BestOfGroup()])
def test_a_row_left_out_of_training_enters_no_statistic(batch: Batch, strategy: object) -> None:
    rows = answers([1.0, 0.0, 9.0], [1, 2, 3])
    rows[2]["truncated"] = True
    with_it, without = batch(*rows, mask_truncated=True), batch(*rows[:2])
    assert first_tokens(strategy, with_it) == [*first_tokens(strategy, without), 0]


@pytest.mark.parametrize("kind", [LeaveOneOut, RawReward, LengthWeightedBaseline, BestOfGroup])
def test_one_verifier_can_be_the_source(batch: Batch, kind: type) -> None:
    rows = [{"tokens": 1, "reward": 1.0, "scores": {"format": s}} for s in (0.0, 1.0)]
    assert kind(source="format").requires == {"score:format"}
    assert first_tokens(kind(source="format"), batch(*rows))[1] > 0


def test_an_unknown_ddof_is_refused() -> None:
    with pytest.raises(InputError, match="ddof must be 0 or 1, not 3"):
        BestOfGroup(ddof=3)
