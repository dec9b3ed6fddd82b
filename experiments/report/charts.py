"""The charts of an ablation: learning curves, each strategy against the baseline, and the stability panel."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .costs import Axis, cost_curve
from .curves import Curve, Line, band, mean_curve, smooth, window
from .figures import draw, label_ends, paint_lines
from .load import EVALUATION, Cell
from .summary import StrategySummary, Summary

__all__ = ["STABILITY", "Chart", "against_baseline", "against_cost", "learning_curves", "short_number", "stability"]

# name of the file, heading, metric keys that are added up
STABILITY = (
    ("grad_norm", "Gradient norm", ("optim/grad_norm",)),
    ("ref_kl", "KL to the reference", ("policy/ref_kl",)),
    ("entropy", "Entropy", ("policy/entropy",)),
    ("clip_fraction", "Clipped tokens", ("policy/clip_fraction_low", "policy/clip_fraction_high")),
    ("dead_groups", "Groups of equal reward", ("reward/dead_groups",)),
    ("length", "Answer length", ("length/mean",)),
    ("format", "Format pass rate", ("format/pass_rate",)),
    ("retention", "Retained skill", ("retention/success",)),
)
_FLOORED = {"format", "retention"}
_PEAKED = {"grad_norm", "ref_kl"}
_SHARES = {"clip_fraction", "dead_groups", *_FLOORED}


@dataclass(frozen=True)
class Chart:
    """A drawn chart: file name without ending, heading, the ``<svg>`` element."""

    name: str
    heading: str
    svg: str
    strategy: StrategySummary | None = None
    note: str = ""


def learning_curves(summary: Summary) -> list[Chart]:
    """Held-out success of all strategies in one chart, for a wide page and for a narrow one; none without a run."""
    lines = [line for s in summary.strategies if (line := _evaluated(s, summary)).x]
    if not lines:
        return []
    title = f"Held-out success by {summary.ablation.axis}: mean over seeds with 95% band, one curve for each strategy"
    longest = max(len(line.label) for line in lines)
    room = min(190.0, max(60.0, 5.2 * longest + 6))

    def paint(labels: bool) -> Callable[[Any], None]:
        def on(axes: Any) -> None:
            paint_lines(axes, lines)
            _success_axes(axes, lines, summary)
            if labels:
                label_ends(axes, lines, room=room)

        return on

    return [
        Chart("curves", title, draw("curves", title, 700, 330, paint(True), pad=(34, 34, room + 24, 10))),
        Chart("curves_narrow", title, draw("curves-narrow", title, 310, 260, paint(False), pad=(30, 32, 8, 8))),
    ]


def against_baseline(summary: Summary) -> list[Chart]:
    """A small chart for each strategy: its mean, band and single seeds over the baseline's mean and band."""
    base = summary.baseline
    behind = [_evaluated(base, summary)] if base else []
    drawn = [(s, line) for s in summary.others if (line := _evaluated(s, summary, seeds=True)).x or line.unfinished]
    every, charts = [*behind, *(line for _, line in drawn)], []
    for s, line in drawn:
        title = f"Held-out success of {s.name}, each seed and mean, over that of {summary.ablation.baseline}"

        def paint(axes: Any, line: Line = line) -> None:
            paint_lines(axes, [*behind, line], markers=False, width=1.6)
            _success_axes(axes, every, summary, small=True)

        name = "against_" + re.sub(r"[^\w.-]", "_", s.name, flags=re.ASCII)
        charts.append(Chart(name, s.name, draw(name, title, 216, 138, paint, pad=(26, 20, 6, 6)), strategy=s))
    return charts


def against_cost(summary: Summary, axes: Sequence[Axis]) -> list[Chart]:
    """Held-out success by what it cost, one chart for each way to charge; as far as all seeds of a strategy came."""
    charts = []
    for axis in axes:
        lines = []
        for s in summary.strategies:
            curves = [cost_curve(cell, axis) for cell in s.counted]
            x, y = mean_curve(curves)
            low, high = band(curves)
            if x:
                lines.append(Line(s.index, s.name, x, y, low, high))
        if not lines:
            continue
        title = f"Held-out success by {axis.heading.lower()}, mean over seeds with 95% band"

        def paint(axes: Any, lines: Sequence[Line] = lines) -> None:
            paint_lines(axes, lines, markers=False, width=1.4)
            _success_axes(axes, lines, summary, small=True)

        name = f"cost_{axis.name}"
        svg = draw(name, title, 216, 138, paint, pad=(26, 20, 6, 6))
        charts.append(Chart(name, f"{axis.heading} ({axis.unit})", svg))
    return charts


def stability(summary: Summary) -> list[Chart]:
    """Small multiples of what tells a healthy run from a sick one; only what was measured."""
    return [chart for name, heading, keys in STABILITY if (chart := _panel(summary, name, heading, keys)) is not None]


