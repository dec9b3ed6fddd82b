"""Laws of people's judgements: only of exactly this text, in their places, and never guessed."""

import json
import logging
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.human_labels import HumanLabels, combined
from apportion.verifiers.panel import judge
from apportion.verifiers.segmenters import Lines

TEXT = "1 + 1 = 2\n2 + 2 = 5\n2 + 2 = 5\nAnswer: 5"
PRM800K = {-1: 0, 0: 1, 1: 1}


@pytest.fixture
def labels(tmp_path):
    def build(*rows, **options):
        path = tmp_path / "labels.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), "utf-8")
        return HumanLabels(str(path), **options)

    return build


def row(**fields):
    return {"prompt": "q", "completion": TEXT, **fields}


def ask(verifier, prompt="q", completion=TEXT, **metadata):
    (verdict,) = verifier([Sample(prompt, completion, metadata=metadata)])
    return verdict


def ranges(verdict):
    return [(span.start, span.stop, span.score) for span in verdict.spans]


def test_only_exactly_this_text_has_a_judgement(labels):
    verifier = labels(row(score=0.25))
    assert ask(verifier) == Verdict(0.25)
    assert ask(verifier, completion=TEXT + " ") == ask(verifier, prompt="q ") == Verdict(None)


def test_a_problem_can_be_named_by_id_and_a_completion_by_its_hash(labels):
    digest = sha256(TEXT.encode()).hexdigest()
    verifier = labels(
        {"id": 7, "completion_sha256": digest.upper(), "score": True}, {"id": 8, "completion": TEXT, "score": 0}
    )
    assert [ask(verifier, id=name).score for name in (7, "7", 8, 9, None)] == [1.0, 1.0, 0.0, None, None]
    assert ask(verifier).score is None


@pytest.mark.parametrize(
    ("rating", "score"), [(True, 1), (False, 0), (0, 0), (1, 1), (0.5, 0.5), (1.0, 1), (None, None)]
)
def test_ratings_between_0_and_1_mean_themselves(labels, rating, score):
    assert ask(labels(row(score=rating))).score == score


def test_other_ratings_mean_what_the_option_says(labels):
    assert [ask(labels(row(score=r), ratings=PRM800K)).score for r in (-1, 0, 1, -1.0)] == [0.0, 1.0, 1.0, 0.0]
    assert [
        ask(labels(row(score=r), ratings={"good": 1, "bad": 0, "?": None})).score for r in ("good", "bad", "?")
    ] == [
        1.0,
        0.0,
        None,
    ]
    assert ask(labels(row(score=True), ratings={"true": 0, 1: 1})).score == 0.0
    with pytest.raises(InputError, match=r"row 1 .*: the rating '2' is not among ratings, -1, 0, 1"):
        labels(row(score=2), ratings=PRM800K)


@pytest.mark.parametrize("rating", [-1, 2, 1.5, "1", "good", [1], {"a": 1}])
def test_ratings_that_mean_nothing_are_refused(labels, rating):
    with pytest.raises(InputError, match=r"row 1 .*the rating .* say what it means in ratings"):
        labels(row(score=rating))


def test_step_judgements_become_spans_by_range_text_or_index(labels):
    by_range = [{"start": 0, "stop": 9, "score": 1}, {"start": 10, "stop": 19, "text": "2 + 2 = 5", "label": 0}]
    by_text = [
        {"text": "1 + 1 = 2", "score": 1},
        {"text": "2 + 2 = 5", "score": 0},
        {"text": "2 + 2 = 5", "score": 0.5},
    ]
    by_index = [{"index": 3, "score": 0}, {"index": 0, "score": 1}]
    assert ranges(ask(labels(row(steps=by_range)))) == [(0, 9, 1.0), (10, 19, 0.0)]
    assert ranges(ask(labels(row(steps=by_text)))) == [(0, 9, 1.0), (10, 19, 0.0), (20, 29, 0.5)]
    assert ranges(ask(labels(row(steps=by_index), segmenter=Lines()))) == [(0, 9, 1.0), (30, 39, 0.0)]
    assert ask(labels(row(steps=by_range))).score is None
    assert ask(labels(row(steps=by_range, score=0))).score == 0.0


