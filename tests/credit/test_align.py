"""Laws of the way from spans of characters to tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import Rollout, collate
from apportion.credit.align import spans_table, spans_to_tokens, trim_span
from apportion.verifiers import Span, Verdict


def hit(offsets: Any, *span: int, text: str | None = None) -> list[int]:
    """Indices of the tokens in one span."""
    return spans_to_tokens(offsets, [span], text)[0].nonzero().flatten().tolist()  # type: ignore[list-item]


def test_a_leading_blank_belongs_to_its_token_and_trailing_blanks_of_a_span_to_none() -> None:
    offsets, text = [(0, 3), (3, 7)], "the cat"
    spans = [(4, 7), (0, 3), (0, 4), (3, 4)]
    assert [hit(offsets, *span) for span in spans] == [[1], [0], [0, 1], [1]]
    # The last one is a blank alone: it keeps its token, so that a penalty never vanishes.
    assert [hit(offsets, *span, text=text) for span in spans] == [[1], [0], [0], [1]]


def test_trimming_keeps_inner_blanks() -> None:
    assert trim_span("  a b \n", 0, 7) == (2, 5)
    assert trim_span(" \n ", 1, 3) == (1, 3)


def test_rows_of_the_mask_follow_the_given_order() -> None:
    assert spans_to_tokens([(0, 1), (1, 2)], [Span(1, 2), Span(0, 1)]).tolist() == [[False, True], [True, False]]
    assert spans_to_tokens([(0, 1), (1, 2)], []).shape == (0, 2)


def test_a_special_token_inside_a_span_is_part_of_it_and_one_at_its_end_is_not() -> None:
    offsets = [(0, 2), (2, 2), (2, 4), (4, 4)]
    assert hit(offsets, 0, 4) == [0, 1, 2]
    assert hit([(0, 2), (0, 0), (2, 4), (0, 0)], 0, 4) == [0, 1, 2]


def test_spans_are_sorted_and_those_without_tokens_are_counted() -> None:
    offsets = [[(0, 2), (2, 5), (5, 5)], [(0, 3)], []]
    spans = [[Span(2, 5, 0.5), Span(0, 2, 1.0), Span(7, 9, -1.0)], [], [Span(0, 1)]]
    table = spans_table(offsets, spans)
    assert table.start.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert table.stop.tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert table.score.tolist() == [[1.0, 0.5, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert table.mask.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert table.uncovered == 2


def test_an_empty_span_falls_on_the_token_that_stands_where_something_is_missing() -> None:
    offsets = [(0, 2), (2, 4), (4, 4)]  # the last one is an end token
    table = spans_table([offsets], [[Span(2, 2), Span(4, 4)]])
    assert table.start.tolist() == [[1, 2]]
    assert table.stop.tolist() == [[2, 3]]
    without_end = spans_table([offsets[:2]], [[Span(4, 4)]])
    assert (without_end.start.tolist(), without_end.uncovered) == ([[1]], 0)
    assert spans_table([[]], [[Span(0, 0)]]).uncovered == 1


def test_offsets_that_step_back_are_refused_with_their_row() -> None:
    with pytest.raises(ValueError, match="offsets of row 1"):
        spans_table([[(0, 1)], [(3, 5), (0, 2)]], [[Span(0, 1)], [Span(0, 1)]])


def test_negative_offsets_are_refused_with_their_row() -> None:
    with pytest.raises(ValueError, match="offsets of row 2"):
        spans_table([[(0, 1)], [], [(0, 1), (-1, -1)]], [[Span(0, 1)], [], [Span(0, 1)]])


def test_equal_spans_keep_the_order_in_which_they_were_given() -> None:
    table = spans_table([[(0, 1), (1, 2)]], [[Span(1, 2, 0.25), Span(0, 2, 3.0), Span(1, 2, 0.75), Span(0, 1, 2.0)]])
    assert table.score.tolist() == [[2.0, 3.0, 0.25, 0.75]]
    assert (table.start.tolist(), table.stop.tolist()) == ([[0, 0, 1, 1]], [[1, 2, 2, 2]])


def test_texts_are_needed_for_every_row_or_none() -> None:
    with pytest.raises(ValueError):
        spans_table([[(0, 1)]] * 2, [[Span(0, 1)]] * 2, ["a"])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_batch_agrees_with_a_slow_loop(data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4))
    offsets, spans = [], []
    for row in widths:
        borders = np.cumsum([0, *row]).tolist()
        offsets.append(list(pairwise(borders)))
        ends = st.tuples(st.integers(0, borders[-1] + 2), st.integers(0, borders[-1] + 2)).map(sorted)
        spans.append([Span(a, b) for a, b in data.draw(st.lists(ends, max_size=4))])
    table = spans_table(offsets, spans)
    for row, row_spans in enumerate(spans):
        for column, span in enumerate(sorted(row_spans, key=lambda s: (s.start, s.stop))):
            overlap = [t for t, (a, b) in enumerate(offsets[row]) if a < b and a < span.stop and span.start < b]
            if span.stop == span.start and offsets[row]:
                later = [t for t, (a, _) in enumerate(offsets[row]) if a >= span.start]
                overlap = [later[0] if later else len(offsets[row]) - 1]
            assert bool(table.mask[row, column]) == bool(overlap)
            if overlap:
                assert [int(table.start[row, column]), int(table.stop[row, column])] == [overlap[0], overlap[-1] + 1]


def everything(rows: int, width: int) -> torch.Tensor:
    return torch.ones(rows, width, dtype=torch.bool)


def test_gap_tokens_belong_to_the_step_before_and_leading_ones_to_the_first() -> None:
    offsets = [[(0, 2), (2, 4), (4, 5), (5, 8), (8, 9), (9, 9)]]
    table = spans_table(offsets, [[Span(2, 4), Span(5, 8)]])
    assert table.step_ids(everything(1, 6)).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_a_token_of_two_steps_belongs_to_the_step_of_its_first_character() -> None:
    table = spans_table([[(0, 3), (3, 6), (6, 8)]], [[Span(0, 4), Span(4, 8)]])
    assert table.step_ids(everything(1, 3)).tolist() == [[0, 0, 1]]
    # The middle step lies inside a token of the first one and owns nothing.
    table = spans_table([[(0, 3), (3, 9), (9, 12)]], [[Span(0, 5), Span(5, 8), Span(8, 12)]])
    assert table.step_ids(everything(1, 3)).tolist() == [[0, 0, 2]]


def test_a_step_whose_leading_blank_is_trimmed_keeps_the_token_with_the_blank() -> None:
    table = spans_table([[(0, 2), (2, 5)]], [[Span(0, 2), Span(2, 5)]], ["ab cd"])
    assert table.step_ids(everything(1, 2)).tolist() == [[0, 1]]


def test_uncovered_steps_own_no_token() -> None:
    table = spans_table([[(0, 2), (2, 4)]], [[Span(0, 2), Span(2, 4), Span(8, 9)]])
    assert table.mask.tolist() == [[True, True, False]]
    assert table.step_ids(everything(1, 3)).tolist() == [[0, 1, 1]]


def test_rows_without_spans_and_tokens_outside_the_mask_have_no_step() -> None:
    table = spans_table([[(0, 2), (2, 4)], [(0, 1)]], [[Span(0, 4)], []])
    mask = torch.tensor([[True, False, False], [True, False, False]])
    assert table.step_ids(mask).tolist() == [[0, -1, -1], [-1, -1, -1]]
    assert spans_table([[(0, 1)]], [[]]).step_ids(everything(1, 2)).tolist() == [[-1, -1]]


def test_padding_moves_no_step_and_no_token() -> None:
    table = spans_table([[(0, 1), (1, 2), (2, 3)]], [[Span(1, 3)]])
    select = torch.tensor([[True]])
    assert table.token_mask(select, 3).tolist() == [[False, True, True]]
    assert table.token_mask(select, 5).tolist() == [[False, True, True, False, False]]
    assert table.step_ids(everything(1, 5))[:, :3].tolist() == table.step_ids(everything(1, 3)).tolist()


def test_a_selection_is_the_union_of_its_spans() -> None:
    offsets = [[(k, k + 1) for k in range(6)]] * 2
    table = spans_table(offsets, [[Span(0, 3), Span(2, 4), Span(5, 6)], [Span(1, 2)]])
    select = torch.tensor([[True, True, False], [False, True, True]])
    assert table.token_mask(select, 6).int().tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="select must have the shape"):
        table.token_mask(select[:, :2], 6)


def test_collated_rollouts_carry_trimmed_spans() -> None:
    rollout = Rollout(
        prompt_ids=[1],
        completion_ids=[5, 6, 2],
        logprobs=[0.0, 0.0, 0.0],
        offsets=[(0, 3), (3, 7), (7, 7)],
        text="the cat",
        group_id=0,
        verdicts={"words": Verdict(0.0, (Span(0, 4, 0.0),))},
    )
    table = collate([rollout]).spans["words"]
    assert table.token_mask(table.mask, 3).tolist() == [[True, False, False]]
