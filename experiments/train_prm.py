"""Train a process reward model, and measure it beside the baselines on problems that it has not seen."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig

from ..grpo.files import write_text
from ..verifiers import InputError
from .app import build, check_keys, hydra_command, task_overrides
from .build import check_value
from .eval_prm import check_measuring
from .parts import check_line_breaks
from .prm_recipes import Fitting
from .progress import StepProgress, console
from .rundir import hold_folder, plain_config, refuse_finished, run_path
from .train import device, set_threads

if TYPE_CHECKING:  # it loads torch
    from ..grpo.policy import Policy
    from ..prm.steps import StepExample
    from ..verifiers.segmenters import Segmenter

__all__ = ["main", "segmenter_note", "train_prm"]

OF_THE_POLICY = ("labeler", "eval_labeler", "num_problems", "num_held_out")
KEYS = {
    *("prm_data", *OF_THE_POLICY, "rollout", "verifiers", "retention_verifier", "warm_start", "policy", "task", "prm"),
    *("seed", "device", "threads", "held_out", "segmenter", "run", "command"),
    "optim",  # a policy brings a learning rate
}


def main(arguments: list[str] | None = None) -> None:
    """``apportion train-prm key=value ...``"""
    hydra_command("train-prm", run_command, sys.argv[1:] if arguments is None else arguments)


def run_command(config: DictConfig) -> None:
    """The command around :func:`train_prm`."""
    folder = run_path(config.run.dir).resolve()
    overrides = task_overrides()
    check_line_breaks(overrides)
    _check_keys(config, overrides)
    finished = train_prm(config, folder, command=shlex.join(["apportion", "train-prm", *overrides]), progress=True)
    if not finished:
        console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
    sys.stdout.write(f"{folder}\n")
    if not finished:
        raise SystemExit(130)


def train_prm(config: DictConfig, folder: Path, *, command: str, progress: bool = False) -> bool:
    """Make or load the labels, train, measure, and leave ``model/`` and ``prm_report.html``.

    Args:
        config: composed from ``conf/train_prm.yaml``.
        folder: of the run.
        command: that did it, for the report.
        progress: show it.

    Returns:
        False where it was stopped.
    """
    from ..grpo.interrupt import StopRequest
    from .prm_table import draw_measures
    from .step_sets import step_sets

    check_measuring(config)
    check_value(config.held_out, float, "held_out")
    plain = plain_config(config)
    recipe = build(config.get("prm"), "prm")
    set_threads(config)
    with hold_folder(folder):
        refuse_finished(folder, plain, "prm_report.html")
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        with StepProgress(progress) as bar:
            sets = step_sets(config, folder, bar)
            stop = StopRequest()
            segmenter = None if config.segmenter is None else build(config.segmenter, "segmenter", function=True)
            if note := segmenter_note(segmenter, sets.train):
                console().print(note, markup=False, style="yellow")
            with stop.listening():
                fitting = Fitting(
                    lambda: _policy(config, bar), segmenter, folder, device(config.device), bar.fitting(), stop
                )
                scorer = recipe(sets.train, sets.held_out, fitting)
        if scorer is None:
            return False
        evaluation = _measured(config, sets, {"PRM": scorer(sets.held_out)}, folder, command)
        if progress:
            draw_measures(evaluation)
    return True


def segmenter_note(segmenter: Segmenter | None, examples: Sequence[StepExample]) -> str | None:
    """A line where the segmenter, which the model keeps to cut answers with, ends steps elsewhere than the examples.

    Args:
        segmenter: of the configuration, or None.
        examples: solutions with their steps.
    """
    if segmenter is None:
        return None
    other = sum([stop for _, stop in segmenter(e.completion)] != [stop for _, stop in e.steps] for e in examples)
    if not other:
        return None
    return (
        f"segmenter: cuts {other:,} of {len(examples):,} solutions otherwise than the data; the model will cut answers "
        "so. Give segmenter._target_=..., or segmenter=null to say it where the model is used"
    )


def _measured(config: DictConfig, sets: Any, predictions: Mapping[str, Any], folder: Path, command: str) -> Any:
    from .prm_report import build_prm_report, evaluate_steps

    evaluation = evaluate_steps(
        sets.held_out,
        predictions,
        train=None if sets.train is sets.held_out else sets.train,
        threshold=config.run.threshold,
        resamples=config.run.resamples,
        seed=config.seed,
        title="all problems, by folds" if sets.train is sets.held_out else "held-out problems",
        command=command,
    )
    build_prm_report(evaluation, folder / "prm_report.html")
    return evaluation


def _policy(config: DictConfig, bar: StepProgress) -> Policy:
    """The policy as it starts the training of GRPO."""
    from .warmstart import warm_start

    task = build(config.get("task"), "task")
    source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
    policy: Policy = source.build(device(config.device))
    warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))
    return policy


def _check_keys(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what nothing reads: keys of no meaning, and options of the other way."""
    check_keys(config, KEYS)
    labelled = config.get("prm_data") is not None
    for override in overrides:
        key = re.split(r"[.=@]", override.lstrip("+~"), maxsplit=1)[0]
        if labelled and key in OF_THE_POLICY:
            raise InputError(f"{override}: nothing reads it with prm_data, whose solutions have labels; leave one out")
        if not labelled and key == "held_out":
            raise InputError(f"{override}: nothing reads it without prm_data; give num_held_out, a number of problems")


if __name__ == "__main__":
    from .train_prm import main as _main  # so that the functions belong to the module, not to __main__

    _main()
