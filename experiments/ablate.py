"""Strategies x seeds on one task: same weights, problems and random streams for every strategy, equal compute."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..grpo.checkpoint import write_text
from ..verifiers import InputError
from .app import build, hydra_command, quoted_override
from .progress import StepProgress, console
from .rundir import first_difference, flat_config, read_status
from .train import train

__all__ = ["CellPlan", "ablate", "main", "plan_cells"]

Launch = Callable[[list[list[str]]], Sequence[Any]]
Compose = Callable[[Sequence[str]], DictConfig]


@dataclass(frozen=True)
class CellPlan:
    """One cell: a strategy with a seed, its folder and the overrides that make its configuration."""

    strategy: str
    seed: int
    folder: Path
    overrides: list[str]


def main(arguments: list[str] | None = None) -> None:
    """``apportion ablate key=value ...``"""
    hydra_command("ablate", run_cell, sys.argv[1:] if arguments is None else arguments)


def run_cell(config: DictConfig) -> str:
    """One cell, in a process of the launcher. Whatever goes wrong is left in the cell's ``status.json``."""
    from hydra.core.hydra_config import HydraConfig

    try:
        return train(config, overrides=list(HydraConfig.get().overrides.task))
    except Exception as error:
        folder = Path(config.run.dir)
        if read_status(folder).get("state") != "failed":
            folder.mkdir(parents=True, exist_ok=True)
            status = {"state": "failed", "step": 0, "steps": config.run.steps, "tokens": 0, "seconds": 0.0}
            write_text(folder / "status.json", json.dumps({**status, "error": f"{type(error).__name__}: {error}"}))
        raise


def ablate(config: DictConfig, arguments: Sequence[str], *, compose: Compose, launch: Launch) -> Path:
    """Run every cell that is not finished yet, then build the report.

    Args:
        config: composed from ``conf/ablate.yaml``; ``run.dir`` is the folder of the whole ablation.
        arguments: overrides of the command line, sweeps included.
        compose: a configuration from overrides.
        launch: runs one job for each list of overrides, wherever the launcher runs them.

    Returns:
        The report's path.
    """
    root = Path(config.run.dir).resolve()
    strategies, seeds, shared = read_sweeps(config, arguments)
    plans = plan_cells(root, strategies, seeds, shared)
    pending = [plan for plan in plans if _is_pending(plan, compose(plan.overrides), bool(config.ablate.retry_failed))]
    for plan in plans[:: len(seeds)]:
        _check(plan, compose(plan.overrides))
    _write_plan(root, config, strategies, seeds)
    if pending:
        _warm_start_once(compose(pending[0].overrides))
        with StepProgress(True) as bar, bar.cells(plans, len(plans) - len(pending)):
            launch([plan.overrides for plan in pending])
    return _report(root, plans)


