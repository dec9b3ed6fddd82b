"""Sequence-level credit with other baselines than GRPO's: none, the other answers, the mean per token, the runner-up.

Every token of an answer gets the answer's advantage. B rollouts; r_i is the outcome of row i, g its group of G rows
that have an outcome. Rows without one, and rows that are left out of training, get zero and enter no statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .batch import Credit, CreditBatch
from .ops import FLAT, broadcast_rows, dead_group_share, group_mean, group_std, leave_one_out
from .strategy import Conserves, Phase, check_choice

__all__ = ["BestOfGroup", "LeaveOneOut", "LengthWeightedBaseline", "RawReward", "outcome_credit", "outcome_signal"]

ONLY_REWARD = "nothing: the answer's reward alone"


def outcome_signal(source: str) -> str:
    """The signal that a strategy requires for the outcome that its option ``source`` names.

    >>> outcome_signal("reward"), outcome_signal("format")
    ('reward', 'score:format')
    """
    return "reward" if source == "reward" else f"score:{source}"


def outcome_credit(
    batch: CreditBatch, source: str, per_row: Tensor, metrics: Mapping[str, float] | None = None
) -> Credit:
    """An advantage for each row on all of its tokens; zero for rows without an outcome.

    Args:
        source: what the outcome was; the share of its dead groups is reported.
        per_row: (B,); may be NaN where the outcome is.
        metrics: more numbers to report.
    """
    outcome = batch.outcome(source)
    advantages = broadcast_rows(per_row.where(~outcome.isnan(), 0.0), batch.completion_mask)
    dead = dead_group_share(outcome, batch.group_ids)
    return Credit(advantages, parts={"outcome": advantages}, metrics={"dead_groups": dead, **(metrics or {})})


@dataclass(frozen=True)
class RawReward:
    """The reward itself, without a baseline (REINFORCE: Williams, 1992): ``A[i, t] = r_i``.

    With rewards that are never negative no answer is pushed down; the control that shows what a baseline is worth.

    Args:
        source: ``reward`` or the name of one verifier.
    """

    source: str = "reward"
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = ONLY_REWARD

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        return outcome_credit(batch, self.source, batch.outcome(self.source))


@dataclass(frozen=True)
class LeaveOneOut:
    """The reward against the mean of the *other* answers of its group (RLOO, Back to Basics, arXiv 2402.14740).

    ``A[i, t] = r_i - mean_{j != i} r_j``, which is ``G / (G - 1)`` times the reward less the group's mean.

    Args:
        source: ``reward`` or the name of one verifier.
        normalize: divide by the population standard deviation of the others, where they have one.
        eps: added to it.
    """

    source: str = "reward"
    normalize: bool = False
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = ONLY_REWARD

    @property
    def conserves(self) -> Conserves:
        return "sign" if self.normalize else "mass"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        per_row = leave_one_out(outcome, batch.group_ids, normalize=self.normalize, eps=self.eps)
        return outcome_credit(batch, self.source, per_row)


@dataclass(frozen=True)
class LengthWeightedBaseline:
    """The reward against the group's mean per *token* (OPO, arXiv 2505.23585).

    ``A[i, t] = r_i - sum_j n_j r_j / sum_j n_j`` with n_j the trained tokens of row j: the baseline of least variance
    where a row's squared gradient grows with its length. The tokens of a group sum to zero.

    Args:
        source: ``reward`` or the name of one verifier.
    """

    source: str = "reward"
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "zero_mean"
    extra_information: ClassVar[str] = ONLY_REWARD

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        by_token = outcome[:, None].expand(batch.completion_mask.shape)
        pooled = by_token.masked_fill(~batch.completion_mask, float("nan"))
        return outcome_credit(batch, self.source, outcome - group_mean(pooled, batch.group_ids))


@dataclass(frozen=True)
class BestOfGroup:
    """Only the group's best answer is rewarded, by its lead over the second best (pass@k, arXiv 2503.19595).

    ``A[i, t] = (r_(1) - r_(2)) / (std_g + eps)`` for the best row, 0 for all others. Where two or more share the best
    reward, ``r_(1) = r_(2)`` and nobody gets anything: for pass@k one success is enough. A group of one has no second
    best and gets nothing either.

    Args:
        source: ``reward`` or the name of one verifier.
        normalize: divide by the group's standard deviation.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to it.
    """

    source: str = "reward"
    normalize: bool = True
    ddof: int = 1
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "sign"
    extra_information: ClassVar[str] = ONLY_REWARD

    def __post_init__(self) -> None:
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, groups = batch.outcome(self.source), batch.group_ids
        ids, index = torch.unique(groups, return_inverse=True)
        known = outcome.nan_to_num(nan=-torch.inf)
        nothing = known.new_full((len(ids),), -torch.inf)
        best = nothing.scatter_reduce(0, index, known, "amax")[index]
        at_best = known > best - FLAT
        winners = known.new_zeros(len(ids)).index_add(0, index, at_best.double())[index]
        second = nothing.scatter_reduce(0, index, known.masked_fill(at_best, -torch.inf), "amax")[index]
        leads = at_best & (winners == 1) & second.isfinite()
        lead = (known - second).where(leads, 0.0)
        if self.normalize:
            lead = lead / (group_std(outcome, groups, ddof=self.ddof) + self.eps)
        return outcome_credit(batch, self.source, lead, {"leads": float(leads.sum()) / max(len(ids), 1)})
