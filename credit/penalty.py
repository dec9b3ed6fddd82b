"""A penalty on the faulty spans alone, scaled but never centred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .batch import Credit, CreditBatch
from .ops import Scale, dead_group_share, group_std
from .step_ops import ScoreKind, check_score_kind
from .strategy import Conserves, Phase, check_choice

__all__ = ["SpanPenalty"]


@dataclass(frozen=True)
class SpanPenalty:
    """What a verifier found at fault costs the tokens of its span, and nothing else gets anything.

    ``A[t] = -p_t / (std_g(v) + eps)``, where ``p_t`` is the severity of the faulty spans over token t (added up where
    they overlap) and ``v_i`` the largest p of answer i. No mean is subtracted: against a sparse penalty, a mean would
    praise every clean token for the faults of others. An answer that failed without a located fault carries its
    severity on all tokens. In a group whose answers are all equally bad nothing is learned, except with ``scale=none``.

    Args:
        source: name of the verifier.
        score_kind: ``correctness``: a span or answer under ``threshold`` is faulty, its severity is 1 less its score;
            ``penalty``: one under 0 is, its severity is its score without the sign. A ``value`` is refused.
        threshold: of correctness.
        scale: divide by the standard deviation of the answers of the ``group`` or of the ``batch``, or ``none``.
        max_abs: the penalty is cut to this; a fault that is rare in its group would otherwise weigh very much.
        ddof, eps: of the standard deviation.
    """

    source: str = "format"
    score_kind: ScoreKind = "correctness"
    threshold: float = 0.5
    scale: Scale = "group"
    max_abs: float = 5.0
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "where the format was broken"

    def __post_init__(self) -> None:
        check_score_kind(
            self.score_kind,
            {"value": "a low value says that the state is poor, not that the span is at fault; use a located verifier"},
        )
        check_choice("scale", self.scale, ("group", "batch", "none"))
        check_choice("ddof", self.ddof, (0, 1))
        if not self.max_abs > 0:
            raise InputError(f"max_abs must be over 0, not {self.max_abs}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"score:{self.source}", f"spans:{self.source}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        score, mask = batch.outcome(self.source), batch.completion_mask
        located = _per_token(batch.judged(self.source), self._severity(batch.judged(self.source).score), mask)
        whole = self._severity(score).nan_to_num(nan=0.0)
        penalty = torch.where(located.gt(0).any(dim=1, keepdim=True), located, whole[:, None]).where(mask, 0.0)
        judged = mask.any(dim=1) & (~score.isnan() | batch.judged(self.source).mask.any(dim=1))
        worst = penalty.amax(dim=1) if mask.shape[1] else penalty.sum(dim=1)
        worst = worst.masked_fill(~judged, torch.nan)
        advantages = -(penalty * self._unit(worst, batch.group_ids)[:, None]).clamp(max=self.max_abs).float()
        metrics = {
            "dead_groups": dead_group_share(worst, batch.group_ids),
            "blamed_tokens": float((penalty > 0).sum()) / max(int(mask.sum()), 1),
        }
        return Credit(advantages, parts={self.source: advantages}, metrics=metrics)

    def _severity(self, score: Tensor) -> Tensor:
        """How bad a score is, 0 where it is none; float64."""
        score = score.double()
        if self.score_kind == "penalty":
            return (-score).clamp(min=0)
        return (1 - score).where(score < self.threshold, 0.0)

    def _unit(self, worst: Tensor, group_ids: Tensor) -> Tensor:
        """(B,): what a severity is multiplied by; 0 where all answers are equally bad."""
        if self.scale == "none":
            return torch.ones_like(worst)
        std = group_std(worst, group_ids if self.scale == "group" else torch.zeros_like(group_ids), ddof=self.ddof)
        return (1 / (std + self.eps)).where(std > 0, 0.0)


def _per_token(table: SpanTable, severity: Tensor, completion_mask: Tensor) -> Tensor:
    """(B, T) float64: the sum of the severities (B, S) of the spans over each token."""
    width = completion_mask.shape[1]
    change = severity.where(table.mask, 0.0)
    edges = torch.zeros(len(change), width + 1, dtype=change.dtype, device=change.device)
    edges.scatter_add_(1, table.start.clamp(max=width), change)
    edges.scatter_add_(1, table.stop.clamp(max=width), -change)
    inside = table.token_mask(change > 0, width) & completion_mask  # exactly 0 elsewhere, whatever the sum's rounding
    return edges[:, :width].cumsum(dim=1).where(inside, 0.0)
