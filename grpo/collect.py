"""One rollout batch: sample, decode, verify."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..credit import Rollout
from ..credit.align import decode_text, token_offsets
from ..credit.batch import TreeIndex
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.panel import PanelResult, judge, weighted_reward
from .policy import Policy
from .sampling import Generation, RolloutConfig, sample_groups
from .seeds import named_seed
from .task import Problem
from .tree_sampling import TreeRolloutConfig, sample_trees

__all__ = ["Collected", "as_sample", "check_panel", "collect", "complete", "encode_prompts"]


@dataclass(frozen=True)
class Collected:
    """Rollouts of some problems; ``rollouts[i].group_id`` is the index of its problem.

    Args:
        problems: N problems.
        rollouts: N * G rollouts, those of one problem together.
        panel: what the verifiers said, with their errors.
        seconds_sample, seconds_verify: wall time.
        num_tokens: generated; those of a shared segment count once.
        tree: which segments the rollouts share, where they were sampled as trees.
    """

    problems: Sequence[Problem]
    rollouts: list[Rollout]
    panel: PanelResult
    seconds_sample: float
    seconds_verify: float
    num_tokens: int
    tree: TreeIndex | None = None


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

    The random numbers of a row come from ``(seed, step, problem, index in the group)`` alone; where a problem comes
    twice in a batch, its second group counts on, so that the two groups differ.

    Args:
        reward_weights: by verifier.
        seed, step: name the random streams.
        should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
    """
    began = time.perf_counter()
    prompts = encode_prompts(policy, problems, config.max_new_tokens)
    generations, rows, tree, tokens = _sampled(policy, problems, prompts, config, seed, step, should_stop)
    sampled = time.perf_counter()
    texts = [decode_text(policy.tokenizer, generation.ids) for generation in generations]
    samples = [as_sample(problems[group], text, gen) for group, text, gen in zip(rows, texts, generations)]
    panel = judge(verifiers, samples)
    rollouts = [
        _rollout(policy, prompts[group], group, generation, text, verdicts, reward_weights)
        for group, generation, text, verdicts in zip(rows, generations, texts, panel.verdicts)
    ]
    return Collected(problems, rollouts, panel, sampled - began, time.perf_counter() - sampled, tokens, tree)


def _sampled(
    policy: Policy,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    config: RolloutConfig,
    seed: int,
    step: int,
    should_stop: Callable[[], bool] | None,
) -> tuple[list[Generation], list[int], TreeIndex | None, int]:
    """Completions, the index of each one's problem, what they share if sampled as trees, and the tokens generated."""
    counters = {problem.id: itertools.count() for problem in problems}

    def seeds(per_problem: int) -> list[int]:
        return [
            named_seed(seed, "sample", step, problem.id, next(counters[problem.id]))
            for problem in problems
            for _ in range(per_problem)
        ]

    if isinstance(config, TreeRolloutConfig):
        trees = sample_trees(policy, prompts, seeds(1), config, should_stop=should_stop)
        return trees.generations, trees.prompt, trees.tree, trees.num_tokens
    generations = sample_groups(
        policy,
        prompts,
        seeds(config.group_size),
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        compact_below=config.compact_below,
        should_stop=should_stop,
    )
    rows = [row // config.group_size for row in range(len(generations))]
    return generations, rows, None, sum(len(generation.ids) for generation in generations)


def complete(
    policy: Policy,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    batch: int,
    should_stop: Callable[[], bool] | None = None,
) -> list[Sample]:
    """The likeliest completion of every problem, as samples to be judged.

    Args:
        max_new_tokens: longest completion.
        batch: completions sampled side by side.
        should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
    """
    prompts = encode_prompts(policy, problems, max_new_tokens)
    generations: list[Generation] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generations += sample_groups(
            policy,
            part,
            [0] * len(part),
            group_size=1,
            max_new_tokens=max_new_tokens,
            temperature=0,
            should_stop=should_stop,
        )
    texts = [decode_text(policy.tokenizer, generation.ids) for generation in generations]
    return [as_sample(problem, text, gen) for problem, text, gen in zip(problems, texts, generations)]


def check_panel(panel: PanelResult, max_error_share: float) -> None:
    """Stop where a verifier failed on more than ``max_error_share`` of the samples: its silence would steer the run."""
    for name, count in panel.errors.items():
        if count > max_error_share * len(panel.verdicts):
            raise InputError(
                f"verifiers.{name} failed on {count} of {len(panel.verdicts)} completions; mend it, or raise "
                f"run.max_error_share={max_error_share}; first: {panel.first_error[name]}"
            )


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


def as_sample(problem: Problem, text: str, generation: Generation) -> Sample:
    """A completion as verifiers see it."""
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
