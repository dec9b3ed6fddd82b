"""A sub-reward, such as format, put on the tokens that earned or lost it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, dead_group_share, group_normalize
from .strategy import Conserves, Phase, check_choice

__all__ = ["SubReward"]


@dataclass(frozen=True)
class SubReward:
    """One verifier's score against its group, on the spans that the verifier judged.

    ``Z_i = (s_i - mean_g) / (std_g + eps)``; where Z_i < 0 it falls on the row's spans under ``threshold``, where
    Z_i > 0 on its spans at or over it. A row without such a span carries Z_i on all tokens: nobody located what earned
    or lost the score, and no penalty may vanish. A group of equal scores gets nothing.

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
    conserves: ClassVar[Conserves] = "sign"
    extra_information: ClassVar[str] = "a second score, for the format, and where it was lost"

    def __post_init__(self) -> None:
        check_choice("project", self.project, ("spans", "sequence"))
        check_choice("ddof", self.ddof, (0, 1))
        if not self.max_abs > 0:
            raise InputError(f"max_abs must be over 0, not {self.max_abs}")

    @property
    def requires(self) -> frozenset[str]:
        signal = f"score:{self.source}"
        return frozenset({signal, f"spans:{self.source}"} if self.project == "spans" else {signal})

    def __call__(self, batch: CreditBatch) -> Credit:
        score = batch.outcome(self.source)
        z = group_normalize(score, batch.group_ids, ddof=self.ddof, eps=self.eps).clamp(-self.max_abs, self.max_abs)
        advantages = broadcast_rows(z, batch.completion_mask)
        if self.project == "spans":
            advantages = advantages.where(self._place(batch.judged(self.source), z < 0, batch.completion_mask), 0.0)
        dead = dead_group_share(score, batch.group_ids)
        return Credit(advantages, parts={self.source: advantages}, metrics={"dead_groups": dead})

    def _place(self, table: SpanTable, blamed: Tensor, completion_mask: Tensor) -> Tensor:
        """(B, T) bool: the tokens that carry the blame of rows in ``blamed`` (B,) bool, or the praise of the others."""
        faulty = table.mask & (table.score < self.threshold)
        wrong = table.token_mask(faulty, completion_mask.shape[1])
        right = table.token_mask(table.mask & ~faulty, completion_mask.shape[1]) & ~wrong
        tokens = torch.where(blamed[:, None], wrong, right) & completion_mask
        return tokens | ~tokens.any(dim=1, keepdim=True)
