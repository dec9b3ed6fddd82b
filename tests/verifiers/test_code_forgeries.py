"""What a program may try in order to pass tests that it does not pass."""

import pytest

from apportion.verifiers import InputError, Sample
from apportion.verifiers.python_tests import PythonTests
from apportion.verifiers.sandbox import find_sandbox

try:
    find_sandbox()
    REASON = None
except InputError as error:
    REASON = str(error)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def score(code, tests, entry_point=None, prompt="", **options):
    metadata = {"tests": tests} | ({"entry_point": entry_point} if entry_point else {})
    (found,) = PythonTests(**options)([Sample(prompt, code, metadata=metadata)])
    if isinstance(found, Exception):
        raise found
    return found.score


ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __hash__(self): return hash(4)
    def __abs__(self): return 0
"""
FORGERIES = {
    "an object that equals everything": ALWAYS + "def f(x): return Always()",
    "an integer that equals everything": ALWAYS + "class I(Always, int): pass\ndef f(x): return I(7)",
    "a text that equals everything": ALWAYS + "class S(Always, str): pass\ndef f(x): return S('7')",
    "patched builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\n"
        "builtins.len = builtins.isinstance = builtins.all = lambda *a: 4\n"
        "builtins.AssertionError = builtins.Exception = int\ndef f(x): return 0"
    ),
    "shadowed names": (
        "abs = all = len = isinstance = print = lambda *a: 0\nAssertionError = Exception\ndef f(x): return 0"
    ),
    "restarting without asserts": (
        "import sys, os\nif __debug__:\n"
        "    os.execv(sys.executable, [sys.executable, '-O', '-c', 'print(1)'])\n"
        "def f(x): return 0"
    ),
    "leaving early": "import os\ndef f(x): os._exit(0)",
    "leaving early politely": "import sys\ndef f(x): sys.exit(0)",
    "tracing": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0",
    "the caller's variables": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_locals.update(passed=True, f=lambda x: x * x)\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "patched line": (
        "import json, gc, socket, sys\n"
        "json.dumps = lambda *a, **k: '[\"value\", [], 4]'\n"
        "for o in gc.get_objects():\n"
        "    if type(o).__name__ == 'Peer':\n"
        "        o.serve = o._serve = lambda *a: None\n        o.guard = 'tests'\n"
        "def f(x): return 0"
    ),
    "replies in advance": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "for _ in range(9):\n    peer.line.sendall(b'[\"value\",[],true]\\n')\ndef f(x): return 0"
    ),
    "questions to the tests": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "def f(x):\n"
        "    for target in (['public', 'builtins', 'type'], ['yours', 0], ['public', 'builtins', 'object']):\n"
        "        try:\n"
        "            args = ['tuple', ['X', ['tuple', []], ['dict', []]]]\n"
        "            peer._send(['ask', 'call', [target, args, ['dict', []]]])\n"
        "            peer._receive()\n        except BaseException:\n            pass\n    return 0"
    ),
    "a class for the tests' process": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "encode = peer.encode\npeer.encode = lambda v, m: ['rebuilt', 'unittest.mock', '_ANY', ['tuple', []]]\n"
        "def f(x): return 0"
    ),
    "anything from the library": (
        "import gc, unittest.mock\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "peer.encode = lambda v, m: ['public', 'unittest.mock', 'ANY']\ndef f(x): return 0"
    ),
    "a pickle": (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "peer.encode = lambda v, m: ['pickle', 'cunittest.mock\\nANY\\n.']\ndef f(x): return 0"
    ),
    "messages on every descriptor": (
        "import os\nfor n in range(256):\n    try:\n"
        '        os.write(n, b\'{"unit": 0, "passed": true}\\n{"done": true}\\n'
        "')\n"
        "    except OSError:\n        pass\ndef f(x): return 0"
    ),
    "files that look like tests": (
        "import os\nos.makedirs('/tmp/tests', exist_ok=True)\nopen('/tmp/tests/test_a.py', 'w').close()\n"
        "open('/tmp/conftest.py', 'w').write('collect_ignore_glob = [\"*\"]')\n"
        "open('/tmp/reward.txt', 'w').write('1.0')\ndef f(x): return 0"
    ),
    "threads": (
        "import threading, os\ndef shout():\n    while True:\n        for n in range(3, 64):\n            try:\n"
        "                os.write(n, b'[\"value\",[],true]\\n')\n"
        "            except OSError:\n                pass\n"
        "threading.Thread(target=shout, daemon=True).start()\ndef f(x): return 0"
    ),
    "a difference that lies": (
        "class Y:\n    def __abs__(self): return 0\n    def __round__(self, n=0): return 0\n"
        "    def __bool__(self): return False\n    def __float__(self): return 0.0\n"
        "class X:\n    def __sub__(self, other): return Y()\n    __rsub__ = __add__ = __sub__\ndef f(x): return X()"
    ),
    "an end to the tests' own loops": "def f(x): raise StopIteration",
    "a math of its own": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
    "passes printed": "import atexit\natexit.register(print, 'OK')\nprint('Ran 2 tests\\nOK')\ndef f(x): return 0",
}
HARD_TESTS = [
    "assert f(2) == 4",
    "assert 4 == f(2)",
    "assert not f(2) != 4",
    "assert abs(f(2) - 4) < 1e-6",
    "assert abs(4 - f(2)) < 1e-6",
    "assert abs(f(2) - 3.5) < 1",
    "assert not round(f(2) - 4, 6)",
    "import math\nassert math.fabs(f(2) - 4) < 1e-6",
    "assert math.isclose(f(2), 4)",
    "assert all(map(lambda pair: f(pair[0]) == pair[1], [(2, 4)]))",
    "for wanted, got in zip([4], map(f, [2])):\n    assert got == wanted",
    "assert 3 < f(2) < 5",
    "assert f(2) in [4]",
    "assert [f(2)] == [4]",
    "assert (1, f(2)) == (1, 4)",
    "assert {'a': f(2)} == {'a': 4}",
    "assert {4: 1}[f(2)] == 1",
    "assert max(f(2), 1) == 4",
    "assert sorted([f(2), 9]) == [4, 9]",
    "import unittest\nunittest.TestCase().assertEqual(f(2), 4)",
    "import math\nassert math.isclose(f(2), 4)",
    "x = f(2)\nassert isinstance(x, int) and x + 0 == 4",
]


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_passes_no_test(name):
    assert score(FORGERIES[name], HARD_TESTS, cpu_seconds=2) == 0.0


def test_an_answer_that_dies_raises_no_exception_that_a_test_could_want():
    tests = "try:\n    f(1)\n    assert f(1) == 1\nexcept Exception:\n    assert 1 == 1 + 0"
    assert score("import os\ndef f(x): os._exit(0)", tests) == 0.0
    assert score("def f(x): raise ValueError", tests) == 1.0


def test_what_the_tests_hand_over_opens_no_door_to_them():
    program = (
        "import gc\npeer = next(o for o in gc.get_objects() if type(o).__name__ == 'Peer')\n"
        "def f(n, k):\n"
        "    got = []\n"
        "    for target in (n, k):\n"
        "        for name in ('__dict__', '__class__', '__init__', '_x', '__globals__', '__code__', '__call__'):\n"
        "            for deed, *rest in (('get',), ('set', 1), ('special',), ('delete',)):\n"
        "                try:\n                    peer.request(deed, target, name, *rest)\n"
        "                    got.append((deed, name))\n"
        "                except (AttributeError, TypeError):\n                    pass\n"
        "    return got + [n.x, k(2)]\n"
    )
    tests = "class N:\n    x, _x = 1, 2\nassert f(N(), lambda x: x + 1) == [1, 3]\nassert f(N(), (i for i in ())) == 0"
    assert score(program, tests) == 0.5


def test_functions_of_the_prompt_are_the_prompts_own():
    prompt = 'def poly(x):\n    return x - 3\n\ndef f():\n    """A zero of poly."""\n'
    tests = "def check(candidate):\n    assert abs(poly(candidate())) < 1e-6"
    assert score("    return 3\n", tests, "f", prompt=prompt, prefix="prompt") == 1.0
    assert score("    return 1\ndef poly(x):\n    return 0\n", tests, "f", prompt=prompt, prefix="prompt") == 0.0
