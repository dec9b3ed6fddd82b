"""What each row format means, and what of it is refused."""

import ast
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.formats import (
    labels_from_first_error,
    labels_from_ratings,
    math_shepherd,
    prm800k,
    processbench,
    rollouts,
    stepwise,
)
from apportion.prm.rows import BadRow, as_text, join_steps, problem_hash, shorten


def refused(reader, row, **options):
    with pytest.raises(BadRow) as caught:
        reader(row, **options)
    assert "\n" not in str(caught.value)
    return caught.value.reason, str(caught.value)


# ---- stepwise


def step_row(**changes):
    row = {"prompt": "1+1+1=?", "completions": ["1+1=2", "2+1=4", "So 4."], "labels": [True, False, False]}
    return {**row, **changes}


def test_old_data_loads_unchanged_with_further_columns_kept():
    (example,) = stepwise(step_row(source="mine"))
    assert example.completion == "1+1=2\n2+1=4\nSo 4."
    assert (example.steps, example.labels) == (((0, 5), (6, 11), (12, 17)), (1.0, 0.0, 0.0))
    assert (example.prompt, example.problem_id) == ("1+1+1=?", problem_hash("1+1+1=?"))
    assert example.metadata == {"source": "mine"}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, 0, 1], (1.0, 0.0, 1.0)),
        ([0.7, 0.5, 0.0], (0.7, 0.5, 0.0)),
        ([True, 0, 0.25], (1.0, 0.0, 0.25)),
        (np.array([1, 0, 1]), (1.0, 0.0, 1.0)),
        ([np.bool_(True), np.float32(0.5), np.int64(0)], (1.0, 0.5, 0.0)),
    ],
)
def test_labels_are_booleans_integers_or_probabilities_and_soft_ones_stay_soft(labels, expected):
    assert stepwise(step_row(labels=labels))[0].labels == expected


@pytest.mark.parametrize(
    "label", [2, -1, 1.01, -0.1, float("nan"), float("inf"), "1", "+", [1], {}, 10**400, -100], ids=str
)
def test_any_other_label_is_refused_with_its_step(label):
    reason, text = refused(stepwise, step_row(labels=[1, label, 0]))
    assert reason == "unknown_label"
    assert text.startswith("step 2 has the label ")


def test_a_null_label_is_a_fault_unless_it_is_said_to_mean_unlabelled():
    assert refused(stepwise, step_row(labels=[1, None, 0])) == ("null", "the label of step 2 is null")
    assert stepwise(step_row(labels=[1, None, 0]), null_label="unlabelled")[0].labels == (1.0, None, 0.0)
    with pytest.raises(ValueError, match="give error or unlabelled"):
        stepwise(step_row(), null_label="maybe")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"labels": [1, 1]}, ("count_mismatch", "3 steps but 2 labels")),
        ({"labels": []}, ("count_mismatch", "3 steps but 0 labels")),
        ({"completions": ["a", " \n\t", "c"]}, ("empty_step", "step 2 of 3 is empty")),
        ({"completions": ["a", "b", ""]}, ("empty_step", "step 3 of 3 is empty")),
        ({"completions": ["a", None, "c"]}, ("null", "step 2 is no text but None")),
        ({"completions": ["a", 7, "c"]}, ("wrong_type", "step 2 is no text but 7")),
        ({"completions": "a\nb\nc"}, ("wrong_type", "column 'completions' is no list but 'a b c'")),
        ({"completions": None}, ("null", "column 'completions' is null")),
        ({"labels": True}, ("wrong_type", "column 'labels' is no list but True")),
        ({"prompt": None}, ("null", "column 'prompt' is null")),
        ({"prompt": 5}, ("wrong_type", "prompt is no text but 5")),
        ({"prompt": []}, ("wrong_type", "prompt is no text but []")),
    ],
)
def test_a_fault_is_named(changes, expected):
    assert refused(stepwise, step_row(**changes)) == expected


def test_a_missing_column_is_named_with_those_there():
    row = {"prompt": "p", "steps": ["a"], "labels": [1]}
    assert refused(stepwise, row) == ("missing_column", "no column 'completions'; there are 'prompt, steps, labels'")


