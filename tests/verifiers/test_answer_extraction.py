import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError
from apportion.verifiers.answer_extraction import POLICIES, extract_answer, trim

TAIL = " The check with the other method agrees as well." * 20
LONG = "+".join(f"x^{{{power}}}" for power in range(25))


def text_of(completion, policy):
    found = extract_answer(completion, policy)
    return None if found is None else found.text


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"We get \boxed{\frac{1}{3}}.", r"\frac{1}{3}"),
        (r"First \boxed{2}. That was wrong; the answer is \boxed{3}.", "3"),
        (r"\boxed{1} \boxed{2} \boxed{3} \boxed{8}", "8"),
        ("This gives \\boxed{840}. I repeat it:\n\n**Result**\n\\boxed{840}", "840"),
        (r"\boxed{840}, \boxed{840}", "840"),
        (r"\boxed{\text{13}}", "13"),
        (r"$\boxed{ 5. }$", "5"),
        (r"\boxed 3.", "3"),
        (r"\boxed3", "3"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{2} and then \boxed{3", "2"),
        (r"use \boxed{} for it: \boxed{6} or \boxed{ }", "6"),
        (r"\boxed{1331} and \boxed{1728}", "1331, 1728"),
        (r"$\boxed{2}$, $\boxed{3}$", "2, 3"),
        (r"$x=\boxed{5}$ or $x=\boxed{-2}$", "5, -2"),
        (r"$x_1=\boxed{5}$, $x_2=\boxed{-2}$", "5, -2"),
        (r"$x=\boxed{5}$, $y=\boxed{-2}$", "-2"),
        (r"\boxed{5}, so $x=\boxed{-2}$", "-2"),
        (r"\boxed{12 \text{ or } 13}", r"12 \text{ or } 13"),
        (r"\boxed{5!}", "5!"),
        (r"\boxed{(C)}" + TAIL, "(C)"),
        (rf"The polynomial is \boxed{{{LONG}}}", LONG),
        (r"} { \boxed{9}", "9"),
        (r"\boxed{}", None),
        (r"\boxed{\text{ }}", None),
        (r"\boxed{$ $}", None),
        (r"\boxed{4", None),
        (r"\boxedness{4}", None),
        ("no box", None),
    ],
)
def test_the_last_complete_box_counts(completion, answer):
    assert text_of(completion, "boxed") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("<ANSWER> $x^2$ </Answer>", "x^2"),
        ("<answer>1</answer> no <answer>2</answer>", "2"),
        (r"<answer>It is \boxed{3} here</answer>", "3"),
        ("<answer>The answer is 5.</answer>", "5"),
        ("<answer>1</answer><answer></answer>", "1"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>7", None),
        ("</answer>7<answer>", None),
    ],
)
def test_the_last_answer_tag_counts(completion, answer):
    assert text_of(completion, "answer_tag") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2+40=42\n#### 42\n" + TAIL, "42"),
        ("Temperature falls from 2 to -3.\n#### -3", "-3"),
        ("#### -1,234.5", "-1,234.5"),
        ("#### $18", "$18"),
        ("#### 5\n#### Step 2: more\ntext", "5"),
        ("#### yes", "yes"),
        ("##### 5", None),
        ("### 5", None),
    ],
)
def test_four_number_signs_mark_an_answer(completion, answer):
    assert text_of(completion, "hash") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("So there are **73** of them.\n\n---\n\nFinal Answer: **73**", "73"),
        ("**Answer:** 5", "5"),
        ("**Answer: 5**", "5"),
        ("### Final Answer\n\n73", "73"),
        ("**Final Answer:**\n$$\\frac{1}{2}$$", r"\frac{1}{2}"),
        ("**Final Answer**\n\n\\[\n5\n\\]", "5"),
        ("**Final Answer**\n$$\n\\frac{1}{2}\n$$", r"\frac{1}{2}"),
        ("The answer is approximately 5.2 miles.", "5.2 miles"),
        ("Answer: about **5**", "5"),
        ("The answer is about face.", "about face"),
        ("The correct option is B.", "B"),
        ("The answer is 12 or 13.", "12 or 13"),
        ("The answer is $12$ or $13$.", "$12$ or $13$"),
        ("the final answer is $4\\sqrt{2}$ because 2 is even.", r"4\sqrt{2}"),
        ("The answer to the question is: (C).", "(C)"),
        ("The correct answer is therefore 5. Let me check: 2+3.", "5"),
        ("The answer is 12. Wait, no. The answer is 13.", "13"),
        ("Answer: 3\nAnswer:", "3"),
        ("Answer: Tuesday", "Tuesday"),
        ("Answer: 1,200.5 apples", "1,200.5 apples"),
        ("answer: x = 4." + TAIL, "x = 4"),
        ("The answer is 5! ways", "5! ways"),
        ("My answers: 5", None),
        ("The answer was lost", None),
    ],
)
def test_the_last_answer_sentence_counts(completion, answer):
    assert text_of(completion, "answer_line") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The total is 72 clips, altogether.", "72"),
        ("from 2 to -3.", "-3"),
        ("so x=5.", "5"),
        ("we get 4\\sqrt{2}.", r"4\sqrt{2}"),
        ("that is $x^2+3$.", "x^2+3"),
        ("it costs $1,200.50.", "$1,200.50"),
        ("none", None),
        (",", None),
    ],
)
def test_the_last_number_is_taken_with_the_formula_it_stands_in(completion, answer):
    assert text_of(completion, "last_number") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{2} Answer: 5, see page 7", "2"),
        (r"<think>\boxed{2}</think><answer>3</answer>", "3"),
        (r"<think>\boxed{2}</think>The answer is 3.", "3"),
        (r"<think>\boxed{2}</think>I needed 3 steps.", "2"),
        (r"\boxed{2}. <answer>3</answer>", "3"),
        (r"<answer>3</answer> \boxed{2}", "2"),
        ("#### 4\nAnswer: 5", "4"),
        ("Answer: 5. Page 7", "5"),
        ("Page 7", "7"),
        ("Nothing", None),
    ],
)
def test_auto_tries_the_clearest_mark_first(completion, answer):
    assert text_of(completion, "auto") == answer


