"""Numbered steps are paid where they say something, and only once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample
from apportion.verifiers.step_markers import StepMarkers


def steps(text, **options):
    (it,) = StepMarkers(**options)([Sample("", text)])
    return it.score, [(text[span.start : span.stop], span.label) for span in it.spans if span.score < 1]


@pytest.mark.parametrize(
    ("text", "mode", "paid"),
    [
        ("Step 1: a\nStep 2: b\nStep 3: c", "step", 1.0),
        ("Step 1: a\nStep 2: b\nStep 3: c\nStep 4: d", "step", 1.0),
        ("**Step 1**: a\n### Step 2: b", "step", 2 / 3),
        ("1. a\n2. 3 * 4 = 12\n10. c", "list", 1.0),
        ("First, Second, Next, Finally, First, Second", "step", 0.0),
        ("First, Second, Next, Finally, First, Second", "list", 0.0),
        ("1. 1. 1. 1. 1.", "list", 0.0),
        ("1. 1. 1. 1. 1.", "step", 0.0),
        ("1. 2. 3.\n2. -\n3.", "list", 0.0),
        ("Step 1:\nStep 2:\nStep 3:", "step", 0.0),
        ("Step 1: Step 2: Step 3: Step 4:", "step", 0.0),
        ("Step 1: a\nStep 1: b\nStep 1: c", "step", 1 / 3),
        ("Step 3: a\nStep 2: b\nStep 1: c", "step", 1 / 3),
        ("Step 1: a Step 2: b Step 3: c", "step", 1 / 3),
        ("Step 1: a\nStep 2: b\nStep 3: c", "list", 0.0),
        ("", "step", 0.0),
        (f"Step {'9' * 5000}: a", "step", 1 / 3),
    ],
)
def test_only_steps_with_text_and_a_rising_number_are_paid(text, mode, paid):
    assert steps(text, mode=mode)[0] == pytest.approx(paid)


def test_a_farmed_step_is_located():
    assert steps("Step 1: a\nStep 1: b\nStep 2:") == (
        1 / 3,
        [("Step 1: b", "number does not rise"), ("Step 2:", "step without text")],
    )


def test_steps_that_cannot_be_counted_are_refused():
    with pytest.raises(InputError, match=r"^wanted: 0"):
        StepMarkers(wanted=0)
    with pytest.raises(InputError, match=r"^mode: 'words'"):
        StepMarkers(mode="words")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text() | st.lists(st.sampled_from(["Step ", "1", "2", ":", "\n", "add", ".", "```\n"])).map("".join))
def test_any_text_is_judged(text):
    (it,) = StepMarkers()([Sample("", text)])
    assert it.score == min(1.0, sum(span.score for span in it.spans) / 3)
    assert all(0 <= span.start < span.stop <= len(text) for span in it.spans)
