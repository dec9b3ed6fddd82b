"""Laws of cutting by whole steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm import StepExample
from apportion.prm.rows import join_steps
from apportion.prm.truncation import truncate
from apportion.verifiers import InputError


def example_of(texts, labels=None, prompt="problem", separator="\n"):
    completion, steps = join_steps(texts, separator)
    return StepExample(prompt, completion, steps, tuple(labels or [1.0] * len(texts)), "p", {"k": 1})


def characters(prompt, completion):
    return len(prompt) + len(completion)


def words(prompt, completion):
    return len((prompt + " " + completion).split())


def test_the_first_two_of_four_steps_keep_their_own_labels():
    example = example_of(["one 1", "two 2", "three 3", "four 4"], [1.0, 1.0, 0.0, 0.0])
    cut = truncate(example, 5, words)
    assert (cut.completion, cut.steps, cut.labels) == ("one 1\ntwo 2", ((0, 5), (6, 11)), (1.0, 1.0))
    assert (cut.prompt, cut.problem_id, cut.metadata) == ("problem", "p", {"k": 1})


def test_what_fits_is_the_same_object_with_its_trailing_text():
    example = StepExample("p", "a = 1\n\n", ((0, 5),), (1.0,), "p")
    assert truncate(example, 8, characters) is example
    assert truncate(example, 7, characters).completion == "a = 1"


@pytest.mark.parametrize("max_length", [1, 8, 10, 12])
def test_a_prompt_that_leaves_no_room_for_a_step_leaves_nothing(max_length):
    example = example_of(["abc", "def"], prompt="ten tokens")  # 10 characters, then 3 + 1 + 3
    assert truncate(example, max_length, characters) is None
    assert truncate(example, 13, characters).step_texts == ["abc"]
    assert truncate(example, 16, characters).step_texts == ["abc"]
    assert truncate(example, 17, characters).step_texts == ["abc", "def"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=12),
    st.sampled_from(["\n", "\n\n", " ки "]),
    st.data(),
)
def test_it_is_the_longest_run_that_a_slow_search_finds(texts, separator, data):
    example = example_of(texts, [float(i % 2) for i in range(len(texts))], separator=separator)
    limit = data.draw(st.integers(1, characters(example.prompt, example.completion) + 1))
    fitting = [k for k in range(1, len(texts) + 1) if 7 + example.steps[k - 1][1] <= limit]
    cut = truncate(example, limit, characters)
    if not fitting:
        assert cut is None
    else:
        kept = fitting[-1]
        assert (cut.steps, cut.labels) == (example.steps[:kept], example.labels[:kept])
        assert example.completion.startswith(cut.completion)
        assert characters(cut.prompt, cut.completion) <= limit


def test_the_whole_text_is_measured_and_few_times():
    calls = []

    def length(prompt, completion):
        calls.append((prompt, completion))
        return len(prompt + completion)

    example = example_of([f"step {number}" for number in range(1000)])
    cut = truncate(example, 4000, length)
    assert len(calls) <= 12
    assert all(prompt == "problem" and example.completion.startswith(text) for prompt, text in calls)
    assert len("problem" + cut.completion) <= 4000 < len("problem" + cut.completion + "\nstep 400")


def test_a_limit_below_one_is_refused():
    with pytest.raises(InputError, match=r"max_length=0: give a number of tokens from 1 on"):
        truncate(example_of(["a"]), 0, characters)
