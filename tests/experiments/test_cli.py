"""The command line as a user meets it: bad input ends in one line that names the key and the remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from apportion.experiments.rundir import hold_folder

PROGRAM = str(Path(sys.executable).with_name("apportion"))

# What was typed, and what the one line must say: the key at fault, and the remedy.
REFUSED = {
    "unknown option of a group": (["credit=unifrom"], r"credit=unifrom: .*did you mean credit=uniform\?"),
    "unknown option inside a group": (["credit=process/own"], r"did you mean credit=process/own_step\?"),
    "folder instead of an option": (
        ["credit=control"],
        r"credit=control: .*there are: control/",
    ),
    "null for an option": (
        ["verifier@verifiers.format=null"],
        r"verifier@verifiers\.format=null: give the name of one of its options, or ~verifier@verifiers\.format to go",
    ),
    "number for an option": (["credit=3"], r"credit=3: give the name of one of its options"),
    "unknown preset": (["task=chain/midd"], r"task=chain/midd: .*did you mean task=chain/mid\?"),
    "misspelt key": (["credit.epss=1"], r"credit\.epss: no such key; did you mean credit\.eps\?"),
    "unknown key": (["foo=1"], r"foo: no such key; there are: .*credit, .*run, "),
    "misspelt place of a verifier": (
        ["verifier@verifiers.stps=arithmetic"],
        r"verifier@verifiers\.stps: .*did you mean verifier@verifiers\.steps\?.*\+verifier@verifiers\.stps=",
    ),
    "added key that nothing reads": (["+rewards.answer=1"], r"rewards: nothing reads this key; did you mean reward\?"),
    "added group that is in use": (
        ["+verifier@verifiers.steps=arithmetic"],
        r"verifier@verifiers\.steps: is in use already; .*verifier@verifiers\.steps=\.\.\. without the plus",
    ),
    "verifier without a name": (["+verifier=arithmetic"], r"verifier: nothing reads .*\+verifier@verifiers\.NAME="),
    "added option that nothing reads": (["+credit.foo=3"], r"credit\.foo: Uniform has no such option; .*ddof"),
    "added option of the run": (["+run.step=3"], r"run\.step: .*did you mean steps\?"),
    "text for a whole number": (["run.steps=abc"], r"run\.steps='abc': must be a whole number"),
    "text for the seed": (["seed=abc"], r"seed='abc': must be a whole number"),
    "fraction for a whole number": (["rollout.group_size=2.5"], r"rollout\.group_size=2\.5: must be a whole number"),
    "number for a switch": (["verifiers.answer.strict=3"], r"verifiers\.answer\.strict=3: must be true or false"),
    "list for a number": (["loss.clip_low=[1]"], r"loss\.clip_low=\[1\]: must be a number"),
    "text for a weight": (["reward.answer=x"], r"reward\.answer='x': must be a number"),
    "null for a number": (["optim.lr=null"], r"optim\.lr=None: must be a number"),
    "value that is no choice": (["loss.aggregation=mean"], r"loss\.aggregation='mean': must be .*'token-mean'"),
    "value out of range": (["optim.epochs=0"], r"optim.*epochs.*at least 1"),
    "value out of range of the task": (["task.flaw_rate=2"], r"task\.flaw_rate=2: is a share, so between 0 and 1"),
    "value out of range of the warm start": (["warm_start.lr=0"], r"warm_start\.lr=0: must be over 0"),
    "group of one": (["rollout.group_size=1"], r"rollout\.group_size=1: a group of one .*at least 2"),
    "missing value of the policy": (["policy=hf"], r"policy\.path: needs a value; give policy\.path=\.\.\."),
    "missing value of the task": (["task=jsonl"], r"task\.path: needs a value; give task\.path=\.\.\."),
    "no such file": (["task=jsonl", "task.path=gone.jsonl"], r"task\.path=gone\.jsonl: no such file"),
    "missing signal": (
        ["credit=process/own_step", "~verifiers.steps"],
        r"credit needs the \w+ of verifiers\.steps, .*\+verifier@verifiers\.steps=",
    ),
    "no reward": (["~reward.answer"], r"credit needs a reward.*\+reward\.answer=1"),
    "reward of no verifier": (["+reward.tone=1"], r"reward\.tone: no verifier of that name.*answer"),
    "success of no verifier": (["run.success=tone"], r"run\.success=tone: no such verifier.*answer"),
    "nothing to build": (["~credit"], r"credit: nothing to build; give it a _target_"),
    "several values": (["credit=a,b"], r"credit=a,b: several values; .*credit=\[\.\.\.\]"),
    "value that cannot be read": (["label=a=b"], r"label: cannot read 'a=b'; quote"),
    "open quote": (["label='x"], r"label: cannot read .*quote"),
    "no equal sign": (["seed"], r"'seed' is not an option; write key=value"),
    "unknown flag": (["--foo"], r"unrecognized arguments: --foo; options are key=value, without dashes"),
    "option written as a flag": (["--seed=3"], r"--seed=3; options are key=value, without dashes"),
    "two things to show": (["--cfg", "job", "--info"], r"only one of --cfg, --info at a time"),
    "resolve without a configuration": (["--resolve"], r"--resolve goes with --cfg"),
    "launcher that is not installed": (
        ["hydra/launcher=submitit_slurm"],
        r'hydra/launcher=submitit_slurm: .*basic.*pip install "apportion\[slurm\]"',
    ),
    "no folder": (["run.dir="], r"run\.dir='': must be the path of a folder"),
    "number for a folder": (["run.dir=3"], r"run\.dir=3: must be the path of a folder"),
    "reference to no key": (["label=${nope}"], r"\$\{nope\}: there is no key nope"),
    "unknown device": (["device=tpu"], r"device=tpu: cannot be used .*device=cpu"),
    "line break that is none": (["policy=hf", "policy.system='a\\nb'"], r"policy\.system: holds a backslash.*\$'"),
    "prompt longer than the context": (
        ["rollout.max_new_tokens=300"],
        r"prompt of \d+ tokens \+ rollout\.max_new_tokens=300 exceeds .*lower rollout\.max_new_tokens",
    ),
    "more problems than there are": (
        ["task.min_steps=1", "task.max_steps=1", "task.num_held_out=128"],
        r"task\.num_held_out=128: there are only \d+ such problems; lower it",
    ),
    "symbols from nowhere": (["policy.symbols=apportion.nope"], r"policy\.symbols=apportion\.nope: .*has no nope"),
    "logger without its library": (
        ["logger=trackio", "warm_start.steps=0"],
        r"logger=trackio: .*pip install \"apportion\[tracking\]\"",
    ),
    "unknown folder of configurations": (["--config-dir", "gone"], r"gone.*not found"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_ends_in_one_line_that_names_the_key(kind, apportion):
    arguments, line = REFUSED[kind]
    outcome = apportion("train", *arguments)
    assert outcome.status == 2
    assert len(outcome.err) == 1
    assert outcome.err[0].startswith("apportion train: ")
    assert re.search(line, outcome.err[0]), outcome.err[0]
    assert outcome.out == []


@pytest.mark.parametrize(
    "kind", ["unknown option of a group", "text for a whole number", "missing signal", "no such file"]
)
def test_a_refused_command_leaves_no_folder(kind, apportion, tmp_path):
    apportion("train", *REFUSED[kind][0])
    assert list(tmp_path.iterdir()) == []


PROBLEMS = {
    "empty": ("", r"task\.path=p\.jsonl: .*no rows"),
    "no answer": ('{"prompt": "1 + 1 = ?"}\n', r"p\.jsonl, row 1: no column 'answer'; .*task\.reference"),
    "empty answer": ('{"prompt": "1 + 1 = ?", "answer": null}\n', r"p\.jsonl, row 1: column 'answer' .*is empty"),
    "no JSON": ('{"prompt": "q", "answer": "1"}\n{"prompt"\n', r"p\.jsonl, row 2: .*one JSON object a line"),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_bad_data_file_is_refused_by_file_and_row(kind, apportion, tmp_path):
    content, line = PROBLEMS[kind]
    (tmp_path / "p.jsonl").write_text(content)
    outcome = apportion("train", "task=jsonl", "task.path=p.jsonl")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(line, outcome.err[0]), outcome.err[0]


def test_a_tiny_policy_refuses_words_and_names_one_that_reads_them(apportion, tmp_path):
    rows = [{"prompt": f"What is {n} plus one?", "answer": n + 1} for n in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    outcome = apportion("train", "task=jsonl", "task.path=p.jsonl", "policy=tiny")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"policy=tiny knows only the symbols.*policy=smollm2", outcome.err[0])


def test_a_warning_of_the_task_is_seen(apportion, tiny, tmp_path, caplog):
    rows = [{"prompt": f"{a}+{b}=?", "answer": a + b} for a in range(5) for b in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "h.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    small = [override for override in tiny if not override.startswith(("task.", "warm_start."))]
    files = ["task=jsonl", "task.path=p.jsonl", "task.held_out_path=h.jsonl", "policy=tiny"]
    assert apportion("train", *files, *small, "run.steps=0").status == 0
    assert caplog.messages == ["3 rows are not trained on: their prompts are evaluation problems"]


def test_a_warm_start_needs_demonstrations(apportion, tmp_path):
    rows = [{"prompt": f"{n}+1=?", "answer": n} for n in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny = ["policy=tiny", "warm_start.steps=3", "rollout.max_new_tokens=24"]
    outcome = apportion("train", "task=jsonl", "task.path=p.jsonl", *tiny)
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"'demonstration' \(task\.demonstration\).*warm_start\.steps=0", outcome.err[0])


def test_the_traceback_is_there_on_request(apportion):
    outcome = apportion("train", "--traceback", "run.steps=abc")
    assert outcome.status == 2
    assert "Traceback" in outcome.err[0]
    assert outcome.err[-1] == "apportion train: run.steps='abc': must be a whole number"


# One file of the user's, the path given for it, and the cause that the line must show.
PLUGINS = {
    "a missing colon": ("class V\n    pass\n", "V", r"SyntaxError in .*plugin_\w+\.py, line 1: expected ':'"),
    "a missing package": (
        "import no_such_package\n",
        "V",
        r"ModuleNotFoundError: no module 'no_such_package'; install it",
    ),
    "an error at import": (
        "x = 1\nraise RuntimeError('no GPU\\nhere')\n",
        "V",
        r"RuntimeError in .*line 2: no GPU here",
    ),
    "an exit at import": ("import sys\nsys.exit('bye')\n", "V", r"SystemExit in .*line 2: bye"),
    "a missing class": (
        "import os\nclass Loud: pass\nclass Quiet: pass\n",
        "V",
        r"module plugin_\w+ has no V; there are: Loud, Quiet$",
    ),
    "a misspelt class": ("class Verifier: pass\n", "Verifyer", r"has no Verifyer; did you mean Verifier\?"),
    "a missing argument": (
        "class V:\n    def __init__(self, limit): pass\n",
        "V",
        r"verifiers\.mine\.limit: .*needs the argument 'limit'; give \+verifiers\.mine\.limit=",
    ),
    "a refusal of its own": (
        "class V:\n    def __init__(self):\n        raise ValueError('limit is\\nnegative')\n",
        "V",
        r"verifiers\.mine \(plugin_\w+\.V\): limit is negative$",
    ),
    "an error of its own": (
        "class V:\n    def __init__(self):\n        {}['key']\n",
        "V",
        r"verifiers\.mine \(plugin_\w+\.V\): KeyError: 'key'$",
    ),
    "something that cannot be called": ("V = 3\n", "V", r"is not a class or function but int"),
}


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_fault_in_a_users_file_is_told_with_its_cause(kind, apportion, tmp_path):
    source, name, line = PLUGINS[kind]
    module = "plugin_" + re.sub(r"\W", "_", kind)
    (tmp_path / f"{module}.py").write_text(source)
    outcome = apportion("train", f"+verifiers.mine={{_target_: {module}.{name}}}")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(line, outcome.err[0]), outcome.err[0]


def test_a_users_file_that_is_not_there_is_told_where_to_look(apportion):
    outcome = apportion("train", "+verifiers.mine={_target_: not_there.V}")
    assert re.search(r"verifiers\.mine\._target_=not_there\.V: ModuleNotFoundError: .*start where", outcome.err[0])


def test_a_users_option_is_checked_by_name_and_type(apportion, tmp_path):
    (tmp_path / "plugin_typed.py").write_text("class V:\n    def __init__(self, limit: int = 3): pass\n")
    wrong_type = apportion("train", "+verifiers.mine={_target_: plugin_typed.V, limit: x}")
    wrong_name = apportion("train", "+verifiers.mine={_target_: plugin_typed.V, limt: 3}")
    assert wrong_type.err == ["apportion train: verifiers.mine.limit='x': must be a whole number"]
    assert wrong_name.err == ["apportion train: verifiers.mine.limt: V has no such option; did you mean limit?"]


def test_a_users_verifiers_and_strategy_are_used(apportion, tmp_path, tiny):
    (tmp_path / "plugin_good.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            import torch
            from apportion.credit import Credit
            from apportion.verifiers import Span, Verdict

            class NoFives:
                def __call__(self, samples):
                    return [Verdict(1.0, (Span(0, 1, 1.0),)) for sample in samples]

            def short(completions, **columns):  # as TRL calls a reward function
                return [float(len(completion) < 10) for completion in completions]

            def shorter(samples, limit: int = 3):
                return [len(sample.completion) < limit for sample in samples]

            @dataclass(frozen=True)
            class Mine:
                "Half of nothing."
                factor: float = 0.5
                requires = frozenset({"score:short"})
                phase = "rollout"
                conserves = "none"

                def __call__(self, batch):
                    return Credit(torch.zeros(batch.completion_mask.shape))
            """
        )
    )
    outcome = apportion(
        "train",
        *tiny,
        "+verifiers.fives={_target_: plugin_good.NoFives}",
        "+verifiers.short={_target_: plugin_good.short}",
        "+verifiers.shorter={_target_: plugin_good.shorter, limit: 5}",
        "+reward.short=0.1",
        "~credit",
        "+credit._target_=plugin_good.Mine",
        "+credit.factor=0.25",
        "run.dir=mine",
    )
    assert outcome.status == 0
    row = json.loads((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["verifier/fives"] == 1
    assert {row[f"verifier/errors_{name}"] for name in ("fives", "short", "shorter")} == {0}
    assert row["credit/abs_mean"] == 0
    about = json.loads((tmp_path / "mine" / "run.json").read_text())
    assert (about["strategy"], about["description"], about["signals"]) == ("Mine", "Half of nothing", ["score:short"])


def test_a_file_of_ones_own_hides_no_library(apportion, tmp_path, tiny):
    """The current folder comes last on the path: ``datasets/`` or ``tokenizers.py`` in it stay out of the way."""
    (tmp_path / "tokenizers.py").write_text("raise RuntimeError('not this one')")
    assert apportion("train", *tiny, "warm_start.steps=0", "run.steps=0", "run.dir=run").status == 0


@pytest.fixture
def finished(apportion, tmp_path, tiny):
    assert apportion("train", *tiny, "run.dir=done").status == 0
    return tmp_path / "done"


def test_a_finished_folder_is_refused_and_left_as_it_is(apportion, finished, tiny):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    outcome = apportion("train", *tiny, "run.dir=done", "seed=5")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"run\.dir=done: holds a finished run; choose another run\.dir", outcome.err[0])
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_an_unfinished_folder_is_refused_with_other_options_and_gone_on_with_the_same(apportion, finished, tiny):
    status = json.loads((finished / "status.json").read_text())
    (finished / "status.json").write_text(json.dumps({**status, "state": "interrupted"}))
    other = apportion("train", *tiny, "run.dir=done", "run.steps=3")
    assert (other.status, len(other.err)) == (2, 1)
    assert re.search(r"run\.dir=done: holds an unfinished run with other options \(run\.steps=2, not 3\)", other.err[0])
    assert apportion("train", *tiny, "run.dir=done").status == 0
    assert json.loads((finished / "status.json").read_text())["state"] == "finished"


def test_a_folder_in_use_is_refused(apportion, tmp_path, tiny):
    with hold_folder(tmp_path / "busy"):
        outcome = apportion("train", *tiny, "run.dir=busy")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"run\.dir=busy: another process works in it; choose another run\.dir", outcome.err[0])


