"""From the cells of an ablation to the numbers of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .curves import area_under_curve, first_crossing
from .load import EVALUATION, Ablation, Cell
from .statistics import (
    Comparison,
    Interval,
    Verdict,
    bootstrap_interval,
    compare_paired,
    correct,
    mean,
    median,
    verdict,
)

__all__ = ["COLUMNS", "FURTHER", "Measure", "StrategySummary", "Summary", "summarise", "summary_rows"]

COLUMNS = (
    "strategy",
    "seeds",
    "final_success",
    "final_success_low",
    "final_success_high",
    "auc",
    "auc_low",
    "auc_high",
    "auc_minus_uniform",
    "auc_minus_uniform_low",
    "auc_minus_uniform_high",
    "p_adjusted",
    "tokens",
    "seconds",
)
FURTHER = (
    *("pairs", "p_t", "p_sign_flip", "p_sign_flip_adjusted", "detectable"),
    *("forwards", "forward_tokens", "verifier_seconds"),
)


@dataclass(frozen=True)
class Measure:
    """One number for each seed, their mean and its interval."""

    by_seed: Mapping[int, float]
    mean: float
    interval: Interval


@dataclass(frozen=True)
class StrategySummary:
    """What one strategy reached.

    Args:
        name, index: its label, and its place among the colours (0 is the baseline's).
        cells: all its cells, counted or not.
        counted: the cells that enter the statistics.
        final, auc: success at the last evaluation, and mean success over the common range.
        crossings: for each counted seed where the curve first reached the threshold, inf where never.
        tokens, seconds: mean for a run.
        against_baseline: difference of AUC, None for the baseline and where there is no baseline.
        final_against_baseline: the same for the final success.
    """

    name: str
    index: int
    cells: Sequence[Cell]
    counted: Sequence[Cell]
    final: Measure
    auc: Measure
    crossings: Sequence[float]
    tokens: float
    seconds: float
    against_baseline: Comparison | None = None
    final_against_baseline: Comparison | None = None

    @property
    def verdict(self) -> Verdict | None:
        """On the AUC; None where nothing was compared."""
        return verdict(self.against_baseline) if self.against_baseline and self.against_baseline.seeds else None

    @property
    def crossed(self) -> int:
        """How many seeds reached the threshold."""
        return sum(math.isfinite(crossing) for crossing in self.crossings)

    @property
    def median_crossing(self) -> float:
        """Median over seeds; inf where half of them or more never reached the threshold."""
        return median(self.crossings)

    def spent(self, key: str) -> float:
        """Mean over counted runs of the sum of a cost over the run; NaN where none logged it."""
        totals = [total for cell in self.counted if not math.isnan(total := cell.total(key))]
        return mean(totals)

    @property
    def verifier_seconds(self) -> float:
        """Time of verifiers in a run: of every call, else how long the run waited for them."""
        told = self.spent("cost/verifier_seconds")
        return self.spent("cost/seconds_verify") if math.isnan(told) else told

    def told(self, key: str) -> str:
        """A text of the first ``run.json`` that there is, or nothing."""
        return str(self._about.get(key) or "")

    @property
    def signals(self) -> list[str]:
        """The signals that it needs, as ``run.json`` names them."""
        value = self._about.get("signals")
        return [str(signal) for signal in value] if isinstance(value, list) else []

    @property
    def _about(self) -> Mapping[str, object]:
        return next((cell.about for cell in self.cells if cell.about), {})


@dataclass(frozen=True)
class Summary:
    """All strategies, and the range of the budget's axis (low, high) over which the AUC was taken."""

    ablation: Ablation
    low: float
    high: float
    strategies: Sequence[StrategySummary]

    @property
    def baseline(self) -> StrategySummary | None:
        return next((s for s in self.strategies if s.name == self.ablation.baseline), None)

    @property
    def others(self) -> list[StrategySummary]:
        """All but the baseline, in the order of the plan."""
        return [s for s in self.strategies if s.name != self.ablation.baseline]

    def named(self, name: str) -> StrategySummary | None:
        return next((s for s in self.strategies if s.name == name), None)


def summarise(ablation: Ablation) -> Summary:
    """Every strategy by itself and against the baseline; Holm's family is the strategies compared."""
    low, high = common_range([cell for cell in ablation.cells if cell.counts], ablation.axis)
    others = [name for name in ablation.strategies if name != ablation.baseline]
    order = {name: index for index, name in enumerate([ablation.baseline, *others])}
    alone = {name: _alone(ablation, name, order[name], low, high) for name in ablation.strategies}
    if ablation.baseline not in alone:
        return Summary(ablation, low, high, list(alone.values()))
    base = alone[ablation.baseline]
    auc = correct({n: compare_paired(alone[n].auc.by_seed, base.auc.by_seed) for n in others})
    final = correct({n: compare_paired(alone[n].final.by_seed, base.final.by_seed) for n in others})
    compared = [
        StrategySummary(**{**vars(s), "against_baseline": auc.get(n), "final_against_baseline": final.get(n)})
        for n, s in alone.items()
    ]
    return Summary(ablation, low, high, compared)


def common_range(cells: Sequence[Cell], axis: str) -> tuple[float, float]:
    """Largest range of ``axis`` over which every cell was evaluated; NaNs where there are no cells."""
    positions = [cell.series(EVALUATION, axis)[0] for cell in cells]
    if not positions or not all(positions):
        return math.nan, math.nan
    return max(p[0] for p in positions), min(p[-1] for p in positions)


def measure(by_seed: Mapping[int, float]) -> Measure:
    """Mean over the seeds that have a number, with its interval."""
    known = {seed: value for seed, value in by_seed.items() if not math.isnan(value)}
    values = list(known.values())
    return Measure(known, mean(values), bootstrap_interval(values))


def summary_rows(summary: Summary) -> list[dict[str, str | float | None]]:
    """Rows of ``summary.csv``: :data:`COLUMNS`, then :data:`FURTHER`; None where a number does not exist."""
    rows = []
    for s in summary.strategies:
        versus = s.against_baseline
        numbers = (
            *(s.final.mean, *s.final.interval, s.auc.mean, *s.auc.interval),
            *((versus.mean, *versus.interval, versus.p_adjusted) if versus else (math.nan,) * 4),
            *(s.tokens, s.seconds),
            len(versus.seeds) if versus else math.nan,
            *((versus.p_t, versus.p_sign_flip, versus.p_sign_flip_adjusted) if versus else (math.nan,) * 3),
            versus.detectable if versus else math.nan,
            *(s.spent(key) for key in ("cost/forwards", "cost/forward_tokens")),
            s.verifier_seconds,
        )
        row = [s.name, len(s.counted), *(None if math.isnan(x) else x for x in numbers)]
        rows.append(dict(zip((*COLUMNS, *FURTHER), row, strict=True)))
    return rows


def _alone(ablation: Ablation, name: str, index: int, low: float, high: float) -> StrategySummary:
    counted = ablation.counted(name)
    curves = {cell.seed: cell.series(EVALUATION, ablation.axis) for cell in counted}
    return StrategySummary(
        name=name,
        index=index,
        cells=ablation.of(name),
        counted=counted,
        final=measure({seed: values[-1] if values else math.nan for seed, (_, values) in curves.items()}),
        auc=measure({seed: area_under_curve(x, y, low, high) for seed, (x, y) in curves.items()}),
        crossings=[first_crossing(x, y, ablation.threshold) for x, y in curves.values()],
        tokens=mean([cell.last("tokens") for cell in counted]),
        seconds=mean([cell.last("seconds") for cell in counted]),
    )
