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
from .files import one_line, sync, write_text

__all__ = [
    "global_rng_state",
    "latest_checkpoint",
    "load_checkpoint",
    "restore_global_rng",
    "save_checkpoint",
    "write_text",
]


def save_checkpoint(folder: Path, name: str, model: Any, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write ``folder/name`` with the model's weights (safetensors) and everything else (``state.pt``), atomically.

    At every moment the folder holds the earlier checkpoints or the new one, whole; a crash leaves at most hidden
    litter, which the next call sweeps up.

    Args:
        folder: the run's ``checkpoints``; its parent must be there.
        name: sorts after those of earlier steps.
        model: its weights are saved.
        state: tensors and plain values.
        keep: at least 1; older checkpoints beyond this number are removed, once the new one is whole.

    Raises:
        InputError: it cannot be written, for example on a full disk. The earlier checkpoints are as before.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    target, temporary = folder / name, folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        save_model(model, str(temporary / "model.safetensors"))
        torch.save(dict(state), temporary / "state.pt")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if target.exists():
            shutil.rmtree(_aside(target), ignore_errors=True)
            target.rename(_aside(target))  # still a whole checkpoint, should the next line not be reached
        temporary.rename(target)
        sync(folder)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # the last two: how torch and safetensors report a full disk
        raise InputError(
            f"checkpoint {target}: cannot be written ({one_line(error)}); free the disk or set run.dir elsewhere"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(_aside(target), ignore_errors=True)
    for old in _whole(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = _whole(folder)
    return found[-1] if found else None


def load_checkpoint(path: Path, model: Any, *, lazily: bool = False) -> dict[str, Any]:
    """Load the weights into ``model`` and return the rest.

    Args:
        path: of the checkpoint.
        model: gets its weights.
        lazily: leave tensors of the rest on the disk until they are read; of use where each process needs a part.

    Raises:
        InputError: a file is missing or damaged, or the weights are those of another model.
    """
    from safetensors.torch import load_model

    try:
        state: dict[str, Any] = torch.load(path / "state.pt", weights_only=True, map_location="cpu", mmap=lazily)
        load_model(model, str(path / "model.safetensors"), device=str(next(model.parameters()).device))
    except Exception as error:
        raise InputError(
            f"checkpoint {path} cannot be read ({one_line(error)}); remove it to go on from the one before"
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
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, device)


def _whole(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if not p.name.startswith(".") and (p / "state.pt").exists())
    return sorted(found, key=lambda path: (path.name.removesuffix(".old"), not path.name.endswith(".old")))


def _aside(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written. The run folder has one owner, so nobody else writes here."""
    for litter in folder.glob(".*.tmp"):
        shutil.rmtree(litter, ignore_errors=True)
