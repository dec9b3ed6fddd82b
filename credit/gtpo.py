"""Rewards shaped by the policy's entropy at each position, within the right and the wrong answers (GTPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_mean, group_normalize
from .strategy import Conserves, Phase, check_choice
from .wrapping import evidence, masked_share

__all__ = ["EntropyShaping", "position_shares"]


def position_shares(values: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Each value against the mean of its group's rows that are alive at the same position: ``d_t * v_i / sum_k v_k``.

    Args:
        values: (B, T), positive.
        mask: (B, T) bool, the rows that count at each position.
        group_ids: (B,) long.

    Returns:
        (B, T) float64 of mean 1 over the rows alive at a position; 0 outside ``mask``.

    >>> shares = position_shares(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[True, True], [True, False]]),
    ...                          torch.tensor([0, 0]))
    >>> shares.tolist()
    [[0.5, 1.0], [1.5, 0.0]]
    """
    ids, index = torch.unique(group_ids, return_inverse=True)
    kept = values.double().where(mask, 0.0)
    total = kept.new_zeros(len(ids), kept.shape[1]).index_add_(0, index, kept)[index]
    alive = kept.new_zeros(len(ids), kept.shape[1]).index_add_(0, index, mask.double())[index]
    return (kept * alive / total.where(mask, 1.0)).where(mask, 0.0)


@dataclass(frozen=True)
class EntropyShaping:
    """A reward for each token from its entropy among the answers alive at its position (GTPO, arXiv 2508.04349).

    With O+ the right and O- the wrong answers of a group, d_t and h_t of them alive at t::

        r+[i, t] =  a1 + a2 * d_t * H[i, t] / (sum over O+ of H[., t])
        r-[i, t] = -a1 - a2 * h_t * (1 / H[i, t]) / (sum over O- of 1 / H[., t])

    and ``A = (r - mean) / (std + eps)`` over the tokens of O+ and of O-, each side by itself.

    **That last step removes the outcome**: on each side the advantages sum to zero, a1 and a2 cancel, about half of the
    tokens of right answers are pushed down, and a side with one answer gets nothing. What is left is the shape alone;
    the metric ``flipped_tokens`` shows it. ``keep_sign`` scales the outcome's advantage by the shape instead:
    ``A = Z_i * r[i, t] / mean(r of the side)``, Z as in GRPO.

    Right is an answer with a reward over its group's mean. Groups of equal rewards get nothing (DAPO, on which GTPO
    stands, leaves them out).

    Args:
        outcome_weight: a1.
        entropy_weight: a2; the paper wants a1 + a2 = 1, the only public code has these defaults.
        keep_sign: see above.
        ddof: of the normalisations.
        eps: added to the standard deviations and the entropies.
    """

    outcome_weight: float = 1.0
    entropy_weight: float = 0.1
    keep_sign: bool = False
    ddof: int = 0
    eps: float = 1e-8
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "the policy's entropy at every token"

    def __post_init__(self) -> None:
        check_choice("ddof", self.ddof, (0, 1))
        if not (self.outcome_weight > 0 and self.entropy_weight >= 0 and self.eps > 0):
            raise InputError(
                "outcome_weight and eps must be over 0 and entropy_weight not under it, not "
                f"{self.outcome_weight}, {self.eps} and {self.entropy_weight}"
            )

    @property
    def conserves(self) -> Conserves:
        return "sign" if self.keep_sign else "zero_mean"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", "entropy"})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, mask, groups = batch.outcome(), batch.completion_mask, batch.group_ids
        entropy = evidence(batch, "entropy").double().clamp(min=0) + self.eps
        centred = group_normalize(outcome, groups, scale="none")
        mixed = (group_mean(centred.abs().masked_fill(outcome.isnan(), float("nan")), groups) > 0) & ~outcome.isnan()
        right = mask & (mixed & (centred > 0))[:, None]
        wrong = mask & (mixed & (centred <= 0))[:, None]
        praise = self.outcome_weight + self.entropy_weight * position_shares(entropy, right, groups)
        blame = self.outcome_weight + self.entropy_weight * position_shares(1 / entropy, wrong, groups)
        if self.keep_sign:
            unit = broadcast_rows(group_normalize(outcome, groups, ddof=self.ddof, eps=self.eps), mask)
            sides = unit * (_relative(praise, right, groups) + _relative(blame, wrong, groups))
        else:
            sides = self._normalised(praise, right, groups) + self._normalised(-blame, wrong, groups)
        advantages = sides.float()
        flipped = (advantages * centred[:, None] < 0) & mask
        return Credit(
            advantages, parts={"shape": advantages}, metrics={"flipped_tokens": masked_share(flipped, right | wrong)}
        )

    def _normalised(self, rewards: Tensor, side: Tensor, group_ids: Tensor) -> Tensor:
        inside = rewards.masked_fill(~side, float("nan"))
        return group_normalize(inside, group_ids, ddof=self.ddof, eps=self.eps)


def _relative(rewards: Tensor, side: Tensor, group_ids: Tensor) -> Tensor:
    """(B, T): rewards over their mean on the group's tokens of one side; 0 elsewhere."""
    mean = group_mean(rewards.masked_fill(~side, float("nan")), group_ids)
    return (rewards / mean[:, None]).where(side, 0.0)
