"""Train a process reward model on labelled steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..verifiers import InputError
from .adapters import add_lora, head_names, load_trainable, merge_lora, save_trainable
from .batching import cut_batches
from .collate import StepRow, collate_rows, labelled_row
from .encoding import Encoded, collate_steps
from .fit_config import CHECKPOINTS, FitConfig, begin_run
from .fitting import FitTask, Fitted, Progress, fit, has_checkpoint, prepared
from .loading import quiet_files
from .metrics import flatten_steps, step_measures
from .model import StepModel
from .processes import all_processes, is_main_process, process_count, process_number
from .rows import shorten
from .step_losses import ClassWeights, class_weights, step_losses
from .steps import StepExample

__all__ = ["PrmTrainingConfig", "PrmTrainingResult", "train_prm"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrmTrainingConfig(FitConfig):
    """How a process reward model is trained: the options of :class:`~apportion.prm.fitting.FitConfig`, and these.

    PURE (2025, arXiv 2504.15275) has ``head_epochs=3 head_lr=1e-4 epochs=1 lr=1e-6``; TRL's PRM trainer had
    ``lr=1e-5 batch_rows=8 epochs=3``.

    Args:
        head_epochs: epochs in which only the new head learns, before ``epochs`` in which all do. Each phase
            has its own schedule, and ``max_updates``.
        head_lr: learning rate of these.
        class_weight: ``balanced`` weighs right and wrong steps by ``n / (2 n_class)`` of the training data; a number
            is the weight of wrong steps, right ones weigh 1; None weighs all steps alike.
        label_smoothing: this much of every label is drawn to 1/2: ``y (1 - s) + s / 2``.
    """

    head_epochs: int = 0
    head_lr: float = 1e-4
    class_weight: Literal["balanced"] | float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.head_epochs, int) or self.head_epochs < 0:
            raise InputError(f"head_epochs={self.head_epochs!r}: must be a whole number of at least 0")
        if not 0 <= self.head_lr < math.inf:
            raise InputError(f"head_lr={self.head_lr!r}: must be a finite number of at least 0")
        weight = self.class_weight
        if not (weight is None or weight == "balanced" or (isinstance(weight, int | float) and 0 < weight < math.inf)):
            raise InputError(f"class_weight={weight!r}: give balanced, a number over 0, or null")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing={self.label_smoothing!r}: give 0 <= label_smoothing < 1")


@dataclass(frozen=True)
class PrmTrainingResult:
    """What became of a training.

    Args:
        path: the trained model, for :meth:`StepModel.from_pretrained`; None where the training was stopped.
        finished: False where it was stopped; called with ``resume`` it goes on.
        updates: optimiser steps done, both phases together.
        examples, steps: that were learned from.
        unused_examples: without any labelled step, or none that fits.
        unlabelled_steps, dropped_steps: unknown labels, and steps that did not fit.
        weights: of the two classes.
        seconds: of this call.
        history: all figures that ``progress`` got; of a phase that an earlier call ended they are missing.
        measures: of the last evaluation, by name; empty without held-out examples.
    """

    path: Path | None
    finished: bool
    updates: int
    examples: int
    steps: int
    unused_examples: int
    unlabelled_steps: int
    dropped_steps: int
    weights: ClassWeights
    seconds: float
    history: tuple[Mapping[str, float], ...]
    measures: Mapping[str, float]


def train_prm(
    model: StepModel,
    examples: Iterable[StepExample],
    eval_examples: Iterable[StepExample],
    config: PrmTrainingConfig,
    folder: str | Path,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] | None = None,
) -> PrmTrainingResult:
    """Train ``model`` in place and save it as ``folder/model``.

    Args:
        model: to be trained; what it reads of an example is what it will read in scoring.
        examples: to learn from; steps without a label, and what does not fit, are left out and counted.
        eval_examples: held out, measured at ``eval_every`` and at the end; may be empty.
        config: how.
        folder: of the checkpoints and the model.
        progress: told ``train/loss``, ``optim/lr``, ``optim/grad_norm``, and ``eval/...`` where measured; ``phase`` is
            0 while only the head learns, else 1.
        resume: go on from the newest checkpoint in ``folder``; without one, begin anew.
        stop: asked after every update; see :func:`~apportion.prm.fitting.fit`.

    Raises:
        InputError: no labelled step fits, the loss is not finite, or a resumed run has other options or data.
    """
    begun, folder = time.monotonic(), Path(folder)
    rows, counts = _learnable(model, examples, config.max_length)
    weights = class_weights([label for row in rows for label in row.labels], config.class_weight)
    begin_run(folder, config, len(rows), resume)
    held_out = list(eval_examples)
    with prepared(model.model, config):
        adapted = None if config.lora is None else add_lora(model.model, config.lora, config.seed)
        task = FitTask(
            module=_InParts(model),
            rows=rows,
            lengths=[len(row.encoded.input_ids) for row in rows],
            collate=partial(collate_rows, parts=config.parts),
            loss=lambda log_odds, labels: step_losses(log_odds, labels, weights, config.label_smoothing).sum(),
            save=model.save_pretrained if adapted is None else partial(save_trainable, model.model),
            restore=partial(_restore, model) if adapted is None else partial(load_trainable, model.model),
            evaluate=_evaluation(model, held_out, config),
        )
        done = _fit_phases(task, model, config, folder / CHECKPOINTS, progress=progress, resume=resume, stop=stop)
        if adapted is not None:
            merge_lora(adapted)
    model.eval()
    finished = all(part.finished for part in done)
    if finished and is_main_process():
        with quiet_files():
            model.save_pretrained(folder / "model")
    all_processes([])  # nobody goes on before the model is there
    history = tuple(figures for part in done for figures in part.history)
    measured = next((figures for figures in reversed(history) if "eval/loss" in figures), {})
    return PrmTrainingResult(
        path=folder / "model" if finished else None,
        finished=finished,
        updates=sum(part.updates for part in done),
        weights=weights,
        seconds=time.monotonic() - begun,
        history=history,
        measures={name: value for name, value in measured.items() if name.startswith("eval/")},
        **counts,
    )


class _InParts(nn.Module):
    """(S,) log-odds of a batch that comes in parts."""

    def __init__(self, model: StepModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        # Without a mask: a causal model does not see the padding on its right, and attention is faster so.
        return torch.cat([self.model(**{**part, "attention_mask": None}) for part in parts])


def _learnable(
    model: StepModel, examples: Iterable[StepExample], max_length: int | None
) -> tuple[list[StepRow], dict[str, int]]:
    """The rows that teach something, and counts of what does and what does not."""
    rows = []
    unused = unlabelled = dropped = cut = 0
    first = ""
    for number, example in enumerate(examples, start=1):
        encoded = _encode(model, example, max_length)
        if encoded.kept_steps < len(example.steps):
            first = first or f"example {number} [{shorten(example.prompt)}]"
            dropped, cut = dropped + len(example.steps) - encoded.kept_steps, cut + 1
        unlabelled += sum(label is None for label in example.labels[: encoded.kept_steps])
        row = labelled_row(encoded, example)
        unused += row is None
        if row is not None:
            rows.append(row)
    if not rows:
        why = f"of {unused} examples none has a labelled step that fits" if unused else "there are no examples"
        raise InputError(f"nothing to train on: {why}; look at the labels, or raise max_length")
    if cut and is_main_process():
        log.warning("%d examples are too long, %d steps of them dropped, first %s", cut, dropped, first)
    if unused and is_main_process():
        log.warning("%d examples left out, which have no labelled step or none that fits", unused)
    steps = sum(len(row.labels) for row in rows)
    names = ("examples", "steps", "unused_examples", "unlabelled_steps", "dropped_steps")
    return rows, dict(zip(names, (len(rows), steps, unused, unlabelled, dropped), strict=True))


def _encode(model: StepModel, example: StepExample, max_length: int | None) -> Encoded:
    return model.encode(example.prompt, example.completion, example.steps, example.metadata, max_length=max_length)


def _fit_phases(
    task: FitTask,
    model: StepModel,
    config: PrmTrainingConfig,
    folder: Path,
    *,
    progress: Progress | None,
    resume: bool,
    stop: Callable[[], bool] | None,
) -> list[Fitted]:
    """First the head alone if asked for, then all; a phase is left out where a later one has begun."""
    trained = {name for name, weight in model.model.named_parameters() if weight.requires_grad} | head_names(
        model.model
    )
    phases = [("all", config.epochs, config.lr, trained)]
    if config.head_epochs:
        if model.token_ids is not None:
            raise InputError("head_epochs: a model of the style tokens has no head of its own; set head_epochs=0")
        phases.insert(0, ("head", config.head_epochs, config.head_lr, head_names(model.model)))
        if resume and has_checkpoint(folder / "all"):
            del phases[0]
    done: list[Fitted] = []
    for name, epochs, lr, learned in phases:
        for parameter_name, parameter in model.model.named_parameters():
            parameter.requires_grad_(parameter_name in learned)
        phase = {"phase": float(name == "all")}
        told = None if progress is None else (lambda figures, phase=phase: progress({**phase, **figures}))
        part = fit(task, config, folder / name, epochs=epochs, lr=lr, resume=resume, progress=told, stop=stop)
        done.append(replace(part, history=tuple({**phase, **figures} for figures in part.history)))
        if not part.finished:
            break
    return done


def _restore(model: StepModel, folder: Path) -> None:
    """The weights of a folder, in place."""
    saved = StepModel.from_pretrained(folder, dtype=None)
    model.model.load_state_dict(saved.model.state_dict())


def _evaluation(
    model: StepModel, examples: Sequence[StepExample], config: PrmTrainingConfig
) -> Callable[[], dict[str, float]] | None:
    """Measures the model on held-out examples: ``eval/loss`` and the measures of :mod:`apportion.prm.metrics`."""
    found = [labelled_row(_encode(model, example, config.max_length), example) for example in examples]
    rows = {number: row for number, row in enumerate(found) if row is not None}
    if not rows:
        return None
    lengths = [len(row.encoded.input_ids) if row is not None else 0 for row in found]
    order = sorted(rows, key=lambda number: -lengths[number])
    batches = cut_batches(order, lengths, config.batch_rows, config.batch_tokens)

    def evaluate() -> dict[str, float]:
        mine = batches[process_number() :: process_count()]
        scored = all_processes([pair for batch in mine for pair in _scored(model, [(n, rows[n]) for n in batch])])
        predictions: list[list[float | None]] = [[None] * len(example.steps) for example in examples]
        losses = []
        for number, log_odds in scored:
            row = rows[number]
            losses += step_losses(torch.tensor(log_odds), torch.tensor(row.labels)).tolist()
            for step, value in zip(row.steps, torch.tensor(log_odds).double().sigmoid().tolist(), strict=True):
                predictions[number][step] = value
        measures = step_measures(flatten_steps(examples, predictions, name="the model"))
        known = {f"eval/{name}": measure.value for name, measure in measures.items() if not math.isnan(measure.value)}
        return {"eval/loss": math.fsum(losses) / len(losses), **known}

    return evaluate


@torch.no_grad()
def _scored(model: StepModel, rows: Sequence[tuple[int, StepRow]]) -> list[tuple[int, list[float]]]:
    """Log-odds of the labelled steps of some rows, with the rows' numbers."""
    model.eval()
    batch = collate_steps([row.encoded for _, row in rows])
    log_odds = model(
        batch.input_ids.to(model.device),
        None,
        batch.step_rows.to(model.device),
        batch.step_positions.to(model.device),
    )
    pieces = log_odds.cpu().split([len(row.labels) for _, row in rows])
    return [(number, piece.tolist()) for (number, _), piece in zip(rows, pieces, strict=True)]
