import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apportion.verifiers import InputError
from apportion.verifiers.workers import WorkerFailure, WorkerPool, shared_pool

TASKS = """
import os, re, subprocess, sys, time

kept = []

def serve(shift=0):
    def answer(item):
        kind, value = item
        if kind == "add":
            return value + shift
        if kind == "pid":
            return os.getpid()
        if kind == "echo":
            return value
        if kind == "regex":
            return bool(re.match(r"(a+)+$", "a" * 40 + "b"))
        if kind == "digits":
            return len(str(7 ** (7 ** 12)))
        if kind == "keep":
            kept.append(b"x" * value)
            return value
        if kind == "memory":
            return len(bytearray(value))
        if kind == "crash":
            os.kill(os.getpid(), value)
        if kind == "exit":
            os._exit(value)
        if kind == "raise":
            raise ValueError(value)
        if kind == "print":
            print("noise", flush=True)
            os.write(1, b"noise")
            subprocess.run([sys.executable, "-c", "print('noise of a child')"])
            return value
        if kind == "object":
            return object()
        if kind == "child":
            return subprocess.Popen(["sleep", "1000"]).pid
        if kind == "child and hang":
            with open(value, "w") as file:
                file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
            while True:
                pass
        if kind == "modules":
            return sorted(set(value) & set(sys.modules))
    return answer
"""


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "worker_tasks_of_a_user.py").write_text(TASKS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(tasks):
    pool = WorkerPool("worker_tasks_of_a_user.serve", {"shift": 100}, workers=2, timeout_s=1.0, memory_mb=512)
    yield pool
    pool.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return condition()


def kinds(results):
    return [result.kind if isinstance(result, WorkerFailure) else result for result in results]


def test_results_keep_the_order_of_the_items(pool):
    assert pool.map([("add", n) for n in range(300)]) == [n + 100 for n in range(300)]
    assert pool.map([]) == []


@pytest.mark.parametrize("value", [None, True, 1.5, "\ud800 個 💩", ["a", [1]], {"k": None}, "x" * 3_000_000])
def test_plain_values_travel_unchanged(pool, value):
    assert pool.map([("echo", value)]) == [value]


@pytest.mark.parametrize(
    ("item", "kind", "words"),
    [
        (("regex", 0), "timeout", "no result within 1 s"),
        (("digits", 0), "timeout", "no result within 1 s"),
        (("memory", 2 << 30), "memory", "MemoryError"),
        (("crash", signal.SIGSEGV), "died", "ended by signal SIGSEGV"),
        (("exit", 7), "died", "ended with status 7"),
        (("raise", "no\nluck"), "raised", "ValueError: no luck"),
        (("object", 0), "raised", "not JSON serializable"),
        (lambda: 0, "raised", "cannot be sent"),
    ],
)
def test_a_fault_costs_its_own_item_only(pool, item, kind, words):
    good = [("add", n) for n in range(4)]
    results = pool.map([*good, item, *good])
    assert kinds(results) == [100, 101, 102, 103, kind, 100, 101, 102, 103]
    assert words in str(results[4])


def test_prints_do_not_get_into_the_replies(capfd):
    pool = WorkerPool("worker_tasks_of_a_user.serve", timeout_s=5.0)  # its stderr is the one captured here
    assert pool.map([("print", 5), ("print", 6)]) == [5, 6]
    pool.close()
    assert "noise" in capfd.readouterr().err


def test_what_an_item_started_is_killed_with_it(pool, tmp_path):
    (result,) = pool.map([("child and hang", str(tmp_path / "pid"))])
    assert result.kind == "timeout"
    assert wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_closing_ends_the_processes_and_the_next_call_starts_anew(pool):
    (before,), (child,) = pool.map([("pid", 0)]), pool.map([("child", 0)])
    pool.close()
    assert wait_until(lambda: not alive(before) and not alive(child))
    assert pool.map([("add", 1)]) == [101]


def test_a_worker_that_was_killed_between_two_calls_is_replaced(pool):
    for _ in range(2):
        (pid,) = pool.map([("pid", 0)])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not alive(pid))
    assert pool.map([("add", 1), ("add", 2)]) == [101, 102]


