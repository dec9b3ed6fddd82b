"""Evidence that costs more than the rollouts themselves, gathered only where the strategy asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..credit import CreditBatch, Rollout
from ..verifiers import InputError
from ..verifiers.panel import Panel, PanelResult
from .engines import Engine
from .forward import score_in_parts
from .policy import ForwardCounter, Policy
from .prefix_values import PrefixValuer
from .sampling import RolloutConfig
from .scorers import LearningScorer, TokenScorer
from .task import Problem
from .tree_sampling import TreeRolloutConfig
from .update import OptimConfig

__all__ = ["Evidence", "Gathered"]

SAMPLING = frozenset({"entropy", "sum_pi_squared"})


@dataclass(frozen=True)
class Gathered:
    """A batch with its further evidence.

    Args:
        batch: the evidence.
        tokens: generated for it.
        metrics: to log.
        panel: what verifiers said of continuations, or None where none were sampled.
    """

    batch: CreditBatch
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    panel: PanelResult | None = None


@dataclass(frozen=True)
class Evidence:
    """Providers of further evidence.

    Args:
        scorers: token scorers by name; the signal is ``token_scores:NAME``.
        prefix_valuer: samples continuations of prefixes; the signal is ``prefix_values:STATES``.
    """

    scorers: Mapping[str, TokenScorer] = field(default_factory=dict)
    prefix_valuer: PrefixValuer | None = None

    def needed(self, requires: Iterable[str]) -> frozenset[str]:
        """The signals of a strategy, and those that the scorers behind them read."""
        wanted = set(requires)
        for name, scorer in self.scorers.items():
            if f"token_scores:{name}" in wanted:
                wanted |= scorer.requires
        return frozenset(wanted)

    def available(self, requires: Iterable[str], rollout: RolloutConfig) -> set[str]:
        """Which of the signals ``requires`` can be had with these providers and this way of sampling."""
        have = {"ref_logprobs", *SAMPLING, *(f"token_scores:{name}" for name in self.scorers)}
        if self.prefix_valuer is not None:
            have |= {signal for signal in requires if signal.startswith("prefix_values:")}
        if isinstance(rollout, TreeRolloutConfig):
            have.add("tree")
        return have

    def gather(
        self,
        requires: Iterable[str],
        policy: Policy,
        problems: Sequence[Problem],
        rollouts: Sequence[Rollout],
        batch: CreditBatch,
        panel: Panel,
        config: RolloutConfig,
        *,
        rows: int,
        seed: int,
        step: int,
        should_stop: Callable[[], bool] | None = None,
        engine: Engine | None = None,
    ) -> Gathered:
        """The batch with what ``requires`` names and that it does not have yet, scores of tokens aside.

        Args:
            requires: signals of the strategy.
            policy: that sampled the rollouts.
            panel: that judged them.
            rows: rows in one forward.
            seed, step: name the random streams.
            engine: samples continuations; None: the built-in sampler.
        """
        wanted = self.needed(requires)
        if wanted & SAMPLING:
            batch = _with_distribution(policy, rollouts, batch, config.temperature, rows)
        states = sorted(signal.partition(":")[2] for signal in wanted if signal.startswith("prefix_values:"))
        if not states:
            return Gathered(batch)
        if self.prefix_valuer is None:
            raise InputError("credit needs prefix values; add prefix_valuer=rollouts")
        valued = self.prefix_valuer(
            states,
            policy,
            problems,
            rollouts,
            batch,
            panel,
            config,
            seed=seed,
            step=step,
            should_stop=should_stop,
            engine=engine,
        )
        return Gathered(replace(batch, prefix_values=valued.values), valued.tokens, valued.metrics, valued.panel)

    def begin(
        self,
        requires: Iterable[str],
        policy: Policy,
        rollout: RolloutConfig,
        optim: OptimConfig,
        forwards: ForwardCounter,
    ) -> dict[str, LearningScorer]:
        """Have the scorers that ``requires`` names and that learn start anew; they, by name."""
        learners = {name: one for name, one in self._wanted(requires).items() if isinstance(one, LearningScorer)}
        for scorer in learners.values():
            scorer.begin(policy, rollout=rollout, optim=optim, forwards=forwards)
        return learners

    def score(
        self, requires: Iterable[str], policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch
    ) -> tuple[CreditBatch, dict[str, float]]:
        """The batch with the token scores that ``requires`` names, and what was logged on the way.

        A scorer that learns from a batch before it scores it does so here; the others in :meth:`observe`.
        """
        scorers = self._wanted(requires)
        metrics = self._observed("before", scorers, policy, rollouts, batch)
        scores = {name: scorer(policy, rollouts, batch) for name, scorer in scorers.items()}
        return replace(batch, token_scores=scores), metrics

    def observe(
        self, requires: Iterable[str], policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch
    ) -> dict[str, float]:
        """Tell the scorers that learn from a batch once they have scored it; what they log."""
        return self._observed("after", self._wanted(requires), policy, rollouts, batch)

    def _wanted(self, requires: Iterable[str]) -> dict[str, TokenScorer]:
        wanted = set(requires)
        return {name: one for name, one in self.scorers.items() if f"token_scores:{name}" in wanted}

    def _observed(
        self,
        when: str,
        scorers: Mapping[str, TokenScorer],
        policy: Policy,
        rollouts: Sequence[Rollout],
        batch: CreditBatch,
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, scorer in scorers.items():
            if isinstance(scorer, LearningScorer) and scorer.learns == when:
                seen = scorer.observe(policy, rollouts, batch)
                metrics |= {f"{name}/{key}": value for key, value in seen.items()}
        return metrics


@torch.no_grad()
def _with_distribution(
    policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch, temperature: float, rows: int
) -> CreditBatch:
    """Entropy and sum of squares of the distribution that each token was sampled from: one more forward."""
    scored = score_in_parts(
        policy,
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.completion_ids for rollout in rollouts],
        temperature=temperature,
        rows=rows,
        squares=True,
    )
    assert scored.sum_pi_squared is not None
    return replace(
        batch,
        entropy=scored.entropy.where(batch.completion_mask, 0.0),
        sum_pi_squared=scored.sum_pi_squared.where(batch.completion_mask, 0.0),
    )