def short_number(value: float, _: object = None) -> str:
    """A tick label.

    >>> [short_number(v) for v in (0.0, 0.25, 60.0, 120_000.0, 1.5e6)]
    ['0', '0.25', '60', '120k', '1.5M']
    """
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit or (name == "M" and abs(value) >= unit):
            return f"{value / unit:g}{name}"
    return f"{value:.4g}".replace("-", "−")


def _evaluated(strategy: StrategySummary, summary: Summary, *, seeds: bool = False) -> Line:
    axis = summary.ablation.axis
    curves = [cell.series(EVALUATION, axis) for cell in strategy.counted]
    x, y = mean_curve(curves)
    low, high = band(curves)
    return Line(
        index=strategy.index,
        label=strategy.name,
        x=x,
        y=y,
        low=low,
        high=high,
        seeds=curves if seeds and len(curves) > 1 else (),
        unfinished=_unfinished(strategy.cells, (EVALUATION,), axis) if seeds else (),
    )


def _unfinished(cells: Sequence[Cell], keys: Sequence[str], axis: str) -> list[Curve]:
    curves = [_summed(cell, keys, axis) for cell in cells if not cell.counts]
    return [curve for curve in curves if curve[0]]


def _summed(cell: Cell, keys: Sequence[str], axis: str) -> Curve:
    """The sum of several metrics where all were measured."""
    rows = [row for row in cell.metrics if axis in row and all(key in row for key in keys)]
    return [row[axis] for row in rows], [sum(row[key] for key in keys) for row in rows]


def _panel(summary: Summary, name: str, heading: str, keys: Sequence[str]) -> Chart | None:
    lines = []
    for s in summary.strategies:
        x, y = mean_curve([curve for cell in s.counted if (curve := _summed(cell, keys, "step"))[0]])
        unfinished = [(at, smooth(to, window(len(at)))) for at, to in _unfinished(s.cells, keys, "step")]
        if x or unfinished:
            lines.append(Line(s.index, s.name, x, smooth(y, window(len(x))), unfinished=unfinished))
    if not lines:
        return None
    heights = sorted(v for line in lines for curve in (line.y, *(y for _, y in line.unfinished)) for v in curve)
    logarithmic = name not in _SHARES and heights[0] > 0 and 40 * heights[len(heights) // 2] < heights[-1]

    def paint(axes: Any) -> None:
        paint_lines(axes, lines, markers=False, width=1.3)
        _panel_axes(axes, name, heights, logarithmic=logarithmic)

    remarks = ["logarithmic axis"] if logarithmic else []
    if name in _PEAKED:
        remarks.append(_peak(summary, keys))
    title = f"{heading} by step, mean over seeds, one line for each strategy"
    svg = draw(name, title, 216, 126, paint, pad=(32, 20, 6, 6))
    return Chart(name, heading, svg, note="; ".join(remarks))


def _peak(summary: Summary, keys: Sequence[str]) -> str:
    """The largest single value of all runs, which a mean may hide."""
    peaks = [(max(y), cell) for cell in summary.ablation.cells if (y := _summed(cell, keys, "step")[1])]
    value, cell = max(peaks, key=lambda peak: peak[0])
    return f"highest single value {value:.3g}: {cell.strategy}, seed {cell.seed}"


def _panel_axes(axes: Any, name: str, heights: Sequence[float], *, logarithmic: bool) -> None:
    """From zero, or logarithmic; rates that should stay near one from a round number below the lowest."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = heights[-1] * 1.06 or 1.0
        floor = max(0.0, math.floor(heights[0] * 10 - 1) / 10) if name in _FLOORED else min(0.0, heights[0])
        axes.set_ylim(floor, max(top, 1.01) if name in _FLOORED else top)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)


def _success_axes(axes: Any, lines: Sequence[Line], summary: Summary, *, small: bool = False) -> None:
    """Success from 0 upwards, the same height in every chart, with the threshold as a dotted line."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    curves = [(line.y, line.high, *(y for _, y in (*line.seeds, *line.unfinished))) for line in lines]
    top = max((value for line in curves for part in line for value in part), default=1.0)
    ceiling = 1.02 if top > 0.6 else max(0.1, math.ceil(top * 11) / 10)
    axes.set_ylim(0, ceiling)
    axes.yaxis.set_major_locator(MaxNLocator(3 if small else 6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(4 if small else 8, integer=True, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(short_number))
    axes.margins(x=0.01)
    if summary.ablation.threshold <= ceiling:
        axes.axhline(summary.ablation.threshold, color="#020202", linewidth=0.8, dashes=(1, 2.5), zorder=1)
    if not small:
        axes.set_xlabel("tokens generated" if summary.ablation.axis == "tokens" else "step", labelpad=3)
