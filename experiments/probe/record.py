"""What a probe found. The page, the table in the terminal and the files are written from this alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["UNIFORM", "DrawnRollout", "Figure", "NoisePoint", "Probe", "ProbedStrategy"]

UNIFORM = "uniform"
"""Label of the strategy that the others are compared with."""


class Figure(NamedTuple):
    """A number with its 95% interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class ProbedStrategy:
    """One strategy on the common rollouts.

    Args:
        name: label, as in ``probe.strategies``.
        kind: a strategy, or a control that tells what the figures mean.
        figures: by key, ``group/name``, as docs/credit-quality.md defines them; a key that does not apply is missing.
        told: what it is told beyond the reward, in a few words; empty for nothing.
    """

    name: str
    kind: Literal["strategy", "control"]
    figures: Mapping[str, Figure]
    told: str = ""


@dataclass(frozen=True)
class NoisePoint:
    """What became of a strategy when the evidence got worse.

    Args:
        noise: ``miss``, ``false_alarm``, ``boundary`` (tokens) or ``calibration``.
        level: how much of it.
        strategy: name of the strategy.
        figures: as in :class:`ProbedStrategy`; ``learning/gain`` is the success gained by training with it.
    """

    noise: str
    level: float
    strategy: str
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class DrawnRollout:
    """One answer with every strategy's credit; the sequences are (T,), one entry for each token.

    Args:
        problem_id, prompt, text, reference: of the problem and the answer.
        reward: outcome of the answer, or None.
        ids, offsets, trained: sampled ids, their characters in ``text``, and whether they are trained.
        truth: true advantage of each token, in units of reward.
        wrong: tokens that are in error.
        advantages: by the strategy's name, what each hands out.
    """

    problem_id: str
    prompt: str
    text: str
    reference: str | None
    reward: float | None
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    trained: Sequence[bool]
    truth: Sequence[float]
    wrong: Sequence[bool]
    advantages: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Probe:
    """Everything that a probe found.

    Args:
        command: the line that made it.
        task: name of the task.
        seed: of everything random.
        facts: what was probed, for the head of the page: policy, problems, rollouts, mean reward, seconds and so on.
        strategies: in the order in which they were named, the controls last.
        cosines: (K, K) cosines between the strategies' gradients, in their order; None where not measured.
        truth: how the truth was found, in a few words.
        noise_floor: figures of one estimate of the truth against another one; empty where the truth is exact.
        noise: what worse evidence does.
        rollouts: answers to draw.
        cautions: what a reader must know, one sentence each.
    """

    command: str
    task: str
    seed: int
    facts: Mapping[str, str]
    strategies: Sequence[ProbedStrategy]
    cosines: Sequence[Sequence[float]] | None
    truth: str
    noise_floor: Mapping[str, Figure] = field(default_factory=dict)
    noise: Sequence[NoisePoint] = ()
    rollouts: Sequence[DrawnRollout] = ()
    cautions: Sequence[str] = ()
