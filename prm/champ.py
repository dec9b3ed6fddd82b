"""CHAMP, arXiv 2401.06961: solutions of competition problems by language models, the first wrong step marked by people.

The package ``champ-dataset`` (MIT) holds 540 of them on 270 problems: 444 with a mistake, 96 without.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from ..verifiers import InputError
from ..verifiers.segmenters import BlankLines, Segmenter
from .data import StepData
from .formats import labels_from_first_error
from .rows import BadRow, Row
from .steps import StepExample

__all__ = ["champ", "load_champ"]


def load_champ(
    version: str = "v0", segmenter: Segmenter | None = None, on_bad_row: Literal["stop", "skip"] = "stop"
) -> StepData:
    """The marked solutions of CHAMP as examples; needs the package ``champ-dataset``.

    Args:
        version: of the data in the package.
        segmenter: text -> step spans; None cuts at blank lines.
        on_bad_row: ``stop`` or ``skip``.
    """
    return StepData(partial(_solutions, version), partial(champ, segmenter=segmenter or BlankLines()), on_bad_row)


def champ(row: Row, *, segmenter: Segmenter) -> list[StepExample]:
    """A marked solution: right before the first step that the mark touches, wrong there, unknown after it.

    Args:
        row: ``problem_id``, ``problem``, ``solution``, and ``wrong``: (start, stop) in the solution, or None where it
            has no mistake; the rest becomes metadata.
        segmenter: text -> step spans.

    >>> row = {"problem_id": "P1", "problem": "1+1+1=?", "solution": "1+1=2\\n\\n2+1=4\\n\\nSo 4.", "wrong": (7, 12)}
    >>> champ(row, segmenter=BlankLines())[0].labels
    (1.0, 0.0, None)
    """
    solution, wrong = row["solution"], row["wrong"]
    steps = tuple(segmenter(solution))
    first_wrong = None
    if wrong is not None:
        start, stop = wrong
        first_wrong = next((n for n, (left, right) in enumerate(steps) if left < stop and start < right), None)
        if first_wrong is None:
            raise BadRow("wrong_spans", f"the marked mistake {start} to {stop} touches no step")
    labels = tuple(labels_from_first_error(len(steps), first_wrong))
    metadata = {
        name: value for name, value in row.items() if name not in ("problem_id", "problem", "solution", "wrong")
    }
    return [StepExample(row["problem"], solution, steps, labels, row["problem_id"], metadata)]


def _solutions(version: str) -> Iterator[tuple[str, Row]]:
    problems: dict[str, Any] = _package().load(version).problems
    for problem in problems.values():
        for name, mark in (problem.fws_annotations or {}).items():
            yield (
                f"CHAMP {version}, {problem.identifier}, {name}",
                {
                    "problem_id": problem.identifier,
                    "problem": problem.text,
                    "solution": mark.text,
                    "wrong": None if mark.start_idx is None else (mark.start_idx, mark.end_idx),
                    "author": mark.author,
                    "condition": name,
                    "category": problem.category,
                    "reference": problem.answer,
                },
            )


def _package() -> Any:
    try:
        return importlib.import_module("champ_dataset")
    except ModuleNotFoundError as error:
        raise InputError("CHAMP is in the package champ-dataset; pip install 'apportion[data]'") from error
