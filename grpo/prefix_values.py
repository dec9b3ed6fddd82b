"""Values of states inside answers: the mean reward of continuations that the policy samples from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..credit.batch import PrefixValues
from ..credit.states import prefix_lengths, segment_ids
from ..verifiers import InputError, Sample
from ..verifiers.panel import Panel, PanelResult
from .collect import as_sample
from .engines import Engine, SamplingOptions, awake
from .engines.native import NativeEngine
from .policy import ForwardCounter, Policy
from .sampling import Generation, RolloutConfig
from .seeds import named_seed
from .task import Problem

__all__ = ["PrefixValuer", "Valued", "prefix_parts"]


@dataclass(frozen=True)
class Valued:
    """What a valuer found.

    Args:
        values: by the name of the states, (B, S + 1).
        panel: what the verifiers said of the continuations, with their errors.
        tokens: generated for it.
        metrics: further numbers to log.
    """

    values: dict[str, PrefixValues]
    panel: PanelResult
    tokens: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class _State:
    """A prefix of an answer; equal ones of one problem are sampled once."""

    problem: str
    prompt: tuple[int, ...]
    prefix: tuple[int, ...]


@dataclass(frozen=True)
class PrefixValuer:
    """Samples continuations of prefixes of the batch's own answers and has the whole text judged.

    A prefix is the prompt's ids and the first sampled ids of the answer; nothing is encoded again. A continuation has
    the tokens that the answer's limit leaves, and one that the limit cuts is judged as it is. The random numbers of a
    state come from ``(seed, step, problem, prefix)`` alone, so that its value does not depend on the rest of the batch.

    Args:
        num_samples: K continuations from each state; 9 in VinePPO (arXiv 2410.01679). The standard error of a value V
            of rewards 0 and 1 is ``sqrt(V (1 - V) / K)``.
        max_states: at most so many states inside an answer, evenly spread over it, or None for all; the prompt, and
            states that were sampled for another answer, come besides.
        rows: continuations sampled side by side.
    """

    num_samples: int = 9
    max_states: int | None = None
    rows: int = 512

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_states", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"prefix_valuer.{name}={value}: must be at least 1")

    def __call__(
        self,
        names: Iterable[str],
        policy: Policy,
        problems: Sequence[Problem],
        rollouts: Sequence[Rollout],
        batch: CreditBatch,
        panel: Panel,
        config: RolloutConfig,
        *,
        seed: int,
        step: int,
        should_stop: Callable[[], bool] | None = None,
        engine: Engine | None = None,
    ) -> Valued:
        """Values of the states ``names`` of every rollout (see :mod:`apportion.credit.states`).

        Args:
            problems: ``rollouts[i].group_id`` is the index of its problem.
            batch: of these rollouts.
            panel: its verifiers with a reward weight judge the continuations.
            config: how the rollouts were sampled.
            seed, step: name the random streams.
            should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
            engine: samples with the policy's weights; None: the built-in sampler.
        """
        engine = NativeEngine(policy) if engine is None else engine
        lengths = {name: prefix_lengths(segment_ids(name, batch)) for name in names}
        chosen = {
            _state(problems, rollouts[row], int(lengths[name][row, column]))
            for name in lengths
            for row, column in self._choose(lengths[name]).nonzero().tolist()
        }
        # Long prefixes last: those side by side have about the same number of tokens left.
        states = sorted(chosen, key=lambda s: (len(s.prefix), s.problem, s.prefix))
        counter = ForwardCounter()
        with awake(engine, policy), counter.counting(policy.model):
            endings, tokens = self._sample(
                engine, policy.max_positions, states, config, seed=seed, step=step, should_stop=should_stop
            )
        by_id = {problem.id: problem for problem in problems}
        samples = [
            _whole(policy, by_id[state.problem], state, ids, cut) for state, rows in endings for ids, cut in rows
        ]
        told = panel.rewarding().judge(samples)
        rewards = iter(panel.reward(verdicts) for verdicts in told.verdicts)
        judged = {state: [next(rewards) for _ in rows] for state, rows in endings}
        values = {name: _table(lengths[name], problems, rollouts, judged) for name in lengths}
        asked = sum(int((value.count > 0).sum()) for value in values.values())
        metrics = {
            "cost/value_tokens": float(tokens),
            "cost/value_forwards": counter.take(),
            "cost/value_states": float(len(states)),
            "cost/value_states_shared": 1 - len(states) / asked if asked else 0.0,
        }
        return Valued(values, told, tokens, metrics)

    def _choose(self, lengths: Tensor) -> Tensor:
        """(B, S + 1) bool: the states to sample."""
        real = lengths >= 0
        if self.max_states is None:
            return real
        inner = real.clone()
        inner[:, 0] = False
        count, rank = inner.sum(dim=1, keepdim=True), inner.cumsum(dim=1)
        most = count.clamp(min=1, max=self.max_states)
        share = [(place * most).div(count.clamp(min=1), rounding_mode="floor") for place in (rank, rank - 1)]
        picked = inner & (share[0] != share[1])
        picked[:, 0] = real[:, 0]
        return picked

    def _sample(
        self,
        engine: Engine,
        positions: int | None,
        states: Sequence[_State],
        config: RolloutConfig,
        *,
        seed: int,
        step: int,
        should_stop: Callable[[], bool] | None,
    ) -> tuple[list[tuple[_State, list[tuple[list[int], bool]]]], int]:
        """For each state its continuations, each with whether the limit cut it; and the tokens generated in all."""
        endings, tokens = [], 0
        together = prefix_parts(
            [len(state.prompt) for state in states],
            [len(state.prefix) for state in states],
            copies=self.num_samples,
            rows=self.rows,
            limit=config.max_new_tokens,
            positions=positions,
        )
        for part in ([states[row] for row in rows] for rows in together):
            generations = engine.generate(
                [[*state.prompt, *state.prefix] for state in part],
                self.num_samples,
                SamplingOptions.of(config, config.max_new_tokens - len(part[0].prefix)),
                row_seeds=[row for state in part for row in _row_seeds(state, self.num_samples, seed, step)],
                should_stop=should_stop,
            )
            tokens += sum(len(generation.ids) for generation in generations)
            for index, state in enumerate(part):
                left = config.max_new_tokens - len(state.prefix)
                own = generations[index * self.num_samples : (index + 1) * self.num_samples]
                endings.append((state, [(g.ids[:left], g.truncated or len(g.ids) > left) for g in own]))
        return endings, tokens


def prefix_parts(
    prompts: Sequence[int], prefixes: Sequence[int], *, copies: int, rows: int, limit: int, positions: int | None
) -> Iterator[list[int]]:
    """Prefixes to be continued together, short ones first: few enough, and none runs beyond the last position.

    All of a part get the tokens that its shortest prefix has left; what is too much is cut off afterwards.

    Args:
        prompts, prefixes: N lengths in tokens.
        copies: continuations of each.
        rows: most continuations of a part, if it has more than one prefix.
        limit: longest answer, its prefix included.
        positions: of the model, or None.

    >>> list(prefix_parts([2, 2, 2], [5, 0, 1], copies=2, rows=4, limit=8, positions=None))
    [[1, 2], [0]]
    """
    part: list[int] = []
    for row in sorted(range(len(prefixes)), key=lambda row: prefixes[row]):
        longest = prompts[row] + prefixes[row] + limit - prefixes[part[0] if part else row]
        if part and ((len(part) + 1) * copies > rows or (positions is not None and longest > positions)):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _state(problems: Sequence[Problem], rollout: Rollout, length: int) -> _State:
    return _State(
        problems[rollout.group_id].id, tuple(rollout.prompt_ids), tuple(list(rollout.completion_ids)[:length])
    )


def _row_seeds(state: _State, count: int, seed: int, step: int) -> list[int]:
    own = named_seed(seed, "value", step, state.problem, " ".join(map(str, state.prefix)))
    return [named_seed(own, index) for index in range(count)]


def _whole(policy: Policy, problem: Problem, state: _State, ending: list[int], cut: bool) -> Sample:
    """The whole answer as the verifiers would see it, had the policy written it in one go."""
    ids = [*state.prefix, *ending]
    return as_sample(policy, problem, policy.encode(problem.prompt), Generation(ids, [], cut))


def _table(
    lengths: Tensor,
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    judged: Mapping[_State, Sequence[float | None]],
) -> PrefixValues:
    """Mean, number and population variance of the rewards of every state that was sampled, for whichever answer."""
    value = torch.full(lengths.shape, float("nan"), dtype=torch.float64)
    count, variance = torch.zeros(lengths.shape, dtype=torch.long), torch.zeros(lengths.shape, dtype=torch.float64)
    for row, column in (lengths >= 0).nonzero().tolist():
        state = _state(problems, rollouts[row], int(lengths[row, column]))
        rewards = [reward for reward in judged.get(state, ()) if reward is not None]
        if rewards:
            sample = torch.tensor(rewards, dtype=torch.float64)
            value[row, column], count[row, column] = sample.mean(), len(rewards)
            variance[row, column] = sample.var(correction=0)
    return PrefixValues(value, count, variance)
