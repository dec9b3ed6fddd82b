"""Hydra finds its plugins in this namespace package: the sweeper behind ``apportion ablate`` and ``apportion probe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class AblationSweeper(Sweeper):
    """Hands several strategies on to the command: an ablation makes jobs of them, a probe builds them side by side."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.context: HydraContext | None = None
        self.launcher: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from apportion.experiments.ablate import ablate
        from apportion.experiments.probe.command import probe

        assert self.config is not None
        assert self.context is not None
        loader, config = self.context.config_loader, self.config

        def compose(overrides: Sequence[str]) -> DictConfig:
            return loader.load_sweep_config(config, list(overrides))

        if config.command == "probe":
            probe(config, arguments, compose)
        else:
            ablate(config, arguments, compose=compose, launch=lambda jobs: self.launcher.launch(jobs, 0))
