"""The evidence of all probed strategies about the common rollouts, gathered once, and what each kind of it costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...credit import Credit, CreditBatch
from ...credit.strategy import assign_credit
from ...grpo.collect import check_panel
from ...grpo.policy import ForwardCounter, Policy
from ...verifiers import InputError
from ...verifiers.panel import Panel
from .choices import Choice, Common
from .rollouts import Probed

__all__ = ["Cost", "Gatherer", "credit_of", "effective"]


@dataclass(frozen=True)
class Cost:
    """What something took: answers and continuations sampled, texts judged by a verifier, wall time."""

    rollouts: float = 0.0
    verifier_calls: float = 0.0
    milliseconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rollouts + other.rollouts,
            self.verifier_calls + other.verifier_calls,
            self.milliseconds + other.milliseconds,
        )


@dataclass
class Gatherer:
    """Adds to the batch what strategies ask for.

    Args:
        common: providers and options.
        policy: that sampled the rollouts.
        probed: the rollouts.
        panel: that judged them.
        batch: what is known so far.
        costs: of each signal that was gathered.
    """

    common: Common
    policy: Policy
    probed: Probed
    panel: Panel
    batch: CreditBatch
    costs: dict[str, Cost]

    @classmethod
    def start(cls, common: Common, policy: Policy, probed: Probed, panel: Panel) -> Gatherer:
        """With the log-probabilities of the sampler as those of the policy and of the reference: they are one here."""
        logprobs = probed.batch.old_logprobs
        return cls(common, policy, probed, panel, replace(probed.batch, logprobs=logprobs, ref_logprobs=logprobs), {})

    def gather(self, choices: Sequence[Choice]) -> None:
        """Everything that ``choices`` read, one signal after the other."""
        wanted = frozenset[str]().union(*(choice.requires for choice in choices))
        if {"entropy", "sum_pi_squared"} & wanted:
            self._time("entropy", {"entropy", "sum_pi_squared"} & wanted)
        for signal in sorted(wanted):
            if signal.startswith("prefix_values:"):
                self._time(signal, {signal})
        for signal in sorted(wanted):
            if signal.startswith("token_scores:") and signal != "token_scores:truth":
                self._score(signal)

    def cost_of(self, choice: Choice) -> Cost:
        """What the evidence of one strategy took: the rollouts, the verifiers that it reads, and what came besides."""
        reads = {signal.partition(":")[2] for signal in choice.requires if signal.startswith(("spans:", "score:"))}
        if "reward" in choice.requires:
            reads |= set(self.panel.reward_weights)
        rows = len(self.probed.rollouts)
        total = Cost(rollouts=rows, verifier_calls=rows * len(reads))
        for signal, cost in self.costs.items():
            if signal in choice.requires or (signal == "entropy" and "sum_pi_squared" in choice.requires):
                total = total + cost
        return total

    def _time(self, name: str, signals: Iterable[str]) -> None:
        began = time.perf_counter()
        parts = self.common.parts
        gathered = self.common.evidence.gather(
            signals,
            self.policy,
            self.probed.problems,
            self.probed.rollouts,
            self.batch,
            self.panel,
            parts.rollout,
            rows=parts.optim.micro_batch_rows,
            seed=parts.run.seed,
            step=1,
        )
        continuations = 0
        if gathered.panel is not None:
            check_panel(gathered.panel, parts.run.max_error_share)
            continuations = len(gathered.panel.verdicts)
        held = self.batch.prefix_values  # the evidence replaces those that were gathered before
        self.batch = replace(gathered.batch, prefix_values={**held, **gathered.batch.prefix_values})
        calls = continuations * len(self.panel.reward_weights)
        self.costs[name] = Cost(continuations, calls, 1e3 * (time.perf_counter() - began))

    def _score(self, signal: str) -> None:
        began = time.perf_counter()
        evidence, parts = self.common.evidence, self.common.parts
        evidence.begin({signal}, self.policy, parts.rollout, parts.optim, ForwardCounter())
        held = self.batch.token_scores
        batch, _ = evidence.score({signal}, self.policy, self.probed.rollouts, self.batch)
        self.batch = replace(batch, token_scores={**held, **batch.token_scores})
        self.costs[signal] = Cost(milliseconds=1e3 * (time.perf_counter() - began))


def credit_of(choices: Sequence[Choice], batch: CreditBatch) -> tuple[dict[str, Credit], Mapping[str, float]]:
    """What every strategy hands out, and the milliseconds that each took."""
    credits, took = {}, {}
    before = batch.completion_mask.clone(), batch.reward.clone()
    for choice in choices:
        began = time.perf_counter()
        credits[choice.label] = assign_credit(choice.parts.strategy, batch)
        took[choice.label] = 1e3 * (time.perf_counter() - began)
        after = batch.completion_mask, batch.reward
        if not all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in zip(before, after)):
            raise InputError(
                f"{choice.label}: the strategy writes into the batch, which others read too; copy it first"
            )
    return credits, took


def effective(credits: Mapping[str, Credit]) -> dict[str, Tensor]:
    """What multiplies each token's gradient: the advantages, times the weight of a strategy that gives one."""
    return {
        name: credit.advantages if credit.loss_weight is None else credit.advantages * credit.loss_weight
        for name, credit in credits.items()
    }
