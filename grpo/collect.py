"""One rollout batch: sample, decode, verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..credit import Rollout
from ..credit.align import decode_text, token_offsets
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.panel import PanelResult, judge, weighted_reward
from .policy import Policy
from .sampling import Generation, RolloutConfig, sample_groups
from .seeds import named_seed
from .task import Problem

__all__ = ["Collected", "collect", "complete"]


@dataclass(frozen=True)
class Collected:
    """Rollouts of some problems; ``rollouts[i].group_id`` is the index of its problem.

    Args:
        problems: N problems.
        rollouts: N * G rollouts, those of one problem together.
        panel: what the verifiers said, with their errors.
        seconds_sample, seconds_verify: wall time.
    """

    problems: Sequence[Problem]
    rollouts: list[Rollout]
    panel: PanelResult
    seconds_sample: float
    seconds_verify: float

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


def collect(
    policy: Policy,
    problems: Sequence[Problem],
    verifiers: Mapping[str, Callable[..., Any]],
    reward_weights: Mapping[str, float],
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    should_stop: Callable[[], bool] | None = None,
) -> Collected:
    """Sample a group of completions for every problem and have them judged.

    The random numbers of a row come from ``(seed, step, problem, index in the group)`` alone.
    """
    began = time.perf_counter()
    row_seeds = [
        named_seed(seed, "sample", step, problem.id, index)
        for problem in problems
        for index in range(config.group_size)
    ]
    prompts = encode_prompts(policy, problems, config.max_new_tokens)
    generations = sample_groups(
        policy,
        prompts,
        row_seeds,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        compact_below=config.compact_below,
        should_stop=should_stop,
    )
    sampled = time.perf_counter()
    rows = [row // config.group_size for row in range(len(generations))]
    texts = [decode_text(policy.tokenizer, generation.ids) for generation in generations]
    samples = [_sample(problems[group], text, gen) for group, text, gen in zip(rows, texts, generations)]
    panel = judge(verifiers, samples)
    rollouts = [
        _rollout(policy, prompts[group], group, generation, text, verdicts, reward_weights)
        for group, generation, text, verdicts in zip(rows, generations, texts, panel.verdicts)
    ]
    return Collected(problems, rollouts, panel, sampled - began, time.perf_counter() - sampled)


def complete(policy: Policy, problems: Sequence[Problem], *, max_new_tokens: int, batch: int) -> list[Sample]:
    """The likeliest completion of every problem, as samples to be judged."""
    prompts = encode_prompts(policy, problems, max_new_tokens)
    generations: list[Generation] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generations += sample_groups(
            policy, part, [0] * len(part), group_size=1, max_new_tokens=max_new_tokens, temperature=0
        )
    texts = [decode_text(policy.tokenizer, generation.ids) for generation in generations]
    return [_sample(problem, text, gen) for problem, text, gen in zip(problems, texts, generations)]


def encode_prompts(policy: Policy, problems: Sequence[Problem], max_new_tokens: int) -> list[list[int]]:
    """Prompt ids; refuses a prompt that leaves no room for the completion."""
    prompts = [policy.encode(problem.prompt) for problem in problems]
    limit = policy.max_positions
    for problem, prompt in zip(problems, prompts):
        if not prompt:
            raise InputError(f"problem {problem.id!r}: the prompt is empty")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise InputError(
                f"problem {problem.id!r}: prompt of {len(prompt)} tokens + rollout.max_new_tokens={max_new_tokens} "
                f"exceeds the model's {limit} positions; shorten the prompt or lower rollout.max_new_tokens"
            )
    return prompts


def _sample(problem: Problem, text: str, generation: Generation) -> Sample:
    facts = {"num_tokens": len(generation.ids), "truncated": generation.truncated}
    return Sample(problem.prompt, text, problem.reference, {**problem.metadata, **facts})


def _rollout(
    policy: Policy,
    prompt: list[int],
    group: int,
    generation: Generation,
    text: str,
    verdicts: Mapping[str, Verdict],
    reward_weights: Mapping[str, float],
) -> Rollout:
    return Rollout(
        prompt_ids=prompt,
        completion_ids=generation.ids,
        logprobs=generation.logprobs,
        offsets=token_offsets(policy.tokenizer, generation.ids, text),
        text=text,
        group_id=group,
        truncated=generation.truncated,
        verdicts=verdicts,
        reward=weighted_reward(verdicts, reward_weights),
    )
