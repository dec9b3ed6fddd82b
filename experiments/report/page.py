"""From templates to pages: what numbers look like, and files that appear whole or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import notes
from .figures import COLOURS, look
from .stability import setting_text

__all__ = ["page_environment", "replacing", "signed", "write_whole"]

_HERE = Path(__file__).parent


def page_environment() -> Any:
    """Where templates become pages: text is escaped, what is missing is an error, numbers have their filters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=_number,
        signed=signed,
        p=_p,
        count=_count,
        duration=_duration,
        svg=Markup,
        listed=_listed,
        setting=setting_text,
    )
    environment.globals.update(
        infinity=math.inf,
        nan=math.nan,
        look=look,
        palette=COLOURS,
        style=Markup((_HERE / "style.css").read_text("utf-8")),
    )
    return environment


def _listed(names: Iterable[str]) -> str:
    return notes.listed(list(names))


def _number(value: float, digits: int = 3) -> str:
    """0.123; a dash where there is no number."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def _p(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "< .001" if value < 0.001 else "1" if value > 0.9995 else f"{value:.3f}".removeprefix("0")


def _count(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Seconds, or minutes and seconds.

    >>> _duration(8.31), _duration(125.0)
    ('8.3 s', '2 min 5 s')
    """
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that takes its place when all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))  # JSON can hold halves of surrogate pairs
