"""Labelled steps from any source: read, checked, cut to length, counted, and split by problem."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

from ..verifiers import InputError
from . import formats
from .formats import RowReader
from .rows import BadRow, Row, shorten
from .sources import RowSource, row_source
from .steps import StepExample
from .truncation import Length, truncate

__all__ = ["Format", "ReadReport", "StepData", "load_steps", "split_by_problem"]

log = logging.getLogger(__name__)

Format = Literal["stepwise", "prm800k", "math_shepherd", "processbench", "rollouts"]


@dataclass
class ReadReport:
    """What one reading found.

    Args:
        rows: rows looked at; one row may give several examples.
        examples, steps, right, wrong, unlabelled: examples given, and their steps; right is a label of 0.5 or more.
        skipped: rows left out, by reason.
        first_skipped: of each reason the first one, with its place.
        cut_examples, dropped_steps: examples that were too long, and the steps that went.
    """

    rows: int = 0
    examples: int = 0
    steps: int = 0
    right: int = 0
    wrong: int = 0
    unlabelled: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    cut_examples: int = 0
    dropped_steps: int = 0

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
        parts = [
            f"{self.rows} rows, {self.examples} examples, {self.steps} steps",
            f"{self.right} right, {self.wrong} wrong, {self.unlabelled} unlabelled",
            *([f"{self.skipped.total()} rows skipped ({reasons})"] if self.skipped else []),
            *([f"{self.cut_examples} too long, {self.dropped_steps} steps dropped"] if self.cut_examples else []),
        ]
        return "; ".join(parts)

    def count(self, example: StepExample) -> None:
        """Add an example that is given out."""
        self.examples += 1
        self.steps += len(example.steps)
        known = [label for label in example.labels if label is not None]
        self.right += sum(label >= 0.5 for label in known)
        self.wrong += sum(label < 0.5 for label in known)
        self.unlabelled += len(example.labels) - len(known)

    def skip(self, fault: BadRow, told: str) -> None:
        """Add a row that is left out; the first of its kind is told in the log."""
        self.skipped[fault.reason] += 1
        if fault.reason not in self.first_skipped:
            self.first_skipped[fault.reason] = told
            log.warning("skipped: %s", told)


@dataclass
class StepData:
    """Examples, read anew at each iteration, one at a time.

    Args:
        source: gives the rows with their places.
        reader: row -> examples.
        on_bad_row: ``stop`` at the first bad row, or ``skip`` and count it.
        limit: use the first so many rows.
        max_length: cut to so many tokens by whole steps; see :func:`apportion.prm.truncation.truncate`.
        length: measures them.

    The attribute ``report`` tells of the latest iteration, and is whole once that has ended.
    """

    source: RowSource
    reader: RowReader
    on_bad_row: Literal["stop", "skip"] = "stop"
    limit: int | None = None
    max_length: int | None = None
    length: Length | None = None
    report: ReadReport = field(default_factory=ReadReport, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.on_bad_row not in ("stop", "skip"):
            raise InputError(f"on_bad_row={self.on_bad_row}: give stop or skip")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit={self.limit}: give a number of rows from 1 on, or null for all")
        if self.max_length is not None and self.length is None:
            raise InputError(f"max_length={self.max_length}: needs length, a function that counts tokens")

    def within(self, max_length: int | None, length: Length) -> StepData:
        """The same examples, cut to a length."""
        return replace(self, max_length=max_length, length=length)

    def __iter__(self) -> Iterator[StepExample]:
        report = self.report = ReadReport()
        for place, row in self.source():
            if report.rows == self.limit:
                break
            report.rows += 1
            try:
                examples = [self._fitted(example, report) for example in self._examples(row)]
            except BadRow as fault:
                told = f"{place}: {fault}{_about(row)}"
                if self.on_bad_row == "stop":
                    raise InputError(f"{told}; mend or drop it, or set on_bad_row=skip") from fault
                report.skip(fault, told)
                continue
            for example in examples:
                report.count(example)
                yield example
        if not report.examples:
            raise InputError(f"no example to use; {'; '.join(report.first_skipped.values()) or 'there are no rows'}")
        if report.skipped or report.cut_examples:
            log.warning("%s", report)

    def _examples(self, row: Row | BadRow) -> list[StepExample]:
        if isinstance(row, BadRow):
            raise row
        try:
            examples = list(self.reader(row))
        except BadRow:
            raise
        except ValueError as error:  # steps or labels that StepExample refuses
            raise BadRow("invalid_row", shorten(str(error), 200)) from error
        for example in examples:
            _check(example)
        return examples

    def _fitted(self, example: StepExample, report: ReadReport) -> StepExample:
        if self.max_length is None or self.length is None:
            return example
        cut = truncate(example, self.max_length, self.length)
        if cut is None or not _any_label(cut):
            raise BadRow("nothing_left", f"no labelled step fits in max_length={self.max_length} tokens")
        if len(cut.steps) < len(example.steps):
            report.cut_examples += 1
            report.dropped_steps += len(example.steps) - len(cut.steps)
        return cut


def load_steps(
    path: str | Path | Iterable[Row],
    format: Format | RowReader = "stepwise",
    *,
    on_bad_row: Literal["stop", "skip"] = "stop",
    split: str = "train",
    subset: str | None = None,
    streaming: bool = False,
    limit: int | None = None,
    max_length: int | None = None,
    length: Length | None = None,
    **options: Any,
) -> StepData:
    """Examples of labelled steps; iterate over them, then ask ``report``.

    Args:
        path: file, folder, pattern, hub name or rows in memory; see :func:`apportion.prm.sources.row_source`.
        format: name of a reader of :mod:`apportion.prm.formats`, or a function ``row -> list[StepExample]``.
        on_bad_row: ``stop`` with the file, the row and what is wrong, or ``skip`` such rows and count them.
        split, subset, streaming: of a hub name.
        limit: use the first so many rows.
        max_length, length: cut to so many tokens by whole steps.
        options: of the reader, such as ``separator``.

    >>> data = load_steps([{"prompt": "1+1+1=?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]}])
    >>> [(example.step_texts, example.labels) for example in data]
    [(['1+1=2', '2+1=4'], (1.0, 0.0))]
    >>> print(data.report)
    1 rows, 1 examples, 2 steps; 1 right, 1 wrong, 0 unlabelled
    """
    reader = _reader(format)
    known = [p.name for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise InputError(f"{name}: no option of this format; it has {', '.join(known) or 'none'}")
    source = row_source(path, split=split, subset=subset, streaming=streaming)
    return StepData(source, partial(reader, **options), on_bad_row, limit, max_length, length)


def split_by_problem(
    examples: Iterable[StepExample], held_out: float, seed: int
) -> tuple[list[StepExample], list[StepExample]]:
    """Training and held-out examples that share no problem.

    A problem's side depends on its id and the seed alone, whatever the order and the other examples. Only where that
    leaves one side without any does the nearest problem change over; a lone problem is trained on.

    Args:
        examples: in any order, which is kept on both sides.
        held_out: share of the problems, not of the examples, to hold out: 0 to below 1.
        seed: another one, another split.
    """
    if not 0 <= held_out < 1:
        raise InputError(f"held_out={held_out}: is the share of problems to hold out; give 0 <= share < 1")
    all_examples = list(examples)
    place = {name: _place(name, seed) for name in {example.problem_id for example in all_examples}}
    chosen = {name for name in place if place[name] < held_out}
    if held_out > 0 and len(place) > 1 and not chosen:
        chosen = {min(place, key=place.__getitem__)}
    if chosen and len(chosen) == len(place):
        chosen.remove(max(place, key=place.__getitem__))
    train = [example for example in all_examples if example.problem_id not in chosen]
    return train, [example for example in all_examples if example.problem_id in chosen]


def _place(name: str, seed: int) -> float:
    """A number in [0, 1) for a problem, the same in every process."""
    digest = blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def _reader(format: Format | RowReader) -> RowReader:
    if not isinstance(format, str):
        return format
    if format not in get_args(Format):
        raise InputError(f"format={format}: is unknown; give one of {', '.join(get_args(Format))}")
    reader: RowReader = getattr(formats, format)
    return reader


def _check(example: StepExample) -> None:
    if not example.prompt.strip():
        raise BadRow("empty_prompt", "the prompt is empty")
    if not example.steps:
        raise BadRow("no_steps", "there is no step")
    for number, text in enumerate(example.step_texts, start=1):
        if not text.strip():
            raise BadRow("empty_step", f"step {number} of {len(example.steps)} is empty")
    if not _any_label(example):
        raise BadRow("no_label", "no step has a label")
    try:
        (example.prompt + example.completion).encode()
    except UnicodeEncodeError as error:
        raise BadRow("invalid_text", "the text holds half a surrogate pair, which no tokenizer reads") from error


def _any_label(example: StepExample) -> bool:
    return any(label is not None for label in example.labels)


def _about(row: Row | BadRow) -> str:
    """The beginning of the problem, so that a row can be found by eye."""
    if isinstance(row, BadRow):
        return ""
    value = next((row[name] for name in ("prompt", "problem", "input", "question") if row.get(name) is not None), row)
    text = value.get("problem", value) if isinstance(value, Mapping) else value
    text = (
        text[0].get("content", text) if isinstance(text, Sequence) and text and isinstance(text[0], Mapping) else text
    )
    return f" [{shorten(text)}]"
