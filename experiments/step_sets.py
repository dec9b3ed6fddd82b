"""Labelled solutions to train a reward model on, and others to measure it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..prm.data import load_steps, split_by_problem
from ..prm.steps import StepExample
from ..verifiers import InputError
from .build import build
from .label_steps import label_into
from .progress import StepProgress

__all__ = ["StepSets", "held_out_steps", "step_sets"]


@dataclass(frozen=True)
class StepSets:
    """Training and held-out solutions; no problem is in both, unless both are the same list, to be taken by folds."""

    train: Sequence[StepExample]
    held_out: Sequence[StepExample]


def step_sets(config: DictConfig, folder: Path, bar: StepProgress) -> StepSets:
    """From ``prm_data``, split by problem; without it the policy solves problems, which ``labeler`` labels.

    Args:
        config: of ``train-prm``.
        folder: of the run; labels that are made go into ``folder/labels``.
        bar: shows the labelling.
    """
    if config.get("prm_data") is None:
        train = _labelled(config, folder / "labels" / "train", bar, "train", config.labeler, config.num_problems)
        return StepSets(train, held_out_steps(config, folder, bar))
    examples = list(build(config.prm_data, "prm_data", function=False))
    if config.held_out == 0:
        return StepSets(examples, examples)
    train, held_out = split_by_problem(examples, config.held_out, config.seed)
    for name, part in (("train", train), ("held_out", held_out)):
        if not part:
            raise InputError(f"held_out={config.held_out}: of {len(examples)} solutions none is left to {name}")
    return StepSets(train, held_out)


def held_out_steps(config: DictConfig, folder: Path, bar: StepProgress) -> list[StepExample]:
    """Held-out problems of the task, solved by the policy and labelled by ``eval_labeler``."""
    count = config.num_held_out
    return _labelled(config, folder / "labels" / "held_out", bar, "held_out", config.eval_labeler, count)


def _labelled(
    config: DictConfig, folder: Path, bar: StepProgress, split: str, labeler: Any, count: int
) -> list[StepExample]:
    """Solutions of ``count`` problems of the task, labelled in ``folder`` as ``apportion label-steps`` does it."""
    named: dict[Any, Any] = {
        "file": None,
        "prompt": "prompt",
        "completion": "completion",
        "reference": None,
        "problem_id": "problem_id",
    }
    wanted = DictConfig({**config, **named, "split": split, "num_problems": count, "labeler": labeler})
    OmegaConf.update(wanted, "run.limit", None, force_add=True)
    label_into(wanted, folder, bar)
    return list(load_steps(str(folder / "steps.jsonl"), "stepwise", null_label="unlabelled", problem_id="problem_id"))