def read_sweeps(config: DictConfig, arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[int], list[str]]:
    """Strategies, seeds, and the overrides that all cells share.

    ``credit=a,b`` and ``seed=0,1`` on the command line take the place of ``ablate.strategies`` and ``ablate.seeds``.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    strategies = {str(name): [str(o) for o in overrides] for name, overrides in config.ablate.strategies.items()}
    seeds = _seeds(config.ablate.seeds)
    shared: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.get_key_element()
        values = (
            list(override.sweep_string_iterator())
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        if key == "credit":
            strategies = {value.replace("/", "_"): [f"credit={value}"] for value in values}
        elif key == "seed":
            seeds = [int(value) for value in values]
        elif override.is_sweep_override():
            raise InputError(f"{key}: an ablation sweeps credit and seed only; run it once for each value of {key}")
        elif key.split(".")[0] not in ("ablate", "hydra") and key not in ("run.dir", "hydra/launcher", "hydra/sweeper"):
            shared.append(str(override.input_line))
    baseline = str(config.ablate.baseline)
    if baseline not in strategies:
        strategies = {baseline: [f"credit={baseline}"], **strategies}
    return strategies, seeds, shared


def plan_cells(
    root: Path, strategies: Mapping[str, Sequence[str]], seeds: Iterable[int], shared: Sequence[str]
) -> list[CellPlan]:
    """Every strategy with every seed, strategy by strategy."""
    plans = []
    for name, own in strategies.items():
        for seed in seeds:
            folder = root / "cells" / name / f"seed_{seed}"
            fixed = [quoted_override("label", name), f"seed={seed}", quoted_override("run.dir", str(folder))]
            plans.append(CellPlan(name, seed, folder, [*shared, *own, *fixed]))
    return plans


def _seeds(value: Any) -> list[int]:
    if isinstance(value, int):
        seeds = list(range(value))
    else:
        seeds = [int(seed) for seed in value]
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"ablate.seeds={value}: give a number of seeds, or a list of different ones")
    return seeds


def _is_pending(plan: CellPlan, config: DictConfig, retry_failed: bool) -> bool:
    """Whether a cell is still to be run; refuses a finished one that was run with other options."""
    state = read_status(plan.folder).get("state")
    if state == "failed" and retry_failed:
        shutil.rmtree(plan.folder)
        return True
    if state == "finished":
        key = first_difference(plan.folder, flat_config(OmegaConf.to_container(config, resolve=True)))
        if key is not None:
            raise InputError(f"{plan.folder}: was run with another {key}; choose another run.dir")
    return state not in ("finished", "failed")


def _check(plan: CellPlan, config: DictConfig) -> None:
    """Build what is cheap to build of a strategy's first cell: bad options stop the ablation before it starts."""
    from ..grpo.signals import check_signals
    from ..grpo.trainer import TrainerConfig

    verifiers = {name: build(node, f"verifiers.{name}") for name, node in config.verifiers.items() if node is not None}
    settings = {k: v for k, v in config.run.items() if k not in ("dir", "save_model")}
    reward = {name: weight for name, weight in (config.reward or {}).items() if weight is not None}
    strategy = build(config.credit, f"ablate.strategies.{plan.strategy}")
    run = TrainerConfig(seed=plan.seed, **settings)
    check_signals(strategy, verifiers, reward, success=run.success, format=run.format)
    for key in ("rollout", "loss", "optim", "task"):
        build(config[key], key)


def _write_plan(root: Path, config: DictConfig, strategies: Mapping[str, Any], seeds: list[int]) -> None:
    from apportion import __version__

    kind = str(config.ablate.budget)
    if kind not in ("steps", "tokens"):
        raise InputError(f"ablate.budget={kind}: must be steps or tokens")
    if kind == "tokens" and config.run.budget_tokens is None:
        raise InputError("ablate.budget=tokens: give run.budget_tokens, and run.steps large enough to reach it")
    plan = {
        "command": " ".join(sys.argv),
        "baseline": str(config.ablate.baseline),
        "strategies": list(strategies),
        "seeds": seeds,
        "budget": {"kind": kind, "value": int(config.run.budget_tokens if kind == "tokens" else config.run.steps)},
        "threshold": float(config.ablate.threshold),
        "task": str(config.task._target_).rpartition(".")[2],
        "started": datetime.now().isoformat(timespec="seconds"),
        "apportion": __version__,
    }
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_text(root / "ablation.json", json.dumps(plan, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"run.dir={root}: cannot be written ({error.strerror}); choose another run.dir") from error


def _warm_start_once(config: DictConfig) -> None:
    """Fill the warm-start cache before the cells start, so that they do not wait for one another."""
    from .warmstart import warm_start

    source = build(config.policy, "policy")
    start = build(config.warm_start, "warm_start")
    with StepProgress(True) as bar:
        policy = source.build()
        warm_start(
            policy, source.key, build(config.task, "task"), start, progress=bar.section("warm start", start.steps)
        )


def _report(root: Path, plans: Sequence[CellPlan]) -> Path:
    from .report.build import build_report

    path = build_report(root)
    states = [read_status(plan.folder) for plan in plans]
    screen = console()
    for plan, status in zip(plans, states):
        if status.get("state") == "failed":
            screen.print(f"failed: {plan.strategy} seed {plan.seed}: {status.get('error')}", markup=False)
    left = sum(status.get("state") not in ("finished", "failed") for status in states)
    if left:
        screen.print(f"{left} of {len(plans)} cells are not finished; the same command goes on")
    sys.stdout.write((root / "summary.csv").read_text(encoding="utf-8"))
    sys.stdout.write(f"report: {path}\n{root}\n")
    return path


if __name__ == "__main__":
    main()
