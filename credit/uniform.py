"""Sequence-level credit: every token of an answer gets the answer's advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .batch import Credit, CreditBatch
from .ops import Scale, broadcast_rows, dead_group_share, group_normalize
from .strategy import Conserves, Phase, check_choice

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform:
    """One advantage for the whole answer, from its reward against its group (GRPO, arXiv 2402.03300, 4.1.2).

    ``A[i, t] = (r_i - mean_g) / (std_g + eps)``

    Args:
        source: ``reward`` (the weighted sum of scores) or the name of one verifier, whose score is used alone.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to the standard deviation.
        scale: divide by the standard deviation of the ``group``, of the ``batch`` (Lite-PPO, arXiv 2508.08221), or by
            ``none`` (Dr.GRPO, arXiv 2503.20783).
    """

    source: str = "reward"
    ddof: int = 0
    eps: float = 1e-6
    scale: Scale = "group"
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "mass"
    extra_information: ClassVar[str] = "nothing: the answer's reward alone"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("group", "batch", "none"))
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward" if self.source == "reward" else f"score:{self.source}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome = batch.outcome(self.source)
        unit = group_normalize(outcome, batch.group_ids, ddof=self.ddof, eps=self.eps, scale=self.scale)
        advantages = broadcast_rows(unit, batch.completion_mask)
        dead = dead_group_share(outcome, batch.group_ids)
        return Credit(advantages, parts={"outcome": advantages}, metrics={"dead_groups": dead})
