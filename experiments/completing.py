"""What a policy writes for labelling: solutions of problems, and continuations of the first steps of solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..credit.align import decode_text, token_offsets
from ..grpo.collect import as_sample, collect, encode_prompts
from ..grpo.policy import Policy
from ..grpo.prefix_values import prefix_parts
from ..grpo.sampling import Generation, RolloutConfig, sample_groups
from ..grpo.seeds import named_seed
from ..grpo.task import Problem
from ..prm.labels import Solution
from ..verifiers import InputError, Sample
from ..verifiers.panel import Panel

__all__ = ["Completer", "Tokens", "prefix_ids"]

Tokens = tuple[list[int], Sequence[tuple[int, int]]]


@dataclass
class Completer:
    """Samples from a policy, and counts the tokens that it generates.

    Random numbers come from the seed, the problem and the text alone, so that nothing depends on what else is sampled.

    Args:
        policy: to sample from.
        rollout: how; ``max_new_tokens`` is the limit of a whole answer, its given beginning included.
        seed: names the random streams.
        rows: continuations sampled side by side.
    """

    policy: Policy
    rollout: RolloutConfig
    seed: int
    rows: int = 512
    tokens: int = field(default=0, init=False)

    def solve(self, problems: Sequence[Problem]) -> list[list[Sample]]:
        """``rollout.group_size`` solutions of each problem."""
        found = collect(self.policy, problems, Panel({}, {}), self.rollout, seed=self.seed, step=0)
        self.tokens += found.num_tokens
        solved: list[list[Sample]] = [[] for _ in problems]
        for one in found.rollouts:
            written = Generation(list(one.completion_ids), [], one.truncated)
            solved[one.group_id].append(as_sample(self.policy, problems[one.group_id], one.prompt_ids, written))
        return solved

    def check(self, solutions: Sequence[Sample]) -> None:
        """Refuse at once what the policy cannot read, and what is longer than its answers may be."""
        limit = self.rollout.max_new_tokens
        encode_prompts(self.policy, [Problem(one.prompt, one.prompt) for one in solutions], limit)
        for solution in solutions:
            tokens = _tokens(self.policy, solution)
            length = len(tokens[0] if tokens else _encode(self.policy, solution.completion))
            if length > limit:
                raise InputError(
                    f"the solution {solution.completion[:60]!r} has {length} tokens, and an answer of the policy at "
                    f"most rollout.max_new_tokens={limit}; raise it"
                )

    def __call__(self, prefixes: Sequence[tuple[Solution, int]], k: int) -> list[list[Sample]]:
        """K whole answers that begin with each prefix: a solution and the number of its first steps kept."""
        problems = [_problem(solution) for solution, _ in prefixes]
        prompts = encode_prompts(self.policy, problems, self.rollout.max_new_tokens)
        read = {id(solution): _tokens(self.policy, solution.sample) for solution, _ in prefixes}
        kept = [prefix_ids(self.policy, solution, count, read[id(solution)]) for solution, count in prefixes]
        endings: dict[int, list[Sample]] = {}
        together = prefix_parts(
            [len(prompt) for prompt in prompts],
            [len(ids) for ids in kept],
            copies=k,
            rows=self.rows,
            limit=self.rollout.max_new_tokens,
            positions=self.policy.max_positions,
        )
        for part in together:
            generations = sample_groups(
                self.policy,
                [[*prompts[row], *kept[row]] for row in part],
                [seed for row in part for seed in self._seeds(problems[row], kept[row], k)],
                group_size=k,
                max_new_tokens=max(self.rollout.max_new_tokens - len(kept[part[0]]), 1),
                temperature=self.rollout.temperature,
                top_k=self.rollout.top_k,
                top_p=self.rollout.top_p,
                compact_below=self.rollout.compact_below,
            )
            self.tokens += sum(len(generation.ids) for generation in generations)
            for place, row in enumerate(part):
                own = generations[place * k : (place + 1) * k]
                endings[row] = [self._whole(problems[row], prompts[row], kept[row], ending) for ending in own]
        return [endings[row] for row in range(len(prefixes))]

    def _seeds(self, problem: Problem, ids: Sequence[int], k: int) -> list[int]:
        own = named_seed(self.seed, "continuation", problem.id, " ".join(map(str, ids)))
        return [named_seed(own, index) for index in range(k)]

    def _whole(self, problem: Problem, prompt: list[int], prefix: list[int], ending: Generation) -> Sample:
        """The whole answer as if written in one go. What goes beyond the limit is cut off."""
        ids, limit = [*prefix, *ending.ids], self.rollout.max_new_tokens
        cut = ending.truncated or len(ids) > limit
        return as_sample(self.policy, problem, prompt, Generation(ids[:limit], [], cut))


def prefix_ids(policy: Policy, solution: Solution, count: int, tokens: Tokens | None) -> list[int]:
    """Token ids of the first ``count`` steps of a solution, with the blanks behind them as far as tokens allow.

    They are cut from those of the whole solution: no other cut leaves tokens as the policy knows them. Only where a
    token reaches over from the last step into what follows is the text of the prefix encoded by itself.

    Args:
        policy: whose ids they are.
        solution, count: what is kept.
        tokens: ids and character ranges of the whole solution; None where its tokens do not give its text.
    """
    if not count:
        return []
    text, end = solution.sample.completion, len(solution.prefix(count))
    resume = len(text) - len(text[end:].lstrip())
    ids, offsets = tokens or ([], [])
    cut = next((place for place, (start, stop) in enumerate(offsets) if stop > max(resume, start)), None)
    if cut is not None and offsets[cut][0] >= end:
        return ids[:cut]
    return _encode(policy, text[:end])


def _tokens(policy: Policy, sample: Sample) -> Tokens | None:
    """Those that were sampled, where the metadata has them and they are this policy's, else the tokenizer's own."""
    sampled, known = sample.metadata.get("completion_ids"), range(len(policy.tokenizer))
    if isinstance(sampled, list | tuple) and all(one in known for one in sampled):
        ids = list(sampled)
        if decode_text(policy.tokenizer, ids) == sample.completion:
            return ids, token_offsets(policy.tokenizer, ids, sample.completion)
    ids = _encode(policy, sample.completion)
    if decode_text(policy.tokenizer, ids) != sample.completion:
        return None
    return ids, token_offsets(policy.tokenizer, ids, sample.completion)


def _encode(policy: Policy, text: str) -> list[int]:
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = policy.tokenizer.unk_token_id
    if unknown is not None and unknown not in policy.eos_ids and unknown in ids:
        raise InputError(f"the policy does not know every symbol of the solution {text[:60]!r}; choose another policy")
    return ids


def _problem(solution: Solution) -> Problem:
    sample = solution.sample
    return Problem(solution.problem_id, sample.prompt, sample.reference, sample.metadata)
