"""From the grid of a stability sweep to where each strategy trains: outcomes, areas, best points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..settings import grid, short_names
from .load import EVALUATION, Ablation, Cell
from .outcomes import ALARMS, OUTCOMES, CollapseRule, Kind, Outcome, outcome
from .statistics import Comparison, Verdict, compare_paired, correct, mean, share_interval, verdict
from .summary import Measure, measure

__all__ = ["COLUMNS", "Point", "Region", "Stability", "area_columns", "setting_text", "stability", "stability_rows"]

COLUMNS = (
    *("seeds", "trains", "stalls", "collapses", "unknown", "stable_share", "stable_low", "stable_high"),
    *("final_success", "final_success_low", "final_success_high", "alarms_at_end", "reasons"),
)


@dataclass(frozen=True)
class Point:
    """One strategy at one setting.

    Args:
        setting: the values of the options that are varied.
        cells, outcomes: one for each seed.
        final: success at the last evaluation, over the known seeds; of one that diverged, at the last that it had.
    """

    setting: Mapping[str, Any]
    cells: Sequence[Cell]
    outcomes: Sequence[Outcome]
    final: Measure

    def count(self, kind: Kind) -> int:
        """How many seeds ended so."""
        return sum(one.kind == kind for one in self.outcomes)

    @property
    def known(self) -> int:
        """How many seeds are over."""
        return len(self.outcomes) - self.count("unknown")

    @property
    def share(self) -> float:
        """Share of the known seeds that train; NaN of none."""
        return self.count("trains") / self.known if self.known else math.nan

    @property
    def is_stable(self) -> bool:
        """Every known seed trains."""
        return self.known > 0 and self.count("trains") == self.known


@dataclass(frozen=True)
class Region:
    """Where one strategy trains.

    Args:
        strategy, index: its label, and its place among the colours.
        points: one for each setting, in the order of the grid.
        area: share of the grid in which a seed trains, by seed, with mean and interval.
        collapsed: the same of the share that collapses.
        best: the point of highest mean final success, or None before any run finished.
        tuned: final success of each seed at the point that is best for the *other* seeds.
        stable_success: mean final success over the points at which every seed trains; NaN without any.
        against_baseline: difference of the areas, paired by seed; None for the baseline.
        tuned_against_baseline: the same of ``tuned``.
    """

    strategy: str
    index: int
    points: Sequence[Point]
    area: Measure
    collapsed: Measure
    best: Point | None
    tuned: Measure
    stable_success: float
    against_baseline: Comparison | None = None
    tuned_against_baseline: Comparison | None = None

    @property
    def name(self) -> str:
        return self.strategy

    @property
    def stable(self) -> int:
        """Number of settings at which every seed trains."""
        return sum(point.is_stable for point in self.points)

    @property
    def verdict(self) -> Verdict | None:
        """On the area; None where nothing was compared."""
        return verdict(self.against_baseline) if self.against_baseline and self.against_baseline.seeds else None

    def at(self, setting: Mapping[str, Any]) -> Point:
        """The point of a setting."""
        return next(point for point in self.points if point.setting == setting)


@dataclass(frozen=True)
class Stability:
    """All regions of an ablation. ``unknown`` counts the runs that are not over or failed by an accident."""

    ablation: Ablation
    regions: Sequence[Region]
    unknown: int

    @property
    def baseline(self) -> Region | None:
        return next((r for r in self.regions if r.strategy == self.ablation.baseline), None)


def stability(ablation: Ablation) -> Stability | None:
    """Where each strategy trains, by itself and against the baseline; None where no settings were varied."""
    if not ablation.settings:
        return None
    others = [name for name in ablation.strategies if name != ablation.baseline]
    order = {name: index for index, name in enumerate([ablation.baseline, *others])}
    alone = {name: _alone(ablation, name, order[name]) for name in ablation.strategies}
    unknown = sum(point.count("unknown") for region in alone.values() for point in region.points)
    base = alone.get(ablation.baseline)
    if base is None:
        return Stability(ablation, list(alone.values()), unknown)
    areas = correct({n: _compare_areas(alone[n].points, base.points) for n in others})
    tuned = correct({n: compare_paired(alone[n].tuned.by_seed, base.tuned.by_seed) for n in others})
    regions = [
        replace(region, against_baseline=areas.get(name), tuned_against_baseline=tuned.get(name))
        for name, region in alone.items()
    ]
    return Stability(ablation, regions, unknown)


def setting_text(setting: Mapping[str, Any]) -> str:
    """A setting in words.

    >>> setting_text({"optim.lr": 3e-4, "rollout.group_size": 8})
    'lr 0.0003, group_size 8'
    """
    short = short_names(setting)
    return ", ".join(f"{short[key]} {value}" for key, value in setting.items())


def stability_rows(found: Stability) -> list[dict[str, Any]]:
    """Rows of ``stability.csv``: a strategy at a setting; None where a number does not exist."""
    rows = []
    for region in found.regions:
        for point in region.points:
            low, high = share_interval(point.count("trains"), point.known)
            numbers = (point.share, low, high, point.final.mean, *point.final.interval)
            on = Counter(alarm for cell in point.cells for alarm in _on_at_end(cell))
            reasons = "; ".join(f"seed {c.seed}: {one.kind}, {one.why}" for c, one in zip(point.cells, point.outcomes))
            values = [
                *(len(point.cells), *(point.count(kind) for kind in OUTCOMES)),
                *(None if math.isnan(number) else number for number in numbers),
                *(" ".join(f"{alarm}:{count}" for alarm, count in on.items()), reasons),
            ]
            rows.append({"strategy": region.strategy, **point.setting, **dict(zip(COLUMNS, values, strict=True))})
    return rows


def area_columns(region: Region) -> dict[str, Any]:
    """What ``summary.csv`` says of a region; None where a number does not exist."""
    versus, best = region.against_baseline, region.best
    numbers = {
        "stable_area": region.area.mean,
        "stable_area_low": region.area.interval.low,
        "stable_area_high": region.area.interval.high,
        "stable_area_minus_uniform": versus.mean if versus else math.nan,
        "stable_area_minus_uniform_low": versus.interval.low if versus else math.nan,
        "stable_area_minus_uniform_high": versus.interval.high if versus else math.nan,
        "stable_area_p_adjusted": versus.p_adjusted if versus else math.nan,
        "collapsed_area": region.collapsed.mean,
        "stable_success": region.stable_success,
        "tuned_success": region.tuned.mean,
        "tuned_success_low": region.tuned.interval.low,
        "tuned_success_high": region.tuned.interval.high,
        "best_success": best.final.mean if best else math.nan,
    }
    told = {key: None if math.isnan(value) else value for key, value in numbers.items()}
    counts = {"settings": len(region.points), "stable_settings": region.stable}
    return {**counts, **told, "best_setting": setting_text(best.setting) if best else ""}


def _on_at_end(cell: Cell) -> list[str]:
    last = cell.metrics[-1] if cell.metrics else {}
    return [name for name in ALARMS if last.get(f"alarm/{name}") == 1.0]


def _alone(ablation: Ablation, strategy: str, index: int) -> Region:
    cells = [cell for cell in ablation.grid if cell.strategy == strategy]
    points = [
        _point(setting, [cell for cell in cells if cell.setting == setting], ablation.rule)
        for setting in grid(ablation.settings)
    ]
    finished = [point for point in points if not math.isnan(point.final.mean)]
    steady = [point.final.mean for point in points if point.is_stable]
    return Region(
        strategy=strategy,
        index=index,
        points=points,
        area=measure(shares(points, "trains")),
        collapsed=measure(shares(points, "collapses")),
        best=max(finished, key=lambda point: point.final.mean, default=None),
        tuned=measure(tuned(points)),
        stable_success=mean(steady),
    )


def _point(setting: Mapping[str, Any], cells: Sequence[Cell], rule: CollapseRule) -> Point:
    outcomes = [outcome(cell, rule) for cell in cells]
    final = {cell.seed: cell.last(EVALUATION) for cell, one in zip(cells, outcomes) if one.kind != "unknown"}
    return Point(setting, cells, outcomes, measure(final))


def shares(points: Sequence[Point], kind: Kind) -> dict[int, float]:
    """For each seed the share of the settings, of those that are known for it, that ended so."""
    ended: dict[int, list[bool]] = {}
    for point in points:
        for cell, one in zip(point.cells, point.outcomes):
            if one.kind != "unknown":
                ended.setdefault(cell.seed, []).append(one.kind == kind)
    return {seed: mean([float(one) for one in kinds]) for seed, kinds in ended.items()}


def _compare_areas(points: Sequence[Point], base: Sequence[Point]) -> Comparison:
    """Areas over the settings that both know, seed by seed."""
    values: dict[int, list[tuple[float, float]]] = {}
    for mine, theirs in zip(points, base):
        others = {cell.seed: one.kind for cell, one in zip(theirs.cells, theirs.outcomes)}
        for cell, one in zip(mine.cells, mine.outcomes):
            both = (one.kind, others[cell.seed])
            if "unknown" not in both:
                values.setdefault(cell.seed, []).append((float(both[0] == "trains"), float(both[1] == "trains")))
    first, second = ({seed: mean([pair[i] for pair in pairs]) for seed, pairs in values.items()} for i in (0, 1))
    return compare_paired(first, second)


def tuned(points: Sequence[Point]) -> dict[int, float]:
    """For each seed its final success at the setting with the best mean over the *other* seeds.

    The best of many means is too high by luck; the seed that is left out had no part in the choice. Without another
    seed there is no choice and no number.
    """
    final = [point.final.by_seed for point in points]
    found = {}
    for seed in dict.fromkeys(seed for table in final for seed in table):
        rest = [mean([value for other, value in table.items() if other != seed]) for table in final]
        able = [index for index, value in enumerate(rest) if not math.isnan(value) and seed in final[index]]
        if able:
            found[seed] = final[max(able, key=lambda index: rest[index])][seed]
    return found
