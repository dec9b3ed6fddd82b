"""Dense rewards from the log-ratio of two language models (PRIME)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import leave_one_out, return_to_go
from .parts import whiten_parts
from .redistribution import token_scores
from .strategy import Conserves, Phase, check_choice

__all__ = ["ImplicitReward", "pairwise_accuracy"]


@dataclass(frozen=True)
class ImplicitReward:
    """The return of implicit token rewards, plus the outcome (PRIME, arXiv 2502.01456).

    ``q_t = log pi_phi(y_t) - log pi_ref(y_t)`` of a language model phi that is trained to tell right answers from wrong
    ones by the sum of its q. They are divided by the batch's largest ``|sum of q from t on|`` and lose the mean of each
    answer's mean, leave-one-out over n answers: ``r_t = n / (n - 1) q_t - (sum_i mean_i) / (n - 1)``. Then

    ``A[t] = rm_coef * sum_{k >= t} r_k + outcome_coef * (R - mean of the others' R)``, whitened over the tokens of the
    batch. An answer alone in its group gets nothing; one without a reward keeps its implicit part.

    Args:
        scorer: name of the token scorer that gives q.
        rm_coef, outcome_coef: weights of the implicit rewards and of the outcome.
        batch_norm: divide by the batch's largest return.
        whiten: over the tokens of the batch, long answers weighing more.
        ddof, eps: of the whitening.
    """

    scorer: str = "implicit"
    rm_coef: float = 5.0
    outcome_coef: float = 1.0
    batch_norm: bool = True
    whiten: bool = True
    ddof: int = 1
    eps: float = 1e-8
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a second language model's score for every token"

    def __post_init__(self) -> None:
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"token_scores:{self.scorer}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        mask, outcome = batch.completion_mask, batch.outcome()
        scores = self._scores(batch)
        reward = scores
        if self.batch_norm:
            largest = return_to_go(scores, mask).abs().max() if scores.numel() else scores.sum()
            reward = scores / largest.where(largest > 0, 1.0)
        implicit = self.rm_coef * return_to_go(_less_others(reward, mask, batch.group_ids), mask)
        by_outcome = self.outcome_coef * leave_one_out(outcome, batch.group_ids)
        parts = {"implicit": implicit, "outcome": by_outcome[:, None].where(mask, 0.0)}
        if self.whiten:
            parts = whiten_parts(parts, mask, ddof=self.ddof, eps=self.eps)
        parts = {name: part.float() for name, part in parts.items()}
        accuracy = pairwise_accuracy(scores.sum(dim=1), outcome, batch.group_ids)
        return Credit(torch.stack([*parts.values()]).sum(dim=0), parts=parts, metrics={"pairwise_accuracy": accuracy})

    def _scores(self, batch: CreditBatch) -> Tensor:
        """(B, T) float64, zero outside the mask."""
        scores = token_scores(self.scorer, batch)
        bad = (~torch.isfinite(scores)).any(dim=1).nonzero()
        if len(bad):
            raise InputError(f"token scores of {self.scorer}: row {int(bad[0])} holds a number that is not finite")
        return scores


def _less_others(reward: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """``n / (n - 1) r_t - (sum_i mean_i) / (n - 1)`` over the n answers of the group that have trained tokens.

    Args:
        reward: (B, T), zero outside ``mask``.
        mask: (B, T) bool.
        group_ids: (B,) long.

    Returns:
        (B, T); zero outside the mask and in an answer alone in its group.

    >>> two = torch.zeros(2, dtype=torch.long)
    >>> _less_others(torch.tensor([[1.0, 3.0], [4.0, 0.0]]), torch.tensor([[True, True], [True, False]]), two).tolist()
    [[-4.0, 0.0], [2.0, 0.0]]
    """
    length = mask.sum(dim=1)
    mean = reward.sum(dim=1) / length.clamp(min=1)
    present = (length > 0).to(mean)
    _, index = torch.unique(group_ids, return_inverse=True)
    total, count = torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device).index_add(
        1, index, torch.stack([mean, present])
    )[:, index]
    others = (count - 1).clamp(min=1)[:, None]
    centred = (count[:, None] * reward - total[:, None]) / others
    return centred.where(mask & (count > 1)[:, None], 0.0)


def pairwise_accuracy(scores: Tensor, outcome: Tensor, group_ids: Tensor) -> float:
    """Share of the pairs of one group with different outcomes in which the better answer has the higher score.

    A tie of scores counts half. NaN without such a pair.

    Args:
        scores, outcome: (B,); NaN outcomes are left out.
        group_ids: (B,) long.

    >>> pairwise_accuracy(torch.tensor([2.0, 1.0, 1.5]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    1.0
    """
    better = (outcome[:, None] > outcome[None, :]) & (group_ids[:, None] == group_ids[None, :])
    won = ((scores[:, None] - scores[None, :]).sign() + 1) / 2
    return float(won[better].mean())
