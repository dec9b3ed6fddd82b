"""Laws of the run folder: nothing in it is overwritten, and one process at a time works in it."""

from __future__ import annotations

import json

import pytest
import yaml
from omegaconf import OmegaConf

from apportion.experiments.rundir import (
    difference,
    has_results,
    hold_folder,
    plain_config,
    read_status,
    refuse_other_run,
    run_folder,
    run_path,
)
from apportion.verifiers import InputError

CONFIG = {"command": "train", "seed": 0, "run": {"dir": "x", "steps": 60, "save_every": 20}, "threads": None}


def leave(folder, state="running", metrics='{"step": 0}\n'):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "status.json").write_text(json.dumps({"state": state}))
    if metrics:
        (folder / "metrics.jsonl").write_text(metrics)


def changed(**options):
    return {**CONFIG, "run": {**CONFIG["run"], **options}}


def test_the_folder_holds_what_the_run_was_told(tmp_path):
    folder = tmp_path / "deep" / "run"
    with run_folder(folder, CONFIG, ["seed=0", "label='ü\"'"]):
        assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG
        assert yaml.safe_load((folder / "overrides.yaml").read_text()) == ["seed=0", "label='ü\"'"]


def test_one_process_at_a_time(tmp_path):
    with (
        run_folder(tmp_path, CONFIG, []),
        pytest.raises(InputError, match="another process works in it"),
        run_folder(tmp_path, CONFIG, []),
    ):
        pass
    with hold_folder(tmp_path):  # it is free again
        pass


def test_a_finished_run_is_refused_even_with_the_same_options(tmp_path):
    leave(tmp_path, "finished")
    with pytest.raises(InputError, match=r"holds a finished run; choose another run\.dir, or remove this one"):
        refuse_other_run(tmp_path, CONFIG)


def test_other_options_are_refused_by_the_first_that_differs(tmp_path):
    leave(tmp_path)
    refuse_other_run(tmp_path, CONFIG)
    with pytest.raises(InputError, match=r"with other options \(run\.steps=60, not 80\); repeat its options"):
        refuse_other_run(tmp_path, changed(steps=80))
    with pytest.raises(InputError, match=r"\(run\.more=None, not 1\)"):
        refuse_other_run(tmp_path, changed(more=1))


@pytest.mark.parametrize("options", [{"dir": "y"}, {"save_every": 1}, {"keep_checkpoints": 9}, {"save_model": False}])
def test_options_that_change_no_result_may_change(tmp_path, options):
    leave(tmp_path)
    refuse_other_run(tmp_path, changed(**options))
    refuse_other_run(tmp_path, {**changed(**options), "threads": 2, "device": "cuda", "label": "x", "logger": {"a": 1}})


def test_a_run_that_had_nothing_to_lose_makes_way_for_another(tmp_path):
    leave(tmp_path, "failed", metrics="")
    assert not has_results(tmp_path)
    refuse_other_run(tmp_path, changed(steps=80))
    (tmp_path / "checkpoints" / "step_000020").mkdir(parents=True)
    assert has_results(tmp_path)
    with pytest.raises(InputError, match="unfinished run"):
        refuse_other_run(tmp_path, changed(steps=80))


def test_foreign_folders_are_left_alone(tmp_path):
    refuse_other_run(tmp_path, CONFIG)
    (tmp_path / "config.yaml").write_text("- a list\n")
    with pytest.raises(InputError, match="not a run's"):
        refuse_other_run(tmp_path, CONFIG)
    (tmp_path / "config.yaml").write_text("a: [broken\n")
    with pytest.raises(InputError, match="not a run's"):
        refuse_other_run(tmp_path, CONFIG)
    (tmp_path / "ablation.json").write_text("{}")
    with pytest.raises(InputError, match="holds an ablation"):
        refuse_other_run(tmp_path, CONFIG)


def test_a_status_that_cannot_be_read_is_empty(tmp_path):
    assert read_status(tmp_path) == {}
    for content in ("", "{", "[]", "\x00"):
        (tmp_path / "status.json").write_text(content)
        assert read_status(tmp_path) == {}


def test_equal_configurations_have_no_difference(tmp_path):
    leave(tmp_path)
    assert difference(tmp_path, CONFIG) is None
    assert difference(tmp_path, {**CONFIG, "seed": 1}) == "seed=0, not 1"


def test_the_plain_configuration_is_resolved_and_without_hydra():
    config = OmegaConf.create({"a": 1, "b": {"c": "${a}"}, "hydra": {"d": "???", "e": "${hydra.d}"}})
    assert plain_config(config) == {"a": 1, "b": {"c": 1}}


def test_a_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_path("~/run") == tmp_path / "run"
