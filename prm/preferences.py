"""A reward model of whole answers from pairs of which people preferred one (Bradley-Terry)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..verifiers import InputError
from .adapters import add_lora, load_trainable, merge_lora, save_trainable
from .batching import cut_batches, parts_by_length
from .collate import pad_right
from .fit_config import CHECKPOINTS, FitConfig, begin_run
from .fitting import FitTask, Progress, fit, prepared
from .loading import quiet_files
from .preference_data import Preference
from .processes import all_processes, is_main_process, process_count, process_number
from .reward_model import Encoded, Layout, encode_answer, pooled_logits

__all__ = ["PreferenceResult", "preference_losses", "reward_backbone", "train_reward_model"]

Pair = tuple[Encoded, Encoded, float]


@dataclass(frozen=True)
class PreferenceResult:
    """What became of a training.

    Args:
        path: the trained model, for :class:`~apportion.prm.reward_model.RewardModel`; None where it was stopped.
        finished: False where it was stopped; called with ``resume`` it goes on.
        updates: optimiser steps done.
        pairs: that were learned from.
        too_long: pairs left out because an answer did not fit.
        seconds: of this call.
        history: all figures that ``progress`` got.
        measures: of the last evaluation, by name; empty without held-out pairs.
    """

    path: Path | None
    finished: bool
    updates: int
    pairs: int
    too_long: int
    seconds: float
    history: tuple[Mapping[str, float], ...]
    measures: Mapping[str, float]


def preference_losses(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """(P,) ``-log sigmoid(r_chosen - r_rejected - margin)``: Bradley and Terry 1952; margin of Llama 2, 2307.09288.

    Args:
        chosen, rejected: (P,) rewards of the better and the worse answers.
        margins: (P,).

    >>> preference_losses(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor([0.6931])
    """
    return nn.functional.softplus(-(chosen.float() - rejected.float() - margins.float()))


def reward_backbone(path: str | Path, *, dtype: str = "float32", seed: int = 0) -> tuple[Any, Any]:
    """A language model, or a reward model, as sequence classification with one label, and its tokenizer.

    Args:
        path: folder, or name on the hub; weights as safetensors.
        dtype: of the weights.
        seed: of a new head.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        with torch.random.fork_rng(devices=[]), quiet_files():
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{path}: cannot be read as a language model ({reason})") from error
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def train_reward_model(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Preference],
    eval_pairs: Sequence[Preference],
    config: FitConfig,
    folder: str | Path,
    progress: Progress | None = None,
    *,
    layout: Layout | None = None,
    resume: bool = False,
    stop: Callable[[], bool] | None = None,
) -> PreferenceResult:
    """Train ``model`` in place and save it as ``folder/model``.

    Args:
        model: sequence classification with one label, such as :func:`reward_backbone` gives.
        tokenizer: its tokenizer.
        pairs: to learn from; one whose longer answer has more than ``max_length`` tokens is left out and counted.
        eval_pairs: held out, measured at ``eval_every`` and at the end; may be empty.
        config: how; a row of a batch is a pair, of twice its longer answer's tokens.
        folder: of the checkpoints and the model.
        progress: told ``train/loss``, ``optim/...``, and ``eval/loss``, ``eval/accuracy``, ``eval/margin``.
        layout: of prompt and answer; see :class:`~apportion.prm.reward_model.RewardModel`, which must read the same.
        resume, stop: see :func:`~apportion.prm.fitting.fit`.
    """
    begun, folder = time.monotonic(), Path(folder)
    rows = _fitting_rows(tokenizer, pairs, config.max_length, layout)
    held_out = _fitting_rows(tokenizer, eval_pairs, config.max_length, layout)
    if not rows:
        raise InputError(f"nothing to train on: of {len(pairs)} pairs none fits; raise max_length")
    begin_run(folder, config, len(rows), resume)
    with prepared(model, config):
        adapted = None if config.lora is None else add_lora(model, config.lora, config.seed)
        task = FitTask(
            module=_Rewards(model),
            rows=rows,
            lengths=[2 * max(len(chosen.ids), len(rejected.ids)) for chosen, rejected, _ in rows],
            collate=partial(_collate, padding=model.config.get_text_config().pad_token_id, parts=config.parts),
            loss=_loss,
            save=partial(_save, model, tokenizer) if adapted is None else partial(save_trainable, model),
            restore=partial(_restore, model) if adapted is None else partial(load_trainable, model),
            evaluate=partial(_measures, model, held_out, config) if held_out else None,
        )
        done = fit(task, config, folder / CHECKPOINTS, resume=resume, progress=progress, stop=stop)
        if adapted is not None:
            merge_lora(adapted)
    if done.finished and is_main_process():
        with quiet_files():
            _save(model, tokenizer, folder / "model")
    all_processes([])  # nobody goes on before the model is there
    measured = next((figures for figures in reversed(done.history) if "eval/loss" in figures), {})
    return PreferenceResult(
        path=folder / "model" if done.finished else None,
        finished=done.finished,
        updates=done.updates,
        pairs=len(rows),
        too_long=len(pairs) - len(rows),
        seconds=time.monotonic() - begun,
        history=done.history,
        measures={name: value for name, value in measured.items() if name.startswith("eval/")},
    )


