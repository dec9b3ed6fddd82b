"""A user's own problems: rows of a JSONL or Parquet file."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np

from ...grpo.seeds import named_generator, named_seed
from ...grpo.task import Problem
from ...verifiers import InputError
from ..tables import Row, read_rows

__all__ = ["JsonlTask"]

log = logging.getLogger(__name__)


class JsonlTask:
    """Problems from a file with one JSON object a line, or from a Parquet file (name ends in ``.parquet``).

    Training, held-out and retention problems share no prompt, blanks aside. Which prompts are held out depends on
    their text and ``seed`` alone: more rows, or another order, move none of the others.

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
        if not 0 <= held_out < 1:
            raise InputError(f"task.held_out={held_out}: is the share of prompts to hold out; give 0 <= share < 1")
        if limit is not None and limit < 1:
            raise InputError(f"task.limit={limit}: give a number of rows from 1 on, or null for all")
        self._path, self._demonstration = str(path), demonstration
        columns = _Columns(prompt, reference, id, template, demonstration)
        rows = columns.problems(self._path, "task.path", limit=limit)
        self._retention = columns.problems(retention_path, "task.retention_path", prefix="retention-")
        if held_out_path is not None:
            self._held_out = columns.problems(held_out_path, "task.held_out_path", prefix="held-out-")
        else:
            chosen = _held_out_prompts({item.key for item in rows}, held_out, seed)
            self._held_out = [item for item in rows if item.key in chosen]
        self._held_out = _without(self._held_out, self._retention, "held out", "retention")
        split_off = {item.key for item in self._held_out} if held_out_path is None else set()
        train = [item for item in rows if item.key not in split_off]
        self._train = _without(train, [*self._held_out, *self._retention], "trained on", "evaluation")
        if not self._train:
            raise InputError(f"task.path={path}: no row is left to train on; lower task.held_out or add rows")
        self.content = _content_hash(self._train)  # public, so that a changed file is another warm start

    def batch(self, step: int, num_prompts: int, seed: int) -> Sequence[Problem]:
        """Epoch after epoch in an order of its own; the rest of an epoch that fills no batch is left for the next."""
        batches = len(self._train) // num_prompts
        if not batches:
            raise InputError(
                f"task.path={self._path}: {len(self._train)} rows to train on, fewer than the {num_prompts} prompts "
                "of a step; add rows or ask for fewer prompts a step"
            )
        epoch, place = divmod(step, batches)
        order = named_generator(seed, "problems", epoch).permutation(len(self._train))
        return [self._train[row].problem for row in order[place * num_prompts : (place + 1) * num_prompts]]

    def held_out(self) -> Sequence[Problem]:
        return [item.problem for item in self._held_out]

    def retention(self) -> Sequence[Problem]:
        return [item.problem for item in self._retention]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """``count`` pairs of prompt and ideal completion, of training rows only."""
        shown = [item for item in self._train if item.demonstration]
        if not shown:
            raise InputError(
                f"task.path={self._path}: a warm start needs the column {self._demonstration!r} (task.demonstration) "
                "with ideal completions; add it or set warm_start.steps=0"
            )
        chosen = (shown[row] for row in rng.integers(len(shown), size=count))
        return [(item.problem.prompt, item.demonstration) for item in chosen]


@dataclass(frozen=True, slots=True)
class _Item:
    problem: Problem
    key: str
    demonstration: str


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which column is what, and how a row becomes a problem."""

    prompt: str
    reference: str | None
    id: str | None
    template: str
    demonstration: str

    def problems(self, path: str | None, key: str, *, prefix: str = "", limit: int | None = None) -> list[_Item]:
        if path is None:
            return []
        items: list[_Item] = []
        ids: dict[str, int] = {}
        for number, row in islice(read_rows(str(path), key), limit):
            item = self._item(row, number, f"{path}, row {number}", prefix)
            if item.problem.id in ids:
                raise InputError(
                    f"{path}, row {number}: {self.id}={item.problem.id!r} is also the id of row "
                    f"{ids[item.problem.id]}; make the column {self.id!r} unique or set task.id=null"
                )
            ids[item.problem.id] = number
            items.append(item)
        if not items:
            raise InputError(f"{key}={path}: the file has no rows; give one JSON object a line")
        return items

    def _item(self, row: Row, number: int, where: str, prefix: str) -> _Item:
        prompt = self._value(row, self.prompt, "prompt", where)
        reference = None if self.reference is None else self._value(row, self.reference, "reference", where)
        name = prefix + (str(number) if self.id is None else self._value(row, self.id, "id", where))
        try:
            text = self.template.format_map({**row, "prompt": prompt})
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"{where}: task.template={self.template!r} does not fit ({type(error).__name__}: {error}); "
                f"the columns are {', '.join(row)}; write {{{{ and }}}} for literal braces"
            ) from error
        metadata = {name: value for name, value in row.items() if name not in (self.prompt, self.reference)}
        shown = row.get(self.demonstration)
        return _Item(
            Problem(name, text, reference, metadata), " ".join(prompt.split()), "" if shown is None else str(shown)
        )

    def _value(self, row: Row, column: str, role: str, where: str) -> str:
        if column not in row:
            raise InputError(
                f"{where}: no column {column!r}; the columns are {', '.join(row) or 'none'}; set task.{role}"
            )
        value = row[column]
        if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
            aside = ", or set task.reference=null where problems have no answer" if role == "reference" else ""
            raise InputError(f"{where}: column {column!r} (task.{role}) is empty; fill it or drop the row{aside}")
        if role == "prompt" and not isinstance(value, str):
            raise InputError(f"{where}: column {column!r} (task.prompt) is not text but {type(value).__name__}")
        if isinstance(value, bool | list | dict):
            return json.dumps(value, ensure_ascii=False)
        return str(value)


def _held_out_prompts(keys: set[str], share: float, seed: int) -> set[str]:
    """Prompts whose hash falls in the lowest ``share``; at least one where there is a share and a choice."""
    place = {key: named_seed(seed, "held-out", key) / 2**63 for key in keys}
    chosen = {key for key in keys if place[key] < share}
    if not chosen and share > 0 and len(keys) > 1:
        chosen = {min(keys, key=place.__getitem__)}
    return chosen


def _without(items: list[_Item], others: list[_Item], use: str, kept_for: str) -> list[_Item]:
    taken = {item.key for item in others}
    kept = [item for item in items if item.key not in taken]
    if len(kept) < len(items):
        log.warning("%d rows are not %s: their prompts are %s problems", len(items) - len(kept), use, kept_for)
    return kept


def _content_hash(items: list[_Item]) -> str:
    digest = blake2b(digest_size=12)
    for item in items:
        digest.update(repr((item.problem.prompt, item.problem.reference, item.demonstration)).encode())
    return digest.hexdigest()
