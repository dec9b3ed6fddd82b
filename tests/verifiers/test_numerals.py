from fractions import Fraction

import pytest

from apportion.verifiers.numerals import tokenize


def kinds(text):
    return [(token.kind, token.text) for token in tokenize(text)]


def test_a_star_between_even_spaces_multiplies_and_else_is_emphasis():
    product = [("number", "3"), ("op", "*"), ("number", "4")]
    assert kinds("3*4") == kinds("3 * 4") == product
    assert kinds("**3** 4") == kinds("*3* 4") == kinds("3 *4*") == [("number", "3"), ("number", "4")]
    assert kinds("2**3") == [("number", "2"), ("op", "^"), ("number", "3")]


def test_an_x_between_even_spaces_multiplies_and_else_is_a_word():
    product = [("number", "3"), ("op", "*"), ("number", "4")]
    assert kinds("3x4") == kinds("3 x 4") == kinds("3 X 4") == product
    assert kinds("3x (4)")[1] == kinds("3x(4)")[1] == ("word", "x")
    assert kinds("x 4") == [("word", "x"), ("number", "4")]


@pytest.mark.parametrize("text", ["1.2.3", "2024-01-05", "5/11/2024", "12:30", "0xff"])
def test_versions_dates_times_and_codes_are_no_numbers(text):
    assert kinds(text) == [("opaque", text)]


@pytest.mark.parametrize(
    ("text", "value", "decimals", "percent", "currency"),
    [
        ("1,234.50", Fraction(2469, 2), 2, False, ""),
        ("1{,}234", Fraction(1234), 0, False, ""),
        (r"1\,234", Fraction(1234), 0, False, ""),
        (".5", Fraction(1, 2), 1, False, ""),
        ("12.5%", Fraction(1, 8), 1, True, ""),
        (r"12\%", Fraction(3, 25), 0, True, ""),
        (r"\$5", Fraction(5), 0, False, "$"),
        ("5 €", Fraction(5), 0, False, "€"),
        ("3e2", Fraction(300), 0, False, ""),
        (r"\dfrac{1}{3}", Fraction(1, 3), 0, False, ""),
        (r"\frac{1}{0}", None, 0, False, ""),
        ("007", None, 0, False, ""),
        ("0", Fraction(0), 0, False, ""),
        ("9" * 10_000, None, 0, False, ""),
    ],
)
def test_numbers_are_read_exactly_or_not_at_all(text, value, decimals, percent, currency):
    (token,) = tokenize(text)
    assert token.numeral == (value, decimals, percent, currency)
    assert (token.start, token.stop) == (0, len(text))


def test_only_groups_of_three_are_thousands():
    assert [text for kind, text in kinds("12,34 1,2345 1,234,56") if kind == "number"] == [
        "12",
        "34",
        "1",
        "2345",
        "1,234",
        "56",
    ]


def test_positions_are_those_of_the_whole_text():
    text = "ab 12 cd 34"
    assert [(t.start, t.stop) for t in tokenize(text, 6, 10)] == [(6, 8), (9, 10)]
