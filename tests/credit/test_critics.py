"""Critics that vote on the same answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch
from apportion.credit.align import SpanTable, spans_table
from apportion.credit.critics import CriticVotes, merge_votes
from apportion.credit.localized import FirstError, WrongSteps
from apportion.verifiers import InputError, Span

Batch = Callable[..., CreditBatch]
CRITICS = ("critic_1", "critic_2", "critic_3")
Judged = Sequence[tuple[int, int, float]]


def table(spans: Judged, tokens: int = 6) -> SpanTable:
    return spans_table([[(i, i + 1) for i in range(tokens)]], [[Span(*span) for span in spans]])


def merged(tables: Sequence[SpanTable], merge: Any, present: Sequence[bool] | None = None) -> list[tuple[int, ...]]:
    took_part = torch.ones(len(tables), 1, dtype=torch.bool) if present is None else torch.tensor(present)[:, None]
    out = merge_votes(tables, took_part, merge=merge, threshold=0.5, num_tokens=6)
    assert out.mask.all()
    return list(zip(out.start[0].tolist(), out.stop[0].tolist(), out.score[0].tolist()))


def two_steps(first: float, second: float) -> SpanTable:
    return table([(0, 3, first), (3, 6, second)])


@pytest.mark.parametrize(
    ("merge", "first", "second"), [("majority", 0, 1), ("intersection", 1, 1), ("average", 1 / 3, 2 / 3)]
)
def test_three_critics_of_two_steps(merge: str, first: float, second: float) -> None:
    tables = [two_steps(0.0, 1.0), two_steps(0.0, 0.0), two_steps(1.0, 1.0)]
    assert merged(tables, merge) == [(0, 3, pytest.approx(first)), (3, 6, pytest.approx(second))]


def test_half_is_no_majority_and_all_is_an_intersection() -> None:
    tables = [two_steps(0.0, 0.0), two_steps(1.0, 0.0)]
    assert merged(tables, "majority") == [(0, 3, 1), (3, 6, 0)]
    assert merged(tables, "intersection") == [(0, 3, 1), (3, 6, 0)]


def test_a_critic_that_lists_wrong_steps_alone_votes_against_the_others() -> None:
    tables = [table([(3, 6, 0.0)]), table([]), two_steps(1.0, 0.0)]
    assert merged(tables, "majority") == [(0, 3, 1), (3, 6, 0)]


def test_a_critic_that_abstained_has_no_vote() -> None:
    tables = [two_steps(0.0, 1.0), two_steps(1.0, 1.0), table([])]
    assert merged(tables, "majority")[0] == (0, 3, 1)
    assert merged([tables[0], tables[2]], "majority", [True, False]) == [(0, 3, 0), (3, 6, 1)]
    assert merged([tables[0], tables[2]], "intersection", [True, True])[0] == (0, 3, 1)


def test_spans_that_differ_are_voted_on_piece_by_piece() -> None:
    tables = [table([(0, 4, 0.0)]), table([(2, 6, 0.0)]), table([(0, 6, 1.0)])]
    assert merged(tables, "majority") == [(0, 2, 1), (2, 4, 0), (4, 6, 1)]


places = st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0.0, 0.25, 1.0]))
judged = st.lists(places.map(lambda p: (min(p[:2]), max(p[:2]), p[2])), max_size=4)


@settings(deadline=None, max_examples=60)
@given(critics=st.lists(judged, min_size=1, max_size=4), merge=st.sampled_from(["majority", "intersection", "average"]))
def test_each_token_gets_the_vote_of_the_critics_that_call_it_wrong(critics: list[Judged], merge: Any) -> None:
    tables = [table(spans) for spans in critics]
    out = merged(tables, merge)
    assert out == sorted(out)
    assert all(a[1] <= b[0] for a, b in pairwise(out))
    wrong = torch.stack([t.token_mask(t.score < 0.5, 6)[0] for t in tables]).sum(dim=0)
    seen = torch.stack([t.token_mask(t.mask, 6)[0] for t in tables]).any(dim=0)
    for token in range(6):
        scores = [score for start, stop, score in out if start <= token < stop]
        share = int(wrong[token]) / len(tables)
        score = {"majority": float(share <= 0.5), "intersection": float(share < 1), "average": 1 - share}[merge]
        assert scores == ([pytest.approx(score)] if seen[token] else [])


@settings(deadline=None, max_examples=30)
@given(spans=judged)
def test_one_critic_is_that_critic(spans: Judged) -> None:
    alone = table(spans)
    out = merge_votes([alone], torch.ones(1, 1).bool(), merge="majority", threshold=0.5, num_tokens=6)
    assert torch.equal(out.token_mask(out.score < 0.5, 6), alone.token_mask(alone.score < 0.5, 6))
    assert torch.equal(out.token_mask(out.mask, 6), alone.token_mask(alone.mask, 6))


# --- as a strategy ---------------------------------------------------------------------------------------------------


def criticised(batch: Batch, *opinions: Sequence[Judged]) -> CreditBatch:
    """Two answers of four tokens, right and wrong; ``opinions[c]`` are critic c's spans of each."""
    made = batch({"tokens": 4, "reward": 1.0}, {"tokens": 4, "reward": 0.0})
    offsets = [[(i, i + 1) for i in range(4)]] * 2
    spans = {
        name: spans_table(offsets, [[Span(*span) for span in row] for row in rows])
        for name, rows in zip(CRITICS, opinions)
    }
    return replace(made, spans=spans, scores={name: torch.ones(2).double() for name in CRITICS})


