"""Laws of the chain verifiers: one answer is right, and each fault is found on its own characters."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample
from apportion.verifiers.chain import (
    DIGITS,
    OPERATORS,
    ChainAnswer,
    ChainFormat,
    ChainReversal,
    ChainSteps,
    ChainTruth,
    apply,
    parse_prompt,
)
from apportion.verifiers.chain_reading import TAGS, align

PROMPT = "7+9-a*1=?"
RIGHT = "[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]"
SYMBOLS = (*DIGITS, *OPERATORS, "=", "?", "\n", "<", ">", *TAGS)
# The layout as one pattern: the lenient reader and this must agree on what is right.
LAYOUT = re.compile(r"\[T\]([^\n\[\]]+\n)+\[/T\]\[A\][0-9a]\[/A\]")
VERIFIERS = {"steps": ChainSteps(), "truth": ChainTruth(), "answer": ChainAnswer(), "format": ChainFormat()}

prompts = st.builds(
    lambda first, rest: first + "".join(op + digit for op, digit in rest) + "=?",
    st.sampled_from(DIGITS),
    st.lists(st.tuples(st.sampled_from(OPERATORS), st.sampled_from(DIGITS[1:])), min_size=1, max_size=6),
)
symbol_texts = st.lists(st.sampled_from(SYMBOLS), max_size=40).map("".join)


def solve(prompt):
    """The one right answer and its digit, worked out slowly and on its own."""
    value, text = DIGITS.index(prompt[0]), "[T]"
    for place in range(1, len(prompt) - 2, 2):
        right = DIGITS.index(prompt[place + 1])
        result = {"+": value + right, "-": value - right, "*": value * right}[prompt[place]] % 11
        text += f"{DIGITS[value]}{prompt[place]}{DIGITS[right]}={DIGITS[result]}\n"
        value = result
    return f"{text}[/T][A]{DIGITS[value]}[/A]", DIGITS[value]


def ask(name, completion, prompt=PROMPT):
    return VERIFIERS[name]([Sample(prompt, completion, solve(prompt)[1])])[0]


def faults(name, completion):
    """Label, place and characters of everything judged wrong."""
    wrong = [span for span in ask(name, completion).spans if span.score < 0.5]
    return [(span.label, span.start, completion[span.start : span.stop]) for span in wrong]


@given(prompts)
def test_the_right_answer_is_right_everywhere(prompt):
    completion, _ = solve(prompt)
    for name in VERIFIERS:
        verdict = ask(name, completion, prompt)
        assert verdict.score == 1
        assert {span.score for span in verdict.spans} == {1.0}
    steps = ask("steps", completion, prompt).spans
    assert [completion[span.start : span.stop] for span in steps[:-1]] == completion[3:].split("\n")[:-1]
    assert completion[steps[-1].start :] == completion.split("\n")[-1]


# fault: the completion, then the characters at fault by the truth, then the indices of the steps at fault
FAULTS = {
    "wrong result": ("[T]7+9=4\n4-a=5\n5*1=5\n[/T][A]5[/A]", [("wrong result", 7, "4")], [0]),
    "wrong result in the middle": ("[T]7+9=5\n5-a=7\n7*1=7\n[/T][A]7[/A]", [("wrong result", 13, "7")], [1]),
    "wrong left operand": ("[T]7+9=5\n6-a=7\n7*1=7\n[/T][A]7[/A]", [("wrong left operand", 9, "6")], [1]),
    "wrong first operand": ("[T]8+9=6\n6-a=7\n7*1=7\n[/T][A]7[/A]", [("wrong left operand", 3, "8")], [0]),
    "wrong operator": ("[T]7+9=5\n5+a=4\n4*1=4\n[/T][A]4[/A]", [("wrong operator", 10, "+")], [1]),
    "wrong right operand": ("[T]7+9=5\n5-9=7\n7*1=7\n[/T][A]7[/A]", [("wrong right operand", 11, "9")], [1]),
    "two faults in a line": (
        "[T]7+9=5\n5-9=1\n1*1=1\n[/T][A]1[/A]",
        [("wrong right operand", 11, "9"), ("wrong result", 13, "1")],
        [1],
    ),
    "another answer": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]5[/A]", [("answer differs from the last result", 28, "5")], [3]),
    "extra step": ("[T]7+9=5\n5-a=6\n6*1=6\n6+0=6\n[/T][A]6[/A]", [("extra step", 21, "6+0=6")], [3]),
    "a step twice": ("[T]7+9=5\n7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]", [("extra step", 9, "7+9=5")], [1]),
    "skipped step": (
        "[T]7+9=5\n5*1=5\n[/T][A]5[/A]",
        [("skipped step", 10, "*"), ("skipped step", 11, "1")],
        [1],
    ),
    "missing last step": ("[T]7+9=5\n5-a=6\n[/T][A]6[/A]", [("missing step", 15, "[/T]")], [2]),
    "no steps": ("[T][/T][A]7[/A]", [("missing step", 3, "[/T]")], [0]),
    "malformed step": ("[T]7+9=5\n5-a\n6*1=6\n[/T][A]6[/A]", [("malformed step", 9, "5-a")], [1]),
    "empty line": ("[T]7+9=5\n\n5-a=6\n6*1=6\n[/T][A]6[/A]", [("empty line", 9, "\n")], [1]),
    "line break first": ("[T]\n7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]", [("empty line", 3, "\n")], [0]),
    "two digits": ("[T]7+9=55\n5-a=6\n6*1=6\n[/T][A]6[/A]", [("stray text", 8, "5")], [0]),
    "stray text before a step": ("[T]7+9=5\n=5-a=6\n6*1=6\n[/T][A]6[/A]", [("stray text", 9, "=")], [1]),
    "no line break between steps": ("[T]7+9=55-a=6\n6*1=6\n[/T][A]6[/A]", [("missing line break", 8, "5")], [1]),
    "no line break at the end": ("[T]7+9=5\n5-a=6\n6*1=6[/T][A]6[/A]", [("missing line break", 20, "[/T]")], [3]),
    "stray text first": (f"<{RIGHT}", [("stray text", 0, "<")], [0]),
    "text after the end": (f"{RIGHT}66", [("text after [/A]", 33, "66")], [3]),
    "a second answer": (f"{RIGHT}[A]6[/A]", [("text after [/A]", 33, "[A]6[/A]")], [3]),
    "text before the answer": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T]=[A]6[/A]", [("stray text", 25, "=")], [3]),
    "two answer digits": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]66[/A]", [("stray text", 29, "6")], [3]),
    "missing [T]": ("7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]", [("missing [T]", 0, "7")], [0]),
    "missing [/T]": ("[T]7+9=5\n5-a=6\n6*1=6\n[A]6[/A]", [("missing [/T]", 21, "[A]")], [3]),
    "missing [A]": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T]6[/A]", [("missing [A]", 25, "6")], [3]),
    "missing answer": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T][A][/A]", [("missing answer", 28, "[/A]")], [3]),
    "missing [/A]": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]6", [("missing [/A]", 29, "")], [3]),
    "cut off in the tail": ("[T]7+9=5\n5-a=6\n6*1=6\n", [("missing [/T]", 21, "")], [3]),
    "[T] twice": (f"[T]{RIGHT}", [("stray text", 3, "[T]")], [0]),
    "[T] again inside the chain": ("[T]7+9=5\n[T]5-a=6\n6*1=6\n[/T][A]6[/A]", [("stray text", 9, "[T]")], [1]),
    "[T] too late": (
        "7+9=5\n[T]5-a=6\n6*1=6\n[/T][A]6[/A]",
        [("missing [T]", 0, "7"), ("stray text", 6, "[T]")],
        [0, 1],
    ),
    "[/T] twice": ("[T]7+9=5\n5-a=6\n6*1=6\n[/T][/T][A]6[/A]", [("stray text", 25, "[/T]")], [3]),
    "tags in the wrong order": (
        "[T]7+9=5\n5-a=6\n6*1=6\n[A]6[/A][/T]",
        [("missing [/T]", 21, "[A]"), ("text after [/A]", 29, "[/T]")],
        [3],
    ),
    "empty completion": ("", [("missing step", 0, "")], [0]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_on_its_own_characters_and_in_its_own_step(kind):
    completion, characters, steps = FAULTS[kind]
    assert faults("truth", completion) == characters
    assert ask("truth", completion).score == 0
    verdict = ask("steps", completion)
    assert [index for index, span in enumerate(verdict.spans) if span.score < 0.5] == steps


FORMAT_FAULTS = {
    "missing [T]": [("missing [T]", 0, "7")],
    "missing [/T]": [("missing [/T]", 21, "[A]")],
    "missing [A]": [("missing [A]", 25, "6")],
    "missing answer": [("missing answer", 28, "[/A]")],
    "missing [/A]": [("missing [/A]", 29, "")],
    "[T] twice": [("misplaced [T]", 3, "[T]")],
    "[T] too late": [("missing [T]", 0, "7"), ("misplaced [T]", 6, "[T]")],
    "[/T] twice": [("stray text", 25, "[/T]")],
    "tags in the wrong order": [("missing [/T]", 21, "[A]"), ("text after [/A]", 29, "[/T]")],
    "empty line": [("empty line", 9, "\n")],
    "no line break at the end": [("missing line break", 20, "[/T]")],
    "text after the end": [("text after [/A]", 33, "66")],
    "stray text first": [("stray text", 0, "<")],
    "no steps": [("no lines", 3, "[/T]")],
    "empty completion": [("missing [T]", 0, "")],
    # What the lines say is not the format's business.
    "wrong result": [],
    "malformed step": [],
    "extra step": [],
    "missing last step": [],
}


@pytest.mark.parametrize("kind", FORMAT_FAULTS)
def test_the_format_is_at_fault_where_the_layout_breaks_and_nowhere_else(kind):
    completion = FAULTS[kind][0]
    assert faults("format", completion) == FORMAT_FAULTS[kind]
    assert ask("format", completion).score == float(not FORMAT_FAULTS[kind])


def test_the_tags_of_a_right_answer_are_the_spans_of_the_format():
    assert [RIGHT[span.start : span.stop] for span in ask("format", RIGHT).spans] == list(TAGS)


def test_a_missing_tag_leaves_the_other_tags_right():
    spans = ask("format", "7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]").spans
    assert [(span.label, span.score) for span in spans] == [("missing [T]", 0), ("tag", 1), ("tag", 1), ("tag", 1)]


def test_the_score_of_the_steps_is_their_share_with_those_left_out():
    assert ask("steps", "[T]7+9=4\n4-a=5\n5*1=5\n[/T][A]5[/A]").score == 3 / 4
    assert ask("steps", "[T]7+9=5\n[/T][A]5[/A]").score == 1 / 4  # one of three steps, the tail wrong
    assert ask("steps", "").score == 0
    assert ask("steps", "[T]7+9=5\n7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]").score == 4 / 5


@pytest.mark.parametrize("wrong", range(4))
def test_a_wrong_result_leaves_every_other_step_right(wrong):
    """Whatever one line states, the lines that go on from it are right."""
    prompt, values = "3*4+a-2*9=?", ["3"]
    operations = parse_prompt(prompt)[1]
    lines = []
    for index, (operator, right) in enumerate(operations):
        result = apply(operator, values[-1], right)
        values.append(apply("+", result, "5") if index == wrong else result)
        lines.append(f"{values[-2]}{operator}{right}={values[-1]}\n")
    verdict = ask("steps", f"[T]{''.join(lines)}[/T][A]{values[-1]}[/A]", prompt)
    assert [span.score for span in verdict.spans] == [float(index != wrong) for index in range(5)]


def test_a_step_left_out_or_put_in_leaves_the_steps_after_it_right():
    prompt = "3*4+a-2*9=?"
    chain, rest = solve(prompt)[0].split("[/T]")
    lines = chain.removeprefix("[T]").splitlines(keepends=True)
    for place in range(4):
        put_in = "".join([*lines[:place], "1+1=2\n", *lines[place:]])
        scores = [span.score for span in ask("steps", f"[T]{put_in}[/T]{rest}", prompt).spans]
        # The line after may be at fault for its left operand alone: 2 was stated.
        assert scores[: place + 1] == [1.0] * place + [0.0]
        assert scores[place + 2 :] == [1.0] * (4 - place)
    for place in range(3):
        left_out = "".join([*lines[:place], *lines[place + 1 :]])
        scores = [span.score for span in ask("steps", f"[T]{left_out}[/T]{rest}", prompt).spans]
        assert scores == [float(index != place) for index in range(4)]


def test_the_answer_counts_in_the_right_layout_only_unless_lenient():
    lenient = ChainAnswer(strict=False)
    loose = "so [A]6[/A]"
    assert [v([Sample(PROMPT, loose, "6")])[0].score for v in (ChainAnswer(), lenient)] == [0.0, 1.0]
    wrong = RIGHT.replace("[A]6", "[A]5")
    assert [v([Sample(PROMPT, wrong, "6")])[0].score for v in (ChainAnswer(), lenient)] == [0.0, 0.0]
    assert lenient([Sample(PROMPT, "[A]3[/A][A]6[/A]", "6")])[0].spans[0].start == 11  # the last one counts


def test_without_a_reference_the_answer_is_not_judged():
    assert ChainAnswer()([Sample(PROMPT, RIGHT)])[0].score is None


def test_reversal_is_exact():
    samples = [Sample("<12a0>", text, "0a21") for text in ("[A]0a21[/A]", "[A]0a21[/A]\n", "0a21", "")]
    assert [verdict.score for verdict in ChainReversal()(samples)] == [1, 0, 0, 0]


@pytest.mark.parametrize("prompt", ["", "7=?", "7+9", "What is 7 + 9?", "7+9-b=?", "7+9=?\n", " 7+9=?"])
def test_another_prompt_is_refused_with_the_remedy(prompt):
    for name in ("steps", "truth"):
        with pytest.raises(InputError, match=r"is not a chain.*verifier@verifiers\.answer=number"):
            VERIFIERS[name]([Sample(prompt, RIGHT, "6")])


def check_any(prompt, completion):
    right = solve(prompt)[0]
    for name in VERIFIERS:
        verdict = ask(name, completion, prompt)
        assert 0 <= verdict.score <= 1
        for span in verdict.spans:
            assert 0 <= span.start <= span.stop <= len(completion)
        if name != "answer":  # pieces in order that do not overlap; each verdict is wrong where a piece is
            pairs = list(zip(verdict.spans, verdict.spans[1:]))
            assert name == "format" or all(a.stop <= b.start for a, b in pairs)
            assert (verdict.score == 1) == all(span.score == 1 for span in verdict.spans)
    assert (ask("steps", completion, prompt).score == 1) == (completion == right)
    assert (ask("truth", completion, prompt).score == 1) == (completion == right)
    assert (ask("format", completion, prompt).score == 1) == bool(LAYOUT.fullmatch(completion))
    steps, truth = ask("steps", completion, prompt).spans, ask("truth", completion, prompt).spans
    for place, step in enumerate(steps):  # a step is wrong exactly where one of its characters is
        later = {one.start for one in steps[place + 1 :]}  # what is missing where the next step begins is missing there
        inside = [span for span in truth if step.start <= span.start and span.stop <= step.stop]
        inner = [span for span in inside if not (span.start == span.stop == step.stop and span.start in later)]
        assert step.score == min(span.score for span in inner)


@given(prompts, st.one_of(st.text(max_size=60), symbol_texts))
@example("7+9=?", "[T]\r\n7+9=5\x85[/T][A]\u0666[/A]")
@example("7+9=?", "[[T]7+9=5\n[/T]][A]5[/A]")
@example("0+1+1=?", "0+1=1\n1+1=2")  # the tail is missing, and would begin where the last line ends
def test_any_text_is_judged_inside_itself(prompt, completion):
    check_any(prompt, completion)


@settings(max_examples=300)
@given(st.data())
def test_any_edit_of_the_right_answer_is_at_fault_somewhere(data):
    prompt = data.draw(prompts)
    pieces = re.findall(r"\[/?[TA]\]|.|\n", solve(prompt)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(pieces)))
        removed = data.draw(st.integers(0, 2))
        pieces[place : place + removed] = data.draw(st.lists(st.sampled_from(SYMBOLS), max_size=2))
    check_any(prompt, "".join(pieces))


@pytest.mark.parametrize("piece", ["7+9=5\n", "[T]", "[/T][/T]", "5-a=66*1=6", "7", "[", "".join(SYMBOLS)])
def test_a_long_text_is_judged_in_linear_time(piece):
    seconds = []
    for size in (4_000, 40_000):
        text = (piece * size)[:size]
        began = time.process_time()
        for name in VERIFIERS:
            ask(name, text)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 30 * seconds[0] + 1.0


def test_the_pairing_is_the_cheapest_and_the_earliest():
    def cost(found, wanted):
        return 0 if found == wanted else 4

    assert align("abc", "abc", cost) == [0, 1, 2]
    assert align("ac", "abc", cost) == [0, 2]
    assert align("axc", "abc", cost) == [0, 1, 2]
    assert align("aa", "a", cost) == [0, None]
    assert align("a", "aa", cost) == [0]
    assert align("", "ab", cost) == []
    assert align("ab", "", cost) == [None, None]
