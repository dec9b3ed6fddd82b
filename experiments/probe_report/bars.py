"""Dots and intervals drawn on one scale by the page itself: where they lie, in percent of the width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..probe.record import Figure
from .board import written

__all__ = ["Bar", "Scale", "bar", "scale_of"]


@dataclass(frozen=True)
class Bar:
    """Places of a dot and of the ends of its interval (those of the dot where there is none)."""

    dot: float
    start: float
    stop: float


@dataclass(frozen=True)
class Scale:
    """A range of values with zero in it, and round values in it as (text, place)."""

    low: float
    high: float
    ticks: Sequence[tuple[str, float]]

    def place(self, value: float) -> float:
        """Percent of the width, inside it.

        >>> Scale(-1.0, 1.0, ()).place(0.5)
        75.0
        """
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def scale_of(figures: Iterable[Figure], *, most_ticks: int) -> Scale | None:
    """A scale that holds all numbers, their intervals and zero; None where there is no number."""
    ends = [end for figure in figures if not math.isnan(figure.value) for end in figure if math.isfinite(end)]
    if not ends:
        return None
    low, high = min(0.0, *ends), max(0.0, *ends)
    room = 0.04 * (high - low) or 1.0
    bare = Scale(low - room, high + room, ())
    step, digits = _step((high - low) / most_ticks or 1.0)
    values = [step * k for k in range(math.ceil(bare.low / step), math.floor(bare.high / step) + 1)]
    return Scale(bare.low, bare.high, [(written(v, digits if v else 0), bare.place(v)) for v in values])


def bar(figure: Figure, scale: Scale) -> Bar | None:
    """Where a figure lies; None where it is no number."""
    if math.isnan(figure.value):
        return None
    known = not math.isnan(figure.low + figure.high)
    low, high = (figure.low, figure.high) if known else (figure.value, figure.value)
    return Bar(scale.place(figure.value), scale.place(low), scale.place(high))


def _step(least: float) -> tuple[float, int]:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``least``, and its decimals.

    >>> _step(0.13), _step(3.0)
    ((0.2, 1), (5.0, 0))
    """
    power = math.floor(math.log10(least))
    for step in (1, 2, 5, 10):
        if step * 10.0**power >= least * (1 - 1e-9):
            shift = power + (step == 10)
            return round(step * 10.0**power, 12), max(0, -shift)
    raise AssertionError(least)
