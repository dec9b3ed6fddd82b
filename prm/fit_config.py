"""How a model is fitted, and a note of it that a resumed run is held to."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..verifiers import InputError
from .batching import Batching
from .processes import is_main_process

__all__ = ["CHECKPOINTS", "STATE", "FitConfig", "Schedule", "begin_run"]

Schedule = Literal["linear", "cosine", "constant"]
CHECKPOINTS = "checkpoints"
STATE = "trainer_state.json"  # the last file of a checkpoint to be written
_FREE = frozenset({"log_every", "eval_every", "save_every", "keep_checkpoints", "cpu"})


@dataclass(frozen=True)
class FitConfig:
    """How a model is fitted, whatever it learns.

    Args:
        epochs: how often each example is seen.
        max_updates: optimiser steps at most; the schedule ends there. None: as many as the epochs make.
        lr: highest learning rate, of AdamW.
        schedule: ``linear`` or ``cosine`` to 0, or ``constant``.
        warmup: share of the updates over which the learning rate rises from 0.
        weight_decay: of AdamW, not on biases and norms.
        max_grad_norm: gradients of a larger norm are scaled down to it; 0: never.
        batching: ``random`` order, or ``length_grouped``: sorted within random pools, less padding but batches of
            one length.
        batch_rows: most examples of a batch of one process, or None.
        batch_tokens: most tokens of a batch of one process, padding included, or None; a longer example goes alone.
        parts: forward passes at most that a batch is cut into, rows of like length together. The gradient is that of
            the whole batch; the more parts, the less padding.
        accumulate: batches of one update. The loss is the mean over all items of all batches and processes.
        max_length: most tokens of an example, or None for what the model can read.
        bf16: autocast to bfloat16; the weights keep their type.
        activation_checkpointing: compute activations twice rather than keep them; less memory, slower.
        dropout: keep the model's own dropout, which some new heads have without having been asked; else there is none.
        lora: options of ``peft.LoraConfig``, such as ``{r: 16, target_modules: all-linear}``; None trains all weights.
        seed: of the order, and of dropout where the model has any.
        log_every: updates between two reports of the loss.
        eval_every: updates between two evaluations; None: at the end only.
        save_every: updates between two checkpoints; None: only where the run is stopped.
        keep_checkpoints: how many stay.
        cpu: use the CPU even where there is a GPU.
    """

    epochs: int = 1
    max_updates: int | None = None
    lr: float = 1e-5
    schedule: Schedule = "linear"
    warmup: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    batching: Batching = "random"
    batch_rows: int | None = 32
    batch_tokens: int | None = None
    parts: int = 8
    accumulate: int = 1
    max_length: int | None = None
    bf16: bool = False
    activation_checkpointing: bool = False
    dropout: bool = False
    lora: Mapping[str, Any] | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 1
    cpu: bool = False

    def __post_init__(self) -> None:
        for name, choices in {"batching": get_args(Batching), "schedule": get_args(Schedule)}.items():
            if getattr(self, name) not in choices:
                raise InputError(f"{name}={getattr(self, name)!r}: give one of {', '.join(choices)}")
        whole = ("epochs", "parts", "accumulate", "log_every", "keep_checkpoints")
        optional = ("max_updates", "batch_rows", "batch_tokens", "max_length", "eval_every", "save_every")
        for name in (*whole, *(name for name in optional if getattr(self, name) is not None)):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise InputError(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("lr", "weight_decay", "max_grad_norm"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise InputError(f"{name}={value!r}: must be a finite number of at least 0")
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup={self.warmup!r}: is a share of the updates; give 0 <= warmup < 1")
        if self.batch_rows is None and self.batch_tokens is None:
            raise InputError("batch_rows=null, batch_tokens=null: give at least one of them")


def begin_run(folder: Path, config: FitConfig, examples: int, resume: bool) -> None:
    """Note in ``folder/training.json`` what is trained; a run that is resumed must not differ from it.

    Where it is not resumed, the checkpoints of an earlier run in the folder are removed, lest this one go on from them.

    Raises:
        InputError: it differs; names the option. What only says when to report or save may differ.
    """
    file = folder / "training.json"
    facts = {"examples": examples, **{name: value for name, value in asdict(config).items() if name not in _FREE}}
    facts = json.loads(json.dumps(facts, default=dict))
    if resume and file.is_file():
        for name, before in json.loads(file.read_text(encoding="utf-8")).items():
            if facts.get(name) != before:
                raise InputError(
                    f"{name}={facts.get(name)}: the run in {folder} had {before}; give that, or another folder"
                )
    elif is_main_process():
        for state in (folder / CHECKPOINTS).glob(f"**/checkpoint-*/{STATE}"):
            shutil.rmtree(state.parent)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.part")
        unfinished.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        unfinished.replace(file)
