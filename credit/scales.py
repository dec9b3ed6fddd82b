"""Sequence-level credit with other scales than the group's spread: the mean, a Beta density, the share of live answers.

Every token of an answer gets the answer's advantage; names as in :mod:`apportion.credit.sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import FLAT, group_mean, group_normalize, group_std
from .sequence import ONLY_REWARD, outcome_credit, outcome_signal
from .strategy import Conserves, Phase, check_choice

__all__ = ["BetaNormalized", "LiveScaled", "MeanScaled", "beta_shape"]


@dataclass(frozen=True)
class MeanScaled:
    """The centred reward over the group's mean reward (MaxRL, arXiv 2602.02710).

    ``A[i, t] = (r_i - mean_g) / (mean_g + eps)``: with rewards 0 and 1 the gradient of the log of the success rate, so
    that hard prompts weigh more. A group whose mean is 0 gets nothing. [1, 0, 0, 0] gives [3, -1, -1, -1].

    Args:
        source: ``reward`` or the name of one verifier; its values must not be negative.
        eps: added to the mean.
    """

    source: str = "reward"
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = ONLY_REWARD

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        _refuse(outcome < 0, outcome, f"credit=sequence/maxrl divides by the mean of {self.source}, so it must be >= 0")
        centred = group_normalize(outcome, batch.group_ids, scale="none")
        return outcome_credit(batch, self.source, centred / (group_mean(outcome, batch.group_ids) + self.eps))


@dataclass(frozen=True)
class BetaNormalized:
    """The centred reward over the density of a Beta distribution at the prompt's success rate (BNPO, arXiv 2506.02864).

    ``A[i, t] = (r_i - p_g) / f(p_g; alpha, beta)`` with p_g the group's mean reward and f the Beta density,
    ``alpha = max(1, 1 + a / 3)``, ``beta = max(1, 1 + b / 3)``, where (a, b) are fitted to the groups' p by moments:
    with their mean m and sample variance v, ``a = (m (1 - m) / v - 1) m`` and ``b = (m (1 - m) / v - 1) (1 - m)``.
    alpha = beta = 1 is the plain centred reward, alpha = beta = 3/2 is GRPO up to a constant. Not the aggregation that
    TRL calls bnpo (a token mean over the local batch).

    With a single group, or equal success rates in all of them, there is nothing to fit, and alpha = beta = 1.

    Args:
        source: ``reward`` or the name of one verifier.
        low, high: range of its values, mapped to [0, 1] first.
        max_weight: ``1 / f`` is cut to it.
    """

    source: str = "reward"
    low: float = 0.0
    high: float = 1.0
    max_weight: float = 1e6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = ONLY_REWARD

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise InputError(f"low must be under high, not {self.low} and {self.high}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, groups = batch.outcome(self.source), batch.group_ids
        outside = (outcome < self.low) | (outcome > self.high)
        _refuse(outside, outcome, f"credit=sequence/bnpo takes {self.source} from low={self.low} to high={self.high}")
        unit = (outcome - self.low) / (self.high - self.low)
        rate = group_mean(unit, groups)
        alpha, beta = beta_shape(_one_per_group(rate, groups))
        log_density = (
            torch.xlogy(alpha - 1, rate)
            + torch.xlogy(beta - 1, 1 - rate)
            + torch.lgamma(alpha + beta)
            - torch.lgamma(alpha)
            - torch.lgamma(beta)
        )
        weight = (-log_density).exp().clamp(max=self.max_weight)
        centred = group_normalize(unit, groups, scale="none")
        return outcome_credit(batch, self.source, centred * weight, {"alpha": float(alpha), "beta": float(beta)})


@dataclass(frozen=True)
class LiveScaled:
    """The centred reward, scaled up by the share of answers that carry a signal (GPG, arXiv 2504.02546).

    ``A[i, t] = alpha (r_i - mean_g)`` with ``alpha = B / B_live``: dead groups add nothing to the gradient, yet stand
    in the mean over the batch; alpha takes them out of it.

    Args:
        source: ``reward`` or the name of one verifier.
        count: what B_live counts: ``live`` rows of groups whose rewards differ (the paper), or ``rewarded`` rows, those
            with a reward other than 0 (as verl counts).
    """

    source: str = "reward"
    count: Literal["live", "rewarded"] = "live"
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = ONLY_REWARD

    def __post_init__(self) -> None:
        check_choice("count", self.count, ("live", "rewarded"))

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, groups = batch.outcome(self.source), batch.group_ids
        scored = ~outcome.isnan()
        counted = scored & (group_std(outcome, groups) > 0 if self.count == "live" else outcome != 0)
        alpha = float(scored.sum()) / max(int(counted.sum()), 1)
        centred = group_normalize(outcome, groups, scale="none")
        return outcome_credit(batch, self.source, alpha * centred, {"alpha": alpha})


def beta_shape(success_rates: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and beta of BNPO's density (see :class:`BetaNormalized`) from one success rate for each group.

    Args:
        success_rates: (N,) in [0, 1].

    Returns:
        Two float64 scalars of at least 1; exactly 1 where fewer than two rates, or equal ones, leave nothing to fit.

    >>> [round(float(x), 4) for x in beta_shape(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))]
    [1.2963, 1.2963]
    """
    rates = success_rates.double()
    one = rates.new_ones(())
    if len(rates) < 2 or rates.std() <= FLAT:
        return one, one
    mean = rates.mean()
    concentration = mean * (1 - mean) / rates.var() - 1
    return torch.maximum(one, 1 + concentration * mean / 3), torch.maximum(one, 1 + concentration * (1 - mean) / 3)


def _refuse(bad: Tensor, outcome: Tensor, rule: str) -> None:
    rows = bad.nonzero()
    if len(rows):
        row = int(rows[0])
        raise InputError(f"{rule}; row {row} has {float(outcome[row]):g}: use another strategy, or rescale the reward")


def _one_per_group(per_row: Tensor, group_ids: Tensor) -> Tensor:
    """(N,): the value that all rows of a group share, once for each group that has one."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    table = per_row.new_full((len(ids),), float("nan")).index_put((index,), per_row)
    return table[~table.isnan()]
