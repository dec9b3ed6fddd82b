"""Supervised warm start on demonstrations, cached by a hash of everything that decides its result."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..grpo.forward import score_completions
from ..grpo.policy import Policy
from ..grpo.seeds import named_generator
from ..verifiers import InputError

__all__ = ["WarmStart", "cache_folder", "is_cached", "warm_start"]

WEIGHTS = "model.safetensors"
RECIPE = 2  # raise it when the procedure below changes its result


@dataclass(frozen=True)
class WarmStart:
    """Supervised training before the reinforcement.

    Args:
        steps: optimiser steps; 0 leaves the policy as it is.
        batch_size: demonstrations a step.
        micro_batch_size: demonstrations in one forward.
        lr: peak learning rate, after a linear warm-up of ``warmup`` steps; falls linearly to zero.
        warmup: steps.
        seed: of the demonstrations' order.
    """

    steps: int = 650
    batch_size: int = 64
    micro_batch_size: int = 64
    lr: float = 1.0e-2
    warmup: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1), ("micro_batch_size", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise InputError(f"warm_start.{name}={getattr(self, name)}: must be at least {least}")
        if not self.lr > 0:
            raise InputError(f"warm_start.lr={self.lr}: must be over 0; warm_start.steps=0 leaves the policy as it is")


def cache_folder() -> Path:
    """``$APPORTION_CACHE``, or ``apportion`` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "apportion"
    return Path(os.environ.get("APPORTION_CACHE") or default).expanduser()


def warm_start(
    policy: Policy,
    policy_key: Mapping[str, Any],
    task: Any,
    config: WarmStart,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> bool:
    """Bring ``policy`` to its warm-started weights, from the cache or by training; True where nothing was trained.

    The cache key covers the policy's initial weights, the task with its demonstrations, and ``config``. Two processes
    that want the same weights do the work once; a damaged file is made anew.
    """
    from safetensors.torch import load_model

    if config.steps == 0:
        return True
    key = _key(policy_key, task, config)
    folder = _folder(key)
    cached = _is_whole(folder)
    if not cached:
        with _locked(folder):
            cached = _is_whole(folder)  # another process may have been faster
            if not cached:
                supervise(policy, task, config, progress=progress)
                _store(policy, folder, key)
    if cached:
        load_model(policy.model, folder / WEIGHTS, device=str(policy.device))
    return cached


def is_cached(policy_key: Mapping[str, Any], task: Any, config: WarmStart) -> bool:
    """Whether :func:`warm_start` would have nothing to train."""
    return config.steps == 0 or _is_whole(_folder(_key(policy_key, task, config)))


def supervise(
    policy: Policy, task: Any, config: WarmStart, *, progress: Callable[[int, float], None] | None = None
) -> None:
    """Minimise the mean negative log-likelihood of the demonstrated completions' tokens."""
    rng = named_generator(config.seed, "demonstrations")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config))
    for step in range(config.steps):
        prompts, completions = _encoded(policy, task.demonstrations(config.batch_size, rng))
        tokens = sum(map(len, completions))
        total = 0.0
        for start in range(0, len(prompts), config.micro_batch_size):
            stop = start + config.micro_batch_size
            width = max(map(len, completions[start:stop]))
            scored = score_completions(policy, prompts[start:stop], completions[start:stop], width=width)
            loss = -scored.logprobs.sum() / tokens
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise InputError(f"warm start: the loss is {total} at step {step + 1}; lower warm_start.lr={config.lr}")
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(step + 1, total)


def _encoded(policy: Policy, pairs: list[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [policy.encode(prompt) for prompt, _ in pairs]
    texts = [completion for _, completion in pairs]
    completions = policy.tokenizer(texts, add_special_tokens=False)["input_ids"]
    unknown = policy.tokenizer.unk_token_id
    for text, ids in zip(texts, completions):
        if unknown is not None and unknown not in policy.eos_ids and unknown in ids:
            raise InputError(f"warm start: the policy does not know every symbol of the demonstration {text[:60]!r}")
    return prompts, [[*ids, policy.eos_ids[0]] for ids in completions]


def _rate(step: int, config: WarmStart) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return 1 - (step - config.warmup) / max(config.steps - config.warmup, 1)


def _key(policy_key: Mapping[str, Any], task: Any, config: WarmStart) -> dict[str, Any]:
    """Everything that decides the result; some demonstrations are in it, so that a changed generator is another key."""
    if not hasattr(task, "demonstrations"):
        raise InputError(f"warm_start.steps={config.steps}: {type(task).__name__} has no demonstrations; set it to 0")
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    content = getattr(task, "content", None)
    if content is None:
        content = {k: v for k, v in vars(task).items() if not k.startswith("_") and isinstance(v, plain)}
    shown = task.demonstrations(8, np.random.default_rng(0))
    about = {"class": type(task).__qualname__, "content": content, "demonstrations": shown}
    return {"recipe": RECIPE, "policy": dict(policy_key), "task": about, "warm_start": asdict(config)}


def _folder(key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    return cache_folder() / "warm_start" / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _store(policy: Policy, folder: Path, key: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    temporary = folder / f".{WEIGHTS}.tmp"  # one writer at a time: the folder is locked
    try:
        save_model(policy.model, str(temporary))
        note = {"blake2b": _digest(temporary), "key": key}
        (folder / "key.json").write_text(json.dumps(note, indent=2, default=str), encoding="utf-8")
        temporary.replace(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _cache_refused(folder, error) from error


def _is_whole(folder: Path) -> bool:
    """Whether the weights are there, byte for byte as they were written."""
    try:
        note = json.loads((folder / "key.json").read_text(encoding="utf-8"))
        return bool(note["blake2b"] == _digest(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise _cache_refused(folder, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_refused(folder: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"cache folder {folder}: cannot be written ({reason}); set APPORTION_CACHE to one that can")
