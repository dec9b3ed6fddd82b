"""Two processes that share a run leave what one leaves: metrics, weights, checkpoints, and the same kinds of end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import apportion.grpo.learner as learner
from apportion.credit.baselines import OptimalTokenBaseline
from apportion.credit.compose import Composition
from apportion.credit.future_kl import FutureKL
from apportion.credit.implicit import ImplicitReward
from apportion.credit.influence import InfluenceWeight
from apportion.credit.process import ProcessReward
from apportion.credit.redistribution import AttentionShare
from apportion.credit.resampled import ResampledSteps
from apportion.credit.tree import TreeDifference
from apportion.grpo.evidence import Evidence
from apportion.grpo.implicit_prm import ImplicitPrm
from apportion.grpo.influence import GradientInfluence
from apportion.grpo.parallel import ParallelConfig
from apportion.grpo.prefix_values import PrefixValuer
from apportion.grpo.processes import ALONE, Processes, joined
from apportion.grpo.records import rollouts_path
from apportion.grpo.scorers import LastTokenAttention
from apportion.grpo.task import Problem
from apportion.grpo.tree_sampling import TreeRolloutConfig
from apportion.verifiers import Sample


def helpers() -> Any:
    """The module beside this one, also where this one runs as a program."""
    spec = importlib.util.spec_from_file_location("grpo_helpers", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_helpers"] = module
    spec.loader.exec_module(module)
    return module


HERE = helpers()


def picky(samples: Sequence[Sample]) -> list[float]:
    """Fails on completions that were cut."""
    if any(sample.metadata["truncated"] for sample in samples):
        raise RuntimeError("no end")
    return [1.0] * len(samples)


class Repeating:
    """A task that gives the same problem several times in a batch."""

    def batch(self, step: int, num_prompts: int, seed: int) -> list[Problem]:
        return [Problem(name, f"{name}+2=?") for name in ("1", "1", "3", "1", "4")[:num_prompts]]

    def held_out(self) -> list[Problem]:
        return [Problem("h", "5+2=?")]

    def retention(self) -> list[Problem]:
        return []


WAYS = ("replicated", "sharded")
STEPS = {"steps": 3, "eval_every": 2, "rollouts_every": 1}
OPTIM = {"lr": 0.002, "epochs": 2, "minibatches": 2, "schedule": "cosine", "weight_decay": 0.1}


def plain() -> dict[str, Any]:
    """Step credit, a KL in the loss, minibatches, cut answers left out, an odd number of problems."""
    return {
        "strategy": ProcessReward(steps="answer"),
        "rollout": {"prompts_per_step": 5, "group_size": 3, "max_new_tokens": 16, "truncated": "mask"},
        "loss": {"kl_coef": 0.05},
        "optim": OPTIM,
        "config": STEPS,
    }


def evident() -> dict[str, Any]:
    """All that is gathered beyond the rollouts: continuations, distributions, token scores, a model that learns."""
    terms = {
        "steps": ResampledSteps("answer"),
        "tokens": OptimalTokenBaseline(),
        "attention": AttentionShare(),
        "influence": FutureKL(InfluenceWeight(), clip=0.5, high_only=False),
        "implicit": ImplicitReward(),
    }
    scorers = {
        "attention": LastTokenAttention(),
        "influence": GradientInfluence(noise=0.1),
        "implicit": ImplicitPrm(updates=2),
    }
    return {
        "strategy": Composition(terms),
        "evidence": Evidence(scorers, PrefixValuer(num_samples=3)),
        "rollout": {"prompts_per_step": 3, "group_size": 3},
        "optim": OPTIM,
        "config": {**STEPS, "steps": 2},
    }


def trees() -> dict[str, Any]:
    return {
        "strategy": TreeDifference(),
        "rollout": {"prompts_per_step": 3, "group_size": 4, "branching": (2, 2), "segment_tokens": 3},
        "rollout_class": TreeRolloutConfig,
        "optim": OPTIM,
        "config": {**STEPS, "steps": 2},
    }


def repeated() -> dict[str, Any]:
    return {"task": Repeating(), "rollout": {"prompts_per_step": 5}, "optim": OPTIM, "config": {**STEPS, "steps": 2}}


def faulty() -> dict[str, Any]:
    return {
        "verifiers": {"answer": HERE.even_digits, "format": picky},
        "rollout": {"prompts_per_step": 3},
        "optim": OPTIM,
        "config": {**STEPS, "steps": 2, "max_error_share": 1.0},
    }


RUNS = {function.__name__: function for function in (plain, evident, trees, repeated, faulty)}


def run_of(folder: Path, options: dict[str, Any], processes: Processes = ALONE, shard: bool = False) -> Any:
    options = dict(options)
    made = options.pop("rollout_class", None)
    if made is not None:
        HERE.RolloutConfig, before = made, HERE.RolloutConfig
    try:
        return HERE.make_run(folder, **options, processes=processes, parallel=ParallelConfig(shard=shard))
    finally:
        if made is not None:
            HERE.RolloutConfig = before


def weights(run: Any) -> dict[str, torch.Tensor]:
    policy = run.trainer.whole_policy()
    return {} if policy.model is None else {k: v.detach().clone() for k, v in policy.model.named_parameters()}


def spoiled(step: int, index: int) -> Callable[..., Any]:
    """Gradients in which one row of one optimiser step has a loss that is no number."""
    whole = learner.accumulate_gradients

    def accumulate(policy: Any, window: Any, rows: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if window.step == step and window.done == index:
            trained = [row for row in options["step_rows"] if window.batch.completion_mask[row, 0]]
            advantages = window.credit.advantages.clone()
            advantages[trained[-1], 0] = float("nan")
            window = replace(window, credit=replace(window.credit, advantages=advantages))
        return whole(policy, window, rows, *arguments, **options)

    return accumulate


def nan(folder: Path, processes: Processes = ALONE, shard: bool = False) -> Any:
    """A run with a loss that is no number in one row of the third optimiser step."""
    whole = learner.accumulate_gradients
    learner.accumulate_gradients = spoiled(1, 2)
    try:
        run = run_of(folder, plain(), processes, shard)
        run.train()
        return run
    finally:
        learner.accumulate_gradients = whole


# What two processes do


def work(folder: Path, processes: Processes, shard: bool) -> None:
    """All that two processes are asked for; starting them costs more than any of it."""
    for name, function in RUNS.items():
        run = run_of(folder / name, function(), processes, shard)
        assert run.train() == "finished"
        keep(folder, name, run, processes)
    keep(folder, "nan", nan(folder / "nan", processes, shard), processes)
    stopped = run_of(folder / "stopped", plain(), processes, shard)
    if processes.number == 1:  # nobody asks the main process
        stopped.stop_after(6)
    assert stopped.train() == "interrupted"
    begun = run_of(folder / "begun", plain(), processes, shard)
    assert begun.trainer.state.window is not None
    assert begun.train() == "finished"
    keep(folder, "begun", begun, processes)
    broken(folder, processes, shard)


def keep(folder: Path, name: str, run: Any, processes: Processes) -> None:
    """What this process has of the weights at the end, and whether it was all of them while it trained."""
    local = all(parameter.numel() == _local(parameter).numel() for parameter in run.trainer.policy.model.parameters())
    torch.save({"weights": weights(run), "local": local}, folder / f"{name}-{processes.number}.pt")


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def broken(folder: Path, processes: Processes, shard: bool) -> None:
    """One process meets an error of its own, in the evaluation after the second batch."""
    run = run_of(folder / "broken", plain(), processes, shard)

    def explode(_: str) -> list[int]:
        raise LookupError("of one process alone")

    def break_later(*_: Any) -> None:
        if processes.number == 1 and run.trainer.state.step == 1:
            run.trainer.policy.encode = explode

    run.trainer.state.optimizer.register_step_post_hook(break_later)
    with pytest.raises(LookupError, match="of one process alone") as caught:
        run.train()
    assert "in process 1:" in caught.value.__notes__[0]
    assert "in explode" in caught.value.__notes__[0]


# What is compared


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of everything that two processes did, by the way in which they share the weights."""
    folder = tmp_path_factory.mktemp("together")
    for way in WAYS:
        begun = run_of(folder / way / "begun", plain())
        begun.stop_after(6)
        assert begun.train() == "interrupted"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(params=WAYS)
