"""A state lies before the first token of each segment; what the segments gain sums to the outcome less the start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.credit import CreditBatch
from apportion.credit.align import SpanTable
from apportion.credit.batch import PrefixValues
from apportion.credit.states import (
    cutpoint_segments,
    cutpoint_states,
    prefix_lengths,
    prefix_values,
    segment_ids,
    shrink,
    state_gains,
)
from apportion.verifiers import InputError

NAN = float("nan")


def all_true(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def batch_of(old_logprobs: torch.Tensor | None, spans: dict[str, SpanTable] | None = None) -> CreditBatch:
    rows, width = (1, 6) if old_logprobs is None else old_logprobs.shape
    return CreditBatch(
        all_true(rows, width),
        torch.zeros(rows, dtype=torch.long),
        torch.zeros(rows),
        spans=spans or {},
        old_logprobs=old_logprobs,
    )


def test_a_segment_begins_at_the_first_cutpoint_and_at_every_fifth_after_it() -> None:
    old = torch.tensor([[0.95, *[0.5] * 12]]).log()
    assert cutpoint_segments(old, all_true(1, 13), 0.9, 5).tolist() == [[0, *[1] * 5, *[2] * 5, 3, 3]]


def test_the_first_segment_is_empty_where_the_first_token_is_a_cutpoint() -> None:
    segments = cutpoint_segments(torch.tensor([[0.5, 0.99, 0.5]]).log(), all_true(1, 3), 0.9, 1)
    assert segments.tolist() == [[1, 1, 2]]
    assert prefix_lengths(segments).tolist() == [[0, 0, 2, -1]]  # state 1 is the prompt as well


def test_tokens_of_a_tool_are_no_cutpoints() -> None:
    mask = torch.tensor([[True, False, True, True]])
    assert cutpoint_segments(torch.full((1, 4), -2.0), mask, 0.9, 2).tolist() == [[1, -1, 1, 2]]


def test_a_row_that_is_sure_of_itself_is_one_segment() -> None:
    segments = cutpoint_segments(torch.full((1, 4), -0.01), all_true(1, 4), 0.9, 5)
    assert segments.tolist() == [[0, 0, 0, 0]]
    assert prefix_lengths(segments).tolist() == [[0, -1]]


def test_a_name_carries_the_cutpoints_exactly() -> None:
    old = torch.full((1, 6), 0.123456785, dtype=torch.float64).log()
    for probability, segments in ((0.12345678, [0] * 6), (0.12345679, [1, 1, 1, 2, 2, 2])):
        name = cutpoint_states(probability, 3)
        assert segment_ids(name, batch_of(old)).tolist() == [segments]


def test_a_verifiers_name_gives_its_steps() -> None:
    table = SpanTable(
        torch.tensor([[0, 0, 3]]), torch.tensor([[2, 0, 5]]), torch.zeros(1, 3), torch.tensor([[True, False, True]])
    )
    batch = batch_of(None, {"steps": table})
    segments = segment_ids("steps", batch)
    assert segments.tolist() == [[0, 0, 0, 2, 2, 2]]
    assert prefix_lengths(segments).tolist() == [[0, -1, 3, -1]]


def test_rows_without_trained_tokens_have_no_state() -> None:
    assert prefix_lengths(torch.tensor([[-1, -1], [0, 1]])).tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert prefix_lengths(torch.zeros(2, 0, dtype=torch.long)).tolist() == [[-1], [-1]]


def test_missing_evidence_is_named() -> None:
    with pytest.raises(InputError, match="needs old_logprobs"):
        segment_ids(cutpoint_states(0.9, 5), batch_of(None))
    with pytest.raises(InputError, match=r"needs prefix_values of steps, and the batch has those of: none"):
        prefix_values("steps", batch_of(None))


def test_values_of_few_samples_are_drawn_to_the_prompts() -> None:
    values = PrefixValues(torch.tensor([[0.5, 1.0, NAN]]), torch.tensor([[9, 1, 0]]), torch.zeros(1, 3))
    torch.testing.assert_close(shrink(values, 3.0), torch.tensor([[0.5, 0.625, NAN]]).double(), equal_nan=True)
    torch.testing.assert_close(shrink(values, 0.0), values.value.double(), equal_nan=True)
    unknown = PrefixValues(torch.tensor([[NAN, 1.0]]), torch.tensor([[0, 1]]), torch.zeros(1, 2))
    torch.testing.assert_close(shrink(unknown, 3.0), unknown.value.double(), equal_nan=True)


def test_the_golden_gains() -> None:
    values, segments = torch.tensor([[0.5, 0.75, 0.25, NAN]]), torch.tensor([[0, 1, 2]])
    assert state_gains(values, segments, torch.tensor([0.0])).tolist() == [[0.25, -0.5, -0.25]]


def test_segments_without_a_known_state_between_them_share_one_gain() -> None:
    values, segments = torch.tensor([[0.5, NAN, 0.25, NAN]]), torch.tensor([[0, 1, 2]])
    assert state_gains(values, segments, torch.tensor([1.0])).tolist() == [[-0.25, -0.25, 0.75]]


def test_a_segment_without_tokens_gains_nothing_and_loses_nothing() -> None:
    values, segments = torch.tensor([[0.5, 0.75, 0.25, NAN]]), torch.tensor([[0, 2, -1]])
    assert state_gains(values, segments, torch.tensor([1.0])).tolist() == [[-0.25, 0.75, 0.0]]


def test_what_precedes_the_first_known_state_gains_nothing() -> None:
    values, segments = torch.tensor([[NAN, 0.75, NAN]]), torch.tensor([[0, 1]])
    assert state_gains(values, segments, torch.tensor([0.0])).tolist() == [[0.0, -0.75]]


def test_a_row_without_a_reward_gains_nothing() -> None:
    values, segments = torch.tensor([[0.5, 0.75, NAN]]), torch.tensor([[0, 1]])
    assert state_gains(values, segments, torch.tensor([NAN])).eq(0).all()


def test_too_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="values of 1 states for 2 segments"):
        state_gains(torch.zeros(1, 1), torch.tensor([[0, 1]]), torch.zeros(1))


@given(
    segments=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN]), min_size=20, max_size=20),
    outcome=st.sampled_from([0.0, 1.0]),
)
def test_gains_sum_to_the_outcome_less_the_first_known_value(
    segments: list[int], values: list[float], outcome: float
) -> None:
    ids, total = [], 0
    for step in segments:  # 0 stays in the segment, 2 leaves one empty
        total += step
        ids.append(total)
    known = torch.tensor([values[: ids[-1] + 2]])
    gains = state_gains(known, torch.tensor([ids]), torch.tensor([outcome]))[0].tolist()
    starts = [max((c for c in range(i + 1) if not known[0, c].isnan()), default=-1) for i in ids]
    distinct = dict(zip(starts, gains))
    assert distinct.pop(-1, 0.0) == 0.0
    if distinct:
        assert sum(distinct.values()) == pytest.approx(outcome - float(known[0, min(distinct)]))
