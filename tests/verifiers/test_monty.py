"""Tests in Monty: the same verdicts where it can run the code, and none where it cannot."""

import pytest

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.monty import MontyError
from apportion.verifiers.panel import judge
from apportion.verifiers.python_tests import PythonTests

pytest.importorskip("pydantic_monty")

TESTS = "assert f(2) == 4\nassert f(3) == 9"


def reply(code, tests=TESTS, entry_point=None, prompt="", **options):
    metadata = {"tests": tests} | ({"entry_point": entry_point} if entry_point else {})
    (found,) = PythonTests(engine="monty", **options)([Sample(prompt, code, metadata=metadata)])
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "expected"),
    [
        ("def f(x): return x * x", TESTS, None, 1.0),
        ("def f(x): return x + x", TESTS, None, 0.5),
        (
            "def f(x): return x * x",
            "def check(candidate):\n    assert candidate(2) == 4\n    assert f(3) == 8",
            "f",
            0.5,
        ),
        ("def f(x): return (x, [x])", [{"args": [2], "output": [2, [2]]}, {"args": [3], "output": 3}], "f", 0.5),
        (
            "def f(x): raise KeyError('no')",
            "try:\n    f(1)\n    assert 1 == f(1)\nexcept KeyError:\n    pass",
            None,
            1.0,
        ),
        ("def g(x): return x", TESTS, "f", 0.0),
        ("import math\nN = 3\ndef f(x): return x * x", "assert math.sqrt(f(2)) == 2.0\nassert N == 3", None, 1.0),
        ("def f(xs): return sorted(xs)", "assert f([2, 1]) == [1, 2]\nassert f({2: 0, 1: 0}) == [1, 2]", None, 1.0),
        ("print('x' * 10**5)\ndef f(x): return x * x", TESTS, None, 1.0),
    ],
)
def test_the_score_is_the_share_of_tests_passed(code, tests, entry_point, expected):
    assert reply(code, tests, entry_point).score == expected


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    while True:\n        pass",
        "while True:\n    pass",
        "x = 'a' * 10**10",
        "def f(x): return f(x)",
        "def f(x): return [0] * 10**10",
        "def f(x)\n    return x",
        "x = '\ud800'",
        "def f(x): return 4\0",
        "(" * 100_000,
        "import numpy\ndef f(x): return x * x",
        "text = open('/etc/passwd').read()\ndef f(x): return x * x",
        "abs = len = isinstance = lambda *a: 0\nAssertionError = 1\ndef f(x): return 0",
        "def f(x): raise AssertionError",
        "f = 4",
    ],
)
def test_a_hostile_program_scores_nothing(code):
    assert reply(code, extract="text", cpu_seconds=1, memory_mb=64).score == 0.0


@pytest.mark.parametrize(
    ("code", "tests", "words"),
    [
        ("import heapq\ndef f(x): return x * x", TESTS, "No module named 'heapq'"),
        ("def f(x):\n    import string\n    return x * x", TESTS, "No module named 'string'"),
        ("def f(x):\n    yield x", TESTS, "yield"),
        ("class A(int): pass\ndef f(x): return A(x)", TESTS, "class inheritance"),
        ("class A:\n    def __eq__(self, o): return True\ndef f(x): return A()", TESTS, "something other than data"),
        ("def f(k): return k(2)", "assert f(lambda x: x) == 2", "something other than data"),
        ("def f(x): return range(x)", "assert list(f(2)) == [0, 1]", "something other than data"),
        ("def f(xs): xs.sort()", "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", "changes its arguments"),
        ("def f(x): raise KeyError(x)", TESTS, "Internal error in monty"),
        ("import sys\ndef f(x): sys.exit(0)", TESTS, "module 'sys' has no attribute 'exit'"),
        ("def f(x): return x * x", "import unittest\nassert f(2) == 4", "No module named 'unittest'"),
    ],
)
def test_what_it_cannot_run_gets_no_score(code, tests, words):
    with pytest.raises(MontyError, match=words) as caught:
        reply(code, tests)
    assert "engine=cpython" in str(caught.value)
    result = judge({"it": PythonTests(engine="monty")}, [Sample("", code, metadata={"tests": tests})])
    assert (result.verdicts[0]["it"], result.errors["it"]) == (Verdict(None), 1)


def test_programs_are_refused():
    with pytest.raises(InputError, match="engine=cpython"):
        reply("print(1)", [{"input": "", "output": "1"}])


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_the_failing_line_is_located(ending):
    text = "Here:\n```python\ndef f(x):\n    y = x\n    return y / 0\n```\n".replace("\n", ending)
    found = reply(text)
    assert [(text[s.start : s.stop], s.label) for s in found.spans] == [
        ("    return y / 0", "ZeroDivisionError: division by zero")
    ]
    text = "Here:\n```python\ndef f(x):\n    return x\n  bad\n```\n".replace("\n", ending)
    (span,) = reply(text).spans
    assert (span.start, span.stop) == ((39, 44) if ending == "\n" else (43, 48))


def test_functions_of_the_prompt_are_the_prompts_own():
    prompt = 'def poly(x):\n    return x - 3\n\ndef f():\n    """A zero of poly."""\n'
    tests = "def check(candidate):\n    assert abs(poly(candidate())) < 1e-6"
    assert reply("    return 3\n", tests, "f", prompt, prefix="prompt").score == 1.0
    assert reply("    return 1\ndef poly(x):\n    return 0\n", tests, "f", prompt, prefix="prompt").score == 0.0


def test_many_answers_at_one_time_keep_their_order():
    samples = [
        Sample("", f"def f(x): return x * {n}", metadata={"tests": f"assert f(1) == {n % 3}"}) for n in range(24)
    ]
    found = PythonTests(engine="monty", workers=4)(samples)
    assert [verdict.score for verdict in found] == [float(n < 3) for n in range(24)]


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydantic_monty", None)
    with pytest.raises(InputError, match=r"pip install 'apportion\[code\]'"):
        reply("def f(x): return x")