def shared(launched: Path, request: pytest.FixtureRequest) -> Path:
    folder: Path = launched / request.param
    return folder


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The same run by one process; made once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = nan(folder) if name == "nan" else run_of(folder, RUNS[name]())
            assert name == "nan" or made[name].train() == "finished"
        return made[name]

    return get


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two structures differ by more than 1e-5 of the larger number, or of one."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: {sorted(one.keys() ^ other.keys())}"
        for key in one:
            yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other)):
            yield from differences(left, right, f"{where}/{index}")
    elif isinstance(one, float):
        if not abs(one - other) <= 1e-5 * max(1.0, abs(one), abs(other)):
            yield f"{where}: {one} and {other}"
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def measured(folder: Path) -> list[dict[str, float]]:
    """All that is logged but times and forwards: each process decodes its own answers, and packs its own groups."""
    return [
        {key: float(value) for key, value in row.items() if "seconds" not in key and "forward" not in key}
        for row in rows_of(folder)
    ]


def assert_same_weights(shared: Path, name: str, run: Any) -> None:
    found = [torch.load(shared / f"{name}-{number}.pt") for number in range(2)]
    wanted = {name: value.detach() for name, value in run.trainer.policy.model.named_parameters()}
    assert found[0]["weights"].keys() == wanted.keys()
    assert all(float((value - wanted[key]).abs().max()) < 1e-5 for key, value in found[0]["weights"].items())
    if shared.name == "replicated":
        assert all(torch.equal(value, found[1]["weights"][key]) for key, value in found[0]["weights"].items())
    else:
        assert not found[0]["local"]
        assert not found[1]["local"]
        assert found[1]["weights"] == {}


