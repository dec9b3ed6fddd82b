"""The folder of a run: never overwritten, locked while in use, gone on from where it was left."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..grpo.checkpoint import write_text
from ..verifiers import InputError

__all__ = ["IGNORED", "first_difference", "flat_config", "read_status", "run_folder"]

# What may differ between the start of a run and its continuation, since it does not change the result.
IGNORED = {
    "run.dir",
    "run.save_every",
    "run.keep_checkpoints",
    "run.save_model",
    "threads",
    "device",
    "logger",
    "label",
    "ablate",
    "hydra",
}


@contextmanager
def run_folder(folder: Path, config: dict[str, Any], overrides: list[str]) -> Iterator[Path]:
    """Make or reopen ``folder`` for a run with ``config``, and hold it while the block runs.

    Raises:
        InputError: it cannot be written, another process works in it, it holds a finished run, or one with another
            configuration (the first key that differs is named).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"run.dir={folder}: cannot be written ({error.strerror}); choose another run.dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"run.dir={folder}: another process works in it; choose another run.dir") from error
        _refuse_other_run(folder, config)
        write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        write_text(folder / "overrides.yaml", yaml.safe_dump(overrides, allow_unicode=True))
        yield folder


def read_status(folder: Path) -> dict[str, Any]:
    """``status.json`` of a run folder; empty where there is none."""
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return status


def _refuse_other_run(folder: Path, config: dict[str, Any]) -> None:
    if read_status(folder).get("state") == "finished":
        raise InputError(
            f"run.dir={folder}: holds a finished run; choose another run.dir, or remove this one to redo it"
        )
    if not any((folder / "checkpoints").glob("step_*")):
        return
    now = flat_config(config)
    key = first_difference(folder, now)
    if key is not None:
        raise InputError(
            f"run.dir={folder}: holds an unfinished run with another {key} than {now.get(key)}; repeat its options to "
            "go on, or choose another run.dir"
        )


def first_difference(folder: Path, config: dict[str, Any]) -> str | None:
    """The first key in which the run in ``folder`` differs from a flat ``config`` in a way that matters, or None."""
    saved = folder / "config.yaml"
    if not saved.exists():
        return None
    before = flat_config(yaml.safe_load(saved.read_text(encoding="utf-8")))
    keys = sorted(before.keys() | config.keys())
    return next((key for key in keys if not _ignored(key) and before.get(key) != config.get(key)), None)


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IGNORED)


def flat_config(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    return {
        k: v
        for name, child in node.items()
        for k, v in flat_config(child, f"{prefix}.{name}" if prefix else name).items()
    }
