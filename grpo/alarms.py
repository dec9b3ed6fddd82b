"""Alarms of a run that trusts a learned reward model: is the policy getting better, or only better at pleasing it?

All of it is read off the verdicts of a rollout batch, on sampled answers. The keys are explained in docs/metrics.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from statistics import fmean
from typing import Any

import numpy as np

from ..credit import CreditBatch, Rollout
from ..prm.metrics import brier, min_at_last_rate
from ..prm.reliability import calibration_bins, expected_calibration_error
from ..verifiers import InputError, Span
from ..verifiers.panel import gives_spans

__all__ = ["AlarmConfig", "Hacked", "alarm_config", "alarm_metrics", "check_alarms", "divergence", "step_labels"]

History = list[tuple[float, float]]
"""Of the latest rollout batches: mean of the reward model, mean of the reference."""


class Hacked(InputError):
    """The reward model's mean rose while the reference's fell: what is learned is no longer the task."""


@dataclass(frozen=True)
class AlarmConfig:
    """What is watched, by names in ``verifiers``.

    Args:
        prm: verifier whose spans are steps scored by a learned model; None: no alarms.
        reference: verifier that is to be believed. Its mean score is compared with the model's, its spans, if it has
            any, tell right steps from wrong ones. None: only the shape of the steps is watched.
        window: rollout batches in a mean; the latest so many are compared with as many before.
        rise: stop the run where the model's mean rose by more than this from one window to the next while the
            reference's fell by more than ``fall``; None never stops.
        fall: see ``rise``.
    """

    prm: str | None = None
    reference: str | None = None
    window: int = 10
    rise: float | None = None
    fall: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prm", "reference"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InputError(f"run.alarms.{name}={value!r}: must be the name of a verifier, or null")
        if not isinstance(self.window, int) or self.window < 1:
            raise InputError(f"run.alarms.window={self.window!r}: must be a whole number of at least 1")
        for name in ("rise", "fall"):
            value = getattr(self, name)
            if not (value is None and name == "rise") and not (isinstance(value, int | float) and value >= 0):
                raise InputError(f"run.alarms.{name}={value!r}: must be a number of at least 0")
        if self.prm is None and self.reference is not None:
            raise InputError("run.alarms.reference: nothing is compared with it; name the model, run.alarms.prm=...")
        if self.rise is not None and self.reference is None:
            raise InputError("run.alarms.rise: a divergence from what? Give run.alarms.reference=...")

    def remember(self, history: History, metrics: Mapping[str, float]) -> History:
        """The history with one more rollout batch, as far back as two windows; a batch without both means is left out.

        >>> AlarmConfig("prm", "truth", window=1).remember([(0.1, 0.2), (0.3, 0.4)], {
        ...     "alarm/prm_mean": 0.5, "alarm/reference_mean": 0.6})
        [(0.3, 0.4), (0.5, 0.6)]
        """
        means = [metrics.get("alarm/prm_mean", math.nan), metrics.get("alarm/reference_mean", math.nan)]
        if not all(map(math.isfinite, means)):
            return history
        return [*history, (means[0], means[1])][-2 * self.window :]

    def moves(self, history: History) -> dict[str, float]:
        """What is logged of :func:`divergence`."""
        moved = divergence(history, self.window)
        return {} if moved is None else {"alarm/prm_rise": moved[0], "alarm/reference_fall": moved[1]}

    def heed(self, step: int, history: History) -> None:
        """Raise :class:`Hacked` where the run is to stop after ``step``."""
        why = self.diverged(history)
        if why is not None:
            raise Hacked(f"stopped after step {step}: {why}")

    def diverged(self, history: History) -> str | None:
        """Why the run is to stop, or None."""
        moved = divergence(history, self.window)
        if self.rise is None or moved is None or not (moved[0] > self.rise and moved[1] > self.fall):
            return None
        return (
            f"run.alarms: over the latest {self.window} rollout batches the mean step score of verifiers.{self.prm} "
            f"rose by {moved[0]:.3f} and the mean score of verifiers.{self.reference} fell by {moved[1]:.3f}; look at "
            "the rollouts, and take a checkpoint from before or another reward model"
        )


def alarm_config(options: Mapping[str, Any] | None) -> AlarmConfig:
    """From the keys under ``run.alarms``; None is none at all."""
    known = [field.name for field in fields(AlarmConfig)]
    for name in options or {}:
        if name not in known:
            raise InputError(f"run.alarms.{name}: no such option; there are {', '.join(known)}")
    return AlarmConfig(**(options or {}))


def check_alarms(config: AlarmConfig, verifiers: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse names of verifiers that are not there, and a reward model that scores no steps."""
    for key, name in (("prm", config.prm), ("reference", config.reference)):
        if name is not None and name not in verifiers:
            raise InputError(f"run.alarms.{key}={name}: no such verifier (there are: {', '.join(sorted(verifiers))})")
    if config.prm is not None and not gives_spans(verifiers[config.prm]):
        raise InputError(f"run.alarms.prm={config.prm}: scores no steps; name a verifier that gives spans")


