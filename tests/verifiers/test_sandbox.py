"""What a hostile program can reach, use up and leave behind: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apportion.verifiers import InputError, Sample
from apportion.verifiers.bubblewrap import Sandbox
from apportion.verifiers.code_tests import Programs, read_tests
from apportion.verifiers.python_tests import PythonTests
from apportion.verifiers.sandbox import Limits, SandboxError, _run_in, find_sandbox, run_cpython

try:
    find_sandbox()
    REASON = None
except InputError as error:
    REASON = str(error)
needs_sandbox = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# The wall-clock limit stands in the command line of every process of a sandbox: an odd one marks ours.
SECONDS = round(3 + os.getpid() * 1e-8, 8)
MARK = f"apportion-mark-{os.getpid()}"
TESTS = "assert f(2) == 4\nassert f(3) == 9"
LIMITS = Limits(seconds=SECONDS, cpu_seconds=1, memory_mb=256, processes=16, file_mb=4, output_kb=64)


def run(program, tests=TESTS, limits=LIMITS):
    return run_cpython(program.replace("MARK", MARK), read_tests(tests), limits)


def left_processes():
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            if MARK in line or f'"seconds": {SECONDS}' in line:
                found.append(line[-300:])
    return found


def left_files():
    folders = [Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"), Path.cwd(), Path.home(), Path("/")]
    return [path for folder in folders if folder.is_dir() for path in folder.iterdir() if MARK in path.name]


HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb that swallows errors": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "processes without end": (
        "import subprocess, sys\nwhile True:\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'MARK'])"
    ),
    "files without end": "for i in range(10**9):\n    open(f'/tmp/MARK-{i}', 'wb').write(b'x' * 10**6)",
    "one huge file": "with open('/tmp/MARK', 'wb') as file:\n    while True:\n        file.write(b'x' * 10**6)",
    "shared memory without end": ("for i in range(10**9):\n    open(f'/dev/shm/MARK-{i}', 'wb').write(b'x' * 10**6)"),
    "memory": "hold = []\nwhile True:\n    hold.append(bytearray(10**7))",
    "memory at once": "hold = 'x' * 10**11",
    "a huge number": "n = 9 ** 9 ** 9",
    "output without end": "while True:\n    print('assert passed ' * 1000)",
    "errors without end": "import sys\nwhile True:\n    sys.stderr.write('ok ' * 1000)",
    "a loop": "while True:\n    pass",
    "a loop in the function": "def f(x):\n    while True:\n        pass",
    "a sleep": "import time\ntime.sleep(60)",
    "signals ignored": (
        "import signal, time\n"
        "for number in range(1, 64):\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        "while True:\n    pass"
    ),
    "deep recursion": "def f(x): return f(x)",
    "deeper recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "an abort": "import os\nos.abort()",
    "suicide": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "killing the judge": (
        "import os, signal\nfor number in range(1, 64):\n"
        "    try:\n        os.kill(1, number)\n    except OSError:\n        pass\ndef f(x): return 0"
    ),
    "killing everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "a network": "import socket\nsocket.create_connection(('127.0.0.1', 80), 2)\ndef f(x): return x * x",
    "a server": "import socket\ns = socket.create_server(('0.0.0.0', 80))\ndef f(x): return x * x",
    "reading the users": "text = open('/etc/passwd').read()\ndef f(x): return x * x",
    "reading the first process": "text = open('/proc/1/environ').read()\ndef f(x): return x * x",
    "writing to the interpreter": (
        "import os\nopen(os.path.join(os.path.dirname(os.__file__), 'MARK'), 'w')\ndef f(x): return x * x"
    ),
    "a mount": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0\ndef f(x): return x * x"
    ),
    "a name space": (
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0\ndef f(x): return x * x"
    ),
    "tracing the judge": (
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) == 0\ndef f(x): return x * x"
    ),
    "becoming root": "import os\nos.setuid(0)\ndef f(x): return x * x",
    "a shell": "import os\nassert os.system('true') == 0\ndef f(x): return x * x",
    "a daemon that outlives": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
        "def f(x): return 0"
    ),
    "a grandchild that keeps the pipe": (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'MARK'])\ndef f(x): return 0"
    ),
    "symbolic links": (
        "import os\nfor name in ('/etc/passwd', '/root', '/', '/tmp'):\n"
        "    os.symlink(name, '/tmp/MARK' + name.replace('/', '-'))\n"
        "def f(x): return open('/tmp/MARK-etc-passwd').read()"
    ),
    "files everywhere": (
        "import os\nfor folder in ('/', '/tmp', '/var/tmp', '/dev', '/dev/shm', '/run', '/usr/lib', '/root', '.'):\n"
        "    try:\n        open(os.path.join(folder, 'MARK'), 'w').write('x')\n    except OSError:\n        pass\n"
        "def f(x): return 0"
    ),
    "a huge error message": "def f(x): raise ValueError('x' * 10**7)",
    "an error that fails to show": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\n"
        "    args = property(__str__)\ndef f(x): raise E"
    ),
    "an endless error chain": (
        "def f(x):\n    error = ValueError()\n    for _ in range(10**5):\n"
        "        error, error.__cause__ = ValueError(), error\n    raise error"
    ),
    "odd characters": "def f(x): raise ValueError('\\ud800\\x00\\u202e💩' * 99)",
    "a huge value": "def f(x): return 'x' * (10**8 - 1)",
    "a deep value": "def f(x):\n    value = []\n    for _ in range(10**5):\n        value = [value]\n    return value",
    "a value that grows": (
        "def f(x):\n    value = ()\n    for _ in range(99):\n        value = (value, value)\n    return value"
    ),
    "leaving while loading": "import sys\nsys.exit(0)",
    "passes printed at exit": "import atexit\natexit.register(print, 'OK, 2 tests passed')\nraise SystemExit(0)",
    "lines written to every descriptor": (
        "import os\nfor number in range(256):\n    try:\n"
        '        os.write(number, b\'{"unit": 0, "passed": true}\\n{"unit": 1, "passed": true}\\n{"done": true}\\n\')\n'
        "    except OSError:\n        pass\ndef f(x): return 0"
    ),
    "null bytes": "def f(x): return 4\x00",
    "a lone surrogate": "x = '\ud800'\ndef f(x): return 0",
    "brackets": "(" * 50_000,
    "a patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0",
}


@pytest.fixture(scope="module")
def verdicts():
    samples = [Sample("", program.replace("MARK", MARK), metadata={"tests": TESTS}) for program in HOSTILE.values()]
    verifier = PythonTests(extract="text", workers=4, **vars(LIMITS))
    before = time.monotonic()
    replies = verifier(samples)
    return dict(zip(HOSTILE, replies)), time.monotonic() - before


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_scores_nothing(verdicts, name):
    replies, _ = verdicts
    assert not isinstance(replies[name], Exception), replies[name]
    assert replies[name].score == 0.0


@needs_sandbox
@pytest.mark.slow
def test_hostile_programs_leave_no_process_and_no_file(verdicts):
    assert left_processes() == []
    assert left_files() == []


@needs_sandbox
def test_a_fork_bomb_ends_at_the_process_limit():
    program = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    begun = time.monotonic()
    outcome = run(program, limits=Limits(seconds=SECONDS - 2, cpu_seconds=1, processes=32))
    assert outcome.passed == 0
    assert time.monotonic() - begun < SECONDS + 3
    assert left_processes() == []


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "label"),
    [
        ("import ctypes\nctypes.string_at(0)", "killed by signal 11"),
        ("import os\nos._exit(3)", "left with status 3"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("def f(x): return bytearray(10**9)", "MemoryError"),
        ("def f(x): return f(x)", "RecursionError: maximum recursion depth exceeded"),
        ("def f(x): return 'x' * 10**8", "MemoryError: the value is too large"),
    ],
)
def test_the_end_of_a_program_is_put_in_words(program, label):
    outcome = run(program)
    assert outcome.passed == 0
    assert outcome.faults[0].label.startswith(label)


@needs_sandbox
def test_computing_and_waiting_too_long_are_told_apart():
    limits = Limits(seconds=30, cpu_seconds=1)
    assert run("while True: pass", limits=limits).faults[0].label in ("killed by signal 24", "killed by signal 9")
    limits = Limits(seconds=0.5)
    assert run("import time\ntime.sleep(9)", limits=limits).faults[-1].label == "not done in 0.5 s"


@needs_sandbox
def test_what_was_passed_before_the_time_ran_out_stays_passed():
    program = "import time\ndef f(x):\n    if x > 2: time.sleep(9)\n    return x * x"
    outcome = run(program, TESTS + "\nassert f(1) == 1", Limits(seconds=1.5))
    assert (outcome.passed, outcome.total) == (1, 3)


PROBE = """
import os, sys, socket

