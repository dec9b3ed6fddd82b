"""Checkpoints: whole or not there at all, and enough to go on bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..verifiers import InputError

__all__ = [
    "global_rng_state",
    "latest_checkpoint",
    "load_checkpoint",
    "restore_global_rng",
    "save_checkpoint",
    "write_text",
]


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it: readers see the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_checkpoint(folder: Path, name: str, model: Any, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write ``folder/name`` with the model's weights (safetensors) and everything else (``state.pt``), atomically.

    Args:
        folder: the run's ``checkpoints``.
        name: sorts after those of earlier steps.
        model: its weights are saved.
        state: tensors and plain values.
        keep: older checkpoints beyond this number are removed, once the new one is whole.
    """
    from safetensors.torch import save_model

    target, temporary = folder / name, folder / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_model(model, str(temporary / "model.safetensors"))
        torch.save(dict(state), temporary / "state.pt")
        for file in temporary.iterdir():
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(
            f"checkpoint {target}: {error.strerror or error}; free the disk or set run.dir elsewhere"
        ) from error
    for old in _whole(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = _whole(folder)
    return found[-1] if found else None


def load_checkpoint(path: Path, model: Any) -> dict[str, Any]:
    """Load the weights into ``model`` and return the rest."""
    from safetensors.torch import load_model

    try:
        load_model(model, str(path / "model.safetensors"), device=str(next(model.parameters()).device))
        state: dict[str, Any] = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    except Exception as error:
        raise InputError(
            f"checkpoint {path} cannot be read ({error}); remove it to go on from the one before"
        ) from error
    return state


def global_rng_state() -> dict[str, Any]:
    """State of Python's, numpy's and torch's global generators, as plain values and tensors."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": json.dumps([version, list(internal), gauss]),
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, cached]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_global_rng(state: Mapping[str, Any]) -> None:
    """Put the global generators back where :func:`global_rng_state` found them."""
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = json.loads(state["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _whole(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and (p / "state.pt").exists())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
