"""Laws of collating: labels stay with their steps, padding is no label, parts change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apportion.prm.collate import StepRow, collate_rows, labelled_row, pad_right
from apportion.prm.encoding import Encoded
from apportion.prm.model import StepModel
from apportion.prm.steps import StepExample


def row(ids: tuple[int, ...], ends: tuple[int, ...], labels: tuple[float, ...]) -> StepRow:
    return StepRow(Encoded(ids, ends, len(ends)), labels, tuple(range(len(ends))))


ROWS = [
    row((5, 6, 7, 8, 9), (1, 4), (1.0, 0.0)),
    row((11,), (0,), (0.3,)),
    row((12, 13, 14), (0, 2), (0.9, 0.2)),
    row((20, 21, 22, 23), (3,), (1.0,)),
]


def example(labels: tuple[float | None, ...]) -> StepExample:
    return StepExample("", "abcd", tuple((n, n + 1) for n in range(len(labels))), labels, "p")


def test_unlabelled_steps_are_left_out_and_what_follows_the_last_label_is_cut() -> None:
    encoded = Encoded((4, 5, 6, 7), (0, 1, 2, 3), 4)
    found = labelled_row(encoded, example((None, 1.0, 0.0, None)))
    assert found == StepRow(Encoded((4, 5, 6), (1, 2), 2), (1.0, 0.0), (1, 2))


def test_steps_that_did_not_fit_lose_their_labels_with_them() -> None:
    assert labelled_row(Encoded((4, 5), (0, 1), 2), example((1.0, 1.0, 0.0, 0.0))) == StepRow(
        Encoded((4, 5), (0, 1), 2), (1.0, 1.0), (0, 1)
    )


def test_an_example_without_a_label_that_fits_teaches_nothing() -> None:
    assert labelled_row(Encoded((4, 5), (0, 1), 2), example((None, None, 0.0))) is None
    assert labelled_row(Encoded((), (), 0), example((1.0,))) is None


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("pad_id", [0, 7])
def test_every_label_is_read_at_its_own_token_whatever_the_padding(parts: int, pad_id: int) -> None:
    batch = collate_rows(ROWS, pad_id=pad_id, parts=parts)
    tokens = torch.cat([part["input_ids"][part["step_rows"], part["step_positions"]] for part in batch["parts"]])
    found = sorted(zip(tokens.tolist(), batch["labels"].tolist()))
    assert [token for token, _ in found] == [6, 9, 11, 12, 14, 23]
    assert [label for _, label in found] == pytest.approx([1.0, 0.0, 0.3, 0.9, 0.2, 1.0])
    assert sum(int(part["attention_mask"].sum()) for part in batch["parts"]) == 13


def test_parts_change_no_score(backbones: Any, tokenizers: Any) -> None:
    model = StepModel.from_backbone(backbones("llama", tokenizers()), tokenizer=tokenizers())
    scores = []
    for parts in (1, 3):
        batch = collate_rows(ROWS, parts=parts)
        with torch.no_grad():
            found = torch.cat([model(**{**part, "attention_mask": None}) for part in batch["parts"]])
        scores.append(dict(sorted(zip(batch["labels"].tolist(), found.tolist()))))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_padding_is_on_the_right_and_masked_whatever_its_id() -> None:
    ids, mask = pad_right([[3, 3], [4], []], 3)
    assert ids.tolist() == [[3, 3], [4, 3], [3, 3]]
    assert mask.tolist() == [[1, 1], [1, 0], [0, 0]]
