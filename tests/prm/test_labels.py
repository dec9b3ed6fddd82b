"""Labels from spans, what two sources agree on, and rows that come back as they were written."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.data import load_steps
from apportion.prm.formats import stepwise
from apportion.prm.labels import (
    Consensus,
    Labeled,
    Solution,
    SpanLabels,
    StepLabels,
    first_error_agrees,
    label_row,
    labels_from_spans,
    side,
    steps_from_spans,
)
from apportion.prm.rows import BadRow
from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.chain import ChainSteps
from apportion.verifiers.segmenters import Lines

TEXT = "a = 1\nb = 2\n\nso c"
STEPS = ((0, 5), (6, 11), (13, 17))


def solution(text=TEXT, steps=STEPS, problem="p1", prompt="What is c?"):
    return Solution(problem, Sample(prompt, text, "3"), tuple(steps))


def ask(verifier, samples):
    return verifier(samples)


def no_policy(prefixes, k):
    raise AssertionError("nothing was to be continued")


class Fixed:
    """Says what it was told to say, one row of labels a solution."""

    continues = False

    def __init__(self, source, rows, counts=()):
        self.source, self.rows, self.counts = source, rows, Counter(counts)

    def __call__(self, solutions, ask, complete):
        return Labeled([StepLabels(tuple(row), {"by": self.source}) for row in self.rows], self.counts)


# ---- spans


def test_a_step_has_the_score_of_the_span_upon_it_and_none_where_the_verifier_is_silent():
    spans = [Span(13, 17, 1.0), Span(0, 5, 0.0)]
    assert labels_from_spans(TEXT, STEPS, spans) == (0.0, None, 1.0)


def test_a_step_is_as_right_as_the_worst_span_that_touches_it():
    assert labels_from_spans(TEXT, STEPS, [Span(0, 2, 1.0), Span(4, 8, 0.25), Span(7, 11, 1.0)]) == (0.25, 0.25, None)


def test_a_span_that_ends_where_a_step_begins_does_not_touch_it():
    assert labels_from_spans("ab", [(0, 1), (1, 2)], [Span(0, 1, 0.0)]) == (0.0, None)


def test_places_where_something_is_missing_judge_no_step_and_are_none():
    spans = [Span(3, 3, 0.0, "missing"), Span(11, 13, 0.0, "empty line"), Span(0, 5, 1.0), Span(17, 17, 0.0)]
    assert labels_from_spans(TEXT, STEPS, spans) == (1.0, None, None)
    assert steps_from_spans(TEXT, spans) == ((0, 5),)


def test_a_score_that_is_no_probability_is_refused():
    with pytest.raises(InputError, match=r"a span has the score -1\.0; labels need scores of 0 to 1"):
        labels_from_spans(TEXT, STEPS, [Span(0, 5, -1.0)])


def test_spans_that_overlap_are_no_steps():
    assert steps_from_spans("abcd", [Span(0, 2), Span(1, 4)]) is None
    assert steps_from_spans("abcd", [Span(2, 4), Span(0, 2)]) == ((0, 2), (2, 4))
    assert steps_from_spans("abcd", []) == ()


def test_the_exact_verifier_of_the_chain_labels_its_own_steps():
    text = "[T]7+9=5\n5-a=7\n7*1=7\n[/T][A]7[/A]"
    sample = Sample("7+9-a*1=?", text, "6")
    (verdict,) = ChainSteps()([sample])
    steps = steps_from_spans(text, verdict.spans)
    told = SpanLabels(ChainSteps())([Solution("p", sample, steps)], ask, no_policy)
    assert [text[start:stop] for start, stop in steps] == ["7+9=5", "5-a=7", "7*1=7", "[/T][A]7[/A]"]
    assert told.solutions[0].labels == (1.0, 0.0, 1.0, 1.0)


def test_a_verifier_that_abstains_leaves_every_step_unlabelled():
    told = SpanLabels(lambda samples: [Verdict(None)] * len(samples))([solution()], ask, no_policy)
    assert told.solutions[0].labels == (None, None, None)


def test_labels_need_a_verifier():
    with pytest.raises(InputError, match=r"set verifier@verifiers\.steps=NAME"):
        SpanLabels(None)


@given(
    st.text(st.sampled_from("ab \n\ud800"), max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.0])), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_labels_are_the_minimum_over_overlapping_spans_as_a_slow_loop_finds_it(text, rough):
    steps = Lines()(text)
    spans = [Span(min(a, b, len(text)), min(max(a, b), len(text)), s) for a, b, s in rough]
    slow = tuple(
        min(
            (s.score for s in spans if text[s.start : s.stop].strip() and max(s.start, a) < min(s.stop, b)),
            default=None,
        )
        for a, b in steps
    )
    assert labels_from_spans(text, steps, spans) == slow


# ---- solutions


def test_a_prefix_ends_with_its_last_step_and_the_last_one_ends_the_answer():
    one = solution(TEXT + " \n")
    assert [one.prefix(count) for count in range(4)] == ["", "a = 1", "a = 1\nb = 2", TEXT]
    assert [one.ends_with(count) for count in range(4)] == [False, False, False, True]


def test_text_after_the_last_step_means_that_no_step_ends_the_answer():
    assert not solution("a = 1, so 3", [(0, 5)]).ends_with(1)


# ---- consensus


def agreed(first, second, keep="steps", counts=()):
    labeler = Consensus(Fixed("mc", first, counts), Fixed("judge", second, counts), keep)
    return labeler([None] * len(first), ask, no_policy)


def test_a_label_is_kept_where_both_are_on_the_same_side_and_is_the_first_ones():
    told = agreed([[0.75, 0.25, 0.75, None]], [[1.0, 0.0, 0.0, 1.0]])
    assert told.solutions[0].labels == (0.75, 0.25, None, None)
    assert told.counts["kept steps"] == 2


def test_every_pair_of_steps_is_in_the_table():
    counts = agreed([[0.75, 0.25, 0.75, None], [0.0]], [[1.0, 0.0, 0.0, 1.0], [1.0]]).counts
    pairs = {key.removeprefix("pair "): count for key, count in counts.items() if key.startswith("pair ")}
    assert pairs == {"right right": 1, "wrong wrong": 1, "right wrong": 1, "unlabelled right": 1, "wrong right": 1}


def test_whole_solutions_are_kept_where_the_first_error_is_the_same_with_labels_up_to_it():
    first = [[1.0, 0.2, 0.0], [1.0, 1.0], [0.0, 1.0], [None, None]]
    second = [[1.0, 0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    told = agreed(first, second, "solutions")
    assert [one.labels for one in told.solutions] == [(1.0, 0.2, None), (1.0, 1.0), (None, None), (None, None)]
    assert (told.counts["same first error"], told.counts["kept steps"]) == (2, 4)


def test_one_that_knows_nothing_agrees_with_nobody():
    assert not first_error_agrees([None], [None])
    assert not first_error_agrees([None], [1.0])
    assert first_error_agrees([None, 1.0], [1.0, 1.0])


def test_what_each_source_said_stays_beside_what_was_kept():
    told = agreed([[0.25]], [[1.0]])
    assert told.solutions[0].evidence == {
        "sources": [
            {"label_source": "mc", "labels": [0.25], "by": "mc"},
            {"label_source": "judge", "labels": [1.0], "by": "judge"},
        ]
    }


def test_the_counts_of_both_sources_are_summed():
    assert agreed([[1.0]], [[1.0]], counts={"continuations": 8}).counts["continuations"] == 16


def test_what_a_consensus_cannot_be_is_refused():
    exact = SpanLabels(ChainSteps())
    with pytest.raises(InputError, match="keep: 'all' is unknown; give steps or solutions"):
        Consensus(exact, exact, "all")
    with pytest.raises(InputError, match="no other consensus"):
        Consensus(exact, Consensus(exact, exact))
    assert Consensus(exact, exact).source == "consensus of exact and exact"
    assert not Consensus(exact, exact).continues


# ---- rows


def test_a_row_comes_back_with_the_very_text_places_and_labels():
    one = solution("  [T]a = 1\n\n b = 2 trailing\n", [(5, 10), (13, 18)])
    row = label_row(one, StepLabels((0.25, None), {"standard_errors": [0.1, None]}), label_source="mc", seed=3)
    (back,) = load_steps([json.loads(json.dumps(row))], format="stepwise")
    assert (back.completion, back.steps, back.labels) == (one.sample.completion, one.steps, (0.25, None))
    assert (back.prompt, back.problem_id) == ("What is c?", "p1")
    assert back.metadata == {"reference": "3", "label_source": "mc", "seed": 3, "standard_errors": [0.1, None]}
    assert row["completions"] == ["a = 1", "b = 2"]


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_any_text_and_any_labels_survive_the_file(text, data):
    steps = Lines()(text)
    labels = tuple(data.draw(st.lists(st.none() | st.floats(0, 1), min_size=len(steps), max_size=len(steps))))
    row = json.loads(json.dumps(label_row(solution(text, steps), StepLabels(labels))))
    (back,) = stepwise(row)
    assert (back.completion, back.steps, back.labels) == (text, tuple(steps), labels)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_spans": [[0, 5], [6, 11]]}, "count_mismatch"),
        ({"step_spans": [[0, 5], [6, 11], [12, 17]]}, "wrong_spans"),
        ({"step_spans": [[0, 5], [6, 11], [13]]}, "wrong_spans"),
        ({"step_spans": [[0, 5], [6, 11], [-4, 17]]}, "wrong_spans"),
        ({"step_spans": [[0, 5], [6, 11], 7]}, "wrong_type"),
        ({"completion": "a = 1"}, "wrong_spans"),
        ({"labels": [1, 2, 1]}, "unknown_label"),
    ],
)
def test_a_row_whose_parts_do_not_fit_is_refused(changes, reason):
    row = label_row(solution(), StepLabels((1.0, 0.0, 1.0)))
    with pytest.raises(BadRow) as caught:
        stepwise({**row, **changes})
    assert caught.value.reason == reason


def test_sides():
    assert [side(label) for label in (1.0, 0.5, 0.49, 0.0, None)] == ["right", "right", "wrong", "wrong", "unlabelled"]
