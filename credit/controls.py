"""Controls: what a strategy must beat, and what none can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .batch import Credit, CreditBatch
from .ops import group_normalize_steps
from .redistribution import token_scores
from .strategy import Conserves, CreditStrategy, Phase, assign_credit

__all__ = ["Inverted", "Oracle", "Shuffled", "TrueAdvantage"]


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
class Inverted:
    """Another strategy's advantages with the sign turned: praise where it blames.

    A strategy whose inverse learns as well as itself is not what makes the policy learn.

    Args:
        inner: the strategy to invert.
    """

    inner: CreditStrategy

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "zero_mean" if self.inner.conserves == "zero_mean" else "none"

    @property
    def extra_information(self) -> str:
        told = getattr(self.inner, "extra_information", "")
        return f"{told}, then with the sign turned" if told else ""

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = assign_credit(self.inner, batch)
        parts = {name: 0.0 - part for name, part in credit.parts.items()}
        return Credit(0.0 - credit.advantages, credit.loss_weight, parts, credit.metrics)


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
        table, width = batch.judged(self.truth), batch.completion_mask.shape[1]
        wrong = table.token_mask(table.mask & (table.score < 0.5), width)
        judged = table.token_mask(table.mask, width) & batch.completion_mask
        advantages = group_normalize_steps((~wrong).float(), judged, batch.group_ids, eps=self.eps)
        return Credit(advantages, parts={"truth": advantages})


@dataclass(frozen=True)
class TrueAdvantage:
    """The true advantages themselves, ``A[t] = V(after its unit) - V(before it)``, where a task lets one compute them.

    Nothing is centred or scaled: in a group of equal rewards, too, credit stays where a step was good or bad. Where the
    units make up the whole answer their advantages sum to ``R - V_0``, but with the true value V_0 of the prompt, not
    the mean of the group's rewards, so that none of the claims on what is conserved holds.

    Args:
        truth: name of the stream of true advantages, one number for each token.
    """

    truth: str = "truth"
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "the true advantages themselves: a ceiling, not a method"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"token_scores:{self.truth}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        advantages = token_scores(self.truth, batch).float()
        return Credit(advantages, parts={"truth": advantages})


def _random_order(completion_mask: Tensor, seed: int) -> Tensor:
    """(B, T) long: for each row a random permutation of its masked positions; other positions stay."""
    rows, width = completion_mask.shape
    generator = torch.Generator().manual_seed(seed % 2**63)
    keys = torch.rand(rows, width, generator=generator).to(completion_mask.device).masked_fill(~completion_mask, 2.0)
    shuffled = keys.argsort(dim=1, stable=True)  # the masked positions come first, in random order
    in_order = (~completion_mask).to(torch.int8).argsort(dim=1, stable=True)
    return torch.empty_like(shuffled).scatter_(1, in_order, shuffled)


def _permute(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(1, order)
