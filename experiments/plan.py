"""What an ablation consists of: strategies, settings, seeds, and one folder and configuration for each combination."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .app import quoted_override
from .build import check_value
from .settings import even_rollouts, grid, read_settings, setting_folder, setting_overrides

__all__ = ["CellPlan", "Sweep", "plan_cells", "read_strategies", "read_sweep"]

NOT_SHARED = ("run.dir", "hydra/launcher", "hydra/sweeper")
LABEL = re.compile(r"\w[\w.+=-]{0,59}")  # at most 240 bytes: a file name has room for 255


@dataclass(frozen=True)
class Sweep:
    """What is varied, and what is not.

    Args:
        strategies: label of each, and the overrides that make it.
        baseline: label of the strategy that all are compared with.
        seeds: of every strategy.
        shared: overrides of all cells.
        settings: options that are varied too, with the values of each; every strategy runs with every combination.
        rollouts: completions of a rollout batch, held where the group size is varied.
    """

    strategies: Mapping[str, Sequence[str]]
    baseline: str
    seeds: Sequence[int]
    shared: Sequence[str]
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rollouts: int | None = None


@dataclass(frozen=True)
class CellPlan:
    """One cell: a strategy with a seed at a setting, its folder and the overrides that make its configuration."""

    strategy: str
    seed: int
    folder: Path
    overrides: list[str]
    setting: Mapping[str, Any] = field(default_factory=dict)


def read_sweep(config: DictConfig, arguments: Iterable[str]) -> Sweep:
    """``credit=a,b`` and ``seed=0,1`` on the command line take the place of ``ablate.strategies`` and ``ablate.seeds``,
    and several values of any other option, ``optim.lr=1e-4,3e-4``, that of its list in ``ablate.settings``; a single
    value there takes it out.

    Args:
        config: composed from ``conf/ablate.yaml``.
        arguments: overrides of the command line.
    """
    settings = read_settings(config.ablate.get("settings"))
    seeds, rest = _seeds(config.ablate.seeds), []
    for override in _parsed(arguments):
        key = override.key_or_group
        if key == "seed":
            seeds = _seeds(_values(override))
        elif key == "credit" or not (override.is_sweep_override() or key in settings):
            rest.append(str(override.input_line))
        elif override.is_sweep_override():
            settings |= read_settings({key: _values(override)}, "")
        else:
            del settings[key]
            rest.append(str(override.input_line))
    strategies, shared = read_strategies(config.ablate.strategies, rest, "ablate")
    option = str(config.ablate.baseline)
    baseline = option if option in strategies else _label(option)
    if baseline not in strategies:
        strategies = {baseline: [f"credit={option}"], **strategies}
    _check_apart(strategies, settings)
    return Sweep(strategies, baseline, seeds, shared, settings, even_rollouts(settings, config) if settings else None)


def read_strategies(
    node: Any, arguments: Iterable[str], command: str, *, key: str = "strategies"
) -> tuple[dict[str, list[str]], list[str]]:
    """The strategies of ``COMMAND.KEY``, or of ``credit=a,b`` in their place, and the overrides that all of them share.

    Args:
        node: labels with lists of overrides; null leaves one out.
        arguments: overrides of the command line.
        command, key: where the node stands, for messages.
    """
    strategies, shared = _strategies(node, f"{command}.{key}"), []
    for override in _parsed(arguments):
        name = override.key_or_group
        if name == "credit" and override.package is None:
            if override.is_delete() or override.is_add():
                raise InputError(
                    f"{override.input_line}: the strategies are those of {command}.{key}; for your own "
                    f'write \'+{command}.{key}.mine=["~credit","+credit._target_=my_file.Mine"]\''
                )
            strategies = _options(_values(override), f"{command}.{key}")
        elif override.is_sweep_override():
            raise InputError(f"{name}: takes one value here; only credit may have several")
        elif name.split(".")[0] not in (command, "hydra") and name not in NOT_SHARED:
            shared.append(str(override.input_line))
    return strategies, shared


def plan_cells(root: Path, sweep: Sweep) -> list[CellPlan]:
    """Every strategy at every setting with every seed: strategy by strategy, and the seeds of a setting together."""
    plans = []
    for label, own in sweep.strategies.items():
        for setting in grid(sweep.settings):
            within = root / "cells" / label / (setting_folder(setting) if setting else "")
            varied = setting_overrides(setting, sweep.rollouts)
            for seed in sweep.seeds:
                folder = within / f"seed_{seed}"
                fixed = [quoted_override("label", label), f"seed={seed}", quoted_override("run.dir", str(folder))]
                plans.append(CellPlan(label, seed, folder, [*sweep.shared, *own, *varied, *fixed], setting))
    return plans


def _parsed(arguments: Iterable[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return list(OverridesParser.create().parse_overrides(list(arguments)))


def _check_apart(strategies: Mapping[str, Sequence[str]], settings: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a strategy that sets what is varied: one of the two would be lost."""
    held = {*settings, *(["rollout.prompts_per_step"] if "rollout.group_size" in settings else [])}
    for label, own in strategies.items():
        for override in own:
            key = override.lstrip("+~").partition("=")[0].partition("@")[0]
            if key in held:
                raise InputError(
                    f"ablate.strategies.{label}: sets {key}, which ablate.settings varies; drop one of them"
                )


def _strategies(node: Any, key: str) -> dict[str, list[str]]:
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(plain, dict):
        raise InputError(f"{key}={plain!r}: must be labels with lists of overrides")
    pairs: list[tuple[str, list[str]]] = []
    for label, value in plain.items():
        if value is None:  # taken out
            continue
        overrides = [value] if isinstance(value, str) else value
        check_value(overrides, list[str], f"{key}.{label}")
        pairs.append((str(label), overrides))
    return _distinct(pairs, key)


def _options(values: Iterable[Any], key: str) -> dict[str, list[str]]:
    return _distinct([(_label(str(value)), [f"credit={value}"]) for value in values], key)


def _label(option: str) -> str:
    return option.replace("/", "_")


def _distinct(pairs: Sequence[tuple[str, list[str]]], key: str) -> dict[str, list[str]]:
    """Refuse labels that name no folder, or the same one, also where the file system does not tell capitals apart."""
    folders = Counter(label.casefold() for label, _ in pairs)
    for label, overrides in pairs:
        if not LABEL.fullmatch(label):
            raise InputError(
                f"{key}.{label[:80]!r}: a label names a folder; use up to 60 letters, digits and _ . + = -"
            )
        if folders[label.casefold()] > 1:
            raise InputError(f"{', '.join(overrides)}: another strategy has the label {label} too; name them apart")
    return dict(pairs)


def _values(override: Any) -> list[Any]:
    """The values of an override, one or several."""
    if not override.is_sweep_override():
        return [override.value()]
    try:
        return [getattr(value, "text", value) for value in override.sweep_iterator()]  # quoted ones have a text
    except HydraException as error:  # glob(*), which only Hydra's own sweeper resolves
        raise InputError(f"{override.input_line}: write the values one by one, as in credit=a,b") from error


def _seeds(value: Any) -> list[int]:
    plain: Any = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    seeds: Any = list(range(plain)) if isinstance(plain, int) and not isinstance(plain, bool) else plain
    check_value(seeds, list[int], "ablate.seeds")
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(f"ablate.seeds={plain}: give a number of seeds, or a list of different ones")
    return list(seeds)
