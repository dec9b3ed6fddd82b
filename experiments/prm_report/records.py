"""The evaluation as files: ``scores.jsonl`` holds what every number comes from, the JSON the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...prm.metrics import Predictions
from ...prm.steps import StepExample
from ...verifiers import InputError
from .evaluation import Difference, Evaluation, FirstErrors, Predictor

__all__ = ["evaluation_record", "read_scores", "score_lines"]


def score_lines(evaluation: Evaluation) -> str:
    """One JSON line for each solution: its text, steps, labels, and every predictor's probabilities."""
    lines = []
    for row, (example, subset) in enumerate(zip(evaluation.examples, evaluation.subsets, strict=True)):
        record = {
            "problem_id": example.problem_id,
            "subset": subset,
            "prompt": example.prompt,
            "completion": example.completion,
            "steps": [list(step) for step in example.steps],
            "labels": list(example.labels),
            "probabilities": {p.name: list(p.predictions[row]) for p in evaluation.models},
            "baselines": {p.name: list(p.predictions[row]) for p in evaluation.baselines},
        }
        lines.append(json.dumps(record) + "\n")  # all ASCII, so halves of surrogate pairs survive
    return "".join(lines)


def read_scores(path: Path) -> tuple[list[StepExample], dict[str, Predictions], dict[str, Predictions]]:
    """What :func:`score_lines` wrote: examples, predictions and baselines, ready for ``evaluate_steps``.

    Raises:
        InputError: a line is not of that kind; it names the line.
    """
    examples: list[StepExample] = []
    columns: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    for number, line in enumerate(path.read_text("ascii").split("\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            steps = tuple((start, stop) for start, stop in row["steps"])
            told = {"subset": row["subset"]}
            examples.append(
                StepExample(row["prompt"], row["completion"], steps, tuple(row["labels"]), row["problem_id"], told)
            )
            for column, found in zip(columns, (row["probabilities"], row["baselines"]), strict=True):
                for name, scores in found.items():
                    column.setdefault(name, []).append(scores)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise InputError(f"{path}, line {number}: no row of scores ({problem}); write it anew") from problem
    return examples, dict(columns[0]), dict(columns[1])


def evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """All numbers, for JSON: what does not exist is null."""
    e = evaluation
    record = {
        "title": e.title,
        "command": e.command,
        "counts": vars(e.counts),
        "threshold": e.threshold,
        "tune_on": e.tune_on,
        "bins": e.bins,
        "resamples": e.resamples,
        "seed": e.seed,
        "chance_at_last": e.chance_at_last,
        "predictors": {p.name: _predictor(p) for p in e.predictors},
        "differences": [_difference(d) for d in e.differences],
        "best_of_n": None if e.best_of_n is None else vars(e.best_of_n),
    }
    return _plain(record)


def _predictor(p: Predictor) -> dict[str, Any]:
    values = {
        name: {"value": m.value, "interval": p.intervals[name], **({"reason": m.reason} if m.reason else {})}
        for name, m in p.measures.items()
    }
    return {
        "baseline": p.is_baseline,
        "measures": values,
        "min_at_last": {"value": p.min_at_last.value, "interval": p.min_at_last_interval},
        "unlabelled": p.steps.unlabelled,
        "unscored": p.steps.unscored,
        "by_position": [row._asdict() for row in p.positions],
        "bins_of_equal_width": [b._asdict() for b in p.bins],
        "bins_of_equal_mass": [b._asdict() for b in p.mass_bins],
        "first_errors": _first_errors(p.fixed),
        "first_errors_tuned": _first_errors(p.tuned),
    }


def _first_errors(f: FirstErrors) -> dict[str, Any]:
    subsets = {name: {**score._asdict(), "f1_interval": f.intervals[name]} for name, score in f.scores.items()}
    return {
        "thresholds": f.thresholds,
        "pooled": f.pooled._asdict(),
        "subsets": subsets,
        "mean_f1": f.mean_f1,
        "mean_f1_interval": f.mean_interval,
    }


def _difference(d: Difference) -> dict[str, Any]:
    values = {measure: {"value": value, "interval": interval} for measure, (value, interval) in d.values.items()}
    return {"name": d.name, "minus": d.other, "values": values}


def _plain(value: Any) -> Any:
    """Tuples as lists, NaN as None."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
