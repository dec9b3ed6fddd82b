"""Credit from the worst step: an answer is as good as its weakest step (PURE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, leave_one_out, return_to_go, spread_steps
from .step_ops import (
    SUMMED,
    ScoreKind,
    check_score_kind,
    mean_of_others,
    mean_steps,
    min_from_here,
    soft_min_weights,
    tokens_per_step,
)
from .strategy import Conserves, Phase, check_choice

__all__ = ["MinForm"]


@dataclass(frozen=True)
class MinForm:
    """The lowest step score decides: no sum of many good steps outweighs a bad one (PURE, arXiv 2504.15275).

    With the scores ``s_j`` in [-1, 1]:

    - ``form="soft"``: ``r_j = w_j s_j``, ``w = softmax(-s / temperature)``, and ``A[t] = sum of r_k - b_k`` over the
      steps k that end at or after t. Blame covers the worst step *and all before it*, and nothing after it.
    - ``form="strict"``: ``A[t] = min_{k >= j} s_k - b`` for the step j that holds t.

    The baseline comes from the other answers of the group, those without steps left out, so that padding cannot enter:

    - ``token``: soft, ``b_k = n_k * (sum of their r) / (sum of their tokens)`` for a step of n_k tokens; strict, the
      mean over their tokens of the minimum from there on;
    - ``step``: soft, the mean over them of ``(sum of r) / (number of steps)``; strict, the mean over them of the mean
      over their steps. It favours answers of few steps, so that steps become long.
    - ``none``.

    An answer whose group has no other answer with steps gets nothing from its steps, except with ``baseline="none"``.
    The reward enters beside that, as the reward against the mean of the other rewards (leave-one-out), on all tokens.
    Step scores alone were gamed within 200 updates in the paper.

    Args:
        steps: name of the verifier whose spans are the steps.
        form: ``soft`` or ``strict``.
        temperature: of the soft minimum.
        baseline: ``token``, ``step`` or ``none``.
        score_kind: ``correctness`` or ``penalty`` (at most 0, taken as it is). A ``value`` is refused.
        signed: correctness comes in [-1, 1] already; else it is a p in [0, 1] and taken as ``2 p - 1``.
        outcome_weight: of the reward; 0 leaves it out.
        spare_separators: tokens between two steps get nothing, as in the paper, where they carry the step's score.
    """

    steps: str = "steps"
    form: Literal["soft", "strict"] = "soft"
    temperature: float = 0.1
    baseline: Literal["token", "step", "none"] = "token"
    score_kind: ScoreKind = "correctness"
    signed: bool = False
    outcome_weight: float = 1.0
    spare_separators: bool = True
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a score for every step"

    def __post_init__(self) -> None:
        check_choice("form", self.form, ("soft", "strict"))
        check_choice("baseline", self.baseline, ("token", "step", "none"))
        check_score_kind(self.score_kind, {"value": SUMMED})
        if not self.temperature > 0:
            raise InputError(f"temperature must be over 0, not {self.temperature}; for the minimum use form=strict")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({f"spans:{self.steps}", *(["reward"] if self.outcome_weight else [])})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, mask = batch.judged(self.steps), batch.completion_mask
        step_ids, step_mask = table.step_ids(mask), table.mask & mask.any(dim=1, keepdim=True)
        scores = self._scores(table).where(step_mask, 0.0)
        tokens = tokens_per_step(step_ids, scores.shape[1])
        make = self._soft if self.form == "soft" else self._strict
        trained = mask & ~_between_steps(table, mask) if self.spare_separators else mask
        process = spread_steps(make(scores, step_mask, tokens, batch.group_ids), step_ids).where(trained, 0.0)
        parts = {"process": process}
        if self.outcome_weight:
            outcome = leave_one_out(batch.outcome(), batch.group_ids)
            parts["outcome"] = broadcast_rows(self.outcome_weight * outcome, trained)
        metrics = {"steps": mean_steps(step_mask), "worst_step_last": _worst_is_last(scores, step_mask)}
        return Credit(torch.stack([*parts.values()]).sum(dim=0), parts=parts, metrics=metrics)

    def _scores(self, table: SpanTable) -> Tensor:
        scores = table.score.double()
        return scores if self.signed or self.score_kind == "penalty" else 2 * scores - 1

    def _soft(self, scores: Tensor, step_mask: Tensor, tokens: Tensor, group_ids: Tensor) -> Tensor:
        """(B, S) float64: what each step has to answer for, the soft minimum's reward to go less its baseline."""
        reward = soft_min_weights(scores, step_mask, self.temperature) * scores
        if self.baseline == "none":
            return return_to_go(reward, step_mask)
        has_steps, total = step_mask.any(dim=1), reward.sum(dim=1)
        if self.baseline == "token":
            length = tokens.sum(dim=1)
            others = mean_of_others(total / length.clamp(min=1), length, group_ids)
            charge = tokens * others[:, None]
        else:
            others = mean_of_others(total / step_mask.sum(dim=1).clamp(min=1), has_steps, group_ids)
            charge = others[:, None]
        return return_to_go(reward - charge, step_mask & ~others.isnan()[:, None])

    def _strict(self, scores: Tensor, step_mask: Tensor, tokens: Tensor, group_ids: Tensor) -> Tensor:
        """(B, S) float64: the minimum from each step on, less its baseline."""
        lowest = min_from_here(scores, step_mask)
        if self.baseline == "none":
            return lowest
        if self.baseline == "token":
            others = mean_of_others(lowest, tokens, group_ids)
        else:
            mean = lowest.sum(dim=1) / step_mask.sum(dim=1).clamp(min=1)
            others = mean_of_others(mean, step_mask.any(dim=1), group_ids)
        return (lowest - others[:, None]).where(step_mask & ~others.isnan()[:, None], 0.0)


def _between_steps(table: SpanTable, completion_mask: Tensor) -> Tensor:
    """(B, T) bool: tokens after a row's first step began and before its last one ended that lie in no step."""
    width = completion_mask.shape[1]
    if not table.mask.shape[1]:
        return torch.zeros_like(completion_mask)
    first = table.start.masked_fill(~table.mask, width).amin(dim=1, keepdim=True)
    last = table.stop.masked_fill(~table.mask, 0).amax(dim=1, keepdim=True)
    position = torch.arange(width, device=completion_mask.device)
    return (position >= first) & (position < last) & ~table.token_mask(table.mask, width)


def _worst_is_last(scores: Tensor, step_mask: Tensor) -> float:
    """Share of the answers of two steps or more whose last step is the worst; a reward model for which this is near 1
    has become an outcome model. NaN without such an answer."""
    several = step_mask.sum(dim=1) > 1
    if not several.any():
        return float("nan")
    order = step_mask.cumsum(dim=1)
    last = step_mask & (order == order[:, -1:])
    kept = scores.masked_fill(~step_mask, torch.inf)
    before = kept.masked_fill(last, torch.inf).amin(dim=1)
    worst_last = kept.masked_fill(~last, torch.inf).amin(dim=1) < before
    return float((worst_last & several).sum()) / int(several.sum())
