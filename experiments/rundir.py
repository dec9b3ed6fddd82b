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
from omegaconf import DictConfig, OmegaConf

from ..grpo.files import write_text
from ..verifiers import InputError

__all__ = [
    "IGNORED",
    "difference",
    "flat_config",
    "has_results",
    "hold_folder",
    "plain_config",
    "read_status",
    "refuse_finished",
    "refuse_other_run",
    "run_folder",
    "run_path",
]

# What may differ between the start of a run and its continuation, since it does not change the result.
IGNORED = {
    *(f"engine.{name}" for name in ("base_url", "api_key_env", "concurrency", "timeout_s", "retries", "host")),
    "run.dir",
    "run.save_every",
    "run.keep_checkpoints",
    "run.save_model",
    "threads",
    "device",
    "parallel",
    "logger",
    "label",
    "command",
    "ablate",
    "hydra",
}


def run_path(value: Any) -> Path:
    """The folder that ``run.dir`` names, ``~`` included."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"run.dir={value!r}: must be the path of a folder; a number is quoted: \"run.dir='3'\"")
    return Path(value).expanduser()


def plain_config(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration of a run as plain values, without Hydra's own node."""
    kept = OmegaConf.masked_copy(config, [key for key in map(str, config) if key != "hydra"])
    plain: Any = OmegaConf.to_container(kept, resolve=True)
    return dict(plain)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make ``folder`` where it is missing, and keep other processes out of it while the block runs.

    Raises:
        InputError: it cannot be written, or another process works in it.
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
        yield


@contextmanager
def run_folder(folder: Path, config: dict[str, Any], overrides: list[str]) -> Iterator[None]:
    """Make or reopen ``folder`` for a run with ``config``, and hold it while the block runs.

    Raises:
        InputError: as of :func:`hold_folder` and :func:`refuse_other_run`.
    """
    with hold_folder(folder):
        refuse_other_run(folder, config)
        write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        write_text(folder / "overrides.yaml", yaml.safe_dump(overrides, allow_unicode=True))
        yield


def read_status(folder: Path) -> dict[str, Any]:
    """``status.json`` of a run folder; empty where there is none."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def refuse_other_run(folder: Path, config: dict[str, Any]) -> None:
    """Raise an InputError where a run with ``config`` would overwrite what ``folder`` holds."""
    if (folder / "ablation.json").exists():
        raise InputError(f"run.dir={folder}: holds an ablation; choose another run.dir")
    saved = folder / "config.yaml"
    if not saved.exists():
        return
    if read_status(folder).get("state") == "finished" and not _lacks_model(folder, config):
        raise InputError(
            f"run.dir={folder}: holds a finished run; choose another run.dir, or remove this one to redo it"
        )
    if not _is_a_runs(saved):
        raise InputError(f"run.dir={folder}: holds a config.yaml that is not a run's; choose another run.dir")
    if not has_results(folder):
        return  # it stopped before it had anything to lose
    key = difference(folder, config)
    if key is not None:
        raise InputError(
            f"run.dir={folder}: holds an unfinished run with other options ({key}); repeat its options to go on, or "
            "choose another run.dir"
        )


def refuse_finished(folder: Path, config: dict[str, Any], result: str) -> None:
    """Raise an InputError where ``folder`` holds a finished run, or one with other options; the same run goes on.

    Args:
        folder: of the run.
        config: plain values, as in its ``config.yaml``.
        result: the file that a finished run leaves.
    """
    if not (folder / "config.yaml").exists():
        return
    if (folder / result).exists():
        raise InputError(f"run.dir={folder}: holds a finished run; choose another run.dir")
    if (key := difference(folder, config)) is not None:
        raise InputError(f"run.dir={folder}: holds a run with other options ({key}); choose another run.dir")


def difference(folder: Path, config: dict[str, Any]) -> str | None:
    """The first option in which the run in ``folder`` differs from ``config`` in a way that matters, or None.

    Returns:
        For example ``run.steps=60, not 80``.
    """
    now, before = flat_config(config), flat_config(_load(folder / "config.yaml"))
    for key in sorted(before.keys() | now.keys()):
        if not _ignored(key) and before.get(key) != now.get(key):
            return f"{key}={before.get(key)}, not {now.get(key)}"
    return None


def flat_config(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots.

    >>> flat_config({"run": {"steps": 60, "dir": "x"}, "seed": 0})
    {'run.steps': 60, 'run.dir': 'x', 'seed': 0}
    """
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flat_config(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in IGNORED)


def has_results(folder: Path) -> bool:
    """Whether a run in ``folder`` left anything that would be lost."""
    metrics = folder / "metrics.jsonl"
    return any((folder / "checkpoints").glob("step_*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _lacks_model(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a run ended between its last step and its model: the same command has the model to save yet."""
    return bool(config["run"].get("save_model")) and not (folder / "model").exists()


def _is_a_runs(saved: Path) -> bool:
    config = _load(saved)
    return isinstance(config, dict) and "command" in config and "run" in config


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
