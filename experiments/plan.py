"""What an ablation consists of: strategies, seeds, and one folder and configuration for each pair."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .app import quoted_override
from .build import check_value

__all__ = ["CellPlan", "Sweep", "plan_cells", "read_sweep"]

LABEL = re.compile(r"\w[\w.+=-]{0,59}")  # at most 240 bytes: a file name has room for 255


@dataclass(frozen=True)
class Sweep:
    """What is varied, and what is not.

    Args:
        strategies: label of each, and the overrides that make it.
        baseline: label of the strategy that all are compared with.
        seeds: of every strategy.
        shared: overrides of all cells.
    """

    strategies: Mapping[str, Sequence[str]]
    baseline: str
    seeds: Sequence[int]
    shared: Sequence[str]


@dataclass(frozen=True)
class CellPlan:
    """One cell: a strategy with a seed, its folder and the overrides that make its configuration."""

    strategy: str
    seed: int
    folder: Path
    overrides: list[str]


def read_sweep(config: DictConfig, arguments: Iterable[str]) -> Sweep:
    """``credit=a,b`` and ``seed=0,1`` on the command line take the place of ``ablate.strategies`` and ``ablate.seeds``.

    Args:
        config: composed from ``conf/ablate.yaml``.
        arguments: overrides of the command line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    strategies, seeds = _strategies(config.ablate.strategies), _seeds(config.ablate.seeds)
    shared: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        key = override.key_or_group
        if key == "credit" and override.package is None:
            if override.is_delete() or override.is_add():
                raise InputError(
                    f"{override.input_line}: an ablation takes its strategies from ablate.strategies; for your own "
                    'write \'+ablate.strategies.mine=["~credit","+credit._target_=my_file.Mine"]\''
                )
            strategies = _options(_values(override))
        elif key == "seed":
            seeds = _seeds(_values(override))
        elif override.is_sweep_override():
            raise InputError(f"{key}: an ablation sweeps credit and seed only; run it once for each value of {key}")
        elif key.split(".")[0] not in ("ablate", "hydra") and key not in ("run.dir", "hydra/launcher", "hydra/sweeper"):
            shared.append(str(override.input_line))
    option = str(config.ablate.baseline)
    baseline = option if option in strategies else _label(option)
    if baseline not in strategies:
        strategies = {baseline: [f"credit={option}"], **strategies}
    return Sweep(strategies, baseline, seeds, shared)


def plan_cells(root: Path, sweep: Sweep) -> list[CellPlan]:
    """Every strategy with every seed, strategy by strategy."""
    plans = []
    for label, own in sweep.strategies.items():
        for seed in sweep.seeds:
            folder = root / "cells" / label / f"seed_{seed}"
            fixed = [quoted_override("label", label), f"seed={seed}", quoted_override("run.dir", str(folder))]
            plans.append(CellPlan(label, seed, folder, [*sweep.shared, *own, *fixed]))
    return plans


def _strategies(node: Any) -> dict[str, list[str]]:
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(plain, dict):
        raise InputError(f"ablate.strategies={plain!r}: must be labels with lists of overrides")
    pairs: list[tuple[str, list[str]]] = []
    for label, value in plain.items():
        if value is None:  # taken out
            continue
        overrides = [value] if isinstance(value, str) else value
        check_value(overrides, list[str], f"ablate.strategies.{label}")
        pairs.append((str(label), overrides))
    return _distinct(pairs)


def _options(values: Iterable[Any]) -> dict[str, list[str]]:
    return _distinct([(_label(str(value)), [f"credit={value}"]) for value in values])


def _label(option: str) -> str:
    return option.replace("/", "_")


def _distinct(pairs: Sequence[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Refuse labels that name no folder, or the same one, also where the file system does not tell capitals apart."""
    folders = Counter(label.casefold() for label, _ in pairs)
    for label, overrides in pairs:
        if not LABEL.fullmatch(label):
            raise InputError(
                f"ablate.strategies.{label[:80]!r}: a label names a folder; use up to 60 letters, digits and _ . + = -"
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
