"""What the steps or the tokens of a language model's own answers were really worth: exact with bounds, or sampled.

The value V of a state, a beginning of an answer, is the expected reward of the answers that the policy samples from
there; the true advantage of what follows is the value after it less the value before it, and the known reward stands
for the value after the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..credit.batch import PrefixValues
from ..verifiers.panel import Panel
from .policy import Policy
from .prefix_values import PrefixValuer
from .sampling import RolloutConfig
from .seeds import named_seed
from .task import Problem
from .together import merged_panels
from .tree_truth import TreeTruth
from .truth_units import Valuation, check_options, find_units, greatest, mean_known, reward_range, widened

__all__ = ["MonteCarloTruth", "TreeTruth", "Valuation"]

_FROM = "continuations from each state"
_COSTS = ("cost/value_tokens", "cost/value_forwards")


@dataclass(frozen=True)
class MonteCarloTruth:
    """True advantages by continuations: twice ``num_samples`` from every state, in two independent estimates.

    ``standard_error`` is that of the difference of two independent means. Two rewards more are counted for each state,
    one at each end of the range, so that 0 of 128 does not pass for certainty (Agresti and Coull 1998).

    Args:
        num_samples: K continuations from each state in each of the two estimates.
        units: name of the verifier whose spans are the units, or ``tokens`` for single tokens.
        truth: verifier that knows which tokens are wrong; None where none does.
        eps: a token sampled with probability ``1 - eps`` or more is inert: ``|A| <= eps`` times the range of rewards.
        rows: continuations sampled side by side.
    """

    num_samples: int = 64
    units: str = "steps"
    truth: str | None = "truth"
    eps: float = 1e-3
    rows: int = 512

    def __post_init__(self) -> None:
        check_options(self.eps, num_samples=self.num_samples, rows=self.rows)

    def __call__(
        self,
        policy: Policy,
        problems: Sequence[Problem],
        rollouts: Sequence[Rollout],
        batch: CreditBatch,
        panel: Panel,
        rollout_config: RolloutConfig,
        *,
        seed: int,
        step: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> Valuation:
        """Value the units of every rollout that has a reward.

        Args:
            policy: that sampled them.
            problems: ``rollouts[i].group_id`` is the index of its problem.
            batch: of these rollouts.
            panel: its verifiers with a reward weight judge the continuations.
            rollout_config: how the rollouts were sampled.
            seed, step: name the random streams, which are none of those that strategies sample from.
            should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
        """
        began = time.perf_counter()
        units = find_units(batch, rollouts, rollout_config, self.units, self.eps)
        valuer = PrefixValuer(self.num_samples, rows=self.rows)
        found = [
            valuer(
                [units.states],
                policy,
                problems,
                rollouts,
                units.batch,
                panel,
                rollout_config,
                seed=named_seed(seed, "truth", half),
                step=step,
                should_stop=should_stop,
            )
            for half in range(2)
        ]
        tables = [one.values[units.states] for one in found]
        limits = widened(reward_range(panel), [batch.outcome(), *(table.value for table in tables)])
        both, (first, again) = _pooled(*tables), [units.advantages(table.value) for table in tables]
        whole, half = (
            units.truth(advantage, units.errors(_variance(table, limits)), self.truth, f"{count} {_FROM}")
            for advantage, table, count in (
                (units.advantages(both.value), both, 2 * self.num_samples),
                (first.masked_fill(again.isnan(), float("nan")), tables[0], self.num_samples),
            )
        )
        return Valuation(
            whole,
            replace(half, again=again),
            None,
            sum(one.tokens for one in found),
            time.perf_counter() - began,
            merged_panels([one.panel for one in found]),
            {
                **{name: sum(one.metrics[name] for one in found) for name in _COSTS},
                "cost/value_states": found[0].metrics["cost/value_states"],
                "truth/standard_error": mean_known(whole.standard_error),
                "truth/drift": greatest(units.drift),
            },
        )


def _pooled(first: PrefixValues, second: PrefixValues) -> PrefixValues:
    """Values from the samples of both.

    >>> one = PrefixValues(torch.tensor([[0.5]]), torch.tensor([[2]]), torch.tensor([[0.25]]))
    >>> two = PrefixValues(torch.tensor([[1.0]]), torch.tensor([[6]]), torch.tensor([[0.0]]))
    >>> both = _pooled(one, two)
    >>> both.value.tolist(), both.count.tolist(), both.variance.tolist()
    ([[0.875]], [[8]], [[0.109375]])
    """
    counts = torch.stack([first.count, second.count])
    means = torch.stack([first.value, second.value]).nan_to_num()
    squares = torch.stack([first.variance, second.variance]) + means.square()
    count = counts.sum(dim=0)
    mean, square = ((counts * moment).sum(dim=0) / count for moment in (means, squares))
    return PrefixValues(mean, count, (square - mean.square()).clamp(min=0).where(count > 0, 0.0))


def _variance(table: PrefixValues, limits: tuple[float, float]) -> Tensor:
    """Variance of each mean, with one more reward at each end of the range; NaN where there is no mean.

    >>> none_of_eight = PrefixValues(torch.tensor([[0.0]]), torch.tensor([[8]]), torch.tensor([[0.0]]))
    >>> _variance(none_of_eight, (0.0, 1.0)).tolist()  # p (1 - p) / n with p = 1/10 and n = 10
    [[0.009]]
    """
    count, value = table.count.double(), table.value.double()
    mean = (count * value + sum(limits)) / (count + 2)
    square = (count * (table.variance + value.square()) + sum(limit**2 for limit in limits)) / (count + 2)
    return (square - mean.square()).clamp(min=0) / (count + 2)
