from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apportion.verifiers import Sample, Verdict
from apportion.verifiers.arithmetic import Arithmetic, equations

FRAGMENTS = [
    *"0123456789+-*/=().,%$^x \n²½−×÷€",
    " = ",
    "12",
    "1,200",
    "0.5",
    "**",
    r"\times",
    r"\frac{1}{2}",
    "of",
]
FRAGMENTS += [
    "percent",
    "apples",
    "2024-01-05",
    "1.2.3",
    "3:45",
    "个",
    "-> ",
    r"\(",
    r"\)",
    "<<",
    ">>",
    "remainder",
    "1e9",
]
law = settings(derandomize=True, deadline=None, max_examples=300)


def found(text, **options):
    return [(text[e.start : e.stop], e.holds) for e in equations(text, **options)]


@pytest.mark.parametrize(
    "equation",
    [
        "12 + 7 = 19",
        "3 × 4.5 = 13.5",
        "20/4=5",
        "19 = 12 + 7",
        "2 + 3 = 1 + 4",
        "2 + 3 * 4 = 14",
        "(2 + 3) * 4 = 20",
        "2 * (3 + (4 - 1)) = 12",
        "20 - 5 - 5 = 10",
        "100 / 10 / 5 = 2",
        "-5 + 3 = -2",
        "5 - -3 = 8",
        "5 * (-3) = -15",
        "3 − 5 = −2",
        "12 – 7 = 5",
        "6 · 7 = 42",
        "84 ÷ 2 = 42",
        "6 x 7 = 42",
        "6x7 = 42",
        "2(3 + 4) = 14",
        "(1 + 1)(2 + 2) = 8",
        "2^10 = 1024",
        "2**3 = 8",
        "3² + 4² = 25",
        "2^-1 = 0.5",
        "-2^2 = -4",
        "0.1 + 0.2 = 0.3",
        "0 / 5 = 0",
        "1 / 3 = 2 / 6",
        ".5 + .5 = 1.0",
        "$1,200 + $300 = $1,500",
        "$5 * 3 = 15",
        "-$5 + $8 = $3",
        "5€ + 3€ = 8 €",
        r"\$5 + \$3 = \$8",
        "1,000,000 / 1,000 = 1,000",
        "20% of 50 = 10",
        "20 percent of 50 = 10",
        "1/2 of 50 = 25",
        "15% = 0.15",
        "3 / 4 = 75%",
        "100% - 20% = 80%",
        "50 * 20% = 10",
        r"12 \times 7 = 84",
        r"12 \cdot 7 - 4 \div 2 = 82",
        r"\frac{1}{2} + \frac{1}{4} = \frac{3}{4}",
        "3e8 / 2 = 150000000",
        "12345678901234567890 * 10 = 123456789012345678900",
    ],
)
def test_a_true_equation_holds_and_a_false_link_behind_it_does_not(equation):
    assert found(equation) == [(equation, True)]
    assert [holds for _, holds in found(f"{equation} = 98765")] == [True, False]


@pytest.mark.parametrize(
    "equation",
    ["12 + 7 = 20", "$1,200 + $300 = $1,400", "15% = 1.5", "7 / 2 = 3", "0.1 + 0.2 = 0.30000000000000004", "5 = 2 + 4"],
)
def test_a_false_equation_is_blamed_where_it_stands(equation):
    text = f"First: {equation}. Then we stop."
    (verdict,) = Arithmetic()([Sample("", text)])
    (span,) = verdict.spans
    assert verdict.score == span.score == 0.0
    assert text[span.start : span.stop] == equation
    assert span.label == f"wrong equation: {equation}"


