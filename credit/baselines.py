"""Credit from statistics over the tokens of a batch or group: REINFORCE++ and the optimal token baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import Over, batch_moments, dead_group_share, group_normalize, return_to_go, whiten
from .sequence import ONLY_REWARD, outcome_signal
from .strategy import Conserves, Phase, check_choice

__all__ = ["OptimalTokenBaseline", "WhitenedAdvantage", "WhitenedReturn"]


@dataclass(frozen=True)
class WhitenedReturn:
    """The return of each token against all tokens of the batch, without groups (REINFORCE++, arXiv 2501.03262).

    The reward falls on the last token, a KL penalty on every token: ``r[t] = R 1[t is last] - kl_coef * k1[t]`` with
    ``k1 = old_logprobs - ref_logprobs``. Then ``G[t] = sum_{k >= t} r[k]`` and ``A = (G - mean) / (std + eps)`` over
    all trained tokens of the batch. A group whose rewards are equal still gets credit, for its prompt's difficulty.

    Args:
        source: ``reward`` or the name of one verifier.
        kl_coef: of the penalty; 0 needs no reference. Leave ``loss.kl_coef`` at 0 beside it.
        over: count every ``token`` once, as published, or every ``sequence`` once.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to it.
    """

    source: str = "reward"
    kl_coef: float = 0.0
    over: Over = "token"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        check_choice("over", self.over, ("token", "sequence"))
        check_choice("ddof", self.ddof, (0, 1))
        if self.kl_coef < 0:
            raise InputError(f"kl_coef must be 0 or more, not {self.kl_coef}")

    @property
    def requires(self) -> frozenset[str]:
        reference = {"old_logprobs", "ref_logprobs"} if self.kl_coef else set()
        return frozenset({outcome_signal(self.source)} | reference)

    @property
    def extra_information(self) -> str:
        return "the probabilities of a reference policy" if self.kl_coef else ONLY_REWARD

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        mask = batch.completion_mask & ~outcome.isnan()[:, None]
        earned = outcome[:, None].where(mask, 0.0)
        paid = torch.zeros_like(earned)
        if self.kl_coef:
            old, ref = _needed(batch, "old_logprobs"), _needed(batch, "ref_logprobs")
            paid = -self.kl_coef * return_to_go(old.double() - ref.double(), mask)
        mean, std = batch_moments(earned + paid, mask, over=self.over, ddof=self.ddof)
        unit = torch.where(std > 0, 1 / (std + self.eps), 0.0)
        parts = {"outcome": ((earned - mean) * unit).where(mask, 0.0).float()}
        if self.kl_coef:
            parts["kl"] = (paid * unit).float()
        dead = dead_group_share(outcome, batch.group_ids)
        return Credit(torch.stack([*parts.values()]).sum(dim=0), parts=parts, metrics={"dead_groups": dead})


@dataclass(frozen=True)
class WhitenedAdvantage:
    """The reward against its group's mean, then whitened over the batch (REINFORCE++-baseline, arXiv 2501.03262).

    ``a_i = r_i - mean_g`` on all tokens of row i, then ``A = (a - mean) / (std + eps)`` over all trained tokens of the
    batch. Where answers differ in length the mean of ``a`` over tokens is not 0, and subtracting it moves even answers
    of dead groups; ``center=false`` leaves it.

    Args:
        source: ``reward`` or the name of one verifier.
        over: count every ``token`` once, as published, or every ``sequence`` once.
        center: subtract the batch's mean.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to it.
    """

    source: str = "reward"
    over: Over = "token"
    center: bool = True
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = ONLY_REWARD

    def __post_init__(self) -> None:
        check_choice("over", self.over, ("token", "sequence"))
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def conserves(self) -> Conserves:
        return "none" if self.center else "mass"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source)})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        mask = batch.completion_mask & ~outcome.isnan()[:, None]
        centred = group_normalize(outcome, batch.group_ids, scale="none")[:, None].where(mask, 0.0)
        whitened = whiten(centred, mask, over=self.over, center=self.center, ddof=self.ddof, eps=self.eps).float()
        dead = dead_group_share(outcome, batch.group_ids)
        return Credit(whitened, parts={"outcome": whitened}, metrics={"dead_groups": dead})


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """The reward against a baseline of its own for every position, the one of least variance (arXiv 2602.07078).

    ``w[t] = 1 - 2 pi(y_t) + sum_v pi(v)^2`` is the squared norm of the score in the logits, ``W[t]`` its sum up to t,
    and ``A[i, t] = r_i - sum_j W[j, t] r_j / sum_j W[j, t]`` over the rows j of the group that have a trained token at
    t. It lowers the variance of the gradient and says nothing on which token did well.

    Where no other row of the group has a token (past the end of the second longest one), a row is its own baseline and
    gets nothing, unless ``raw_tail``.

    Args:
        source: ``reward`` or the name of one verifier.
        raw_tail: give the row its plain reward there.
        eps: added to every W, so that rows without any uncertainty count alike.
    """

    source: str = "reward"
    raw_tail: bool = False
    eps: float = 1e-8
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "the policy's own probabilities"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({outcome_signal(self.source), "old_logprobs", "sum_pi_squared"})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        mask = batch.completion_mask & ~outcome.isnan()[:, None]
        old, squared = _needed(batch, "old_logprobs").double(), _needed(batch, "sum_pi_squared").double()
        energy = (1 - 2 * old.exp() + squared).clamp(min=0).where(mask, 0.0).cumsum(dim=1)
        weight = (energy + self.eps).where(mask, 0.0)
        ids, index = torch.unique(batch.group_ids, return_inverse=True)
        lowest = outcome.new_full((len(ids),), torch.inf)
        lowest = lowest.scatter_reduce(0, index, outcome.nan_to_num(nan=torch.inf), "amin")[index]
        above = (outcome - lowest).nan_to_num(nan=0.0)[:, None]  # measured from it, equal rewards cancel exactly

        def total(values: Tensor) -> Tensor:
            return values.new_zeros(len(ids), values.shape[1]).index_add_(0, index, values)[index]

        baseline = total(weight * above) / total(weight).masked_fill(~mask, 1.0)
        advantages = above - baseline
        if self.raw_tail:
            advantages = torch.where(total(mask.double()) == 1, outcome[:, None], advantages)
        advantages = advantages.where(mask, 0.0).float()
        dead = dead_group_share(outcome, batch.group_ids)
        return Credit(advantages, parts={"outcome": advantages}, metrics={"dead_groups": dead})


def _needed(batch: CreditBatch, signal: str) -> Tensor:
    value = getattr(batch, signal)
    if value is None:
        raise InputError(f"credit needs the signal {signal!r}, which the batch does not have")
    return value
