"""What runs cost, all of it charged, and success at equal cost. Each axis is defined in docs/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from .curves import Curve
from .load import EVALUATION, Ablation, Cell
from .statistics import Comparison, compare_paired, correct
from .summary import Measure, measure

__all__ = ["AXES", "COLUMNS", "AtCost", "Axis", "EqualCost", "axes", "cost_curve", "equal_cost", "equal_cost_rows"]

COLUMNS = (
    *("axis", "cost", "strategy", "seeds", "success", "success_low", "success_high"),
    *("minus_uniform", "minus_uniform_low", "minus_uniform_high"),
    *("p_t", "p_adjusted", "p_sign_flip", "p_sign_flip_adjusted"),
)


@dataclass(frozen=True)
class Axis:
    """One way to charge for a run.

    Args:
        name: of the axis in files.
        heading, unit: in words.
        keys: metrics that are added up over the lines of a run, those that it has.
    """

    name: str
    heading: str
    unit: str
    keys: tuple[str, ...]


TRAINING = ("sample", "verify", "reference", "evidence", "credit", "update")
AXES = (
    Axis("tokens", "Generated tokens", "tokens", ("cost/tokens",)),
    Axis("forward_tokens", "Tokens through models", "tokens", ("cost/forward_tokens",)),
    Axis("forwards", "Forward calls", "calls", ("cost/forwards",)),
    Axis("seconds", "Training time", "seconds", tuple(f"cost/seconds_{phase}" for phase in TRAINING)),
)


@dataclass(frozen=True)
class AtCost:
    """One strategy at the common cost: success, and its difference from the baseline's, paired by seed."""

    strategy: str
    success: Measure
    against_baseline: Comparison | None = None


@dataclass(frozen=True)
class EqualCost:
    """All strategies at the largest cost that every counted run reached."""

    axis: Axis
    cost: float
    rows: Sequence[AtCost]

    def of(self, strategy: str) -> AtCost:
        """The row of a strategy."""
        return next(row for row in self.rows if row.strategy == strategy)


def axes(cells: Sequence[Cell]) -> list[Axis]:
    """Those that every counted run logged. Tokens through models say more than calls, which differ in size."""
    counted = [cell for cell in cells if cell.counts]
    found = [axis for axis in AXES if counted and all(_is_logged(cell, axis) for cell in counted)]
    finer = any(axis.name == "forward_tokens" for axis in found)
    return [axis for axis in found if not (finer and axis.name == "forwards")]


def cost_curve(cell: Cell, axis: Axis) -> Curve:
    """Held-out success against what the run had cost by then; what a line adds is charged before its evaluation."""
    spent = list(accumulate(sum(row.get(key, 0.0) for key in axis.keys) for row in cell.metrics))
    evaluated = [index for index, row in enumerate(cell.metrics) if EVALUATION in row]
    return [spent[index] for index in evaluated], [cell.metrics[index][EVALUATION] for index in evaluated]


def equal_cost(ablation: Ablation) -> list[EqualCost]:
    """For each axis success at equal cost, linear between evaluations; Holm's family is the strategies of an axis."""
    return [at for axis in axes(ablation.cells) if (at := _at_equal_cost(ablation, axis)) is not None]


def equal_cost_rows(found: Sequence[EqualCost]) -> list[dict[str, Any]]:
    """Rows of ``equal_cost.csv``; None where a number does not exist."""
    rows = []
    for at in found:
        for row in at.rows:
            c = row.against_baseline
            numbers = (
                *(row.success.mean, *row.success.interval),
                *(
                    (c.mean, *c.interval, c.p_t, c.p_adjusted, c.p_sign_flip, c.p_sign_flip_adjusted)
                    if c
                    else [math.nan] * 7
                ),
            )
            values = [at.axis.name, at.cost, row.strategy, len(row.success.by_seed)]
            values += [None if math.isnan(number) else number for number in numbers]
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _is_logged(cell: Cell, axis: Axis) -> bool:
    return any(key in row for row in cell.metrics for key in axis.keys)


def _at_equal_cost(ablation: Ablation, axis: Axis) -> EqualCost | None:
    curves = {
        name: {cell.seed: cost_curve(cell, axis) for cell in ablation.counted(name)} for name in ablation.strategies
    }
    ends = [x[-1] for own in curves.values() for x, _ in own.values()]
    if not ends or not min(ends) > 0:
        return None
    cost = min(ends)
    success = {
        name: measure({seed: float(np.interp(cost, x, y)) for seed, (x, y) in own.items()})
        for name, own in curves.items()
    }
    base = success.get(ablation.baseline)
    versus = (
        correct({n: compare_paired(own.by_seed, base.by_seed) for n, own in success.items() if n != ablation.baseline})
        if base
        else {}
    )
    return EqualCost(axis, cost, [AtCost(name, own, versus.get(name)) for name, own in success.items()])