def test_capo_on_the_majority_of_three(batch: Batch) -> None:
    wrong, right = [(2, 4, 0.0)], [(2, 4, 1.0)]
    made = criticised(batch, [right, wrong], [wrong, wrong], [right, right])
    credit = CriticVotes()(made)
    agreed = replace(made, spans={"steps": criticised(batch, [right, wrong]).spans["critic_1"]})
    assert torch.equal(credit.advantages, WrongSteps()(agreed).advantages)
    assert credit.metrics["critic_agreement"] == 0
    assert CriticVotes(critics=("critic_2",))(made).metrics["critic_agreement"] == 1


def test_the_average_takes_its_part_of_the_penalty_for_each_vote(batch: Batch) -> None:
    wrong = [(2, 4, 0.0)]
    made = criticised(batch, [[], wrong], [wrong, wrong], [[], []])
    inner = WrongSteps(graded=True, threshold=1.0, normalize="outcome")
    penalty = CriticVotes(inner, merge="average")(made).parts["penalty"]
    torch.testing.assert_close(penalty, torch.tensor([[0, 0, -1 / 3, -1 / 3], [0, 0, -2 / 3, -2 / 3]]))


def test_any_localised_rule_can_stand_inside(batch: Batch) -> None:
    made = criticised(batch, [[], [(1, 2, 0.0)]], [[], [(1, 2, 0.0), (3, 4, 0.0)]], [[], [(3, 4, 1.0)]])
    out = CriticVotes(FirstError(center=False))(made).advantages
    assert out.tolist() == [[1] * 4, [0, -1, -1, -1]]


def test_a_critic_without_score_or_span_in_a_row_abstained_there(batch: Batch) -> None:
    made = criticised(batch, [[], [(2, 4, 0.0)]], [[], []], [[], []])
    assert CriticVotes()(made).parts["penalty"][1].unique().numel() == 1  # one of three
    absent = torch.tensor([1.0, float("nan")]).double()
    silent = replace(made, scores={**made.scores, "critic_2": absent, "critic_3": absent})
    assert CriticVotes()(silent).parts["penalty"][1].unique().numel() == 2


def test_what_the_votes_need_and_claim() -> None:
    rule = CriticVotes(critics=("a", "b"))
    assert rule.requires == {"reward", "spans:a", "spans:b"}
    assert rule.extra_information == "which steps are wrong, in every answer; from 2 critics"
    assert rule.conserves == "zero_mean"
    with pytest.raises(InputError, match="critics must be the names of different verifiers"):
        CriticVotes(critics=("a", "a"))
    with pytest.raises(InputError, match="steps=lines: WrongSteps reads no spans of that name"):
        CriticVotes(steps="lines")
