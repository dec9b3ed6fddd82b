"""Around every command: Hydra, one-line errors, and objects from ``_target_``."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .explain import explain, root_cause

__all__ = ["build", "hydra_command", "quoted_override"]

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "conf"


def _run_name() -> str:
    """Time and four random digits: two runs of one second do not meet in one folder."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


OmegaConf.register_new_resolver("run_name", _run_name, use_cache=True, replace=True)


def hydra_command(name: str, function: Callable[[DictConfig], Any], arguments: list[str]) -> None:
    """Compose ``conf/<name>.yaml`` with the arguments and call ``function``; bad input ends in one line, status 2.

    Args:
        name: of the command and of its root configuration.
        function: gets the configuration.
        arguments: of the command line. ``--traceback`` shows the whole traceback.
    """
    import hydra

    traceback_wanted = "--traceback" in arguments or os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed half-way
    sys.argv = [f"apportion {name}", *(a for a in arguments if a != "--traceback")]
    command = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=name)(function)
    try:
        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if traceback_wanted:
            raise
        message = explain(error)
        if message is None:
            raise
        sys.stderr.write(f"apportion {name}: {message}\n")
        raise SystemExit(2) from None


def build(config: Any, key: str, **extra: Any) -> Any:
    """The object that ``config`` describes by ``_target_``; what goes wrong is told with its real cause.

    Args:
        config: a node with ``_target_``.
        key: where it stands in the configuration, for messages.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    target = config.get("_target_") if isinstance(config, DictConfig) else None
    if target is None:
        raise InputError(f"{key}: nothing to build; give it a _target_, a dotted path such as my_file.MyClass")
    try:
        return instantiate(config, _convert_="all", **extra)
    except InstantiationException as error:
        raise InputError(f"{key} ({target}): {root_cause(error, target)}") from error


def quoted_override(key: str, value: str) -> str:
    """``key='value'`` in Hydra's override grammar, whatever characters the value has.

    >>> print(quoted_override("run.dir", "it's, here"))
    run.dir='it\\'s, here'
    """
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    if escaped.endswith("\\"):
        escaped += "\\"
    return f"{key}='{escaped}'"
