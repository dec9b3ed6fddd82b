"""From problems to judged rollouts, and greedy evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from apportion.credit import collate
from apportion.credit.align import decode_text
from apportion.grpo.collect import as_sample, check_panel, collect, complete, encode_prompts
from apportion.grpo.evaluate import evaluate, pass_rates
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import Generation, Interrupted, RolloutConfig
from apportion.grpo.task import Problem
from apportion.prm.encoding import tokenizer_fingerprint
from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.panel import Panel, judge

PROBLEMS = [Problem("a", "1+2=?", "3", {"level": 1}), Problem("b", "7+9-a*1=?", "6", {"level": 2})]
CONFIG = RolloutConfig(prompts_per_step=2, group_size=3, max_new_tokens=10)


def digits(samples: list[Sample]) -> list[float]:
    return [float(sum(char.isdigit() for char in sample.completion)) for sample in samples]


def gather(policy: Policy, problems: list[Problem], verifiers: Any = None, **options: Any) -> Any:
    options = {"seed": 0, "step": 1, **options}
    panel = Panel(verifiers or {"digits": digits}, {"digits": 0.5})
    return collect(policy, problems, panel, CONFIG, **options)


def test_rollouts_hold_what_was_sampled_and_said(policy: Policy) -> None:
    seen: list[Sample] = []

    def watching(samples: list[Sample]) -> list[float]:
        seen.extend(samples)
        return digits(samples)

    collected = gather(policy, PROBLEMS, {"digits": watching})
    assert [rollout.group_id for rollout in collected.rollouts] == [0, 0, 0, 1, 1, 1]
    assert collected.num_tokens == sum(len(rollout.completion_ids) for rollout in collected.rollouts)
    for rollout, sample in zip(collected.rollouts, seen):
        problem = PROBLEMS[rollout.group_id]
        assert rollout.prompt_ids == policy.encode(problem.prompt)
        assert rollout.text == sample.completion == decode_text(policy.tokenizer, rollout.completion_ids)
        assert rollout.reward == 0.5 * rollout.verdicts["digits"].score
        assert (sample.prompt, sample.reference) == (problem.prompt, problem.reference)
        assert sample.metadata == {
            **problem.metadata,
            "num_tokens": len(rollout.completion_ids),
            "truncated": rollout.truncated,
            "prompt_ids": tuple(rollout.prompt_ids),
            "completion_ids": tuple(rollout.completion_ids),
            "offsets": rollout.offsets,
            "tokenizer": tokenizer_fingerprint(policy.tokenizer),
            "tool_spans": [],
        }
        spelled = "".join(rollout.text[start:stop] for start, stop in rollout.offsets)
        assert spelled == rollout.text


def test_a_verifier_that_waits_outside_python_is_asked_while_others_are_sampled(policy: Policy) -> None:
    class Waits:
        background = True

        def __init__(self) -> None:
            self.calls: list[list[str]] = []

        def __call__(self, samples: list[Sample]) -> list[float]:
            self.calls.append([sample.completion for sample in samples])
            return digits(samples)

    waits = Waits()
    config = replace(CONFIG, group_size=16, compact_below=1.0)
    early = collect(policy, PROBLEMS, Panel({"x": digits, "w": waits}, {"w": 1.0}), config, seed=0, step=1)
    late = collect(policy, PROBLEMS, Panel({"x": digits, "w": digits}, {"w": 1.0}), config, seed=0, step=1)
    assert len(waits.calls) > 1, "nothing was handed over early"
    assert sorted(text for call in waits.calls for text in call) == sorted(texts(early))
    assert early.panel == late.panel
    assert [rollout.reward for rollout in early.rollouts] == [rollout.reward for rollout in late.rollouts]


def test_what_the_policy_did_not_write_is_told_and_not_trained(policy: Policy) -> None:
    rollout = gather(policy, PROBLEMS).rollouts[0]
    count = len(rollout.completion_ids)
    assert count > 5
    mask = [place not in (1, 2, 4) for place in range(count)]
    generation = Generation([*rollout.completion_ids], [0.0] * count, False, mask)
    sample = as_sample(policy, PROBLEMS[0], rollout.prompt_ids, generation)
    offsets = rollout.offsets
    assert sample.metadata["tool_spans"] == [(offsets[1][0], offsets[2][1]), offsets[4]]
    assert collate([replace(rollout, model_mask=mask)]).completion_mask.tolist() == [mask]


def texts(collected: Any) -> list[str]:
    return [rollout.text for rollout in collected.rollouts]


def test_a_problem_has_its_own_random_numbers_in_whatever_batch(policy: Policy) -> None:
    both = texts(gather(policy, PROBLEMS))
    assert texts(gather(policy, PROBLEMS[::-1])) == both[3:] + both[:3]
    assert texts(gather(policy, PROBLEMS[1:])) == both[3:]
    assert texts(gather(policy, PROBLEMS, step=2)) != both
    assert texts(gather(policy, PROBLEMS, seed=1)) != both


def test_a_problem_that_comes_twice_is_not_sampled_twice_the_same(policy: Policy) -> None:
    twice = texts(gather(policy, [PROBLEMS[0]] * 2))
    assert twice[:3] == texts(gather(policy, PROBLEMS))[:3]
    assert twice[3:] != twice[:3]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "problem 'x': the prompt is empty"),
        (
            "1" + "+1" * 30 + "=?",
            "problem 'x': prompt of 63 tokens + rollout.max_new_tokens=10 exceeds the model's 64 positions; "
            "shorten the prompt or lower rollout.max_new_tokens",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_names_its_problem(policy: Policy, prompt: str, message: str) -> None:
    problem = Problem("x", prompt)
    for attempt in (
        lambda: gather(policy, [*PROBLEMS, problem]),
        lambda: complete(policy, [problem], max_new_tokens=10, batch=4),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(caught.value) == message
    longest = Problem("y", "1" + "+1" * 26)
    assert len(encode_prompts(policy, [longest], 11)[0]) == 53


def test_a_verifier_that_fails_too_often_stops_the_run() -> None:
    def picky(samples: list[Sample]) -> list[float]:
        return [1 / len(sample.completion) for sample in samples]

    panel = judge({"picky": picky, "digits": digits}, [Sample("q", text) for text in ("", "", "ab", "c")])
    check_panel(panel, 0.5)
    with pytest.raises(InputError) as caught:
        check_panel(panel, 0.49)
    assert str(caught.value) == (
        "verifiers.picky failed on 2 of 4 completions; mend it, or raise run.max_error_share=0.49; "
        "first: verifier 'picky': ZeroDivisionError: division by zero (completion '')"
    )


def test_pass_rates_are_over_those_that_were_judged(policy: Policy) -> None:
    problems = [Problem(str(n), f"{n}+1=?", str(n)) for n in range(8)]
    verifiers: dict[str, Any] = {
        "even": lambda samples: [float(int(s.reference) % 2 == 0) for s in samples],
        "some": lambda samples: [0.5 if int(s.reference) < 2 else None if s.reference == "7" else 0.4 for s in samples],
        "never": lambda samples: [None] * len(samples),
        "faulty": lambda samples: [1 / int(s.reference) for s in samples],
    }
    rates, errors = pass_rates(policy, problems, verifiers, max_new_tokens=4, batch=3)
    assert math.isnan(rates.pop("never"))
    assert rates == pytest.approx({"even": 0.5, "some": 2 / 7, "faulty": 2 / 7})
    assert errors == {"verifier/errors_faulty": 1.0}
    with pytest.raises(InputError, match=r"verifiers\.faulty failed on 1 of 8 completions"):
        pass_rates(policy, problems, verifiers, max_new_tokens=4, batch=3, max_error_share=0.1)


def test_evaluation_is_greedy_and_its_batches_change_nothing(policy: Policy) -> None:
    whole = complete(policy, PROBLEMS, max_new_tokens=10, batch=8)
    assert whole == complete(policy, PROBLEMS, max_new_tokens=10, batch=1)
    with pytest.raises(Interrupted):
        complete(policy, PROBLEMS, max_new_tokens=10, batch=1, should_stop=lambda: True)


class TwoSkills:
    def __init__(self, held_out: list[Problem], retention: list[Problem]) -> None:
        self.held_out, self.retention = (lambda: held_out), (lambda: retention)

    def batch(self, step: int, num_prompts: int, seed: int) -> list[Problem]:
        return []


def test_an_evaluation_names_what_it_measured_and_leaves_out_what_there_is_not(policy: Policy) -> None:
    verifiers: dict[str, Any] = {
        "answer": lambda samples: [float(s.reference == "3") for s in samples],
        "format": lambda samples: [Verdict(None) for _ in samples],
        "unused": lambda samples: 1 / 0,
    }

    def run(task: Any, retention: Any = None, format: str | None = "format") -> dict[str, float]:
        return evaluate(policy, task, verifiers, retention, success="answer", format=format, max_new_tokens=3, batch=4)

    metrics = run(TwoSkills(PROBLEMS, PROBLEMS[:1]), lambda samples: [1.0 for _ in samples])
    assert math.isnan(metrics.pop("eval/format_pass_rate"))
    assert metrics == {"eval/success": 0.5, "retention/success": 1.0}
    assert run(TwoSkills(PROBLEMS, PROBLEMS), None, None) == {"eval/success": 0.5}
    assert run(TwoSkills([], [])) == {}
    same = run(TwoSkills(PROBLEMS, []), None, "answer")
    assert same == {"eval/success": 0.5, "eval/format_pass_rate": 0.5}
