"""What worse evidence does: the curves of a sweep, and where located credit stops beating uniform."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..probe.record import Figure, Probe
from .board import NOTHING

__all__ = ["MEASURES", "NOISES", "Meeting", "Sweep", "meeting", "sweeps"]


class Kind(NamedTuple):
    """A kind of noise: heading, what its axis counts, and how one says a level."""

    heading: str
    axis: str
    at: str


NOISES = {
    "miss": Kind("Errors missed", "share of wrong steps called right", "a miss rate of {}"),
    "false_alarm": Kind("False alarms", "share of right steps called wrong", "a false-alarm rate of {}"),
    "boundary": Kind("Boundaries off", "tokens by which a judged span is moved", "a shift of {}"),
    "calibration": Kind("Scores distorted", "amount of distortion", "a distortion of {}"),
}
# the figures that are drawn -> what they are called
MEASURES = {"quality/pearson": "correlation with the truth", "learning/gain": "success gained by training"}


@dataclass(frozen=True)
class Sweep:
    """One figure under one kind of noise.

    Args:
        noise, key: which.
        levels: (L,) rising.
        curves: by strategy, (L,) figures, NaN where a level was not tried.
        reference: (L,) uniform's; its value without noise where the sweep has none; empty where that is not known.
    """

    noise: str
    key: str
    levels: Sequence[float]
    curves: Mapping[str, Sequence[Figure]]
    reference: Sequence[Figure]

    @property
    def kind(self) -> Kind:
        return NOISES.get(self.noise, Kind(self.noise, self.noise, "{}"))

    @property
    def measure(self) -> str:
        return MEASURES.get(self.key, self.key)


class Meeting(NamedTuple):
    """Where a curve comes down to the reference.

    Args:
        level: where the two meet, by straight lines between the levels; inf where they do not within the range, -inf
            where the curve is not above the reference to begin with.
        shown: the last level up to which the curve's interval lies above that of the reference; NaN where not even at
            the first.
    """

    level: float
    shown: float


def sweeps(probe: Probe) -> list[Sweep]:
    """All sweeps of a probe: kinds of noise in their known order, for each the drawn figures first."""
    noises = dict.fromkeys(
        [n for n in NOISES if any(p.noise == n for p in probe.noise)] + [p.noise for p in probe.noise]
    )
    found = []
    for noise in noises:
        points = [point for point in probe.noise if point.noise == noise]
        present = dict.fromkeys(key for point in points for key in point.figures)
        for key in [*(k for k in MEASURES if k in present), *(k for k in present if k not in MEASURES)]:
            at = {(p.strategy, p.level): p.figures[key] for p in points if key in p.figures}
            levels = sorted({level for _, level in at})
            names = dict.fromkeys(name for name, _ in at)
            curves = {name: [at.get((name, level), NOTHING) for level in levels] for name in names}
            found.append(Sweep(noise, key, levels, curves, curves.get("uniform") or _constant(probe, key, levels)))
    return found


def meeting(levels: Sequence[float], curve: Sequence[Figure], reference: Sequence[Figure]) -> Meeting | None:
    """Where ``curve`` first comes down to ``reference``, from no noise upwards; None where nothing can be compared.

    Args:
        levels: (L,) rising; those below zero are left out where there are others.
        curve, reference: (L,) figures.

    >>> half = [Figure(0.25)] * 3
    >>> meeting([0.0, 0.2, 0.4], [Figure(0.75, 0.5, 1.0), Figure(0.5, 0.2, 0.8), Figure(0.0)], half)
    Meeting(level=0.30000000000000004, shown=0.0)
    """
    known = [
        (level, mine.value - other.value, _above(mine, other))
        for level, mine, other in zip(levels, curve, reference, strict=False)
        if (level >= 0 or levels[-1] < 0) and not math.isnan(mine.value - other.value)
    ]
    if not known:
        return None
    shown = math.nan
    for level, _, above in known:
        if not above:
            break
        shown = level
    if known[0][1] <= 0:
        return Meeting(-math.inf, shown)
    for (start, before, _), (stop, after, _) in pairwise(known):
        if after <= 0:
            return Meeting(start + (stop - start) * before / (before - after), shown)
    return Meeting(math.inf, shown)


def _above(mine: Figure, other: Figure) -> bool:
    """Whether the intervals lie apart; an unknown end of the reference is its value, one's own shows nothing."""
    return mine.low > (other.value if math.isnan(other.high) else other.high)


def _constant(probe: Probe, key: str, levels: Sequence[float]) -> list[Figure]:
    """Uniform needs no evidence, so noise cannot change it."""
    uniform = next((s.figures.get(key, NOTHING) for s in probe.strategies if s.name == "uniform"), NOTHING)
    return [] if math.isnan(uniform.value) else [uniform] * len(levels)
