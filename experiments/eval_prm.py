"""Measure process reward models, or any verifiers that locate their verdicts, on labelled solutions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from ..grpo.files import write_text
from ..prm.labels import labels_from_spans
from ..prm.metrics import Predictions
from ..prm.steps import StepExample
from ..verifiers import InputError, Sample
from ..verifiers.panel import gives_spans, judge
from .app import build, check_keys, hydra_command, task_overrides
from .build import check_value
from .candidates import best_of_n, read_candidates
from .parts import prepare
from .prm_table import draw_measures
from .progress import console
from .rundir import hold_folder, plain_config, run_path
from .train import device, set_threads

__all__ = ["check_measuring", "eval_prm", "main", "verifier_predictions"]

KEYS = {
    *("prm_data", "models", "candidates", "completion", "prompt", "reference", "verifiers"),
    *("seed", "device", "threads", "run", "command"),
}


def main(arguments: list[str] | None = None) -> None:
    """``apportion eval-prm key=value ...``"""
    hydra_command("eval-prm", run_command, sys.argv[1:] if arguments is None else arguments)


def run_command(config: DictConfig) -> None:
    """The command around :func:`eval_prm`."""
    folder = run_path(config.run.dir).resolve()
    check_keys(config, KEYS, experiments=False)
    eval_prm(config, folder, command=shlex.join(["apportion", "eval-prm", *task_overrides()]))
    sys.stdout.write(f"{folder}\n")


def eval_prm(config: DictConfig, folder: Path, *, command: str) -> None:
    """Score the steps, print the table, and leave ``prm_report.html`` with the scores beside it.

    Args:
        config: composed from ``conf/eval_prm.yaml``.
        folder: of the run.
        command: that did it, for the report.
    """
    from .prm_report import build_prm_report, evaluate_steps

    check_measuring(config)
    if not config.models:
        raise InputError("models: give one: +models.mine=FOLDER, or a verifier: +verifier@models.mine=arithmetic")
    set_threads(config)
    models = {str(name): _model(name, node, config) for name, node in config.models.items()}
    examples = list(build(config.prm_data, "prm_data"))
    if not examples:
        raise InputError("prm_data: holds no labelled solution")
    candidates = None if config.candidates is None else read_candidates(config)
    with hold_folder(folder):
        if (folder / "config.yaml").exists():
            raise InputError(f"run.dir={folder}: holds something already; choose another run.dir")
        predictions = {name: _predictions(name, model, examples, config) for name, model in models.items()}
        evaluation = evaluate_steps(
            examples,
            predictions,
            threshold=config.run.threshold,
            tune_on=config.run.tune_on,
            subset_key=config.run.subset,
            resamples=config.run.resamples,
            seed=config.seed,
            best_of_n=None if candidates is None else best_of_n(config, candidates, next(iter(models.values()))),
            title=str(config.prm_data.get("path", "labelled solutions")),
            command=command,
        )
        # Last, so that a folder in which something went wrong can be used again.
        write_text(folder / "config.yaml", yaml.safe_dump(plain_config(config), sort_keys=False, allow_unicode=True))
        build_prm_report(evaluation, folder / "prm_report.html")
    draw_measures(evaluation)


def check_measuring(config: DictConfig) -> None:
    """Refuse values of the wrong kind, before anything costs time."""
    for key, hint in (("seed", int), ("threads", int | None), ("device", str)):
        check_value(config[key], hint, key)
    check_value(config.run.threshold, float, "run.threshold")
    check_value(config.run.resamples, int, "run.resamples")
    check_value(config.run.verifier_timeout_s, float | None, "run.verifier_timeout_s")
    if not 0 <= config.run.threshold <= 1:
        raise InputError(f"run.threshold={config.run.threshold}: is a probability; give 0 to 1")
    if config.run.resamples < 1:
        raise InputError(f"run.resamples={config.run.resamples}: must be at least 1")


def _model(name: Any, node: Any, config: DictConfig) -> Any:
    """A step model from its folder, or a verifier."""
    if isinstance(node, str):
        from ..prm.model import StepModel

        return StepModel.from_pretrained(node).to(device(config.device))
    verifier = build(node, f"models.{name}", function=True)
    if not gives_spans(verifier):
        raise InputError(f"models.{name}: gives scores of whole answers only; use one that judges steps")
    prepare({str(name): verifier}, "models.")
    return verifier


def _predictions(name: str, model: Any, examples: Sequence[StepExample], config: DictConfig) -> Predictions:
    from ..prm.model import StepModel
    from .prm_recipes import predict_steps

    if isinstance(model, StepModel):
        return predict_steps(model, examples)
    found, note = verifier_predictions(model, examples, config.run.verifier_timeout_s)
    if note:
        console().print(f"models.{name}: {note}", markup=False, style="yellow")
    return found


def verifier_predictions(
    verifier: Any, examples: Sequence[StepExample], timeout_s: float | None = None
) -> tuple[Predictions, str | None]:
    """What a verifier's spans say of each step: the lowest score among those that overlap it, None where none does.

    Args:
        verifier: gives spans.
        examples: labelled solutions; the right answer is looked for in the column ``reference``.
        timeout_s: see :func:`apportion.verifiers.panel.judge`.

    Returns:
        Predictions, and a line on the first fault of the verifier, if any.
    """
    samples = [Sample(e.prompt, e.completion, e.metadata.get("reference"), e.metadata) for e in examples]
    told = judge({"it": verifier}, samples, timeout_s=timeout_s)
    rows = [
        labels_from_spans(example.completion, example.steps, said["it"].spans)
        for example, said in zip(examples, told.verdicts)
    ]
    return [[None if p is None else min(max(p, 0.0), 1.0) for p in row] for row in rows], told.first_error.get("it")


if __name__ == "__main__":
    from .eval_prm import main as _main  # so that the functions belong to the module, not to __main__

    _main()
