import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.number import NumberAnswer, extract_number, parse_quantity

POLICIES = ["answer_line", "boxed", "last_number"]
FRAGMENTS = [
    "Answer:",
    "answer = ",
    "**",
    "\n",
    " ",
    r"\boxed{",
    "{",
    "}",
    "\\",
    "-",
    "$",
    "%",
    "12",
    "1,234.5",
    "/",
    ".",
    "x",
    "個",
]
law = settings(derandomize=True, deadline=None, max_examples=200)


def judge(completion, reference, extract):
    (verdict,) = NumberAnswer(extract)([Sample("", completion, reference)])
    return verdict


def extracted(text, policy):
    found = extract_number(text, policy)
    return None if found is None else text[found.start : found.stop]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 3 = 5\nAnswer: 5", "5"),
        ("answer: 5.", "5"),
        ("**Answer:** 5", "5"),
        ("**Answer: 5**", "5"),
        ("So there are **73** of them.\n\n---\n\nFinal Answer: **73**", "73"),
        ("The final answer is: $1,200", "$1,200"),
        ("### Answer: -7 degrees", "-7"),
        ("Answer: x = 4", "4"),
        ("Answer: 2/3", "2/3"),
        (r"Answer: \boxed{5}", "5"),
        ("Answer: 1\nAnswer: 2\nThe check agrees. " + "It does. " * 100, "2"),
        ("Answer: 5\nAnswer: unknown", "5"),
        ("Answer: 28%", "28%"),
        ("Answer: 5\r\n", "5"),
    ],
)
def test_the_last_answer_line_counts(text, answer):
    assert extracted(text, "answer_line") == answer


@pytest.mark.parametrize(
    "text", ["", "The result is 5.", "Answer: none", "My answers: 5", "Answer 5", "No answer: here 5", "Answer:\n5"]
)
def test_without_an_answer_line_there_is_no_answer(text):
    assert extracted(text, "answer_line") is None
    assert judge(text, "5", "answer_line") == Verdict(0.0)


@pytest.mark.parametrize(
    "content", ["4 or 5", "1 2 3 4 5 6", "4\\sqrt{2}", "4 sqrt(2)", "4 + x", "4x", "4 dozen", "4π", "1.2.3"]
)
@pytest.mark.parametrize("frame", [("Answer: ", ""), (r"\boxed{", "}")])
def test_an_answer_that_is_not_one_number_is_wrong_and_located(content, frame):
    text = f"{frame[0]}{content}{frame[1]}"
    verdict = judge(text, "4", "answer_line" if frame[0] == "Answer: " else "boxed")
    assert verdict.score == 0.0
    assert [text[span.start : span.stop] for span in verdict.spans] == [content]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First I got \boxed{2}. That was wrong; the answer is \boxed{3}.", "3"),
        (r"\boxed{1} \boxed{2} \boxed{3} \boxed{4}", "4"),
        ("This gives \\boxed{840}. I repeat it.\n\n**Result**\n\\boxed{840}", "840"),
        (r"\boxed{\text{13}}", "13"),
        (r"\boxed{42 \text{ apples}}", "42"),
        (r"\boxed{−5}", "−5"),
        (r"\boxed{\$1{,}234}", r"\$1{,}234"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 } and 9", "7"),
        (r"\boxed{}", None),
        (r"\boxed{3", None),
        (r"\boxed{2} then \boxed{3", None),
        ("no box, 5", None),
    ],
)
def test_the_last_box_counts(text, answer):
    assert extracted(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The total is 72 clips, altogether.", "72"),
        ("Temperature falls from 2 to -3.", "-3"),
        ("#### -1,234.5", "-1,234.5"),
        ("2+40=42\n#### 42\n" + "The check agrees as well. " * 20, "42"),
        ("He read pages 3-5", "5"),
        ("7 - 2", "2"),
        ("It costs $5.50.", "$5.50"),
        ("5 apples, says GPT-4 v1.2.3 on 2024-01-05 at 12:30 for the 3rd time", "5"),
        ("no number", None),
    ],
)
def test_the_last_number_counts(text, answer):
    assert extracted(text, "last_number") == answer


@pytest.mark.parametrize("extract", POLICIES)
@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("12", "12.0", True),
        ("12.0", "12", True),
        ("1234", "1,234", True),
        ("1,234", "$1234.00", True),
        ("1234", "12,34", False),
        ("1.234", "1,234", False),
        ("-3", "-3", True),
        ("3", "-3", False),
        ("-5", "−5", True),
        ("5", "−5", False),
        ("0.5", "1/2", True),
        ("1/3", "0.3333333", False),
        ("1000000", "1000000.4", False),
        ("1", "0.9999999", False),
        ("300000000", "3e8", True),
        ("3", "3e8", False),
        ("28%", "28%", True),
        ("28%", "28 percent", True),
        ("28", "28%", False),
        ("28%", "28", False),
        ("0.28", "28%", False),
        ("42", "24", False),
    ],
)
def test_numbers_are_compared_exactly(extract, reference, answer, right):
    text = {"answer_line": f"Answer: {answer}", "boxed": f"\\boxed{{{answer}}}", "last_number": f"so {answer}"}[extract]
    verdict = judge(text, reference, extract)
    assert verdict.score == float(right)
    assert [span.score for span in verdict.spans] == [float(right)]


@pytest.mark.parametrize("reference", [None, "", "  ", "many", "12 apples", "3 or 4", "(1,234)", "1.2.3", "007", "x"])
def test_without_a_reference_that_is_a_number_it_abstains(reference):
    for policy in POLICIES:
        assert judge("Answer: 3", reference, policy) == Verdict(None)


def test_signs_and_blanks_around_a_reference_are_read():
    assert [parse_quantity(text).value for text in (" 5\n", "+5", "-5", "$5", "5/10")] == [5, 5, -5, 5, 0.5]


def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError, match="extract: 'first_number' is no policy"):
        NumberAnswer(extract="first_number")


@law
@given(st.text() | st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join), st.sampled_from(POLICIES))
def test_no_text_raises_and_the_span_lies_inside(text, policy):
    verdict = judge(text, "12", policy)
    assert verdict.score in (0.0, 1.0)
    assert all(0 <= s.start < s.stop <= len(text) and s.score == verdict.score for s in verdict.spans)
    assert len(verdict.spans) <= 1
    judge("Answer: 12", text, policy)


@law
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_equality_is_that_of_fractions(a, b):
    assert judge(f"Answer: {a}", f"{b}", "answer_line").score == float(a == b)
    assert judge(f"Answer: {a}", f"{a}", "answer_line").score == 1.0


@pytest.mark.parametrize("unit", ["answer ", "answer: 1\n", " ", r"\boxed{", "{", "\\", "1-", "1/", "1,", "the ", "*"])
def test_long_hostile_texts_end_soon(unit):
    for policy in POLICIES:
        assert judge(unit * (30_000 // len(unit)), "2", policy).score == 0.0
