r"""MATH: competition problems with worked solutions (Hendrycks et al. 2021, arXiv 2103.03874)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...grpo.task import Problem
from ...verifiers import InputError
from ...verifiers.answer_extraction import extract_answer
from ..tables import Row
from .rows import Item, RowTask, cell, filled, items_of, on_hub, rows_of, same_text

__all__ = ["MathTask"]

HENDRYCKS = "EleutherAI/hendrycks_math"
MATH_500 = "HuggingFaceH4/MATH-500"
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class MathTask(RowTask):
    r"""Rows with ``problem``, ``solution``, ``level`` and ``type`` or ``subject``, perhaps ``answer``.

    The reference is ``answer``, or what the solution's last ``\boxed{...}`` holds. Demonstrations are the solutions.

    Args:
        path: ``owner/name`` on the hub, or a JSONL or Parquet file.
        subsets: of the name on the hub; None takes all seven of Hendrycks' MATH, and none of another name.
        held_out_path: of the evaluation problems (split ``test`` of a name on the hub); None takes a share of ``path``.
        held_out: that share.
        held_out_limit: evaluate on the first so many; None for all.
        levels: use these alone, from 1 to 5; None for all.
        types: use these alone, such as ``Algebra``; None for all.
        template: what the policy reads; ``{problem}`` stands in it.
        limit: use the first so many rows that these filters leave.
        seed: of the split.
    """

    def __init__(
        self,
        path: str = HENDRYCKS,
        subsets: Sequence[str] | None = None,
        held_out_path: str | None = MATH_500,
        held_out: float = 0.1,
        held_out_limit: int | None = 256,
        levels: Sequence[int] | None = None,
        types: Sequence[str] | None = None,
        template: str = "{problem}\nReason step by step and put the final answer into \\boxed{{}}.",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        path = str(path)
        wanted = _Filter(
            None if levels is None else frozenset(levels),
            None if types is None else frozenset(name.casefold() for name in types),
        )
        read = partial(_item, wanted, template)
        rows = items_of(_all_subsets(path, subsets), read, f"task.path={path}", limit=limit)
        evaluation = None
        if held_out_path is not None:
            found = rows_of(held_out_path, "task.held_out_path", split="test")
            kept = partial(read, prefix="held-out-")
            evaluation = items_of(found, kept, f"task.held_out_path={held_out_path}", limit=held_out_limit)
        super().__init__(rows, source=f"task.path={path}", share=held_out, held_out=evaluation, seed=seed)


@dataclass(frozen=True)
class _Filter:
    levels: frozenset[int] | None
    types: frozenset[str] | None

    def takes(self, row: Row) -> bool:
        level = re.search(r"[0-9]+", str(row.get("level") or ""))
        kind = str(row.get("type") or row.get("subject") or "").casefold()
        return (self.levels is None or (level is not None and int(level.group()) in self.levels)) and (
            self.types is None or kind in self.types
        )


def _all_subsets(path: str, subsets: Sequence[str] | None) -> Iterator[tuple[int, str, Row]]:
    """The rows of all subsets, numbered through."""
    hub = on_hub(path)
    names: Sequence[str | None] = (subsets or (SUBJECTS if path == HENDRYCKS else (None,))) if hub else (None,)
    number = 0
    for name in names:
        for own, place, row in rows_of(path, "task.path", subset=name):
            number += 1
            yield number if hub else own, f"{place} of {name}" if name else place, row


def _item(wanted: _Filter, template: str, number: int, place: str, row: Row, prefix: str = "") -> Item | None:
    if not wanted.takes(row):
        return None
    problem, solution = cell(row, "problem", place), str(row.get("solution") or "")
    if row.get("answer") is not None:
        reference = cell(row, "answer", place)
    else:
        answer = extract_answer(cell(row, "solution", place), "boxed")
        if answer is None:
            raise InputError(f"{place}: column 'solution' has no \\boxed{{...}}; add a column 'answer' or drop the row")
        reference = answer.text
    metadata = {name: row[name] for name in ("level", "type", "subject") if name in row}
    text = filled(template, {**row, "problem": problem}, place)
    return Item(Problem(f"{prefix}{number}", text, reference, metadata), same_text(problem), solution)
