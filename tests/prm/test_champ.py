"""CHAMP: the mapping on a package made up here, and the counts of the real one where it is installed."""

import sys
from types import SimpleNamespace

import pytest

from apportion.prm.champ import champ, load_champ
from apportion.prm.data import split_by_problem
from apportion.verifiers import InputError
from apportion.verifiers.segmenters import BlankLines, Lines

SOLUTION = "First 1+1=2.\n\nThen 2+1=4,\nwhich is even.\n\nSo 4."


def mark(start=None, stop=None, text=SOLUTION):
    return SimpleNamespace(text=text, start_idx=start, end_idx=stop, author="a model")


@pytest.fixture
def package(monkeypatch):
    def install(**marks):
        problem = SimpleNamespace(
            identifier="P_1", text="1+1+1=?", answer="3", category="Sums", fws_annotations=marks or None
        )
        bare = SimpleNamespace(identifier="P_2", text="?", answer="1", category="Sums", fws_annotations=None)
        data = SimpleNamespace(problems={"P_1": problem, "P_2": bare})
        monkeypatch.setitem(sys.modules, "champ_dataset", SimpleNamespace(load={"v0": data}.__getitem__))

    return install


def test_steps_are_right_before_the_mark_wrong_at_it_and_unknown_after(package):
    place = SOLUTION.index("2+1=4")
    package(first=mark(place, place + 5), none=mark())
    wrong, right = load_champ()
    assert wrong.step_texts == ["First 1+1=2.", "Then 2+1=4,\nwhich is even.", "So 4."]
    assert (wrong.labels, right.labels) == ((1.0, 0.0, None), (1.0, 1.0, 1.0))
    assert (wrong.prompt, wrong.completion, wrong.problem_id) == ("1+1+1=?", SOLUTION, "P_1")
    assert wrong.metadata == {"author": "a model", "condition": "first", "category": "Sums", "reference": "3"}


@pytest.mark.parametrize(
    ("start", "stop", "labels"),
    [
        (0, 1, (0.0, None, None)),
        (0, len(SOLUTION), (0.0, None, None)),
        (12, 20, (1.0, 0.0, None)),  # from the end of one paragraph into the next
        (11, 20, (0.0, None, None)),  # the last character of the first paragraph is its own
        (len(SOLUTION) - 1, len(SOLUTION), (1.0, 1.0, 0.0)),
    ],
)
def test_a_mark_over_several_steps_makes_the_first_of_them_wrong(package, start, stop, labels):
    package(it=mark(start, stop))
    assert [example.labels for example in load_champ()] == [labels]


def test_another_segmenter_cuts_other_steps(package):
    place = SOLUTION.index("which")
    package(it=mark(place, place + 5))
    assert [example.labels for example in load_champ(segmenter=Lines())] == [(1.0, 1.0, 0.0, None)]


def test_a_mark_that_touches_no_step_is_a_bad_row_with_its_place(package):
    package(it=mark(12, 14), other=mark())
    with pytest.raises(
        InputError, match=r"^CHAMP v0, P_1, it: the marked mistake 12 to 14 touches no step \['1\+1\+1=\?'\]"
    ):
        list(load_champ())
    data = load_champ(on_bad_row="skip")
    assert (len(list(data)), data.report.skipped) == (1, {"wrong_spans": 1})


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "champ_dataset", None)
    with pytest.raises(InputError, match=r"pip install 'apportion\[data\]'"):
        list(load_champ())


@pytest.mark.integration
def test_the_real_package_has_the_counts_it_is_known_by():
    pytest.importorskip("champ_dataset")
    data = load_champ()
    examples = list(data)
    first_wrong = [example.labels.index(0.0) for example in examples if 0.0 in example.labels]
    assert (len(examples), len(first_wrong)) == (540, 444)
    assert len({example.problem_id for example in examples}) == 270
    # One paragraph more than where only "\n\n" cuts: one blank line of the data has a space in it.
    assert (data.report.steps, data.report.right, data.report.wrong) == (7999, 3211, 444)
    assert [first_wrong.count(step) for step in range(10)] == [59, 75, 65, 47, 38, 31, 27, 17, 15, 14]
    train, held_out = split_by_problem(examples, 0.2, seed=0)
    assert not {one.problem_id for one in train} & {one.problem_id for one in held_out}


def test_a_row_is_read_by_a_plain_function():
    row = {"problem_id": "P", "problem": "?", "solution": "a\n\nb", "wrong": (3, 4), "author": "x"}
    (example,) = champ(row, segmenter=BlankLines())
    assert (example.labels, example.metadata) == ((1.0, 0.0), {"author": "x"})
