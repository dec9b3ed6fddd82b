"""Pairs of answers of which people preferred one: read and checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from ..verifiers import InputError
from .rows import BadRow, Row, as_text, column
from .sources import row_source

__all__ = ["Preference", "load_preferences", "preference_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt.

    Args:
        prompt: as text.
        chosen, rejected: the better and the worse answer.
        margin: by which the better one's reward should be the higher, at least; 0 where not known.
    """

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0


def load_preferences(
    path: str | Path | Iterable[Row],
    *,
    on_bad_row: Literal["stop", "skip"] = "stop",
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
) -> list[Preference]:
    """Pairs from a file, a folder, the hub, or rows in memory; see :func:`preference_of`.

    Args:
        path, split, subset: see :func:`~apportion.prm.sources.row_source`.
        on_bad_row: ``stop`` with the file, the row and what is wrong, or ``skip`` such rows and log their number.
        limit: use the first so many rows.

    >>> load_preferences([{"prompt": "1+1=?", "chosen": "2", "rejected": "3"}])
    [Preference(prompt='1+1=?', chosen='2', rejected='3', margin=0.0)]
    """
    if on_bad_row not in ("stop", "skip"):
        raise InputError(f"on_bad_row={on_bad_row}: give stop or skip")
    pairs: list[Preference] = []
    skipped: list[str] = []
    for number, (place, row) in enumerate(row_source(path, split=split, subset=subset)()):
        if number == limit:
            break
        try:
            if isinstance(row, BadRow):
                raise row
            pairs.append(preference_of(row))
        except BadRow as fault:
            if on_bad_row == "stop":
                raise InputError(f"{place}: {fault}; mend or drop it, or set on_bad_row=skip") from fault
            skipped.append(f"{place}: {fault}")
    if skipped:
        log.warning("%d rows skipped, the first: %s", len(skipped), skipped[0])
    if not pairs:
        raise InputError(f"no pair to use; {skipped[0] if skipped else 'there are no rows'}")
    return pairs


def preference_of(row: Row) -> Preference:
    """One row: ``chosen``, ``rejected``, ``prompt``, and, if known, ``margin``; texts, or lists of messages.

    Lists of messages need no ``prompt``: it is the turns with which both begin.

    Raises:
        BadRow: a column is missing or of another kind, an answer is empty, or both are the same.
    """
    chosen, rejected = column(row, "chosen"), column(row, "rejected")
    if "prompt" in row or not (isinstance(chosen, list) and isinstance(rejected, list)):
        prompt = as_text(column(row, "prompt"), "prompt")
    else:
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))))
        prompt, chosen, rejected = as_text(chosen[:shared], "prompt"), chosen[shared:], rejected[shared:]
    better, worse = as_text(chosen, "chosen"), as_text(rejected, "rejected")
    for name, text in (("chosen", better), ("rejected", worse)):
        if not text.strip():
            raise BadRow("empty_step", f"{name} is empty")
    if better == worse:
        raise BadRow("invalid_row", "chosen and rejected are the same text")
    try:
        (prompt + better + worse).encode()
    except UnicodeEncodeError as error:
        raise BadRow("invalid_text", "the text holds half a surrogate pair, which no tokenizer reads") from error
    margin = row.get("margin")
    if margin is None:
        return Preference(prompt, better, worse)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise BadRow("wrong_type", f"margin is {margin!r}, not a finite number of at least 0")
    return Preference(prompt, better, worse, float(margin))
