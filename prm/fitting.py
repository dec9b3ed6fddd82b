"""``transformers.Trainer`` for rows of tokens with a loss that is a sum over items: quiet, exact, and resumable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..verifiers import InputError
from .batching import EpochBatches
from .fit_config import STATE, FitConfig
from .loading import quiet_files
from .processes import all_processes, part_at_exit

__all__ = ["FitTask", "Fitted", "Progress", "fit", "has_checkpoint", "prepared"]

Progress = Callable[[Mapping[str, float]], None]
"""Gets the figures of an update or an evaluation: names as ``group/name``, and ``update``, ``updates``, ``epoch``."""

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@dataclass(frozen=True)
class FitTask:
    """What is fitted, on what.

    Args:
        module: called with a collated batch but for its ``labels``.
        rows: N examples.
        lengths: (N,) tokens of each.
        collate: rows -> a batch, with ``labels`` of shape (items,).
        loss: (output of the module, labels) -> sum of the losses of the items.
        save: write the weights into a folder.
        restore: read back what ``save`` wrote.
        evaluate: figures of held-out data, or None.
    """

    module: nn.Module
    rows: Sequence[Any]
    lengths: Sequence[int]
    collate: Callable[[list[Any]], dict[str, Any]]
    loss: Callable[[Any, Tensor], Tensor]
    save: Callable[[Path], None]
    restore: Callable[[Path], None]
    evaluate: Callable[[], dict[str, float]] | None = None


@dataclass(frozen=True)
class Fitted:
    """What became of a fit.

    Args:
        finished: False where it was stopped; it goes on from its checkpoint.
        updates: optimiser steps done.
        history: what :data:`Progress` got, from the first update on, before a resume too.
    """

    finished: bool
    updates: int
    history: tuple[Mapping[str, float], ...]


def fit(
    task: FitTask,
    config: FitConfig,
    folder: Path,
    *,
    epochs: int | None = None,
    lr: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Fitted:
    """Fit a module by AdamW on ``transformers.Trainer``; under ``torchrun`` on several processes (DDP).

    ``loss of an update = sum of its items' losses / number of its items``, over all its batches and processes, so that
    neither accumulation nor the number of processes changes the gradient. A batch without items weighs nothing.

    Args:
        task, config: what and how.
        folder: of the checkpoints ``checkpoint-N``.
        epochs, lr: instead of those of ``config``.
        resume: go on from the newest whole checkpoint of the folder, if there is one, to the same weights as without
            the break.
        progress: told the figures, in the main process.
        stop: asked after every update; once it says yes a checkpoint is written and the fit ends.

    Raises:
        InputError: the loss is not finite, or there are too few examples.
    """
    part_at_exit()
    arguments = _arguments(config, folder, config.lr if lr is None else lr)
    batches = EpochBatches(
        task.lengths,
        config.batching,
        rows=config.batch_rows,
        tokens=config.batch_tokens,
        epochs=config.epochs if epochs is None else epochs,
        seed=config.seed,
        process=arguments.process_index,
        processes=arguments.world_size,
    )
    updates = math.ceil(len(batches) / config.accumulate)
    arguments.max_steps = min(updates, config.max_updates or updates)
    watch = _Watch(batches, config, arguments.max_steps, task.evaluate, progress, stop)
    trainer = _FitTrainer(task, batches, arguments, watch)
    try:
        trainer.train(resume_from_checkpoint=_newest(folder) if resume else None)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: a checkpoint cannot be written or read ({reason}); see to the disk") from error
    state = trainer.state
    return Fitted(state.global_step >= arguments.max_steps, state.global_step, watch.history(state.log_history))


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a whole checkpoint to go on from."""
    return _newest(folder) is not None


@contextmanager
def prepared(model: Any, config: FitConfig) -> Iterator[None]:
    """A transformers model with dropout and activation checkpointing as asked for.

    Afterwards it is in evaluation mode, its dropout as before, and the weights that learned before can learn again.
    """
    learns = {name: weight.requires_grad for name, weight in model.named_parameters()}
    rates = [(module, name) for module in model.modules() for name in _DROPOUT if _is_rate(module, name)]
    before = [getattr(module, name) for module, name in rates]
    for module, name in rates:
        setattr(module, name, getattr(module, name) if config.dropout else 0.0)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    try:
        yield
    finally:
        for (module, name), rate in zip(rates, before, strict=True):
            setattr(module, name, rate)
        for name, weight in model.named_parameters():
            weight.requires_grad_(learns.get(name, False))
        model.eval()


