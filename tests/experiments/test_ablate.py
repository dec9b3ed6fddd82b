"""Laws of the ablation: equal conditions for every strategy, and nothing is run twice or lost."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from apportion.experiments import ablate as module
from apportion.experiments.plan import plan_cells, read_sweep
from apportion.experiments.rundir import hold_folder
from apportion.verifiers import InputError

PROGRAM = str(Path(sys.executable).with_name("apportion"))
BASIC = "hydra/launcher=basic"  # cell after cell, in this process
SWEEP = ["credit=uniform,process/own_step,format/composed", "seed=0,1", BASIC, "run.dir=abl"]
LABELS = ["uniform", "process_own_step", "format_composed"]
PLUGIN = """
    import os, signal
    from dataclasses import dataclass
    from pathlib import Path
    import torch
    from apportion.credit import Credit

    @dataclass(frozen=True)
    class Mine:
        "Mine."
        factor: float = 1.0
        requires = frozenset({"reward"})
        phase = "rollout"
        conserves = "none"

        def __call__(self, batch):
            if Path("fail").exists():
                raise RuntimeError("no luck\\ntoday")
            if Path("stop").exists():
                os.kill(os.getpid(), signal.SIGINT)
            reward = batch.reward.nan_to_num().float()[:, None] * self.factor
            return Credit(reward * batch.completion_mask)
