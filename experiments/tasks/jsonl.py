"""A user's own problems: rows of a JSONL or Parquet file."""

from __future__ import annotations

from dataclasses import dataclass

from ...grpo.task import Problem
from ...verifiers import InputError
from ..tables import Row, read_rows
from .rows import Item, RowTask, cell, filled, items_of, same_text

__all__ = ["JsonlTask"]


class JsonlTask(RowTask):
    """Problems from a file with one JSON object a line, or from a Parquet file (name ends in ``.parquet``).

    Args:
        path: file, or an address that ``datasets`` reads (``hf://datasets/...``).
        prompt: column of the problem's text.
        reference: column of the right answer; None where the problems have none.
        held_out: share of the distinct prompts kept for evaluation, used where ``held_out_path`` is None.
        held_out_path: file of the evaluation problems.
        retention_path: file of problems of a skill that is not trained on.
        id: column that names each row; None names it by its number.
        template: what the policy reads; ``{prompt}`` and every column can stand in it.
        demonstration: column of an ideal completion, for a supervised warm start.
        limit: use the first so many rows of ``path``.
        seed: of the split.
    """

    def __init__(
        self,
        path: str,
        prompt: str = "prompt",
        reference: str | None = "answer",
        held_out: float = 0.1,
        held_out_path: str | None = None,
        retention_path: str | None = None,
        id: str | None = None,
        template: str = "{prompt}",
        demonstration: str = "demonstration",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= held_out < 1:  # before a large file is read
            raise InputError(f"task.held_out={held_out}: is the share of prompts to hold out; give 0 <= share < 1")
        columns = _Columns(prompt, reference, id, template, demonstration)
        rows = columns.problems(str(path), "task.path", limit=limit)
        retention = columns.problems(retention_path, "task.retention_path", prefix="retention-")
        evaluated = columns.problems(held_out_path, "task.held_out_path", prefix="held-out-")
        super().__init__(
            rows,
            source=f"task.path={path}",
            share=held_out,
            held_out=None if held_out_path is None else evaluated,
            retention=retention,
            seed=seed,
            remedy=f"the column {demonstration!r} (task.demonstration) with ideal completions; add it or set "
            "warm_start.steps=0",
        )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which column is what, and how a row becomes a problem."""

    prompt: str
    reference: str | None
    id: str | None
    template: str
    demonstration: str

    def problems(self, path: str | None, key: str, *, prefix: str = "", limit: int | None = None) -> list[Item]:
        if path is None:
            return []

        def read(number: int, place: str, row: Row) -> Item:
            return self._item(row, number, place, prefix)

        rows = ((number, f"{path}, row {number}", row) for number, row in read_rows(str(path), key))
        return items_of(rows, read, f"{key}={path}", limit=limit, id_column=self.id or "number")

    def _item(self, row: Row, number: int, place: str, prefix: str) -> Item:
        prompt = cell(row, self.prompt, place, "task.prompt")
        if not isinstance(row[self.prompt], str):
            kind = type(row[self.prompt]).__name__
            raise InputError(f"{place}: column {self.prompt!r} (task.prompt) is not text but {kind}")
        aside = ", or set task.reference=null where problems have no answer"
        reference = None if self.reference is None else cell(row, self.reference, place, "task.reference", aside)
        name = prefix + (str(number) if self.id is None else cell(row, self.id, place, "task.id"))
        text = filled(self.template, {**row, "prompt": prompt}, place)
        metadata = {name: value for name, value in row.items() if name not in (self.prompt, self.reference)}
        shown = row.get(self.demonstration)
        return Item(Problem(name, text, reference, metadata), same_text(prompt), "" if shown is None else str(shown))
