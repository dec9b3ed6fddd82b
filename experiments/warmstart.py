"""Supervised warm start on demonstrations, cached by a hash of everything that decides its result."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..grpo.forward import score_completions
from ..grpo.policy import Policy
from ..grpo.seeds import named_generator
from ..verifiers import InputError

__all__ = ["WarmStart", "cache_folder", "warm_start"]

RECIPE = 1  # raise it when the procedure below changes its result


@dataclass(frozen=True)
class WarmStart:
    """Supervised training before the reinforcement.

    Args:
        steps: optimiser steps; 0 leaves the policy as it is.
        batch_size: demonstrations a step.
        micro_batch_size: demonstrations in one forward.
        lr: peak learning rate, after a linear warm-up of ``warmup`` steps; falls linearly to a tenth.
        warmup: steps.
        seed: of the demonstrations' order.
    """

    steps: int = 420
    batch_size: int = 64
    micro_batch_size: int = 64
    lr: float = 1.0e-2
    warmup: int = 20
    seed: int = 0


def cache_folder() -> Path:
    """``$APPORTION_CACHE``, or ``apportion`` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "apportion"
    return Path(os.environ.get("APPORTION_CACHE", default)).expanduser()


def warm_start(
    policy: Policy,
    policy_key: dict[str, Any],
    task: Any,
    config: WarmStart,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> bool:
    """Bring ``policy`` to its warm-started weights, from the cache or by training; True where the cache had them.

    The cache key covers the policy's initial weights, the task with its demonstrations, and ``config``. Two processes
    that want the same weights do the work once.
    """
    from safetensors.torch import load_model, save_model

    if config.steps == 0:
        return True
    if not hasattr(task, "demonstrations"):
        raise InputError(f"warm_start.steps={config.steps}: {type(task).__name__} has no demonstrations; set it to 0")
    key = {"recipe": RECIPE, "policy": policy_key, "task": _task_key(task), "warm_start": asdict(config)}
    text = json.dumps(key, sort_keys=True, default=str)
    folder = cache_folder() / "warm_start" / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    with _locked(folder):
        weights = folder / "model.safetensors"
        if weights.exists():
            load_model(policy.model, weights, device=str(policy.device))
            return True
        supervise(policy, task, config, progress=progress)
        temporary = folder / f"model.{os.getpid()}.tmp"
        save_model(policy.model, str(temporary))
        (folder / "key.json").write_text(json.dumps(key, indent=2, default=str))
        temporary.rename(weights)
    return False


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
    return prompts, [[*ids, policy.eos_ids[0]] for ids in completions]


def _rate(step: int, config: WarmStart) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return 1 - 0.9 * (step - config.warmup) / max(config.steps - config.warmup, 1)


def _task_key(task: Any) -> dict[str, Any]:
    """The task's options, and the first demonstrations, so that a changed generator is a different key."""
    options = {k: v for k, v in vars(task).items() if not k.startswith("_") and isinstance(v, (int, float, str))}
    first = task.demonstrations(8, np.random.default_rng(0))
    return {"class": type(task).__qualname__, "options": options, "demonstrations": first}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"cache folder {folder}: {error.strerror}; set APPORTION_CACHE to a writable one") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
