"""Step-level credit from the scores of a step verifier or a process reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .batch import Credit, CreditBatch
from .ops import (
    broadcast_rows,
    group_mean,
    group_normalize,
    group_normalize_steps,
    return_to_go,
    spread_steps,
    step_differences,
)
from .strategy import Conserves, Phase

__all__ = ["ProcessReward", "StepDifference"]


@dataclass(frozen=True)
class ProcessReward:
    """Step scores against all steps of the group; a token gets its own step's score, or also all later ones.

    ``r~_j = (r_j - mean(R)) / (std(R) + eps)`` over the pooled step scores R of the group, then

    - ``accumulate="return"``: ``A[t] = sum of r~_j over the steps j that end at or after t`` (GRPO with process
      supervision, DeepSeekMath, arXiv 2402.03300, 4.1.3). A right step before a wrong one is charged for it.
    - ``accumulate="own"``: ``A[t] = r~_j`` of the step that holds t. No step answers for another.

    Args:
        steps: name of the verifier whose spans are the steps.
        accumulate: ``return`` or ``own``.
        score_kind: ``correctness`` or ``penalty``. A ``value`` (the chance of success after the step) is refused, since
            levels of value must not be summed or compared as if each were earned by its step: use ``StepDifference``.
        ddof, eps: of the pooled normalisation.
    """

    steps: str = "steps"
    accumulate: Literal["return", "own"] = "return"
    score_kind: Literal["correctness", "penalty", "value"] = "correctness"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a score for every step"

    def __post_init__(self) -> None:
        if self.accumulate not in ("return", "own"):
            raise ValueError(f"accumulate must be return or own, not {self.accumulate!r}")
        if self.score_kind == "value":
            raise ValueError(
                "score_kind=value: a value says how good the state is, not what the step earned, so it must not be "
                "summed; use credit=process/difference"
            )
        if self.score_kind not in ("correctness", "penalty"):
            raise ValueError(f"score_kind must be correctness, penalty or value, not {self.score_kind!r}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table = batch.spans[self.steps]
        step_ids = table.step_ids(batch.completion_mask)
        step_mask = table.mask & batch.completion_mask.any(dim=1, keepdim=True)
        scores = group_normalize_steps(table.score, step_mask, batch.group_ids, ddof=self.ddof, eps=self.eps)
        if self.accumulate == "return":
            scores = return_to_go(scores, step_mask)
        advantages = spread_steps(scores, step_ids)
        return Credit(advantages, parts={"process": advantages}, metrics={"steps": _mean_steps(step_mask)})


@dataclass(frozen=True)
class StepDifference:
    """What each step gained: the value after it minus the value before it, the last one ending at the outcome.

    ``A[t] = V_{j+1} - V_j`` for the step j that holds t, with ``V_S := R`` and ``V_0`` the group's mean reward. The
    sum over an answer's steps is ``R - V_0`` (potential-based shaping: Ng, Harada, Russell 1999).

    Args:
        steps: name of the verifier whose span scores are values: the chance of success after each step.
        normalize: divide by the standard deviation of the group's rewards, as GRPO does.
        eps: added to it.
    """

    steps: str = "steps"
    normalize: bool = False
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a value after every step"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table = batch.spans[self.steps]
        scored = batch.completion_mask.any(dim=1) & ~batch.reward.isnan()
        step_mask = table.mask & scored[:, None]
        outcome = batch.reward.nan_to_num().float()
        start = group_mean(batch.reward, batch.group_ids).nan_to_num().float()
        gains = step_differences(table.score, step_mask, outcome, start)
        if self.normalize:
            unit = group_normalize(batch.reward, batch.group_ids, eps=self.eps)
            centred = group_normalize(batch.reward, batch.group_ids, scale="none")
            factor = torch.where(centred != 0, unit / centred.masked_fill(centred == 0, 1.0), 1.0)
            gains = gains * factor.float()[:, None]
        advantages = spread_steps(gains, table.step_ids(batch.completion_mask))
        no_steps = scored & ~table.mask.any(dim=1)
        whole = broadcast_rows((outcome - start) * no_steps, batch.completion_mask)
        return Credit(
            advantages + whole,
            parts={"difference": advantages, "outcome_without_steps": whole},
            metrics={"steps": _mean_steps(step_mask)},
        )


def _mean_steps(step_mask: torch.Tensor) -> float:
    return float(step_mask.sum(dim=1).float().mean()) if len(step_mask) else 0.0