_DROPOUT = ("p", "attention_dropout", "dropout")  # of nn.Dropout, and of attention and other layers of transformers


def _is_rate(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), float) and (name != "p" or isinstance(module, nn.Dropout))


def _checkpoint_activations(model: Any) -> None:
    """Have a transformers model compute its activations again in the backward pass instead of keeping them."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch()
    model.enable_input_require_grads()  # frozen embeddings, under adapters, would cut the gradient off


class _FitTrainer(Trainer):
    """Own batches, own saving; the rest is the library's."""

    def __init__(self, task: FitTask, batches: EpochBatches, arguments: TrainingArguments, watch: _Watch) -> None:
        self._task, self._batches = task, batches
        super().__init__(model=task.module, args=arguments, compute_loss_func=self._mean_loss, callbacks=[watch])
        self.remove_callback(PrinterCallback)
        watch.log = self.log
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InputError("training shards no weights (FSDP, DeepSpeed) yet; launch with torchrun, or set lora")

    def get_train_dataloader(self) -> DataLoader:
        # A generator of its own, so that the loader draws nothing from the global one, which dropout uses.
        return DataLoader(
            self._task.rows,  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=self._task.collate,
            generator=torch.Generator().manual_seed(0),
            pin_memory=self.args.device.type == "cuda",
        )

    def _mean_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        items = torch.as_tensor(len(labels) if num_items_in_batch is None else num_items_in_batch)
        loss = self._task.loss(outputs, labels) / items.clamp(min=1).to(labels.device)
        if not torch.isfinite(loss):
            raise InputError(
                f"the loss is {loss.item()} in update {self.state.global_step + 1}; lower lr, or set warmup"
            )
        return loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        if self.args.should_save:
            with quiet_files():
                self._task.save(Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:  # noqa: ARG002
        with quiet_files():
            self._task.restore(Path(resume_from_checkpoint))


class _Watch(TrainerCallback):
    """Reports, evaluates, and stops when asked."""

    def __init__(
        self,
        batches: EpochBatches,
        config: FitConfig,
        updates: int,
        evaluate: Callable[[], dict[str, float]] | None,
        progress: Progress | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self._batches, self._config, self._updates = batches, config, updates
        self._evaluate, self._progress, self._stop = evaluate, progress, stop
        self.log: Callable[[dict[str, float]], None] = lambda _: None

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate where it is due, and end where somebody asked for it."""
        last, every = state.global_step >= state.max_steps, self._config.eval_every
        if self._evaluate is not None and (last or (every is not None and state.global_step % every == 0)):
            due = control.should_log
            self.log(self._evaluate())
            control.should_log = due  # which logging has cleared
        if not last and self._stop is not None and any(all_processes([self._stop()])):
            control.should_save = control.should_training_stop = True

    def on_log(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Pass the newest entry on."""
        if self._progress is not None and state.is_world_process_zero:
            for figures in self.history(state.log_history[-1:]):
                self._progress(figures)

    def history(self, entries: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, float], ...]:
        """Entries of the Trainer's log under our names; its summary of the whole run is left out."""
        names = {"loss": "train/loss", "learning_rate": "optim/lr", "grad_norm": "optim/grad_norm"}
        found = []
        for entry in entries:
            figures = {names.get(name, name): value for name, value in entry.items() if name in names or "/" in name}
            if figures:
                update = int(entry["step"])
                epoch = self._batches.epochs_after(update * self._config.accumulate)
                found.append({"update": update, "updates": self._updates, "epoch": epoch, **figures})
        return tuple(found)


def _arguments(config: FitConfig, folder: Path, lr: float) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # all epochs are one sequence of batches
        learning_rate=lr,
        lr_scheduler_type=_SCHEDULES[config.schedule],
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_accumulation_steps=config.accumulate,
        bf16=config.bf16,
        seed=config.seed,
        use_cpu=config.cpu,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # it would hide a loss that is not a number
        eval_strategy="no",
        save_strategy="no" if config.save_every is None else "steps",
        save_steps=config.save_every or 1,
        save_total_limit=config.keep_checkpoints,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # without torchrun one GPU: DataParallel would cut the lists of steps like rows
    return arguments


def _newest(folder: Path) -> str | None:
    """The newest whole checkpoint."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{STATE}") if path.stat().st_size]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None