def test_a_worker_of_a_large_parent_is_kept():
    ballast = bytearray(b"x" * (200 << 20))  # more than half of what the worker may use
    pool = WorkerPool("worker_tasks_of_a_user.serve", memory_mb=256)
    assert len(set(pool.map([("pid", 0)] * 4))) == 1
    assert len(ballast) == 200 << 20
    pool.close()


def test_a_worker_that_has_grown_large_is_replaced():
    pool = WorkerPool("worker_tasks_of_a_user.serve", memory_mb=256)
    first, _, second, third = pool.map([("pid", 0), ("keep", 150 << 20), ("pid", 0), ("pid", 0)])
    assert first != second == third
    pool.close()


def test_threads_may_share_a_pool(pool):
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda n: pool.map([("add", n), ("raise", "x"), ("add", -n)]), range(12)))
    assert [kinds(result) for result in results] == [[100 + n, "raised", 100 - n] for n in range(12)]


def test_a_worker_holds_no_module_of_its_parent(pool):
    assert pool.map([("modules", ["torch", "pytest", "multiprocessing", "apportion.credit", "sympy"])]) == [[]]


def test_equal_settings_share_a_pool():
    options = {"workers": 1, "timeout_s": 1.0, "memory_mb": 0}
    assert shared_pool("a.b", {"x": 1, "y": 2}, **options) is shared_pool("a.b", {"y": 2, "x": 1}, **options)
    assert shared_pool("a.b", {"x": 1}, **options) is not shared_pool("a.b", {"x": 2}, **options)


@pytest.mark.parametrize("target", ["worker_tasks_of_a_user.missing", "no_such_module_at_all.serve", "os.path.join"])
def test_a_target_that_cannot_be_loaded_is_named(target):
    with pytest.raises(InputError, match=f"^target: {target} cannot be loaded: "):
        WorkerPool(target).map([1])


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("inf")}, {"memory_mb": -1}]
)
def test_a_bad_limit_is_named(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: "):
        WorkerPool("worker_tasks_of_a_user.serve", **options)


def test_an_item_costs_well_below_a_millisecond(pool):
    pool.map([("add", 0)] * 4)
    started = time.perf_counter()
    pool.map([("add", 0)] * 3000)
    assert (time.perf_counter() - started) / 3000 < 1e-3


@pytest.mark.parametrize("item", [("pid", 0), ("child and hang", None)])
@pytest.mark.parametrize("ending", ["return", "kill"])
def test_no_worker_outlives_its_parent(tasks, tmp_path, item, ending):
    """The parent has no main guard and may be killed at any time; a worker in the midst of an item ends, too."""
    hangs = item[0] != "pid"
    script = textwrap.dedent(
        f"""
        import os, sys, threading
        sys.path.insert(0, {str(tasks)!r})
        from apportion.verifiers.workers import WorkerPool
        pool = WorkerPool("worker_tasks_of_a_user.serve", timeout_s=0.5)
        print(pool.map([("pid", 0)])[0], flush=True)
        if {hangs}:
            threading.Thread(target=pool.map, args=([("regex", 0)],), daemon=True).start()
            threading.Event().wait(0.1)
        if {ending == "kill"}:
            os.kill(os.getpid(), 9)
        """
    )
    (tmp_path / "parent.py").write_text(script)
    ran = subprocess.run([sys.executable, tmp_path / "parent.py"], capture_output=True, text=True, timeout=30)
    pid = int(ran.stdout)
    assert ran.returncode == (-9 if ending == "kill" else 0)
    assert wait_until(lambda: not alive(pid), seconds=6.0)
