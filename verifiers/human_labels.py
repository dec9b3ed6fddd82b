"""People's judgements of completions, from a file, as a verifier."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import InputError
from .segmenters import Segmenter
from .verdict import Sample, Span, Verdict

__all__ = ["HumanLabels", "combined"]

log = logging.getLogger(__name__)

Combine = Literal["mean", "majority"]
Key = tuple[str, str, str]  # "prompt" or "id", its value, hash of the completion
_COMBINE = ("mean", "majority")


def combined(ratings: Sequence[float], how: Combine) -> float | None:
    """One rating of several: their mean, or 1 where more than half lie above 0.5, 0 where more than half lie below.

    Args:
        ratings: between 0 and 1, at least one.
        how: ``mean`` or ``majority``; without a majority there is no rating, None.

    >>> combined([1.0, 1.0, 0.0, 0.0], "mean"), combined([1.0, 1.0, 0.0], "majority"), combined([1.0, 0.0], "majority")
    (0.5, 1.0, None)
    """
    if how == "mean":
        return math.fsum(ratings) / len(ratings)
    above, below = sum(rating > 0.5 for rating in ratings), sum(rating < 0.5 for rating in ratings)
    return 1.0 if 2 * above > len(ratings) else 0.0 if 2 * below > len(ratings) else None


class _Step(NamedTuple):
    """A step as a row names it, by its range, its index or its text, and its rating; None says nothing."""

    extent: tuple[int, int] | None
    number: int | None
    text: str | None
    rating: float | None


class _Row(NamedTuple):
    """One person's judgement of one completion."""

    where: str
    rating: float | None
    steps: tuple[_Step, ...]


