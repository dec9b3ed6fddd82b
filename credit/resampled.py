"""Credit from continuations sampled inside an answer: what each of its segments did to the chance of success."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch, PrefixValues
from .ops import group_normalize
from .states import cutpoint_states, prefix_values, segment_ids, shrink, state_gains
from .strategy import Conserves, Phase

__all__ = ["ResampledCutpoints", "ResampledSteps"]


@dataclass(frozen=True)
class ResampledSteps:
    """What each step changed in the mean reward of fresh continuations (VinePPO, arXiv 2410.01679).

    ``A[t] = V_{j+1} - V_j`` for the step j that holds t; V_j is the mean reward of K continuations sampled before step
    j, V_0 that of the prompt, and the reward R stands for the value after the last step, so that the steps of an answer
    sum to ``R - V_0``. The continuations come from the policy itself: the expected gradient is that of the reward, with
    less variance the larger K is. Steps between which no state was valued share one gain; an answer without steps, or
    without a reward, gets nothing.

    Args:
        steps: name of the verifier whose spans are the steps.
        shrinkage: k in ``(n V + k V_0) / (n + k)``, which draws values of few continuations towards the prompt's.
        whiten: centre the advantages over all tokens of the batch and divide by their standard deviation, as the
            paper's PPO does; the sum over an answer is then no longer ``R - V_0``.
    """

    steps: str = "steps"
    shrinkage: float = 0.0
    whiten: bool = False
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "rewards of continuations sampled from inside each answer"

    def __post_init__(self) -> None:
        if not self.shrinkage >= 0:
            raise InputError(f"shrinkage must be 0 or more continuations, not {self.shrinkage}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}", f"prefix_values:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        values, segments = prefix_values(self.steps, batch), segment_ids(self.steps, batch)
        gains = state_gains(shrink(values, self.shrinkage), segments, batch.outcome())
        if self.whiten:
            inside = gains.masked_fill(segments < 0, float("nan"))
            gains = group_normalize(inside, torch.zeros_like(batch.group_ids))
        advantages = gains.float().where(batch.completion_mask, 0.0)
        return Credit(advantages, parts={"gain": advantages}, metrics=_value_metrics(values))


@dataclass(frozen=True)
class ResampledCutpoints:
    """Gains of segments that are cut where the policy had a choice (SPO-chain, arXiv 2505.23564).

    A cutpoint is a token that was sampled with less than ``cut_probability``; a segment begins at the first cutpoint
    and at every ``interval``-th after it. ``A[t] = V(next begin) - V(own begin)``, with the reward R at the end: the
    segments sum to ``R - V`` of the first cutpoint. What comes before it gets nothing, and so does every token
    that was sampled with more than ``mask_probability``.

    Args:
        cut_probability: below it a token is a cutpoint.
        interval: cutpoints in a segment.
        mask_probability: above it a token gets nothing; 1 masks none.
        shrinkage: see :class:`ResampledSteps`.
    """

    cut_probability: float = 0.9
    interval: int = 5
    mask_probability: float = 0.9
    shrinkage: float = 0.0
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "rewards of continuations sampled from inside each answer"

    def __post_init__(self) -> None:
        for name in ("cut_probability", "mask_probability"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is a probability over 0, up to 1, not {getattr(self, name)}")
        if self.interval < 1:
            raise InputError(f"interval must be at least 1 cutpoint, not {self.interval}")
        if not self.shrinkage >= 0:
            raise InputError(f"shrinkage must be 0 or more continuations, not {self.shrinkage}")

    @property
    def states(self) -> str:
        """Names the states that are to be valued."""
        return cutpoint_states(self.cut_probability, self.interval)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", "old_logprobs", f"prefix_values:{self.states}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        values, segments = prefix_values(self.states, batch), segment_ids(self.states, batch)
        gains = state_gains(shrink(values, self.shrinkage), segments, batch.outcome())
        chosen = chosen_tokens(batch, self.mask_probability) & (segments > 0)
        advantages = gains.float().where(chosen, 0.0)
        kept = float(chosen.sum()) / max(int(batch.completion_mask.sum()), 1)
        metrics = {"kept_tokens": kept, **_value_metrics(values)}
        return Credit(advantages, parts={"gain": advantages}, metrics=metrics)


def chosen_tokens(batch: CreditBatch, mask_probability: float) -> Tensor:
    """(B, T) bool: trained tokens that the policy did not sample with more than ``mask_probability``."""
    if batch.old_logprobs is None:
        raise InputError("credit needs old_logprobs for its mask_probability, and the batch has none")
    return batch.completion_mask & (batch.old_logprobs.double().exp() <= mask_probability)


def _value_metrics(values: PrefixValues) -> dict[str, float]:
    """Valued states of an answer, and the mean standard error of their values."""
    known = ~values.value.isnan()
    error = (values.variance / values.count.clamp(min=1)).sqrt()[known]
    return {
        "states": float(known.sum()) / max(len(known), 1),
        "value_error": float(error.double().mean()) if len(error) else 0.0,
    }
