"""From labelled solutions and predicted probabilities to every number of the report. Baselines always come along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...prm.baselines import baseline_predictions
from ...prm.best_of_n import BestOfN
from ...prm.intervals import (
    RESAMPLES,
    Interval,
    Statistic,
    bootstrap_samples,
    percentile_interval,
    step_statistic,
)
from ...prm.metrics import (
    MEASURES,
    Predictions,
    by_position,
    flatten_steps,
    min_at_last_rate,
    min_at_last_step,
    step_measures,
)
from ...prm.process_bench import (
    cross_fitted_first_errors,
    first_error_label,
    first_error_prediction,
    first_error_scores,
    first_error_statistic,
    mean_f1,
    scores_by_subset,
    tune_threshold,
)
from ...prm.reliability import BINS, calibration_bins
from ...prm.steps import StepExample
from ...verifiers import InputError
from .evaluation import COMPARED, Counts, Difference, Evaluation, FirstErrors, Predictor

__all__ = ["evaluate_steps"]


class _Settings(NamedTuple):
    threshold: float
    tune_on: str | None
    bins: int
    resamples: int
    seed: int


@dataclass(frozen=True)
class _FirstErrorData:
    """The solutions whose first error is known: rows in the examples, labels, subsets, problems by name and number."""

    rows: Sequence[int]
    labels: Sequence[int]
    subsets: Sequence[str]
    problems: Sequence[str]
    numbers: np.ndarray


def evaluate_steps(
    examples: Sequence[StepExample],
    predictions: Mapping[str, Predictions],
    *,
    baselines: Mapping[str, Predictions] | None = None,
    train: Sequence[StepExample] | None = None,
    threshold: float = 0.5,
    tune_on: str | None = None,
    subset_key: str = "subset",
    bins: int = BINS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    best_of_n: BestOfN | None = None,
    title: str = "",
    command: str = "",
) -> Evaluation:
    """Measure predictors of step correctness, and the baselines with them.

    Args:
        examples: labelled solutions; steps labelled None enter no step measure.
        predictions: model name -> for each example the probability of "right" for each step, None where not scored.
        baselines: their predictions where they are known already; computed here where left out.
        train: what the models were trained on, to fit the baselines on the same; without it the baselines are
            cross-validated on ``examples``, grouped by problem.
        threshold: a step is called wrong below it.
        tune_on: subset on which the first-error threshold is tuned as well; without it, five folds grouped by problem
            take turns, each judged with the threshold of the others.
        subset_key: column of ``metadata`` that holds a solution's subset.
        bins: of the calibration errors.
        resamples, seed: of the bootstrap over problems.
        best_of_n: figures of :func:`~apportion.prm.best_of_n.measure_best_of_n`, to be shown too.
        title, command: shown in the report.

    Raises:
        InputError: predictions do not fit the examples, names clash, or ``tune_on`` is no subset.
    """
    known = dict(baselines) if baselines is not None else baseline_predictions(examples, train=train)
    if clash := sorted(set(known) & set(predictions)):
        raise InputError(f"predictions {clash[0]!r}: a baseline has this name; give the model another")
    subsets = [str(example.metadata.get(subset_key, "all")) for example in examples]
    if tune_on is not None and tune_on not in subsets:
        raise InputError(f"tune_on={tune_on}: no such subset; there are {', '.join(dict.fromkeys(subsets))}")
    data = _first_error_data(examples, subsets)
    columns = {**predictions, **known}
    settings = _Settings(threshold, tune_on, bins, resamples, seed)
    predictors, samples = [], {}
    for place, (name, scores) in enumerate(columns.items()):
        index = _index(place, len(predictions))
        predictor, samples[name] = _measure(name, index, name in known, examples, scores, data, settings)
        predictors.append(predictor)
    models, others = list(predictions), list(known)
    pairs = [(m, other) for m in models for other in ([models[0]] if m != models[0] else []) + others]
    found = {predictor.name: predictor for predictor in predictors}
    return Evaluation(
        title=title,
        command=command,
        examples=examples,
        subsets=subsets,
        predictors=predictors,
        differences=[_difference(found[a], found[b], samples) for a, b in pairs],
        counts=_counts(examples, data),
        fitted=_fitted(baselines is not None, train),
        threshold=threshold,
        tune_on=tune_on,
        bins=bins,
        resamples=resamples,
        seed=seed,
        chance_at_last=_chance_at_last(examples),
        best_of_n=best_of_n,
    )


def _fitted(given: bool, train: Sequence[StepExample] | None) -> str:
    if given:
        return "were given with the scores"
    if train is not None:
        return f"were fitted on {len(train)} training solutions"
    return "are cross-validated on these solutions in five folds grouped by problem"


def _index(place: int, models: int) -> int:
    """Colours: the first baseline has the grey of 0, the models follow, then the other baselines."""
    if place < models:
        return place + 1
    return 0 if place == models else place


def _measure(
    name: str,
    index: int,
    is_baseline: bool,
    examples: Sequence[StepExample],
    scores: Predictions,
    data: _FirstErrorData,
    settings: _Settings,
) -> tuple[Predictor, np.ndarray]:
    """One predictor, and the bootstrap samples (R, M) of :data:`COMPARED`."""
    threshold, tune_on, bins, resamples, seed = settings
    steps = flatten_steps(examples, scores, name=name)
    judged = [scores[row] for row in data.rows]
    fixed = [first_error_prediction(row, threshold) for row in judged]
    tuned, thresholds = _tuned(judged, data, tune_on)
    count = steps.problem_count
    statistics = [
        step_statistic(steps, threshold=threshold, bins=bins),
        first_error_statistic(data.labels, fixed, data.subsets, data.numbers, count),
        first_error_statistic(data.labels, tuned, data.subsets, data.numbers, count),
        _at_last_statistic(examples, scores),
    ]
    samples = bootstrap_samples(_joined(statistics), count, resamples=resamples, seed=seed)
    intervals = [percentile_interval(samples[:, column], count) for column in range(samples.shape[1])]
    first, each = len(MEASURES), len(set(data.subsets)) + 1
    predictor = Predictor(
        name=name,
        index=index,
        is_baseline=is_baseline,
        predictions=scores,
        steps=steps,
        measures=step_measures(steps, threshold=threshold, bins=bins),
        intervals=dict(zip(MEASURES, intervals, strict=False)),
        positions=by_position(steps, threshold=threshold),
        bins=calibration_bins(steps.labels, steps.probabilities, "width", bins),
        mass_bins=calibration_bins(steps.labels, steps.probabilities, "mass", bins),
        min_at_last=min_at_last_rate(scores)[0],
        min_at_last_interval=intervals[-1],
        fixed=_first_errors(data, fixed, (threshold,), intervals[first : first + each]),
        tuned=_first_errors(data, tuned, thresholds, intervals[first + each : first + 2 * each]),
    )
    compared = [*range(first), first + each - 1, first + 2 * each - 1]
    return predictor, samples[:, compared]


def _first_error_data(examples: Sequence[StepExample], subsets: Sequence[str]) -> _FirstErrorData:
    labels = [first_error_label(example.labels) if example.steps else None for example in examples]
    rows = [row for row, label in enumerate(labels) if label is not None]
    numbers = {problem: n for n, problem in enumerate(dict.fromkeys(example.problem_id for example in examples))}
    problems = [examples[row].problem_id for row in rows]
    return _FirstErrorData(
        rows,
        [label for label in labels if label is not None],
        [subsets[row] for row in rows],
        problems,
        np.array([numbers[problem] for problem in problems], dtype=np.int64),
    )


def _tuned(
    judged: Sequence[Sequence[float | None]], data: _FirstErrorData, tune_on: str | None
) -> tuple[list[int], tuple[float, ...]]:
    """Predictions at a tuned threshold, and that threshold, or one for each fold."""
    if tune_on is None:
        predictions, thresholds = cross_fitted_first_errors(data.labels, judged, data.problems)
        return predictions, tuple(thresholds)
    chosen = [k for k, subset in enumerate(data.subsets) if subset == tune_on]
    value = tune_threshold([data.labels[k] for k in chosen], [judged[k] for k in chosen]).value
    return [first_error_prediction(row, value) for row in judged], (value,)


def _first_errors(
    data: _FirstErrorData, predictions: Sequence[int], thresholds: tuple[float, ...], intervals: Sequence[Interval]
) -> FirstErrors:
    scores = scores_by_subset(data.labels, predictions, data.subsets)
    return FirstErrors(
        thresholds,
        tuple(predictions),
        first_error_scores(data.labels, predictions),
        scores,
        dict(zip(scores, intervals, strict=False)),
        mean_f1(scores),
        intervals[-1],
    )


def _at_last_statistic(examples: Sequence[StepExample], scores: Predictions) -> Statistic:
    numbers = {problem: n for n, problem in enumerate(dict.fromkeys(example.problem_id for example in examples))}
    sums = np.zeros((len(numbers), 2))
    for example, row in zip(examples, scores, strict=True):
        if (at_last := min_at_last_step(row)) is not None:
            sums[numbers[example.problem_id]] += (at_last, 1)

    def statistic(weights: np.ndarray) -> np.ndarray:
        last, told = weights @ sums
        return np.array([last / told if told else math.nan])

    return statistic


def _joined(statistics: Sequence[Statistic]) -> Statistic:
    return lambda weights: np.concatenate([statistic(weights) for statistic in statistics])


def _difference(one: Predictor, other: Predictor, samples: Mapping[str, np.ndarray]) -> Difference:
    gaps, count = samples[one.name] - samples[other.name], one.steps.problem_count
    values = {}
    for column, measure in enumerate(COMPARED):
        values[measure] = (_value(one, measure) - _value(other, measure), percentile_interval(gaps[:, column], count))
    return Difference(one.name, other.name, values)


def _value(predictor: Predictor, measure: str) -> float:
    if measure in predictor.measures:
        return predictor.measures[measure].value
    return (predictor.tuned if measure.endswith("_tuned") else predictor.fixed).mean_f1


def _counts(examples: Sequence[StepExample], data: _FirstErrorData) -> Counts:
    labels = [label for example in examples for label in example.labels if label is not None]
    return Counts(
        problems=len({example.problem_id for example in examples}),
        solutions=len(examples),
        steps=sum(len(example.steps) for example in examples),
        labelled=len(labels),
        wrong=sum(label < 0.5 for label in labels),
        soft=sum(0 < label < 1 for label in labels),
        first_errors=len(data.rows),
        erroneous=sum(label != -1 for label in data.labels),
    )


def _chance_at_last(examples: Sequence[StepExample]) -> float:
    shares = [1 / len(example.steps) for example in examples if len(example.steps) > 1]
    return sum(shares) / len(shares) if shares else math.nan
