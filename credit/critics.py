"""Several critics of the same answer, merged into one verdict by vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .batch import Credit, CreditBatch
from .localized import WrongSteps
from .strategy import Conserves, CreditStrategy, Phase, assign_credit, check_choice
from .wrapping import also_told

__all__ = ["CriticVotes", "Merge", "merge_votes"]

Merge = Literal["majority", "intersection", "average"]


def merge_votes(
    tables: Sequence[SpanTable], took_part: Tensor, *, merge: Merge, threshold: float, num_tokens: int
) -> SpanTable:
    """One table of judged spans from the votes of C critics; where their spans differ, each piece is voted on.

    A critic calls a token wrong where any of its spans under ``threshold`` covers it; one that does not mention a
    token does not call it wrong. Of the n critics that took part in a row, a piece is wrong (score 0, else 1) where

    - ``majority``: more than half call it wrong,
    - ``intersection``: all do;
    - ``average``: the score is 1 minus the share that does.

    Args:
        tables: C tables of B rows.
        took_part: (C, B) bool, False where a critic abstained.
        merge: see above.
        threshold: a span under this score is wrong.
        num_tokens: T.

    Returns:
        The pieces that some critic judged, K columns; no two of a row overlap.

    >>> def table(*scores):
    ...     one = torch.arange(len(scores))[None]
    ...     return SpanTable(one, one + 1, torch.tensor([scores]), torch.ones_like(one, dtype=torch.bool))
    >>> critics = [table(1.0, 0.0, 0.0), table(1.0, 0.0, 1.0), table(1.0, 0.0, 1.0)]
    >>> for how in ("majority", "average"):
    ...     print(merge_votes(critics, torch.ones(3, 1).bool(), merge=how, threshold=0.5, num_tokens=3).score)
    tensor([[1., 0., 1.]])
    tensor([[1.0000, 0.0000, 0.6667]])
    """
    edges = torch.cat([side.where(t.mask, num_tokens) for t in tables for side in (t.start, t.stop)], dim=1)
    edges = edges.sort(dim=1).values
    start, stop = edges[:, :-1], edges[:, 1:]
    votes = torch.zeros(start.shape, dtype=torch.long, device=start.device)
    judged = torch.zeros(start.shape, dtype=torch.bool, device=start.device)
    for table, present in zip(tables, took_part):
        wrong = table.token_mask(table.score < threshold, num_tokens + 1)  # one more: padding points there
        votes += (wrong.gather(1, start) & present[:, None]).long()
        judged |= table.token_mask(table.mask, num_tokens + 1).gather(1, start) & present[:, None]
    count = took_part.sum(dim=0)[:, None]
    if merge == "average":
        score = 1 - votes / count.clamp(min=1)
    else:
        score = (votes * 2 <= count if merge == "majority" else votes < count).float()
    mask = judged & (stop > start)
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, : int(mask.sum(dim=1).max()) if len(mask) else 0]
    start, stop, score, mask = (values.gather(1, order) for values in (start, stop, score, mask))
    return SpanTable(start, stop, score.where(mask, 0.0), mask)


@dataclass(frozen=True)
class CriticVotes:
    """A localised strategy on the merged verdicts of several critics (CAPO, arXiv 2508.02298).

    Every critic is a verifier that gives spans, for example a language model asked again. The merged spans stand in for
    those of the verifier that the inner strategy names. A critic that abstained on an answer has no vote there.

    With ``merge="average"`` a step's score is the share of critics that do not call it wrong: let the inner strategy
    grade by it, ``inner.graded=true inner.threshold=1``, so that each vote adds its part of the penalty.

    Args:
        inner: the strategy, CAPO's by default.
        critics: names of verifiers.
        merge: ``majority``, ``intersection`` or ``average``, see :func:`merge_votes`.
        threshold: a critic calls a span under this score wrong.
        steps: the name under which the inner strategy finds the merged spans.
    """

    inner: CreditStrategy = field(default_factory=WrongSteps)
    critics: Sequence[str] = ("critic_1", "critic_2", "critic_3")
    merge: Merge = "majority"
    threshold: float = 0.5
    steps: str = "steps"

    def __post_init__(self) -> None:
        check_choice("merge", self.merge, ("majority", "intersection", "average"))
        if not self.critics or len(set(self.critics)) < len(self.critics):
            raise InputError(f"critics must be the names of different verifiers, at least one, not {self.critics!r}")
        if f"spans:{self.steps}" not in self.inner.requires:
            name = type(self.inner).__name__
            raise InputError(f"steps={self.steps}: {name} reads no spans of that name; give the one that it reads")

    @property
    def requires(self) -> frozenset[str]:
        own = self.inner.requires - {f"spans:{self.steps}"}
        return own | {f"spans:{name}" for name in self.critics}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        # A potential counts steps, and those of the batch are not the merged ones.
        return "none" if self.inner.conserves == "potential" else self.inner.conserves

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, f"from {len(self.critics)} critics")

    def __call__(self, batch: CreditBatch) -> Credit:
        tables = [batch.judged(name) for name in self.critics]
        took_part = torch.stack([_took_part(batch, name) for name in self.critics])
        width = batch.completion_mask.shape[1]
        merged = merge_votes(tables, took_part, merge=self.merge, threshold=self.threshold, num_tokens=width)
        credit = assign_credit(self.inner, replace(batch, spans={**batch.spans, self.steps: merged}))
        metrics = {"critic_agreement": self._agreement(tables, took_part, batch.completion_mask)}
        return replace(credit, metrics={**credit.metrics, **metrics})

    def _agreement(self, tables: Sequence[SpanTable], took_part: Tensor, mask: Tensor) -> float:
        """Of the tokens that some critic calls wrong, the share that all critics of the row call wrong."""
        wrong = [t.token_mask(t.score < self.threshold, mask.shape[1]) & mask for t in tables]
        votes = torch.stack([w & present[:, None] for w, present in zip(wrong, took_part)]).sum(dim=0)
        all_of_row = (votes == took_part.sum(dim=0)[:, None]) & (votes > 0)
        return int(all_of_row.sum()) / max(int((votes > 0).sum()), 1)


def _took_part(batch: CreditBatch, critic: str) -> Tensor:
    """(B,) bool: the critic gave a score or judged a span."""
    judged = batch.judged(critic).mask.any(dim=1)
    return judged if critic not in batch.scores else judged | ~batch.scores[critic].isnan()
