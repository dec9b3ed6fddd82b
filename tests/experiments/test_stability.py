"""Laws of the stability sweep: what is varied, how runs are sorted, what is said of the regions."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from apportion.experiments.plan import plan_cells, read_sweep
from apportion.experiments.report import maps
from apportion.experiments.report.build import build_report
from apportion.experiments.report.load import load_ablation
from apportion.experiments.report.outcomes import ALARMS, CollapseRule, collapse_rule, outcome
from apportion.experiments.report.stability import stability
from apportion.experiments.report.terminal import results_table
from apportion.experiments.settings import read_settings, reference, setting_folder, setting_overrides
from apportion.grpo.drift import WATCHED, DriftConfig, drift_alarms
from apportion.verifiers import InputError

GRID = {"optim.lr": [1e-4, 1e-3], "rollout.group_size": [4, 8]}


def sweep_of(*arguments, settings=None, strategies=None, budget="steps"):
    node = {"strategies": strategies or {"uniform": ["credit=uniform"]}, "seeds": 2, "baseline": "uniform"}
    config = {
        "ablate": {**node, "settings": settings or {}, "budget": budget},
        "rollout": {"prompts_per_step": 4, "group_size": 8},
        "optim": {"lr": 2e-4},
    }
    return read_sweep(OmegaConf.create(config), arguments)


def write_grid(folder: Path, curves, *, settings=None, seeds=(0, 1, 2), collapse=None, alarms=None) -> Path:
    """An ablation's folder. ``curves(strategy, setting, seed)`` gives the successes, or an exception's name."""
    settings = settings or GRID
    plan = {
        "command": "apportion ablate", "baseline": "uniform", "strategies": ["uniform", "own"], "seeds": list(seeds),
        "budget": {"kind": "steps", "value": 20}, "threshold": 0.8, "task": "chain", "settings": settings,
        "reference": {key: values[0] for key, values in settings.items()}, "rollouts": 32, "collapse": collapse or {},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.json").write_text(json.dumps(plan))
    for cell in load_ablation(folder).grid:
        told = curves(cell.strategy, cell.setting, cell.seed)
        if told is None:
            continue
        cell.folder.mkdir(parents=True)
        failed = isinstance(told, str)
        rows = [
            {"step": 10 * index, "tokens": 100 * index, "seconds": float(index), "eval/success": success,
             "cost/tokens": 100.0 * (index > 0), "cost/seconds_sample": 1.0, "cost/forwards": 8.0}
            for index, success in enumerate([0.3] if failed else told)
        ]  # fmt: skip
        rows[-1] |= (alarms or {}).get((cell.strategy, *cell.setting.values()), {})
        (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        status = {"state": "finished", "step": 20, "steps": 20}
        if failed:
            status |= {"state": "failed", "error": "stopped after step 7: <b>no</b>", "error_type": told}
        (cell.folder / "status.json").write_text(json.dumps(status))
    return folder


def trains(strategy, setting, seed):
    """Uniform holds at the low rate alone, own at both for groups of 8 and at the low one for 4."""
    low, large = setting["optim.lr"] == 1e-4, setting["rollout.group_size"] == 8
    return [0.3, 0.5, 0.6 + 0.01 * seed] if low or (strategy == "own" and large) else [0.3, 0.6, 0.2]


# What is varied


def test_without_settings_the_plan_is_as_it_was():
    plan, other = plan_cells(Path("/abl"), sweep_of())
    assert (plan.folder, other.folder) == (Path("/abl/cells/uniform/seed_0"), Path("/abl/cells/uniform/seed_1"))
    assert plan.overrides == ["credit=uniform", "label='uniform'", "seed=0", "run.dir='/abl/cells/uniform/seed_0'"]


def test_every_strategy_runs_at_every_setting_with_every_seed():
    sweep = sweep_of(settings=GRID, strategies={"uniform": ["credit=uniform"], "own": ["credit=own"]})
    plans = plan_cells(Path("/abl"), sweep)
    assert len(plans) == 2 * 4 * 2 == len({plan.folder for plan in plans})
    assert plans[2].folder == Path("/abl/cells/uniform/lr=0.0001,group_size=8/seed_0")
    assert plans[2].setting == {"optim.lr": 1e-4, "rollout.group_size": 8}
    assert plans[2].overrides[1:4] == ["optim.lr=0.0001", "rollout.group_size=8", "rollout.prompts_per_step=4"]


def test_a_rollout_batch_has_as_many_answers_at_every_group_size():
    sizes = {"rollout.group_size": [2, 4, 8, 16, 32]}
    for plan in plan_cells(Path("/abl"), sweep_of(settings=sizes)):
        own = dict(override.split("=", 1) for override in plan.overrides)
        assert int(own["rollout.prompts_per_step"]) * int(own["rollout.group_size"]) == 32
    with pytest.raises(InputError, match=r"rollout\.group_size: 5 does not divide the 32 answers of a rollout batch"):
        sweep_of(settings={"rollout.group_size": [4, 5]})
    both = {"rollout.group_size": [4], "rollout.prompts_per_step": [2, 4]}
    with pytest.raises(InputError, match=r"prompts_per_step: cells would generate different numbers .*budget=tokens"):
        sweep_of(settings=both)
    assert sweep_of(settings=both, budget="tokens").rollouts is None


def test_several_values_on_the_command_line_are_settings_and_one_takes_them_out():
    sweep = sweep_of("optim.lr=1e-4,3e-4", "loss=dapo,dr_grpo", "credit=uniform,own", "seed=4")
    assert dict(sweep.settings) == {"optim.lr": [1e-4, 3e-4], "loss": ["dapo", "dr_grpo"]}
    assert (list(sweep.seeds), list(sweep.strategies), list(sweep.shared)) == ([4], ["uniform", "own"], [])
    fixed = sweep_of("rollout.group_size=16", "optim.lr=range(1,3)", settings=GRID)
    assert dict(fixed.settings) == {"optim.lr": [1, 2]}
    assert (list(fixed.shared), fixed.rollouts) == (["rollout.group_size=16"], None)


REFUSED = {
    "steps": ({"run.steps": [10, 20]}, r"ablate\.settings\.run\.steps: cannot be varied"),
    "seed": ({"seed": [1]}, r"ablate\.settings\.seed: cannot be varied"),
    "a launcher": ({"hydra/launcher": ["basic"]}, r"hydra/launcher: cannot be varied"),
    "one value": ({"optim.lr": 1e-4}, r"ablate\.settings\.optim\.lr=0\.0001: must be a list of values"),
    "none": ({"optim.lr": []}, r"optim\.lr=\[\]: must be a list of values"),
    "twice the same": ({"optim.lr": [1, 1]}, r"optim\.lr=\[1, 1\]: give different values"),
    "lists": ({"optim.lr": [[1]]}, r"optim\.lr=\[\[1\]\]: values must be numbers, texts"),
    "no mapping": ([1], r"ablate\.settings=\[1\]: must be options with lists of values"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_cannot_be_are_refused_in_one_line(kind):
    node, line = REFUSED[kind]
    with pytest.raises(InputError, match=line):
        read_settings(node)


def test_a_strategy_does_not_set_what_is_varied():
    own = {"uniform": ["credit=uniform"], "fast": ["credit=uniform", "optim.lr=1e-3"]}
    with pytest.raises(InputError, match=r"ablate\.strategies\.fast: sets optim\.lr, which ablate\.settings varies"):
        sweep_of(settings=GRID, strategies=own)
    held = {"uniform": ["credit=uniform", "rollout.prompts_per_step=2"]}
    with pytest.raises(InputError, match=r"uniform: sets rollout\.prompts_per_step"):
        sweep_of(settings=GRID, strategies=held)


def test_folders_tell_settings_apart_whatever_their_values():
    settings = [
        {"loss": "a/b"},
        {"loss": "a_b"},
        {"loss": "x" * 300},
        {"loss": "x" * 301},
        {"loss": None},
        {"loss": True},
    ]
    names = [setting_folder(setting) for setting in settings]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"[\w.+=,-]{1,200}", name) for name in names)
    assert names[4:] == ["loss=null", "loss=true"]
    assert setting_overrides({"a": 1, "b": True, "c": None, "d": "it's"}, None) == [
        "a=1",
        "b=true",
        "c=null",
        "d='it\\'s'",
    ]


def test_strategies_are_compared_at_the_configurations_own_setting():
    config = OmegaConf.create({"optim": {"lr": 3e-4}, "loss": {"clip_high": 0.2}})
    own = {"optim.lr": [1e-4, 3e-4, 1e-3], "loss.clip_high": [0.1, 0.3, 0.5, 0.7]}
    assert reference(own, config) == {"optim.lr": 3e-4, "loss.clip_high": 0.3}


# How runs are sorted


CURVES = {
    "got better": ([0.2, 0.5, 0.6], "trains", r"success 0\.600 from 0\.200"),
    "a little less than its best": ([0.2, 0.8, 0.6], "trains", "success"),
    "under three quarters of its best": ([0.2, 0.8, 0.59], "collapses", r"success 0\.590 after 0\.800"),
    "under its start": ([0.3, 0.3, 0.24], "collapses", r"success 0\.240 from 0\.300"),
    "as it began": ([0.3, 0.32, 0.34], "stalls", r"success 0\.340 from 0\.300"),
    "never right": ([0.0, 0.0, 0.0], "stalls", r"success 0\.000 from 0\.000"),
    "diverged": ("Diverged", "collapses", "stopped: stopped after step 7"),
    "stopped by an alarm": ("Drifted", "collapses", "stopped"),
    "broken by an accident": ("OSError", "unknown", "failed"),
    "not begun": (None, "unknown", "missing"),
}


def one_cell(folder, told, **options):
    made = write_grid(folder, lambda *_: told, settings={"optim.lr": [1e-4]}, seeds=[0], **options)
    return load_ablation(made)


@pytest.mark.parametrize("kind", CURVES)
def test_a_run_is_sorted_by_its_curve(kind, tmp_path):
    told, expected, why = CURVES[kind]
    ablation = one_cell(tmp_path, told)
    found = outcome(ablation.grid[0], ablation.rule)
    assert found.kind == expected
    assert re.match(why, found.why)


def test_an_alarm_that_is_on_at_the_end_is_a_collapse_if_the_rule_names_it(tmp_path):
    good, at = [0.2, 0.5, 0.6], ("uniform", 1e-4)
    for number, (alarms, expected) in enumerate(
        [({"alarm/kl": 1.0}, "collapses"), ({"alarm/kl": 0.0}, "trains"), ({"alarm/grad_spike": 1.0}, "trains")]
    ):
        ablation = one_cell(tmp_path / str(number), good, alarms={at: alarms})
        assert outcome(ablation.grid[0], ablation.rule).kind == expected
    named = one_cell(
        tmp_path / "named", good, alarms={at: {"alarm/grad_spike": 1.0}}, collapse={"alarms": ["grad_spike"]}
    )
    assert outcome(named.grid[0], named.rule) == ("collapses", "alarm at the end: gradient spike; success 0.600")


def test_the_rule_knows_every_alarm_that_is_logged():
    rows = [{**dict.fromkeys(WATCHED, 1.0), "optim/skipped_updates": 0.0}] * 10
    assert list(ALARMS) == [alarm.name for alarm in drift_alarms(rows, DriftConfig())]


def test_the_rules_options_are_checked():
    assert collapse_rule(None) == CollapseRule()
    assert collapse_rule({"alarms": [], "gain": 0}).alarms == ()
    for options, line in (
        ({"best": 1}, r"ablate\.collapse\.best: no such option; there are of_best"),
        ({"of_best": 2}, r"ablate\.collapse\.of_best=2: must be a number between 0 and 1"),
        ({"gain": True}, r"gain=True: must be a number"),
        ({"alarms": ["nope"]}, r"ablate\.collapse\.alarms: there is no alarm 'nope'; there are entropy_collapse"),
    ):
        with pytest.raises(InputError, match=line):
            collapse_rule(options)


# What is said of the regions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_grid(tmp_path_factory.mktemp("grid"), trains)
    build_report(made)
    return made


def regions(folder):
    found = stability(load_ablation(folder))
    assert found is not None
    return {region.strategy: region for region in found.regions}


def test_the_area_is_the_share_of_the_grid_that_trains(folder):
    found = regions(folder)
    assert (found["uniform"].area.mean, found["own"].area.mean) == (0.5, 0.75)
    assert (found["uniform"].collapsed.mean, found["own"].collapsed.mean) == (0.5, 0.25)
    assert (found["uniform"].stable, found["own"].stable) == (2, 3)
    assert found["own"].against_baseline.differences == (0.25, 0.25, 0.25)
    assert found["own"].stable_success == pytest.approx(0.61)
    assert found["uniform"].against_baseline is None


def test_the_tuned_success_of_a_seed_is_at_the_setting_that_is_best_for_the_others(tmp_path):
    table = {  # final success by rate and seed: seed 0 alone is lucky at the high rate
        1e-4: [0.5, 0.5, 0.5],
        1e-3: [0.9, 0.4, 0.4],
    }

    def curve(strategy, setting, seed):
        return [0.2, 0.3, table[setting["optim.lr"]][seed]]

    found = regions(write_grid(tmp_path, curve, settings={"optim.lr": [1e-4, 1e-3]}))["uniform"]
    assert found.best.setting == {"optim.lr": 1e-3}  # mean .567, by the luck of one
    assert dict(found.tuned.by_seed) == {0: 0.5, 1: 0.4, 2: 0.4}


def test_runs_that_are_not_over_are_in_no_share(tmp_path):
    def curve(strategy, setting, seed):
        if strategy == "own" and seed == 2 and setting["optim.lr"] == 1e-3:
            return None
        return trains(strategy, setting, seed)

    found = stability(load_ablation(write_grid(tmp_path, curve)))
    own = found.regions[1]
    assert found.unknown == 2
    assert dict(own.area.by_seed) == {0: 0.75, 1: 0.75, 2: 1.0}
    assert own.against_baseline.differences == (0.25, 0.25, 0.0)  # seed 2: over the settings that both know
    assert any(text.startswith("2 of 24 runs are not over") for text in maps.remarks(found))


def test_no_strategy_is_named_where_the_interval_holds_zero(tmp_path):
    def same(strategy, setting, seed):
        return trains("own" if (strategy == "own") == (seed == 0) else "uniform", setting, seed)

    found = stability(load_ablation(write_grid(tmp_path / "same", same)))
    assert maps.stability_headline(found, []) == "For own no difference in where training holds is shown."
    one = stability(load_ablation(write_grid(tmp_path / "one", trains, seeds=[0])))
    assert maps.stability_headline(one, []).startswith("No comparison of where training holds: two seeds or more")
    noisy = write_grid(
        tmp_path / "more", lambda s, g, seed: trains(s if seed != 6 else "uniform", g, seed), seeds=range(7)
    )
    better = stability(load_ablation(noisy))
    assert maps.stability_headline(better, []) == "own trains at more settings than uniform."
    assert "No strategy but ceilings" in maps.stability_headline(better, ["own"])


def test_the_spacing_of_learning_rates_is_told(tmp_path):
    even = stability(load_ablation(write_grid(tmp_path / "a", trains)))
    assert "optim.lr lies on a log scale, each value about 10 times the last." in maps.remarks(even)
    rates = {"optim.lr": [1e-4, 2e-4, 1e-2], "rollout.group_size": [4, 8]}
    uneven = stability(load_ablation(write_grid(tmp_path / "b", trains, settings=rates)))
    assert any("not evenly spaced on a log scale (steps of 2 to 50 times)" in text for text in maps.remarks(uneven))


def test_every_setting_is_a_row_of_the_table(folder):
    with (folder / "stability.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:8] == ["strategy", *GRID, "seeds", "trains", "stalls", "collapses", "unknown"]
    assert len(rows) == 8
    lost = next(row for row in rows if row["strategy"] == "uniform" and row["optim.lr"] == "0.001")
    assert (lost["trains"], lost["collapses"], lost["stable_share"]) == ("0", "3", "0")
    assert float(lost["stable_high"]) == pytest.approx(0.5615, abs=1e-4)  # Wilson: 0 of 3 is not never
    assert "seed 0: collapses, success 0.200 after 0.600" in lost["reasons"]


def test_the_ordinary_sections_are_of_the_reference_setting(folder):
    ablation = load_ablation(folder)
    assert len(ablation.cells) == 6
    assert {cell.setting["rollout.group_size"] for cell in ablation.cells} == {4}
    page = (folder / "report.html").read_text()
    assert "fixed before the runs: lr 0.0001, group_size 4." in page
    with (folder / "summary.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["strategy"] == "own")
    assert float(row["final_success"]) == pytest.approx(0.61)
    assert (row["stable_area"], row["settings"], row["stable_settings"]) == ("0.75", "4", "3")
    assert row["best_setting"].startswith("lr 0.0001")


def test_the_terminal_says_where_each_trains(folder):
    lines = results_table(folder).splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "strategy",
        "uniform",
        "own",
        "3",
        "strategy",
        "uniform",
        "own",
    ]
    assert "3 paired seeds find a true difference of 3.26 standard deviations" in lines[3]
    assert lines[-1].split()[:2] == ["own", "0.750"]
    assert "3 of 4" in lines[-1]


def test_a_map_has_a_field_for_every_setting_and_says_why(folder):
    ablation = load_ablation(folder)
    drawn = maps.draw_map(stability(ablation).regions[1], ablation)
    assert (drawn.across, list(drawn.columns), list(drawn.down)) == ("lr", ["0.0001", "0.001"], ["group_size"])
    assert [[field.count for field in row.fields] for row in drawn.rows] == [["3/3", "0/3"], ["3/3", "3/3"]]
    assert drawn.rows[0].fields[1].segments == [("collapses", 0.0, 100.0)]
    assert "seed 0 collapses: success 0.200 after 0.600" in drawn.rows[0].fields[1].title
    assert [field.reference for row in drawn.rows for field in row.fields] == [True, False, False, False]


def test_rows_that_share_a_value_share_its_head(tmp_path):
    settings = {"optim.lr": [1, 2, 3], "loss.clip_high": [0.1, 0.2], "rollout.group_size": [4, 8]}
    made = write_grid(tmp_path, lambda *_: [0.1, 0.2, 0.3], settings=settings, seeds=[0])
    drawn = maps.draw_map(stability(load_ablation(made)).regions[0], load_ablation(made))
    assert [row.heads for row in drawn.rows] == [
        [("0.1", 2), ("4", 1)], [("0.1", 0), ("8", 1)], [("0.2", 2), ("4", 1)], [("0.2", 0), ("8", 1)]
    ]  # fmt: skip


def test_alarms_are_counted_at_the_end_and_ever(tmp_path):
    made = write_grid(tmp_path, trains, alarms={("own", 1e-4, 4): {"alarm/kl": 1.0, "alarm/format": 0.0}})
    path = made / "cells/own/lr=0.0001,group_size=4/seed_0/metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"alarm/format": 1.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (first, own) = maps.alarm_table(load_ablation(made).cells, ["uniform", "own"])
    assert (first.runs, own.runs) == (0, 3)
    counts = dict(zip(ALARMS, own.counts))
    assert (counts["kl"], counts["format"], counts["length"]) == ((3, 3), (0, 1), (0, 0))
    assert "1 at some step" in (build_report(made)).read_text()


def test_hostile_errors_stay_text(tmp_path):
    made = write_grid(tmp_path, lambda s, g, seed: "Diverged" if g["optim.lr"] == 1e-3 else trains(s, g, seed))
    page = build_report(made).read_text()
    assert "<b>no</b>" not in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page


@pytest.mark.browser
def test_the_map_opens_without_a_word_on_the_console(folder, tmp_path):
    chromium = "/usr/bin/chromium"
    if not Path(chromium).exists():
        pytest.skip(f"{chromium} is not there: install Chromium to open the report in a browser")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", (folder / "report.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert 'class="map"' in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


# The real thing


def test_a_sweep_runs_goes_on_with_more_and_reports(apportion, tiny, tmp_path):
    fast = [*tiny, "hydra/launcher=basic", "run.dir=abl", "credit=uniform,process/own_step", "seed=0"]
    done = apportion("ablate", *fast, "optim.lr=1e-3,1e-2")
    assert (done.status, done.out[-2:]) == (0, [f"report: {tmp_path}/abl/report.html", f"{tmp_path}/abl"])
    cells = sorted(
        str(path.parent.relative_to(tmp_path / "abl/cells")) for path in (tmp_path / "abl").rglob("run.json")
    )
    assert cells == [f"{s}/lr={lr}/seed_0" for s in ("process_own_step", "uniform") for lr in ("0.001", "0.01")]
    for cell in cells:
        config = yaml.safe_load((tmp_path / "abl/cells" / cell / "config.yaml").read_text())
        assert f"lr={config['optim']['lr']}" in cell
    plan = json.loads((tmp_path / "abl/ablation.json").read_text())
    assert (plan["settings"], plan["reference"]) == ({"optim.lr": [1e-3, 1e-2]}, {"optim.lr": 1e-3})
    before = {cell: (tmp_path / "abl/cells" / cell / "metrics.jsonl").read_bytes() for cell in cells}
    more = apportion("ablate", *fast, "optim.lr=1e-3,1e-2,2e-2")
    assert more.status == 0
    assert {cell: (tmp_path / "abl/cells" / cell / "metrics.jsonl").read_bytes() for cell in cells} == before
    assert (tmp_path / "abl/cells/uniform/lr=0.02/seed_0/metrics.jsonl").exists()
    text = "\n".join(more.out)
    assert "all seeds" not in text  # that is the page's
    assert "best setting" in text


def test_a_run_that_diverges_is_an_outcome_and_no_failure_of_the_sweep(apportion, tiny, tmp_path):
    fast = [*tiny, "hydra/launcher=basic", "run.dir=abl", "credit=process/own_step", "ablate.baseline=process/own_step"]
    strong = ["loss.kl_coef=0,1e38", "optim.max_skipped=1", "optim.lr=0.01", "run.steps=4", "seed=0"]
    done = apportion("ablate", *fast, *strong)
    status = json.loads((tmp_path / "abl/cells/process_own_step/kl_coef=1e+38/seed_0/status.json").read_text())
    assert (status["state"], status["error_type"], done.status) == ("failed", "Diverged", 0), status
    assert not any(line.startswith("failed") for line in done.err)
    region = regions(tmp_path / "abl")["process_own_step"]
    assert region.at({"loss.kl_coef": 1e38}).count("collapses") == 1
    assert "1 of 2 runs does not count" in (tmp_path / "abl/report.html").read_text().replace("</b>", "")


@pytest.mark.slow
def test_the_experiment_runs_at_a_tenth_of_its_length(apportion, tmp_path):
    short = ["run.steps=4", "run.eval_every=2", "warm_start.steps=40", "seed=0,1", "task.num_held_out=16"]
    grid = ["optim.lr=3e-4,3e-3", "loss.clip_high=0.2", "rollout.group_size=8", "run.drift.window=2"]
    done = apportion(
        "ablate", "experiment=stability", *short, *grid, "ablate.strategies.first_error=null", "run.dir=abl"
    )
    assert done.status == 0
    assert len(regions(tmp_path / "abl")["uniform"].points) == 2
    rows = [json.loads(x) for x in next((tmp_path / "abl").rglob("metrics.jsonl")).read_text().splitlines()]
    assert {f"alarm/{name}" for name in ALARMS} - {"alarm/grad_spike"} <= set(rows[-1])


def test_a_rule_of_collapse_that_is_none_is_refused(apportion, tmp_path):
    done = apportion("ablate", "ablate.collapse=null", "run.dir=abl")
    assert done.status == 2
    assert "ablate.collapse=None: holds the keys of the rule" in done.err[-1]