"""
MINE = "+ablate.strategies.mine=['~credit','+credit._target_={}.Mine','+credit.factor=0.5']"
FEWER = [f"ablate.strategies.{name}=null" for name in ("process_return", "first_error", "wrong_steps", "shuffled")]
ONLY_MINE = [*FEWER, "ablate.strategies.own_step=null", "ablate.strategies.format=null", "ablate.seeds=2"]


@pytest.fixture(scope="module")
def ablation(tmp_path_factory, apportion_in, tiny):
    """One small ablation that has run; do not change it."""
    folder = tmp_path_factory.mktemp("ablation")
    return folder / "abl", apportion_in(folder, "ablate", *tiny, *SWEEP)


@pytest.fixture
def copied(ablation, tmp_path):
    """A copy to change, as if it had run in ``tmp_path``."""
    shutil.copytree(ablation[0], tmp_path / "abl")
    return tmp_path / "abl"


@pytest.fixture
def plugin(tmp_path, request):
    """The name of a module in the current folder with the strategy ``Mine``."""
    name = "plugin_" + re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(PLUGIN))
    return name


@pytest.fixture
def no_report(monkeypatch):
    """Leaves the report out, which other tests look at."""
    monkeypatch.setattr(module, "_report", lambda root, plans: None)


def state(root, label, seed):
    path = root / "cells" / label / f"seed_{seed}" / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else "missing"


def contents(root):
    """Every file of the cells, by path."""
    files = (path for path in (root / "cells").rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def rollouts(root, label, seed):
    return pq.read_table(root / "cells" / label / f"seed_{seed}" / "rollouts" / "step_00001.parquet").to_pydict()


def test_every_strategy_runs_with_every_seed(ablation):
    root, outcome = ablation
    assert outcome.status == 0
    assert {(label, seed): state(root, label, seed) for label in LABELS for seed in (0, 1)} == {
        (label, seed): "finished" for label in LABELS for seed in (0, 1)
    }
    plan = json.loads((root / "ablation.json").read_text())
    assert (plan["strategies"], plan["seeds"], plan["baseline"]) == (LABELS, [0, 1], "uniform")
    assert (plan["budget"], plan["task"]) == ({"kind": "steps", "value": 2}, "chain")
    assert plan["command"].startswith("apportion ablate ")
    for label in LABELS:
        for seed in (0, 1):
            cell = root / "cells" / label / f"seed_{seed}"
            config = yaml.safe_load((cell / "config.yaml").read_text())
            assert (config["label"], config["seed"], config["threads"]) == (label, seed, 1)
            assert json.loads((cell / "run.json").read_text())["strategy"] == label


def test_the_last_lines_are_the_report_and_the_folder(ablation):
    root, outcome = ablation
    assert outcome.out[-2:] == [f"report: {root / 'report.html'}", str(root)]
    assert [line.split()[0] for line in outcome.out[:-3]] == ["strategy", *LABELS]
    assert outcome.out[-3].startswith("2 paired seeds find a true difference of 11.")
    assert (root / "report.html").exists()
    with (root / "summary.csv").open() as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == LABELS
    assert outcome.err[-1].startswith("cells 6/6")


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_has_the_same_first_rollouts_whatever_the_strategy(ablation, seed):
    root, _ = ablation
    first = rollouts(root, "uniform", seed)
    for label in LABELS[1:]:
        other = rollouts(root, label, seed)
        for column in ("problem_id", "prompt", "completion", "completion_ids", "logprobs", "reward", "verdicts"):
            assert other[column] == first[column], column
    assert rollouts(root, "process_own_step", seed)["advantages"] != first["advantages"]
    assert rollouts(root, "uniform", 1 - seed)["prompt"] != first["prompt"]


def test_every_strategy_starts_from_the_same_weights(ablation):
    root, _ = ablation
    starts = set()
    for path in root.glob("cells/*/*/metrics.jsonl"):
        row = json.loads(path.read_text().splitlines()[0])
        starts.add((row["eval/success"], row["eval/format_pass_rate"], row["retention/success"]))
    assert len(starts) == 1


def test_a_second_call_runs_nothing_and_builds_the_report_anew(copied, apportion, tiny, monkeypatch):
    before = contents(copied)
    (copied / "report.html").unlink()
    monkeypatch.setattr(module, "train", lambda *a, **k: pytest.fail("ran again"))
    outcome = apportion("ablate", *tiny, *SWEEP)
    assert outcome.status == 0
    assert (copied / "report.html").exists()
    assert contents(copied) == before


def test_a_further_seed_runs_alone(copied, apportion, tiny, no_report):
    before = contents(copied)
    arguments = [argument.replace("seed=0,1", "seed=0,1,2") for argument in SWEEP]
    assert apportion("ablate", *tiny, *arguments).status == 0
    after = contents(copied)
    assert {name: after[name] for name in before} == before
    assert {state(copied, label, 2) for label in LABELS} == {"finished"}


def test_other_options_are_refused_and_nothing_changes(copied, apportion, tiny):
    before = contents(copied)
    plan = (copied / "ablation.json").read_text()
    outcome = apportion("ablate", *tiny, *SWEEP, "run.steps=3")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(
        r"seed_0: was run with other options \(run\.steps=2, not 3\); choose another run\.dir", outcome.err[0]
    )
    assert contents(copied) == before
    assert (copied / "ablation.json").read_text() == plan


def test_a_killed_cell_is_run_again_and_ends_as_it_would_have(copied, apportion, tiny, no_report):
    cell = copied / "cells" / "uniform" / "seed_1"
    whole = rollouts(copied, "uniform", 1)
    status = json.loads((cell / "status.json").read_text())
    (cell / "status.json").write_text(json.dumps({**status, "state": "running"}))
    shutil.rmtree(cell / "checkpoints")
    (cell / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n{"step": 1, "tok')
    assert apportion("ablate", *tiny, *SWEEP).status == 0
    assert state(copied, "uniform", 1) == "finished"
    assert rollouts(copied, "uniform", 1)["completion"] == whole["completion"]
    assert [json.loads(line)["step"] for line in (cell / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_failed_cell_is_told_the_others_go_on_and_it_is_retried_on_request(apportion, tiny, tmp_path, plugin):
    arguments = ["ablate", *tiny, *ONLY_MINE, MINE.format(plugin), BASIC, "run.dir=abl"]
    root = tmp_path / "abl"
    (tmp_path / "fail").touch()
    outcome = apportion(*arguments)
    assert outcome.status == 1
    assert [state(root, "uniform", seed) for seed in (0, 1)] == ["finished"] * 2
    assert [state(root, "mine", seed) for seed in (0, 1)] == ["failed"] * 2
    told = [line for line in outcome.err if line.startswith("failed: mine seed ")]
    assert len(told) == 2
    assert "RuntimeError: no luck today" in told[0]
    assert re.search(r"2 of 4 cells failed; ablate\.retry_failed=true run\.dir=\S+ runs them again", outcome.err[-1])
    assert outcome.out[-1] == str(root)
    assert "no luck" in (root / "cells" / "mine" / "seed_0" / "traceback.txt").read_text()
    (tmp_path / "fail").unlink()
    assert apportion(*arguments).status == 1  # they are not run again unasked
    assert state(root, "mine", 0) == "failed"
    assert apportion(*arguments, "ablate.retry_failed=true").status == 0
    assert [state(root, "mine", seed) for seed in (0, 1)] == ["finished"] * 2
    assert not (root / "cells" / "mine" / "seed_0" / "traceback.txt").exists()


def test_a_strategy_of_ones_own_is_one_of_them(apportion, tiny, tmp_path, plugin, no_report):
    (tmp_path / "conf" / "credit").mkdir(parents=True)
    (tmp_path / "conf" / "credit" / "mine.yaml").write_text(f"_target_: {plugin}.Mine\nfactor: 0.25\n")
    outcome = apportion("ablate", *tiny, "--config-dir", "conf", "credit=mine", "seed=3", BASIC, "run.dir=abl")
    assert outcome.status == 0
    config = yaml.safe_load((tmp_path / "abl" / "cells" / "mine" / "seed_3" / "config.yaml").read_text())
    assert config["credit"] == {"_target_": f"{plugin}.Mine", "factor": 0.25}
    assert state(tmp_path / "abl", "uniform", 3) == "finished"  # the baseline was added


def test_a_stop_leaves_cells_that_go_on(apportion, tiny, tmp_path, plugin, no_report):
    """Ctrl-C while a cell of ``mine`` runs: it is saved, the next ones do not begin, the same command ends it all."""
    arguments = ["ablate", *tiny, *ONLY_MINE, MINE.format(plugin), BASIC, "run.dir=abl"]
    root = tmp_path / "abl"
    (tmp_path / "stop").touch()
    outcome = apportion(*arguments)
    assert outcome.status == 130
    assert [state(root, "mine", seed) for seed in (0, 1)] == ["interrupted", "missing"]
    assert outcome.out == [str(root)]
    assert re.search(rf"stopped with 2 of 4 cells done; the same command with run\.dir={root} goes on", outcome.err[-1])
    assert not (root / ".stop").exists()
    (tmp_path / "stop").unlink()
    assert apportion(*arguments).status == 0
    assert [state(root, "mine", seed) for seed in (0, 1)] == ["finished"] * 2
    rows = (root / "cells" / "mine" / "seed_0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]


def test_a_budget_of_tokens_is_the_same_for_all(apportion, tiny, tmp_path, no_report):
    budget = ["ablate.budget=tokens", "run.budget_tokens=300", "run.steps=50", "seed=0", BASIC, "run.dir=abl"]
    assert apportion("ablate", *tiny, "credit=uniform,process/own_step", *budget).status == 0
    for label in ("uniform", "process_own_step"):
        rows = (tmp_path / "abl" / "cells" / label / "seed_0" / "metrics.jsonl").read_text().splitlines()
        tokens = [json.loads(row)["tokens"] for row in rows]
        assert tokens[-2] < 300 <= tokens[-1]
    plan = json.loads((tmp_path / "abl" / "ablation.json").read_text())
    assert plan["budget"] == {"kind": "tokens", "value": 300}


@pytest.mark.slow
def test_side_by_side_cells_stop_at_ctrl_c_and_go_on(apportion, tiny, tmp_path, warm_start_cache, plugin):
    """The real thing: the program, the joblib launcher, Ctrl-C in the terminal, and the same command again."""
    root = tmp_path / "abl"
    longer = [*tiny, "run.steps=24", "run.eval_every=0", "run.rollouts_every=0"]
    command = [PROGRAM, "ablate", *longer, *ONLY_MINE, MINE.format(plugin), "run.dir=abl"]
    program = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "APPORTION_CACHE": str(warm_start_cache)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not (states := running(root)) and program.poll() is None:
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (130, f"{root}\n"), (states, err)
    assert "the same command with run.dir=" in err.splitlines()[-1]
    assert "finished" not in {state(root, label, seed) for label in ("uniform", "mine") for seed in (0, 1)}
    again = apportion(*command[1:])
    assert (again.status, again.out[-1]) == (0, str(root))
    assert all(line.startswith("cells ") for line in again.err)  # no chatter of launchers
    assert {state(root, label, seed) for label in ("uniform", "mine") for seed in (0, 1)} == {"finished"}
    assert rollouts(root, "mine", 1)["completion"] == rollouts(root, "uniform", 1)["completion"]
    for path in root.glob("cells/*/*/metrics.jsonl"):
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(25))


def running(root):
    """Cells that have made a step."""
    return [path for path in root.glob("cells/*/*/metrics.jsonl") if '"step": 1,' in path.read_text()]


REFUSED = {
    "unknown strategy": (
        ["credit=uniform,unifrom"],
        r"strategies\.unifrom: credit=unifrom: .*did you mean credit=uniform\?",
    ),
    "strategy without a signal": (
        ["~verifiers.format", "run.format=null"],
        r"strategies\.format: credit needs .*strategies\.format=null",
    ),
    "key that a strategy lacks": (["credit.ddof=1"], r"strategies\.\w+: credit\.ddof: no such key"),
    "the same strategy twice": (["credit=uniform,uniform"], r"credit=uniform: another strategy has the label uniform"),
    "labels that meet": (
        ["credit=process/own_step,process_own_step"],
        r"another strategy has the label process_own_step too",
    ),
    "group taken out": (["~credit"], r"~credit: .*write '\+ablate\.strategies\.mine=\[\"~credit\""),
    "pattern of names": (["credit=glob(*)"], r"credit=glob\(\*\): write the values one by one, as in credit=a,b"),
    "sweep of what all have in common": (["run.steps=2,3"], r"run\.steps: cannot be varied besides strategy and seed"),
    "sweep of the ablation itself": (["ablate.seeds=2,3"], r"ablate\.seeds: cannot be varied"),
    "settings that are no lists": (
        ["+ablate.settings.optim.lr=1e-4"],
        r"ablate\.settings\.optim\.lr=.*: must be a list",
    ),
    "group size that leaves a rest": (
        ["+ablate.settings.rollout.group_size=[8,5]"],
        r"rollout\.group_size: 5 does not divide the 32 answers",
    ),
    "a setting that a strategy refuses": (["optim.lr=1e-4,-1"], r"strategies\.uniform at optim\.lr=-1: .*negative"),
    "a setting that is no key": (["optim.rate=1,2"], r"strategies\.uniform: optim\.rate: no such key; there are: "),
    "rule with an unknown key": (
        ["+ablate.collapse.half=1"],
        r"ablate\.collapse\.half: no such option; there are of_best",
    ),
    "the same seed twice": (["seed=1,1"], r"ablate\.seeds=\[1, 1\]: give .*different ones"),
    "no seeds": (["ablate.seeds=0"], r"ablate\.seeds=0: give a number of seeds"),
    "text for a seed": (["seed=a"], r"ablate\.seeds=\['a'\]: must be a list of which each is a whole number"),
    "unknown budget": (["ablate.budget=time"], r"ablate\.budget='time': must be 'steps' or 'tokens'"),
    "text for a switch": (["ablate.retry_failed=maybe"], r"ablate\.retry_failed='maybe': must be true or false"),
    "text for the threshold": (["ablate.threshold=high"], r"ablate\.threshold='high': must be a number"),
    "added key that nothing reads": (["+ablate.retry=true"], r"ablate\.retry: nothing reads this key; .*retry_failed"),
    "no baseline": (["ablate.baseline=null"], r"ablate\.baseline=None: must be text"),
    "budget without an amount": (["ablate.budget=tokens"], r"ablate\.budget=tokens: give run\.budget_tokens"),
    "amount without its budget": (["run.budget_tokens=9"], r"run\.budget_tokens=9: .*set ablate\.budget=tokens"),
    "unequal compute": (
        ["ablate.strategies.own_step=['credit=process/own_step','run.steps=3']"],
        r"ablate\.strategies\.own_step: sets run\.steps=3, .* equal compute",
    ),
    "baseline that is nothing": (["ablate.baseline=nope"], r"ablate\.strategies\.nope: credit=nope: there is no such"),
    "misspelt key": (["ablate.seed=3"], r"ablate\.seed: no such key; did you mean ablate\.seeds\?"),
    "bad option of a part": (["loss.aggregation=mean"], r"loss\.aggregation='mean': must be"),
    "file that is not there": (
        ["task=jsonl", "task.path=gone", "ablate.strategies.format=null"],
        r"gone: no such file",
    ),
    "longer than the context": (["rollout.max_new_tokens=300"], r"rollout\.max_new_tokens=300 exceeds"),
    "line break that is none": (["+policy.system='a\\nb'"], r"policy\.system: holds a backslash"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_ends_in_one_line_before_anything_runs(kind, apportion, tmp_path):
    arguments, line = REFUSED[kind]
    outcome = apportion("ablate", *FEWER, *arguments, "run.dir=abl")
    assert (outcome.status, outcome.out, len(outcome.err)) == (2, [], 1)
    assert outcome.err[0].startswith("apportion ablate: ")
    assert re.search(line, outcome.err[0]), outcome.err[0]
    assert not (tmp_path / "abl" / "cells").exists()


LABELS_REFUSED = {
    "a slash": (
        {"a/b": ["credit=uniform"]},
        r"ablate\.strategies\.'a/b': a label names a folder; use up to 60 letters",
    ),
    "dots": ({"..": ["credit=uniform"]}, r"'\.\.': a label names a folder"),
    "a hidden folder": ({".a": ["credit=uniform"]}, r"'\.a': a label names a folder"),
    "quotes and blanks": ({"it's \"": ["credit=uniform"]}, r"a label names a folder"),
    "a line break": ({"a\nb": ["credit=uniform"]}, r"'a\\nb': a label names a folder"),
    "nothing": ({"": ["credit=uniform"]}, r"'': a label names a folder"),
    "300 letters": ({"x" * 300: ["credit=uniform"]}, r"'x{80}': a label names a folder"),
    "capitals alone apart": ({"A": ["credit=uniform"], "a": ["credit=uniform"]}, r"has the label A too"),
}


def sweep_of(strategies, *arguments, **options):
    node = {"strategies": strategies, "seeds": 2, "baseline": "uniform", **options}
    return read_sweep(OmegaConf.create({"ablate": node}), arguments)


@pytest.mark.parametrize("kind", LABELS_REFUSED)
def test_a_label_that_names_no_folder_of_its_own_is_refused(kind):
    strategies, line = LABELS_REFUSED[kind]
    with pytest.raises(InputError, match=line):
        sweep_of(strategies)


def test_labels_that_name_folders_are_taken_as_they_are():
    labels = ["uniform", "own_step", "pav-0.5", "a+b=c", "größe", "ü" * 60]
    sweep = sweep_of({label: ["credit=uniform"] for label in labels})
    assert list(sweep.strategies) == labels
    folders = [plan.folder for plan in plan_cells(Path("/root/abl"), sweep)]
    assert len(set(folders)) == 12
    assert all(len(folder.parent.name.encode()) <= 255 for folder in folders)


def test_the_command_line_takes_the_place_of_strategies_and_seeds():
    sweep = sweep_of({"x": ["credit=x"]}, "credit=process/a,uniform", "seed=5,7", "run.steps=3", "ablate.seeds=9")
    assert dict(sweep.strategies) == {"process_a": ["credit=process/a"], "uniform": ["credit=uniform"]}
    assert (list(sweep.seeds), list(sweep.shared)) == ([5, 7], ["run.steps=3"])
    assert list(sweep_of({"uniform": ["credit=uniform"]}, "seed=range(2,5)").seeds) == [2, 3, 4]


def test_the_baseline_is_added_under_its_label_and_what_is_null_is_left_out():
    sweep = sweep_of({"x": ["credit=x"], "y": None}, baseline="process/own_step")
    assert dict(sweep.strategies) == {"process_own_step": ["credit=process/own_step"], "x": ["credit=x"]}
    assert sweep.baseline == "process_own_step"
    assert sweep_of({"x": "credit=x", "b": ["credit=b"]}, baseline="b").baseline == "b"


def test_a_cell_is_made_by_the_shared_overrides_then_its_own_then_what_names_it():
    (plan,) = plan_cells(Path("/it's"), sweep_of({"uniform": ["credit=a", "loss=b"]}, "optim.lr=1", "seed=4"))
    assert plan.overrides == [
        "optim.lr=1",
        "credit=a",
        "loss=b",
        "label='uniform'",
        "seed=4",
        "run.dir='/it\\'s/cells/uniform/seed_4'",
    ]


def test_a_folder_that_is_in_use_or_holds_something_else_is_refused(apportion, tiny, tmp_path):
    with hold_folder(tmp_path / "abl"):
        busy = apportion("ablate", *tiny, *SWEEP)
    assert (busy.status, len(busy.err)) == (2, 1)
    assert re.search(r"run\.dir=\S+abl: another process works in it", busy.err[0])
    (tmp_path / "abl" / "config.yaml").write_text("command: train\n")
    taken = apportion("ablate", *tiny, *SWEEP)
    assert re.search(r"run\.dir=\S+abl: holds a run, not an ablation", taken.err[0])
    (tmp_path / "file").write_text("")
    beneath = apportion("ablate", *tiny, *SWEEP[:-1], "run.dir=file/abl")
    assert re.search(r"run\.dir=\S+file/abl: cannot be written \(Not a directory\)", beneath.err[0])


def test_a_run_does_not_go_into_an_ablations_folder(copied, apportion, tiny):
    outcome = apportion("train", *tiny, "run.dir=abl")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"run\.dir=abl: holds an ablation; choose another run\.dir", outcome.err[0])


def test_the_report_can_be_rebuilt_from_the_folder_alone(copied, apportion):
    (copied / "report.html").unlink()
    outcome = apportion("report", "abl")
    assert (outcome.status, outcome.out[-1]) == (0, str(Path(copied).resolve()))
    assert (copied / "report.html").exists()
