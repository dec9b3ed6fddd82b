"""From an exception to the one line that a user can act on."""

from __future__ import annotations

import importlib
import re
from difflib import get_close_matches
from typing import Any

from ..verifiers import InputError

__all__ = ["explain", "root_cause"]


def explain(error: BaseException) -> str | None:
    """One line for an error that the user's input caused, or None where it is ours and wants a traceback."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for link in _chain(error):
        if isinstance(link, InputError):
            return _one_line(link)
    if isinstance(error, HydraException):
        return _composition(error)
    if isinstance(error, OmegaConfBaseException):
        return _missing_value(error)
    return None


def root_cause(error: BaseException, target: str) -> str:
    """Why the object at ``target`` could not be made: the end of the chain of causes, with the remedy where known."""
    links = _chain(error)
    for link in links:
        if isinstance(link, InputError):
            return _one_line(link)
    cause = links[-1]
    if isinstance(cause, SyntaxError):
        return f"SyntaxError in {cause.filename}, line {cause.lineno}: {cause.msg}"
    if isinstance(cause, AttributeError) and hasattr(cause, "obj") is not None:
        named = _missing_name(target)
        if named is not None:
            return named
    if isinstance(cause, ModuleNotFoundError):
        return f"ModuleNotFoundError: no module {cause.name!r}; install it, or start where the file lies"
    named = _missing_name(target)
    if named is not None:
        return named
    if isinstance(cause, TypeError):
        return "TypeError: " + _argument(str(cause))
    return f"{type(cause).__name__}: {_one_line(cause)}"


def _missing_name(target: str) -> str | None:
    """Where the module is there and the class is not: its name and the public names that are."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception:
        return None
    if hasattr(module, name):
        return None
    public = [n for n, value in vars(module).items() if not n.startswith("_") and _defined_in(value, module_name)]
    near = get_close_matches(name, public, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(sorted(public)) or 'no public names'}"
    return f"module {module_name} has no {name}; {hint}"


def _defined_in(value: Any, module_name: str) -> bool:
    return getattr(value, "__module__", None) == module_name


def _argument(text: str) -> str:
    """``__init__() missing ... argument: 'x'`` without the method's name in front."""
    return re.sub(r"^[\w.]*__init__\(\) ", "", _one_line(text))


def _composition(error: BaseException) -> str:
    """Hydra's multi-line messages, in one line with the nearest right name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    group = re.search(r"Could not find '([^']+)'", text) or re.search(r"In '[^']+': Could not find '([^']+)'", text)
    if group:
        folder, _, wanted = group[1].rpartition("/")
        options = re.findall(r"^\t(\S+)$", str(error), re.MULTILINE)
        near = get_close_matches(wanted, options, n=1)
        hint = f"did you mean {folder}={near[0]}?" if near else _options(options)
        return f"{folder}={wanted}: there is no such option; {hint}"
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        cause = _chain(error)[-1]
        return f"{key[1]}: no such key{_nearest(key[1], cause)}"
    return text


def _options(options: list[str]) -> str:
    return f"there are: {', '.join(options)}" if options else "look into the folder conf/"


def _nearest(key: str, cause: BaseException) -> str:
    parent = getattr(cause, "parent_node", None)
    try:
        names = [str(name) for name in parent] if parent is not None else []
    except Exception:
        names = []
    prefix, _, last = key.rpartition(".")
    near = get_close_matches(last, names, n=1)
    dot = f"{prefix}." if prefix else ""
    if near:
        return f"; did you mean {dot}{near[0]}?"
    return f"; {prefix or 'the configuration'} has: {', '.join(sorted(names))}" if names else "; show all: --cfg job"


def _missing_value(error: Any) -> str:
    key = getattr(error, "full_key", None)
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key}: needs a value; give {key}=..."
    return f"{key}: {_one_line(error)}" if key else _one_line(error)


def _chain(error: BaseException) -> list[BaseException]:
    links, seen = [error], {id(error)}
    while True:
        following = links[-1].__cause__ or links[-1].__context__
        if following is None or id(following) in seen:
            return links
        links.append(following)
        seen.add(id(following))


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__