def alarm_metrics(rollouts: Sequence[Rollout], batch: CreditBatch, config: AlarmConfig) -> dict[str, float]:
    """What is to be watched in one rollout batch; NaN where it cannot be told.

    Args:
        rollouts, batch: B rollouts with their verdicts, and the same as tensors.
        config: names the verifiers; without a reward model there is nothing.
    """
    if config.prm is None:
        return {}
    steps = [_in_order(rollout, config.prm) for rollout in rollouts]
    scores = [[span.score for span in spans] for spans in steps]
    table, (at_last, chance) = batch.spans[config.prm], min_at_last_rate(scores)
    metrics = {
        "alarm/prm_mean": _mean([fmean(own) for own in scores if own]),
        "alarm/steps": _mean([len(own) for own in scores]),
        "alarm/step_tokens": _mean((table.stop - table.start)[table.mask].tolist()),
        "alarm/without_steps": _mean([not own for own in scores]),
        "alarm/uncovered_steps": float(table.uncovered),
        "alarm/min_at_last": at_last.value,
        "alarm/min_at_last_chance": chance,
    }
    if config.reference is None:
        return metrics
    believed = [rollout.verdicts[config.reference].score for rollout in rollouts]
    metrics["alarm/reference_mean"] = _mean([score for score in believed if score is not None])
    metrics["alarm/gap"] = metrics["alarm/prm_mean"] - metrics["alarm/reference_mean"]
    labels = [step_labels(own, _in_order(rollout, config.reference)) for own, rollout in zip(steps, rollouts)]
    return metrics | _calibration(scores, labels)


def divergence(history: Sequence[tuple[float, float]], window: int) -> tuple[float, float] | None:
    """How far the first mean rose and the second fell, from the ``window`` entries before the latest ones to those.

    None while there are not so many.

    >>> [round(move, 3) for move in divergence([(0.5, 0.6), (0.5, 0.5), (0.7, 0.4), (0.9, 0.5)], window=2)]
    [0.3, 0.1]
    """
    if len(history) < 2 * window:
        return None
    prm, reference = zip(*history)
    rise = fmean(prm[-window:]) - fmean(prm[-2 * window : -window])
    return rise, fmean(reference[-2 * window : -window]) - fmean(reference[-window:])


def step_labels(steps: Sequence[Span], judged: Sequence[Span]) -> list[float | None]:
    """Of each step whether it is right by the spans that another verifier judged: 0 where it shares a character with a
    wrong one (score under 0.5), else 1 where it shares one with a right one, else None.

    An empty span, which says that something is missing, counts for the character that stands in its place.

    >>> step_labels([Span(0, 5), Span(6, 9), Span(9, 12)], [Span(0, 6, 1.0), Span(7, 8, 0.0), Span(8, 9, 1.0)])
    [1.0, 0.0, None]
    """
    wrong = _Places([span for span in judged if span.score < 0.5])
    right = _Places([span for span in judged if span.score >= 0.5])
    return [0.0 if wrong.touch(step) else 1.0 if right.touch(step) else None for step in steps]


class _Places:
    """Some ranges, asked whether any shares a character with a given one."""

    def __init__(self, spans: Sequence[Span]) -> None:
        ranges = sorted((span.start, max(span.stop, span.start + 1)) for span in spans)
        self._starts = [start for start, _ in ranges]
        self._furthest = list(accumulate((stop for _, stop in ranges), max))

    def touch(self, span: Span) -> bool:
        before = bisect_left(self._starts, span.stop)
        return before > 0 and self._furthest[before - 1] > span.start


def _in_order(rollout: Rollout, name: str) -> list[Span]:
    return sorted(rollout.verdicts[name].spans, key=lambda span: (span.start, span.stop))


def _calibration(scores: Sequence[Sequence[float]], labels: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Brier score and expected calibration error of the steps that have a label; NaN if a score is no probability."""
    known = [(score, label) for row, own in zip(scores, labels) for score, label in zip(row, own) if label is not None]
    if not known or not all(0 <= score <= 1 for score, _ in known):
        return {"alarm/brier": math.nan, "alarm/ece": math.nan}
    said, right = np.array(known).T
    return {
        "alarm/brier": brier(right, said),
        "alarm/ece": expected_calibration_error(calibration_bins(right, said)),
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
