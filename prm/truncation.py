"""Cut an example to a length by whole steps: a step that does not fit goes, and its label with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..verifiers import InputError
from .steps import StepExample

__all__ = ["Length", "truncate"]

Length = Callable[[str, str], int]
"""Tokens of a prompt followed by a completion, as the model will read them, special tokens included."""


def truncate(example: StepExample, max_length: int, length: Length) -> StepExample | None:
    """The example with the longest run of first steps that fits; itself where all of it does, None where no step does.

    The prompt is never cut, and what is measured is always the whole text from its first character: pieces that are
    tokenised apart have other lengths. A text that goes on is taken to have no fewer tokens.

    Args:
        example: S steps.
        max_length: most tokens of the prompt with the kept steps.
        length: (prompt, completion) -> tokens; called at most ``log2(S) + 2`` times.

    >>> example = StepExample("1+1+1=?", "1+1=2\\n2+1=4", ((0, 5), (6, 11)), (1.0, 0.0), "p1")
    >>> cut = truncate(example, 15, lambda prompt, completion: len(prompt + completion))
    >>> cut.completion, cut.steps, cut.labels
    ('1+1=2', ((0, 5),), (1.0,))
    """
    if max_length < 1:
        raise InputError(f"max_length={max_length}: give a number of tokens from 1 on, or null for no limit")
    if length(example.prompt, example.completion) <= max_length:
        return example
    kept, too_many = 0, len(example.steps) + 1
    while too_many - kept > 1:
        middle = (kept + too_many) // 2
        if length(example.prompt, example.completion[: example.steps[middle - 1][1]]) <= max_length:
            kept = middle
        else:
            too_many = middle
    if not kept:
        return None
    steps = example.steps[:kept]
    return replace(example, completion=example.completion[: steps[-1][1]], steps=steps, labels=example.labels[:kept])
