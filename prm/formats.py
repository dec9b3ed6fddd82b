"""One reader per row format: a row in, examples out. A row that is none raises BadRow with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from .rows import BadRow, Row, as_label, as_mapping, as_text, column, example_of, items, plain, problem_hash, shorten
from .rows import texts as step_texts
from .steps import StepExample

__all__ = [
    "RowReader",
    "labels_from_first_error",
    "labels_from_ratings",
    "math_shepherd",
    "prm800k",
    "processbench",
    "rollouts",
    "stepwise",
]

RowReader = Callable[..., Sequence[StepExample]]


def stepwise(
    row: Row,
    *,
    separator: str = "\n",
    null_label: Literal["error", "unlabelled"] = "error",
    problem_id: str | None = None,
) -> list[StepExample]:
    """TRL's stepwise supervision: ``{prompt, completions: [step, ...], labels: [label, ...]}``.

    Args:
        row: labels are booleans, 1 and 0, or probabilities between; the prompt is text or a list of messages, which
            are kept in the metadata as ``messages``.
        separator: put between the steps.
        null_label: ``unlabelled`` takes a null for a step of which nobody knows, ``error`` for a fault.
        problem_id: column that names the problem; None takes a hash of the prompt.

    A row that ``apportion label-steps`` wrote says in ``completion`` and ``step_spans`` where its steps lie: it comes
    back as it was labelled, with its ``problem_id``, and a null is there a step of which nobody knows.

    >>> row = {"prompt": "9.8 or 9.11?", "completions": ["0.8 > 0.11.", "So 9.11."], "labels": [True, False]}
    >>> stepwise(row)[0].step_texts, stepwise(row)[0].labels
    (['0.8 > 0.11.', 'So 9.11.'], (1.0, 0.0))
    """
    if null_label not in ("error", "unlabelled"):
        raise ValueError(f"null_label={null_label!r}: give error or unlabelled")
    if "completion" in row and "step_spans" in row:
        return [_located(row, problem_id or ("problem_id" if "problem_id" in row else None))]
    prompt, steps, values = column(row, "prompt"), step_texts(row, "completions"), items(row, "labels")
    known = [value is not None or null_label == "error" for value in values]
    labels = [as_label(value, n) if known[n - 1] else None for n, value in enumerate(values, start=1)]
    metadata = _others(row, "prompt", "completions", "labels")
    if not isinstance(prompt, str):
        metadata["messages"] = prompt
    return [example_of(as_text(prompt, "prompt"), steps, labels, separator, _named(row, problem_id), metadata)]


def prm800k(
    row: Row, *, neutral: float | None = 1.0, alternatives: bool = False, separator: str = "\n"
) -> list[StepExample]:
    """A line of PRM800K, arXiv 2305.20050: the solution that was walked along, each step rated -1, 0 or 1 by people.

    A step is the chosen completion, else the one that a labeller wrote (right), else the first one offered, and with
    that the solution ends. Labels follow :func:`labels_from_ratings`.

    Args:
        row: as published, with ``question.problem`` and ``label.steps``.
        neutral: label of a step rated 0; None leaves it unlabelled.
        alternatives: each offered step that was not taken, up to the first error, gives an example of its own. The
            steps before it bear no label there, so that every rating counts once.
        separator: put between the steps.
    """
    question, label = (as_mapping(column(row, name), f"column {name!r}") for name in ("question", "label"))
    steps: list[str] = []
    ratings: list[int | None] = []
    aside: list[tuple[list[str], list[float | None]]] = []
    for number, step in enumerate(items(label, "steps"), start=1):
        offered, taken, ends = _offered(as_mapping(step, f"step {number}"), number)
        if -1 not in ratings:
            unknown: list[float | None] = [None] * len(steps)
            for place, (text, rating) in enumerate(offered):
                if place != taken and rating is not None:
                    aside.append(([*steps, text], unknown + labels_from_ratings([rating], neutral)))
        if offered:
            steps.append(offered[taken][0])
            ratings.append(offered[taken][1])
        if ends:
            break
    kept = ("finish_reason", "generation", "is_quality_control_question", "is_initial_screening_question")
    metadata = {name: value for name, value in {**label, **row}.items() if name in kept}
    metadata["reference"] = question.get("ground_truth_answer")
    prompt = as_text(column(question, "problem"), "question.problem")
    solutions = [(steps, labels_from_ratings(ratings, neutral)), *(aside if alternatives else [])]
    examples = [
        example_of(prompt, one, labels, separator, None, {**metadata, "alternative": place > 0})
        for place, (one, labels) in enumerate(solutions)
    ]
    return [one for one in examples if any(known is not None for known in one.labels)] or examples[:1]


def math_shepherd(row: Row, *, separator: str = "\n") -> list[StepExample]:
    """A row of Math-Shepherd, arXiv 2312.08935: in ``input`` the mark ``ки`` ends a step, ``label`` has + or - there.

    The mark is a word of its own: the last letters of a Russian word are none. The solution begins at ``Step 1:``, or
    after the question mark where there is none; what is marked before it belongs to the problem.

    Args:
        row: its further columns (``task``) become metadata.
        separator: put between the steps.

    >>> row = {"input": "3+4? Step 1: 3+4=7. ки\\nStep 2: 8. ки", "label": "3+4? Step 1: 3+4=7. +\\nStep 2: 8. -"}
    >>> example = math_shepherd(row)[0]
    >>> example.prompt, example.step_texts, example.labels
    ('3+4?', ['Step 1: 3+4=7.', 'Step 2: 8.'], (1.0, 0.0))
    """
    text, tagged = as_text(column(row, "input"), "input"), as_text(column(row, "label"), "label")
    marks, words = _marks(text, tagged)
    begin = _solution_start(text, [start for start, _, _ in marks])
    if any(start >= begin for start in words):
        raise BadRow("unknown_label", "label has ки where input has it after a step, not + or -")
    steps: list[str] = []
    labels: list[float | None] = []
    problem, last = "", 0
    for start, stop, sign in marks:
        if start >= begin:
            steps.append(text[max(last, begin) : start].strip())
            labels.append(1.0 if sign == "+" else 0.0)
        problem += text[last : min(start, begin)]
        last = stop
    if text[last:].strip():
        raise BadRow("count_mismatch", f"no mark follows the last step {shorten(text[last:].strip())}")
    return [example_of(problem.strip(), steps, labels, separator, None, _others(row, "input", "label"))]


def processbench(row: Row, *, separator: str = "\n\n", problem_id: str | None = None) -> list[StepExample]:
    """A row of ProcessBench, arXiv 2412.06559: ``{problem, steps, label}``, the index of the first wrong step or -1.

    Args:
        row: its other columns become metadata; ``id`` names the row and not the problem.
        separator: put between the steps.
        problem_id: column that names the problem; None takes a hash of its text.
    """
    steps, index = step_texts(row, "steps"), plain(column(row, "label"))
    if type(index) is not int or not -1 <= index < len(steps):
        raise BadRow(
            "unknown_label", f"label is {shorten(index)}; with {len(steps)} steps it is -1 to {len(steps) - 1}"
        )
    labels = labels_from_first_error(len(steps), None if index == -1 else index)
    prompt = as_text(column(row, "problem"), "problem")
    return [example_of(prompt, steps, labels, separator, _named(row, problem_id), _others(row, "problem", "steps"))]


def rollouts(row: Row, *, verifier: str = "steps", problem_id: str | None = "problem_id") -> list[StepExample]:
    """A row of the Parquet files that ``apportion train`` saves: steps and labels are the spans of one verifier.

    A span of no width or of blanks alone marks a place where something is missing, and is no step.

    Args:
        row: with ``prompt``, ``completion`` and ``verdicts``.
        verifier: name under which it stood in the run.
        problem_id: column that names the problem; None takes a hash of the prompt.
    """
    prompt, completion = (as_text(column(row, name), name) for name in ("prompt", "completion"))
    verdicts = _parsed(column(row, "verdicts"))
    if verifier not in verdicts:
        names = ", ".join(map(str, verdicts)) or "none"
        raise BadRow("missing_column", f"no verdict of {verifier!r}; there are {shorten(names)}")
    spans = [_span(span) for span in items(as_mapping(verdicts[verifier], f"the verdict of {verifier!r}"), "spans")]
    judged = sorted((span for span in spans if completion[span[0] : span[1]].strip()), key=lambda span: span[:2])
    if any(left[1] > right[0] for left, right in pairwise(judged)) or any(
        stop > len(completion) for _, stop, _ in spans
    ):
        raise BadRow("wrong_spans", f"the spans of {verifier!r} overlap or end outside the completion")
    steps = tuple((start, stop) for start, stop, _ in judged)
    labels = tuple(as_label(score, number) for number, (_, _, score) in enumerate(judged, start=1))
    kept = ("step", "sample", "reward", "truncated", "reference")
    metadata = {name: row[name] for name in kept if name in row}
    return [StepExample(prompt, completion, steps, labels, _named(row, problem_id) or problem_hash(prompt), metadata)]


def labels_from_ratings(ratings: Sequence[int | None], neutral: float | None = 1.0) -> list[float | None]:
    """Ratings -1, 0, 1 as labels. After the first -1 nothing is known: what follows builds on the wrong step.

    >>> labels_from_ratings([1, 0, -1, 1]), labels_from_ratings([1, 0, -1, 1], neutral=0.0)
    ([1.0, 1.0, 0.0, None], [1.0, 0.0, 0.0, None])
    """
    meaning = {1: 1.0, 0: neutral, -1: 0.0, None: None}
    end = ratings.index(-1) + 1 if -1 in ratings else len(ratings)
    return [meaning[rating] for rating in ratings[:end]] + [None] * (len(ratings) - end)


def labels_from_first_error(num_steps: int, first_wrong: int | None) -> list[float | None]:
    """Right before the first wrong step, wrong at it, unknown after it. None: every step is right.

    >>> labels_from_first_error(4, 2), labels_from_first_error(2, None)
    ([1.0, 1.0, 0.0, None], [1.0, 1.0])
    """
    if first_wrong is None:
        return [1.0] * num_steps
    return [1.0] * first_wrong + [0.0] + [None] * (num_steps - first_wrong - 1)


_MARK = re.compile(r"(?<!\w)ки(?!\w)")
_OPENING = re.compile(r"(?<!\w)step 1 ?:", re.I)


def _marks(text: str, tagged: str) -> tuple[list[tuple[int, int, str]], list[int]]:
    """Where the marks of a text lie, with the signs in the tagged one; and where the same word stands in both."""
    marks: list[tuple[int, int, str]] = []
    words: list[int] = []
    for match in _MARK.finditer(text):
        place = match.start() - len(marks)  # a sign is one character shorter than the mark
        sign = tagged[place : place + 1]
        if sign in ("+", "-"):
            marks.append((*match.span(), sign))
        elif tagged.startswith(match[0], place):
            words.append(match.start())
        else:
            number = len(marks) + 1
            raise BadRow(
                "unknown_label", f"label has {shorten(sign)} in the place of mark {number} of input, not + or -"
            )
    return marks, words


def _solution_start(text: str, marks: Sequence[int]) -> int:
    """Where the solution of a tagged text begins, given where its marks do."""
    if not marks:
        raise BadRow("no_steps", "input has no mark ки after a step")
    # The last one before the first mark, since a problem may speak of a "Step 1:" too.
    openings = [match.start() for match in _OPENING.finditer(text, 0, marks[0])]
    late = _OPENING.search(text, marks[0], marks[1] if len(marks) > 1 else len(text))
    if openings or late:
        return openings[-1] if openings else late.start() if late else 0
    question = text.rfind("?", 0, marks[0])
    if question == -1:
        raise BadRow("no_steps", "input shows no begin of the solution: neither 'Step 1:' nor a question mark")
    return question + 1


def _offered(step: Row, number: int) -> tuple[list[tuple[str, int | None]], int, bool]:
    """The completions of a step with their ratings, the index of the one taken, and whether the solution ends there."""
    offered = [
        _rated(one, number) for one in (items(step, "completions") if step.get("completions") is not None else [])
    ]
    chosen, human = plain(step.get("chosen_completion")), step.get("human_completion")
    if chosen is not None:
        if type(chosen) is not int or not 0 <= chosen < len(offered):
            raise BadRow("wrong_type", f"step {number}: chosen_completion is {shorten(chosen)} of {len(offered)}")
        return offered, chosen, False
    if isinstance(human, Mapping) and human.get("text") is not None:
        return [*offered, (as_text(human["text"], f"step {number}"), 1)], len(offered), False
    return offered, 0, True


def _rated(completion: Any, number: int) -> tuple[str, int | None]:
    completion = as_mapping(completion, f"a completion of step {number}")
    text, rating = as_text(column(completion, "text"), f"step {number}"), plain(completion.get("rating"))
    if rating is not None and (type(rating) is not int or rating not in (-1, 0, 1)):
        raise BadRow("unknown_label", f"step {number} has the rating {shorten(rating)}; known are -1, 0 and 1")
    return text, rating


def _parsed(verdicts: Any) -> Row:
    try:
        return as_mapping(json.loads(verdicts) if isinstance(verdicts, str) else verdicts, "verdicts")
    except RecursionError as error:
        raise BadRow("invalid_json", "verdicts are nested too deep") from error
    except json.JSONDecodeError as error:
        raise BadRow("invalid_json", f"verdicts are no JSON: {error}") from error


def _span(value: Any) -> tuple[int, int, Any]:
    if not isinstance(value, list) or len(value) < 3 or any(type(edge) is not int or edge < 0 for edge in value[:2]):
        raise BadRow("wrong_spans", f"{shorten(value)} is no span [start, stop, score, label]")
    return value[0], value[1], value[2]


def _located(row: Row, problem_id: str | None) -> StepExample:
    """An example of steps whose places in the completion are known."""
    prompt, completion = (as_text(column(row, name), name) for name in ("prompt", "completion"))
    texts, values = step_texts(row, "completions"), items(row, "labels")
    spans = [items({"span": span}, "span") for span in items(row, "step_spans")]
    if any(len(span) != 2 or any(type(plain(edge)) is not int or plain(edge) < 0 for edge in span) for span in spans):
        raise BadRow("wrong_spans", "step_spans are no pairs of start and stop")
    steps = tuple((plain(start), plain(stop)) for start, stop in spans)
    if not len(steps) == len(texts) == len(values):
        raise BadRow("count_mismatch", f"{len(texts)} steps but {len(values)} labels and {len(steps)} step_spans")
    for number, ((start, stop), text) in enumerate(zip(steps, texts), start=1):
        if completion[start:stop] != text:
            raise BadRow("wrong_spans", f"step {number} is not what step_spans cut from the completion")
    labels = tuple(None if value is None else as_label(value, number) for number, value in enumerate(values, start=1))
    metadata = _others(row, "prompt", "completions", "labels", "completion", "step_spans", *filter(None, [problem_id]))
    return StepExample(prompt, completion, steps, labels, _named(row, problem_id) or problem_hash(prompt), metadata)


def _others(row: Row, *used: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


def _named(row: Row, name: str | None) -> str | None:
    return None if name is None else str(column(row, name))
