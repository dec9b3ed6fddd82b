"""In a worker process: one answer's score by reasoning-gym's own scorer, never more than it deserves."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .game_moves import GAMES, play
from .gym_answers import EVALUATED, EXPRESSIONS, admitted

__all__ = ["score_entry", "serve"]

Item = tuple[str, Mapping[str, Any], dict[str, Any], Sequence[str]]  # data set, its options, entry, texts of the answer
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\s*(?!entry)")
_NONSENSE = "zzz"


def serve(partial: bool) -> Callable[[Item], float]:
    """In the child: load the package, then score item after item."""
    warnings.simplefilter("ignore")
    importlib.import_module("reasoning_gym")

    def score(item: Item) -> float:
        name, options, entry, texts = item
        dataset = _dataset(name, json.dumps(dict(options), sort_keys=True))
        return max((score_entry(dataset, entry, text, partial=partial) for text in texts), default=0.0)

    return score


def score_entry(dataset: Any, entry: dict[str, Any], answer: str, *, partial: bool) -> float:
    """Score of an answer, from 0 to 1: that of the data set's own scorer where the answer is one answer.

    Args:
        dataset: of reasoning-gym.
        entry: a problem of it.
        answer: of a model, hostile.
        partial: False gives 1 where the scorer gives 1, and 0 otherwise. True gives what the scorer gives, but nothing
            for what nonsense would get as well, nor for an answer that only contains the right one.

    Raises:
        RuntimeError: the scorer fails on a right answer too, or evaluates answers in a way that is not known here.
    """
    name = str(entry["metadata"].get("source_dataset", ""))
    text = admitted(name, answer, entry)
    if text is None:
        return 0.0
    if name in GAMES and not play(name, text, entry["metadata"]).solved:
        return 0.0
    if name not in EVALUATED and name not in EXPRESSIONS and _evaluates(type(dataset)):
        raise RuntimeError(f"the scorer of {name} evaluates answers as code; it is not used")
    value = _ask(dataset, text, _tuples(entry, name))
    if value >= 1.0 - 1e-9:
        return 1.0
    if not partial or value <= max(_ask(dataset, _NONSENSE, _tuples(entry, name)), 0.0):
        return 0.0
    reference = entry["answer"]
    contained = isinstance(reference, str) and "".join(reference.split()) in "".join(text.split())
    return 0.0 if contained else value


def _ask(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """What the scorer says; 0 where the answer makes it raise, which a right answer does not."""
    try:
        return _call(dataset, answer, entry)
    except MemoryError:
        raise
    except Exception as fault:
        facts = entry["metadata"]
        right = entry["answer"] or facts.get("example_answer") or facts.get("example_correct_answer") or ""
        try:
            _call(dataset, str(right), entry)
        except Exception as again:
            raise RuntimeError(f"the scorer fails on a right answer too: {type(again).__name__}: {again}") from fault
        return 0.0


def _call(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    with contextlib.redirect_stdout(io.StringIO()):  # some scorers print
        value = float(dataset.score_answer(answer, entry))
    if math.isnan(value):
        raise ValueError("the score is not a number")
    return value


def _tuples(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """These compare grids as tuples; from a file they come as lists."""
    if name not in ("arc_agi", "rearc"):
        return entry
    grid = tuple(tuple(row) for row in entry["metadata"]["output"])
    return {**entry, "metadata": {**entry["metadata"], "output": grid}}


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(name, **json.loads(options))


def _evaluates(kind: Any) -> bool:
    try:
        return _EVALUATES.search(inspect.getsource(kind.score_answer)) is not None
    except (OSError, TypeError):
        return True