def test_the_place_of_several_boxes_reaches_over_all_of_them():
    text = r"\boxed{2} and \boxed{3}!"
    found = extract_answer(text, "boxed")
    assert text[found.start : found.stop] == r"2} and \boxed{3"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("$x$", "x"),
        (r"\(x\).", "x"),
        ("**x**", "x"),
        ("`x`", "x"),
        (r"\textbf{x}", "x"),
        ("{x}", "x"),
        ("$5", "$5"),
        ("0.3...", "0.3..."),
    ],
)
def test_only_what_wraps_is_trimmed(text, inside):
    assert text[slice(*trim(text))] == inside


def test_an_unknown_policy_is_named():
    with pytest.raises(InputError, match="extract: 'tail' is no policy; give one of auto"):
        extract_answer("5", "tail")


PIECES = st.sampled_from(
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "$",
        "<answer>",
        "</answer>",
        "</think>",
        "#### ",
        "Answer: ",
        "the answer is ",
        "**",
        "\n",
        " ",
        "12",
        ".",
        "-",
        " and ",
        "\\text{",
        "\ud800",
        "İ",
        "個",
        ",",
        "x^2",
    ]
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=25).map("".join), st.sampled_from(sorted(POLICIES)))
def test_an_answer_is_a_piece_of_the_text(text, policy):
    found = extract_answer(text, policy)
    if found is not None:
        assert 0 <= found.start < found.stop <= len(text)
        assert found.text == text[found.start : found.stop] or found.text.count(", ") >= 1
        assert found.text.strip()


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "\\text{",
        "<answer>",
        "answer: ",
        "the answer is ",
        "the answer of ",
        "####",
        "#### 1\n",
        "*",
        "$",
        "\\",
        "1 ",
        "(",
        "\\boxed ",
        "\\boxed{1} and ",
        "**1**",
        " ",
        "Answer:\n",
        "\ud800",
        "-",
        "so, ",
        "</think>",
        "\\boxed{}",
    ],
)
def test_hostile_text_takes_linear_time(piece):
    started = time.process_time()
    extract_answer(piece * (100_000 // len(piece)))
    assert time.process_time() - started < 1.5
