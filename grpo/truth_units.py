"""The parts of answers that are to be valued, and what the values of the states between them say about each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..credit.states import cutpoint_states, prefix_lengths, segment_ids
from ..credit.truth import Truth
from ..verifiers import InputError
from ..verifiers.panel import Panel, PanelResult
from .sampling import RolloutConfig

__all__ = [
    "TOKENS",
    "Units",
    "Valuation",
    "check_options",
    "find_units",
    "greatest",
    "mean_known",
    "reward_range",
    "widened",
]

TOKENS = "tokens"


@dataclass(frozen=True)
class Valuation:
    """True advantages, and what they cost.

    Args:
        truth: the best estimate of them, from all that was sampled or enumerated.
        halves: two independent estimates of equal quality, ``advantage`` and ``again``, each from half of the samples;
            None where nothing was sampled. A correlation r between them means that ``truth``, their mean, correlates
            with the unknown advantages at ``sqrt(2 r / (1 + r))``.
        bound: (B, U) float64, certainly no less than ``|truth.advantage - true advantage|``; None where it was sampled.
        tokens: generated for it.
        seconds: wall time.
        panel: what the verifiers said of the answers that were sampled or enumerated.
        metrics: further numbers.
    """

    truth: Truth
    halves: Truth | None
    bound: Tensor | None
    tokens: int
    seconds: float
    panel: PanelResult
    metrics: dict[str, float]


@dataclass(frozen=True)
class Units:
    """Where the units of B answers lie: S segments between S states, and the outcome as state S.

    Of single tokens only those are units that the policy had a choice at. The inert tokens behind one belong to its
    segment: the next state that is valued lies before the next token with a choice. That moves an advantage by at most
    their ``drift``, the sum of ``1 - pi`` over them (where no verifier abstains: V is then the mean over its children).

    Args:
        batch: the evidence, without the rows that have no reward.
        states: name of the states, see :mod:`apportion.credit.states`.
        first: the first segment that is a unit: 1 where what comes before the first token with a choice is none.
        segments: (B, T) long, -1 for none.
        unit_ids: (B, T) long, as in :class:`apportion.credit.truth.Truth`.
        lengths: (B, S + 1) long, tokens before each state; -1 for none.
        present: (B, S) bool, segments that have tokens.
        after: (B, S) long, the state at which a segment ends; S for the outcome.
        drift: (B, S) float64, share of the range of rewards.
        trained, inert: (B, T) bool, of all rows.
    """

    batch: CreditBatch
    states: str
    first: int
    segments: Tensor
    unit_ids: Tensor
    lengths: Tensor
    present: Tensor
    after: Tensor
    drift: Tensor
    trained: Tensor
    inert: Tensor

    def asked(self) -> list[tuple[int, int, int]]:
        """Row, column and length of every state that a unit sets out from."""
        inside = self.present.clone()
        inside[:, : self.first] = False
        return [(row, column, int(self.lengths[row, column])) for row, column in inside.nonzero().tolist()]

    def advantages(self, value: Tensor) -> Tensor:
        """(B, U) float64: the value (B, S + 1) after each unit less that before it, NaN where either is not known."""
        ends = torch.cat([value[:, :-1], self.batch.outcome()[:, None]], dim=1)
        return self._of_units(ends.gather(1, self.after) - value[:, :-1])

    def errors(self, variance: Tensor) -> Tensor:
        """(B, U) standard errors of the advantages, from the variances (B, S + 1) of independent values."""
        ends = torch.cat([variance[:, :-1], torch.zeros_like(variance[:, :1])], dim=1)
        return self._of_units((ends.gather(1, self.after) + variance[:, :-1]).sqrt())

    def bounds(self, value: Tensor, low: Tensor, high: Tensor, width: float) -> Tensor:
        """(B, U): how far off the advantages of ``value`` may be where each state's true value is in [low, high].

        Args:
            value, low, high: (B, S + 1).
            width: of the range of rewards.
        """
        over, under = (
            torch.cat([gap[:, :-1], torch.zeros_like(gap[:, :1])], dim=1) for gap in (high - value, value - low)
        )
        most = torch.maximum(
            over.gather(1, self.after) + under[:, :-1],
            under.gather(1, self.after) + over[:, :-1],
        )
        return self._of_units(most + width * self.drift)

    def truth(self, advantage: Tensor, standard_error: Tensor, verifier: str | None, method: str) -> Truth:
        """The advantages (B, U) as a truth; a unit without a known one has no tokens.

        Args:
            verifier: whose spans of a score under one half are the wrong tokens; None for none.
        """
        mask = self.trained
        known = torch.cat([mask.new_zeros(len(mask), 1), ~advantage.isnan()], dim=1).gather(1, self.unit_ids + 1)
        ids, wrong = self.unit_ids.where(known, -1), torch.zeros_like(mask)
        if verifier is not None:
            table = self.batch.judged(verifier)
            wrong = table.token_mask(table.mask & (table.score < 0.5), mask.shape[1]) & mask
        return Truth(ids, advantage, standard_error, wrong, self.inert, method=method)

    def _of_units(self, values: Tensor) -> Tensor:
        return values.double().where(self.present, float("nan"))[:, self.first :]


def find_units(batch: CreditBatch, rollouts: Sequence[Rollout], config: RolloutConfig, units: str, eps: float) -> Units:
    """The units of the rows that have a reward.

    Args:
        batch: of the rollouts.
        rollouts: refused where their continuations cannot be known.
        config: how they were sampled.
        units: name of the verifier whose spans they are, or ``tokens``.
        eps: a token of probability ``1 - eps`` or more is inert.
    """
    _check(batch, rollouts, config)
    if batch.old_logprobs is None:
        raise InputError("true values need old_logprobs to tell inert tokens, and the batch has none")
    trained, chance = batch.completion_mask, batch.old_logprobs.double().exp()
    batch = replace(batch, completion_mask=trained & ~batch.outcome().isnan()[:, None])
    states = cutpoint_states(1 - eps, 1) if units == TOKENS else units
    segments = segment_ids(states, batch)
    inert = trained & (chance >= 1 - eps)
    lengths = prefix_lengths(segments)
    present, after = _follow(segments, lengths.shape[1] - 1)
    if units != TOKENS:
        drift = torch.zeros(present.shape, dtype=torch.float64)
        return Units(batch, states, 0, segments, segments, lengths, present, after, drift, trained, inert)
    lost = (1 - chance).clamp(min=0).where(inert & (segments >= 0), 0.0)
    drift = torch.zeros(len(lost), present.shape[1] + 1, dtype=torch.float64).scatter_add(1, segments + 1, lost)[:, 1:]
    own = (segments - 1).where((segments > 0) & ~inert, -1)
    return Units(batch, states, 1, segments, own, lengths, present, after, drift, trained, inert)


def _follow(segments: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which of S segments have tokens, (B, S) bool, and the next one of the row that has, (B, S) long; S for none.

    >>> [side.tolist() for side in _follow(torch.tensor([[0, 0, 2, -1]]), 3)]
    [[[True, False, True]], [[2, 2, 3]]]
    """
    present = torch.zeros(len(segments), columns + 1, dtype=torch.bool).scatter(1, segments + 1, True)[:, 1:]
    place = torch.arange(columns).expand_as(present).where(present, columns)
    following = torch.cat([place, torch.full_like(place[:, :1], columns)], dim=1).flip(1).cummin(dim=1).values.flip(1)
    return present, following[:, 1:]


