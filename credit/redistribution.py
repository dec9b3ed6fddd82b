"""An answer's reward handed to its tokens by a reward model, or by attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import group_mean, group_normalize, group_std, return_to_go
from .strategy import Conserves, Phase, check_choice

__all__ = [
    "AttentionShare",
    "RewardDifference",
    "check_share",
    "effective_share",
    "mix_weights",
    "reward_differences",
    "row_lengths",
    "token_scores",
]


def token_scores(name: str, batch: CreditBatch) -> Tensor:
    """A scorer's (B, T) scores as float64, zero outside the mask; refuses a batch that has none."""
    if name not in batch.token_scores:
        have = ", ".join(sorted(batch.token_scores)) or "none"
        raise InputError(f"credit needs token_scores of scorers.{name}; the batch has those of: {have}")
    return batch.token_scores[name].double().where(batch.completion_mask, 0.0)


def reward_differences(levels: Tensor, mask: Tensor, step_ids: Tensor | None = None) -> Tensor:
    """What each token added to a score of the text so far: ``r_t = s(y_<=t) - s(y_<t)``, telescoping to the last level.

    Args:
        levels: (B, T) score up to and including each token, less the score of the bare prompt.
        mask: (B, T) bool; a token outside it adds nothing, and what it changed goes to the next one inside.
        step_ids: (B, T) long, -1 for none; where given, levels count at the ends of steps alone, and the tokens of a
            step share what it added.

    Returns:
        (B, T), zero outside the mask.

    >>> levels, mask = torch.tensor([[0.25, 1.0, 0.5]]), torch.tensor([[True, True, True]])
    >>> reward_differences(levels, mask).tolist()
    [[0.25, 0.75, -0.5]]
    >>> reward_differences(levels, mask, torch.tensor([[0, 0, 1]])).tolist()
    [[0.5, 0.5, -0.5]]
    """
    rows, width = mask.shape
    place = torch.arange(width, device=mask.device).expand(rows, width)
    if step_ids is None:
        step_ids = place
    inside = mask & (step_ids >= 0)
    step = step_ids.where(inside, 0)
    zeros = torch.zeros(rows, max(width, int(step.max()) + 1 if step.numel() else 1), device=mask.device)
    count = zeros.scatter_add(1, step, inside.to(zeros))
    end = torch.full_like(zeros, -1, dtype=torch.long).scatter_reduce(1, step, place.where(inside, -1), "amax")
    before = torch.cat([torch.full_like(end[:, :1], -1), end.cummax(dim=1).values[:, :-1]], dim=1)

    def level(at: Tensor) -> Tensor:
        return levels.gather(1, at.clamp(min=0)).where(at >= 0, 0.0)

    if not width:
        return levels
    added = level(end.gather(1, step)) - level(before.gather(1, step))
    return (added / count.gather(1, step).clamp(min=1)).where(inside, 0.0)


@dataclass(frozen=True)
class RewardDifference:
    """The reward model's own change at each token, mixed with the outcome at the end (RED, arXiv 2411.08302).

    ``r_t = beta (s(y_<=t) - s(y_<t)) + (1 - beta) R 1[t = last]`` and ``A[t] = (G_t - mean_g(G_0)) / (std_g(G_0) +
    eps)``, where G_t is the sum of r from t on and G_0 that of the whole answer: beta of the model's score of the
    answer and (1 - beta) of the reward. The differences telescope, so that only the prompt's score, which all answers
    of a group share, and a baseline of the state enter besides. A group of equal G_0 has no scale and keeps the plain
    numbers.

    Args:
        scores: name of the scorer that gives the score of every beginning, less that of the prompt.
        beta: share of the model; the paper's value is not confirmed.
        accumulate: ``return`` as above, or ``own``: ``T_i r_t`` in the place of G_t, a token's own change alone (and
            the centred outcome on the last one), whose mean over the answer's T_i tokens is the same as that of G_0.
        steps: name of a verifier: the score counts at the ends of its steps alone; None counts it at every token.
        eps: added to the standard deviation.
    """

    scores: str = "reward_model"
    beta: float = 0.5
    accumulate: Literal["return", "own"] = "return"
    steps: str | None = None
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "a reward model's score of every beginning of an answer"

    def __post_init__(self) -> None:
        check_share("beta", self.beta)
        check_choice("accumulate", self.accumulate, ("return", "own"))

    @property
    def requires(self) -> frozenset[str]:
        spans = [] if self.steps is None else [f"spans:{self.steps}"]
        return frozenset({"reward", f"token_scores:{self.scores}", *spans})

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, groups = batch.outcome(), batch.group_ids
        levels = token_scores(self.scores, batch)
        mask = batch.completion_mask & ~outcome.isnan()[:, None]
        step_ids = None if self.steps is None else batch.judged(self.steps).step_ids(mask)
        rewards = self.beta * reward_differences(levels, mask, step_ids)
        model = rewards.sum(dim=1).masked_fill(outcome.isnan(), float("nan"))
        std = group_std(model + (1 - self.beta) * outcome, groups)
        unit = (1 / (std + self.eps)).where(std > 0, 1.0)[:, None]
        centred = ((1 - self.beta) * (outcome - group_mean(outcome, groups)))[:, None]
        if self.accumulate == "return":
            rewards, place = return_to_go(rewards, mask), mask.double()
        else:
            rewards, place = row_lengths(mask) * rewards, row_lengths(mask) * _last(mask)
        by_model = (unit * (rewards - group_mean(model, groups)[:, None])).where(mask, 0.0).float()
        by_outcome = (unit * centred * place).where(mask, 0.0).float()
        return Credit(by_model + by_outcome, parts={"model": by_model, "outcome": by_outcome})