@pytest.mark.parametrize(
    "text",
    [
        "x = 5",
        "5 = x",
        "x + 3 = 5",
        "2x + 3 = 7",
        "3 + 2x = 7",
        "12 + 8 = 20 - x",
        "12 + 8 = 20 - discount",
        "y = 3 + 2 x",
        "f(2) + 3 = 5",
        "sqrt(16) + 3 = 7",
        r"\sqrt{16} + 3 = 7",
        "3 ft = 36 in",
        "3 apples + 4 apples = 7 pears",
        "Tom has 3 apples + 4 = 7",
        "60 minutes = 1 hour",
        "90° - 30° = 60°",
        "5 * 4 = 20x",
        "12 * 100 = 1.2 thousand",
        "2024-01-05 = 3",
        "12/25/2024 = 3",
        "5:30 + 1 = 6:30",
        "version 1.2.3 = 1.2 + 3",
        "GPT-4 + 1 = 6",
        "x1 + 2 = 5",
        "0x10 = 16",
        "5 = 5",
        "1 = 2",
        "12 + 7 = ?",
        "12 + 7 = 20?",
        "12 + 7 ≠ 20",
        "12 + 7 == 20",
        "12 + 7 >= 20",
        "12 + 7 != 20",
        "x += 3 + 4",
        "17 / 5 = 3 remainder 2",
        "17 / 5 = 3, remainder 2",
        "17 / 5 = 3 R 2",
        "17 / 5 = 3 r2",
        "17 mod 5 + 1 = 3",
        "5 / 2 = 2 and a half",
        "1 1/2 + 1/2 = 2",
        "half of 12 + 8 = 14",
        "the 5 = 2 + 4",
        "10, 20, 30 = 61 - 1",
        "3 of 4 = 75%",
        "20% = 10 apples",
        "a discount of 20% = $10",
        "3/4 * 100 = 75%",
        "200 - 10% = 180",
        "6/2(1+2) = 9",
        "$5 + €3 = 8",
        "3,5 + 1,5 = 5",
        "1,00 + 1 = 101",
        "007 + 1 = 8",
        "5! = 120",
        "9^9^9 = 1",
        "9^999999999 = 1",
        "0^0 = 1",
        "2^0.5 = 1.4",
        "12 + 7\n= 20",
        "3½ + 1 = 4",
        "12 + 7 = 20万",
        "",
    ],
)
def test_what_cannot_be_checked_is_left_alone(text):
    assert found(text) == []
    assert Arithmetic()([Sample("", text)]) == [Verdict(None)]


@pytest.mark.parametrize(
    "text",
    [
        "So 12 + 7 = 20 apples.",
        "a total of 12 + 7 = 20 apples",
        "Step 1: 12 + 7 = 20",
        "1. 12 + 7 = 20",
        "2) 12 + 7 = 20",
        "(a) 12 + 7 = 20",
        "- 12 + 7 = 20",
        "* 12 + 7 = 20",
        "> - 12 + 7 = 20",
        "(12 + 7 = 20)",
        "**12 + 7 = 20**",
        "`12 + 7 = 20`",
        "_12 + 7 = 20_",
        "12 + 7 = 20!",
        "12 + 7 = 20, not 3",
        "12 + 7 = 20 (wrong)",
        "12 + 7 = 20 -> next",
        "x = 12 + 7 = 20",
        "12 + 7 = 20 cm",
        "12 + 7 = 20/hour",
        "<<12 + 7 = 20>>20",
        r"\(12 + 7 = 20\)",
        r"\[ 12 + 7 = 20 \]",
        r"12 + 7 = 20 \text{ apples}",
        "共有12 + 7 = 20个苹果",
        "12 + 7 = 20\r",
        "| 12 + 7 = 20 |",
        "3 apples. 12 + 7 = 20",
        "In 2024: 12 + 7 = 20",
    ],
)
def test_prose_and_markup_around_an_equation_do_not_hide_it(text):
    assert found(text) == [("12 + 7 = 20", False)]


def test_markup_inside_an_equation_does_not_hide_it():
    assert found("**Sum:** 5 + 3 = **9**") == [("5 + 3 = **9", False)]
    assert found("$12$ + $7$ = $20$") == [("$12$ + $7$ = $20$", False)]
    assert found(r"&= 12 + 7 &= 20 \\") == [("12 + 7 &= 20", False)]


