"""The sentences of the report. No winner is named whose interval crosses zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..report.notes import listed
from .evaluation import PRIMARY, Evaluation, Predictor

__all__ = ["cautions", "findings", "headline", "verdict"]

FEW_PROBLEMS = 20


def headline(evaluation: Evaluation) -> str:
    """What the primary measure, ROC-AUC, says of the first model against every baseline."""
    if not evaluation.models:
        best = _strongest(evaluation.baselines)
        return (
            f"Baselines only: {_named(best)} for {best.name}."
            if best
            else "Baselines only, and nothing to measure them on."
        )
    return findings(evaluation)[0]


def findings(evaluation: Evaluation) -> list[str]:
    """One sentence for each model, then one for each later model against the first."""
    said = [_against_baselines(evaluation, model) for model in evaluation.models]
    for model in evaluation.models[1:]:
        first = evaluation.models[0]
        word = verdict(evaluation, model.name, first.name)
        between = {
            "better": f"{model.name} is better than {first.name}",
            "worse": f"{model.name} is worse than {first.name}",
            "no difference shown": f"No difference between {model.name} and {first.name} is shown",
        }
        said.append(f"{between[word]}: {_named(model)} against {_value(first)}.")
    return said


def verdict(evaluation: Evaluation, name: str, other: str) -> str:
    """ "better" or "worse" where the interval of the paired difference in ROC-AUC leaves out zero."""
    difference = evaluation.difference(name, other)
    gap, interval = difference.values[PRIMARY] if difference else (math.nan, None)
    if interval is None or not interval.known or not interval.excludes_zero:
        return "no difference shown"
    return "better" if gap > 0 else "worse"


def cautions(evaluation: Evaluation) -> list[str]:
    """What a reader must know before believing the numbers."""
    e, said = evaluation, []
    if e.counts.problems < FEW_PROBLEMS:
        said.append(
            f"Only {e.counts.problems} {_plural(e.counts.problems, 'problem')}: intervals over so few are rough."
            if e.counts.problems > 1
            else "Only one problem: no intervals, and no baseline that does without the problem it judges."
        )
    for p in e.predictors:
        if p.is_baseline and not len(p.steps.labels):
            said.append(f"{p.name} could not be computed: there was nothing to fit it on.")
        elif p.steps.unscored:
            said.append(
                f"{p.name} gave no score to {p.steps.unscored:,} labelled {_plural(p.steps.unscored, 'step')}: left "
                "out of its step measures, and taken for not called wrong where the first error is sought."
            )
    said += _undefined(e)
    if e.counts.soft:
        said.append(
            f"{e.counts.soft:,} of {e.counts.labelled:,} labels lie between 0 and 1. The Brier score takes them "
            "as they are; every other measure cuts them at .5."
        )
    if left := e.counts.solutions - e.counts.first_errors:
        said.append(
            f"{left:,} of {e.counts.solutions:,} solutions have an unlabelled step before any known error, so "
            "their first error is not known; they are left out where it is sought."
        )
    said += [
        f"{m.name} has its lowest score on the last step in {100 * m.min_at_last.value:.0f}% of solutions (chance: "
        f"{100 * e.chance_at_last:.0f}%): it may judge answers rather than steps."
        for m in e.models
        if m.min_at_last_interval.low > max(0.5, e.chance_at_last)
    ]
    return said


def _against_baselines(evaluation: Evaluation, model: Predictor) -> str:
    if math.isnan(model.measures[PRIMARY].value):
        return f"{model.name} has no ROC-AUC: {model.measures[PRIMARY].reason}."
    beside = _strongest(evaluation.baselines)
    if beside is None:
        return f"{model.name}: {_named(model)}; no baseline could be computed to hold it against."
    words = {b.name: verdict(evaluation, model.name, b.name) for b in evaluation.baselines if _has(b)}
    numbers = f"{_named(model)} against {_value(beside)} for {beside.name}"
    if all(word == "better" for word in words.values()):
        every = "every baseline" if len(words) == len(evaluation.baselines) else f"{listed(list(words))}"
        return f"{model.name} beats {every}: {numbers}."
    if worse := [name for name, word in words.items() if word == "worse"]:
        return f"{model.name} is worse than {listed(worse)}: {numbers}."
    level = [name for name, word in words.items() if word != "better"]
    return f"{model.name} is not shown to beat {listed(level)}: {numbers}."


def _undefined(evaluation: Evaluation) -> list[str]:
    """Reasons for dashes, each once."""
    reasons = {m.reason for p in evaluation.predictors if len(p.steps.labels) for m in p.measures.values() if m.reason}
    said = [f"A dash stands where a measure has no value: {reason}." for reason in sorted(reasons)]
    scores = next((p.fixed.scores for p in evaluation.predictors), {})
    if lacking := [name for name, score in scores.items() if math.isnan(score.f1)]:
        said.append(
            f"{_plural(len(lacking), 'Subset')} {listed(lacking)}: erroneous or correct solutions are missing, so "
            "there is no ProcessBench F1 and no mean over subsets."
        )
    return said


def _strongest(predictors: Sequence[Predictor]) -> Predictor | None:
    return max((p for p in predictors if _has(p)), key=lambda p: p.measures[PRIMARY].value, default=None)


def _has(predictor: Predictor) -> bool:
    return not math.isnan(predictor.measures[PRIMARY].value)


def _named(predictor: Predictor) -> str:
    return f"ROC-AUC {_value(predictor)}"


def _value(predictor: Predictor) -> str:
    return f"{predictor.measures[PRIMARY].value:.3f}"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
