"""From an exception to the one line that a user can act on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..verifiers import InputError
from .targets import nearest

__all__ = ["CONFIG_FOLDER", "explain"]

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "conf"


def explain(error: BaseException) -> str | None:
    """One line for an error that the user's input caused, or None where it is ours and wants a traceback."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    links = _chain(error)
    for link in links:
        if isinstance(link, InputError):
            return _one_line(link)
    if isinstance(error, OverrideParseException):
        return _override(error)
    if isinstance(error, HydraException):
        return _composition(error, links[-1])
    if isinstance(error, OmegaConfBaseException):
        return _value(error)
    return None


def _override(error: Any) -> str:
    """What Hydra's grammar could not read."""
    if "=" not in error.override:
        return f"{error.override!r} is not an option; write key=value"
    key, _, value = error.override.partition("=")
    return f"{key}: cannot read {value!r}; quote a value with special characters: '{key}=\"...\"'"


def _composition(error: BaseException, cause: BaseException) -> str:
    """Hydra's multi-line messages, in one line with the nearest right name."""
    text = _one_line(error)
    if found := re.search(r"Could not find '([^']+)'", text):
        listed = re.findall(r"^\t(\S+)$", str(error), re.MULTILINE)
        return _no_launcher(found[1], listed) if found[1].startswith("hydra/") else _no_option(found[1], text)
    if found := re.search(r"Could not override '([^']+)'", text):
        if groups := re.search(r"Did you mean to override (?:one of )?(.+?)\?", text):
            hint = nearest(found[1], groups[1].split(", "))
            return f"{found[1]}: no such group of options is in use; {hint} To add one, write +{found[1]}=..."
        return f"{found[1]}: no such key{_siblings(found[1], cause)}"
    if found := re.search(
        r"Multiple values for (\S+)\. |(\S+) appears more than once in the final defaults list", text
    ):
        key = found[1] or found[2]
        return f"{key}: is in use already; to change it write {key}=... without the plus"
    if "Ambiguous value" in text and (argument := re.search(r"argument '([^=']+)=(.*?)' 1\.", text)):
        key = argument[1]
        return (
            f"{key}={argument[2]}: several values; write {key}=[...] for a list, '{key}=\"...\"' for text with commas"
        )
    if merged := re.fullmatch(r"Error merging override (.+)", text):
        return f"{merged[1]}: {_first_line(cause)}"
    return re.sub(r" ?full_key: .*", "", text)


def _no_option(path: str, text: str) -> str:
    """A file that is in no group of options: the group is the longest folder that there is."""
    available = re.search(r"Available options in '([^']+)':", text)
    group = available[1] if available else path.partition("/")[0]
    wanted = path.removeprefix(f"{group}/")
    folder = CONFIG_FOLDER / group.partition("/")[0]
    options = [file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")]
    prefix = f"{group.partition('/')[0]}="
    inner = group.partition("/")[2]
    wanted = f"{inner}/{wanted}" if inner else wanted
    inside = [option for option in options if option.startswith(f"{wanted}/")]
    hint = f"there are: {', '.join(sorted(inside))}" if inside else _prefixed(prefix, nearest(wanted, options))
    return f"{prefix}{wanted}: there is no such option; {hint}"


def _no_launcher(path: str, options: list[str]) -> str:
    """One of Hydra's own groups: its options are the plugins that are installed."""
    group, _, wanted = path.rpartition("/")
    extra = '; Slurm needs pip install "apportion[slurm]", Ray "apportion[ray]"' if group == "hydra/launcher" else ""
    return f"{group}={wanted}: there is no such option; {_prefixed(f'{group}=', nearest(wanted, options))}{extra}"


def _prefixed(prefix: str, hint: str) -> str:
    return hint.replace("did you mean ", f"did you mean {prefix}", 1)


def _siblings(key: str, cause: BaseException) -> str:
    """The names beside a key that is not there."""
    parent = getattr(cause, "parent_node", None)
    try:
        names = [str(name) for name in parent] if parent is not None else []
    except Exception:
        names = []
    prefix, _, last = key.rpartition(".")
    if not names:
        return "; show all: --cfg job"
    return f"; {_prefixed(f'{prefix}.' if prefix else '', nearest(last, names))}"


def _value(error: Any) -> str:
    key = getattr(error, "full_key", None)
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key}: needs a value; give {key}=..."
    text = _first_line(error)
    if missing := re.fullmatch(r"Interpolation key '(.+)' not found", text):
        return f"${{{missing[1]}}}: there is no key {missing[1]}; for literal text write \\${{{missing[1]}}}"
    return f"{key}: {text}" if key else text


def _chain(error: BaseException) -> list[BaseException]:
    links, seen = [error], {id(error)}
    while True:
        last = links[-1]
        following = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if following is None or id(following) in seen:
            return links
        links.append(following)
        seen.add(id(following))


def _first_line(error: object) -> str:
    return str(error).split("\n", 1)[0].strip()


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
