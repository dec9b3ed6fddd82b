"""A sub-reward, such as format, put on the tokens that earned or lost it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_normalize
from .strategy import Conserves, Phase

__all__ = ["SubReward"]


@dataclass(frozen=True)
class SubReward:
    """One verifier's score against its group, on the spans that the verifier judged.

    ``Z_i = (s_i - mean_g) / (std_g + eps)``; where Z_i < 0 it falls on the row's spans under ``threshold`` (on all its
    spans if none is), where Z_i > 0 on its spans at or over it. A row without spans carries Z_i on all tokens, so that
    no penalty vanishes. A group of equal scores gets nothing.

    Args:
        source: name of the verifier, for example ``format``.
        project: ``spans`` as above, or ``sequence``: Z_i on every token.
        threshold: a span under this score is malformed.
        max_abs: Z_i is cut to this range; one failure in a large group would otherwise weigh very much.
        ddof, eps: of the normalisation.
    """

    source: str = "format"
    project: Literal["spans", "sequence"] = "spans"
    threshold: float = 0.5
    max_abs: float = 5.0
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a second score, for the format, and where it was lost"

    def __post_init__(self) -> None:
        if self.project not in ("spans", "sequence"):
            raise ValueError(f"project must be spans or sequence, not {self.project!r}")

    @property
    def requires(self) -> frozenset[str]:
        signal = f"score:{self.source}"
        return frozenset({signal, f"spans:{self.source}"} if self.project == "spans" else {signal})

    def __call__(self, batch: CreditBatch) -> Credit:
        z = group_normalize(batch.scores[self.source], batch.group_ids, ddof=self.ddof, eps=self.eps)
        z = z.clamp(-self.max_abs, self.max_abs)
        advantages = broadcast_rows(z, batch.completion_mask)
        if self.project == "spans":
            table, width = batch.spans[self.source], batch.completion_mask.shape[1]
            faulty = table.mask & (table.score < self.threshold)
            wanted = torch.where((z < 0)[:, None], faulty, table.mask & ~faulty)
            wanted = torch.where(wanted.any(dim=1, keepdim=True), wanted, table.mask)
            tokens = table.token_mask(wanted, width) & batch.completion_mask
            tokens = torch.where(tokens.any(dim=1, keepdim=True), tokens, batch.completion_mask)
            advantages = advantages.where(tokens, 0.0)
        dead = float((z == 0).float().mean()) if len(z) else 0.0
        return Credit(advantages, parts={self.source: advantages}, metrics={f"{self.source}_rows_without_signal": dead})
