"""What all tasks of rows share: where rows come from, how they are split, and in which order they are trained on."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ...grpo.seeds import named_generator, named_seed
from ...grpo.task import Problem
from ...verifiers import InputError
from ..tables import Row, read_rows

__all__ = ["Item", "RowTask", "cell", "epoch_order", "filled", "items_of", "on_hub", "rows_of", "same_text"]

log = logging.getLogger(__name__)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Item:
    """A problem, the text by which it is told from others, and an ideal completion or nothing."""

    problem: Problem
    key: str
    demonstration: str


class RowTask:
    """Problems that are all there from the start; see :class:`apportion.grpo.task.Task`.

    Training, held-out and retention problems share no prompt, blanks aside. Which prompts are held out depends on
    their text and ``seed`` alone: more rows, or another order, move none of the others.

    Args:
        rows: to train on, and to hold out of where ``held_out`` is None.
        source: where they come from, for messages (``task.path=problems.jsonl``).
        share: of the distinct prompts to hold out.
        held_out: the evaluation problems; None takes a share of the rows.
        retention: problems of a skill that is not trained on.
        seed: of the split.
        remedy: what a warm start without demonstrations is told.
    """

    def __init__(
        self,
        rows: list[Item],
        *,
        source: str,
        share: float = 0.0,
        held_out: list[Item] | None = None,
        retention: Sequence[Item] = (),
        seed: int = 0,
        remedy: str = "set warm_start.steps=0",
    ) -> None:
        if not 0 <= share < 1:
            raise InputError(f"task.held_out={share}: is the share of prompts to hold out; give 0 <= share < 1")
        self._source, self._remedy, self._retention = source, remedy, list(retention)
        chosen = _held_out_prompts({item.key for item in rows}, share, seed) if held_out is None else set()
        evaluated = [item for item in rows if item.key in chosen] if held_out is None else held_out
        self._held_out = _without(evaluated, self._retention, "held out", "retention")
        split_off = {item.key for item in self._held_out} if held_out is None else set()
        train = [item for item in rows if item.key not in split_off]
        self._train = _without(train, [*self._held_out, *self._retention], "trained on", "evaluation")
        if not self._train:
            raise InputError(f"{source}: no row is left to train on; lower task.held_out or add rows")
        self.content = _content_hash(self._train)  # public, so that a changed file is another warm start

    def batch(self, step: int, num_prompts: int, seed: int) -> Sequence[Problem]:
        """Epoch after epoch in an order of its own; the rest of an epoch that fills no batch is left for the next."""
        places = epoch_order(len(self._train), step, num_prompts, seed, self._source)
        return [self._train[place].problem for place in places]

    def held_out(self) -> Sequence[Problem]:
        return [item.problem for item in self._held_out]

    def retention(self) -> Sequence[Problem]:
        return [item.problem for item in self._retention]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """``count`` pairs of prompt and ideal completion, of training rows only."""
        shown = [item for item in self._train if item.demonstration]
        if not shown:
            raise InputError(f"{self._source}: a warm start needs {self._remedy}")
        chosen = (shown[row] for row in rng.integers(len(shown), size=count))
        return [(item.problem.prompt, item.demonstration) for item in chosen]


def epoch_order(rows: int, step: int, num_prompts: int, seed: int, source: str) -> list[int]:
    """The places among ``rows`` that ``step`` trains on: every epoch is a permutation of its own, cut into batches."""
    batches = rows // num_prompts
    if not batches:
        raise InputError(
            f"{source}: {rows} rows to train on, fewer than the {num_prompts} prompts of a step; add rows or ask for "
            "fewer prompts a step"
        )
    epoch, place = divmod(step, batches)
    order = named_generator(seed, "problems", epoch).permutation(rows)
    return [int(row) for row in order[place * num_prompts : (place + 1) * num_prompts]]


def on_hub(path: str) -> bool:
    """Whether the path is a name on the hub (``owner/name``) and no file here."""
    named = _HUB_NAME.fullmatch(path) is not None and Path(path).suffix not in (".jsonl", ".json", ".parquet")
    return named and not Path(path).exists()


def rows_of(path: str, key: str, *, subset: str | None = None, split: str = "train") -> Iterator[tuple[int, str, Row]]:
    """Rows with their number and their place in words ("problems.jsonl, row 3"), of a file or of the hub.

    Args:
        path: JSONL or Parquet file, an address that ``datasets`` reads, or ``owner/name``.
        key: of the option that names it.
        subset, split: of a name on the hub.
    """
    if not on_hub(path):
        yield from ((number, f"{path}, row {number}", row) for number, row in read_rows(path, key))
        return
    import datasets

    try:
        rows = datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # its many kinds all mean: not to be had
        reason = " ".join(str(error.__cause__ or error).split())[:160]
        raise InputError(
            f"{key}={path}: no file here, and the hub does not give it ({reason}); check the name and the network, or "
            "give a file"
        ) from error
    yield from ((number, f"{path} {split}, row {number}", row) for number, row in enumerate(rows, start=1))


def items_of(
    rows: Iterable[tuple[int, str, Row]],
    read: Callable[[int, str, Row], Item | None],
    source: str,
    *,
    limit: int | None = None,
    id_column: str = "id",
) -> list[Item]:
    """The items of the rows, as far as ``read`` (number, place, row) makes one, at most ``limit``; ids are unique."""
    if limit is not None and limit < 1:
        raise InputError(f"task.limit={limit}: give a number of rows from 1 on, or null for all")
    items: list[Item] = []
    seen: dict[str, int] = {}
    for number, place, row in rows:
        item = read(number, place, row)
        if item is None:
            continue
        name = item.problem.id
        if name in seen:
            raise InputError(f"{place}: {id_column}={name!r} is also the id of row {seen[name]}; make it unique")
        seen[name] = number
        items.append(item)
        if len(items) == limit:
            break
    if not items:
        raise InputError(f"{source}: the file has no rows, or none that is asked for; give one JSON object a line")
    return items


def cell(row: Row, column: str, place: str, option: str | None = None, aside: str = "") -> str:
    """The text of a column that must be there and not empty; numbers and JSON values are written out.

    Args:
        option: that chooses the column, for messages.
        aside: what else one can do where it is empty.
    """
    if column not in row:
        remedy = f"set {option}" if option else "give a file that has it"
        raise InputError(f"{place}: no column {column!r}; the columns are {', '.join(row) or 'none'}; {remedy}")
    value = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        named = f"{column!r} ({option})" if option else repr(column)
        raise InputError(f"{place}: column {named} is empty; fill it or drop the row{aside}")
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | dict) else str(value)


def filled(template: str, columns: Row, place: str) -> str:
    """The template with its ``{columns}`` put in."""
    try:
        return template.format_map(columns)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"{place}: task.template={template!r} does not fit ({type(error).__name__}: {error}); the columns are "
            f"{', '.join(columns)}; write {{{{ and }}}} for literal braces"
        ) from error


def same_text(prompt: str) -> str:
    """What two prompts share that are one but for blanks."""
    return " ".join(prompt.split())


def _held_out_prompts(keys: set[str], share: float, seed: int) -> set[str]:
    """Prompts whose hash falls in the lowest ``share``; at least one where there is a share and a choice."""
    place = {key: named_seed(seed, "held-out", key) / 2**63 for key in keys}
    chosen = {key for key in keys if place[key] < share}
    if not chosen and share > 0 and len(keys) > 1:
        chosen = {min(keys, key=place.__getitem__)}
    return chosen


def _without(items: list[Item], others: list[Item], use: str, kept_for: str) -> list[Item]:
    taken = {item.key for item in others}
    kept = [item for item in items if item.key not in taken]
    if len(kept) < len(items):
        log.warning("%d rows are not %s: their prompts are %s problems", len(items) - len(kept), use, kept_for)
    return kept


def _content_hash(items: list[Item]) -> str:
    digest = blake2b(digest_size=12)
    for item in items:
        digest.update(repr((item.problem.prompt, item.problem.reference, item.demonstration)).encode())
    return digest.hexdigest()