def test_messages_become_text_and_are_kept():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1+1=?"}]
    steps = [{"role": "assistant", "content": "1+1=2"}, [{"role": "assistant", "content": "2+1=4"}], "So 4."]
    (example,) = stepwise(step_row(prompt=messages, completions=steps))
    assert (example.prompt, example.metadata) == ("Be brief.\n\n1+1+1=?", {"messages": messages})
    assert example.step_texts == ["1+1=2", "2+1=4", "So 4."]
    one = [{"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "+1=?"}]}]
    assert stepwise(step_row(prompt=one))[0].problem_id == stepwise(step_row())[0].problem_id


@pytest.mark.parametrize("content", [None, 3, [{"type": "image"}], [3]])
def test_messages_without_text_are_refused(content):
    assert refused(stepwise, step_row(prompt=[{"role": "user", "content": content}]))[0] == "wrong_type"


def test_the_separator_parts_steps_whatever_the_texts_hold():
    row = {"prompt": "У Маши 2 яблоки.", "completions": ["2+1=3 ки", "ки"], "labels": [1, 0]}
    (example,) = stepwise(row, separator=" ки ")
    assert example.completion == "2+1=3 ки ки ки"
    assert example.step_texts == ["2+1=3 ки", "ки"]


def test_a_step_lies_where_its_content_does_and_the_text_keeps_its_blanks():
    (example,) = stepwise(step_row(completions=[" scatters,", "so blue.\n", "x"]))
    assert example.completion == " scatters,\nso blue.\n\nx"
    assert example.step_texts == ["scatters,", "so blue.", "x"]


def test_a_column_can_name_the_problem():
    assert stepwise(step_row(id=7), problem_id="id")[0].problem_id == "7"
    assert refused(stepwise, step_row(), problem_id="id")[0] == "missing_column"


def test_a_problem_is_known_by_its_text_blanks_aside():
    assert problem_hash("1 + 1?") == problem_hash(" 1 +\n1? ") == "5ff699181b13a351"
    assert problem_hash("1 + 1?") != problem_hash("1 +1?")


# ---- PRM800K


def rated(text, rating=1):
    return {"text": text, "rating": rating, "flagged": None}


def walked(*steps, **label):
    question = {"problem": "1+1+1=?", "ground_truth_answer": "3", "pre_generated_steps": None}
    return {
        "question": question,
        "generation": 9,
        "label": {"steps": list(steps), "finish_reason": "solution", **label},
    }


def chosen(*completions, at=0, human=None):
    return {"completions": list(completions), "human_completion": human, "chosen_completion": at}


@pytest.mark.parametrize(
    ("neutral", "expected"),
    [
        (1.0, (1.0, 1.0, 0.0, None)),
        (0.0, (1.0, 0.0, 0.0, None)),
        (0.5, (1.0, 0.5, 0.0, None)),
        (None, (1.0, None, 0.0, None)),
    ],
)
def test_a_neutral_step_is_right_unless_told_otherwise_and_after_the_first_error_nothing_is_known(neutral, expected):
    row = walked(*(chosen(rated(f"s{n}", rating)) for n, rating in enumerate([1, 0, -1, 1])))
    (example,) = prm800k(row, neutral=neutral)
    assert (example.completion, example.labels) == ("s0\ns1\ns2\ns3", expected)


def test_the_solution_is_what_was_chosen_or_written_and_ends_where_neither_was():
    row = walked(
        chosen(rated("bad", -1), rated("good", 1), at=1),
        chosen(rated("wrong", -1), at=None, human={"text": "by hand", "rating": None, "source": "human"}),
        {"completions": None, "human_completion": {"text": "by hand too"}, "chosen_completion": None},
        chosen(rated("first", -1), rated("second", 0), at=None),
        chosen(rated("never reached")),
    )
    (example,) = prm800k(row)
    assert example.step_texts == ["good", "by hand", "by hand too", "first"]
    assert example.labels == (1.0, 1.0, 1.0, 0.0)
    assert example.metadata == {
        "generation": 9,
        "finish_reason": "solution",
        "reference": "3",
        "alternative": False,
    }


def test_alternatives_use_every_rating_up_to_the_first_error_once():
    row = walked(
        chosen(rated("a", 1), rated("b", -1)),
        chosen(rated("c", 0), rated("d", -1), rated("e", None), at=1),
        chosen(rated("f", 1), rated("g", -1)),
    )
    examples = prm800k(row, alternatives=True)
    assert [(example.step_texts, example.labels) for example in examples] == [
        (["a", "d", "f"], (1.0, 0.0, None)),
        (["b"], (0.0,)),
        (["a", "c"], (None, 1.0)),
    ]
    assert [example.metadata["alternative"] for example in examples] == [False, True, True]
    assert len({example.problem_id for example in examples}) == 1


def test_a_step_that_nobody_could_rate_is_unlabelled():
    assert prm800k(walked(chosen(rated("a")), chosen(rated("b", None))))[0].labels == (1.0, None)


@pytest.mark.parametrize("rating", [2, -2, "1", True, 0.5, [1]])
def test_an_unknown_rating_is_refused(rating):
    reason, text = refused(prm800k, walked(chosen(rated("a")), chosen(rated("b", rating))))
    assert (reason, text.startswith("step 2 has the rating")) == ("unknown_label", True)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"label": {"steps": []}}, ("missing_column", "no column 'question'; there are 'label'")),
        ({"question": "1+1?", "label": {}}, ("wrong_type", "column 'question' is no object but '1+1?'")),
        (walked(chosen(rated("a"), at=3)), ("wrong_type", "step 1: chosen_completion is 3 of 1")),
        (walked(chosen(rated("a"), at=-1)), ("wrong_type", "step 1: chosen_completion is -1 of 1")),
        (walked(chosen(rated(None))), ("null", "column 'text' is null")),
        (walked(chosen(rated("  "))), ("empty_step", "step 1 of 1 is empty")),
        (walked(None), ("null", "step 1 is no object but None")),
    ],
)
def test_a_broken_line_is_named(row, expected):
    assert refused(prm800k, row) == expected


