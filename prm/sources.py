"""Rows with the place they come from: files, folders, the hub, or a list in memory. One row in memory at a time."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..verifiers import InputError
from .rows import BadRow, Row, shorten

__all__ = ["RowSource", "row_source"]

RowSource = Callable[[], Iterator[tuple[str, Row | BadRow]]]
"""Gives each row with its place ("steps.jsonl, row 3"); a line that is none comes as what is wrong with it."""

SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def row_source(
    path: str | Path | Iterable[Row], *, split: str = "train", subset: str | None = None, streaming: bool = False
) -> RowSource:
    """Where the rows are, looked up at once; they themselves are read when asked for, each time anew.

    Args:
        path: a file (.jsonl, .json, .parquet), a folder of such files, a pattern such as ``data/*.jsonl``, a folder
            that ``datasets`` saved, a name on the hub (``owner/name``), or rows in memory.
        split: of a name on the hub, or of several splits in a folder or in memory.
        subset: of a name on the hub.
        streaming: read from the hub row by row instead of downloading first.
    """
    if isinstance(path, Mapping):
        return partial(_in_memory, _split(path, split, "the rows in memory"))
    if not isinstance(path, str | Path):
        return partial(_in_memory, path)
    place = Path(path)
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return partial(_saved, str(path), split)
    files = _files(place)
    if files:
        return partial(_from_files, files)
    if _HUB_NAME.fullmatch(str(path)) and place.suffix not in SUFFIXES:
        return partial(_from_hub, str(path), subset, split, streaming)
    raise InputError(f"path={path}: no such file or pattern; paths are relative to {Path.cwd()}")


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
        if not files:
            raise InputError(f"path={place}: the folder holds no {', '.join(SUFFIXES)} file; give one that does")
        return files
    # Not Path.glob, which takes no absolute pattern.
    found = [place] if place.is_file() else map(Path, glob.glob(str(place), recursive=True))  # noqa: PTH207
    files = sorted(file for file in found if file.is_file())
    for file in files:
        if file.suffix not in SUFFIXES:
            raise InputError(f"path={file}: a file of steps ends in {', '.join(SUFFIXES)}; rename or convert it")
    return files


def _from_files(files: Sequence[Path]) -> Iterator[tuple[str, Row | BadRow]]:
    for file in files:
        try:
            for number, row in _parquet(file) if file.suffix == ".parquet" else _json(file):
                yield f"{file}, row {number}", row
        except OSError as error:
            raise InputError(f"path={file}: cannot be read ({error.strerror or shorten(str(error))})") from error


def _parquet(file: Path) -> Iterator[tuple[int, Row | BadRow]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise InputError(f"path={file}: no Parquet file, or a damaged one ({shorten(str(error))})") from error


def _json(file: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """One object a line; or one array of objects, which is read whole."""
    with file.open("rb") as lines:
        number = 0
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                break
            if line.strip():
                yield number, _object(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        else:
            return
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"path={file}: begins like a JSON array but is none ({shorten(str(error))})") from error
    yield from ((number, _mapping(row)) for number, row in enumerate(rows, start=1))


def _object(line: bytes) -> Row | BadRow:
    try:
        return _mapping(json.loads(line.rstrip().decode("utf-8")))
    except RecursionError:
        return BadRow("invalid_json", "the line is nested too deep")
    except ValueError as error:
        return BadRow("invalid_json", f"the line is no JSON object in UTF-8 ({error}): {_beginning(line)}")


def _beginning(line: bytes) -> str:
    return shorten(line[:240].decode("utf-8", "replace"))


def _mapping(row: Any) -> Row | BadRow:
    if isinstance(row, Mapping):
        return row
    return BadRow("null" if row is None else "wrong_type", f"the row is no object with columns but {shorten(row)}")


def _in_memory(rows: Iterable[Any], name: str = "rows in memory") -> Iterator[tuple[str, Row | BadRow]]:
    for number, row in enumerate(rows, start=1):
        yield f"{name}, row {number}", _mapping(row)


def _saved(path: str, split: str) -> Iterator[tuple[str, Row | BadRow]]:
    import datasets

    found = datasets.load_from_disk(path)
    yield from _in_memory(_split(found, split, path) if isinstance(found, Mapping) else found, path)


def _from_hub(name: str, subset: str | None, split: str, streaming: bool) -> Iterator[tuple[str, Row | BadRow]]:
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # its many kinds all mean: not to be had
        reason = shorten(str(error.__cause__ or error).split("\n")[0], 160)
        raise InputError(f"path={name}: no file here, and the hub does not give it ({reason}); give a file") from error
    yield from _in_memory(rows, f"{name}/{split}")


def _split(splits: Mapping[str, Any], split: str, name: str) -> Any:
    if split not in splits:
        raise InputError(f"split={split}: {name} has no such split; it has {', '.join(map(str, splits))}")
    return splits[split]
