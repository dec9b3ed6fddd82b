"""Completions from a user's file, and the file of verdicts on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..verifiers import InputError, Sample, Span, Verdict
from ..verifiers.panel import PanelResult
from .tables import Row

__all__ = ["Judged", "read_samples", "read_verdicts", "verdict_rows"]

REFERENCES = ("reference", "answer")  # columns that hold the right answer where the user names none


@dataclass(frozen=True)
class Judged:
    """One completion and what the verifiers said of it.

    Args:
        row: its number in the file, from 1 on.
        completion: the text that the spans point into.
        verdicts: by verifier.
        faulted: verifiers that failed on it.
    """

    row: int
    completion: str
    verdicts: Mapping[str, Verdict]
    faulted: Sequence[str] = ()


def read_samples(
    rows: Iterator[tuple[int, Row]], where: str, *, prompt: str, completion: str, reference: str | None
) -> Iterator[tuple[int, Sample]]:
    """Samples with their row numbers.

    Args:
        rows: with their numbers, from 1 on.
        where: file, for messages.
        prompt, completion, reference: names of columns; a prompt that is not there is empty, and a reference of None
            is looked for in the usual places. All columns are metadata.
    """
    for number, row in rows:
        if not isinstance(row.get(completion), str):
            found = f"not text but {type(row[completion]).__name__}" if completion in row else "missing"
            raise InputError(
                f"{where}, row {number}: column {completion!r} is {found}; the columns are {', '.join(row) or 'none'}; "
                "set completion=COLUMN"
            )
        if reference is not None and reference not in row:
            raise InputError(f"{where}, row {number}: no column {reference!r}; set reference=COLUMN, or null")
        answer = row[reference] if reference is not None else next((row[key] for key in REFERENCES if key in row), None)
        yield (
            number,
            Sample(
                prompt=str(row.get(prompt) or ""),
                completion=row[completion],
                reference=None if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
                metadata=dict(row)
                if "completion_ids" not in row
                else {**row, "num_tokens": len(row["completion_ids"])},
            ),
        )


def read_verdicts(path: Path) -> list[Judged]:
    """All whole lines of a verdict file; none where there is no file."""
    if not path.exists():
        return []
    judged = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):
            break  # empty, or cut by a crash
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, row {number}: is no verdict ({error}); choose another run.dir") from error
        verdicts = {
            name: Verdict(
                said["score"], tuple(Span(s["start"], s["stop"], s["score"], s["label"]) for s in said["spans"])
            )
            for name, said in row["verdicts"].items()
        }
        faulted = [name for name, said in row["verdicts"].items() if said.get("error")]
        judged.append(Judged(row["row"], row["completion"], verdicts, faulted))
    return judged


def verdict_rows(part: Sequence[tuple[int, Sample]], told: Mapping[str, PanelResult]) -> Iterator[dict[str, Any]]:
    """A plain row per sample; ``error`` marks a verdict that a fault of the verifier left out."""
    for place, (number, sample) in enumerate(part):
        said = {}
        for name, result in told.items():
            verdict = result.verdicts[place][name]
            said[name] = {"score": verdict.score, "spans": [_plain(span, sample.completion) for span in verdict.spans]}
            if place in result.faulted[name]:
                said[name]["error"] = True
        yield {"row": number, "completion": sample.completion, "verdicts": said}


def _plain(span: Span, text: str) -> dict[str, Any]:
    return {
        "start": span.start,
        "stop": span.stop,
        "score": span.score,
        "label": span.label,
        "text": text[span.start : span.stop],
    }
