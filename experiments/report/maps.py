"""The map of a stability sweep as the page draws it, and what may be said of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..settings import grid, short_names
from .load import Ablation, Cell
from .notes import listed
from .outcomes import ALARMS, OUTCOMES
from .stability import Point, Region, Stability, setting_text

__all__ = [
    "AlarmRow",
    "Field",
    "Map",
    "Row",
    "alarm_table",
    "draw_map",
    "remarks",
    "rule_sentence",
    "stability_headline",
]


@dataclass(frozen=True)
class Field:
    """One setting of a map: shares of its seeds by how they ended, in percent, and its numbers in words."""

    segments: Sequence[tuple[str, float, float]]
    success: float
    count: str
    title: str
    best: bool
    reference: bool


@dataclass(frozen=True)
class Row:
    """A row of a map: its heads, each with the number of rows that it spans (0: an earlier one spans this row)."""

    heads: Sequence[tuple[str, int]]
    fields: Sequence[Field]


@dataclass(frozen=True)
class Map:
    """A map of one strategy: the option with the most values goes across, the others down."""

    region: Region
    across: str
    columns: Sequence[str]
    down: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class AlarmRow:
    """For one strategy and each alarm: in how many runs it was on at the end, and ever."""

    strategy: str
    runs: int
    counts: Sequence[tuple[int, int]]


def draw_map(region: Region, ablation: Ablation) -> Map:
    """The fields of a region in rows and columns."""
    settings, short = ablation.settings, short_names(ablation.settings)
    across = max(settings, key=lambda key: len(settings[key]))
    down = [key for key in settings if key != across]
    outer = grid({key: settings[key] for key in down})
    rows = [
        Row(
            _heads(outer, place, down),
            [_field(region.at({**part, across: value}), region, ablation) for value in settings[across]],
        )
        for place, part in enumerate(outer)
    ]
    return Map(region, short[across], [str(value) for value in settings[across]], [short[key] for key in down], rows)


def stability_headline(found: Stability, ceilings: Sequence[str]) -> str:
    """The verdict on the areas; no strategy is named where the interval holds zero."""
    base = found.baseline
    others = [region for region in found.regions if region is not base]
    if base is None or not others:
        return "Where training holds, for one strategy; nothing to compare."
    if all(len(region.against_baseline.seeds) < 2 for region in others if region.against_baseline):
        return f"No comparison of where training holds: two seeds or more are needed beside {base.strategy}."
    rules, parts = [region for region in others if region.strategy not in ceilings], []
    for verdict, phrase in (("better", "at more"), ("worse", "at fewer")):
        names = [region.strategy for region in rules if region.verdict == verdict]
        if names:
            parts.append(
                f"{listed(names)} {'trains' if len(names) == 1 else 'train'} {phrase} settings than {base.strategy}."
            )
    undecided = [region.strategy for region in rules if region.verdict == "no difference shown"]
    if undecided:
        parts.append(f"For {listed(undecided)} no difference in where training holds is shown.")
    return " ".join(parts) or f"No strategy but ceilings is compared with {base.strategy}."


def rule_sentence(ablation: Ablation) -> str:
    """The rule by which runs are sorted, with its numbers."""
    rule = ablation.rule
    alarms = f", or an alarm is on at the end ({listed([ALARMS[name] for name in rule.alarms])})" if rule.alarms else ""
    return (
        f"A run collapses where its last success is under {rule.of_best:.0%} of its own best or more than "
        f"{rule.below_start:g} under its start{alarms}, or where it diverged. It trains where it does not collapse and "
        f"ends at least {rule.gain:g} above its start; otherwise it stalls."
    )


def remarks(found: Stability) -> list[str]:
    """What must be known to read the areas."""
    ablation = found.ablation
    said = [
        "An area is a share of the points of this grid: other values would give another. Every point counts the same."
    ]
    said += [_spacing(key, values) for key, values in ablation.settings.items() if key.rpartition(".")[2] == "lr"]
    if ablation.rollouts:
        said.append(
            f"The number of prompts follows the group size, so that each rollout batch has {ablation.rollouts} answers "
            "at every setting; compute is equal, the number of problems seen is not."
        )
    if found.unknown:
        said.append(
            f"{found.unknown} of {len(ablation.grid)} runs are not over or failed by an accident; they are left out of "
            "every share, and strategies are compared over the settings that both know."
        )
    if any(r.area.interval.known and r.area.interval.low == r.area.interval.high for r in found.regions):
        said.append(
            "An interval without width says that all seeds ended alike at every setting, not that nothing varies."
        )
    if len(ablation.seeds) < 5:
        said.append(
            f"{len(ablation.seeds)} seeds: a setting at which all of them train may fail for another; with three, a "
            "share of 3 in 3 has the interval 44% to 100%."
        )
    return [text for text in said if text]


def alarm_table(cells: Sequence[Cell], strategies: Sequence[str]) -> list[AlarmRow]:
    """Counts of :data:`ALARMS` over all runs that logged any, whatever became of them; empty where none did."""
    rows = []
    for strategy in strategies:
        logged = [c for c in cells if c.strategy == strategy and any(_alarms(row) for row in c.metrics)]
        on = [[{n for n in ALARMS if row.get(f"alarm/{n}") == 1.0} for row in cell.metrics] for cell in logged]
        counts = [(sum(n in run[-1] for run in on), sum(any(n in row for row in run) for run in on)) for n in ALARMS]
        rows.append(AlarmRow(strategy, len(logged), counts))
    return rows if any(row.runs for row in rows) else []


def _alarms(row: Mapping[str, float]) -> bool:
    return any(f"alarm/{name}" in row for name in ALARMS)


def _spacing(key: str, values: Sequence[Any]) -> str:
    """Whether learning rates are evenly spaced on a log scale, on which they should be."""
    rates = sorted(value for value in values if isinstance(value, int | float) and value > 0)
    steps = [after / before for before, after in pairwise(rates)]
    if not steps:
        return ""
    if max(steps) <= 1.3 * min(steps):
        return f"{key} lies on a log scale, each value about {math.prod(steps) ** (1 / len(steps)):.2g} times the last."
    return (
        f"{key} is not evenly spaced on a log scale (steps of {min(steps):.2g} to {max(steps):.2g} times): the crowded "
        "part of it weighs more."
    )


def _heads(outer: Sequence[Mapping[str, Any]], place: int, down: Sequence[str]) -> list[tuple[str, int]]:
    """A value that stays the same for several rows is written once."""
    heads = []
    for depth, key in enumerate(down):
        upper = down[: depth + 1]
        same = [all(part[k] == outer[place][k] for k in upper) for part in outer]
        first = same.index(True)
        heads.append((str(outer[place][key]), sum(same) if first == place else 0))
    return heads


def _field(point: Point, region: Region, ablation: Ablation) -> Field:
    segments, at = [], 0.0
    for kind in OUTCOMES:
        width = 100 * point.count(kind) / max(1, len(point.outcomes))
        if width:
            segments.append((kind, at, at + width))
        at += width
    seeds = "; ".join(f"seed {cell.seed} {one.kind}: {one.why}" for cell, one in zip(point.cells, point.outcomes))
    best, reference = point is region.best, point.setting == ablation.reference
    marks = "".join(f" ({text})" for text, on in (("best", best), ("compared above", reference)) if on)
    return Field(
        segments,
        point.final.mean,
        f"{point.count('trains')}/{point.known}" if point.known else "–",
        f"{region.strategy}, {setting_text(point.setting)}{marks}: {seeds}",
        best,
        reference,
    )
