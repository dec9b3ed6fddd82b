"""The command line in this process: fast, and every run in a folder of its own."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

# A policy and a task so small that a whole run takes about half a second.
TINY = [
    "policy.hidden_size=16",
    "policy.layers=1",
    "policy.heads=2",
    "policy.intermediate_size=16",
    "task.min_steps=1",
    "task.max_steps=2",
    "task.num_held_out=8",
    "task.num_retention=4",
    "warm_start.steps=60",  # enough for the format, and for a right step now and then
    "warm_start.batch_size=16",
    "warm_start.lr=0.03",
    "warm_start.warmup=5",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "run.steps=2",
    "run.eval_every=1",
    "run.rollouts_every=1",
    "run.save_model=false",
]


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Overrides that make any run small."""
    return TINY


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit status, and the lines of standard output and standard error."""

    status: int
    out: list[str]
    err: list[str]


Command = Callable[..., Outcome]


def call(folder: Path, cache: Path, *arguments: str) -> Outcome:
    """``apportion ARGUMENTS`` in ``folder``, in this process, which is left as it was."""
    from apportion.experiments.cli import main

    out, err = io.StringIO(), io.StringIO()
    threads, argv, path = torch.get_num_threads(), list(sys.argv), list(sys.path)
    status: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("APPORTION_CACHE", str(cache))
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        try:
            main(list(arguments))
        except SystemExit as end:
            status = end.code
        finally:
            torch.set_num_threads(threads)
            sys.path[:] = path
        assert (sys.argv, os.environ.get("HYDRA_FULL_ERROR")) == (argv, None)
    return Outcome(int(status or 0), out.getvalue().splitlines(), err.getvalue().splitlines())


@pytest.fixture(scope="session")
def warm_start_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of a process, so that equal warm starts are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def apportion(tmp_path: Path, warm_start_cache: Path) -> Command:
    """Calls ``apportion`` with arguments, in the folder ``tmp_path``."""
    return partial(call, tmp_path, warm_start_cache)


@pytest.fixture(scope="module")
def apportion_in(warm_start_cache: Path) -> Command:
    """The same in a folder of one's choice, which comes first."""
    return lambda folder, *arguments: call(folder, warm_start_cache, *arguments)
