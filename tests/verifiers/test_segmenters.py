import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError
from apportion.verifiers.segmenters import BlankLines, Lines, NumberedSteps, Sentences, tile

SEGMENTERS = [Lines(), Lines(lone_cr=True), BlankLines(), NumberedSteps(), NumberedSteps(mode="list"), Sentences()]
FRAGMENTS = ["Step 1:", "Step 2.", "1.", "2)", "\n", "\r\n", "\r", " ", "\t", "```", "~~~~", "$$", r"\[", r"\]", "\\\\"]
FRAGMENTS += [
    r"\begin{align}",
    r"\end{align}",
    r"\end{cases}",
    "e.g.",
    "2.5",
    "...",
    "?)",
    "。",
    "\u2028",
    "a",
    "Ω💩",
    "**",
]
any_text = st.text() | st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
law = settings(derandomize=True, deadline=None, max_examples=200)


def pieces(segmenter, text):
    return [text[start:stop] for start, stop in segmenter(text)]


@pytest.mark.parametrize("segmenter", SEGMENTERS, ids=repr)
@law
@given(text=any_text)
def test_steps_are_ordered_disjoint_inside_and_hold_content_only(segmenter, text):
    steps = segmenter(text)
    edges = [0, *(edge for step in steps for edge in step), len(text)]
    assert edges == sorted(edges)
    assert all(text[start:stop].strip() == text[start:stop] != "" for start, stop in steps)


@pytest.mark.parametrize("segmenter", SEGMENTERS, ids=repr)
@law
@given(text=any_text)
def test_tiles_give_the_text_back_and_each_holds_its_step(segmenter, text):
    steps = segmenter(text)
    tiles = tile(text, steps)
    assert "".join(text[start:stop] for start, stop in tiles) == text
    assert all(start < stop for start, stop in tiles)
    assert len(tiles) == max(len(steps), bool(text))
    assert all(a <= start and stop <= b for (start, stop), (a, b) in zip(steps, tiles))


@pytest.mark.parametrize("segmenter", [s for s in SEGMENTERS if not isinstance(s, NumberedSteps)], ids=repr)
@law
@given(text=any_text)
def test_only_blanks_lie_between_steps(segmenter, text):
    steps = segmenter(text)
    edges = [0, *(edge for step in steps for edge in step), len(text)]
    assert all(text[start:stop].strip() == "" for start, stop in zip(edges[::2], edges[1::2]))


@pytest.mark.parametrize("segmenter", [Lines(), BlankLines()], ids=repr)
def test_blank_pieces_are_no_steps(segmenter):
    texts = ["", " ", "one step", "a\n\nb\n\n", "a\r\n\r\nb", "💩\n\n答案"]
    assert [len(segmenter(text)) for text in texts] == [0, 0, 1, 2, 2, 2]


def test_separators_belong_to_the_step_before_and_leading_text_to_the_first():
    text = "Well.\nStep 1: a\n\nStep 2: b\n"
    steps = NumberedSteps()(text)
    assert [text[start:stop] for start, stop in steps] == ["Step 1: a", "Step 2: b"]
    assert [text[start:stop] for start, stop in tile(text, steps)] == ["Well.\nStep 1: a\n\n", "Step 2: b\n"]


def test_a_text_without_steps_is_one_tile_and_the_empty_text_none():
    assert (tile(" \n", []), tile("", [])) == ([(0, 2)], [])


@pytest.mark.parametrize("steps", [[(2, 3), (0, 1)], [(0, 3), (2, 4)], [(0, 5)], [(1, 1)], [(-1, 2)], [(2, 1)]])
def test_steps_that_do_not_fit_the_text_are_refused(steps):
    with pytest.raises(ValueError, match="in order"):
        tile("abcd", steps)