def test_ratings_read_as_labels():
    assert labels_from_ratings([]) == []
    assert labels_from_ratings([-1, 1, -1]) == [0.0, None, None]
    assert labels_from_ratings([0, None, 1], neutral=None) == [None, None, 1.0]


# ---- Math-Shepherd


def tagged(text):
    """A row from a text in which {+} and {-} are the labels."""
    signs = {"{+}": "+", "{-}": "-"}
    question, label = text, text
    for mark, sign in signs.items():
        question, label = question.replace(mark, "ки"), label.replace(mark, sign)
    return {"input": question, "label": label, "task": "GSM8K"}


def test_tagged_text_is_cut_at_its_marks():
    (example,) = math_shepherd(
        tagged(
            "Buzz has 5+8 slices? Step 1: 5+8 = <<5+8=13>>13. {+}\nStep 2: 13-8 = 6. {-}\nStep 3: The answer is: 6 {-}"
        )
    )
    assert example.prompt == "Buzz has 5+8 slices?"
    assert example.completion == "Step 1: 5+8 = <<5+8=13>>13.\nStep 2: 13-8 = 6.\nStep 3: The answer is: 6"
    assert (example.labels, example.metadata) == ((1.0, 0.0, 0.0), {"task": "GSM8K"})


@pytest.mark.parametrize(
    ("text", "prompt", "steps", "labels"),
    [
        ("У Маши 2 яблоки. Step 1: 2+1=3 {+}", "У Маши 2 яблоки.", ["Step 1: 2+1=3"], (1.0,)),
        ("Слово ки и ки? Step 1: 2+1=3 {-}", "Слово ки и ки?", ["Step 1: 2+1=3"], (0.0,)),
        ("P? Step 1: яблоки {+}\nStep 2: b {+}", "P?", ["Step 1: яблоки", "Step 2: b"], (1.0, 1.0)),
        ("What does Step 1: mean? Step 1: a {+}", "What does Step 1: mean?", ["Step 1: a"], (1.0,)),
        ("P? step 1: a {+}\nstep 2: b {-}", "P?", ["step 1: a", "step 2: b"], (1.0, 0.0)),
        ("How many? She has 3. {+}\nThe answer is: 3 {+}", "How many?", ["She has 3.", "The answer is: 3"], (1.0, 1.0)),
        (
            "Round it {-} to 0.1. Step 1: a {+}\nStep 2: b {-}",
            "Round it  to 0.1.",
            ["Step 1: a", "Step 2: b"],
            (1.0, 0.0),
        ),
        (
            "1 + 1? Step 1: 1 + 1 = 2 {-} Step 2: + - {+}  \n",
            "1 + 1?",
            ["Step 1: 1 + 1 = 2", "Step 2: + -"],
            (0.0, 1.0),
        ),
    ],
)
def test_only_marks_after_the_problem_count(text, prompt, steps, labels):
    (example,) = math_shepherd(tagged(text))
    assert (example.prompt, example.step_texts, example.labels) == (prompt, steps, labels)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": "P? Step 1: a ки", "label": "P? Step 1: a 0"}, "unknown_label"),
        ({"input": "P? Step 1: a ки", "label": "P? Step 1: a"}, "unknown_label"),
        ({"input": "P? Step 1: a ки\nStep 2: b ки", "label": "P? Step 1: a ки\nStep 2: b +"}, "unknown_label"),
        ({"input": "P? Step 1: a", "label": "P? Step 1: a"}, "no_steps"),
        ({"input": "No question. a ки", "label": "No question. a +"}, "no_steps"),
        (tagged("P? Step 1: a {+}\nStep 2: b"), "count_mismatch"),
        (tagged("P? Step 1: a {+} {+}"), "empty_step"),
        (tagged("P? {+}"), "empty_step"),
        ({"input": "P? Step 1: a ки", "label": None}, "null"),
        ({"input": "P? Step 1: a ки"}, "missing_column"),
    ],
)
def test_tags_that_do_not_fit_are_refused(row, reason):
    assert refused(math_shepherd, row)[0] == reason


