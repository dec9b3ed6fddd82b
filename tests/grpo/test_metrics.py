"""Every logged number by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from apportion.credit import Credit, Rollout, collate
from apportion.grpo.metrics import (
    credit_metrics,
    drop_missing,
    length_metrics,
    reward_metrics,
    rollout_metrics,
    truth_name,
)
from apportion.verifiers import Span, Verdict

Make = Callable[..., Rollout]


def judged(
    rollout_of: Make, score: float | None, length: int, group: int, *, reward: float | None = None, **facts: Any
) -> Rollout:
    verdicts = {"answer": Verdict(score), "format": Verdict(None if length == 1 else float(length > 2))}
    return rollout_of(list(range(4, 4 + length)), group=group, verdicts=verdicts, reward=reward, **facts)


@pytest.fixture
def rollouts(rollout_of: Make) -> list[Rollout]:
    """Four groups: all right, all wrong, mixed, and one whose answers nobody judged."""
    rows = [
        (1.0, 3, 0, 1.0),
        (0.5, 2, 0, 1.0),
        (0.0, 4, 1, 0.0),
        (0.4, 5, 1, 0.0),
        (1.0, 6, 2, 1.0),
        (0.0, 1, 2, 0.0),
        (None, 7, 3, None),
    ]
    return [
        judged(rollout_of, score, length, group, reward=reward, truncated=length == 7)
        for score, length, group, reward in rows
    ]


def test_rewards_and_dead_groups(rollouts: list[Rollout]) -> None:
    metrics = reward_metrics(rollouts, collate(rollouts), success="answer", format="format")
    assert metrics == pytest.approx(
        {
            "reward/mean": 3 / 6,
            "reward/std": 0.5,
            "reward/dead_groups": 2 / 3,  # the fourth group is not judged
            "reward/dead_groups_right": 1 / 3,
            "reward/dead_groups_wrong": 1 / 3,
            "reward/effective_samples": 2.0,
            "verifier/answer_dead_groups": 0.0,
            "verifier/format_dead_groups": 3 / 4,  # 1 and 1; a single judged answer twice
            "task/success": 3 / 6,
            "format/pass_rate": 5 / 6,
            "verifier/answer": 2.9 / 6,
            "verifier/format": 5 / 6,
        }
    )


def test_rows_left_out_leave_the_groups_and_not_the_means(rollout_of: Make) -> None:
    rows = [judged(rollout_of, score, 3, 0, reward=score) for score in (1.0, 1.0)]
    rows.append(judged(rollout_of, 0.0, 3, 0, reward=0.0, truncated=True))
    kept = reward_metrics(rows, collate(rows), success="answer", format=None)
    masked = reward_metrics(rows, collate(rows, mask_truncated=True), success="answer", format=None)
    assert (kept["reward/dead_groups"], kept["reward/effective_samples"]) == (0.0, 3.0)
    assert (masked["reward/dead_groups"], masked["reward/effective_samples"]) == (1.0, 0.0)
    assert masked["reward/dead_groups_right"] == 1.0
    for key in ("reward/mean", "reward/std", "task/success", "verifier/answer"):
        assert kept[key] == masked[key]
    assert kept["reward/mean"] == pytest.approx(2 / 3)
    assert "format/pass_rate" not in kept


def test_a_dead_group_is_right_or_wrong_by_its_answers_and_not_by_the_size_of_its_reward(rollout_of: Make) -> None:
    equal = [judged(rollout_of, 0.0, 3, 0, reward=0.2) for _ in range(2)]  # wrong answers, rewarded for their layout
    mixed = [judged(rollout_of, score, 3, 1, reward=0.0) for score in (0.0, 1.0)]
    metrics = reward_metrics(equal + mixed, collate(equal + mixed), success="answer", format=None)
    assert metrics["reward/dead_groups"] == 1.0
    assert metrics["reward/dead_groups_wrong"] == 0.5
    assert metrics["reward/dead_groups_right"] == 0.0


def test_what_nobody_judged_is_absent(rollout_of: Make) -> None:
    rows = [judged(rollout_of, None, 1, 0) for _ in range(2)]
    metrics = reward_metrics(rows, collate(rows), success="answer", format="format")
    assert metrics == {"reward/effective_samples": 0.0}


def test_lengths(rollouts: list[Rollout]) -> None:
    assert length_metrics(rollouts, success="answer") == pytest.approx(
        {
            "length/mean": 28 / 7,
            "length/min": 1.0,
            "length/max": 7.0,
            "length/right": 11 / 3,
            "length/wrong": 10 / 3,
            "length/truncated": 1 / 7,
        }
    )
    assert "length/wrong" not in length_metrics(rollouts[:2], success="answer")


def credited(rollout_of: Make, spans: Sequence[Span], advantages: list[list[float]]) -> Any:
    verdicts = {"steps": Verdict(1.0, tuple(spans)), "answer": Verdict(1.0)}
    rows = [rollout_of([5, 6, 7, 8], reward=reward, verdicts=verdicts) for reward in (1.0, 0.0)]
    return collate(rows), torch.tensor(advantages)


def test_shape_and_place_of_the_credit(rollout_of: Make) -> None:
    spans = [Span(0, 2, 1.0), Span(1, 3, 0.0), Span(9, 9, 0.0)]
    batch, advantages = credited(rollout_of, spans, [[1.0, 0.5, -0.5, 0.0], [-1.0, -1.0, 0.0, 2.0]])
    part = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -3.0]])
    metrics = credit_metrics(batch, Credit(advantages, parts={"a": part}, metrics={"steps": 2, "none": math.nan}))
    assert metrics == pytest.approx(
        {
            "credit/abs_mean": 6 / 8,
            "credit/nonzero_tokens": 6 / 8,
            "credit/rows_with_credit": 2.0,
            "credit/sign_flips": 2 / 6,
            "credit/uncovered_spans": 0.0,
            "credit/mass_on_errors": (0.5 + 0.5 + 0.0 + 1.0 + 0.0 + 2.0)
            / 6,  # tokens 1 and 2, and 3 for the empty span
            "credit/mass_on_right_steps": (1.0 + 1.0) / 6,  # token 0 alone: token 1 is judged wrong too
            "credit/part_a": 4 / 8,
            "credit/steps": 2.0,
        }
    )


def test_the_truth_goes_before_the_steps_and_without_either_nothing_is_claimed(rollout_of: Make) -> None:
    row = rollout_of([5, 6], reward=1.0, verdicts={"steps": Verdict(1.0), "truth": Verdict(1.0)})
    assert truth_name(collate([row])) == "truth"
    assert truth_name(collate([rollout_of([5], verdicts={"steps": Verdict(1.0)})])) == "steps"
    plain = collate([rollout_of([5], reward=1.0, verdicts={"answer": Verdict(1.0)})])
    assert truth_name(plain) is None
    assert "credit/mass_on_errors" not in credit_metrics(plain, Credit(torch.ones(1, 1)))


def test_no_credit_at_all(rollout_of: Make) -> None:
    batch, advantages = credited(rollout_of, [Span(0, 2, 1.0)], [[0.0] * 4] * 2)
    metrics = credit_metrics(batch, Credit(advantages))
    assert (metrics["credit/abs_mean"], metrics["credit/rows_with_credit"]) == (0.0, 0.0)
    assert not metrics.keys() & {"credit/sign_flips", "credit/mass_on_errors", "credit/mass_on_right_steps"}


def test_the_kl_to_the_reference_is_a_mean_over_trained_tokens(rollout_of: Make) -> None:
    rows = [rollout_of([5, 6, 7], reward=1.0), rollout_of([5], reward=0.0, truncated=True)]
    batch = collate(rows, mask_truncated=True)
    reference = torch.tensor([[-0.2, 0.0, 0.2], [-9.0, 0.0, 0.0]])
    metrics = rollout_metrics(rows, batch, Credit(torch.zeros(2, 3)), reference, success="answer", format=None)
    wanted = (math.exp(-0.2) + 0.2 - 1 + math.exp(0.2) - 0.2 - 1) / 3
    assert metrics["policy/ref_kl"] == pytest.approx(wanted, rel=1e-5)
    without = rollout_metrics(rows, batch, Credit(torch.zeros(2, 3)), None, success="answer", format=None)
    assert "policy/ref_kl" not in without


def test_what_is_written_is_json(rollouts: list[Rollout]) -> None:
    metrics = drop_missing({"a": torch.tensor(0.5).item(), "b": math.nan, "c": math.inf, "d": True})
    assert metrics == {"a": 0.5, "d": 1.0}
    assert type(metrics["d"]) is float


def test_scores_that_cancel_in_the_reward_are_seen_verifier_by_verifier(rollout_of: Make) -> None:
    rows = [(-3.0, 2.0), (2.0, -3.0), (0.0, -1.0), (-1.0, 0.0)]
    rollouts = [
        rollout_of([4], group=0, verdicts={"answer": Verdict(a), "style": Verdict(b)}, reward=a + b) for a, b in rows
    ]
    metrics = reward_metrics(rollouts, collate(rollouts), success="answer", format=None)
    assert metrics["reward/dead_groups"] == 1.0
    assert metrics["verifier/answer_dead_groups"] == metrics["verifier/style_dead_groups"] == 0.0
