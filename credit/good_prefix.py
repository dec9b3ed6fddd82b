"""The right beginning of a wrong answer is rewarded (VPPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .localized import first_fault
from .ops import group_mean
from .strategy import Conserves, Phase
from .wrapping import masked_share

__all__ = ["GoodPrefix", "prefix_before"]


def prefix_before(first: Tensor, completion_mask: Tensor, buffer: Tensor) -> Tensor:
    """(B, T) bool: the trained tokens before a position, less the last few of them.

    Args:
        first: (B,) long, position of the first error; 0 for none to spare.
        completion_mask: (B, T) bool.
        buffer: (B,) long, how many trained tokens before ``first`` do not count.

    >>> prefix_before(torch.tensor([3]), torch.ones(1, 5, dtype=torch.bool), torch.tensor([1])).tolist()
    [[True, True, False, False, False]]
    """
    position = torch.arange(completion_mask.shape[1], device=completion_mask.device)
    before = (position < first[:, None]) & completion_mask
    place = before.cumsum(dim=1)  # 1 for the first token that counts
    return before & (place <= (before.sum(dim=1) - buffer)[:, None])


@dataclass(frozen=True)
class GoodPrefix:
    """A wrong answer is rewarded for its tokens before the first error (VPPO, arXiv 2601.18984).

    ``a[i, t] = 1`` in a right answer, ``alpha`` in the good prefix of a wrong one, else 0;
    ``A[i, t] = a[i, t] - mean over the group's answers of (mean over t of a)``, without a standard deviation. The good
    prefix ends ``buffer`` tokens before the first wrong step, since otherwise the policy learns to cut its steps small.
    A wrong answer without a located error has none. Where all answers of a group are right the credit is zero; where
    all are wrong, prefixes still count.

    The prefix of a wrong answer may lie under the mean and get a negative amount; ``relu`` lifts it to 0.

    Args:
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is wrong (the paper's, for a process reward model).
        alpha: what a token of the good prefix is worth; 0.3 to 0.7 work alike.
        right_over: an answer with a reward over this is right.
        buffer: tokens left out at the prefix's end. Best in the paper is the prompt's length, which credit does not
            see: give its usual number.
        buffer_share: the same as a share of the answer's tokens, rounded; both add up.
        relu: no token of a good prefix gets less than 0.
    """

    steps: str = "steps"
    threshold: float = 0.8
    alpha: float = 0.5
    right_over: float = 0.5
    buffer: int = 0
    buffer_share: float = 0.1
    relu: bool = False
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "where the first error is"

    def __post_init__(self) -> None:
        if self.buffer < 0:
            raise InputError(f"buffer must be 0 or more tokens, not {self.buffer}")
        if not 0 <= self.buffer_share <= 1:
            raise InputError(f"buffer_share must lie between 0 and 1, not {self.buffer_share}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, outcome = batch.judged(self.steps), batch.outcome()
        mask = batch.completion_mask & ~outcome.isnan()[:, None]
        right, length = outcome > self.right_over, mask.sum(dim=1)
        first = torch.where(first_fault(table, self.threshold), table.start, 0).sum(dim=1)
        buffer = self.buffer + (self.buffer_share * length).round().long()
        good = prefix_before(first, mask, buffer) & ~right[:, None]
        worth = torch.where(right[:, None], 1.0, self.alpha * good.double()).where(mask, 0.0)
        of_answer = (worth.sum(dim=1) / length).masked_fill(outcome.isnan(), float("nan"))
        centring = (-group_mean(of_answer, batch.group_ids)[:, None]).where(mask, 0.0)
        parts = {"prefix": worth, "centring": centring}
        if self.relu:
            parts["relu"] = (-(worth + centring)).clamp(min=0).where(good, 0.0)
        advantages = torch.stack([*parts.values()]).sum(dim=0)
        return Credit(
            advantages.float(),
            parts={name: part.float() for name, part in parts.items()},
            metrics={"good_prefix": masked_share(good, mask & ~right[:, None])},
        )
