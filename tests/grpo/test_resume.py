"""A run that was stopped, wherever, and taken up again is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from apportion.credit import Credit, CreditBatch
from apportion.credit.uniform import Uniform
from apportion.grpo.checkpoint import latest_checkpoint
from apportion.grpo.records import rollouts_path
from apportion.verifiers import InputError

NewRun = Callable[..., Any]
WINDOWS = 3
OPTIONS: dict[str, Any] = {
    "optim": {"epochs": 2, "minibatches": 2, "schedule": "cosine", "warmup_steps": 2},
    "loss": {"kl_coef": 0.05},
    "config": {"steps": WINDOWS, "eval_every": 2, "save_every": 1, "rollouts_every": 1},
}
UPDATES = WINDOWS * 4


class Confident:
    """Half the uniform credit on tokens that the policy, as it is at this optimiser step, holds for unlikely."""

    phase, conserves, requires = "update", "none", frozenset({"reward"})

    def __call__(self, batch: CreditBatch) -> Credit:
        assert batch.logprobs is not None
        whole = Uniform()(batch).advantages
        return Credit(torch.where(batch.logprobs > -3.0, whole, whole / 2))


class Dicing:
    """Credit that draws from the global generators, as a user's strategy may."""

    phase, conserves, requires = "update", "none", frozenset({"reward"})

    def __call__(self, batch: CreditBatch) -> Credit:
        noise = torch.randn(batch.completion_mask.shape) + random.random() + float(np.random.standard_normal())
        return Credit(noise.where(batch.completion_mask, 0.0))


