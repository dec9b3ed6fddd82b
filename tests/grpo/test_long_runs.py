"""Days go by: the machine dies, the disk fills, a verifier's process falls over, a batch turns to NaN."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from apportion.grpo.checkpoint import latest_checkpoint
from apportion.verifiers import InputError, Sample
from apportion.verifiers.isolated import Isolated

STEPS, SAVE_EVERY = 8, 2
OVERRIDES = [
    *("experiment=smoke", "task.num_held_out=8", "task.num_retention=4", "warm_start.steps=2", "seed=3"),
    *("policy.hidden_size=16", "policy.layers=1", "policy.heads=2", "policy.intermediate_size=16"),
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "credit=process/own_step"),
    *(f"run.steps={STEPS}", f"run.save_every={SAVE_EVERY}", "run.eval_every=2", "run.rollouts_every=1"),
]
# Imports everything once, then forks off the command again and again, and kills all but the last.
KILLER = """
    import json, os, random, signal, sys, time
    from pathlib import Path

    import pyarrow.parquet, safetensors.torch, torch, torch._dynamo, transformers.models.llama.modeling_llama
    from apportion.experiments import parts, policies, warmstart
    from apportion.experiments.train import main
    from apportion.grpo import decoding, trainer
    from apportion.grpo.checkpoint import latest_checkpoint

    root, seed, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


    def begin(folder):
        child = os.fork()
        if child:
            return child
        with (root / "said.txt").open("a") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        code = 1
        try:
            main([*overrides, f"run.dir={folder}"])
            code = 0
        finally:
            os._exit(code)


    def end(child, folder, saved=None, after=0.0):
        # Waits for the child, and kills it so long after it saved so often (0: after it began to train); its code.
        seen, moment = [], None
        while True:
            found, how = os.waitpid(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(how)
            now = (folder / "status.json").stat().st_mtime_ns if (folder / "status.json").exists() else 0
            now = (now > begun, max(map(str, (folder / "checkpoints").glob("step_*")), default=""))
            seen += [now] if not seen or now != seen[-1] else []
            if moment is None and saved is not None and now[0] and len({name for _, name in seen}) > saved:
                moment = time.monotonic() + after
            if moment is not None and time.monotonic() > moment:
                os.kill(child, signal.SIGKILL)
                moment, saved = None, None
            time.sleep(0.001)


    def left(folder):
        whole = latest_checkpoint(folder / "checkpoints")
        for path in (folder / "checkpoints").glob("step_*"):  # every one of them can be read
            torch.load(path / "state.pt", weights_only=True)
            safetensors.torch.load_file(path / "model.safetensors")
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().split("\\n") if metrics.exists() else []
        steps = [json.loads(line)["step"] for line in lines[:-1]]
        kept = torch.load(whole / "state.pt", weights_only=True)["step"] if whole else 0
        return {"kept": kept, "logged": steps}


    begun = time.time_ns()
    code = end(begin(root / "straight"), root / "straight")
    assert code == 0, (root / "said.txt").read_text()
    rows = (root / "straight" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(row)["seconds"] for row in rows]
    moments, killed = random.Random(seed), []
    for attempt in range(30):
        begun = time.time_ns()
        saved, after = moments.choice((0, 1, 1)), moments.uniform(0, 2 * (seconds[-1] - seconds[1]) / len(seconds))
        code = end(begin(root / "killed"), root / "killed", saved, after)
        if code == 0:
            break
        killed.append({"code": code, **left(root / "killed")})
    print(json.dumps({"code": code, "killed": killed}))
"""


def without_times(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@pytest.mark.slow
def test_a_run_killed_again_and_again_loses_what_is_not_saved_and_nothing_else(tmp_path: Path) -> None:
    """``apportion train``, killed by SIGKILL at random moments from its first line to its last."""
    program = [sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path), "1", *OVERRIDES]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "APPORTION_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(program, capture_output=True, text=True, timeout=300, env=surroundings, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    killed = found["killed"]
    assert found["code"] == 0, (tmp_path / "said.txt").read_text()
    assert len(killed) >= 4
    assert {each["code"] for each in killed} == {-signal.SIGKILL}
    kept = [each["kept"] for each in killed]
    assert kept == sorted(kept)  # never thrown back behind a checkpoint
    assert len(set(kept)) > 2, "the kills all hit one step"
    for each in killed:
        assert each["logged"] == list(range(len(each["logged"])))  # whole lines, none twice
        assert 0 <= max(each["logged"], default=0) - each["kept"] <= SAVE_EVERY
    assert any(max(each["logged"], default=0) > each["kept"] for each in killed), "no kill cost a step"
    straight, again = tmp_path / "straight", tmp_path / "killed"
    assert without_times(again) == without_times(straight)
    assert len(without_times(again)) == STEPS + 1
    ends = [safetensors.torch.load_file(folder / "model" / "model.safetensors") for folder in (straight, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    names = [sorted(path.name for path in (folder / "rollouts").glob("step_*")) for folder in (straight, again)]
    assert names[0] == names[1] == [f"step_{step:05d}.parquet" for step in range(1, STEPS + 1)]
    tables = [pyarrow.parquet.read_table(folder / "rollouts" / names[0][-1]) for folder in (straight, again)]
    assert tables[0].equals(tables[1])
    assert not list((again / "checkpoints").glob(".*"))  # what the kills left half-written was swept up


SAVED: dict[str, Any] = {"config": {"steps": 3, "save_every": 1, "rollouts_every": 1}}
WRITES = [
    (os, "write"),
    (os, "fsync"),
    (Path, "write_text"),
    (Path, "mkdir"),
    (Path, "replace"),
    (Path, "rename"),
    (torch, "save"),
    (safetensors.torch, "save_model"),
    (pyarrow.parquet, "write_table"),
]


def test_a_disk_that_is_full_from_any_write_on_costs_the_steps_since_the_last_checkpoint(
    new_run: Any, tmp_path: Path
) -> None:
    def run(folder: Path, full_from: int | None) -> tuple[Any, int]:
        """A run, and how often it wrote; from the ``full_from``-th time on, nothing goes on the disk any more."""
        made, calls = new_run(folder, **SAVED), 0
        with pytest.MonkeyPatch.context() as patch:
            for holder, name in WRITES:
                whole = getattr(holder, name)

                def writing(*arguments: Any, whole: Any = whole, **options: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if full_from is not None and calls > full_from:
                        raise OSError(28, "No space left on device")
                    return whole(*arguments, **options)

                patch.setattr(holder, name, writing)
            if full_from is None:
                assert made.train() == "finished"
            else:
                with pytest.raises(InputError) as caught:
                    made.train()
                assert "cannot be written (No space left on device)" in str(caught.value)
                assert "\n" not in str(caught.value)
        return made, calls

    straight, writes = run(tmp_path / "straight", None)
    assert writes > 30
    for full_from in [0, 1, *sorted(random.Random(0).sample(range(2, writes - 1), 4)), writes - 1]:
        folder = tmp_path / str(full_from)
        broken, _ = run(folder, full_from)
        saved = latest_checkpoint(folder / "checkpoints")
        assert broken.trainer.state.step - (0 if saved is None else int(saved.name.split("_")[1])) in (0, 1)
        mended = new_run(folder, **SAVED)
        assert mended.train() == "finished"
        assert without_times(folder) == without_times(tmp_path / "straight")
        assert all(torch.equal(value, straight.weights[name]) for name, value in mended.weights.items())


VERIFIER = """
    import os, signal
    from pathlib import Path

    def judge(completions, **columns):
        folder = Path(__file__).parent
        (folder / "pid").write_text(str(os.getpid()))
        if (folder / "all").exists() or completions[0].startswith(tuple("0123456789")):
            os.kill(os.getpid(), signal.SIGKILL)
        return [0.25 * len(text) for text in completions]
"""


def even(samples: list[Sample]) -> list[float]:
    return [float(len(sample.completion) % 2 == 0) for sample in samples]


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a verifier whose process dies on answers that begin with a digit, or on all (file ``all``)."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "mortal_verifier.py").write_text(textwrap.dedent(VERIFIER))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_verifiers_process_that_dies_costs_the_answer_it_died_on(new_run: Any, tmp_path: Path, mortal: Path) -> None:
    def forget(step: int, _: Any) -> None:
        if step == 1:  # and one that dies while nobody asks it costs nothing
            os.kill(int((mortal / "pid").read_text()), signal.SIGKILL)

    verifiers = {"answer": even, "format": Isolated("mortal_verifier.judge", timeout_s=20.0)}
    run = new_run(tmp_path / "run", verifiers=verifiers, on_step=forget, config={"steps": 3, "rollouts_every": 1})
    assert run.train() == "finished"
    died = 0
    for step in (1, 2, 3):
        table = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / f"step_{step:05d}.parquet").to_pylist()
        for row in table:
            score = json.loads(row["verdicts"])["format"]["score"]
            begins = row["completion"].startswith(tuple("0123456789"))
            assert score == (None if begins else 0.25 * len(row["completion"]))
            died += begins
    assert died
    assert sum(row.get("verifier/errors_format", 0) for row in run.rows) >= died


def test_a_verifier_that_dies_on_every_answer_stops_the_run_and_the_mended_one_goes_on(
    new_run: Any, tmp_path: Path, mortal: Path
) -> None:
    options: dict[str, Any] = {"config": {"steps": 3, "save_every": 1, "eval_every": 0}}

    def verifiers() -> dict[str, Any]:
        return {"answer": even, "format": Isolated("mortal_verifier.judge", timeout_s=20.0)}

    def dying(step: int, _: Any) -> None:
        if step == 1:
            (mortal / "all").touch()

    run = new_run(tmp_path / "run", verifiers=verifiers(), on_step=dying, **options)
    with pytest.raises(InputError, match=r"verifiers\.format failed on 6 of 6 completions; mend it.*died: .*SIGKILL"):
        run.train()
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000001"
    (mortal / "all").unlink()
    assert new_run(tmp_path / "run", verifiers=verifiers(), **options).train() == "finished"


def test_a_batch_of_nan_is_skipped_told_and_leaves_no_trace(new_run: Any, tmp_path: Path) -> None:
    run = new_run(tmp_path, optim={"minibatches": 1}, rollout={"group_size": 8}, config={"steps": 4, "eval_every": 0})
    model, weights = run.trainer.policy.model, []

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        here = torch.is_grad_enabled() and run.trainer.state.step == 1  # the updates of the second batch
        return output * float("nan") if here else output

    model.model.norm.register_forward_hook(poison)
    run.trainer.journal._on_step = lambda step, _: weights.append(run.weights)
    assert run.train() == "finished"
    assert [row.get("optim/skipped_updates") for row in run.rows[1:]] == [0.0, 1.0, 0.0, 0.0]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(weights)]
    assert same == [False, True, False, False]  # before training, then after each batch
    assert all(value.isfinite().all() for value in run.weights.values())
    for state in run.trainer.state.optimizer.state.values():
        assert state["exp_avg"].isfinite().all()
    assert all("policy/loss" in row for row in (run.rows[1], run.rows[3], run.rows[4]))
