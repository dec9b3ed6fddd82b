"""One rollout batch: sample, decode, verify."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..credit import Rollout
from ..credit.align import decode_text, token_offsets
from ..credit.batch import TreeIndex
from ..prm.encoding import tokenizer_fingerprint
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.early import EarlyJudging
from ..verifiers.panel import Panel, PanelResult
from .engines import Engine, SamplingOptions, awake
from .engines.native import NativeEngine
from .policy import Policy
from .sampling import Generation, RolloutConfig
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
        seconds_sample, seconds_verify: wall time; what was verified while others were sampled is in the former.
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
    panel: Panel,
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    should_stop: Callable[[], bool] | None = None,
    engine: Engine | None = None,
) -> Collected:
    """Sample a group of completions for every problem and have them judged.

    The random numbers of a row come from ``(seed, step, problem, index in the group)`` alone; where a problem comes
    twice in a batch, its second group counts on, so that the two groups differ.

    Args:
        panel: judges them; what waits outside Python is judged while others are still being sampled.
        seed, step: name the random streams.
        should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
        engine: samples with the policy's weights; None: the built-in sampler.
    """
    began = time.perf_counter()
    engine = NativeEngine(policy) if engine is None else engine
    prompts = encode_prompts(policy, problems, config.max_new_tokens)

    def sample_of(group: int, generation: Generation) -> Sample:
        return as_sample(policy, problems[group], prompts[group], generation, located=True)

    with EarlyJudging(panel) as judging:
        early: dict[int, Sample] = {}

        def finished(done: Mapping[int, Generation]) -> None:
            made = {row: sample_of(row // config.group_size, generation) for row, generation in done.items()}
            early.update(made)
            judging.submit(list(made), list(made.values()))

        with awake(engine, policy):
            generations, rows, tree, tokens = _sampled(
                policy, engine, problems, prompts, config, seed, step, should_stop, finished if judging.wanted else None
            )
        sampled = time.perf_counter()
        samples = [
            early[row] if row in early else sample_of(group, generation)
            for row, (group, generation) in enumerate(zip(rows, generations))
        ]
        result = judging.finish(samples)
    rollouts = [
        _rollout(group, generation, sample, verdicts, panel)
        for group, generation, sample, verdicts in zip(rows, generations, samples, result.verdicts)
    ]
    return Collected(problems, rollouts, result, sampled - began, time.perf_counter() - sampled, tokens, tree)


def _sampled(
    policy: Policy,
    engine: Engine,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    config: RolloutConfig,
    seed: int,
    step: int,
    should_stop: Callable[[], bool] | None,
    on_finished: Callable[[Mapping[int, Generation]], None] | None,
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
        trees = sample_trees(policy, prompts, seeds(1), config, should_stop=should_stop, engine=engine)
        return trees.generations, trees.prompt, trees.tree, trees.num_tokens
    generations = engine.generate(
        prompts,
        config.group_size,
        SamplingOptions.of(config),
        row_seeds=seeds(config.group_size),
        should_stop=should_stop,
        on_finished=on_finished,
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
    engine: Engine | None = None,
) -> list[Sample]:
    """The likeliest completion of every problem, as samples to be judged.

    Args:
        max_new_tokens: longest completion.
        batch: completions that the built-in sampler samples side by side; other engines get all at once.
        should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
        engine: samples with the policy's weights; None: the built-in sampler.
    """
    prompts = encode_prompts(policy, problems, max_new_tokens)
    engine = NativeEngine(policy) if engine is None else engine
    options, size = SamplingOptions(max_new_tokens, temperature=0), batch if engine.native else max(len(prompts), 1)
    generations: list[Generation] = []
    with awake(engine, policy):
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            generations += engine.generate(part, 1, options, row_seeds=[0] * len(part), should_stop=should_stop)
    return [as_sample(policy, *made) for made in zip(problems, prompts, generations)]


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


def as_sample(
    policy: Policy, problem: Problem, prompt_ids: Sequence[int], generation: Generation, *, located: bool = False
) -> Sample:
    """A completion as verifiers see it, with the ids for those that read tokens, and what the policy did not write.

    Args:
        located: put the characters of each id beside them, as ``offsets``; they cost more than all else here.
    """
    text = decode_text(policy.tokenizer, generation.ids)
    offsets = None
    if located or generation.model_mask is not None:
        offsets = token_offsets(policy.tokenizer, generation.ids, text)
    facts = {
        "num_tokens": len(generation.ids),
        "truncated": generation.truncated,
        "prompt_ids": tuple(prompt_ids),
        "completion_ids": tuple(generation.ids),
        "tokenizer": tokenizer_fingerprint(policy.tokenizer),
        "tool_spans": [] if offsets is None else _put_in(generation, offsets),
        **({} if offsets is None else {"offsets": offsets}),
    }
    return Sample(problem.prompt, text, problem.reference, {**problem.metadata, **facts})


def _put_in(generation: Generation, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Character ranges of the runs of ids that the policy did not write."""
    if generation.model_mask is None:
        return []
    tokens = zip(generation.model_mask, offsets)
    runs = (list(run) for written, run in itertools.groupby(tokens, key=lambda token: token[0]) if not written)
    return [(run[0][1][0], run[-1][1][1]) for run in runs]


def _rollout(
    group: int, generation: Generation, sample: Sample, verdicts: Mapping[str, Verdict], panel: Panel
) -> Rollout:
    return Rollout(
        prompt_ids=list(sample.metadata["prompt_ids"]),
        completion_ids=generation.ids,
        logprobs=generation.logprobs,
        offsets=sample.metadata["offsets"],
        text=sample.completion,
        group_id=group,
        truncated=generation.truncated,
        model_mask=generation.model_mask,
        verdicts=verdicts,
        reward=panel.reward(verdicts),
    )
