"""From a dotted path to the object, with the real cause where there is none."""

from __future__ import annotations

import importlib
import traceback
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from ..verifiers import InputError

__all__ = ["locate", "nearest"]


def locate(path: str, key: str) -> Any:
    """The object at a dotted path such as ``my_file.MyVerifier``.

    Args:
        path: module, then the names inside it.
        key: where the path stands in the configuration, for messages.

    Raises:
        InputError: one line with the cause at the end of the chain: the line with the syntax error, the package that is
            not installed, what the module raised, or the names that the module does have.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise InputError(f"{key}={path}: not a dotted path such as my_file.MyClass")
    found: Any = _module(parts[0], key, path)
    for index, name in enumerate(parts[1:], start=1):
        inside = getattr(found, name, None)
        if inside is None and isinstance(found, ModuleType) and hasattr(found, "__path__"):
            inside = _module(".".join(parts[: index + 1]), key, path, optional=index + 1 == len(parts))
        if inside is None:
            raise InputError(f"{key}={path}: {_without(found, '.'.join(parts[:index]), name)}")
        found = inside
    return found


def nearest(wanted: str, names: list[str]) -> str:
    """``did you mean x?``, or what there is.

    >>> nearest("epss", ["eps", "ddof"]), nearest("lr", ["eps", "ddof"])
    ('did you mean eps?', 'there are: ddof, eps')
    """
    near = get_close_matches(wanted, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(names)) or 'none'}"


def _module(name: str, key: str, path: str, *, optional: bool = False) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and optional:
            return None
        remedy = "start where the file lies" if error.name == name else "install it"
        cause = f"ModuleNotFoundError: no module {error.name!r}; {remedy}"
    except SyntaxError as error:
        cause = f"SyntaxError in {error.filename}, line {error.lineno}: {error.msg}"
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        cause = f"{type(error).__name__} in {place.filename}, line {place.lineno}: {text}"
    raise InputError(f"{key}={path}: {cause}")


def _without(parent: Any, parent_path: str, name: str) -> str:
    kind = "module" if isinstance(parent, ModuleType) else "class" if isinstance(parent, type) else "object"
    public = [n for n, value in vars(parent).items() if not n.startswith("_") and not isinstance(value, ModuleType)]
    own = [n for n in public if getattr(vars(parent)[n], "__module__", None) == parent_path]
    return f"{kind} {parent_path} has no {name}; {nearest(name, own or public)}"