# ---- ProcessBench


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (-1, (1.0, 1.0, 1.0, 1.0, 1.0)),
        (0, (0.0, None, None, None, None)),
        (2, (1.0, 1.0, 0.0, None, None)),
        (4, (1.0, 1.0, 1.0, 1.0, 0.0)),
        (np.int64(2), (1.0, 1.0, 0.0, None, None)),
    ],
)
def test_the_label_is_the_index_of_the_first_wrong_step(label, expected):
    row = {"id": "gsm8k-0", "generator": "G", "problem": "P?", "steps": list("abcde"), "final_answer_correct": False}
    (example,) = processbench({**row, "label": label})
    assert (example.labels, example.completion) == (expected, "a\n\nb\n\nc\n\nd\n\ne")
    assert example.metadata == {"id": "gsm8k-0", "generator": "G", "final_answer_correct": False, "label": label}
    assert example.problem_id == problem_hash("P?")


@pytest.mark.parametrize("label", [5, -2, True, 1.0, "1", [1]])
def test_an_index_outside_the_steps_is_refused(label):
    reason, text = refused(processbench, {"problem": "P?", "steps": list("abcde"), "label": label})
    assert (reason, text.endswith("; with 5 steps it is -1 to 4")) == ("unknown_label", True)


def test_labels_from_the_first_error():
    assert labels_from_first_error(1, 0) == [0.0]
    assert labels_from_first_error(0, None) == []


# ---- rollouts


def saved(spans, completion="1+1=2\n2+1=4\n", **changes):
    verdicts = {"steps": {"score": 0.5, "spans": spans}, "answer": {"score": 1.0, "spans": []}}
    row = {"prompt": "1+1+1=?", "completion": completion, "problem_id": "p7", "verdicts": json.dumps(verdicts)}
    return {**row, "step": 3, "sample": 1, "reward": 0.5, "truncated": False, "prompt_ids": [1], **changes}