def test_a_folder_that_cannot_be_written_is_refused(apportion, tmp_path, tiny):
    (tmp_path / "file").write_text("")
    outcome = apportion("train", *tiny, "run.dir=file/run")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"run\.dir=file/run: cannot be written \(Not a directory\); choose another", outcome.err[0])


def test_somebody_elses_configuration_is_not_overwritten(apportion, tmp_path, tiny):
    (tmp_path / "config.yaml").write_text("model: mine\n")
    outcome = apportion("train", *tiny, "run.dir=.")
    assert re.search(r"run\.dir=\.: holds a config\.yaml that is not a run's", outcome.err[0])
    assert (tmp_path / "config.yaml").read_text() == "model: mine\n"


def test_the_last_line_is_the_folder_and_the_first_ones_are_evaluations(apportion, finished, tiny):
    outcome = apportion("train", *tiny, "run.dir=other")
    assert outcome.out == [str(finished.parent / "other")]
    assert [line.split("  ")[0] for line in outcome.err] == ["step 0/2", "step 1/2", "step 2/2"]
    assert json.loads((finished.parent / "other" / "status.json").read_text())["state"] == "finished"


def test_two_runs_of_the_same_second_have_folders_of_their_own(apportion, tmp_path, monkeypatch, tiny):
    import datetime as real

    from apportion.experiments import app

    class Stopped(real.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(app, "datetime", Stopped)
    for _ in range(2):
        assert apportion("train", *tiny, "warm_start.steps=0", "run.steps=0").status == 0
    folders = sorted((tmp_path / "outputs" / "train").iterdir())
    assert len(folders) == 2
    assert all(folder.name.startswith("2026-01-02_03-04-05_") for folder in folders)


def test_a_sweep_of_runs_has_a_folder_each(apportion, tmp_path, tiny):
    outcome = apportion("train", *tiny, "--multirun", "seed=3,4", "warm_start.steps=0", "run.steps=0")
    assert outcome.status == 0
    seeds = [yaml.safe_load(path.read_text())["seed"] for path in tmp_path.glob("outputs/train/*/config.yaml")]
    assert sorted(seeds) == [3, 4]


def test_a_sweep_into_one_folder_is_refused(apportion, tmp_path, tiny):
    outcome = apportion("train", *tiny, "--multirun", "seed=3,4", "warm_start.steps=0", "run.steps=0", "run.dir=same")
    assert outcome.status == 2
    assert re.search(r"run\.dir=same: holds a finished run", outcome.err[-1])
    assert yaml.safe_load((tmp_path / "same" / "config.yaml").read_text())["seed"] == 3


@pytest.mark.parametrize("label", ["a/b", "it's", "'\"", "x" * 300, "${seed}\\", "a\nb", "ü 💩"])
def test_any_label_is_kept_and_names_no_folder(label, apportion, tmp_path, tiny):
    from apportion.experiments.app import quoted_override

    override = quoted_override("label", label)
    assert apportion("train", *tiny, "warm_start.steps=0", "run.steps=0", override).status == 0
    (folder,) = (tmp_path / "outputs" / "train").iterdir()
    assert json.loads((folder / "run.json").read_text())["strategy"] == label
    assert override in yaml.safe_load((folder / "overrides.yaml").read_text())
    assert len(folder.name) < 40


def test_a_home_folder_is_found(apportion, tmp_path, monkeypatch, tiny):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    outcome = apportion("train", *tiny, "warm_start.steps=0", "run.steps=0", "run.dir='~/run'")
    assert outcome.out == [str(tmp_path / "home" / "run")]


def test_an_unknown_command_is_answered_with_the_nearest(apportion):
    assert apportion("ablat").err == ["apportion: no command 'ablat'; did you mean ablate?"]
    assert apportion("ablat").status == 2
    assert re.search(r"no command 'xyz'; there are: .*train", apportion("xyz").err[0])


def test_the_report_needs_a_folder(apportion):
    assert apportion("report").status == 2
    outcome = apportion("report", "gone")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"gone.*no such file", outcome.err[0])