@pytest.mark.parametrize(
    "equation",
    [
        "3 apples + 4 apples = 7",
        "20 pages - 1 page = 19",
        "5 friends * 3 cookies = 15",
        "7 tickets × $2 = $14",
        "(3 cm + 4 cm) * 2 = 14",
        "12 boxes / 4 = 3",
    ],
)
def test_units_that_agree_are_read(equation):
    unit = {"3": " apples", "2": " pages", "5": " cookies", "7": "", "(": " cm", "1": " boxes"}[equation[0]]
    assert found(f"So {equation}{unit}.") == [(equation, True)]
    assert found(f"So {equation}1{unit}.") == [(f"{equation}1", False)]


@pytest.mark.parametrize(
    "text",
    [
        "3 apples + 4 pears = 8 fruits",
        "3 apples + 4 = 8",
        "3 apples + 4 apples = 8 pears",
        "2 * 30 minutes = 1 hour",
        "2 hours * 60 = 121 minutes",
        "50 cents * 4 = $2",
        "3 tens * 2 = 60",
        "3 halves * 2 = 3",
        "10 pounds * $2/pound = $20",
    ],
)
def test_units_are_never_converted(text):
    assert found(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "7 + 7 + 7 + 18 = 39 (mod 25) = 14 (mod 25)",
        r"2^5 = 32 = 2 \pmod{5}",
        "1 + 5 = 1 modulo 5",
        "cost * 5 + 3 = 9",
        "n**2 + 3 = 8",
        "(1/2)*(2/3)*...*(98/99)*(99/100) = 1/100",
        "2^2 * 2^2 = 2^2 *",
        "2/3 / 11/3 = 2/11",
        "14÷1/2 = 28",
        "10 / 3 = 3.3333...",
        "10 / 3 = 3.33…",
    ],
)
def test_notation_with_another_meaning_is_left_alone(text):
    assert found(text) == []


def test_an_equation_that_the_length_limit_may_have_cut_short_is_not_judged():
    text = "1 + 1 = 2 and 6 * 7 = 4"
    for truncated, score in ((False, 0.5), (True, 1.0)):
        (verdict,) = Arithmetic()([Sample("", text, metadata={"truncated": truncated})])
        assert verdict.score == score
    assert Arithmetic()([Sample("", "6 * 7 = 4", metadata={"truncated": True})]) == [Verdict(None)]


def test_only_the_false_link_of_a_chain_is_blamed():
    assert found("2 + 3 = 5 - 1 = 4") == [("2 + 3 = 5 - 1", False), ("5 - 1 = 4", True)]
    assert found("2 + 3 = 5 = 6 = 6") == [("2 + 3 = 5", True), ("5 = 6", False), ("6 = 6", True)]
    assert found("2 * 30 = 60 minutes = 1 hour") == [("2 * 30 = 60", True)]


def test_division_by_zero_never_holds():
    assert found("5 / 0 = 0, 5 / (2 - 2) = 5 / 0, 0^-1 = 0") == [
        ("5 / 0 = 0", False),
        ("5 / (2 - 2) = 5 / 0", False),
        ("0^-1 = 0", False),
    ]


def test_two_equations_on_a_line_are_two():
    assert found("3 + 4 = 7 and 5 + 6 = 12; 1 + 1 = 2.") == [
        ("3 + 4 = 7", True),
        ("5 + 6 = 12", False),
        ("1 + 1 = 2", True),
    ]


def test_the_score_is_the_share_that_holds():
    text = "1 + 1 = 2\n2 + 2 = 5\n3 + 3 = 6\n4 + 4 = 8"
    (verdict,) = Arithmetic()([Sample("", text)])
    assert verdict.score == 0.75
    assert [(span.score, span.label) for span in verdict.spans[:2]] == [
        (1.0, "right equation"),
        (0.0, "wrong equation: 2 + 2 = 5"),
    ]


