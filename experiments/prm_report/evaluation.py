"""What an evaluation holds: predictors with their measures, their differences, and what they were measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...prm.best_of_n import BestOfN
from ...prm.intervals import Interval
from ...prm.metrics import MEASURES, FlatSteps, Measure, PositionRow, Predictions
from ...prm.process_bench import FirstErrorScore
from ...prm.reliability import Bin
from ...prm.steps import StepExample

__all__ = ["COMPARED", "PRIMARY", "Counts", "Difference", "Evaluation", "FirstErrors", "Predictor"]

PRIMARY = "roc_auc"  # fixed beforehand; the headline rests on it alone
COMPARED = (*MEASURES, "first_error_f1", "first_error_f1_tuned")


@dataclass(frozen=True)
class FirstErrors:
    """ProcessBench's figures of one predictor at one way of choosing the threshold.

    Args:
        thresholds: one, or one for each fold.
        predictions: index of the first step called wrong, or -1, for each solution whose first error is known.
        pooled: of all solutions together, whatever their subset.
        scores, intervals: by subset; the intervals are those of F1.
        mean_f1, mean_interval: unweighted mean of the subsets' F1.
    """

    thresholds: tuple[float, ...]
    predictions: tuple[int, ...]
    pooled: FirstErrorScore
    scores: Mapping[str, FirstErrorScore]
    intervals: Mapping[str, Interval]
    mean_f1: float
    mean_interval: Interval


@dataclass(frozen=True)
class Predictor:
    """One model or baseline and all that was measured of it; ``index`` is its place among the colours."""

    name: str
    index: int
    is_baseline: bool
    predictions: Predictions
    steps: FlatSteps
    measures: Mapping[str, Measure]
    intervals: Mapping[str, Interval]
    positions: Sequence[PositionRow]
    bins: Sequence[Bin]
    mass_bins: Sequence[Bin]
    min_at_last: Measure
    min_at_last_interval: Interval
    fixed: FirstErrors
    tuned: FirstErrors


@dataclass(frozen=True)
class Difference:
    """One predictor minus another, paired by problem: for each of :data:`COMPARED` the difference and its interval."""

    name: str
    other: str
    values: Mapping[str, tuple[float, Interval]]


@dataclass(frozen=True)
class Counts:
    """What was measured on. ``first_errors`` counts solutions whose first error, or whose lack of one, is known."""

    problems: int
    solutions: int
    steps: int
    labelled: int
    wrong: int
    soft: int
    first_errors: int
    erroneous: int


@dataclass(frozen=True)
class Evaluation:
    """Every number of the report, with the data that they came from.

    Args:
        title: what was measured, for people.
        command: the command that would do it again.
        examples: the solutions.
        subsets: the subset of each.
        predictors: models in the order given, then the baselines.
        differences: each model minus each baseline, and each later model minus the first.
        counts: of the data.
        fitted: how the baselines came by their predictions.
        threshold: a step is called wrong below it.
        tune_on: the subset that the other threshold was tuned on; None where folds took turns.
        chance_at_last: min-at-last-step rate by chance, ``mean(1/steps)``.
        best_of_n: None where no candidates were given.
    """

    title: str
    command: str
    examples: Sequence[StepExample]
    subsets: Sequence[str]
    predictors: Sequence[Predictor]
    differences: Sequence[Difference]
    counts: Counts
    fitted: str
    threshold: float
    tune_on: str | None
    bins: int
    resamples: int
    seed: int
    chance_at_last: float
    best_of_n: BestOfN | None

    @property
    def models(self) -> list[Predictor]:
        return [p for p in self.predictors if not p.is_baseline]

    @property
    def baselines(self) -> list[Predictor]:
        return [p for p in self.predictors if p.is_baseline]

    def difference(self, name: str, other: str) -> Difference | None:
        """``name`` minus ``other``, where it was computed."""
        return next((d for d in self.differences if (d.name, d.other) == (name, other)), None)