def test_a_step_that_nobody_rated_has_no_span_but_keeps_its_place(labels):
    steps = [{"text": "2 + 2 = 5", "score": None}, {"text": "2 + 2 = 5", "score": 0}]
    assert ask(labels(row(steps=steps))).spans == (Span(20, 29, 0.0, "rated 0 by 1"),)


def test_steps_behind_the_first_wrong_one_are_dropped_on_request(labels):
    steps = [{"index": place, "label": rating} for place, rating in enumerate([1, 0, -1, 1])]
    options = {"segmenter": Lines(), "ratings": PRM800K}
    assert [span.score for span in ask(labels(row(steps=steps), **options)).spans] == [1, 1, 0, 1]
    assert [span.score for span in ask(labels(row(steps=steps), until_first_error=True, **options)).spans] == [1, 1, 0]
    strict = {**options, "ratings": {-1: 0, 0: 0, 1: 1}, "until_first_error": True}
    assert [span.score for span in ask(labels(row(steps=steps), **strict)).spans] == [1, 0]


def test_several_people_are_combined_and_their_disagreement_counted(labels, caplog):
    rows = [
        row(score=score, steps=[{"start": 0, "stop": 9, "score": step}]) for score, step in ((1, 1), (1, 1), (0, 0))
    ]
    with caplog.at_level(logging.WARNING):
        mean = labels(*rows, row(prompt="other", score=1))
    assert mean.conflicts == (1, 1)
    assert "people disagree on the score of 1 completions and on 1 steps; combine=mean" in caplog.text
    assert ask(mean) == Verdict(2 / 3, (Span(0, 9, 2 / 3, "rated 0.666667 by 3"),))
    assert ask(labels(*rows, combine="majority")) == Verdict(1.0, (Span(0, 9, 1.0, "rated 1 by 3"),))
    assert ask(labels(*rows[1:], combine="majority")) == Verdict(None)


def test_people_who_agree_are_no_conflict(labels, caplog):
    with caplog.at_level(logging.WARNING):
        assert labels(row(score=1), row(score=True), row(score=None), row(steps=[])).conflicts == (0, 0)
    assert caplog.text == ""


def test_a_majority_is_more_than_half():
    assert [combined(r, "majority") for r in ([0.6], [0.5], [1, 1, 0, 0.5], [0.9, 0.8, 0.1], [0.1, 0.5, 0.2])] == [
        1.0,
        None,
        None,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"row 2: '\{': Expecting property name"),
        ("3", r"row 2: '3' is no JSON object"),
        ("[" * 5000, "row 2: .*recursion"),
        ('{"completion": "c", "score": 1}', "row 2 .*: names no problem; give prompt or id"),
        ('{"prompt": "q", "score": 1}', "row 2 .*: names no completion"),
        ('{"prompt": "q", "completion": 3, "score": 1}', "row 2 .*: names no completion"),
        ('{"prompt": "q", "completion": "c", "completion_sha256": "00", "score": 1}', "row 2 .*: names no completion"),
        ('{"prompt": "q", "completion": "c"}', "row 2 .*: neither score nor steps"),
        ('{"prompt": "q", "completion": "c", "score": NaN}', "row 2 .*: the rating 'nan'"),
        ('{"prompt": "q", "completion": "c", "steps": 3}', "row 2 .*: steps is '3'"),
        ('{"prompt": "q", "completion": "c", "steps": [1]}', "row 2 .*: the step '1' has not one rating"),
        ('{"prompt": "q", "completion": "c", "steps": [{"text": "c"}]}', "row 2 .* has not one rating"),
        ('{"prompt": "q", "completion": "c", "steps": [{"text": "c", "score": 1, "label": 1}]}', "not one rating"),
        ('{"prompt": "q", "completion": "c", "steps": [{"score": 1}]}', "row 2 .* has no place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": 0, "score": 1}]}', "row 2 .* has no place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": 0, "stop": true, "score": 1}]}', "has no place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": 0, "stop": 1, "index": 0, "score": 1}]}', "no place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"text": "", "score": 1}]}', "row 2 .* has no place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"text": "d", "score": 1}]}', "step 'd' is not in its place"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": 0, "stop": 2, "score": 1}]}', r"\[0, 2\) is empty or"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": 1, "stop": 1, "score": 1}]}', r"\[1, 1\) is empty or"),
        ('{"prompt": "q", "completion": "c", "steps": [{"start": -1, "stop": 1, "score": 1}]}', r"\[-1, 1\) is empty"),
        (
            '{"prompt": "q", "completion": "cd", "steps": [{"start": 0, "stop": 1, "text": "d", "score": 1}]}',
            "'d' is not",
        ),
        ('{"prompt": "q", "completion": "c", "steps": [{"index": 1, "score": 1}]}', "no step 1; the completion has 1"),
        (
            '{"prompt": "q", "completion": "c", "steps": [{"index": -1, "score": 1}]}',
            "no step -1; the completion has 1",
        ),
    ],
)
def test_a_bad_row_stops_before_the_run_with_file_row_and_text(labels, line, message):
    with pytest.raises(InputError, match=message) as caught:
        labels(row(score=1), line, segmenter=Lines())
    assert "labels.jsonl, row 2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_steps_by_index_need_a_segmenter(labels):
    with pytest.raises(InputError, match="say what cuts them"):
        labels(row(steps=[{"index": 0, "score": 1}]))


