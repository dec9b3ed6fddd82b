"""Progress under a prover: what each step changes in the chance that another policy succeeds (PAV)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import Scale, broadcast_rows, group_mean, group_normalize, spread_steps
from .step_ops import DIFFERENCED, ScoreKind, best_of, check_score_kind, mean_steps, tokens_per_step, value_gains
from .strategy import Conserves, Phase, check_choice

__all__ = ["ProcessAdvantage"]


@dataclass(frozen=True)
class ProcessAdvantage:
    """The outcome on all tokens, plus each step's progress under a prover (PAV, arXiv 2410.08146).

    ``A[t] = outcome + alpha * (Q_{j+1} - Q_j)`` for the step j that holds t, where Q is the prover's chance of success:
    ``Q = 1 - (1 - V)^best_of``, the best of several tries from values V of the base policy. A good prover is neither
    the policy itself (its progress repeats the outcome) nor a perfect one (it succeeds from anywhere). ``V_0`` is the
    group's mean reward, and the last value is the reward. The objective changes: progress is paid on top.

    A step without a trained token of its own adds its progress to the step before it; an answer without steps counts as
    one step; an answer without a reward gets nothing.

    Args:
        steps: name of the verifier whose span scores are values in [0, 1]: the chance of success after each step.
        source: ``reward``, or the name of a verifier whose score in [0, 1] is the outcome.
        alpha: of the progress; 3 to 5 in the paper.
        best_of: tries of the prover; 1 takes the values as they are, for a verifier that values under its own prover.
        score_kind: ``value``; anything else is refused, since its differences would say nothing.
        scale: of the outcome against its group: see :func:`apportion.credit.ops.group_normalize`.
        ddof, eps: of that scale.
    """

    steps: str = "steps"
    source: str = "reward"
    alpha: float = 5.0
    best_of: int = 4
    score_kind: ScoreKind = "value"
    scale: Scale = "none"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a value after every step"

    def __post_init__(self) -> None:
        check_score_kind(self.score_kind, {"correctness": DIFFERENCED, "penalty": DIFFERENCED})
        check_choice("scale", self.scale, ("group", "batch", "none"))
        check_choice("ddof", self.ddof, (0, 1))
        if self.best_of < 1:
            raise InputError(f"best_of must be at least 1 try, not {self.best_of}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward" if self.source == "reward" else f"score:{self.source}", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, outcome, mask = batch.judged(self.steps), batch.outcome(self.source), batch.completion_mask
        if self.best_of > 1:
            _refuse_other_than_chances(outcome[:, None], self.source, "name a verifier of such scores in source")
            _refuse_other_than_chances(table.score.where(table.mask, 0.0), self.steps, "take such a verifier")
        step_ids = table.step_ids(mask)
        trained = (tokens_per_step(step_ids, table.mask.shape[1]) > 0) & ~outcome.isnan()[:, None]
        end, start = best_of(outcome, self.best_of), best_of(group_mean(outcome, batch.group_ids), self.best_of)
        prover = replace(table, score=best_of(table.score.double(), self.best_of))
        gains = value_gains(prover, trained, end, start)
        whole = (end - start).where(~outcome.isnan() & ~trained.any(dim=1), 0.0)
        unit = group_normalize(outcome, batch.group_ids, ddof=self.ddof, eps=self.eps, scale=self.scale)
        by_outcome = broadcast_rows(unit, mask)
        progress = self.alpha * (spread_steps(gains, step_ids) + broadcast_rows(whole, mask))
        parts = {"outcome": by_outcome, "progress": progress}
        return Credit(by_outcome + progress, parts=parts, metrics={"steps": mean_steps(trained)})


def _refuse_other_than_chances(values: Tensor, name: str, remedy: str) -> None:
    """Refuse (B, K) values outside [0, 1], NaN excepted: a chance is what the best of several tries is made of."""
    outside = ((values < -1e-6) | (values > 1 + 1e-6)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise InputError(
            f"best_of over 1 needs chances in [0, 1], but {name} gave {float(values[row, column]):g} in row {row}; "
            f"{remedy}, or set best_of=1"
        )