@dataclass(frozen=True)
class HumanLabels:
    """What people said of exactly this completion; without a judgement it abstains.

    A line of the file is a JSON object. It names the problem by ``prompt`` (exact text) or ``id`` (that of the
    metadata), the answer by ``completion`` (exact text) or ``completion_sha256`` (of its UTF-8, in hexadecimal), and
    rates the answer by ``score``, its steps by ``steps``, or both. A step is an object with ``start`` and ``stop``
    (characters, half-open), ``text`` (its first place behind the step before) or ``index`` (from 0, as ``segmenter``
    cuts), and its rating as ``score`` or ``label``; a rating of null says nothing. Ratings are true, false, or numbers
    between 0 and 1; others need ``ratings``. Several rows on one completion are several people.

    Args:
        path: JSONL file.
        ratings: what each rating stands for, between 0 and 1, or null for no judgement. PRM800K, whose authors count
            neutral as right: ``{-1: 0, 0: 1, 1: 1}``.
        combine: ``mean`` of the people's ratings, or their ``majority``; a tie is no judgement.
        segmenter: cuts a completion into the steps that ``index`` counts.
        until_first_error: drop every step behind the first one that is rated below 0.5, as PRM800K has to be read.
    """

    path: str
    ratings: Mapping[Any, float | None] | None = None
    combine: Combine = "mean"
    segmenter: Segmenter | None = None
    until_first_error: bool = False

    def __post_init__(self) -> None:
        if self.combine not in _COMBINE:
            raise InputError(f"combine: {self.combine!r} is unknown; give one of {', '.join(_COMBINE)}")
        for name, value in (self.ratings or {}).items():
            if value is not None and not (_is_number(value) and 0 <= value <= 1):
                raise InputError(f"ratings: {name!r} stands for {value!r}; give a number between 0 and 1, or null")
        scores, steps = self.conflicts
        if scores or steps:
            log.warning(
                "%s: people disagree on the score of %d completions and on %d steps; combine=%s",
                *(self.path, scores, steps, self.combine),
            )

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    @cached_property
    def conflicts(self) -> tuple[int, int]:
        """On how many completions, and on how many steps that they name alike, people gave different ratings."""
        scores = steps = 0
        for rows in self._rows.values():
            scores += len({row.rating for row in rows} - {None}) > 1
            by_place: dict[object, set[float | None]] = defaultdict(set)
            for step in (step for row in rows for step in row.steps):
                by_place[step[:3]].add(step.rating)
            steps += sum(len(ratings - {None}) > 1 for ratings in by_place.values())
        return scores, steps

    def _judge(self, sample: Sample) -> Verdict:
        digest = _digest(sample.completion)
        named = {"prompt": sample.prompt, "id": sample.metadata.get("id")}
        keys = [(name, str(value), digest) for name, value in named.items() if value is not None]
        rows = [row for key in keys for row in self._rows.get(key, ())]
        ratings = [row.rating for row in rows if row.rating is not None]
        by_place: dict[tuple[int, int], list[float]] = defaultdict(list)
        for row in rows:
            for place, rating in self._placed(row, sample.completion):
                by_place[place].append(rating)
        spans = [
            Span(*place, rating, f"rated {rating:g} by {len(by_place[place])}")
            for place, rating in ((place, combined(by_place[place], self.combine)) for place in sorted(by_place))
            if rating is not None
        ]
        if self.until_first_error:
            wrong = next((place for place, span in enumerate(spans) if span.score < 0.5), len(spans))
            del spans[wrong + 1 :]
        return Verdict(combined(ratings, self.combine) if ratings else None, tuple(spans))

    def _placed(self, row: _Row, completion: str) -> Iterator[tuple[tuple[int, int], float]]:
        """Character ranges of a row's rated steps and their ratings."""
        behind, cut = 0, None
        for step in row.steps:
            if step.extent is not None:
                start, stop = step.extent
                if not 0 <= start < stop <= len(completion):
                    size = len(completion)
                    raise InputError(
                        f"{row.where}: the step [{start}, {stop}) is empty or outside the {size} characters"
                    )
            elif step.number is not None:
                if self.segmenter is None:
                    lines = "segmenter._target_=apportion.verifiers.segmenters.Lines"
                    raise InputError(f"{row.where}: steps go by index; say what cuts them, e.g. {lines}")
                cut = self.segmenter(completion) if cut is None else cut
                if not 0 <= step.number < len(cut):
                    raise InputError(
                        f"{row.where}: no step {step.number}; the completion has {len(cut)}, counted from 0"
                    )
                start, stop = cut[step.number]
            else:
                start = completion.find(step.text or "", behind)
                stop = start + len(step.text or "")
            if start < 0 or (step.text is not None and step.text.strip() != completion[start:stop].strip()):
                raise InputError(f"{row.where}: the step {_short(step.text)} is not in its place in the completion")
            behind = stop
            if step.rating is not None:
                yield (start, stop), step.rating

    @cached_property
    def _rows(self) -> dict[Key, list[_Row]]:
        table: dict[Key, list[_Row]] = defaultdict(list)
        for where, fields in _objects(Path(self.path)):
            row = _Row(where, self._rating(fields.get("score"), where), tuple(self._steps(fields, where)))
            if row.rating is None and not row.steps and not {"score", "steps"} & fields.keys():
                raise InputError(f"{where}: neither score nor steps; rate the answer or its steps")
            table[_key(fields, where)].append(row)
            if isinstance(fields.get("completion"), str):
                for _ in self._placed(row, fields["completion"]):  # a step that is not there is found before the run
                    pass
        if not table:
            raise InputError(f"path={self.path}: the file has no rows; give one JSON object a line")
        return dict(table)

    def _steps(self, fields: Mapping[str, Any], where: str) -> Iterator[_Step]:
        steps = fields.get("steps") or []
        if not isinstance(steps, list):
            raise InputError(f"{where}: steps is {_short(steps)}; give a list of objects")
        for step in steps:
            named = {key: step[key] for key in ("score", "label") if key in step} if isinstance(step, dict) else {}
            if len(named) != 1:
                raise InputError(f"{where}: the step {_short(step)} has not one rating; give score or label")
            (given,) = named.values()
            yield _Step(*_place(step, where), self._rating(given, where))

    def _rating(self, given: object, where: str) -> float | None:
        if given is None:
            return None
        if self._meanings is not None:
            key = _name(given)
            if key not in self._meanings:
                raise InputError(
                    f"{where}: the rating {_short(given)} is not among ratings, {', '.join(self._meanings)}"
                )
            return self._meanings[key]
        if isinstance(given, bool) or (_is_number(given) and 0 <= given <= 1):  # type: ignore[operator]
            return float(given)  # type: ignore[arg-type]
        raise InputError(f"{where}: the rating {_short(given)} is not between 0 and 1; say what it means in ratings")

    @cached_property
    def _meanings(self) -> dict[str, float | None] | None:
        return None if self.ratings is None else {_name(key): value for key, value in self.ratings.items()}


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file's objects, each with the words that name its line."""
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: U+2028 and others may stand in a text
    except OSError as error:
        raise InputError(f"path={path}: {error.strerror}; paths are relative to {Path.cwd()}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}, row {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            shown = _short(line.decode("utf-8", "replace"))
            raise InputError(f"{where}: {shown}: {error}; give one JSON object a line, in UTF-8") from error
        if not isinstance(fields, dict):
            raise InputError(f"{where}: {_short(text)} is no JSON object; give one a line")
        yield f"{where} ({_short(text)})", fields


def _key(fields: Mapping[str, Any], where: str) -> Key:
    """What the row is about."""
    problem = next((name for name in ("prompt", "id") if fields.get(name) is not None), None)
    if problem is None:
        raise InputError(f"{where}: names no problem; give prompt or id")
    completion, digest = fields.get("completion"), fields.get("completion_sha256")
    if isinstance(completion, str) and digest in (None, _digest(completion)):
        digest = _digest(completion)
    elif completion is not None or not isinstance(digest, str):
        raise InputError(f"{where}: names no completion; give its text as completion or its hash as completion_sha256")
    return problem, str(fields[problem]), digest.lower()


def _place(step: Mapping[str, Any], where: str) -> tuple[tuple[int, int] | None, int | None, str | None]:
    """How a step says where it is: its range, its index, its text; a text beside one of the others is a check."""
    start, stop, number, text = (step.get(name) for name in ("start", "stop", "index", "text"))
    extent = (start, stop) if type(start) is type(stop) is int else None
    wrong_kind = not isinstance(text, str | None) or type(number) not in (int, type(None))
    half = extent is None and (start, stop) != (None, None)
    if wrong_kind or half or (extent is not None and number is not None) or not (extent or number is not None or text):
        raise InputError(f"{where}: the step {_short(step)} has no place; give start and stop, text, or index")
    return extent, number, text


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _name(rating: object) -> str:
    """A rating as a key: 1, 1.0 and "1" are one, true is another."""
    return f"{rating:g}" if _is_number(rating) else str(rating).lower() if isinstance(rating, bool) else str(rating)


def _short(value: object) -> str:
    line = " ".join((value if isinstance(value, str) else repr(value))[:200].split())
    return repr(line if len(line) <= 60 else line[:59] + "…")
