"""The form of a completion: what passes, and where the penalty lands if it does not."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit.align import spans_to_tokens
from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import judge
from apportion.verifiers.tags import Tags

law = settings(derandomize=True, deadline=None, max_examples=150)
GOOD = "<think>a</think><answer>b</answer>"
soup = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "<Think>",
            "< answer >",
            "<think",
            "a",
            " ",
            "\n",
            "\u200b",
            ">",
        ]
    ),
    max_size=12,
).map("".join)
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)


def verdict(text, prompt="q", truncated=False, **options):
    (it,) = Tags(**options)([Sample(prompt, text, metadata={"truncated": truncated})])
    return it


def score(text, **options):
    return verdict(text, **options).score


def faults(text, **options):
    spans = [span for span in verdict(text, **options).spans if span.score < 1]
    return [(text[span.start : span.stop], span.label) for span in spans]


@pytest.mark.parametrize(
    ("text", "soft", "strict"),
    [
        (GOOD, 1, 0),
        ("<think>a</think>\n<answer>b</answer>", 1, 0),
        ("<think>a</think>\n\n  <answer>b</answer>\n", 1, 0),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1, 1),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n", 1, 1),
        ("<think>\r\na\r\n</think>\r\n\r\n<answer>\r\nb\r\n</answer>\r\n", 1, 1),
        ("<think>\na\n</think>\n <answer>\nb\n</answer>", 1, 0),
        ("<think>\na\n</think> \n<answer>\nb\n</answer>", 1, 0),
        ("<think>\na</think>\n<answer>\nb\n</answer>", 1, 0),
    ],
)
def test_white_space_matters_in_strict_mode_only(text, soft, strict):
    assert (score(text), score(text, mode="strict")) == (soft, strict)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # duplicates, nesting
        (
            "<think>a</think><think>b</think><answer>c</answer>",
            [
                ("<think>", "duplicate <think>"),
                ("b", "text outside the blocks"),
                ("</think>", "duplicate </think>"),
            ],
        ),
        (
            "<think>a</think><answer>b</answer><answer>c</answer>",
            [
                ("<answer>", "duplicate <answer>"),
                ("c", "text outside the blocks"),
                ("</answer>", "duplicate </answer>"),
            ],
        ),
        (
            "<think><think>a</think></think><answer>b</answer>",
            [("<think>", "duplicate <think>"), ("</think>", "duplicate </think>")],
        ),
        ("<think>a</think><answer>b</think></answer>", [("</think>", "duplicate </think>")]),
        ("<think>see <think>? a</think><answer>b</answer>", [("<think>", "duplicate <think>")]),
        # text outside
        ("<think>a</think><answer>b</answer>\nEXTRA TEXT\n", [("EXTRA TEXT", "text outside the blocks")]),
        ("<think>a</think><answer>b</answer> EXTRA", [("EXTRA", "text outside the blocks")]),
        ("<think>a</think> so <answer>b</answer>", [("so", "text outside the blocks")]),
        ("text <think>a</think><answer>b</answer>", [("text", "text outside the blocks")]),
        ("<think>a</think><answer>b</answer></p>", [("</p>", "text outside the blocks")]),
        # order
        (
            "<answer>4</answer><think>2+2</think>",
            [
                ("<answer>", "misplaced <answer>"),
                ("4", "text outside the blocks"),
                ("</answer>", "misplaced </answer>"),
            ],
        ),
        ("<think>a<answer>b</think></answer>", [("<answer>", "misplaced <answer>")]),
        # empty blocks
        (
            "<think></think>a",
            [
                ("<think></think>", "empty <think>"),
                ("a", "text outside the blocks"),
                ("", "missing <answer>, </answer>"),
            ],
        ),
        ("<think> \n </think><answer>1</answer>", [("<think> \n </think>", "empty <think>")]),
        (
            "<think></think><answer></answer>",
            [("<think></think>", "empty <think>"), ("<answer></answer>", "empty <answer>")],
        ),
        ("<think>\u200b\u2060\xa0</think><answer>1</answer>", [("<think>\u200b\u2060\xa0</think>", "empty <think>")]),
        # missing tags: what stands in their place, at the end an empty span
        (
            "The reversed text is cba.",
            [
                ("The reversed text is cba.", "text outside the blocks"),
                ("", "missing <think>, </think>, <answer>, </answer>"),
            ],
        ),
        ("", [("", "missing <think>, </think>, <answer>, </answer>")]),
        ("<think>a", [("", "<think> not closed")]),
        ("<think>a</think>", [("", "missing <answer>, </answer>")]),
        ("<answer>4</answer>", [("<answer>", "missing <think>, </think>")]),
        ("<think>a<answer>b</answer>", [("<answer>", "missing </think>")]),
        ("so it is</think><answer>b</answer>", [("so", "missing <think>")]),
        ("<think>a</think>four 4</answer>", [("four", "missing <answer>")]),
        # written otherwise
        (
            "<Think>a</think><answer id='1'>b</ANSWER>",
            [
                ("<Think>", "misspelt <think>"),
                ("<answer id='1'>", "misspelt <answer>"),
                ("</ANSWER>", "misspelt </answer>"),
            ],
        ),
        (
            "< think >a</think ><answer>b</answer>",
            [("< think >", "misspelt <think>"), ("</think >", "misspelt </think>")],
        ),
        (
            "<think/>a<\\think><answer>b</answer>",
            [("<think/>", "misspelt <think>"), ("<\\think>", "misspelt </think>")],
        ),
        ("<think>a</think><answer>b</answer><Answer>", [("<Answer>", "duplicate <answer>")]),
        (
            "<thinking>a</thinking>",
            [
                ("<thinking>a</thinking>", "text outside the blocks"),
                ("", "missing <think>, </think>, <answer>, </answer>"),
            ],
        ),
    ],
)
def test_the_fault_is_located(text, found):
    assert score(text) == 0.0
    assert faults(text) == found


def test_what_only_resembles_a_tag_is_text():
    assert score("<think>if x <answer and y> 2, use <thinker> or think></think><answer>b</answer>") == 1.0


def test_all_tags_are_praised_where_all_is_well_and_the_others_where_it_is_not():
    assert [GOOD[s.start : s.stop] for s in verdict(GOOD).spans] == ["<think>", "</think>", "<answer>", "</answer>"]
    assert {(s.score, s.label) for s in verdict(GOOD).spans} == {(1.0, "tag")}
    assert [(s.start, s.score) for s in verdict(GOOD + "x").spans] == [(0, 1), (8, 1), (16, 1), (25, 1), (34, 0)]


@pytest.mark.parametrize("prompt", ["q <think>", "Assistant: <think>\n"])
def test_a_block_that_the_prompt_opened_is_not_opened_again(prompt):
    rest = GOOD.removeprefix("<think>")
    assert score(rest, prompt=prompt) == score(rest, opened="think") == 1.0
    assert score(rest) == score(rest, prompt=prompt, opened=None) == 0.0
    assert faults(GOOD, prompt=prompt) == [("<think>", "duplicate <think>")]
    assert faults("</think><answer>b</answer>", prompt=prompt) == [("</think>", "empty <think>")]
    assert score("\na\n</think>\n<answer>\nb\n</answer>", prompt=prompt, mode="strict") == 1.0
    assert score("b</answer>", opened="answer") == 1.0
    assert score("b</answer>", prompt="between <think> and <answer>") == 0.0


def test_a_truncated_answer_was_cut_off():
    assert faults("<think>a</think><answer>b", truncated=True) == [("", "<answer> cut off")]
    assert faults("<think>a", truncated=True) == [("", "<think> cut off")]


def test_what_is_missing_at_the_end_falls_on_the_end_token():
    text = "<think>a"
    offsets = [(0, 7), (7, 8), (8, 8)]
    missing = [span for span in verdict(text).spans if span.score == 0]
    assert spans_to_tokens(offsets, missing).tolist() == [[False, False, True]]


def test_text_outside_and_empty_blocks_can_be_allowed():
    assert score("So: <think>a</think> hence <answer>b</answer>!", outside=True) == 1.0
    assert faults("So: <think>a</think> hence", outside=True) == [("", "missing <answer>, </answer>")]
    assert score("<think></think><answer>b</answer>", empty=True) == 1.0
    assert score("<think></think>x<answer>b</answer>", empty=True) == 0.0


def test_blocks_can_have_other_names_and_numbers():
    assert score("<plan>a</plan><code>b</code><r.1>c</r.1>", names=["plan", "code", "r.1"]) == 1.0
    assert score("<answer>b</answer>", names=["answer"]) == 1.0
    assert score(GOOD, names=["answer"], outside=True) == 1.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (GOOD, 1.0),
        ("", 0.0),
        ("no tags", 0.0),
        ("<think>a</think> so <answer>b</answer>", 6 / 7),
        ("<think>a</think>", 4 / 7),
        ("<think>a", 1 / 7),
        ("<think></think><answer></answer>", 5 / 7),
        ("<think>a</think><answer>b</answer></answer>", 6 / 7),
        ("<answer>4</answer><think>2+2</think>", 3 / 7),
    ],
)
def test_the_share_of_rules_kept(text, share):
    assert score(text, score="share") == pytest.approx(share)


def test_rules_that_do_not_apply_are_not_counted():
    opened = "a</think><answer></answer>"
    assert score(opened, opened="think", score="share") == pytest.approx(5 / 6)
    assert score(opened, opened="think", score="share", empty=True) == 1.0
    assert score("x" + GOOD, score="share", outside=True) == 1.0
    assert score("<think>" + opened, opened="think", score="share", empty=True, outside=True) == pytest.approx(3 / 4)


@law
@given(soup, st.sampled_from(["soft", "strict"]), st.sampled_from([None, "think", "answer"]), st.booleans())
def test_the_score_is_full_exactly_where_no_fault_is_located(text, mode, opened, allowed):
    options = {"mode": mode, "opened": opened, "outside": allowed, "empty": allowed}
    binary, share = verdict(text, **options), verdict(text, score="share", **options)
    located = any(span.score == 0 for span in binary.spans)
    assert binary.spans == share.spans
    assert (binary.score == 1) is (share.score == 1) is not located
    assert 0 <= share.score <= 1


@law
@given(soup)
def test_spans_are_in_order_and_do_not_overlap(text):
    spans = verdict(text).spans
    assert all(left.stop <= right.start for left, right in pairwise(spans))


@law
@given(any_text | soup)
def test_any_text_is_judged(text):
    panel = {"tags": Tags(), "strict": Tags(mode="strict", score="share")}
    assert judge(panel, [Sample(text, text)]).errors == {"tags": 0, "strict": 0}


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 20_000,
        "<think></think>" * 10_000,
        "</answer><think>" * 10_000,
        "<" * 100_000,
        "<" + " " * 100_000,
        "<think " * 20_000,
        "<think " + "=" * 100_000,
        "<think " + "= " * 50_000,
        "<think>" + "\u200b" * 100_000,
        "\ud800" * 100_000,
    ],
    ids=lambda text: ascii(text[:9]),
)
def test_hostile_text_takes_linear_time(text):
    assert score(text) == 0.0


def test_a_run_of_one_fault_is_one_span():
    assert [(s.start, s.stop, s.label) for s in verdict("<think>" * 1000).spans] == [
        (0, 7, "tag"),
        (7, 7000, "duplicate <think>"),
        (7000, 7000, "<think> not closed"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "think"}, "names must be a list"),
        ({"names": []}, "names must be a list"),
        ({"names": ["think", "Think"]}, "names: .* twice"),
        ({"names": ["a b"]}, "names: 'a b'"),
        ({"names": ["<think>"]}, "names: '<think>'"),
        ({"mode": "hard"}, "mode: 'hard'"),
        ({"score": "mean"}, "score: 'mean'"),
        ({"opened": "plan"}, "opened: 'plan'"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        Tags(**options)