def state_of(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_measure_write_and_learn_what_one_does(shared: Path, alone: Any, name: str) -> None:
    run = alone(name)
    assert list(differences(measured(run.folder), measured(shared / name))) == []
    assert_same_weights(shared, name, run)
    for step in range(1, int(run.rows[-1]["step"]) + 1):
        one, other = (pq.read_table(rollouts_path(folder, step)).to_pylist() for folder in (run.folder, shared / name))
        for record in (*one, *other):
            record["parts"] = json.loads(record["parts"])
        assert list(differences(one, other)) == []
    assert state_of(shared / name) == "finished"


@pytest.mark.slow
def test_the_runs_that_are_compared_are_no_trivial_ones(alone: Any) -> None:
    rows = alone("plain").rows
    assert all(row["length/truncated"] > 0.1 and row["credit/nonzero_tokens"] > 0.1 for row in rows[1:])
    assert max(row["policy/ref_kl"] for row in rows[1:]) > 1e-4
    assert {"cost/value_tokens", "implicit/loss"} <= alone("evident").rows[1].keys()
    assert all(row["verifier/errors_format"] > 0 for row in alone("faulty").rows)
    records = pq.read_table(rollouts_path(alone("repeated").folder, 1)).to_pylist()
    completions = [(record["problem_id"], tuple(record["completion_ids"])) for record in records]
    assert len(set(completions)) == len(completions) == 15


@pytest.mark.slow
def test_a_loss_that_is_no_number_in_one_process_is_skipped_by_both(shared: Path, alone: Any) -> None:
    run = alone("nan")
    assert run.rows[1]["optim/skipped_updates"] == 1.0
    assert list(differences(measured(run.folder), measured(shared / "nan"))) == []
    assert_same_weights(shared, "nan", run)


@pytest.mark.slow
def test_what_one_process_began_two_go_on_with(shared: Path, alone: Any) -> None:
    run = alone("plain")
    assert list(differences(measured(run.folder), measured(shared / "begun"))) == []
    assert_same_weights(shared, "begun", run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "broken"])
def test_what_two_processes_began_one_goes_on_with(shared: Path, alone: Any, name: str) -> None:
    """The one run was stopped by a request to one process, the other by an error in one."""
    assert state_of(shared / name) == {"stopped": "interrupted", "broken": "failed"}[name]
    run = run_of(shared / name, plain())
    assert run.trainer.state.window is not None
    assert run.train() == "finished"
    straight = alone("plain")
    assert list(differences(measured(straight.folder), measured(shared / name))) == []
    for key, value in straight.weights.items():
        assert float((run.weights[key] - value).abs().max()) < 1e-5


@pytest.mark.slow
def test_the_command_runs_in_two_processes_and_only_one_speaks(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    small = ["experiment=smoke", "warm_start.steps=2", "run.steps=1", "task.num_held_out=4", "task.num_retention=2"]
    command = [sys.executable, *launcher, "-m", "apportion.experiments.train", *small, "parallel.shard=true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "APPORTION_CACHE": str(tmp_path)}

    def run(*further: str) -> Any:
        options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([*command, *further], check=False, **options)  # type: ignore[call-overload]

    refused = run("+reward.nobody=1.0")
    assert refused.returncode != 0
    (said,) = [line for line in refused.stderr.splitlines() if line.startswith("apportion train: ")]
    assert said.startswith("apportion train: reward.nobody: no verifier of that name")
    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path / "outputs" / "train"
    assert list(folder.parent.iterdir()) == [folder]
    assert done.stderr.count("step 1/1") == 1
    assert [row["step"] for row in rows_of(folder)] == [0, 1]
    assert state_of(folder) == "finished"
    assert {"model.safetensors", "config.json"} <= {path.name for path in (folder / "model").iterdir()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu", 120.0) as those:
        for one in WAYS:
            work(Path(sys.argv[1]) / one, those, shard=one == "sharded")
