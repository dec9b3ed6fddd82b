"""Alarms of a run that drifts: each compares what the latest rollout batches logged with the run's own start.

They are read off the metrics alone, so that the same function serves a run at work and a ``metrics.jsonl``. Alarms of a
learned reward model are another thing, see :mod:`apportion.grpo.alarms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..verifiers import InputError
from .metrics import drop_missing
from .records import read_metrics

__all__ = [
    "Alarm",
    "DriftConfig",
    "Drifted",
    "drift_alarms",
    "drift_config",
    "drift_metrics",
    "read_history",
    "watched",
]

WATCHED = (
    "policy/entropy",
    "policy/ref_kl",
    "optim/grad_norm",
    "optim/skipped_updates",
    "reward/dead_groups",
    "reward/dead_groups_right",
    "length/mean",
    "format/pass_rate",
)
LEAST_BEFORE_SPIKE = 5  # gradient norms whose median is worth comparing with


class Drifted(InputError):
    """An alarm is on, and the run was asked to stop at one."""


@dataclass(frozen=True)
class Alarm:
    """One thing that is watched.

    Args:
        name: logged as ``alarm/NAME``, 1 while it is on.
        statistic: logged under this name too, see docs/metrics.md; NaN where the rule needs no number to be on.
        value, limit: the statistic and what it is held against.
        on: whether it is beyond the limit.
        says: both in words.
    """

    name: str
    statistic: str
    value: float
    limit: float
    on: bool
    says: str


@dataclass(frozen=True)
class DriftConfig:
    """Limits; null watches nothing. "Start" is the first ``window`` rollout batches, "now" the latest as many.

    Args:
        window: rollout batches in a mean; no alarm but ``kl`` and ``grad_spike`` before there are twice so many.
        entropy_low, entropy_high: ``entropy_collapse`` and ``entropy_explosion``: mean entropy now over that at the
            start is under the one or over the other.
        kl: ``kl``: the last measured KL to the reference is over so many nats per token.
        grad_spike: ``grad_spike``: the gradient norm is over so many times the median of those before it, or an update
            was left out because a number was not finite.
        grad_window: gradient norms in that median, as far as there are.
        dead_groups: ``dead_groups``: over this share of the groups now has equal rewards and is not all right.
        length: ``length``: mean length now over that at the start is over this, or under its inverse.
        format: ``format``: the format's pass rate fell by more than this from the start to now.
        stop: end the run once an alarm is on.
    """

    window: int = 5
    entropy_low: float | None = 0.1
    entropy_high: float | None = 2.0
    kl: float | None = 0.5
    grad_spike: float | None = 10.0
    grad_window: int = 20
    dead_groups: float | None = 0.9
    length: float | None = 1.5
    format: float | None = 0.1
    stop: bool = False

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("grad_window", LEAST_BEFORE_SPIKE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"run.drift.{name}={value!r}: must be a whole number of at least {least}")
        lowest = {
            "entropy_low": 0,
            "entropy_high": 1,
            "kl": 0,
            "grad_spike": 1,
            "length": 1,
            "dead_groups": 0,
            "format": 0,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value >= least):
                raise InputError(f"run.drift.{name}={value!r}: must be a number of at least {least}, or null")
        if not isinstance(self.stop, bool):
            raise InputError(f"run.drift.stop={self.stop!r}: must be true or false")

    def heed(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Raise :class:`Drifted` where the run is to stop after ``step``."""
        on = [alarm for alarm in drift_alarms(rows, self) if alarm.on] if self.stop else []
        if on:
            told = "; ".join(alarm.says for alarm in on)
            raise Drifted(f"stopped after step {step}: {told}; lower optim.lr, or mend the limit under run.drift")


def drift_config(options: Mapping[str, Any] | None) -> DriftConfig:
    """From the keys under ``run.drift``; None is the defaults."""
    known = [field.name for field in fields(DriftConfig)]
    for name in options or {}:
        if name not in known:
            raise InputError(f"run.drift.{name}: no such option; there are {', '.join(known)}")
    return DriftConfig(**(options or {}))


def watched(metrics: Mapping[str, float]) -> dict[str, float]:
    """What of a line of metrics the alarms read.

    >>> watched({"policy/entropy": 0.5, "reward/mean": 1.0, "length/mean": math.nan})
    {'policy/entropy': 0.5}
    """
    return drop_missing({key: metrics[key] for key in WATCHED if key in metrics})


def read_history(path: Path) -> list[dict[str, float]]:
    """The lines of a ``metrics.jsonl`` as :func:`watched` leaves them; a run that goes on begins with these."""
    return [watched(row) for row in read_metrics(path)]