def _check(batch: CreditBatch, rollouts: Sequence[Rollout], config: RolloutConfig) -> None:
    if len(rollouts) != len(batch.completion_mask):
        raise ValueError(f"{len(rollouts)} rollouts for a batch of {len(batch.completion_mask)} rows")
    for row, rollout in enumerate(rollouts):
        if rollout.model_mask is not None and not all(rollout.model_mask):
            raise InputError(
                f"rollout {row}: the policy did not write all of it (tool output), and what a tool would answer "
                "to other tokens is not known; take rollouts without tools"
            )
        if len(rollout.completion_ids) > config.max_new_tokens:
            raise InputError(
                f"rollout {row}: has {len(rollout.completion_ids)} tokens, over "
                f"rollout.max_new_tokens={config.max_new_tokens}; set the limit that it was sampled with"
            )


def reward_range(panel: Panel) -> tuple[float, float]:
    """Lowest and highest reward where every verifier scores from 0 to 1."""
    weights = panel.reward_weights.values()
    return sum(min(weight, 0.0) for weight in weights), sum(max(weight, 0.0) for weight in weights)


def widened(limits: tuple[float, float], values: Sequence[Tensor]) -> tuple[float, float]:
    """The limits, moved apart as far as values reach beyond them."""
    known = torch.cat([torch.tensor(limits, dtype=torch.float64), *(one.double().flatten() for one in values)])
    known = known[~known.isnan()]
    return float(known.min()), float(known.max())


def mean_known(values: Tensor) -> float:
    """Mean of those that are not NaN; 0 of none."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else 0.0


def greatest(values: Tensor) -> float:
    """The greatest of those that are not NaN; 0 of none."""
    known = values[~values.isnan()]
    return float(known.max()) if len(known) else 0.0


def check_options(eps: float, **counts: int) -> None:
    """Refuse options that mean nothing."""
    if not 0 <= eps < 1:
        raise InputError(f"truth.eps={eps}: is a probability, 0 or more and under 1")
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"truth.{name}={count}: must be at least 1")
