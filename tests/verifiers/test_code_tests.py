"""Forms in which tests for code are given: what counts as a test, and which output is the expected one."""

import pytest

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.code_tests import Programs, Unit, read_tests, same_output
from apportion.verifiers.panel import judge
from apportion.verifiers.python_tests import PythonTests

SQUARE = "def f(x):\n    return x * x\n"
TESTS = "assert f(2) == 4\nassert f(3) == 9"


@pytest.mark.parametrize(
    ("tests", "entry_point", "units"),
    [
        (TESTS, None, [("assert f(2) == 4", True), ("assert f(3) == 9", True)]),
        ("x = f(2)\nassert x == 4", None, [("x = f(2)", False), ("assert x == 4", True)]),
        ("assert True, 'free'\nassert f(2)", None, [("assert True, 'free'", False), ("assert f(2)", True)]),
        ("for i in (1, 2):\n    assert f(i)", None, [("for i in (1, 2):\n    assert f(i)", True)]),
        ("try:\n    f(1)\n    assert False, 'no'\nexcept ValueError:\n    assert f(2) == 4", None, None),
        (
            "def check(candidate):\n    x = 1\n    assert candidate(x)\n    assert candidate(2)",
            "f",
            [("x = 1", False), ("assert candidate(x)", True), ("assert candidate(2)", True)],
        ),
        (
            "def check(candidate):\n    if not candidate(1):\n        return\n    assert candidate(2)",
            "f",
            [
                ("def check(candidate):\n    if not candidate(1):\n        return\n    assert candidate(2)", False),
                ("check(candidate)", True),
            ],
        ),
        (
            "def check(g):\n    assert g(1)\ncheck(f)",
            "f",
            [("def check(g):\n    assert g(1)", False), ("check(f)", True)],
        ),
        (
            "def test_a():\n    assert f(1)\ndef helper(): pass",
            None,
            [("def test_a():\n    assert f(1)", False), ("def helper():\n    pass", False), ("test_a()", True)],
        ),
        (
            "if __name__ == '__main__':\n    assert f(9)\nassert f(1)",
            None,
            [("assert f(1)", True)],
        ),
        (
            ["import math\nassert f(1)", "assert f(2)"],
            None,
            [("import math\nassert f(1)", True), ("assert f(2)", True)],
        ),
    ],
)
def test_a_text_is_split_into_the_tests_it_holds(tests, entry_point, units):
    suite = read_tests(tests, entry_point)
    if units is None:
        assert [unit.counts for unit in suite.units] == [True]
    else:
        assert list(suite.units) == [Unit(*unit) for unit in units]


@pytest.mark.parametrize(
    "tests", [None, "", "x = 1", [], "def helper():\n    assert f(1)", "assert True", "# assert f(2) == 4"]
)
def test_without_a_test_there_is_no_score(tests):
    assert read_tests(tests, "f") is None
    sample = Sample("", SQUARE, metadata={"tests": tests, "entry_point": "f"})
    assert PythonTests()([sample]) == [Verdict(None)]


@pytest.mark.parametrize(
    ("tests", "entry_point", "words"),
    [
        ("assert f(2) ==", None, "tests: line 1 is no Python"),
        ("assert f('\0')", None, "no Python"),
        (3, None, "tests: int is no form of tests"),
        ({"input": "1"}, None, "tests: .* is no form of tests"),
        ([{"input": "1", "output": "1"}, "assert f(1)"], None, "tests: the list mixes forms"),
        ([{"in": "1", "out": "1"}], None, "tests: a mapping wants the keys"),
        ([{"args": [1], "output": 1}], None, "give the column entry_point"),
        ([{"input": "1", "output": ""}], "f", "test a whole program, not f\\(\\)"),
        ([{"args": "1", "output": 1}], "f", "tests: args is '1'; give a list"),
        ([{"input": 1, "output": "1"}], None, "tests: input is a int; give a text"),
        ("assert f(2)", "f(x)", "entry_point: 'f\\(x\\)' is no name"),
    ],
)
def test_tests_that_cannot_be_read_are_a_fault_of_their_own(tests, entry_point, words):
    with pytest.raises(InputError, match=words):
        read_tests(tests, entry_point)
    sample = Sample("", SQUARE, metadata={"tests": tests, "entry_point": entry_point})
    result = judge({"it": PythonTests()}, [sample])
    assert (result.verdicts[0]["it"].score, result.errors["it"]) == (None, 1)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1\n2", "1", False),
        ("1\n2", "1 \n2\n\n", True),
        ("1 2", "12", False),
        ("", "debug", False),
        ("1\n2", "1\n2\n3", False),
        ("1\n2", "1\r\n2\r\n", True),
        ("1\n\n2", "1\n2", False),
        ("1", "\n1", False),
        (" 1", "1", False),
        ("1  2", "1 2", False),
        ("", "", True),
        ("", " \n\t\n", True),
        ("0.5", ".5", False),
        ("a\x0cb", "a\nb", False),
    ],
)
def test_white_space_is_free_at_the_ends_and_nowhere_else(expected, printed, same):
    assert same_output(expected, printed) is same


def test_inputs_and_outputs_are_kept_outside():
    tests = [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]
    assert read_tests(tests) == Programs(("1", "3"), ("2", "4"))