def test_the_spans_of_the_named_verifier_are_the_steps():
    spans = [
        [6, 11, 0.0, "wrong result"],
        [0, 5, 1.0, "step"],
        [11, 12, 0.0, "empty line"],
        [12, 12, 0.0, "missing line break"],
    ]
    (example,) = rollouts(saved(spans))
    assert (example.steps, example.labels) == (((0, 5), (6, 11)), (1.0, 0.0))
    assert (example.completion, example.problem_id) == ("1+1=2\n2+1=4\n", "p7")
    assert example.metadata == {"step": 3, "sample": 1, "reward": 0.5, "truncated": False}
    assert rollouts(saved([]), verifier="answer")[0].steps == ()
    assert rollouts(saved([]), problem_id=None)[0].problem_id == problem_hash("1+1+1=?")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            saved([[0, 5, 1.0, ""], [4, 6, 1.0, ""]]),
            ("wrong_spans", "the spans of 'steps' overlap or end outside the completion"),
        ),
        (saved([[0, 99, 1.0, ""]]), ("wrong_spans", "the spans of 'steps' overlap or end outside the completion")),
        (
            saved([[0, 5, 1.0, ""], [50, 60, 1.0, ""]]),
            ("wrong_spans", "the spans of 'steps' overlap or end outside the completion"),
        ),
        (saved([[-3, 2, 1.0, ""]]), ("wrong_spans", "[-3, 2, 1.0, ''] is no span [start, stop, score, label]")),
        (saved([["a"]]), ("wrong_spans", "['a'] is no span [start, stop, score, label]")),
        (saved([[0, 5, -2.0, ""]]), ("unknown_label", "step 1 has the label -2.0; known are true, false and 0 to 1")),
        (saved([], verdicts="{"), ("invalid_json", None)),
        (saved([], verdicts="[" * 100_000), ("invalid_json", "verdicts are nested too deep")),
        (saved([], verdicts="[]"), ("wrong_type", "verdicts is no object but []")),
        (saved([], verdicts="{}"), ("missing_column", "no verdict of 'steps'; there are 'none'")),
        (saved([], verdicts=None), ("null", "column 'verdicts' is null")),
    ],
)
def test_verdicts_that_do_not_fit_are_refused(row, expected):
    reason, text = refused(rollouts, row)
    assert (reason, text if expected[1] else None) == expected


# ---- all of them

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([-1, 0, 1, "ки", "Step 1: ки"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
NAMES = {
    stepwise: ("prompt", "completions", "labels"),
    prm800k: ("question", "label"),
    math_shepherd: ("input", "label"),
    processbench: ("problem", "steps", "label"),
    rollouts: ("prompt", "completion", "verdicts", "problem_id"),
}


@pytest.mark.parametrize("reader", NAMES, ids=lambda reader: reader.__name__)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_row_is_read_or_refused(reader, data):
    row = {name: data.draw(VALUES) for name in NAMES[reader]}
    if reader is prm800k:
        step = {
            "completions": data.draw(VALUES),
            "human_completion": data.draw(VALUES),
            "chosen_completion": data.draw(VALUES),
        }
        row = {"question": {"problem": data.draw(VALUES)}, "label": {"steps": [step, data.draw(VALUES)]}}
    if reader is rollouts:
        row |= {
            "completion": "abc",
            "prompt": "p",
            "verdicts": {"steps": {"spans": [data.draw(VALUES), [0, 1, data.draw(VALUES)]]}},
        }
    faults = []
    try:
        examples = reader(row)
    except BadRow as error:
        examples, faults = [], [str(error)]
    assert all("\n" not in fault for fault in faults)
    assert all(len(example.steps) == len(example.labels) for example in examples)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=[]), min_size=1).filter(str.strip), max_size=6), st.text())
def test_joined_steps_are_found_again(texts, separator):
    completion, spans = join_steps(texts, separator)
    assert completion == separator.join(texts)
    assert [completion[start:stop] for start, stop in spans] == [text.strip() for text in texts]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=[])), st.integers(8, 80))
def test_a_shortened_text_is_one_short_printable_line(text, limit):
    short = shorten(text, limit)
    assert short.isprintable()
    assert len(" ".join(text.split())) > limit or ast.literal_eval(short) == " ".join(text.split())


def test_texts_of_a_megabyte_are_read_in_linear_time():
    text = "Step 1: " * 60_000 + " ки" * 60_000
    with pytest.raises(BadRow):
        math_shepherd({"input": text, "label": text.replace("ки", "+")})
    assert len(math_shepherd(tagged("P? " + "Step 1: a {+}\n" * 40_000))[0].steps) == 40_000


def test_text_stands_for_itself():
    assert as_text(" a\n", "x") == " a\n"
