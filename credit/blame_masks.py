"""Which tokens keep the credit: those of wrong steps, those from the first error on, those far from a boundary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .localized import FirstError, first_fault, from_first_fault
from .ops import group_normalize
from .strategy import Conserves, CreditStrategy, Phase, assign_credit, check_choice
from .uniform import Uniform
from .wrapping import also_told, keeps_sign, masked_share, reweighted

__all__ = ["BoundarySlack", "SparedPrefix", "WrongStepsOnly", "near"]


@dataclass(frozen=True)
class WrongStepsOnly:
    """The tokens of wrong steps are blamed, in every answer, and nothing else gets any credit.

    ``A[t] = -penalty * 1[t in a wrong step]``. The amount is bare: subtracting a mean from a sparse penalty would
    praise every clean token. It reads no reward and never praises, so alone it can only teach to write less of what is
    found wrong; it shows what blame is worth, and serves as a term beside the outcome (see ``credit=format/composed``).

    Args:
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is wrong.
        penalty: on each token.
    """

    steps: str = "steps"
    threshold: float = 0.5
    penalty: float = 1.0
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "which steps are wrong, in every answer"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, mask = batch.judged(self.steps), batch.completion_mask
        blamed = table.token_mask(table.score < self.threshold, mask.shape[1]) & mask
        advantages = torch.where(blamed, -self.penalty, 0.0).float()
        return Credit(
            advantages, parts={"wrong_steps": advantages}, metrics={"blamed_tokens": masked_share(blamed, mask)}
        )


@dataclass(frozen=True)
class SparedPrefix:
    """Another strategy's advantages, except that a wrong answer's tokens before its first error get none.

    Wrong is an answer whose reward is under its group's mean. One without a located error keeps all of its blame.

    Args:
        inner: hands out the advantages; the outcome's by default.
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is an error.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    steps: str = "steps"
    threshold: float = 0.5

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"reward", f"spans:{self.steps}"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "where the first error is")

    def __call__(self, batch: CreditBatch) -> Credit:
        wrong = group_normalize(batch.outcome(), batch.group_ids, scale="none") < 0
        faulty = from_first_fault(batch.judged(self.steps), self.threshold, batch.completion_mask)
        spared = wrong[:, None] & ~faulty & batch.completion_mask
        of_wrong = batch.completion_mask & wrong[:, None]
        return reweighted(assign_credit(self.inner, batch), ~spared, {"spared_tokens": masked_share(spared, of_wrong)})


@dataclass(frozen=True)
class BoundarySlack:
    """Another localised strategy on the tokens that lie clear of every boundary between right and wrong.

    A verifier that is off by some tokens mislabels those around a boundary. They leave the batch on both sides: the
    inner strategy does not see them, neither in a statistic nor as a token to credit. A row that would lose all its
    tokens keeps them.

    Args:
        inner: the strategy, for example Cliff.
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is wrong.
        tokens: how many tokens are dropped on each side of a boundary.
        around: ``faults`` are all the boundaries between tokens in a wrong span and tokens outside; ``first_error`` is
            the start of the first wrong span alone.
    """

    inner: CreditStrategy = field(default_factory=FirstError)
    steps: str = "steps"
    threshold: float = 0.5
    tokens: int = 2
    around: Literal["faults", "first_error"] = "faults"

    def __post_init__(self) -> None:
        check_choice("around", self.around, ("faults", "first_error"))
        if self.tokens < 0:
            raise InputError(f"tokens must be 0 or more, not {self.tokens}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {f"spans:{self.steps}"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        # The others count every token or step of a row, also those that are dropped.
        return "sign" if keeps_sign(self.inner) else "zero_mean" if self.inner.conserves == "zero_mean" else "none"

    @property
    def extra_information(self) -> str:
        return getattr(self.inner, "extra_information", "")

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        clear = mask & ~near(self._boundaries(batch), self.tokens)
        kept = clear | (mask & ~clear.any(dim=1, keepdim=True))
        credit = assign_credit(self.inner, replace(batch, completion_mask=kept))
        return replace(credit, metrics={**credit.metrics, "slack_tokens": masked_share(~kept, mask)})

    def _boundaries(self, batch: CreditBatch) -> Tensor:
        """(B, T) bool: tokens before which right turns into wrong, or wrong into right."""
        table, width = batch.judged(self.steps), batch.completion_mask.shape[1]
        faulty = table.token_mask(table.score < self.threshold, width)
        if self.around == "first_error":
            chosen = first_fault(table, self.threshold)
            faulty = chosen.any(dim=1, keepdim=True) & from_first_fault(
                table, self.threshold, torch.ones_like(batch.completion_mask)
            )
        change = torch.cat([torch.zeros_like(faulty[:, :1]), faulty[:, 1:] != faulty[:, :-1]], dim=1)
        return change & (batch.completion_mask.flip(1).cumsum(dim=1).flip(1) > 0)  # the answer's end is no boundary


def near(boundaries: Tensor, tokens: int) -> Tensor:
    """(B, T) bool: the last ``tokens`` tokens before each boundary and as many from it on.

    Args:
        boundaries: (B, T) bool, True at the first token behind a boundary.
        tokens: on each side.

    >>> near(torch.tensor([[False, False, False, True, False, False]]), 1).tolist()
    [[False, False, True, True, False, False]]
    """
    width = boundaries.shape[1]
    before = torch.nn.functional.pad(boundaries.long().cumsum(dim=1), (1, 0))  # boundaries up to each position
    position = torch.arange(width, device=boundaries.device)
    low, high = (position + 1 - tokens).clamp(min=0), (position + tokens + 1).clamp(max=width)
    return before[:, high] > before[:, low]
