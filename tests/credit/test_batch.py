"""From rollouts to the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch, Rollout, collate
from apportion.verifiers import InputError, Span, Verdict

MakeRollout = Callable[..., Rollout]
Batch = Callable[..., CreditBatch]


def test_rows_are_padded_on_the_right(rollout: MakeRollout) -> None:
    rows = [replace(rollout(2, 1.0, group=7), logprobs=[-1.0, -2.0]), rollout(3, 0.0, group=5, truncated=True)]
    made = collate(rows, seed=4)
    assert made.completion_mask.tolist() == [[True, True, False], [True, True, True]]
    assert made.completion_ids is not None
    assert made.completion_ids.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert made.old_logprobs is not None
    assert made.old_logprobs.tolist() == [[-1.0, -2.0, 0.0], [-0.5, -0.5, -0.5]]
    assert made.group_ids.tolist() == [7, 5]
    assert made.truncated is not None
    assert made.truncated.tolist() == [False, True]
    assert made.reward.tolist() == [1.0, 0.0]
    assert made.seed == 4


def test_rewards_and_scores_keep_what_half_precision_would_lose(rollout: MakeRollout) -> None:
    made = collate([rollout(1, 2049.0), rollout(1, 1000.25), rollout(1, 0.1)])
    assert made.reward.dtype == made.scores["format"].dtype == torch.float64
    assert made.reward.tolist() == made.scores["format"].tolist() == [2049.0, 1000.25, 0.1]


def test_an_abstention_is_missing_not_zero(rollout: MakeRollout) -> None:
    made = collate([rollout(1, None), replace(rollout(1, 0.0), verdicts={"other": Verdict(0.5)})])
    assert made.reward.isnan().tolist() == [True, False]
    assert made.scores["steps"].isnan().tolist() == [True, True]
    assert made.scores["other"].isnan().tolist() == [True, False]
    assert made.spans["steps"].mask.shape == (2, 0)


def test_spans_are_found_on_the_rows_own_offsets() -> None:
    verdicts = {"steps": Verdict(0.0, (Span(2, 5, 0.0),))}
    kept = {"text": "abcde", "group_id": 0, "verdicts": verdicts}
    wide = Rollout([1], [7, 8], [0.0] * 2, [(0, 2), (2, 5)], **kept)
    narrow = Rollout([1], list(range(5)), [0.0] * 5, [(i, i + 1) for i in range(5)], **kept)
    table = collate([wide, narrow]).spans["steps"]
    assert table.start.tolist() == [[1], [2]]
    assert table.stop.tolist() == [[2], [5]]


@pytest.mark.parametrize("masked", [False, True])
def test_the_policy_for_truncated_rows(rollout: MakeRollout, masked: bool) -> None:
    made = collate([rollout(2, 1.0, truncated=True), rollout(2, 0.5)], mask_truncated=masked)
    assert made.completion_mask[0].tolist() == [not masked] * 2
    assert made.completion_mask[1].tolist() == [True, True]
    assert made.reward.isnan().tolist() == [masked, False]
    assert made.scores["format"].tolist() == [1.0, 0.5]  # what is reported of the row stays
    for source in ("reward", "format"):  # what strategies compare does not
        assert made.outcome(source).isnan().tolist() == [masked, False]


def test_tokens_of_a_tool_are_not_trained(rollout: MakeRollout) -> None:
    made = collate([rollout(3, 1.0, written=[True, False, True]), rollout(2, 1.0, written=[False, False])])
    assert made.completion_mask.tolist() == [[True, False, True], [False, False, False]]
    assert made.outcome().isnan().tolist() == [False, True]


def test_empty_answers_have_no_tokens(rollout: MakeRollout) -> None:
    made = collate([rollout(0, 1.0), rollout(0, 0.0)])
    assert made.completion_mask.shape == (2, 0)
    assert collate([]).completion_mask.shape == (0, 0)


@pytest.mark.parametrize("name", ["logprobs", "offsets", "model_mask"])
def test_a_rollout_has_one_entry_for_each_token(rollout: MakeRollout, name: str) -> None:
    with pytest.raises(ValueError, match=f"rollout of group 3: 1 {name} for 2 tokens"):
        replace(rollout(2, 1.0, group=3), **{name: [(0, 1)]})


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_a_number_or_none(rollout: MakeRollout, reward: float) -> None:
    with pytest.raises(ValueError, match=r"rollout of group 0: the reward is .*; give None for no reward"):
        replace(rollout(1, 0.0), reward=reward)


def test_a_batch_refuses_wrong_shapes_by_name(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 3, "reward": 0.0})
    with pytest.raises(ValueError, match=r"completion_mask must be a \(B, T\) bool tensor"):
        replace(made, completion_mask=made.completion_mask.float())
    with pytest.raises(ValueError, match=r"reward must have the shape \(2,\), not \(3,\)"):
        made.with_reward(torch.zeros(3))
    with pytest.raises(ValueError, match=r"format must have the shape \(2,\), not \(1,\)"):
        replace(made, scores={"format": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"entropy must have the shape \(2, 3\) of completion_mask, not \(2, 4\)"):
        replace(made, entropy=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="spans of steps: 1 rows for 2 rollouts"):
        replace(made, spans={"steps": batch({"tokens": 1}).spans["steps"]})


def test_a_verifier_that_is_not_there_is_named(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 1.0})
    with pytest.raises(InputError, match=r"score of verifiers\.tone; the batch has scores of: answer, format"):
        made.outcome("tone")
    with pytest.raises(InputError, match=r"spans of verifiers\.tone; the batch has spans of: answer, format"):
        made.judged("tone")