@pytest.mark.parametrize(
    ("equation", "rounded"),
    [
        ("10 / 3 = 3.33", True),
        ("10 / 3 = 3.34", False),
        ("10 / 3 = 3.3333", True),
        ("10 / 3 = 3", False),
        ("7 / 2 = 4", False),
        ("3.33 = 10 / 3", True),
        ("1 / 3 = 33.3%", True),
        ("1 / 3 = 33.4%", False),
        ("2 / 3 = -0.67", False),
        ("-2 / 3 = -0.67", True),
        ("$10 / 3 = $3.33", True),
        ("1 / 8 = 0.13", True),
        ("10 / 3 = 3.33 * 1", False),
        ("0.1 + 0.2 = 0.4", False),
    ],
)
def test_rounded_results_hold_only_where_that_is_allowed(equation, rounded):
    assert found(equation) == [(equation, False)]
    assert found(equation, allow_rounding=True) == [(equation, rounded)]


numbers = st.integers(0, 9999).map(lambda n: (str(n), Fraction(n))) | st.decimals(0, 999, places=2).map(
    lambda d: (str(d), Fraction(d))
)


def combine(parts):
    (left, a), sign, (right, b) = parts
    a_and_b = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
    return None if a_and_b is None else (f"({left}) {sign} ({right})", a_and_b)


trees = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(combine).filter(lambda tree: tree is not None),
    max_leaves=8,
)


@law
@given(tree=trees, error=st.integers(1, 10**6), divisor=st.integers(1, 1000))
def test_any_expression_equals_its_value_and_nothing_else(tree, error, divisor):
    written, value = tree
    assume("(" in written)
    right = f"{written} = {value.numerator}/{value.denominator}"
    off = value + Fraction(error, divisor)
    wrong = f"{written} = {off.numerator}/{off.denominator}"
    assert found(f"So {right} apples.\nBut {wrong}.") == [(right, True), (wrong, False)]


@law
@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99)), min_size=1, max_size=8), st.integers(0, 99))
def test_precedence_is_that_of_arithmetic(steps, first):
    total, product = Fraction(0), Fraction(first)
    for sign, number in steps:
        if sign in "*/":
            product = product * number if sign == "*" else product / number
        else:
            total, product = total + product, Fraction(number if sign == "+" else -number)
    written = " ".join([str(first), *(f"{sign} {number}" for sign, number in steps)])
    total += product
    assert found(f"{written} = {total.numerator}/{total.denominator}")[0][1] is True


@law
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.sampled_from([-7, 0, 0, 10])), max_size=8))
def test_in_a_text_exactly_the_false_equations_are_blamed(facts):
    written = [(f"{a} + {b} = {a + b + off}", off == 0) for a, b, off in facts]
    text = "He says: " + ", so ".join(equation for equation, _ in written) + ". Done."
    assert found(text) == written


@law
@given(st.text() | st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join), st.booleans())
def test_no_text_raises_and_spans_lie_inside(text, allow_rounding):
    (verdict,) = Arithmetic(allow_rounding=allow_rounding)([Sample("", text)])
    assert (verdict.score is None) == (verdict.spans == ())
    for span in verdict.spans:
        assert 0 <= span.start < span.stop <= len(text)
        quoted = text[span.start : span.stop]
        assert "=" in quoted
        assert "\n" not in quoted
        assert quoted == quoted.strip()


@pytest.mark.parametrize(
    "unit",
    ["(", "(1+", "1+(", "2(", "1=", "1+1=", "9^", "1/7+", "1,111", "1", "$", "**", "1 x ", "-", ".", "1-1-", "="],
)
def test_long_hostile_lines_end_soon_and_quietly(unit):
    text = "1 = " + unit * (30_000 // len(unit)) + " = 2"
    (verdict,) = Arithmetic()([Sample("", text)])
    assert all(len(span.label) < 130 for span in verdict.spans)