def drift_alarms(rows: Sequence[Mapping[str, float]], config: DriftConfig | None = None) -> list[Alarm]:
    """Every alarm that can be told after the last of ``rows``, on or off.

    Args:
        rows: one mapping for each line of ``metrics.jsonl``, in order; keys that were not measured are absent.
        config: limits.

    >>> rows = [{"policy/entropy": 0.10}] * 5 + [{"policy/entropy": 0.25}] * 5
    >>> [(a.name, round(a.value, 2), a.on) for a in drift_alarms(rows)]
    [('entropy_collapse', 2.5, False), ('entropy_explosion', 2.5, True)]
    """
    limits = DriftConfig() if config is None else config
    found = [
        *_entropy(rows, limits),
        _kl(rows, limits),
        _grad_spike(rows, limits),
        _dead_groups(rows, limits),
        _length(rows, limits),
        _format(rows, limits),
    ]
    return [alarm for alarm in found if alarm is not None]


def drift_metrics(rows: Sequence[Mapping[str, float]], config: DriftConfig) -> dict[str, float]:
    """What is logged of :func:`drift_alarms`: ``alarm/NAME`` (0 or 1) and ``alarm/STATISTIC``."""
    alarms = drift_alarms(rows, config)
    told = {f"alarm/{alarm.statistic}": alarm.value for alarm in alarms}
    return told | {f"alarm/{alarm.name}": float(alarm.on) for alarm in alarms}


def _entropy(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> list[Alarm | None]:
    moved = _start_and_now(rows, "policy/entropy", limits.window)
    if moved is None or moved[0] <= 0:
        return []
    ratio = moved[1] / moved[0]
    says = f"the entropy is {ratio:.3g} times that of the start"
    return [
        _alarm("entropy_collapse", "entropy_ratio", ratio, limits.entropy_low, says, below=True),
        _alarm("entropy_explosion", "entropy_ratio", ratio, limits.entropy_high, says),
    ]


def _kl(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> Alarm | None:
    measured = _values(rows, "policy/ref_kl")
    if not measured:
        return None
    says = f"the KL to the starting weights is {measured[-1]:.3g} nats per token"
    return _alarm("kl", "kl_latest", measured[-1], limits.kl, says)


def _grad_spike(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> Alarm | None:
    """Only of the latest batch: a spike is over when the next norm is small again."""
    latest = rows[-1] if rows else {}
    if limits.grad_spike is not None and latest.get("optim/skipped_updates", 0) > 0:
        says = f"{latest['optim/skipped_updates']:g} updates were left out, as a number was not finite"
        return Alarm("grad_spike", "grad_ratio", math.nan, limits.grad_spike, True, says)
    before = _values(rows[:-1], "optim/grad_norm")[-limits.grad_window :]
    middle = median(before) if len(before) >= LEAST_BEFORE_SPIKE else 0.0
    if "optim/grad_norm" not in latest or not middle > 0:
        return None
    ratio = latest["optim/grad_norm"] / middle
    says = f"the gradient norm is {ratio:.3g} times the median of the {len(before)} before it"
    return _alarm("grad_spike", "grad_ratio", ratio, limits.grad_spike, says)


def _dead_groups(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> Alarm | None:
    """Groups that are all right are dead as well, but of success."""
    dead = [
        row["reward/dead_groups"] - row.get("reward/dead_groups_right", 0.0)
        for row in rows
        if "reward/dead_groups" in row
    ]
    if len(dead) < 2 * limits.window:
        return None
    share = fmean(dead[-limits.window :])
    says = f"{share:.0%} of the groups have equal rewards and are not all right"
    return _alarm("dead_groups", "dead_share", share, limits.dead_groups, says)


def _length(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> Alarm | None:
    moved = _start_and_now(rows, "length/mean", limits.window)
    if moved is None or limits.length is None or moved[0] <= 0:
        return None
    ratio = moved[1] / moved[0]
    says = f"answers are {ratio:.3g} times as long as at the start"
    on = ratio > limits.length or ratio < 1 / limits.length
    return Alarm("length", "length_ratio", ratio, limits.length, on, f"{says} (limit {limits.length:g} or its inverse)")


def _format(rows: Sequence[Mapping[str, float]], limits: DriftConfig) -> Alarm | None:
    moved = _start_and_now(rows, "format/pass_rate", limits.window)
    if moved is None:
        return None
    fall = moved[0] - moved[1]
    return _alarm("format", "format_fall", fall, limits.format, f"the format's pass rate fell by {fall:.3g}")


def _alarm(
    name: str, statistic: str, value: float, limit: float | None, says: str, *, below: bool = False
) -> Alarm | None:
    if limit is None:
        return None
    return Alarm(name, statistic, value, limit, value < limit if below else value > limit, f"{says} (limit {limit:g})")


def _start_and_now(rows: Sequence[Mapping[str, float]], key: str, window: int) -> tuple[float, float] | None:
    """Mean of the first and of the latest ``window`` measured values, or None while these overlap."""
    values = _values(rows, key)
    return None if len(values) < 2 * window else (fmean(values[:window]), fmean(values[-window:]))


def _values(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]
