"""Verifier-localised credit: the tokens that a verifier found at fault carry the blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .align import SpanTable
from .batch import Credit, CreditBatch
from .ops import broadcast_rows, group_mean, group_normalize, group_std
from .strategy import Conserves, Phase, check_choice

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

    def __post_init__(self) -> None:
        if self.boundary_slack < 0:
            raise InputError(f"boundary_slack must be 0 or more tokens, not {self.boundary_slack}")

    @property
    def conserves(self) -> Conserves:
        return "zero_mean" if self.center else "none"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, outcome, groups = batch.judged(self.steps), batch.outcome(), batch.group_ids
        right = group_normalize(outcome, groups, scale="none") > 0
        mu = group_mean(right.double().masked_fill(outcome.isnan(), float("nan")), groups)
        mixed = (mu > 0) & (mu < 1) & ~outcome.isnan()
        mask = batch.completion_mask & mixed[:, None]
        s = (mu * (1 - mu)).sqrt()
        praise, blame = ((1 - mu) / s)[:, None], (-mu / s)[:, None]
        at_fault = from_first_fault(table, self.threshold, mask, self.boundary_slack)
        raw = torch.where(right[:, None], praise, torch.where(at_fault, blame, self.lam * praise)).where(mask, 0.0)
        centring = torch.zeros_like(raw)
        if self.center:
            mean = group_mean(raw.masked_fill(~mask, float("nan")), groups)
            centring = (-mean[:, None]).where(mask, 0.0)
        located = first_fault(table, self.threshold).any(dim=1)
        wrong = mixed & ~right
        return Credit(
            (raw + centring).float(),
            parts={"first_error": raw.float(), "centring": centring.float()},
            metrics={"located_share": _share(located & wrong, wrong)},
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
        graded: a step's penalty is ``penalty * (1 - score)``, for scores that are shares of votes or chances of being
            right; where wrong steps overlap their penalties add up, to ``penalty`` at most.
        normalize: ``tokens`` as above; ``outcome`` normalises the outcome by its group as GRPO does and leaves the
            penalty as a bare number, so that clean tokens are not praised for the faults of others.
        ddof, eps: of the normalisation.
    """

    steps: str = "steps"
    threshold: float = 0.5
    outcome_weight: float = 2.0
    penalty: float = 1.0
    first_only: bool = False
    graded: bool = False
    normalize: Literal["tokens", "outcome"] = "tokens"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "which steps are wrong, in every answer"

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, ("tokens", "outcome"))
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def conserves(self) -> Conserves:
        return "zero_mean" if self.normalize == "tokens" else "none"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"spans:{self.steps}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        table, reward = batch.judged(self.steps), batch.outcome()
        mask = batch.completion_mask & ~reward.isnan()[:, None]
        faulty = first_fault(table, self.threshold) if self.first_only else table.mask & (table.score < self.threshold)
        blamed = table.token_mask(faulty, mask.shape[1]) & mask
        share = _fault_shares(table, faulty, mask.shape[1]) if self.graded else torch.ones_like(blamed)
        penalty = -self.penalty * share.double().where(blamed, 0.0)
        if self.normalize == "tokens":
            outcome = (self.outcome_weight * reward)[:, None].where(mask, 0.0)
            outcome, penalty = self._over_tokens(outcome, penalty, mask, batch.group_ids)
        else:
            unit = group_normalize(reward, batch.group_ids, ddof=self.ddof, eps=self.eps)
            outcome = broadcast_rows(self.outcome_weight * unit, mask)
        parts = {"outcome": outcome.float(), "penalty": penalty.float()}
        return Credit(
            (outcome + penalty).float(),
            parts=parts,
            metrics={"blamed_tokens": _share(blamed, mask)},
        )

    def _over_tokens(self, outcome: Tensor, penalty: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts centred and divided by the standard deviation of their sum over the group's tokens."""

        def inside(values: Tensor) -> Tensor:
            return values.masked_fill(~mask, float("nan"))

        std = group_std(inside(outcome + penalty), group_ids, ddof=self.ddof)
        unit = (1 / (std + self.eps)).where(std > 0, 0.0)

        def scaled(part: Tensor) -> Tensor:
            mean = group_mean(inside(part), group_ids)
            return ((part - mean[:, None]) * unit[:, None]).where(mask, 0.0)

        return scaled(outcome), scaled(penalty)


def _fault_shares(table: SpanTable, faulty: Tensor, width: int) -> Tensor:
    """(B, T) float64 in [0, 1]: the sum of ``1 - score`` over the faulty spans that hold a token."""
    change = (1 - table.score.double()).where(faulty, 0.0)
    edges = change.new_zeros(len(change), width + 1)
    edges.scatter_add_(1, table.start.clamp(max=width), change)
    edges.scatter_add_(1, table.stop.clamp(max=width), -change)
    return edges[:, :width].cumsum(dim=1).clamp(0, 1)


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum()) / max(int(whole.sum()), 1)
