"""What is to be labelled, solutions of a file or problems that the policy is to solve, and how it is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..grpo.task import Problem
from ..prm.labels import Ask, steps_from_spans
from ..prm.rows import problem_hash
from ..verifiers import InputError, Sample
from ..verifiers.panel import gives_spans
from ..verifiers.segmenters import tile
from .app import build
from .parts import build_task
from .tables import read_rows
from .verdict_file import read_samples

__all__ = ["Cut", "Work", "cut_of", "work_of"]

Cut = Callable[[Sequence[Sample]], list[tuple[tuple[int, int], ...]]]


@dataclass(frozen=True)
class Work:
    """A problem with solutions to be labelled, each with columns for its row; None has the policy solve it."""

    problem: Problem
    solutions: Sequence[tuple[Sample, Mapping[str, Any]]] | None = None


def work_of(config: DictConfig) -> list[Work]:
    """Problems with their solutions from the file, or problems of the task to be solved."""
    if config.file is None:
        return [Work(problem) for problem in _problems(config)]
    groups: dict[str, list[tuple[Sample, Mapping[str, Any]]]] = {}
    for where, number, sample in islice(_rows(config), config.run.limit):
        _check_text(f"{where}, row {number}", sample, config.prompt)
        named = sample.metadata.get(config.problem_id)
        name = problem_hash(sample.prompt) if named is None else str(named)
        groups.setdefault(name, []).append((sample, {"file": Path(where).name, "row": number}))
    if not groups:
        raise InputError(f"file={config.file}: no solution to label; give one JSON object a line")
    return [Work(Problem(name, rows[0][0].prompt, rows[0][0].reference), rows) for name, rows in groups.items()]


def cut_of(config: DictConfig, ask: Ask) -> Cut:
    """Steps by the segmenter, or else by the spans of the step verifier."""
    if config.segmenter is not None:
        segmenter = build(config.segmenter, "segmenter", function=True)
        return lambda samples: [_checked(sample.completion, segmenter(sample.completion)) for sample in samples]
    if config.verifiers.get("steps") is None:
        raise InputError("segmenter: nothing cuts solutions into steps; give one, or verifier@verifiers.steps=NAME")
    verifier = build(config.verifiers.steps, "verifiers.steps", function=True)
    if not gives_spans(verifier):
        raise InputError("verifiers.steps: judges whole answers and marks no steps; give a segmenter")

    def by_spans(samples: Sequence[Sample]) -> list[tuple[tuple[int, int], ...]]:
        steps = []
        for sample, verdict in zip(samples, ask(verifier, samples)):
            places = steps_from_spans(sample.completion, verdict.spans)
            if places is None:
                raise InputError(
                    f"verifiers.steps: its spans overlap in {sample.completion[:60]!r}, so they are no steps; give a "
                    "segmenter"
                )
            steps.append(places)
        return steps

    return by_spans


def _checked(text: str, steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    try:
        tile(text, steps)
    except ValueError as error:
        raise InputError(f"segmenter: {error}") from error
    return tuple((start, stop) for start, stop in steps if text[start:stop].strip())


def _problems(config: DictConfig) -> Sequence[Problem]:
    task, wanted = build_task(config), config.num_problems
    if config.split == "train":
        try:
            return list(task.batch(0, wanted, config.seed))
        except InputError as error:
            raise InputError(f"num_problems={wanted}: the task does not give so many ({error})") from error
    held_out = list(task.held_out())
    if len(held_out) < wanted:
        raise InputError(
            f"num_problems={wanted}: the task holds out {len(held_out)}; lower it, or have the task hold out more"
        )
    return held_out[:wanted]


def _rows(config: DictConfig) -> Iterator[tuple[str, int, Sample]]:
    """File, row number and solution."""
    given = str(config.file)
    files = [given if "://" in given else str(Path(given).expanduser())]
    if Path(files[0]).is_dir():
        files = sorted(str(file) for file in Path(files[0]).iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not files:
            raise InputError(f"file={given}: the folder holds no .jsonl or .parquet file; give one that does")
    columns = {role: config[role] for role in ("prompt", "completion", "reference")}
    for file in files:
        for number, sample in read_samples(read_rows(file, "file"), file, **columns):
            yield file, number, sample


def _check_text(where: str, sample: Sample, column: str) -> None:
    if not sample.prompt.strip():
        raise InputError(f"{where}: column {column!r} holds no prompt; set prompt=COLUMN")
    try:
        (sample.prompt + sample.completion).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the text holds half a surrogate pair, which no tokenizer reads; mend it") from error
