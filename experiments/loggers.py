"""Optional further homes of the metrics; each needs its own library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..verifiers import InputError

__all__ = ["TensorBoardLogger", "TrackioLogger", "WandbLogger"]


class TensorBoardLogger:
    """TensorBoard events in ``folder/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError('logger=tensorboard: needs TensorBoard; pip install "apportion[tracking]"') from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; keys and entity come from its own environment variables."""

    def __init__(self, folder: Path, project: str = "apportion") -> None:
        self._run = _library("wandb").init(project=project, dir=str(folder), name=folder.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """trackio, the local tracker."""

    def __init__(self, folder: Path, project: str = "apportion") -> None:
        self._trackio = _library("trackio")
        self._trackio.init(project=project, name=folder.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f'logger={name}: the library is missing; pip install "apportion[tracking]"') from error
