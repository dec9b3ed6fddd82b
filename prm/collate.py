"""Examples as rows of tokens with the places of their labels, and rows as padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .batching import parts_by_length
from .encoding import Encoded, collate_steps
from .steps import StepExample

__all__ = ["StepRow", "collate_rows", "labelled_row", "pad_right"]


@dataclass(frozen=True)
class StepRow:
    """What is learned from one example.

    Args:
        encoded: tokens up to the last labelled step, with the places of the S labelled steps.
        labels: (S,) probability that the step is right.
        steps: (S,) index of each of them among the example's steps.
    """

    encoded: Encoded
    labels: tuple[float, ...]
    steps: tuple[int, ...]


def labelled_row(encoded: Encoded, example: StepExample) -> StepRow | None:
    """The labelled steps of an encoded example; None where no labelled step fits.

    Tokens after the last labelled step are cut off: a causal model does not look ahead, so they would change nothing.

    >>> example = StepExample("", "abc", ((0, 1), (1, 2), (2, 3)), (1.0, 0.0, None), "p")
    >>> labelled_row(Encoded((7, 8, 9), (0, 1, 2), 3), example)
    StepRow(encoded=Encoded(input_ids=(7, 8), step_ends=(0, 1), kept_steps=2), labels=(1.0, 0.0), steps=(0, 1))
    """
    known = [(step, label) for step, label in enumerate(example.labels[: encoded.kept_steps]) if label is not None]
    if not known:
        return None
    ends = tuple(encoded.step_ends[step] for step, _ in known)
    cut = Encoded(encoded.input_ids[: ends[-1] + 1], ends, len(ends))
    return StepRow(cut, tuple(label for _, label in known), tuple(step for step, _ in known))


def collate_rows(rows: Sequence[StepRow], *, pad_id: int = 0, parts: int = 1) -> dict[str, Any]:
    """A batch as at most ``parts`` padded parts, rows of like length together.

    Args:
        rows: B examples.
        pad_id: of the padding on the right; any id, as the attention mask goes by length.
        parts: the model goes through this many times, with less padding each; the sum of the losses stays.

    Returns:
        ``parts``, each a dict of what :meth:`StepModel.step_logits` takes, and ``labels`` (S,), the labels of all
        labelled steps, in the order of the parts, their rows and their steps.
    """
    groups = parts_by_length([len(row.encoded.input_ids) for row in rows], parts)
    batches = [collate_steps([rows[index].encoded for index in group], pad_id) for group in groups]
    labels = chain.from_iterable(rows[index].labels for group in groups for index in group)
    return {"parts": [batch._asdict() for batch in batches], "labels": torch.tensor(list(labels))}


def pad_right(rows: Iterable[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Ids (B, T), padded with ``fill``, and the attention mask (B, T), both long.

    >>> [value.tolist() for value in pad_right([[5, 6], [7]], 0)]
    [[[5, 6], [7, 0]], [[1, 1], [1, 0]]]
    """
    kept = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=fill)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in kept])[:, None]
    return ids, mask.long()
