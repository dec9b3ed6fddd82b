"""How good the evidence on tabular answers is: errors of a step verifier, and of a value model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...credit.align import SpanTable
from ...verifiers import InputError

__all__ = [
    "PERFECT",
    "STEP_VERIFIERS",
    "Evidence",
    "StepNoise",
    "judged",
    "spans_of_steps",
    "spans_of_tokens",
    "valued",
]

STEP_VERIFIERS = ("steps", "critic_1", "critic_2", "critic_3")
"""Verifiers that judge steps, each with errors of its own."""

STEP_SIGNALS = frozenset(f"spans:{name}" for name in STEP_VERIFIERS)
VALUE_SIGNALS = frozenset({"spans:values", "token_scores:reward_model"})
_UNSURE = 1e-3  # a certainty has no finite log-odds


@dataclass(frozen=True)
class StepNoise:
    """Errors of a step verifier, drawn for every step by itself.

    Args:
        miss: chance that a wrong step is called right.
        false_alarm: chance that a right step is called wrong.
        shift: tokens by which every judged step lies too late; negative, too early. What falls off the answer is lost.
    """

    miss: float = 0.0
    false_alarm: float = 0.0
    shift: int = 0

    def __post_init__(self) -> None:
        for name in ("miss", "false_alarm"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name}={getattr(self, name)}: is a chance, so between 0 and 1")

    def __call__(self, table: SpanTable, lengths: Tensor, rng: np.random.Generator) -> SpanTable:
        """The same steps, judged with these errors; a step that is misjudged stays so when there is more noise.

        Args:
            table: steps with the scores 0 and 1.
            lengths: (B,) long, tokens of each answer.
            rng: one uniform is drawn for each span, whatever the noise.
        """
        luck = torch.from_numpy(rng.random(tuple(table.score.shape)))
        turned = luck < torch.where(table.score < 0.5, self.miss, self.false_alarm)
        score = torch.where(turned, 1 - table.score, table.score)
        start, stop = ((side + self.shift).clamp(min=0).minimum(lengths[:, None]) for side in (table.start, table.stop))
        lost = table.mask & (stop <= start)
        return SpanTable(start, stop, score, table.mask & ~lost, table.uncovered + int(lost.sum()))


@dataclass(frozen=True)
class Evidence:
    """How good everything is that strategies are told.

    Args:
        noise: of the step verifier and of each critic.
        calibration: factor on the log-odds of every value and step score: over 1 is too sure, under 1 not sure enough.
        blur: standard deviation of what is added to the log-odds of every value and step score.
        continuations: answers sampled from inside an answer to value a state; None gives exact values.
    """

    noise: StepNoise = StepNoise()
    calibration: float = 1.0
    blur: float = 0.0
    continuations: int | None = 9

    def __post_init__(self) -> None:
        if not self.calibration > 0:
            raise InputError(f"calibration={self.calibration}: is a factor on log-odds, so over 0")
        if not self.blur >= 0:
            raise InputError(f"blur={self.blur}: is a standard deviation, so 0 or more")
        if self.continuations is not None and self.continuations < 1:
            raise InputError(f"continuations={self.continuations}: must be 1 or more, or null for exact values")

    def distort(self, scores: Tensor, rng: np.random.Generator) -> Tensor:
        """``sigmoid(calibration * logit(s) + blur * z)``, z standard normal, s first brought into [.001, .999].

        Args:
            scores: in [0, 1]; without distortion they come back as they are.
            rng: one normal is drawn for each score, whatever the distortion.

        >>> sure = Evidence(calibration=2.0).distort(torch.tensor([0.25, 0.5]), np.random.default_rng(0))
        >>> [round(score, 6) for score in sure.tolist()]
        [0.1, 0.5]
        """
        luck = torch.from_numpy(rng.standard_normal(tuple(scores.shape)))
        if self.calibration == 1.0 and self.blur == 0.0:
            return scores
        odds = torch.logit(scores.double().clamp(_UNSURE, 1 - _UNSURE))
        return torch.sigmoid(self.calibration * odds + self.blur * luck).to(scores)

    def worse(self, kind: str, level: float) -> Evidence:
        """The same evidence with one kind of noise set to a level, of which 0 is none.

        Args:
            kind: ``miss`` or ``false_alarm`` (chance for each step), ``boundary`` (tokens by which each step lies too
                late) or ``calibration`` (``blur``).
            level: how much.

        >>> Evidence().worse("boundary", 2).noise
        StepNoise(miss=0.0, false_alarm=0.0, shift=2)
        """
        if kind == "calibration":
            return replace(self, blur=level)
        if kind == "boundary":
            return replace(self, noise=replace(self.noise, shift=int(level)))
        if kind == "miss":
            return replace(self, noise=replace(self.noise, miss=level))
        if kind == "false_alarm":
            return replace(self, noise=replace(self.noise, false_alarm=level))
        raise InputError(f"noise={kind}: must be miss, false_alarm, boundary or calibration")

    @staticmethod
    def spoils(kind: str, signals: Collection[str]) -> bool:
        """Whether a kind of noise is in any of these signals."""
        told = STEP_SIGNALS | VALUE_SIGNALS if kind == "calibration" else STEP_SIGNALS
        return not told.isdisjoint(signals)


PERFECT = Evidence()
"""A verifier and a value model without error; values of states from nine continuations each, as VinePPO takes them."""


def spans_of_steps(begins: Tensor, in_step: Tensor, mask: Tensor) -> SpanTable:
    """The steps of B answers as spans without a verdict: the score is 1.

    Args:
        begins: (B, T) bool, the token begins a step.
        in_step: (B, T) bool, the token belongs to the step that began last.
        mask: (B, T) bool, tokens of the answer.

    >>> begins, in_step = torch.tensor([[False, True, False, True]]), torch.tensor([[False, True, True, True]])
    >>> table = spans_of_steps(begins, in_step, torch.ones(1, 4, dtype=torch.bool))
    >>> table.start.tolist(), table.stop.tolist()
    ([[1, 3]], [[3, 4]])
    """
    rows, width = mask.shape
    step = begins.logical_and(mask).cumsum(dim=1)  # 0 before the first one
    columns = int(step.max()) if step.numel() else 0
    inside = (in_step & mask & (step > 0)).long()
    place = torch.arange(width).expand(rows, width)
    start = torch.full((rows, columns + 1), width).scatter_reduce(1, step * inside, place, "amin")[:, 1:]
    stop = torch.zeros(rows, columns + 1, dtype=torch.long).scatter_reduce(1, step * inside, place + 1, "amax")[:, 1:]
    there = stop > 0
    return SpanTable(start.where(there, 0), stop, there.float(), there)


def spans_of_tokens(select: Tensor, score: Tensor) -> SpanTable:
    """Every selected token as a span of its own; ``select`` is (B, T) bool, ``score`` (B, T)."""
    start = torch.arange(select.shape[1]).expand(select.shape).where(select, 0)
    return SpanTable(start, start + select.long(), score.float().where(select, 0.0), select)


def judged(table: SpanTable, wrong: Tensor) -> SpanTable:
    """The steps as a perfect verifier scores them: 0 for a step that holds a wrong token, (B, T) bool, else 1."""
    before = torch.nn.functional.pad(wrong.long().cumsum(dim=1), (1, 0))
    faults = before.gather(1, table.stop) - before.gather(1, table.start)
    return replace(table, score=(faults == 0).float().where(table.mask, 0.0))


def valued(table: SpanTable, levels: Tensor) -> SpanTable:
    """The steps with the level, (B, T), that is reached at the last token of each."""
    score = levels.gather(1, (table.stop - 1).clamp(min=0))
    return replace(table, score=score.float().where(table.mask, 0.0))
