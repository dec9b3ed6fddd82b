"""A run that cannot work is refused before its first rollout, with the key that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.credit.process import ProcessReward
from apportion.credit.uniform import Uniform
from apportion.grpo.loss import LossConfig
from apportion.grpo.signals import available_signals, check_signals
from apportion.verifiers import InputError, Verdict


def with_spans(samples: Any) -> list[Verdict]:
    return []


def without_spans(prompts: Any, completions: Any) -> list[float]:
    return []


VERIFIERS = {"answer": without_spans, "steps": with_spans}


def test_a_verifier_gives_its_score_and_its_spans_if_it_has_any() -> None:
    core = {"old_logprobs", "completion_ids"}
    assert available_signals(VERIFIERS, {}) == core | {"score:answer", "score:steps", "spans:steps"}
    assert available_signals({}, {"answer": 1.0}) == core | {"reward"}


def test_a_run_with_all_that_it_needs_passes() -> None:
    check_signals(ProcessReward(), VERIFIERS, {"answer": 1.0}, success="answer", format="steps")


class Needs:
    phase, conserves = "rollout", "none"

    def __init__(self, signal: str) -> None:
        self.requires = frozenset({signal})


@pytest.mark.parametrize(
    ("strategy", "reward", "options", "message"),
    [
        (Uniform(), {"anwser": 1.0}, {}, "reward.anwser: no verifier of that name (there are: answer, steps)"),
        (Uniform(), {}, {}, "credit needs a reward, and reward is empty; give a weight, for example +reward.answer=1"),
        (Uniform(source="format"), {"answer": 1.0}, {}, "credit needs the score of verifiers.format, which is not"),
        (ProcessReward(steps="answer"), {}, {}, "credit needs spans of verifiers.answer, which gives scores only"),
        (ProcessReward(steps="prm"), {}, {}, "credit needs the spans of verifiers.prm, which is not there"),
        (Needs("entropy"), {}, {}, "credit needs the signal 'entropy', which this run does not have"),
        (Uniform(), {"answer": 1.0}, {"success": "truth"}, "run.success=truth: no such verifier"),
        (Uniform(), {"answer": 1.0}, {"format": "tags"}, "run.format=tags: no such verifier"),
        (
            ProcessReward(),
            {"answer": 1.0},
            {"loss": LossConfig(kl_coef=0.1, kl_in="reward")},
            "loss.kl_in=reward: ProcessReward does not read the reward, so the KL would be lost; use loss.kl_in=loss",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_key(
    strategy: Any, reward: dict[str, float], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_signals(strategy, VERIFIERS, reward, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_kl_that_the_strategy_reads_with_the_reward_is_fine() -> None:
    check_signals(Uniform(), VERIFIERS, {"answer": 1.0}, loss=LossConfig(kl_coef=0.1, kl_in="reward"))
    check_signals(ProcessReward(), VERIFIERS, {}, loss=LossConfig(kl_coef=0.1, kl_in="loss"))
