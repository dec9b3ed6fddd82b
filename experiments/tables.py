"""Rows of a user's file: JSONL, or Parquet where its name ends so."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ..verifiers import InputError

__all__ = ["Row", "read_rows"]

Row = Mapping[str, Any]


def read_rows(path: str, key: str) -> Iterator[tuple[int, Row]]:
    """Rows with their numbers from 1 on; of a JSONL file the line numbers.

    Args:
        path: file, or an address that ``datasets`` reads (``hf://datasets/...``); Parquet where it ends so.
        key: of the option that names it, for messages.

    Raises:
        InputError: names the file and the row.
    """
    if "://" not in path and not Path(path).is_file():
        raise InputError(f"{key}={path}: no such file; paths are relative to {Path.cwd()}")
    if "://" not in path and not Path(path).stat().st_size:
        return
    if path.endswith(".parquet"):
        yield from enumerate(_load("parquet", path, key), start=1)
        return
    # Lines as they are: readers that guess column types turn the answer 12 into 12.0 and "2024-05-01" into a date.
    for number, row in enumerate(_load("text", path, key, encoding="latin-1"), start=1):
        try:
            line = row["text"].encode("latin-1").decode("utf-8-sig" if number == 1 else "utf-8")
            if line.strip():
                yield number, _json_object(line)
        except ValueError as error:
            raise InputError(f"{path}, row {number}: {error}; give one JSON object a line, in UTF-8") from error


def _json_object(line: str) -> Row:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def _load(kind: Literal["text", "parquet"], path: str, key: str, **options: Any) -> Any:
    import datasets

    # Not load_dataset: it reports to the hub even for local files, and waits seconds for an answer without network.
    read = datasets.Dataset.from_text if kind == "text" else datasets.Dataset.from_parquet
    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        # A cache of its own: nothing stale, and nothing written outside the temporary folder.
        with tempfile.TemporaryDirectory() as cache:
            return read(path, keep_in_memory=True, cache_dir=cache, **options)
    except Exception as error:
        reason = str(error.__cause__ or error).split("\n")[0]
        raise InputError(f"{key}={path}: cannot be read as {kind}: {reason}") from error
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