def test_a_range_counted_in_other_units_is_found_by_its_text(labels):
    steps = [{"start": 3, "stop": 4, "text": ".", "score": 1}]
    with pytest.raises(InputError, match="is not in its place"):
        labels({"prompt": "q", "completion": "📷 .@M", "steps": steps})
    verifier = labels({"prompt": "q", "completion": "📷 .@M", "steps": [{**steps[0], "start": 2, "stop": 3}]})
    assert ranges(ask(verifier, completion="📷 .@M")) == [(2, 3, 1.0)]


def test_a_bad_step_of_a_completion_known_by_hash_is_a_fault_of_that_sample(labels):
    steps = [{"start": 0, "stop": 99, "score": 1}]
    verifier = labels({"id": 1, "completion_sha256": sha256(TEXT.encode()).hexdigest(), "steps": steps}, row(score=1))
    samples = [Sample("p", TEXT, metadata={"id": 1}), Sample("q", TEXT)]
    result = judge({"people": verifier}, samples)
    assert [verdicts["people"].score for verdicts in result.verdicts] == [None, 1.0]
    assert "row 1" in result.first_error["people"]


def test_a_file_without_rows_or_no_file_is_refused(labels, tmp_path):
    with pytest.raises(InputError, match="has no rows"):
        labels("", "  ")
    with pytest.raises(InputError, match=r"path=nowhere\.jsonl: No such file"):
        HumanLabels("nowhere.jsonl")
    with pytest.raises(InputError, match="combine: 'vote' is unknown"):
        labels(row(score=1), combine="vote")
    with pytest.raises(InputError, match="ratings: 'x' stands for 2"):
        labels(row(score=1), ratings={"x": 2})
    (tmp_path / "latin.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "q", "completion": "c", "score": 1}\n"\xe9"')
    with pytest.raises(InputError, match=r"row 2: .*utf-8"):
        HumanLabels(str(tmp_path / "latin.jsonl"))


def test_line_separators_within_a_text_end_no_row(labels):
    text = "a\u2028b\x85c"
    line = json.dumps({"prompt": "q", "completion": text, "score": 1}, ensure_ascii=False)
    assert ask(labels(line), completion=text).score == 1.0


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=()), min_size=1), st.data())
def test_any_text_is_found_again_with_its_spans(tmp_path_factory, text, data):
    edges = sorted(data.draw(st.sets(st.integers(0, len(text)), min_size=2)))
    steps = [{"start": a, "stop": b, "text": text[a:b], "score": 1} for a, b in pairwise(edges)]
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    path.write_text(json.dumps({"prompt": text, "completion": text, "steps": steps, "score": 0}))
    verdict = ask(HumanLabels(str(path)), text, text)
    assert (verdict.score, ranges(verdict)) == (0.0, [(s["start"], s["stop"], 1.0) for s in steps])
