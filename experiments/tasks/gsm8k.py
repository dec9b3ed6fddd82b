"""GSM8K: worded problems of primary school (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import re
from functools import partial

from ...grpo.task import Problem
from ...verifiers import InputError
from ...verifiers.number import parse_quantity
from ..tables import Row
from .rows import Item, RowTask, cell, filled, items_of, on_hub, rows_of, same_text

__all__ = ["Gsm8kTask", "read_solution"]

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


class Gsm8kTask(RowTask):
    """Rows with ``question`` and ``answer``: a worked solution whose last line is ``#### N``.

    The reference is that number. Demonstrations are the solutions without their calculator annotations (``<<2*3=6>>``),
    ending in ``Answer: N``.

    Args:
        path: ``owner/name`` on the hub, or a JSONL or Parquet file.
        subset: of the name on the hub.
        held_out_path: of the evaluation problems; None takes the split ``test`` of a name on the hub, and of a file a
            share.
        held_out: that share.
        held_out_limit: evaluate on the first so many; None for all.
        template: what the policy reads; ``{question}`` stands in it.
        limit: use the first so many rows of ``path``.
        seed: of the split.
    """

    def __init__(
        self,
        path: str = "openai/gsm8k",
        subset: str | None = "main",
        held_out_path: str | None = None,
        held_out: float = 0.1,
        held_out_limit: int | None = 256,
        template: str = "{question}\nSolve it step by step and end with a line `Answer: N`.",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        path = str(path)
        if held_out_path is None and on_hub(path):
            held_out_path = path

        def read(number: int, place: str, row: Row, prefix: str = "") -> Item:
            question = cell(row, "question", place)
            shown, reference = read_solution(cell(row, "answer", place), place)
            text = filled(template, {**row, "question": question}, place)
            return Item(Problem(f"{prefix}{number}", text, reference), same_text(question), shown)

        rows = items_of(rows_of(path, "task.path", subset=subset), read, f"task.path={path}", limit=limit)
        evaluation = None
        if held_out_path is not None:
            found = rows_of(held_out_path, "task.held_out_path", subset=subset, split="test")
            kept = partial(read, prefix="held-out-")
            evaluation = items_of(found, kept, f"task.held_out_path={held_out_path}", limit=held_out_limit)
        super().__init__(rows, source=f"task.path={path}", share=held_out, held_out=evaluation, seed=seed)


def read_solution(answer: str, place: str) -> tuple[str, str]:
    """A solution in words as a demonstration, and the number behind its ``####``.

    >>> read_solution("He has 2*3=<<2*3=6>>6 eggs.\\n#### 6", "row 1")
    ('He has 2*3=6 eggs.\\nAnswer: 6', '6')
    """
    solution, mark, number = answer.rpartition("####")
    number = number.strip()
    if not mark or parse_quantity(number) is None:
        raise InputError(f"{place}: column 'answer' does not end in `#### N`; GSM8K's solutions do, drop the row")
    return f"{_ANNOTATION.sub('', solution).rstrip()}\nAnswer: {number}", number
