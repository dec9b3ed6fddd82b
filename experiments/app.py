"""Around every command: Hydra, errors in one line, and objects from ``_target_``."""

from __future__ import annotations

import functools
import os
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .build import build
from .explain import CONFIG_FOLDER, explain

__all__ = [
    "CONFIG_FOLDER",
    "build",
    "check_keys",
    "file_override",
    "hydra_command",
    "quoted_override",
    "task_overrides",
]


OF_SEVERAL = ("ablate", "probe")  # commands that take several strategies


def _run_name() -> str:
    """Time and four random digits: two runs of one second do not meet in one folder."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


OmegaConf.register_new_resolver("run_name", _run_name, use_cache=True, replace=True)


def hydra_command(name: str, function: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Compose a command's configuration with its arguments and call ``function``; bad input ends in one line, status 2.

    Args:
        name: of the command; its root configuration is ``conf/<name>.yaml``, with ``_`` for ``-``.
        function: gets the configuration.
        arguments: of the command line. ``--traceback`` shows where an error came from.
    """
    rest = [argument for argument in arguments if argument != "--traceback"]
    try:
        _run_hydra(name, function, _in_order(name, rest))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        message = explain(error)
        if message is None:  # our fault: show all of it
            raise
        if len(rest) < len(arguments) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        sys.stderr.write(f"apportion {name}: {message}\n")
        raise SystemExit(2) from None


def quoted_override(key: str, value: str) -> str:
    r"""``key='value'`` in Hydra's override grammar, whatever characters the value has.

    Backslashes count only before a quote or ``${``: there each is doubled, and the quote or ``${`` gets one more.

    >>> print(quoted_override("run.dir", "it's, here"))
    run.dir='it\'s, here'
    >>> print(quoted_override("label", "${x} \\d"))
    label='\${x} \d'
    """
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", escaped)
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f"{key}='{escaped}'"


def file_override(argument: str) -> str:
    """``file=...`` of a bare first argument; elsewhere a bare one could be the value of a flag."""
    bare = not argument.startswith(("-", "~", "+")) and "=" not in argument
    return quoted_override("file", argument) if bare else argument


def check_keys(config: DictConfig, known: Iterable[str], *, experiments: bool = True) -> None:
    """Refuse a key at the top that nothing reads, such as ``+rewards=1``.

    Args:
        config: of a command.
        known: its keys.
        experiments: where an experiment is chosen all pass, as it may hold keys of other commands.
    """
    from hydra.core.hydra_config import HydraConfig

    if experiments and HydraConfig.get().runtime.choices.get("experiment") is not None:
        return
    names = sorted(known)
    for key in map(str, config):
        if key not in names:
            raise InputError(f"{key}: nothing reads this key; there are: {', '.join(names)}")


def task_overrides() -> list[str]:
    """What the user changed in this run, as it was written."""
    from hydra.core.hydra_config import HydraConfig

    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(overrides)


def _run_hydra(name: str, function: Callable[[DictConfig], Any], arguments: list[str]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    failures: list[Exception] = []

    @functools.wraps(function)
    def guarded(config: DictConfig) -> Any:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # the launcher keeps the errors of its jobs
            return function(config)
        try:
            return function(config)
        except Exception as error:  # past Hydra, which would add lines of its own
            failures.append(error)

    run = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=name.replace("-", "_"))(guarded)
    with _hydra_reads([f"apportion {name}", *arguments]):
        run()
    for error in failures:
        raise error


def _in_order(name: str, arguments: list[str]) -> list[str]:
    """Overrides, then flags, as Hydra wants them; refuses unknown flags in one line instead of a page of usage."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise InputError(f"{message}; options are key=value, without dashes, and apportion --help shows some")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    read = parser.parse_intermixed_args(arguments)
    shown = [flag for flag in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(read, flag)]
    if len(shown) > 1:
        refuse(f"only one of {', '.join(f'--{flag}' for flag in shown)} at a time")
    if read.resolve and not (read.cfg or read.help):
        refuse("--resolve goes with --cfg")
    overrides: list[str] = read.overrides
    _check_groups(overrides)
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    if name in OF_SEVERAL and not shown:  # the configuration says so too, but too late for what it says of a bad key
        flags.append("--multirun")
    return [*overrides, *flags]


def _check_groups(overrides: list[str]) -> None:
    """Refuse ``verifier@verifiers.format=null`` and the like, which Hydra does not take and does not name."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(overrides):
        plain = not (override.is_sweep_override() or override.is_delete())
        group = plain and (CONFIG_FOLDER / override.key_or_group).is_dir()
        if group and not isinstance(override.value(), str | list | dict):
            key = override.get_key_element().lstrip("+")
            raise InputError(f"{override.input_line}: give the name of one of its options, or ~{key} to go without")


@contextmanager
def _hydra_reads(argv: list[str]) -> Iterator[None]:
    """Set what Hydra takes from the process: the arguments, and that errors are passed on, not printed half-way."""
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
