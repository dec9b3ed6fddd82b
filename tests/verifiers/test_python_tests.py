"""Unit tests for code: what passes them, and where the fault lies."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.panel import judge
from apportion.verifiers.python_tests import PythonTests, extract_code
from apportion.verifiers.sandbox import find_sandbox
from apportion.verifiers.sandbox_filter import system_call_filter

try:
    find_sandbox()
    REASON = None
except InputError as error:
    REASON = str(error)
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SQUARE = "def f(x):\n    return x * x\n"
TESTS = "assert f(2) == 4\nassert f(3) == 9"
VALUES = "10**30, -0.0, 1.5, True, None, b'\\xff', 1j, ..., range(3), frozenset([1]), '\\ud800', {(1, 2): {3}}"


def reply(code, tests=TESTS, entry_point=None, prompt="", **options):
    metadata = {"tests": tests} | ({"entry_point": entry_point} if entry_point else {})
    (found,) = PythonTests(**options)([Sample(prompt, code, metadata=metadata)])
    if isinstance(found, Exception):
        raise found
    return found


def score(code, tests=TESTS, entry_point=None, **options):
    return reply(code, tests, entry_point, **options).score


def spans(code, tests=TESTS, **options):
    return [(code[s.start : s.stop], s.label) for s in reply(code, tests, **options).spans]


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "expected"),
    [
        (SQUARE, TESTS, None, 1.0),
        ("def f(x):\n    return x + x\n", TESTS, None, 0.5),
        ("def f(x):\n    return [4, 9, 16, 0][x - 2]", TESTS + "\nassert f(4) == 16\nassert f(5) == 25", None, 0.75),
        (SQUARE, "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 8", "f", 0.5),
        (SQUARE, "def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(2) == 5", None, 0.5),
        (
            SQUARE,
            "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 2\n"
            "    def test_a(self): self.assertEqual(f(self.x), 4)\n"
            "    def test_b(self): self.assertEqual(f(self.x), 5)\n"
            "unittest.main()",
            None,
            0.5,
        ),
        (SQUARE, [{"args": [2], "output": 4}, {"args": [3], "output": 8}], "f", 0.5),
        ("def f(a, *, b): return (a, [b])", [{"args": [1], "kwargs": {"b": 2}, "output": [1, [2]]}], "f", 1.0),
        ("def f(x): return float('nan')", [{"args": [float("inf")], "output": float("nan")}], "f", 0.0),
        ("print(int(input()) ** 2)", [{"input": "2\n", "output": "4"}, {"input": "3", "output": "8"}], None, 0.5),
        (
            (
                "if __name__ == '__main__':\n    import sys\n    for line in sys.stdin:\n"
                "        print(line.strip()[::-1])\n    exit()"
            ),
            [{"input": "ab\ncd\n", "output": "ba\ndc\n"}],
            None,
            1.0,
        ),
        ("def solve(x): raise ValueError('no result')", [{"args": ["1"], "output": ""}], "solve", 0.0),
        ("def g(x): return x", "def check(candidate):\n    assert candidate(2) == 2", "f", 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_passed(code, tests, entry_point, expected):
    assert score(code, tests, entry_point) == expected
    assert score(code, tests, entry_point, score="all") == float(expected == 1.0)


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(l):\n    l.sort()\n    return l", "l = [3, 1]\nr = f(l)\nassert l == [1, 3]\nassert r is l"),
        (
            "def f(m):\n    m[0][0] = 9\n    del m[1]",
            ("a = [1]\nm = [a, 2]\nf(m)\nassert a == [9]\nassert m == [[9]]\nassert m[0] is a"),
        ),
        ("def f(d):\n    d['x'] = d\n    return d", "d = {}\nassert f(d)['x'] is d"),
        ("def f(s): s.add(3)", "s = {1}\nf(s)\nassert s == {1, 3}"),
        ("def f(k, xs): return [k(x) for x in xs]", "assert f(lambda x: x + 1, (i for i in [1, 2])) == [2, 3]"),
        ("def f(k, xs): return sorted(xs, key=k)", "assert f(len, ['aaa', 'b']) == ['b', 'aaa']"),
        ("def f(p): return p.findall('a1b2')", "import re\nassert f(re.compile('[0-9]')) == ['1', '2']"),
        (
            "def f(n): return n.next.val",
            ("class N:\n    def __init__(s, v, n=None): s.val, s.next = v, n\nassert f(N(1, N(2))) == 2"),
        ),
        ("def f(n):\n    n.next = n\n    return n", "class N: pass\nn = N()\nassert f(n) is n\nassert n.next is n"),
        (
            "class P:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return P(s.x + o.x)\n"
            "    def __eq__(s, o): return s.x == o.x\n    def __len__(s): return s.x\n"
            "    def __repr__(s): return f'P({s.x})'\n"
            "    def __iter__(s): yield s.x\n    def __contains__(s, x): return x == s.x\n"
            "    def __getitem__(s, i): return s.x",
            "p = P(1) + P(2)\nassert p == P(3)\nassert p.x == 3\nassert repr(p) == 'P(3)'\nassert list(p) == [3]\n"
            "assert isinstance(p, P)\nassert not isinstance(3, P)\nassert len(p) == 3\n"
            "assert 3 in p\nassert p[0] == 3\n"
            "p.x = 5\nassert p.x == 5\nassert p != P(3)",
        ),
        (
            "class E(Exception): pass\ndef f(): raise E('boo', 1)",
            ("try:\n    f()\n    assert f() == 1\nexcept E as e:\n    assert e.args == ('boo', 1)"),
        ),
        (
            "import json\ndef f(): json.loads('{')",
            ("import json\ntry:\n    f()\n    assert f() == 1\nexcept json.JSONDecodeError as e:\n    assert e"),
        ),
        (
            "def f(): return {}['x']",
            ("try:\n    f()\n    assert f() == 1\nexcept KeyError as e:\n    assert str(e) == \"'x'\""),
        ),
        (
            "from collections import *\nP = namedtuple('P', 'a b')\n"
            "def f(): return P(1, 2)\ndef g(): return Counter('aab')\n"
            "def h():\n    d = defaultdict(list)\n    d['a'].append(1)\n    return d\n"
            "def k(): return deque([1, 2])",
            "from collections import deque\nassert f() == (1, 2)\nassert f().b == 2\n"
            "assert f()._asdict() == {'a': 1, 'b': 2}\n"
            "assert g() == {'a': 2, 'b': 1}\nassert g()['z'] == 0\n"
            "assert h() == {'a': [1]}\nassert k() == deque([1, 2])",
        ),
        (
            "from fractions import *\nfrom decimal import *\nfrom datetime import *\n"
            "def f(): return Fraction(1, 3)\n"
            "def g(): return Decimal('1.10')\ndef h(): return date(2024, 2, 29)\n"
            "def k(): return datetime(2024, 2, 29, 1)",
            "from datetime import date, datetime\nassert f() * 3 == 1\n"
            "assert str(g()) == '1.10'\nassert h() == date(2024, 2, 29)\n"
            "assert k().hour == 1",
        ),
        (
            "def f(): return [" + VALUES + "]",
            "assert f() == [" + VALUES + "]\n"
            "assert str(f()[1]) == '-0.0'\nassert f()[3] is True\nassert type(f()[2]) is float",
        ),
        ("def f(x):\n    return 10 ** x", "assert f(9999) == 10 ** 9999\nassert f(400) % 7 == 10 ** 400 % 7"),
        (
            "def f():\n    yield 1\n    yield 2",
            ("assert list(f()) == [1, 2]\nassert next(f()) == 1\nassert sum(x for x in f()) == 3"),
        ),
        ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        ("def f(n):\n    def g(x): return x + n\n    return g", "assert f(2)(3) == 5\nassert callable(f(2))"),
        (
            "import math\nLIMIT = 3\ndef f(): return math.pi",
            "assert math.isclose(f(), 3.14159, abs_tol=1e-3)\nassert LIMIT == 3",
        ),
        (
            (
                "import enum\nclass C(enum.Enum):\n    RED = 1\nclass D(enum.IntEnum):\n"
                "    ONE = 1\ndef f(): return C.RED"
            ),
            ("assert f() == C.RED\nassert f().value == 1\nassert D.ONE == 1\nassert f().name == 'RED'"),
        ),
        (
            ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(): return A(1)"),
            "assert f() == A(1)\nassert f() != A(2)\nassert f().x == 1",
        ),
        (
            ("class M:\n    def __enter__(s): return 7\n    def __exit__(s, *a): return False"),
            "with M() as x:\n    assert x == 7",
        ),
        ("def sum_all(*xs, start=0): return sum(xs, start)", "assert sum_all(1, 2, start=3) == 6"),
    ],
)
def test_tests_see_the_answer_as_if_it_were_beside_them(code, tests):
    outcome = reply(code, tests)
    assert outcome.score == 1.0, outcome


@needs_sandbox
def test_what_no_process_can_hand_over_is_a_fault_of_the_tests():
    with pytest.raises(InputError, match="tests: the tests hand a lock to the answer"):
        reply(SQUARE, "import threading\nassert f(threading.Lock()) == 4")


@pytest.mark.parametrize(
    ("text", "policy", "code"),
    [
        ("x = 1", "auto", "x = 1"),
        ("x = 1", "last_block", None),
        ("```python\nx = 1\n```", "auto", "x = 1\n"),
        ("```python\nx = 1\n```", "text", "```python\nx = 1\n```"),
        ("```py\na\n```\nor\n```py\nb\n```\nprints\n```text\nc\n```", "auto", "b\n"),
        ("```js\na\n```", "last_block", None),
        ("```python\na\n```\nprints\n```\n4\n```", "auto", "a\n"),
        ("```\n4\n```\n```\na\n```", "auto", "a\n"),
        ("```python\nx = 1", "auto", "x = 1"),
        ("```python\n\n```", "auto", None),
        ("", "auto", None),
        (" \n", "text", None),
    ],
)
def test_the_code_is_found_by_the_named_policy(text, policy, code):
    found = extract_code(text, policy)
    assert (None if found is None else text[found.start : found.stop]) == code


@needs_sandbox
def test_an_answer_without_code_fails_its_tests():
    assert reply("I cannot.\n```js\n1\n```", extract="last_block") == Verdict(0.0)


@needs_sandbox
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_syntax_error_lies_on_its_line_of_the_answer(ending):
    text = "Here:\n```python\ndef f(x):\n    return x\n  bad\n```\n".replace("\n", ending)
    (span,) = reply(text).spans
    assert (span.start, span.stop) == ((39, 44) if ending == "\n" else (43, 48))
    assert text[span.start : span.stop] == "  bad"
    assert span.label.startswith("IndentationError")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x)\n    return x", [("def f(x)", "SyntaxError: expected ':'")]),
        ("def f(x):\n", None),
        ("def f(x):\n    y = x\n    return y / 0\n", [("    return y / 0", "ZeroDivisionError: division by zero")]),
        (
            "def g(x):\n    return x[0]\ndef f(x):\n    return g(x)",
            [("    return x[0]", "TypeError: 'int' object is not subscriptable")],
        ),
        ("x = 1\nraise KeyError(3)", [("raise KeyError(3)", "KeyError: 3")]),
        ("import json\ndef f(x):\n    return json.loads('{')", [("    return json.loads('{')", None)]),
        (
            ("def f(x):\n    if x == 2:\n        raise ValueError('a')\n    raise ValueError('b')"),
            [("        raise ValueError('a')", "ValueError: a"), ("    raise ValueError('b')", "ValueError: b")],
        ),
        ("def f(x):\n    return x + 1", []),
        (
            "s = '💩\u2028\x0c\x0b'\ndef f(x):\n    return x / 0",
            [("    return x / 0", "ZeroDivisionError: division by zero")],
        ),
        ("def f(x): return eval('1/0')", [("def f(x): return eval('1/0')", "ZeroDivisionError: division by zero")]),
    ],
)
def test_the_failing_line_is_located(code, expected):
    found = spans(code)
    if expected is None:
        assert [text for text, _ in found] == ["def f(x):"]
    else:
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert all(label in (None, seen) for (_, label), (_, seen) in zip(expected, found))


@needs_sandbox
def test_a_line_of_the_prompt_is_not_the_answers():
    prompt = "def g(x):\n    return x / 0\n\ndef f(x):\n    y = "
    answer = "g(x)\n    return y\n"
    found = reply(answer, prompt=prompt, prefix="prompt")
    assert found.spans == ()
    (span,) = reply("x / 0\n    return y\n", prompt=prompt, prefix="prompt").spans
    assert (span.start, span.stop) == (0, 5)


@needs_sandbox
def test_programs_are_located_too():
    code = "n = int(input())\nprint(10 // n)\n"
    tests = [{"input": "5", "output": "2"}, {"input": "0", "output": "0"}, {"input": "x", "output": "0"}]
    found = reply(code, tests)
    assert found.score == pytest.approx(1 / 3)
    assert spans(code, tests) == [
        ("n = int(input())", "ValueError: invalid literal for int() with base 10: 'x'"),
        ("print(10 // n)", "ZeroDivisionError: integer division or modulo by zero"),
    ]


@needs_sandbox
def test_one_bad_sample_does_not_cost_the_others():
    samples = [
        Sample("", SQUARE, metadata={"tests": TESTS}),
        Sample("", SQUARE, metadata={"tests": "assert f(2) =="}),
        Sample("", SQUARE, metadata={"tests": ["assert f(2) == 5"]}),
        Sample("", SQUARE),
    ]
    result = judge({"it": PythonTests(workers=2)}, samples)
    assert [verdicts["it"].score for verdicts in result.verdicts] == [1.0, None, 0.0, None]
    assert result.errors["it"] == 1


@needs_sandbox
def test_a_failure_of_the_sandbox_is_no_score(monkeypatch):
    def fail(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr("apportion.verifiers.sandbox.subprocess.Popen", fail)
    result = judge({"it": PythonTests()}, [Sample("", SQUARE, metadata={"tests": TESTS})] * 3)
    assert [verdicts["it"].score for verdicts in result.verdicts] == [None] * 3
    assert result.errors["it"] == 3
    assert "no more processes" in result.first_error["it"]


@needs_sandbox
def test_one_verifier_serves_several_threads():
    verifier, found = PythonTests(workers=2), {}
    codes = [SQUARE, "def f(x): return x + x", "def f(x): return 0", "1 / 0"]

    def ask(number):
        (verdict,) = verifier([Sample("", codes[number], metadata={"tests": TESTS})])
        found[number] = verdict.score

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "docker"}, "engine: 'docker' is unknown"),
        ({"extract": "first"}, "extract: 'first' is unknown"),
        ({"score": "mean"}, "score: 'mean' is unknown"),
        ({"workers": 0}, "workers: 0 run nothing"),
        ({"memory_mb": -1}, "memory_mb: -1 is no limit"),
    ],
)
def test_an_option_out_of_range_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        PythonTests(**options)


@needs_sandbox
def test_any_text_is_judged_and_its_spans_lie_inside():
    verifier = PythonTests(cpu_seconds=1, seconds=5)

    @settings(derandomize=True, deadline=None, max_examples=25)
    @given(
        st.one_of(
            st.text(alphabet=st.characters(exclude_categories=())),
            st.lists(
                st.sampled_from(["def f(x):", "\n", "\r\n", "\r", "    ", "return x", "```", "(", "'", "\ud800", "\0"])
            ).map("".join),
        )
    )
    def check(text):
        (verdict,) = verifier([Sample("", text, metadata={"tests": TESTS})])
        assert verdict.score == 0.0
        assert all(0 <= span.start < span.stop <= len(text) for span in verdict.spans)

    check()


def test_the_call_filter_is_for_known_machines_only():
    assert len(system_call_filter("x86_64")) % 8 == 0
    with pytest.raises(InputError, match="engine=monty"):
        system_call_filter("s390x")
