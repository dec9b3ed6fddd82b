"""Verifier-localised credit: the tokens that a verifier found at fault carry the blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .align import SpanTable
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_mean, group_normalize, group_std
from .strategy import Conserves, Phase

__all__ = ["FirstError", "WrongSteps", "first_fault", "from_first_fault"]


def first_fault(table: SpanTable, threshold: float) -> Tensor:
    """(B, S) bool: the earliest span of each row with a score under ``threshold``; no True in a row without one."""
    faulty = table.mask & (table.score < threshold)
    return faulty & (faulty.cumsum(dim=1) == 1)


def from_first_fault(table: SpanTable, threshold: float, completion_mask: Tensor, boundary_slack: int = 0) -> Tensor:
    """(B, T) bool: tokens from the start of the first fault to the end; the whole row where no fault was found.

    Args:
        table: judged spans.
        threshold: a span under this score is a fault.
        completion_mask: (B, T) bool.
        boundary_slack: the blame begins this many tokens earlier.
    """
    chosen = first_fault(table, threshold)
    start = torch.where(chosen, table.start, 0).sum(dim=1) - boundary_slack
    position = torch.arange(completion_mask.shape[1], device=completion_mask.device)
    return (position[None, :] >= start[:, None]) & completion_mask


@dataclass(frozen=True)
class FirstError:
    """A wrong answer is blamed from its first error on; its right prefix is spared (Cliff, arXiv 2609.02817).

    With the group's success rate mu and s = sqrt(mu (1 - mu)): ``A_cor = (1 - mu) / s`` on all tokens of a right
    answer; in a wrong one ``lam * A_cor`` before the first error and ``A_inc = -mu / s`` from it on; then the token
    mean of the group is subtracted, so that the group's tokens sum to zero. A wrong answer without a located error is
    blamed as a whole. Groups of equal rewards get nothing. Rewards that are not 0 or 1 count as right above the
    group's mean.

    Args:
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is an error.
        lam: share of praise for the right prefix of a wrong answer; a positive one invites length gaming.
        boundary_slack: tokens by which the blame begins earlier than the located error.
        center: subtract the token mean of the group.
    """

    steps: str = "steps"
    threshold: float = 0.5
    lam: float = 0.0
    boundary_slack: int = 0
    center: bool = True
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "where the first error is"

    @property
    def conserves(self) -> Conserves:
        return "zero_mean" if self.center else "none"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask & ~batch.reward.isnan()[:, None]
        centred = group_normalize(batch.reward, batch.group_ids, scale="none")
        right = centred > 0
        mixed = centred != 0
        mu = group_mean(right.double().masked_fill(batch.reward.isnan(), float("nan")), batch.group_ids)
        spread = (mu * (1 - mu)).sqrt().masked_fill(~mixed, 1.0)
        praise, blame = (1 - mu) / spread, -mu / spread
        tail = from_first_fault(batch.spans[self.steps], self.threshold, mask, self.boundary_slack)
        wrong_row = torch.where(tail, blame[:, None], self.lam * praise[:, None])
        raw = torch.where(right[:, None], praise[:, None].expand_as(wrong_row), wrong_row)
        raw = raw.where(mask & mixed[:, None], 0.0)
        offset = _token_mean(raw, mask & mixed[:, None], batch.group_ids) if self.center else torch.zeros_like(mu)
        centring = (-offset[:, None]).where(mask & mixed[:, None], 0.0)
        located = first_fault(batch.spans[self.steps], self.threshold).any(dim=1) & ~right & mask.any(dim=1)
        wrong = ~right & mask.any(dim=1)
        return Credit(
            (raw + centring).float(),
            parts={"first_error": raw.float(), "centring": centring.float()},
            metrics={"located_share": _share(located, wrong)},
        )


@dataclass(frozen=True)
class WrongSteps:
    """The outcome on all tokens, minus a penalty on every wrong step, also where all answers of a group fail.

    ``r[t] = outcome_weight * R_i - penalty * 1[t in a wrong step]`` (CAPO, arXiv 2508.02298), then per group
    ``A[t] = (r[t] - mean) / (std + eps)`` over its tokens. A wrong step in a right answer is penalised too.

    Args:
        steps: name of the verifier whose spans are judged.
        threshold: a span under this score is wrong.
        outcome_weight: of the reward.
        penalty: on the tokens of wrong steps.
        first_only: penalise the first wrong step alone.
        normalize: ``tokens`` as above; ``outcome`` normalises the outcome by its group as GRPO does and leaves the
            penalty as a bare number, so that clean tokens are not praised for the faults of others.
        ddof, eps: of the normalisation.
    """

    steps: str = "steps"
    threshold: float = 0.5
    outcome_weight: float = 2.0
    penalty: float = 1.0
    first_only: bool = False
    normalize: Literal["tokens", "outcome"] = "tokens"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "which steps are wrong, in every answer"

    def __post_init__(self) -> None:
        if self.normalize not in ("tokens", "outcome"):
            raise ValueError(f"normalize must be tokens or outcome, not {self.normalize!r}")

    @property
    def conserves(self) -> Conserves:
        return "zero_mean" if self.normalize == "tokens" else "none"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table = batch.spans[self.steps]
        mask = batch.completion_mask & ~batch.reward.isnan()[:, None]
        faulty = first_fault(table, self.threshold) if self.first_only else table.mask & (table.score < self.threshold)
        blamed = table.token_mask(faulty, mask.shape[1]) & mask
        penalty = -self.penalty * blamed.double()
        if self.normalize == "tokens":
            outcome = (self.outcome_weight * batch.reward.nan_to_num())[:, None].where(mask, 0.0)
            outcome, penalty = self._over_tokens(outcome, penalty, mask, batch.group_ids)
        else:
            unit = group_normalize(batch.reward, batch.group_ids, ddof=self.ddof, eps=self.eps)
            outcome = broadcast_rows(self.outcome_weight * unit, mask).double()
        parts = {"outcome": outcome.float(), "penalty": penalty.float()}
        return Credit(
            parts["outcome"] + parts["penalty"],
            parts=parts,
            metrics={"blamed_tokens": _share(blamed.flatten(), mask.flatten())},
        )

    def _over_tokens(self, outcome: Tensor, penalty: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts centred and divided by the standard deviation of their sum over the group's tokens."""
        groups = group_ids[:, None].expand_as(mask)[mask]
        std = torch.zeros_like(outcome)
        std[mask] = group_std((outcome + penalty)[mask], groups, ddof=self.ddof)
        alive = std > 0

        def scaled(part: Tensor) -> Tensor:
            centred = torch.zeros_like(part)
            centred[mask] = part[mask] - group_mean(part[mask], groups)
            return (centred / (std + self.eps).masked_fill(~alive, 1.0)).where(alive, 0.0)

        return scaled(outcome), scaled(penalty)


def _token_mean(values: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) float64 mean over all masked tokens of the row's group; 0 for a group without tokens."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    total = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, values.double().sum(dim=1))
    count = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, mask.double().sum(dim=1))
    return (total / count.clamp(min=1))[index]


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum()) / max(int(whole.sum()), 1)
