"""From step-level to outcome credit in the course of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .compose import Composition
from .strategy import Conserves, CreditStrategy, Phase

__all__ = ["Blend"]


@dataclass(frozen=True)
class Blend:
    """Two strategies, the second one's share fading: ``A = (1 - a) A_outcome + a A_process`` (RL-Tango, 2505.15034).

    ``a = first * (last / first)^progress``: an exponential decay over the run, so that step scores guide early and
    cannot be gamed for long.

    Args:
        outcome: the strategy that stays.
        process: the strategy that fades.
        first: its share at the run's beginning, in [0, 1].
        last: its share at the end, over 0; the same as ``first`` for a fixed blend.
    """

    outcome: CreditStrategy
    process: CreditStrategy
    first: float = 0.1
    last: float = 0.001
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        for name, share in (("first", self.first), ("last", self.last)):
            if not 0 < share <= 1:
                raise InputError(f"{name} must be over 0 and at most 1, not {share}")

    @property
    def requires(self) -> frozenset[str]:
        return self.outcome.requires | self.process.requires

    @property
    def phase(self) -> Phase:
        return self._at(0.0).phase

    @property
    def extra_information(self) -> str:
        return self._at(0.0).extra_information

    def share(self, progress: float) -> float:
        """Weight of ``process`` when that share of the run is done.

        >>> from apportion.credit.uniform import Uniform
        >>> [round(Blend(Uniform(), Uniform(), first=0.1, last=0.001).share(p), 6) for p in (0.0, 0.5, 1.0)]
        [0.1, 0.01, 0.001]
        """
        return float(self.first * (self.last / self.first) ** progress)

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = self._at(batch.progress)(batch)
        return Credit(
            credit.advantages,
            loss_weight=credit.loss_weight,
            parts=credit.parts,
            metrics={**credit.metrics, "process_share": self.share(batch.progress)},
        )

    def _at(self, progress: float) -> Composition:
        share = self.share(progress)
        terms = {"outcome": self.outcome, "process": self.process}
        return Composition(terms, weights={"outcome": 1 - share, "process": share})
