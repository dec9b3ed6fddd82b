"""First things first: the task's credit only where the format held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit, check_choice

__all__ = ["Gate"]


@dataclass(frozen=True)
class Gate:
    """Another strategy's credit, dropped for every answer that failed a verifier (a lexicographic order of rewards).

    Beside a term for the format itself, a malformed answer then learns the format alone. What happens to its group:

    - ``baseline="leave"``: the failed answers leave the inner strategy's view, so that the others are compared with
      each other; a group with one answer left gets nothing, as any group of one;
    - ``baseline="keep"``: they stay in the group's statistics, so that the others are praised against them, and lose
      only their own credit.

    An answer on which the verifier abstained passes.

    Args:
        inner: the strategy to gate.
        source: name of the verifier that opens the gate.
        threshold: a score under this fails.
        baseline: ``leave`` or ``keep``.
    """

    inner: CreditStrategy
    source: str = "format"
    threshold: float = 0.5
    baseline: Literal["leave", "keep"] = "leave"
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ("leave", "keep"))

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {f"score:{self.source}"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def extra_information(self) -> str:
        told = getattr(self.inner, "extra_information", "")
        more = f"whether {self.source} held"
        return more if not told or told.startswith("nothing") else f"{told}; {more}"

    def __call__(self, batch: CreditBatch) -> Credit:
        score = batch.outcome(self.source)
        failed = score < self.threshold
        open_mask = batch.completion_mask & ~failed[:, None]
        seen = replace(batch, completion_mask=open_mask) if self.baseline == "leave" else batch
        credit = assign_credit(self.inner, seen)
        trained = batch.completion_mask.any(dim=1)
        return Credit(
            credit.advantages.where(open_mask, 0.0),
            loss_weight=credit.loss_weight,
            parts={name: part.where(open_mask, 0.0) for name, part in credit.parts.items()},
            metrics={**credit.metrics, "gated_rows": float(failed.sum()) / max(int(trained.sum()), 1)},
        )