def listing(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None

def writable(path):
    try:
        with open(os.path.join(path, "probe"), "w") as file:
            file.write("x")
        return True
    except OSError:
        return False

def imports(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False

def reach(family, address):
    try:
        socket.socket(family, socket.SOCK_STREAM).connect(address)
        return True
    except OSError as error:
        return error.errno

def environment():
    return dict(os.environ)

def own():
    return [os.getuid() == 0, os.getppid(), sys.flags.optimize]
"""


@needs_sandbox
@pytest.mark.parametrize(
    "test",
    [
        f"assert listing({str(Path.home())!r}) in (None, [], ['.pyenv'], ['.local'])",
        f"assert listing({str(Path.cwd())!r}) is None",
        "assert listing('/proc') is None",
        "assert listing('/sys') is None",
        "assert listing('/var') is None",
        "assert set(listing('/etc')) <= {'ld.so.cache'}",
        "assert listing('/tmp') == []",
        "assert listing('/dev') == ['null', 'random', 'shm', 'urandom', 'zero']",
        "assert writable('/tmp')",
        "assert not any(map(writable, ['/', '/usr/lib', '/dev', '/etc', '/run', '/run/apportion_sandbox/box']))",
        "assert not any(map(imports, ['pytest', 'torch', 'numpy', 'pip', 'apportion']))",
        "assert all(map(imports, ['json', 'decimal', 'ctypes', 'sqlite3', 'multiprocessing', 'asyncio']))",
        "assert reach(2, ('127.0.0.1', 22)) in (101, 111)",
        "assert reach(2, ('1.1.1.1', 53)) == 101",
        "assert set(environment()) <= {'HOME', 'LANG', 'PYTHONHASHSEED', 'PWD', 'LC_CTYPE'}",
        "assert own() == [False, 1, 0]",
    ],
)
def test_inside_there_is_nothing_of_the_machine(test):
    outcome = run(PROBE, test)
    assert outcome.passed == 1, outcome


@needs_sandbox
def test_the_answer_cannot_read_the_tests():
    program = (
        "import gc, sys\n"
        "def f(x):\n"
        "    seen = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
        "    texts = {s for o in seen for s in (o.values() if isinstance(o, dict) else o) if type(s) is str}\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        texts |= {v for v in frame.f_locals.values() if type(v) is str}\n"
        "        frame = frame.f_back\n"
        "    return any(str(4241 + 1) in text for text in texts)\n"
    )
    assert run(program, "assert f(1) == False\nassert 4242 == 4242 + f(2)").passed == 2


@needs_sandbox
def test_a_right_program_passes_however_noisy():
    program = "import sys\nsys.stderr.write('noise' * 10**5)\nprint('noise' * 10**5)\ndef f(x): return x * x"
    assert run(program)[:2] == (2, 2)


@needs_sandbox
def test_the_run_returns_when_the_program_ends_whoever_holds_its_output():
    program = HOSTILE["a grandchild that keeps the pipe"] + "\nprint(4)"
    begun = time.monotonic()
    outcome = run(program, [{"input": "", "output": "4"}, {"input": "", "output": "5"}])
    assert (outcome.passed, outcome.total) == (1, 2)
    assert time.monotonic() - begun < SECONDS
    assert left_processes() == []


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "label"),
    [
        ("while True: print('x' * 1000)", "too much output"),
        ("import os\nwhile True: os.fork()", "left with status 1"),
        ("import sys\nsys.stdout.buffer.write(b'\\xf0\\n')", "wrong output"),
        ("raise ValueError('no result')", "ValueError: no result"),
        ("print(input(), input())", "EOFError: EOF when reading a line"),
        ("print('4')\nraise SystemExit(1)", "left with status 1"),
        ("print('4')\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("import os\nos.write(2, b'4')", "wrong output"),
    ],
)
def test_a_program_fails_with_a_word_on_why(program, label):
    outcome = run(program, [{"input": "1", "output": "4"}])
    assert outcome.passed == 0
    assert outcome.faults[0].label.startswith(label)


@needs_sandbox
def test_an_empty_output_is_no_excuse_for_an_error():
    tests = [{"input": "1", "output": ""}]
    assert run("raise ValueError('no result')", tests).passed == 0
    assert run("pass", tests).passed == 1


@needs_sandbox
def test_large_input_and_many_runs_pass_through():
    lines = "\n".join(str(number) for number in range(300_000))
    outcome = run_cpython(
        "import sys\nprint(sum(map(int, sys.stdin)))",
        Programs((lines, "1\n2"), (str(sum(range(300_000))), "3")),
        LIMITS,
    )
    assert outcome.passed == 2


@needs_sandbox
def test_a_sandbox_that_does_not_start_is_no_fault_of_the_answer():
    broken = Sandbox("/bin/false", (), False)
    with pytest.raises(SandboxError, match="bubblewrap: no reply"):
        _run_in(broken, "def f(x): return x", read_tests(TESTS), LIMITS)


@needs_sandbox
def test_death_by_the_machines_want_of_memory_is_no_fault_of_the_answer(monkeypatch):
    counts = iter([7, 8])
    monkeypatch.setattr("apportion.verifiers.sandbox._killed_for_memory", lambda: next(counts))
    with pytest.raises(SandboxError, match="out of memory"):
        run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize("why", ["missing", "forbidden"])
def test_without_a_sandbox_nothing_runs(monkeypatch, tmp_path, why):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setattr("apportion.verifiers.sandbox.bwrap_path", lambda: None if why == "missing" else str(bwrap))
    find_sandbox.cache_clear()
    try:
        with pytest.raises(InputError, match="engine=monty") as caught:
            PythonTests()([Sample("", "def f(x): return x", metadata={"tests": TESTS})])
    finally:
        find_sandbox.cache_clear()
    assert ("no bubblewrap here" if why == "missing" else "No permissions to create new namespace") in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_sandbox
def test_the_sandbox_ends_with_the_process_that_started_it():
    code = (
        "from apportion.verifiers.sandbox import *\nfrom apportion.verifiers.code_tests import read_tests\n"
        f"limits = Limits(seconds=50 + {SECONDS})\n"
        "run_cpython('import time\\ntime.sleep(60)', read_tests('assert f(2) == 4'), limits)"
    )
    begin = f'"seconds": {50 + SECONDS}'

    def running():
        lines = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    lines.append((entry / "cmdline").read_bytes().decode("utf-8", "replace"))
                except OSError:
                    continue
        return sum(begin in line for line in lines)

    def wait_until(condition):
        deadline = time.monotonic() + 15
        while not condition() and time.monotonic() < deadline:
            os.sched_yield()
        return condition()

    with subprocess.Popen([sys.executable, "-c", code]) as outside:
        assert wait_until(lambda: running() >= 3)
        outside.send_signal(signal.SIGKILL)
    assert wait_until(lambda: running() == 0)


@pytest.mark.parametrize("name", ["seconds", "cpu_seconds", "memory_mb", "processes", "file_mb", "output_kb"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(InputError, match=f"^{name}: 0 is no limit"):
        Limits(**{name: 0})