def test_a_token_across_the_separator_belongs_to_one_step():
    text = "Step 1: add 2.\nStep 2: get 4."
    tokens = ["Step", " 1", ":", " add", " 2", ".\n", "Step", " 2", ":", " get", " 4", "."]
    steps = NumberedSteps()(text)
    assert steps == [(0, 14), (15, 29)]
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    owners = [[i for i, at in enumerate(starts) if start <= at < stop] for start, stop in tile(text, steps)]
    assert owners == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_steps_are_found_in_the_joined_text_whatever_its_tokens():
    text = "a.\n\nb.\n\n"
    assert BlankLines()(text) == [(0, 2), (4, 6)]
    tiles = tile(text, BlankLines()(text))
    for tokens in (["a", ".\n\n", "b", ".\n\n"], ["a", ".", "\n\n", "b", ".", "\n\n"]):
        ends = [sum(map(len, tokens[: i + 1])) for i in range(len(tokens))]
        assert [ends.index(stop) for _, stop in tiles] == [len(tokens) // 2 - 1, len(tokens) - 1]


def test_only_newlines_end_a_line():
    assert len(Lines()("a\u2028b\x0bc\fd\x85e\x1ef")) == 1
    assert pieces(Lines(), "a\rb\r\nc") == ["a\rb", "c"]
    assert pieces(Lines(lone_cr=True), "a\rb\r\nc") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("A.\n\n```python\na = 1\n\nb = 2\n```\n\nB.", [(0, 2), (4, 30), (32, 34)]),
        ("We have\n\\begin{align}\nx&=1\\\\\n\ny&=2\n\\end{align}\nso done.\n\nAnswer 3.", [(0, 55), (57, 66)]),
    ],
)
def test_blank_lines_inside_a_block_do_not_cut(text, steps):
    assert BlankLines()(text) == steps


@pytest.mark.parametrize(
    "block",
    [
        "$$\nx\n\ny\n$$",
        "\\[\nx\n\ny\n\\]",
        "~~~\nx\n\ny\n~~~",
        "````\n```\n\n```\n````",
        "  ```py\n  x\n\n  y\n  ```",
        "\\begin{a}\n\\begin{a}\n\\end{a}\n\nx\n\\end{a}",
        "\\begin{align*}\nx \\\\[2pt]\n\ny\n\\end{align*}",
        "```\n$$\n\n\\begin{x}\n```",
    ],
)
def test_a_block_is_one_piece_and_what_follows_is_cut_again(block):
    assert pieces(BlankLines(), f"A\n\n{block}\n\nB\n\nC") == ["A", block.strip(), "B", "C"]


@pytest.mark.parametrize(
    "mark", [r"\[", "$$", r"\begin{align}", r"\end{align}", r"\]", "`` ` ``", "```inline```", "\\\\[2pt]"]
)
def test_an_unclosed_formula_protects_nothing(mark):
    assert pieces(BlankLines(), f"A {mark}\n\nB\n\nC") == [f"A {mark}", "B", "C"]


def test_an_unclosed_fence_runs_to_the_end():
    assert pieces(BlankLines(), "A\n\n```\nx\n\ny") == ["A", "```\nx\n\ny"]


def test_lines_of_blanks_separate_paragraphs():
    assert pieces(BlankLines(), "A\n \t\u00a0\nB\r\n\r\nC\nD") == ["A", "B", "C\nD"]


def test_marker_words_in_running_text_are_no_step_starts():
    text = "Step 1: use Step 2 of the hint.\nStep 2: done.\nStep 10: extra."
    assert NumberedSteps()(text) == [(0, 31), (32, 45), (46, 61)]
    assert len(NumberedSteps()("Step 1: a\nStep 2 of the hint\nStepping 3: b\nStep x: c\nmisstep 4: d")) == 1


def test_decimals_are_no_list_numbers():
    assert NumberedSteps(mode="list")("1. Add 2.5 and 3.\n2. Get 5.5.\n10. Done.") == [(0, 17), (18, 29), (30, 39)]
    assert len(NumberedSteps(mode="list")("1. Take\n2.5 and\n3.5\nin\n2024. Then\n4.x")) == 1


