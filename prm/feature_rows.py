"""What a frozen model reads of a solution, and the token ranges at which its steps are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .encoding import Template, encode_steps
from .steps import StepExample

__all__ = ["Row", "causal_row", "encoder_rows"]


class Row(NamedTuple):
    """One text to be read, and the half-open token ranges whose states are averaged: one for each step in it."""

    input_ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None
    ranges: tuple[tuple[int, int], ...]


def causal_row(
    tokenizer: Any, example: StepExample, template: Template, limit: int | None, *, shared: bool
) -> tuple[Row, int]:
    """Problem and solution as one row with the last token of every step that fits; and how many steps do not.

    Args:
        tokenizer: the model's own, fast.
        example: a solution.
        template: what is read of it.
        limit: most tokens; None for no limit.
        shared: the example's metadata hold ``completion_ids`` of this same vocabulary (and ``offsets``): read these.
    """
    encoded = encode_steps(
        tokenizer,
        example.prompt,
        example.completion,
        example.steps,
        template=template,
        max_length=limit,
        completion_ids=example.metadata["completion_ids"] if shared else None,
        offsets=example.metadata.get("offsets") if shared else None,
    )
    ranges = tuple((end, end + 1) for end in encoded.step_ends)
    return Row(encoded.input_ids, None, ranges), len(example.steps) - encoded.kept_steps


def encoder_rows(
    tokenizer: Any, example: StepExample, limit: int | None, *, problem: bool
) -> Iterator[tuple[Row, int]]:
    """One row a step, with the range of the step's own tokens, or an empty row and 1 where it makes no token.

    Args:
        tokenizer: the model's own, fast.
        example: a solution.
        limit: most tokens. What is too long loses the beginning of the problem first, then the end of the step.
        problem: read the problem before the step.
    """
    before = (_well_formed(example.prompt),) if problem else ()
    for step in map(_well_formed, example.step_texts):
        row = _encoder_row(tokenizer, (*before, step), limit)
        yield row, 0 if row.ranges else 1


def _encoder_row(tokenizer: Any, texts: Sequence[str], limit: int | None) -> Row:
    """A step, the last of the texts, behind its problem if there is one."""
    found = tokenizer(*texts, verbose=False)
    parts = found.sequence_ids(0)  # None for special tokens
    step = len(texts) - 1
    own = [place for place, part in enumerate(parts) if part == step]
    before = [place for place, part in enumerate(parts) if part is not None and part != step]
    excess = 0 if limit is None else max(0, len(parts) - limit)
    dropped = set([*before, *reversed(own)][:excess])
    kept = [place for place in range(len(parts)) if place not in dropped]
    places = [number for number, place in enumerate(kept) if parts[place] == step]
    ids, types = found["input_ids"], found.get("token_type_ids")
    return Row(
        tuple(ids[place] for place in kept),
        tuple(types[place] for place in kept) if types is not None else None,
        ((places[0], places[-1] + 1),) if places else (),
    )


def _well_formed(text: str) -> str:
    """Lone surrogates, which no tokenizer reads, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