@dataclass(frozen=True)
class AttentionShare:
    """The outcome handed out by attention of the answer's last token (ABC, arXiv 2402.00782).

    The share of token t is ``w_t = beta a_t + (1 - beta) 1[t = last]``, where a is the attention on the answer's
    tokens, scaled to sum to 1. With ``Z_i = (r_i - mean_g) / (std_g + eps)``, ``A[t] = Z_i sum_{k >= t} w_k``: the
    return of a reward that is spread so.

    Args:
        scores: name of the scorer that gives the attention, 0 or more.
        beta: share of attention; the paper's value is not confirmed.
        accumulate: ``return`` as above, or ``own``: ``A[t] = T_i w_t Z_i``, a token's own share alone, whose mean over
            the answer's T_i tokens is Z_i.
        ddof, eps: of the normalisation.
    """

    scores: str = "attention"
    beta: float = 0.5
    accumulate: Literal["return", "own"] = "return"
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    extra_information: ClassVar[str] = "the policy's own attention"

    def __post_init__(self) -> None:
        check_share("beta", self.beta)
        check_choice("accumulate", self.accumulate, ("return", "own"))
        check_choice("ddof", self.ddof, (0, 1))

    @property
    def conserves(self) -> Conserves:
        return "mass" if self.accumulate == "own" else "sign"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", f"token_scores:{self.scores}"})

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        weights = mix_weights(token_scores(self.scores, batch), mask, self.beta)
        share = return_to_go(weights, mask) if self.accumulate == "return" else row_lengths(mask) * weights
        unit = group_normalize(batch.outcome(), batch.group_ids, ddof=self.ddof, eps=self.eps)
        advantages = (unit[:, None] * share).float()
        return Credit(
            advantages, parts={"share": advantages}, metrics={"effective_tokens": effective_share(weights, mask)}
        )


def mix_weights(attention: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Shares that sum to 1 in every row: ``beta`` of the attention, the rest on the last token.

    A row without attention has equal shares in its place.

    Args:
        attention: (B, T), 0 or more.
        mask: (B, T) bool.

    >>> mix_weights(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[True, True, True]]), 0.5).tolist()
    [[0.375, 0.125, 0.5]]
    """
    attention = attention.clamp(min=0).where(mask, 0.0)
    total = attention.sum(dim=1, keepdim=True)
    equal = mask.to(attention) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    spread = torch.where(total > 0, attention / total.masked_fill(total == 0, 1.0), equal)
    return beta * spread + (1 - beta) * _last(mask).to(attention)


def row_lengths(mask: Tensor) -> Tensor:
    """Tokens of each row, (B, 1) float64."""
    return mask.sum(dim=1, keepdim=True).double()


def effective_share(weights: Tensor, mask: Tensor) -> float:
    """Mean over the rows of the share of tokens that equal weights of the same concentration would lie on."""
    rows = mask.any(dim=1)
    share = (
        weights.sum(dim=1).square()
        / weights.square().sum(dim=1).clamp(min=1e-12)
        / row_lengths(mask)[:, 0].clamp(min=1)
    )
    return float(share[rows].mean()) if rows.any() else 0.0


def check_share(name: str, value: float) -> None:
    """Refuse an option that is no share."""
    if not 0 <= value <= 1:
        raise InputError(f"{name} is a share from 0 to 1, not {value}")


def _last(mask: Tensor) -> Tensor:
    """(B, T) bool: the last token of each row inside the mask."""
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
