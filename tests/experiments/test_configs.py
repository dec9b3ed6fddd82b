"""Laws of every file under conf/ but conf/credit: it shows a command that works, and what it describes can be built."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import apportion.conf
from apportion.experiments.build import build, check_node
from apportion.experiments.cli import COMMANDS
from apportion.experiments.parts import build_parts
from apportion.experiments.plan import read_sweep
from apportion.experiments.rundir import plain_config
from apportion.experiments.verify import own_target
from apportion.verifiers import InputError

CONF = Path(apportion.conf.__file__).resolve().parent
FILES = sorted(path for path in CONF.rglob("*.yaml") if path.relative_to(CONF).parts[0] not in ("credit", "hydra"))
# Groups whose options are one object each and need no other key.
GROUPS = ("loss", "optim", "rollout", "verifier", "warm_start", "task/chain")
OBJECTS = [path for path in FILES if path.relative_to(CONF).parent.as_posix() in GROUPS]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
COMMAND = re.compile(rf"^# (apportion (?:{'|'.join(COMMANDS)}) .*?)(?: {{2,}}.*)?$", re.MULTILINE)


def name(path):
    return path.relative_to(CONF).as_posix()


def composed(command, *overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command.replace("-", "_"), list(overrides), return_hydra_config=command == "ablate")


def without_hydra(config):
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


def header(path):
    return path.read_text(encoding="utf-8").partition("\n\n")[0]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_opens_with_a_command(path):
    first = next(line for line in path.read_text(encoding="utf-8").splitlines() if "@package" not in line)
    assert COMMAND.match(first), first


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_commands_of_a_file_compose_and_name_it(path):
    for line in COMMAND.findall(header(path)):
        command, *arguments = shlex.split(line)[1:]
        arguments = arguments[: arguments.index("--cfg")] if "--cfg" in arguments else arguments
        arguments = [a for a in arguments if "=" in a or a.startswith(("~", "-"))]  # a bare one is a file
        arguments = own_target(arguments) if command == "verify" else arguments
        overrides = [o for o in OverridesParser.create().parse_overrides(arguments) if not o.is_hydra_override()]
        fixed = [o.input_line for o in overrides if not o.is_sweep_override()]
        composed(command, *fixed)
        for override in (o for o in overrides if o.is_sweep_override()):
            for value in override.sweep_string_iterator():
                composed(command, *fixed, f"{override.key_or_group}={value}")


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_list_of_defaults_says_where_the_file_itself_stands(path):
    defaults = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if "defaults" in defaults:
        assert "_self_" in defaults["defaults"]


@pytest.mark.parametrize("path", OBJECTS, ids=name)
def test_every_option_of_a_group_can_be_built(path):
    group, option = path.parent.relative_to(CONF).as_posix(), path.stem
    folder, _, inner = group.partition("/")
    if folder == "verifier":
        config, key = composed("train", f"+verifier@verifiers.it={option}").verifiers.it, "verifiers.it"
    else:
        value = f"{inner}/{option}" if inner else option
        config, key = composed("train", f"{folder}={value}")[folder], folder
    missing = sorted(OmegaConf.missing_keys(config)) + ["verifiers.it"] * (option == "prm")  # its path may stand apart
    if missing:  # the user must say; what then happens is tested beside the code
        with pytest.raises(InputError, match=rf"^({'|'.join(map(re.escape, missing))}): .*needs (a value|the folder)"):
            build(config, key)
    else:
        build(config, key)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy=tiny"], "policy"),
        (["policy=smollm2"], "policy"),
        (["policy=hf", "policy.path=x"], "policy"),
        (["task=chain"], "task"),
        (["task=jsonl", "task.path=x"], "task"),
        (["logger=tensorboard"], "logger.tensorboard"),
        (["logger=wandb"], "logger.wandb"),
        (["logger=trackio"], "logger.trackio"),
    ],
)
def test_what_needs_more_than_its_options_names_real_ones(overrides, key):
    check_node(OmegaConf.select(composed("train", *overrides), key), key)


@pytest.mark.parametrize("command", ["train", "ablate"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_for_every_command(experiment, command):
    build_parts(without_hydra(composed(command, f"experiment={experiment}")))


@pytest.mark.parametrize("shared", [[], *([f"experiment={name}"] for name in EXPERIMENTS)], ids=str)
def test_every_strategy_of_an_ablation_fits_its_experiment(shared):
    if "experiment=prm_credit" in shared:  # the user says which models
        shared = [*shared, "prm.path=owner/model", "prm.monte_carlo_path=owner/model"]
    for overrides in read_sweep(composed("ablate", *shared), []).strategies.values():
        build_parts(without_hydra(composed("ablate", *shared, *overrides)))


def test_the_default_ablation_is_the_seven_strategies_over_five_seeds():
    sweep = read_sweep(composed("ablate"), [])
    assert list(sweep.strategies) == [
        "uniform",
        "process_return",
        "own_step",
        "first_error",
        "wrong_steps",
        "format",
        "shuffled",
    ]
    assert (sweep.baseline, list(sweep.seeds)) == ("uniform", [0, 1, 2, 3, 4])


def test_the_smoke_ablation_has_all_strategies_and_enough_seeds_for_an_interval():
    sweep = read_sweep(composed("ablate", "experiment=smoke"), ["experiment=smoke"])
    assert (len(sweep.strategies), list(sweep.seeds), list(sweep.shared)) == (7, [0, 1], ["experiment=smoke"])


def verifiers_of(config):
    return {key: node._target_.rpartition(".")[2] for key, node in config.verifiers.items()}


def test_ones_own_problems_bring_verifiers_that_read_them():
    config = composed("train", "task=jsonl", "task.path=x")
    assert verifiers_of(config) == {"answer": "NumberAnswer", "steps": "Arithmetic"}
    assert (config.run.format, config.warm_start.steps, config.get("retention_verifier")) == (None, 0, None)
    assert config.policy._target_.endswith("SmolLM2Policy")
    assert config.optim.lr < 1e-4  # not the rate of the tiny policy
    build_parts(config)


def test_ones_own_choices_win_over_those_of_the_task():
    config = composed(
        "train",
        "task=jsonl",
        "task.path=x",
        "verifier@verifiers.steps=repetition",
        "verifier@verifiers.format=soft_overlong",
        "run.format=format",
        "policy=hf",
        "policy.path=y",
        "optim.lr=1e-3",
        "rollout.max_new_tokens=7",
        "warm_start=tiny",
    )
    assert verifiers_of(config) == {"answer": "NumberAnswer", "steps": "Repetition", "format": "SoftOverlong"}
    assert (config.run.format, config.policy.path, config.optim.lr) == ("format", "y", 1e-3)
    assert (config.rollout.max_new_tokens, config.warm_start.steps > 0) == (7, True)


def test_an_experiment_wins_over_the_task_that_it_chooses():
    config = composed("train", "experiment=smollm2")
    assert config.task.path == "examples/word_problems.jsonl"
    assert config.credit._target_.endswith("WrongSteps")
    assert (config.warm_start.steps, config.rollout.max_new_tokens) == (30, 96)


def test_ones_own_problems_run_with_nothing_but_their_path_and_a_policy(apportion, tiny, tmp_path):
    rows = [{"prompt": f"{a}+{b}=?", "answer": a + b} for a in range(5) for b in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = [override for override in tiny if not override.startswith(("task.", "warm_start."))]
    outcome = apportion("train", "task=jsonl", "task.path=p.jsonl", "policy=tiny", *small, "run.dir=run")
    assert outcome.status == 0
    assert outcome.out == [str(tmp_path / "run")]
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"verifier/answer", "eval/success"} <= row.keys()
    assert (row["verifier/errors_answer"], row["verifier/errors_steps"]) == (0, 0)
    assert "format/pass_rate" not in row


def test_an_ablation_of_ones_own_problems_says_which_strategy_to_leave_out(apportion, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=?", "answer": 2}\n{"prompt": "1+2=?", "answer": 3}\n')
    outcome = apportion("ablate", "task=jsonl", "task.path=p.jsonl")
    assert (outcome.status, len(outcome.err)) == (2, 1)
    assert re.search(r"ablate\.strategies\.format: .*leave it out: ablate\.strategies\.format=null", outcome.err[0])
    sweep = read_sweep(composed("ablate", "ablate.strategies.format=null"), [])
    assert "format" not in sweep.strategies


def test_what_a_run_writes_down_composes_to_itself():
    config = plain_config(composed("train", "credit=process/own_step", "run.dir=x"))
    assert yaml.safe_load(yaml.safe_dump(config)) == config
