"""Objects from ``_target_``, their options checked by name and type before anything is made."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..verifiers import InputError
from .targets import locate, nearest

__all__ = ["build", "check_options", "check_value"]

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def build(config: Any, key: str, *, function: bool = False) -> Any:
    """The object that ``config`` describes by ``_target_``.

    Args:
        config: a node with ``_target_``; its other keys are the options.
        key: where it stands in the configuration, for messages.
        function: a plain function may stand for the object: one that still needs arguments is not called but taken
            itself, with the options bound to it.

    Raises:
        InputError: one line that names the key at fault.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    target = check_node(config, key, function=function)
    if function and inspect.isroutine(target) and _unbound(target, config):
        options = _options(config)
        return functools.partial(target, **options) if options else target
    try:
        return instantiate(config, _convert_="all")
    except InstantiationException as error:
        raise InputError(_refusal(error, key, str(config._target_))) from error


def check_node(config: Any, key: str, *, function: bool = False) -> Any:
    """Check a node with ``_target_``, and those inside it: the path, the options' names and types. Gives the target."""
    path = config.get("_target_") if isinstance(config, DictConfig) else None
    if not isinstance(path, str):
        raise InputError(f"{key}: nothing to build; give it a _target_, a dotted path such as my_file.MyClass")
    for name in config:
        if OmegaConf.is_missing(config, name):
            raise InputError(f"{key}.{name}: needs a value; give {key}.{name}=...")
    target = locate(path, f"{key}._target_")
    if not callable(target):
        raise InputError(f"{key}._target_={path}: is not a class or function but {type(target).__name__}")
    needed = _unbound(target, config)
    if needed and not (function and inspect.isroutine(target)) and not config.get("_partial_"):
        name = needed[0]
        raise InputError(f"{key}.{name}: {path} needs the argument {name!r}; give +{key}.{name}=...")
    check_options(target, _options(config), key)
    for name, child in config.items():
        for below, node in _targets(child, f"{key}.{name}"):
            check_node(node, below)
    return target


def check_options(target: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Compare options with the signature of what they are for.

    Args:
        target: class or function.
        options: plain values by name.
        key: of the node that holds them.
    """
    parameters = _parameters(target)
    if parameters is None:
        return
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    hints = _hints(target)
    for name, value in options.items():
        if name not in parameters and not takes_all:
            who = getattr(target, "__name__", str(target))
            raise InputError(f"{key}.{name}: {who} has no such option; {nearest(name, list(parameters))}")
        if name in hints and name in parameters:
            check_value(value, hints[name], f"{key}.{name}")


def check_value(value: Any, hint: Any, key: str) -> None:
    """Refuse a value that is not of the annotated type; annotations that are not plain types let everything pass.

    >>> check_value("abc", int, "run.steps")
    Traceback (most recent call last):
        ...
    apportion.verifiers.errors.InputError: run.steps='abc': must be a whole number
    """
    if not _fits(value, hint):
        raise InputError(f"{key}={value!r}: must be {_words(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # what it becomes is not known yet
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(_fits(one, inner[1]) for one in value.values() if len(inner) == 2)
    if isinstance(kind, type) and issubclass(kind, Sequence):
        every = inner[:1] if kind is not tuple or inner[1:] in ((), (...,)) else ()
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_fits(v, h) for v in value for h in every)
        )
    return True


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(_words(one) for one in inner)
    if origin is Literal:
        return _either(map(repr, inner))
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "names with values" + (f", each {_words(inner[1])}" if len(inner) == 2 else "")
    if isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str:
        return "a list" + (f" of which each is {_words(inner[0])}" if inner else "")
    return _KINDS.get(kind, f"{kind}")


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in callables have none
        return None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except Exception:  # an annotation that only a type checker can read
        return {}


def _unbound(target: Callable[..., Any], config: DictConfig) -> list[str]:
    """Arguments that ``target`` must have and ``config`` does not give."""
    if "_args_" in config:
        return []
    given = _names(config)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in (_parameters(target) or {}).items()
        if parameter.default is parameter.empty and parameter.kind in kinds and name not in given
    ]


def _names(config: DictConfig) -> list[str]:
    names = (name for name in config if isinstance(name, str))
    return [name for name in names if not (name.startswith("_") and name.endswith("_"))]


def _options(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return {name: plain[name] for name in _names(config)}


def _targets(node: Any, key: str) -> Iterable[tuple[str, DictConfig]]:
    """Nodes with ``_target_`` in or under ``node``, the outermost ones."""
    if isinstance(node, DictConfig) and "_target_" in node:
        yield key, node
    elif isinstance(node, DictConfig):
        children: Iterable[tuple[Any, Any]] = node.items()
        for name, child in children:
            yield from _targets(child, f"{key}.{name}")
    elif isinstance(node, ListConfig):
        for index, child in enumerate(node):
            yield from _targets(child, f"{key}.{index}")


def _refusal(error: BaseException, key: str, path: str) -> str:
    """What the object itself said against its options."""
    from hydra.errors import HydraException

    links: list[BaseException] = [error]
    while links[-1].__cause__ is not None:
        links.append(links[-1].__cause__)
    told = next((link for link in links if isinstance(link, InputError)), None)
    cause = told or next((link for link in links if not isinstance(link, HydraException)), error)
    text = " ".join(str(cause).split())
    if told and text.startswith((f"{key}.", f"{key}=", f"{key}:")):
        return text
    where = key if path.startswith("apportion.") else f"{key} ({path})"
    return f"{where}: {text}" if isinstance(cause, ValueError) else f"{where}: {type(cause).__name__}: {text}"
