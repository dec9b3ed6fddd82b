"""``run.json``: what a run's strategy is, and what it was told beyond the answer's reward."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..credit import CreditStrategy
from ..grpo.files import write_text
from ..grpo.policy import Policy

__all__ = ["describe_strategy", "label_of", "write_description"]


def write_description(
    folder: Path, config: DictConfig, strategy: CreditStrategy, policy: Policy, overrides: Sequence[str]
) -> None:
    """Write ``run.json`` into the run folder; its command makes the same run, that of an ablation too."""
    from apportion import __version__

    description = {
        "strategy": label_of(config),
        **describe_strategy(strategy),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "apportion": __version__,
        "command": shlex.join(["apportion", "train", *overrides]),
    }
    write_text(folder / "run.json", json.dumps(description, indent=2, ensure_ascii=False) + "\n")


def describe_strategy(strategy: CreditStrategy) -> dict[str, Any]:
    """First line of its docstring, its signals, and what they tell it."""
    first, _, _ = (inspect.getdoc(type(strategy)) or type(strategy).__name__).partition("\n")
    description = first.partition(": ``")[0].replace("`", "").rstrip(".")  # words; the formula stays in the code
    inner = getattr(strategy, "inner", None)
    if inner is not None:
        description += f" (of {type(inner).__name__})"
    return {
        "description": description,
        "signals": sorted(strategy.requires),
        "extra_information": getattr(strategy, "extra_information", ""),
        "conserves": strategy.conserves,
        "phase": strategy.phase,
    }


def label_of(config: DictConfig) -> str:
    """The run's label, or the name of its credit option, or of its class where it is no option."""
    if config.get("label") is not None:
        return str(config.label)
    from hydra.core.hydra_config import HydraConfig

    choice = HydraConfig.get().runtime.choices.get("credit") if HydraConfig.initialized() else None
    return str(choice or str(config.credit._target_).rpartition(".")[2])
