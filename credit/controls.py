"""Controls: what a strategy must beat, and what none can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .batch import Credit, CreditBatch
from .ops import group_normalize
from .strategy import Conserves, CreditStrategy, Phase, assign_credit

__all__ = ["Oracle", "Shuffled"]


@dataclass(frozen=True)
class Shuffled:
    """Another strategy's advantages in random order within each answer: the same amounts in the wrong places.

    Each row keeps its sum, mean and spread; only the *location* is destroyed. A strategy that does not beat its own
    shuffle carries no information about location.

    Args:
        inner: the strategy to shuffle.
        salt: changes the order without changing the run's seed.
    """

    inner: CreditStrategy
    salt: int = 0
    conserves: ClassVar[Conserves] = "none"

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def extra_information(self) -> str:
        told = getattr(self.inner, "extra_information", "")
        return f"{told}, then moved to random places" if told else ""

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = assign_credit(self.inner, batch)
        order = _random_order(batch.completion_mask, batch.seed + self.salt)
        parts = {name: _permute(part, order) for name, part in credit.parts.items()}
        weight = None if credit.loss_weight is None else _permute(credit.loss_weight, order)
        return Credit(_permute(credit.advantages, order), weight, parts, credit.metrics)


@dataclass(frozen=True)
class Oracle:
    """Credit from the task's own truth: the very tokens that are wrong, in every answer; a ceiling, not a method.

    Over the tokens that the truth judged, ``A[t] = (s_t - mean_g) / (std_g + eps)``; tokens that it did not judge
    (copies, tags) get nothing.

    Args:
        truth: name of the verifier that knows the truth.
        eps: added to the standard deviation.
    """

    truth: str = "truth"
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "zero_mean"
    extra_information: ClassVar[str] = "the task's own truth of every token: a ceiling, not a method"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"spans:{self.truth}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, mask = batch.spans[self.truth], batch.completion_mask
        wrong = table.token_mask(table.mask & (table.score < 0.5), mask.shape[1]) & mask
        judged = table.token_mask(table.mask, mask.shape[1]) & mask
        groups = batch.group_ids[:, None].expand_as(mask)[judged]
        advantages = torch.zeros(mask.shape)
        right = (~wrong[judged]).double()
        advantages[judged] = group_normalize(right, groups, eps=self.eps).float()
        return Credit(advantages, parts={"truth": advantages})


def _random_order(completion_mask: Tensor, seed: int) -> Tensor:
    """(B, T) long: for each row a random permutation of its masked positions; other positions stay."""
    rows, width = completion_mask.shape
    generator = torch.Generator().manual_seed(seed % 2**63)
    keys = torch.rand(rows, width, generator=generator).masked_fill(~completion_mask, 2.0)
    shuffled = keys.argsort(dim=1)  # the masked positions come first, in random order
    in_order = torch.where(completion_mask, 0, 1).argsort(dim=1, stable=True)
    return torch.empty_like(shuffled).scatter_(1, in_order, shuffled)


def _permute(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(1, order)
