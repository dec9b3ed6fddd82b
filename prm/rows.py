"""What every reader of rows needs: columns that are there and of their type, labels, and steps joined to one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from .steps import StepExample

__all__ = [
    "BadRow",
    "Reason",
    "Row",
    "as_label",
    "as_mapping",
    "as_text",
    "column",
    "example_of",
    "items",
    "join_steps",
    "plain",
    "problem_hash",
    "shorten",
    "texts",
]

Row = Mapping[str, Any]
Reason = Literal[
    "invalid_json",
    "missing_column",
    "null",
    "wrong_type",
    "invalid_text",
    "empty_prompt",
    "no_steps",
    "count_mismatch",
    "empty_step",
    "wrong_spans",
    "unknown_label",
    "no_label",
    "nothing_left",
    "invalid_row",
]


class BadRow(ValueError):
    """A row that is no example.

    Args:
        reason: under which such rows are counted.
        message: what is wrong, in words and on one line.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def column(row: Row, name: str) -> Any:
    """The value of a column that must be there and not null."""
    if name not in row:
        raise BadRow("missing_column", f"no column {name!r}; there are {shorten(', '.join(map(str, row)), 120)}")
    if row[name] is None:
        raise BadRow("null", f"column {name!r} is null")
    return row[name]


def items(row: Row, name: str) -> list[Any]:
    """The values of a column that holds a list."""
    value = column(row, name)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadRow("wrong_type", f"column {name!r} is no list but {shorten(value)}")
    return list(value)


def texts(row: Row, name: str) -> list[str]:
    """The texts of a column that holds a list of steps."""
    return [as_text(value, f"step {number}") for number, value in enumerate(items(row, name), start=1)]


def as_mapping(value: Any, what: str) -> Row:
    """A value that must be an object with named fields."""
    if not isinstance(value, Mapping):
        raise BadRow("null" if value is None else "wrong_type", f"{what} is no object but {shorten(value)}")
    return value


def as_text(value: Any, what: str) -> str:
    """Text as it is; of a message or of messages ``{role, content}`` the contents, a blank line between them.

    >>> as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}], "prompt")
    'Be brief.\\n\\n1+1?'
    """
    if isinstance(value, str):
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages):
        contents = [_content(message.get("content")) for message in messages]
        if None not in contents:
            return "\n\n".join(filter(None, contents))
    raise BadRow("null" if value is None else "wrong_type", f"{what} is no text but {shorten(value)}")


def _content(content: Any) -> str | None:
    """What a message says: text, or a list of parts each with its text. None where it is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    known = [part for part in parts if isinstance(part, str)]
    return "".join(known) if len(known) == len(parts) else None


def as_label(value: Any, number: int) -> float:
    """The label of step ``number``: true, false, 1, 0, or a probability between.

    >>> as_label(True, 1), as_label(0, 1), as_label(0.7, 1)
    (1.0, 0.0, 0.7)
    """
    value = plain(value)
    if value is None:
        raise BadRow("null", f"the label of step {number} is null")
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise BadRow("unknown_label", f"step {number} has the label {shorten(value)}; known are true, false and 0 to 1")
    return float(value)


def plain(value: Any) -> Any:
    """A NumPy scalar as the Python number it holds; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def example_of(
    prompt: str,
    steps: Sequence[str],
    labels: Sequence[float | None],
    separator: str,
    problem_id: str | None,
    metadata: Row,
) -> StepExample:
    """An example of steps that come one by one; each must have a label and say something."""
    if len(steps) != len(labels):
        raise BadRow("count_mismatch", f"{len(steps)} steps but {len(labels)} labels")
    for number, step in enumerate(steps, start=1):
        if not step.strip():
            raise BadRow("empty_step", f"step {number} of {len(steps)} is empty")
    completion, spans = join_steps(steps, separator)
    return StepExample(prompt, completion, spans, tuple(labels), problem_id or problem_hash(prompt), metadata)


def join_steps(steps: Sequence[str], separator: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The steps as one text, and where each lies in it, blanks at its ends left out.

    >>> join_steps(["a = 1", " b = 2"], "\\n")
    ('a = 1\\n b = 2', ((0, 5), (7, 12)))
    """
    spans, start = [], 0
    for step in steps:
        first = start + len(step) - len(step.lstrip())
        spans.append((first, first + len(step.strip())))
        start += len(step) + len(separator)
    return separator.join(steps), tuple(spans)


def problem_hash(prompt: str) -> str:
    """A name for a problem from its text, blanks aside; the same in every process.

    >>> problem_hash("What is  1+1?\\n") == problem_hash("What is 1+1?") != problem_hash("What is 1+2?")
    True
    """
    return blake2b(" ".join(prompt.split()).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def shorten(value: Any, limit: int = 60) -> str:
    """A value on one line of at most ``limit`` characters, line breaks and control characters escaped.

    >>> shorten("two\\nlines"), shorten("long " * 9, limit=9), shorten(7)
    ("'two lines'", "'long lon…'", '7')
    """
    if isinstance(value, str):
        head = " ".join(value[: 4 * limit].split())
        cut = len(head) > limit or len(value) > 4 * limit
        shown = repr(head[: limit - 1] if cut else head)
        return f"{shown[:-1]}…{shown[-1]}" if cut else shown
    head = " ".join(str(value).split())
    return head if len(head) <= limit else head[: limit - 1] + "…"