class _Rewards(nn.Module):
    """(2 P,) rewards: those of the chosen answers, then those of the rejected ones."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Sequence[dict[str, Any]], order: Tensor) -> Tensor:
        config = self.model.config.get_text_config()
        given, rewards = config.pad_token_id, []
        for part in parts:
            config.pad_token_id = part.pop("padding")
            rewards.append(self.model(**part).logits[:, 0])
        config.pad_token_id = given
        return torch.cat(rewards)[order]


def _loss(rewards: Tensor, margins: Tensor) -> Tensor:
    chosen, rejected = rewards.view(2, -1)
    return preference_losses(chosen, rejected, margins).sum()


def _fitting_rows(
    tokenizer: Any, pairs: Sequence[Preference], max_length: int | None, layout: Layout | None
) -> list[Pair]:
    rows = []
    for number, pair in enumerate(pairs):
        try:
            chosen, rejected = (
                encode_answer(tokenizer, pair.prompt, answer, layout) for answer in (pair.chosen, pair.rejected)
            )
        except ValueError as error:
            raise InputError(f"pair {number}: {error}") from error
        if max_length is None or max(len(chosen.ids), len(rejected.ids)) <= max_length:
            rows.append((chosen, rejected, pair.margin))
    return rows


def _collate(rows: Sequence[Pair], *, padding: int | None, parts: int) -> dict[str, Any]:
    """All answers of the pairs, those of like length in one part, and the order that puts them in pairs again.

    Decoders read the last token that is not the padding id: where the model names none, as in scoring, one is taken
    that ends no answer.
    """
    answers = [chosen for chosen, _, _ in rows] + [rejected for _, rejected, _ in rows]
    groups = parts_by_length([len(answer.ids) for answer in answers], parts)
    batches: list[dict[str, Any]] = []
    for group in groups:
        ends = {answers[index].ids[-1] for index in group}
        fill = padding if padding is not None else next(free for free in range(len(ends) + 1) if free not in ends)
        ids, mask = pad_right([answers[index].ids for index in group], fill)
        batches.append({"input_ids": ids, "attention_mask": mask, "padding": fill})
        if all(answers[index].types is not None for index in group):
            batches[-1]["token_type_ids"] = pad_right([answers[index].types or [] for index in group], 0)[0]
    order = torch.argsort(torch.tensor([index for group in groups for index in group]))
    return {"parts": batches, "order": order, "labels": torch.tensor([margin for _, _, margin in rows])}


def _measures(model: Any, rows: Sequence[Pair], config: FitConfig) -> dict[str, float]:
    """Loss, share of pairs whose chosen answer scores higher (a tie counts half), and the mean difference."""
    model.eval()
    lengths = [2 * max(len(chosen.ids), len(rejected.ids)) for chosen, rejected, _ in rows]
    order = sorted(range(len(rows)), key=lambda number: -lengths[number])
    batches = cut_batches(order, lengths, config.batch_rows, config.batch_tokens)
    scored = []
    for batch in batches[process_number() :: process_count()]:
        some = [rows[number] for number in batch]
        rewards = pooled_logits(model, [row[0] for row in some] + [row[1] for row in some])[:, 0]
        scored += list(zip(rewards[: len(some)].tolist(), rewards[len(some) :].tolist(), [row[2] for row in some]))
    chosen, rejected, margins = torch.tensor(all_processes(scored), dtype=torch.float64).unbind(dim=1)
    return {
        "eval/loss": float(preference_losses(chosen, rejected, margins).mean()),
        "eval/accuracy": float(((chosen > rejected).double() + (chosen == rejected).double() / 2).mean()),
        "eval/margin": float((chosen - rejected).mean()),
    }


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _restore(model: Any, folder: Path) -> None:
    saved = type(model).from_pretrained(folder, dtype="auto", use_safetensors=True, trust_remote_code=False)
    model.load_state_dict(saved.state_dict())
