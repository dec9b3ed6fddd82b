import unicodedata

from hypothesis import example, given, settings
from hypothesis import strategies as st

from apportion.verifiers.quotes import find_quote, utf16_to_code_points

any_text = st.text(st.characters(exclude_categories=()), max_size=40)
accented = st.text(st.sampled_from("aé e\u0301\u0327ñ한각ﬁ½Åx \n\t\u00a0📷"), max_size=30)


def folded(text):
    return " ".join(unicodedata.normalize("NFKD", text).split())


def test_a_quotation_in_composed_letters_is_found_among_decomposed_ones_and_the_other_way_round():
    assert find_quote("cafe\u0301 is 3", "caf\u00e9") == (0, 5)
    assert find_quote("caf\u00e9 is 3", "cafe\u0301") == (0, 4)
    assert find_quote("한국 is 3", unicodedata.normalize("NFD", "한국")) == (0, 2)
    assert find_quote("the office is 3", "the oﬃce") == (0, 10)
    assert find_quote("q\u0323\u0307 = 3", "q\u0307\u0323 = 3") == (0, 7)  # marks in another order


def test_a_letter_is_never_cut_from_its_marks():
    assert find_quote("cafe\u0301 is 3", "cafe") is None
    assert find_quote("caf\u00e9 is 3", "cafe") is None
    assert find_quote("cafe\u0301 or cafe", "cafe") == (9, 13)
    assert find_quote("½ of it", "1") is None


def test_blanks_between_words_are_alike_and_those_around_do_not_count():
    assert find_quote("so  x\n= 3.", "  so x = 3 \n") == (0, 9)
    assert find_quote("a\u00a0b", "a b") == (0, 3)


def test_what_stands_there_letter_by_letter_wins_over_what_is_alike():
    assert find_quote("cafe\u0301 and caf\u00e9", "caf\u00e9") == (10, 14)


def test_a_quotation_that_stands_nowhere_or_twice_has_no_place():
    assert [find_quote("1+1=3, 1+1=3", quote) for quote in ("1+1=3", "1+1=2", "", " \n")] == [None] * 4
    assert find_quote("aaa", "aa") is None
    assert find_quote("é e\u0301", unicodedata.normalize("NFD", "é")) == (2, 4)
    assert find_quote("É É", "E\u0301") is None


def test_long_hostile_texts_end():
    assert find_quote("\u0301" * 100_000, "\u0301" * 50_000) is None
    assert find_quote(("a" * 99 + "\u0301") * 1000, "a" * 99) is None
    assert find_quote("(" * 100_000 + "é", "e\u0301") == (100_000, 100_001)
    assert find_quote("ﷺ" * 20_000, "x") is None


@given(any_text | accented, any_text | accented)
@example("e\u0301", "e")
@settings(max_examples=200, deadline=None)
def test_a_place_says_what_was_quoted(text, quote):
    place = find_quote(text, quote)
    if place is not None:
        start, stop = place
        assert 0 <= start < stop <= len(text)
        assert folded(text[start:stop]) == folded(quote)


@given(st.text(st.sampled_from("abcé\u0301한 "), min_size=1, max_size=12), st.sampled_from(["NFC", "NFD"]))
@settings(max_examples=100, deadline=None)
def test_a_text_is_found_in_itself_in_whatever_form(text, form):
    if text.strip():
        start, stop = find_quote(text, unicodedata.normalize(form, text))
        assert text[start:stop] == text.strip()


def test_units_of_utf_16_become_characters():
    assert utf16_to_code_points("📷 .@M", 3, 4) == (2, 3)
    assert utf16_to_code_points("📷 .@M", 0, 2) == (0, 1)
    assert utf16_to_code_points("abc", 1, 1) == (1, 1)
    assert utf16_to_code_points("📷", 2, 2) == (1, 1)


def test_units_outside_the_text_or_within_a_character_have_no_place():
    bad = [(0, 1), (1, 2), (0, 7), (-1, 2), (3, 2)]
    assert [utf16_to_code_points("📷 .@M", *place) for place in bad] == [None] * 5


@given(st.text(max_size=20), st.data())
@settings(max_examples=100, deadline=None)
def test_the_place_holds_the_same_text_in_both_counts(text, data):
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    units = [len(text[:end].encode("utf-16-le")) // 2 for end in (start, stop)]
    assert utf16_to_code_points(text, *units) == (start, stop)
