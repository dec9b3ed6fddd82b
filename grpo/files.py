"""Files that are whole or not there: written under a temporary name, made durable, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..verifiers import InputError

__all__ = ["make_folder", "one_line", "replacing", "sync", "write_text"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that takes its place once the block ends well; readers never see a part.

    Raises:
        InputError: the operating system refuses; one line with the path, the reason and a remedy.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({one_line(error)}); free the disk or set run.dir elsewhere"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file: readers see the old or the new one, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Have the operating system put a file or a folder's entries on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder with its parents, or take the one that is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({one_line(error)}); set run.dir elsewhere") from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an exception says, on one line of at most ``limit`` characters.

    >>> one_line(RuntimeError("first\\n  second")), one_line(OSError(28, "No space left on device", "/tmp/x"))
    ('first second', 'No space left on device')
    """
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:limit] or type(error).__name__