def test_markdown_around_the_number_is_part_of_the_step():
    text = "Intro\n**Step 1:** a\n### Step 2: b\n  step 3. c\n**Step 4**: d"
    assert pieces(NumberedSteps(), text) == ["**Step 1:** a", "### Step 2: b", "step 3. c", "**Step 4**: d"]
    assert pieces(NumberedSteps(mode="list"), "**1.** a\n2) b\n3.") == ["**1.** a", "2) b", "3."]


def test_numbers_inside_code_are_no_steps():
    code = "```\n1. x\n# Step 9: y\n```"
    assert pieces(NumberedSteps(mode="list"), f"1. a\n{code}\n2. b") == [f"1. a\n{code}", "2. b"]
    assert pieces(NumberedSteps(), f"Step 1: a\n{code}\nStep 2: b") == [f"Step 1: a\n{code}", "Step 2: b"]


def test_a_text_without_numbers_is_one_step():
    assert pieces(NumberedSteps(), " So it is. \n\nYes.\n") == ["So it is. \n\nYes."]


def test_an_unknown_mode_is_refused():
    with pytest.raises(InputError, match="mode: 'roman'"):
        NumberedSteps(mode="roman")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("1) Take the sum. 2) Halve it.", ["1) Take the sum.", "2) Halve it."]),
        ("1. Add 2.5 and 3.\n2. Get 5.5.\n10. Done.", ["1. Add 2.5 and 3.", "2. Get 5.5.", "10. Done."]),
        ("1. Add. 2. Halve it.", ["1. Add.", "2. Halve it."]),
        ("We get 42. Then 3.14 is left.", ["We get 42.", "Then 3.14 is left."]),
        (
            "Use primes, e.g. 7, i.e. odd ones (e.g. 3) etc. and go. Done",
            ["Use primes, e.g. 7, i.e. odd ones (e.g. 3) etc. and go.", "Done"],
        ),
        ('He said "Stop." Then? Yes! Ok...', ['He said "Stop."', "Then?", "Yes!", "Ok..."]),
        ("So 5! = 120 and x.y is one.", ["So 5! = 120 and x.y is one."]),
        ("No point\nhere either", ["No point", "here either"]),
        ("先加二。再减一！好", ["先加二。", "再减一！", "好"]),
        ("See \\[ x. y. \\] now. End.", ["See \\[ x. y. \\] now.", "End."]),
    ],
)
def test_sentences(text, sentences):
    assert pieces(Sentences(), text) == sentences


def test_abbreviations_are_the_callers_choice():
    assert pieces(Sentences(abbreviations=("ca",)), "It is ca. 5 e.g. six.") == ["It is ca. 5 e.g.", "six."]


@pytest.mark.parametrize(
    "unit",
    [
        "\n",
        " \n",
        ".",
        '."',
        "e.g. ",
        "1. ",
        "1.\n",
        "Step 1:\n",
        "```\n",
        "`",
        "$$",
        "\\[",
        "\\begin{a}",
        "\\end{a}",
        "\\",
    ],
)
def test_long_hostile_texts_are_tiled(unit):
    text = unit * (100_000 // len(unit)) + "x"
    for segmenter in SEGMENTERS:
        tiles = tile(text, segmenter(text))
        assert (tiles[0][0], tiles[-1][1]) == (0, len(text))


def test_paragraphs_that_are_no_steps_are_left_out():
    text = "Solution\n\nFirst.\n\n Solution \n\nSecond."
    steps = BlankLines(ignore=("Solution",))(text)
    assert [text[start:stop] for start, stop in steps] == ["First.", "Second."]


def test_lines_that_are_no_steps_are_left_out():
    text = "<think>\n1 + 1 = 2\n  </think> \n<answer>2</answer>"
    steps = Lines(ignore=("<think>", "</think>"))(text)
    assert [text[start:stop] for start, stop in steps] == ["1 + 1 = 2", "<answer>2</answer>"]
