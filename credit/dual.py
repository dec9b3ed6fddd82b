"""A weight that finds itself: up while a constraint is violated too often, down to nothing once it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit

__all__ = ["DualWeight"]


@dataclass
class _Multiplier:
    """The weight's present value: what changes in a run, and what a checkpoint holds."""

    weight: float


@dataclass(frozen=True)
class DualWeight:
    """Another strategy's credit times a Lagrange multiplier of "at most ``target`` of the answers fail".

    ``A = w A_inner``. After each rollout batch ``w <- max(0, w + eta * (violation rate - target))``: dual ascent. While
    the constraint holds the weight sinks to 0, so that a sub-reward that is already earned does not distort the task.
    Calling the strategy does not change w; see :mod:`apportion.credit.adaptive`.

    Args:
        inner: the strategy to weigh, for example the penalty of the same verifier.
        source: name of the verifier whose failures are counted. An abstention is none.
        threshold: a score under this is a failure.
        target: tolerated share of failures, in [0, 1].
        eta: step of the weight.
        initial: weight at the beginning.
    """

    inner: CreditStrategy
    source: str = "format"
    threshold: float = 0.5
    target: float = 0.05
    eta: float = 0.1
    initial: float = 1.0
    conserves: ClassVar[Conserves] = "none"
    _now: _Multiplier = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise InputError(f"target is a share of answers, so it must be in [0, 1], not {self.target}")
        if not self.eta > 0:
            raise InputError(f"eta must be over 0, not {self.eta}; for a fixed weight use weights of format/composed")
        if not self.initial >= 0:
            raise InputError(f"initial must be at least 0, not {self.initial}")
        object.__setattr__(self, "_now", _Multiplier(self.initial))

    @property
    def weight(self) -> float:
        """The multiplier as it is now."""
        return self._now.weight

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {f"score:{self.source}"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def extra_information(self) -> str:
        return getattr(self.inner, "extra_information", "")

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = assign_credit(self.inner, batch)
        return Credit(
            self.weight * credit.advantages,
            loss_weight=credit.loss_weight,
            parts={name: self.weight * part for name, part in credit.parts.items()},
            metrics={**credit.metrics, "weight": self.weight, "violation_rate": self._violation_rate(batch)},
        )

    def observe(self, batch: CreditBatch) -> None:
        """Dual ascent by one rollout batch; one on which the verifier abstained throughout changes nothing."""
        rate = self._violation_rate(batch)
        if rate == rate:  # not NaN
            self._now.weight = max(0.0, self.weight + self.eta * (rate - self.target))

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._now.weight = float(state["weight"])

    def _violation_rate(self, batch: CreditBatch) -> float:
        """Share of the judged answers that failed; NaN where none was judged."""
        score = batch.outcome(self.source)
        judged = score[~score.isnan()]
        return float((judged < self.threshold).double().mean())
