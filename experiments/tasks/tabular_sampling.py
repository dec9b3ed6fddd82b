"""Answers drawn from a tabular policy, and the evidence on them as a batch that any strategy reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...credit import CreditBatch, CreditStrategy
from ...credit.align import SpanTable
from ...credit.batch import PrefixValues
from ...credit.states import prefix_lengths, segment_ids
from ...credit.strategy import missing_signals
from ...credit.truth import ExactValues, TokenProcess, Truth, solve
from ...grpo.seeds import named_generator, named_seed
from ...verifiers import InputError
from .tabular_evidence import (
    PERFECT,
    STEP_SIGNALS,
    STEP_VERIFIERS,
    Evidence,
    judged,
    spans_of_steps,
    spans_of_tokens,
    valued,
)
from .tabular_tables import TokenTables

__all__ = [
    "SIGNALS",
    "Answers",
    "TabularSample",
    "draw_answers",
    "missing_on_tabular",
    "random_logits",
    "refuse_missing",
    "sample_batch",
    "valued_states",
]

START = (0.1, 0.9)  # success of the policies that are probed: mid-way, so that groups have right and wrong answers
SKILL = (-1.0, 4.0)  # how much a random policy leans to the right tokens, in logits
_TRIES = 1_000
SIGNALS = frozenset(
    {
        *("reward", "score:answer", "score:format", "old_logprobs", "logprobs", "completion_ids"),
        *("entropy", "sum_pi_squared", "token_scores:truth", "token_scores:reward_model"),
        *STEP_SIGNALS,
        *("spans:values", "spans:answer", "spans:format", "spans:truth"),
    }
)
"""What a batch of tabular answers gives besides values of states, which can be had of any."""

_VALUES = "prefix_values:"


@dataclass(frozen=True)
class Answers:
    """Paths through a process.

    Args:
        states: (B, T) long, the state before each token; 0 beyond the answer's end.
        tokens: (B, T) long, the token chosen there.
        mask: (B, T) bool, True inside the answer.
        reward: (B,) float64, sum of what its tokens earned.
    """

    states: Tensor
    tokens: Tensor
    mask: Tensor
    reward: Tensor

    def read(self, table: Tensor) -> Tensor:
        """(B, T): the entry of a (X, V) or (X,) table for each token; 0 (False) beyond the end."""
        found = table[self.states, self.tokens] if table.ndim == 2 else table[self.states]
        return found.where(self.mask, torch.zeros((), dtype=table.dtype))


@dataclass(frozen=True)
class TabularSample:
    """Groups of answers of one policy, with everything that is known of them.

    Args:
        answers: the paths.
        exact: the policy and its exact values.
        batch: what strategies see.
        truth: true advantages; every token is a unit of its own.
    """

    answers: Answers
    exact: ExactValues
    batch: CreditBatch
    truth: Truth


def random_logits(tables: TokenTables, seed: int, *names: str | int, spread: float = 1.0) -> Tensor:
    """Logits (X, V) float64 of a random policy whose success lies between .1 and .9, by rejection.

    ``logit = spread * normal + skill * lean + habit``, with one skill for the policy, uniform from -1 to 4: without it
    the policies of a long task would almost never succeed.

    Args:
        tables: the task.
        seed, names: of the random stream.
        spread: standard deviation of the logits.
    """
    rng = named_generator(seed, "tabular policy", *names)
    shape, low, high = tuple(tables.lean.shape), *START
    for _ in range(_TRIES):
        skill, noise = rng.uniform(*SKILL), rng.standard_normal(shape)
        logits = spread * torch.from_numpy(noise) + skill * tables.lean + tables.habit
        if low < float(solve(tables.process, tables.process.policy(logits)).value[0]) < high:
            return logits
    raise InputError(
        f"task: none of {_TRIES} random policies succeeds in more than {low} and less than {high} of cases"
    )


def draw_answers(process: TokenProcess, policy: Tensor, begin: Tensor, rng: np.random.Generator) -> Answers:
    """One answer from each state of ``begin``, to its end.

    Args:
        process: X states, V tokens.
        policy: (X, V) probabilities.
        begin: (B,) long, states to start from.
        rng: one uniform is drawn for each of the B answers and ``process.longest`` places, used or not.
    """
    uniforms = torch.from_numpy(rng.random((len(begin), process.longest)))
    heap = policy.cumsum(dim=1)
    heap = heap / heap[:, -1:]  # exactly 1 at the end, so that no uniform lies beyond
    state, columns = begin, []
    for place in range(process.longest):
        going = state >= 0
        if not going.any():
            break
        here = state.clamp(min=0)
        token = (heap[here] <= uniforms[:, place, None]).sum(dim=1)
        columns.append((here, token, going))
        state = process.successor[here, token].where(going, -1)
    if not columns:
        raise ValueError("no answer to draw: begin is empty")
    states, tokens, mask = (torch.stack(column, dim=1) for column in zip(*columns))
    answers = Answers(states.where(mask, 0), tokens.where(mask, 0), mask, torch.zeros(0))
    return replace(answers, reward=answers.read(process.reward).sum(dim=1))


def sample_batch(
    tables: TokenTables,
    exact: ExactValues,
    *,
    groups: int,
    group_size: int,
    seed: int,
    names: tuple[str | int, ...] = (),
    evidence: Evidence = PERFECT,
    states: Collection[str] = ("steps",),
) -> TabularSample:
    """Groups of answers of one policy with the evidence on them; worse evidence leaves the answers as they are.

    The batch has the score of ``answer`` and ``format``, spans of ``steps`` (the step verifier), of ``critic_1`` to
    ``critic_3`` (its like, with errors of their own), of ``values`` (the value after each step: a value model), of
    ``answer`` (the last token), ``format`` (malformed tokens) and ``truth`` (every token that is not inert); token
    scores ``truth`` (the true advantages) and ``reward_model`` (the value after each token).

    Args:
        tables: the task.
        exact: the policy and its values, from :func:`apportion.credit.truth.solve`.
        groups, group_size: N groups of G answers.
        seed, names: of the random streams.
        evidence: how good it is.
        states: names of the states that are valued by continuations, see :mod:`apportion.credit.states`.
    """
    count = groups * group_size
    begin = torch.zeros(count, dtype=torch.long)
    answers = draw_answers(tables.process, exact.policy, begin, named_generator(seed, "tabular answers", *names))
    log = exact.policy.clamp(min=torch.finfo(torch.float64).tiny).log()
    inert, old = answers.read(exact.inert), answers.read(log).float()
    advantage = answers.read(exact.advantage)
    levels = _earned_before(tables.process, answers) + answers.read(exact.action_value)
    batch = CreditBatch(
        completion_mask=answers.mask,
        group_ids=torch.arange(groups).repeat_interleave(group_size),
        reward=answers.reward,
        scores={
            "answer": answers.read(tables.solves).any(dim=1).double(),
            "format": (~answers.read(tables.malformed).any(dim=1)).double(),
        },
        spans=_spans(tables, levels, inert, answers, evidence, named_generator(seed, "tabular verifiers", *names)),
        truncated=torch.zeros(count, dtype=torch.bool),
        completion_ids=answers.tokens,
        token_scores={
            "truth": advantage.float(),
            "reward_model": evidence.distort(levels, named_generator(seed, "tabular values", *names)).float(),
        },
        seed=named_seed(seed, "tabular strategies", *names),
        old_logprobs=old,
        logprobs=old,  # at the first update the policy is the one that sampled
        entropy=answers.read(-(exact.policy * log).sum(dim=1)).float(),
        sum_pi_squared=answers.read(exact.policy.square().sum(dim=1)).float(),
    )
    rng = named_generator(seed, "tabular continuations", *names)
    values = {name: _prefix_values(name, tables.process, exact, answers, batch, evidence, rng) for name in states}
    none = torch.zeros_like(answers.tokens)
    truth = Truth(
        unit_ids=torch.arange(answers.mask.shape[1]).expand_as(none).where(answers.mask, -1),
        advantage=advantage.masked_fill(~answers.mask, float("nan")),
        standard_error=none.double(),
        wrong=answers.read(tables.wrong),
        inert=inert,
    )
    return TabularSample(answers, exact, replace(batch, prefix_values=values), truth)


def missing_on_tabular(strategy: CreditStrategy) -> list[str]:
    """Signals that the strategy needs and that tabular tasks do not give; empty where it can run."""
    return [name for name in missing_signals(strategy, SIGNALS) if not name.startswith(_VALUES)]


def refuse_missing(strategy: CreditStrategy, name: str) -> None:
    """Stop where a tabular task cannot give what the strategy ``name`` needs."""
    if missing := missing_on_tabular(strategy):
        raise InputError(f"credit: {name} needs {', '.join(missing)}, which no tabular task gives; leave it out")


def valued_states(strategies: Iterable[CreditStrategy]) -> list[str]:
    """Names of the states whose values the strategies need, for :func:`sample_batch`."""
    wanted = {signal for strategy in strategies for signal in strategy.requires if signal.startswith(_VALUES)}
    return sorted(signal.removeprefix(_VALUES) for signal in wanted)


def _spans(
    tables: TokenTables, levels: Tensor, inert: Tensor, answers: Answers, evidence: Evidence, rng: np.random.Generator
) -> dict[str, SpanTable]:
    steps = spans_of_steps(answers.read(tables.begins), answers.read(tables.in_step), answers.mask)
    wrong, lengths = answers.read(tables.wrong), answers.mask.sum(dim=1)
    malformed, solves = answers.read(tables.malformed), answers.read(tables.solves)
    last = answers.mask & (torch.arange(answers.mask.shape[1]) == lengths[:, None] - 1)
    perfect = judged(steps, wrong)
    verdicts = {name: evidence.noise(perfect, lengths, rng) for name in STEP_VERIFIERS}
    verdicts["values"] = valued(steps, levels)
    return {
        **{name: replace(table, score=evidence.distort(table.score, rng)) for name, table in verdicts.items()},
        "answer": spans_of_tokens(last, solves),
        "format": spans_of_tokens(malformed, torch.zeros_like(levels)),
        "truth": spans_of_tokens(answers.mask & ~inert, ~wrong),
    }


def _prefix_values(
    name: str,
    process: TokenProcess,
    exact: ExactValues,
    answers: Answers,
    batch: CreditBatch,
    evidence: Evidence,
    rng: np.random.Generator,
) -> PrefixValues:
    """Values of the states inside every answer: exact, or the mean outcome of continuations."""
    lengths = prefix_lengths(segment_ids(name, batch))
    known = lengths >= 0
    at = lengths.clamp(min=0)
    state, earned = answers.states.gather(1, at)[known], _earned_before(process, answers).gather(1, at)[known]
    count = evidence.continuations
    if count is None:
        value, variance = earned + exact.value[state], torch.zeros_like(earned)
    else:
        begin = state.repeat_interleave(count)
        drawn = draw_answers(process, exact.policy, begin, rng).reward.reshape(-1, count)
        value, variance = earned + drawn.mean(dim=1), drawn.var(dim=1, correction=0)
    empty = torch.full(lengths.shape, float("nan"), dtype=torch.float64)
    return PrefixValues(
        value=empty.masked_scatter(known, value),
        count=torch.where(known, count or 1, 0),
        variance=torch.zeros_like(empty).masked_scatter(known, variance),
    )


def _earned_before(process: TokenProcess, answers: Answers) -> Tensor:
    """(B, T): what an answer earned before each token."""
    earned = answers.read(process.reward)
    return earned.cumsum(dim=1) - earned