def outcome(run: Any) -> dict[str, Any]:
    """All that must not depend on where the run was stopped."""
    files = sorted((run.folder / "rollouts").iterdir())
    return {
        "weights": run.weights,
        "optimizer": run.trainer.state.optimizer.state_dict(),
        "schedule": run.trainer.state.schedule.state_dict(),
        "rows": [{k: v for k, v in row.items() if "seconds" not in k} for row in run.rows],
        "rollouts": [pq.read_table(file).to_pylist() for file in files],
        "files": [file.name for file in files],
        "numbers": (run.trainer.state.step, run.trainer.state.tokens, run.trainer.state.skipped),
    }


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_same(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other)):
            assert_same(left, right, f"{path}/{index}")
    else:
        assert one == other, path


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What a run without a stop leaves, by strategy; made once."""
    made: dict[str, Any] = {}

    def get(new_run: NewRun, strategy: Any) -> Any:
        name = type(strategy).__name__
        if name not in made:
            seed_all(0)
            run = new_run(tmp_path_factory.mktemp(name), strategy=strategy, **OPTIONS)
            assert run.train() == "finished"
            made[name] = outcome(run)
        return made[name]

    return get


@pytest.mark.parametrize("strategy", [Uniform(), Confident(), Dicing()], ids=["rollout", "update", "global"])
def test_a_stop_after_any_optimiser_step_changes_nothing(
    new_run: NewRun, tmp_path: Path, straight: Any, strategy: Any
) -> None:
    """Two epochs of two minibatches: most of the stops lie inside a window."""
    wanted = straight(new_run, strategy)
    for updates in range(1, UPDATES):
        seed_all(0)
        first = new_run(tmp_path / str(updates), strategy=strategy, **OPTIONS)
        first.stop_after(updates)
        assert first.train() == "interrupted"
        assert first.status["state"] == "interrupted"
        seed_all(1)
        second = new_run(tmp_path / str(updates), strategy=strategy, **OPTIONS)
        assert second.train() == "finished"
        assert_same(outcome(second), wanted)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.9, 0.98])
def test_a_stop_while_tokens_are_sampled_changes_nothing(
    new_run: NewRun, tmp_path: Path, straight: Any, share: float
) -> None:
    """Wherever in the first evaluation, in a rollout batch, in the updates or in the last evaluation."""
    wanted = straight(new_run, Uniform())
    first = new_run(tmp_path, **OPTIONS)
    left = iter(range(int(share * sum(row["cost/forwards"] for row in wanted["rows"]))))

    def ask(*_: Any) -> None:
        if next(left, None) is None:
            first.trainer.stop.signal_number = signal.SIGINT

    first.trainer.policy.model.register_forward_hook(ask)
    assert first.train() == "interrupted"
    second = new_run(tmp_path, **OPTIONS)
    assert second.train() == "finished"
    assert_same(outcome(second), wanted)


def test_a_run_stopped_again_and_again_arrives(new_run: NewRun, tmp_path: Path, straight: Any) -> None:
    for _ in range(UPDATES - 1):
        run = new_run(tmp_path, **OPTIONS)
        run.stop_after(1)
        assert run.train() == "interrupted"
    run = new_run(tmp_path, **OPTIONS)
    assert run.train() == "finished"
    assert_same(outcome(run), straight(new_run, Uniform()))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_crash_goes_back_to_the_checkpoint_and_drops_what_came_after(
    new_run: NewRun, tmp_path: Path, straight: Any
) -> None:
    whole = new_run(tmp_path / "whole", **OPTIONS)
    whole.train()
    crashed = tmp_path / "crashed"
    shutil.copytree(whole.folder, crashed)
    shutil.rmtree(latest_checkpoint(crashed / "checkpoints"))
    assert latest_checkpoint(crashed / "checkpoints").name == "step_000002"
    with (crashed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')
    shutil.copy(rollouts_path(crashed, 3), rollouts_path(crashed, 9))
    again = new_run(crashed, **OPTIONS)
    assert [row["step"] for row in again.rows] == [0, 1, 2]
    assert not rollouts_path(crashed, 3).exists()
    assert again.train() == "finished"
    assert_same(outcome(again), straight(new_run, Uniform()))


def test_a_folder_without_a_checkpoint_begins_anew(new_run: NewRun, tmp_path: Path, straight: Any) -> None:
    (tmp_path / "rollouts").mkdir()
    rollouts_path(tmp_path, 7).write_text("of another run")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/success": 1.0}\n{"step": 1}\n')
    run = new_run(tmp_path, **OPTIONS)
    assert run.train() == "finished"
    assert_same(outcome(run), straight(new_run, Uniform()))


def test_a_finished_run_that_is_taken_up_does_nothing(new_run: NewRun, tmp_path: Path) -> None:
    new_run(tmp_path, **OPTIONS).train()
    before = outcome(new_run(tmp_path, **OPTIONS))
    again = new_run(tmp_path, **OPTIONS)
    assert again.train() == "finished"
    assert_same(outcome(again), before)


def test_the_reference_is_the_start_and_the_old_policy_is_the_checkpoint(new_run: NewRun, tmp_path: Path) -> None:
    first = new_run(tmp_path, **OPTIONS)
    start = first.weights
    first.stop_after(4)
    first.trainer.state.skipped = 2
    first.train()
    second = new_run(tmp_path, **OPTIONS)
    assert second.trainer.state.skipped == 2
    assert_same(dict(second.trainer.reference.model.state_dict()), start)
    assert any(not torch.equal(value, start[name]) for name, value in second.weights.items())
    second.train()
    assert second.rows[1]["policy/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second.rows[2]["policy/ref_kl"] > 1e-3  # the first batch sampled after the stop


def test_a_damaged_checkpoint_is_one_line_and_removing_it_goes_back(new_run: NewRun, tmp_path: Path) -> None:
    first = new_run(tmp_path, **OPTIONS)
    first.stop_after(9)
    first.train()
    newest = latest_checkpoint(tmp_path / "checkpoints")
    (newest / "state.pt").write_bytes(b"cut")
    with pytest.raises(InputError, match=f"{newest.name} cannot be read.*remove it to go on from the one before"):
        new_run(tmp_path, **OPTIONS)
    shutil.rmtree(newest)
    assert new_run(tmp_path, **OPTIONS).train() == "finished"


def test_a_checkpoint_of_another_version_is_one_line(new_run: NewRun, tmp_path: Path) -> None:
    new_run(tmp_path, **OPTIONS).train()
    file = latest_checkpoint(tmp_path / "checkpoints") / "state.pt"
    state = torch.load(file, weights_only=True)
    del state["schedule"]
    torch.save(state, file)
    with pytest.raises(InputError, match=r"another version \(KeyError: 'schedule'\); start again in another run.dir"):
        new_run(tmp_path, **OPTIONS)


PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from conftest import make_run

    folder, number, steps = Path(sys.argv[2]), int(sys.argv[3]), 4
    run = make_run(folder, config={"steps": steps}, optim={"epochs": 2})
    if number:
        left = iter(range(6))

        def send(*_):
            if next(left, None) is None:
                os.kill(os.getpid(), number)

        run.trainer.state.optimizer.register_step_post_hook(send)
    sys.exit(0 if run.train() == "finished" else 130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_and_the_same_command_goes_on(new_run: NewRun, tmp_path: Path, number: int) -> None:
    def command(number: int) -> int:
        arguments = [str(Path(__file__).parent), str(tmp_path / "run"), str(number)]
        program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
        result = subprocess.run(
            program, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert result.stderr == ""
        return result.returncode

    def state() -> str:
        return json.loads((tmp_path / "run" / "status.json").read_text())["state"]

    assert command(number) == 130
    assert state() == "interrupted"
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000001_update_0003"
    if number == signal.SIGTERM:
        assert command(0) == 0
    else:
        assert new_run(tmp_path / "run", config={"steps": 4}, optim={"epochs": 2}).train() == "finished"
    assert state() == "finished"
    straight = new_run(tmp_path / "straight", config={"steps": 4}, optim={"epochs": 2})
    straight.train()
    resumed = new_run(tmp_path / "run", config={"steps": 4}, optim={"epochs": 2})
    assert_same(outcome(resumed), outcome(straight))
