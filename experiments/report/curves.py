"""Curves of runs and over seeds: areas, crossings, means, bands and running means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .statistics import bootstrap_interval, mean

__all__ = ["Curve", "Line", "area_under_curve", "band", "first_crossing", "mean_curve", "smooth", "window"]

Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Args:
        index: of the strategy.
        label: its name.
        x, y: (E,) positions and heights.
        low, high: (E,) ends of the band, or empty.
        seeds: curves (x, y) of single seeds, drawn thin.
        unfinished: curves (x, y) of runs that do not count, drawn dotted.
    """

    index: int
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    seeds: Sequence[Curve] = ()
    unfinished: Sequence[Curve] = ()


def area_under_curve(positions: Sequence[float], values: Sequence[float], low: float, high: float) -> float:
    """Mean height of a piecewise linear curve between ``low`` and ``high``: its integral over the width.

    Args:
        positions: (E,) rising positions of the evaluations (steps or tokens).
        values: (E,) what was measured there.
        low, high: range to integrate over; the curve must cover it, else NaN.

    >>> round(area_under_curve([0, 10, 20], [0.2, 0.4, 0.8], 0, 20), 9)
    0.45
    """
    if len(positions) < 2 or not high > low or positions[0] > low or positions[-1] < high:
        return math.nan
    inside = [x for x in positions if low < x < high]
    x = np.asarray([low, *inside, high], dtype=np.float64)
    y = np.interp(x, positions, values)
    return float(np.trapezoid(y, x) / (high - low))


def first_crossing(positions: Sequence[float], values: Sequence[float], threshold: float) -> float:
    """Where a curve first reaches ``threshold``, linear between evaluations; inf where never, NaN without a curve.

    >>> round(first_crossing([0, 10, 20], [0.2, 0.6, 1.0], 0.8), 9)
    15.0
    """
    if not values:
        return math.nan
    for index, value in enumerate(values):
        if value >= threshold:
            if index == 0:
                return float(positions[0])
            before, start, stop = values[index - 1], positions[index - 1], positions[index]
            return float(start + (stop - start) * (threshold - before) / (value - before))
    return math.inf


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Mean over seeds at the positions that every curve has; where they differ, at those of the first.

    >>> mean_curve([([0, 10], [0.0, 1.0]), ([0, 10], [0.5, 0.5])])
    ([0, 10], [0.25, 0.75])
    """
    x, columns = _aligned(curves)
    return x, [mean(column) for column in columns]


def band(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Ends of the pointwise 95% bootstrap interval over seeds, where :func:`mean_curve` is; empty for one seed."""
    if len(curves) < 2:
        return [], []
    intervals = [bootstrap_interval(column) for column in _aligned(curves)[1]]
    return [i.low for i in intervals], [i.high for i in intervals]


def _aligned(
    curves: Sequence[Curve],
) -> tuple[list[float], list[list[float]]]:
    """Common positions and, for each, the heights of all curves there."""
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return [], []
    shared = set(curves[0][0]).intersection(*(x for x, _ in curves[1:]))
    if len(shared) > 1 or len(curves[0][0]) == 1:
        at = sorted(shared)
    else:  # tokens: every run was evaluated somewhere else
        low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        at = [low, *(x for x in curves[0][0] if low < x < high), high] if low < high else []
    heights = [np.interp(at, x, y) for x, y in curves] if at else []
    return at, [[float(h[i]) for h in heights] for i in range(len(at))]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred running mean over ``width`` values (odd), over fewer at the ends.

    >>> smooth([0.0, 3.0, 6.0, 0.0], 3)
    [1.5, 3.0, 3.0, 3.0]
    """
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def window(points: int) -> int:
    """Width of the running mean for a curve of so many points: none up to 20, then about an eighth of it, odd.

    >>> window(7), window(60), window(1000)
    (1, 7, 125)
    """
    return 1 if points <= 20 else points // 8 | 1