def test_the_configuration_is_shown_without_a_run(apportion, tmp_path):
    outcome = apportion("train", "--cfg", "job", "credit=process/own_step", "seed=7")
    shown = yaml.safe_load("\n".join(outcome.out))
    assert (shown["seed"], shown["credit"]["accumulate"]) == (7, "own")
    assert list(tmp_path.iterdir()) == []


def test_help_of_a_command_lists_the_groups(apportion):
    outcome = apportion("train", "--help")
    assert outcome.status == 0
    assert outcome.out[0] == "apportion train key=value ...: one GRPO run"
    assert any(line.startswith("credit/process: ") for line in outcome.out)


def test_help_and_version_load_nothing_heavy():
    program = (
        "import sys; from apportion.experiments.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy', 'transformers', 'rich'} & set(sys.modules)))"
    )
    for arguments, first in ((["--help"], "Apportion: "), (["--version"], "apportion 0."), ([], "Apportion: ")):
        run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert run.stdout.startswith(first)
        assert run.stdout.splitlines()[-1] == "[]"


def test_the_installed_program_refuses_and_shows_like_the_function(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    run = subprocess.run(
        [PROGRAM, "train", "credit=unifrom"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "apportion train: credit=unifrom: there is no such option; did you mean credit=uniform?\n"


@pytest.mark.parametrize("command", ["train", "ablate"])
def test_a_command_is_a_module_too(command, tmp_path):
    module = [sys.executable, "-m", f"apportion.experiments.{command}", "--cfg", "job", "seed=3"]
    run = subprocess.run(module, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert yaml.safe_load(run.stdout)["command"] == command
