"""Step-level credit from the scores of a step verifier or a process reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_mean, group_normalize_steps, group_std, return_to_go, spread_steps
from .step_ops import (
    DIFFERENCED,
    SUMMED,
    ScoreKind,
    check_score_kind,
    discounted_return,
    mean_steps,
    tokens_per_step,
    value_gains,
)
from .strategy import Conserves, Phase, check_choice

__all__ = ["ProcessReward", "StepDifference"]


@dataclass(frozen=True)
class ProcessReward:
    """Step scores against all steps of the group; a token gets its own step's score, or also all later ones.

    ``r~_j = (r_j - mean(R)) / (std(R) + eps)`` over the pooled step scores R of the group, then

    - ``accumulate="return"``: ``A[t] = sum of r~_j over the steps j that end at or after t`` (GRPO with process
      supervision, DeepSeekMath, arXiv 2402.03300, 4.1.3). A right step before a wrong one is charged for it.
    - ``accumulate="own"``: ``A[t] = r~_j`` of the step that holds t. No step answers for another.

    A separator or end token belongs to the step before it. An answer without steps gets nothing.

    Args:
        steps: name of the verifier whose spans are the steps.
        accumulate: ``return`` or ``own``.
        score_kind: ``correctness`` or ``penalty``. A ``value`` (the chance of success after the step) is refused, since
            levels of value must not be summed or compared as if each were earned by its step: use ``StepDifference``.
        ddof, eps: of the pooled normalisation.
    """

    steps: str = "steps"
    accumulate: Literal["return", "own"] = "return"
    score_kind: ScoreKind = "correctness"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a score for every step"

    def __post_init__(self) -> None:
        check_choice("accumulate", self.accumulate, ("return", "own"))
        check_choice("ddof", self.ddof, (0, 1))
        check_score_kind(self.score_kind, {"value": SUMMED})

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table = batch.judged(self.steps)
        step_mask = table.mask & batch.completion_mask.any(dim=1, keepdim=True)
        scores = group_normalize_steps(table.score, step_mask, batch.group_ids, ddof=self.ddof, eps=self.eps)
        if self.accumulate == "return":
            scores = return_to_go(scores, step_mask)
        advantages = spread_steps(scores, table.step_ids(batch.completion_mask))
        return Credit(advantages, parts={"process": advantages}, metrics={"steps": mean_steps(step_mask)})


@dataclass(frozen=True)
class StepDifference:
    """What each step gained: the value after it minus the value before it, the last one ending at the outcome.

    ``delta_j = V_{j+1} - V_j`` for the step j that holds t, with ``V_S := R`` and ``V_0`` the group's mean reward. The
    sum over an answer's steps is ``R - V_0`` (potential-based shaping: Ng, Harada, Russell 1999). Then
    ``A[t] = sum_{k >= j} lam^(k - j) delta_k`` (GAE, arXiv 1506.02438): ``lam=0`` is the local gain, which has little
    variance but inherits every error of the values; ``lam=1`` is ``R - V_j``, unbiased whatever the values.

    A step without a trained token of its own (a tool wrote it, or it shares its only token) adds its gain to the step
    before it. An answer without steps gets ``R - V_0`` on every token. An answer without a reward gets nothing.

    Args:
        steps: name of the verifier whose span scores are values: the chance of success after each step.
        lam: in [0, 1]; how far later gains reach back.
        score_kind: ``value``; anything else is refused, since its differences would say nothing.
        normalize: divide by the standard deviation of the group's rewards, as GRPO does; a group of equal rewards has
            no such scale and keeps its plain gains.
        eps: added to it.
    """

    steps: str = "steps"
    lam: float = 0.0
    score_kind: ScoreKind = "value"
    normalize: bool = False
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "a value after every step"

    def __post_init__(self) -> None:
        check_score_kind(self.score_kind, {"correctness": DIFFERENCED, "penalty": DIFFERENCED})
        if not 0 <= self.lam <= 1:
            raise InputError(f"lam must be in [0, 1], not {self.lam}")

    @property
    def conserves(self) -> Conserves:
        return "potential" if self.lam == 0 else "none"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, outcome = batch.judged(self.steps), batch.outcome()
        step_ids = table.step_ids(batch.completion_mask)
        start = group_mean(outcome, batch.group_ids)
        scored = ~outcome.isnan()
        trained = (tokens_per_step(step_ids, table.mask.shape[1]) > 0) & scored[:, None]
        gains = value_gains(table, trained, outcome, start)
        credit = discounted_return(gains, trained, self.lam)
        whole = (outcome - start).where(scored & ~trained.any(dim=1), 0.0)
        if self.normalize:
            std = group_std(outcome, batch.group_ids)
            scale = (1 / (std + self.eps)).where(std > 0, 1.0)
            credit, whole = credit * scale[:, None], whole * scale
        by_step = spread_steps(credit, step_ids)
        by_row = broadcast_rows(whole, batch.completion_mask)
        return Credit(
            by_step + by_row,
            parts={"difference": by_step, "outcome_without_steps": by_row},
            metrics={"steps": mean_steps(trained)},
        )
