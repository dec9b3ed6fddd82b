"""Options that an ablation varies besides strategy and seed: the grid of a stability sweep."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .app import quoted_override

__all__ = [
    "Setting",
    "even_rollouts",
    "grid",
    "read_settings",
    "reference",
    "setting_folder",
    "setting_overrides",
    "short_names",
]

Setting = Mapping[str, Any]
"""One point of the grid: dotted keys of the configuration with their values."""

GROUP, PROMPTS = "rollout.group_size", "rollout.prompts_per_step"
FIXED = ("run.dir", "run.steps", "run.budget_tokens", "seed", "label", "credit", "command")


def read_settings(node: Any, key: str = "ablate.settings") -> dict[str, list[Any]]:
    """Dotted keys with the values that each takes; nested keys and keys with dots are the same.

    >>> read_settings({"optim.lr": [1e-4, 3e-4], "loss": {"clip_high": [0.2]}})
    {'optim.lr': [0.0001, 0.0003], 'loss.clip_high': [0.2]}
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    found: dict[str, list[Any]] = {}
    for name, values in _leaves(plain or {}, key):
        if values is None:  # taken out
            continue
        where = f"{key}.{name}" if key else name
        if name in FIXED or re.split(r"[./@]", name)[0] in ("ablate", "hydra"):
            raise InputError(
                f"{where}: cannot be varied besides strategy and seed; options of the run such as optim.lr can"
            )
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}={values!r}: must be a list of values")
        if any(isinstance(value, list | dict) for value in values):
            raise InputError(f"{where}={values!r}: values must be numbers, texts, true, false or null")
        if len({repr(value) for value in values}) != len(values):
            raise InputError(f"{where}={values!r}: give different values")
        found[name] = values
    return found


def grid(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last key's values next to one another; one empty setting where nothing is varied.

    >>> grid({"a": [1, 2], "b": [3]}), grid({})
    ([{'a': 1, 'b': 3}, {'a': 2, 'b': 3}], [{}])
    """
    return [dict(zip(settings, values)) for values in itertools.product(*settings.values())]


def reference(settings: Mapping[str, Sequence[Any]], config: DictConfig) -> dict[str, Any]:
    """The one setting at which strategies are compared as in any ablation: the configuration's own value of each key
    where that is among those varied, else the middle one. It is chosen before any run.
    """
    own = {name: OmegaConf.select(config, name) for name in settings}
    return {
        name: next((value for value in values if value == own[name]), values[(len(values) - 1) // 2])
        for name, values in settings.items()
    }


def even_rollouts(settings: Mapping[str, Sequence[Any]], config: DictConfig) -> int | None:
    """Completions of a rollout batch to hold where the group size is varied, so that every cell generates as many.

    Raises:
        InputError: a group size does not divide them, or the prompts are varied too and compute would differ.
    """
    if PROMPTS in settings and config.ablate.budget != "tokens":
        raise InputError(
            f"ablate.settings.{PROMPTS}: cells would generate different numbers of answers; set ablate.budget=tokens"
        )
    if GROUP not in settings or PROMPTS in settings:
        return None
    total = int(config.rollout.prompts_per_step) * int(config.rollout.group_size)
    for size in settings[GROUP]:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or total % size:
            raise InputError(
                f"ablate.settings.{GROUP}: {size!r} does not divide the {total} answers of a rollout batch "
                f"({PROMPTS} x {GROUP}), which every cell is to have"
            )
    return total


def setting_overrides(setting: Setting, rollouts: int | None) -> list[str]:
    """What makes a setting, on a command line; the number of prompts follows the group size where ``rollouts`` is held.

    >>> setting_overrides({"optim.lr": 2e-05, "loss": "dapo"}, None)
    ['optim.lr=2e-05', "loss='dapo'"]
    >>> setting_overrides({"rollout.group_size": 16}, 32)
    ['rollout.group_size=16', 'rollout.prompts_per_step=2']
    """
    made = [f"{key}={_literal(value)}" if not isinstance(value, str) else quoted_override(key, value)
            for key, value in setting.items()]  # fmt: skip
    return made if rollouts is None else [*made, f"{PROMPTS}={rollouts // setting[GROUP]}"]


def setting_folder(setting: Setting) -> str:
    """The name of a setting's folder: the last part of each key where that tells the keys apart.

    >>> setting_folder({"optim.lr": 0.0003, "loss.clip_high": 0.2})
    'lr=0.0003,clip_high=0.2'
    """
    short = short_names(setting)
    name = ",".join(f"{short[key]}={_literal(value)}" for key, value in setting.items())
    safe = re.sub(r"[^\w.+=,-]", "_", name)
    if safe == name and len(name.encode()) <= 200:
        return name
    return f"{safe[:60]}-{hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Each key with its last part, or with all of it where another ends alike.

    >>> short_names(["optim.lr", "warm_start.lr", "loss.clip_high"])
    {'optim.lr': 'optim.lr', 'warm_start.lr': 'warm_start.lr', 'loss.clip_high': 'clip_high'}
    """
    keys = list(keys)
    lasts = [key.rpartition(".")[2] for key in keys]
    return {key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts)}


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _leaves(node: Any, key: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(node, dict):
        raise InputError(f"{key}={node!r}: must be options with lists of values, as in {{optim.lr: [1e-4, 3e-4]}}")
    for name, value in node.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{below}", leaf) for below, leaf in _leaves(value, f"{key}.{name}"))
        else:
            yield str(name), value
