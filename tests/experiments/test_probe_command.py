"""``apportion probe``: what it shows is right, can be computed again from its files, and bad input is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from apportion.experiments.cli import main

SMALL = ["experiment=smoke", "warm_start.steps=60", "threads=1"]
FEW = "credit=uniform,process/own_step,localized/cliff,resampled/vineppo"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["probe", *arguments])
    assert exit_.value.code == 2
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("apportion "))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "out"
    main(["probe", *SMALL, f"run.dir={folder}"])
    return folder


def figures(folder: Path) -> dict[tuple[str, str], float]:
    with (folder / "figures.csv").open(newline="") as file:
        return {
            (row["strategy"], row["figure"]): float(row["value"]) if row["value"] else float("nan")
            for row in csv.DictReader(file)
        }


def test_it_leaves_a_page_and_the_files_behind_it(probed: Path) -> None:
    found = json.loads((probed / "probe.json").read_text())
    kinds = [one["kind"] for one in found["strategies"]]
    assert (kinds.count("strategy") >= 12, kinds.count("control")) == (True, 4)
    assert "apportion probe" in (probed / "probe.html").read_text()
    assert {path.name for path in probed.iterdir() if not path.name.startswith(".")} == {
        *("config.yaml", "figures.csv", "gradients.npz", "noise.csv", "probe.html", "probe.json", "probe.parquet")
    }


def test_the_oracle_is_the_truth_and_the_inverse_its_opposite(probed: Path) -> None:
    found = figures(probed)
    assert found["oracle", "quality/pearson"] == pytest.approx(1.0, abs=1e-6)
    assert found["oracle", "quality/sign_accuracy"] == 1.0
    assert found["inverted", "quality/pearson"] == pytest.approx(-found["own_step", "quality/pearson"])
    assert found["uniform", "quality/error_auc"] == pytest.approx(0.5)


def by_unit(row: dict, values: list[float]) -> list[float]:
    """Mean of a value of tokens over the trained tokens of each unit."""
    units = range(len(row["true_advantage"]))
    tokens = list(zip(row["unit"], row["completion_mask"], values))
    return [float(np.mean([v for unit, trained, v in tokens if unit == one and trained])) for one in units]


def test_the_correlation_can_be_computed_from_the_saved_answers(probed: Path) -> None:
    rows, found = pq.read_table(probed / "probe.parquet").to_pylist(), figures(probed)
    true = [value for row in rows for value in row["true_advantage"]]
    for name in ("own_step", "uniform", "first_error"):
        given = [value for row in rows for value in by_unit(row, row[f"advantages_{name}"])]
        assert np.corrcoef(given, true)[0, 1] == pytest.approx(found[name, "quality/pearson"], abs=1e-6)


def test_the_true_advantages_of_an_answer_add_up_to_its_reward_less_one_value_of_its_problem(probed: Path) -> None:
    rows = pq.read_table(probed / "probe.parquet").to_pylist()
    starts: dict[int, set[float]] = {}
    for row in rows:
        starts.setdefault(row["group_id"], set()).add(round(row["reward"] - sum(row["true_advantage"]), 6))
    assert all(len(values) == 1 for values in starts.values())
    assert all(0 <= value <= 1 for values in starts.values() for value in values)


def test_the_cosines_can_be_computed_from_the_saved_products(probed: Path) -> None:
    saved, found = np.load(probed / "gradients.npz"), json.loads((probed / "probe.json").read_text())
    total = saved["gram"].sum(axis=(1, 3))
    length = np.sqrt(np.diag(total))
    names = list(saved["names"])
    assert names == [one["name"] for one in found["strategies"]]
    at = names.index("own_step"), names.index("wrong_steps")
    cosine = total[at] / length[at[0]] / length[at[1]]
    assert found["cosines"][at[0]][at[1]] == pytest.approx(cosine, abs=1e-9)
    assert figures(probed)["own_step", "gradient/norm"] == pytest.approx(length[at[0]], rel=1e-9)


def test_the_mean_change_of_a_class_of_tokens_can_be_computed_from_the_saved_changes(probed: Path) -> None:
    rows, found = pq.read_table(probed / "probe.parquet").to_pylist(), figures(probed)
    changes = [
        change
        for row in rows
        for change, place in zip(row["change_own_step"], row["token_class"])
        if place == "first_wrong"
    ]
    assert np.mean(changes) == pytest.approx(found["own_step", "update/first_wrong"], abs=1e-9)
    assert np.mean(changes) < 0  # what is blamed becomes less likely


def test_no_noise_is_the_plain_verifier_and_much_noise_does_harm(probed: Path) -> None:
    plain = figures(probed)
    with (probed / "noise.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] == "quality/pearson"]
    found = {(row["strategy"], row["noise"], float(row["level"])): float(row["value"]) for row in rows}
    assert found["own_step", "miss", 0.0] == pytest.approx(plain["own_step", "quality/pearson"])
    assert found["own_step", "miss", 0.5] != found["own_step", "miss", 0.0]
    assert found["uniform", "miss", 0.5] == pytest.approx(plain["uniform", "quality/pearson"])


def test_the_same_command_gives_the_same_figures(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = probed.parent / "again"
    main(["probe", *SMALL, FEW, "probe.noise.miss=[]", "probe.noise.boundary=[]", f"run.dir={folder}"])
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(folder)
    before, after = figures(probed), figures(folder)
    for key in ("quality/pearson", "gradient/norm", "gradient/cosine", "update/kl"):
        assert after["process_own_step", key] == pytest.approx(before["own_step", key], rel=1e-5)


def test_rollouts_of_a_run_are_probed_as_they_were_sampled(probed: Path, tmp_path: Path) -> None:
    main(["train", *SMALL, "run.steps=1", "run.eval_every=0", "rollout.prompts_per_step=6",
          "run.save_model=false", f"run.dir={tmp_path / 'run'}"])  # fmt: skip
    saved = pq.read_table(tmp_path / "run" / "rollouts" / "step_00001.parquet").to_pylist()
    main(["probe", *SMALL, FEW, f"probe.rollouts={tmp_path / 'run'}", "probe.update=false", "probe.noise.miss=[]",
          "probe.noise.boundary=[]", f"run.dir={tmp_path / 'probe'}"])  # fmt: skip
    rows = pq.read_table(tmp_path / "probe" / "probe.parquet").to_pylist()
    assert [row["completion_ids"] for row in rows] == [row["completion_ids"] for row in saved]
    for row, other in zip(rows, saved):
        assert row["advantages_uniform"] == pytest.approx(other["advantages"], abs=1e-5)
    cautions = json.loads((tmp_path / "probe" / "probe.json").read_text())["cautions"]
    assert not any("another policy" in caution for caution in cautions)


def test_a_tabular_task_is_probed_against_exact_values(tmp_path: Path) -> None:
    small = ["policies=4", "noise_policies=2", "runs=2", "steps=10"]
    noise = [
        "probe.noise.miss=[0.0, 0.5]",
        "probe.noise.false_alarm=[]",
        "probe.noise.boundary=[]",
        "probe.noise.calibration=[]",
    ]
    main(["probe", "task=tabular/error_repair", *(f"probe.tabular.{one}" for one in small), *noise, FEW,
          f"run.dir={tmp_path / 'out'}"])  # fmt: skip
    found = figures(tmp_path / "out")
    assert found["oracle", "quality/pearson"] == pytest.approx(1.0, abs=1e-6)
    assert found["oracle", "gradient/cosine"] > found["uniform", "gradient/cosine"] > 0
    assert json.loads((tmp_path / "out" / "probe.json").read_text())["truth"].startswith("dynamic programming")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["probe.noise.strategies=[nobody]"], "probe.noise.strategies: no strategy has the label 'nobody'"),
        (["probe.noise.calibration=[nan]"], "probe.noise.calibration: levels are finite numbers"),
        (["probe.steps=nosuch"], "probe.steps=nosuch: no verifier of this name marks spans"),
        (["truth.units=nosuch"], "truth.units=nosuch: no verifier of this name marks spans"),
        (["~verifier@verifiers.truth"], "or give null"),
        (["probe.noise=5"], "probe.noise=5: holds options"),
        (["probe.tau=inf"], "probe.tau=inf: must be a finite number over 0"),
        (["probe.reference_samples=5"], "must be even and at least 4"),
        (["credit=tree/treerl", "rollout=tree", "probe.rollouts=x"], "saved rollouts hold no tree"),
        ([FEW, "loss.nosuch=1"], "loss.nosuch: no such key"),
        (["probe.problem=3"], "probe.problem"),
        (["probe.problems=1"], "probe.problems=1: must be at least 2"),
        (["probe.noise.miss=[2]"], "probe.noise.miss: 2 is no share"),
        (["probe.rollouts=nowhere.parquet"], "probe.rollouts=nowhere.parquet: no such file"),
        (["credit=tree/treerl"], "rollout=tree"),
        (['+probe.strategies.other=["credit=uniform","rollout.group_size=4"]'], "has another rollout than"),
        (["seed=1,2"], "seed: takes one value here"),
        (["hydra/launcher=joblib", "credit=nothing_such"], "nothing_such"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *SMALL, *arguments, f"run.dir={tmp_path / 'out'}")
    assert said in line


def test_strategies_of_sampled_trees_are_probed(tmp_path: Path) -> None:
    main(["probe", *SMALL, "credit=uniform,tree/treerl", "rollout=tree", "probe.update=false", "probe.noise.miss=[]",
          "probe.noise.boundary=[]", f"run.dir={tmp_path / 'out'}"])  # fmt: skip
    assert abs(figures(tmp_path / "out")["tree_treerl", "gradient/cosine"]) <= 1


def test_an_answer_failed_where_its_reward_is_in_the_lower_half_of_the_range(tmp_path: Path) -> None:
    small = [
        *SMALL,
        FEW,
        "probe.update=false",
        "probe.geometry=false",
        "probe.noise.miss=[]",
        "probe.noise.boundary=[]",
    ]
    main(["probe", *small, f"run.dir={tmp_path / 'plain'}"])
    main(["probe", *small, "reward.answer=10", f"run.dir={tmp_path / 'tenfold'}"])
    for name in ("quality/error_auc", "quality/blame_at_1", "quality/sign_accuracy"):
        plain, tenfold = (figures(tmp_path / folder)["process_own_step", name] for folder in ("plain", "tenfold"))
        assert plain == pytest.approx(tenfold)


def test_a_strategy_that_writes_into_the_batch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scribbling_strategy.py").write_text(
        "from dataclasses import dataclass\n"
        "from apportion.credit.uniform import Uniform\n"
        "@dataclass(frozen=True)\n"
        "class Scribbling(Uniform):\n"
        "    def __call__(self, batch):\n"
        "        batch.reward.zero_()\n"
        "        return super().__call__(batch)\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = "+probe.strategies.mine=['~credit','+credit._target_=scribbling_strategy.Scribbling']"
    line = refused(capsys, *SMALL, mine, f"run.dir={tmp_path / 'out'}")
    assert "mine: the strategy writes into the batch" in line


def test_a_finished_probe_is_not_written_over(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds a finished run" in refused(capsys, *SMALL, f"run.dir={probed}")


def test_the_shuffled_control_lies_within_its_null(probed: Path) -> None:
    """Its correlation is one draw from the shuffles of the strategy that it shuffles."""
    rows, found = pq.read_table(probed / "probe.parquet").to_pylist(), figures(probed)
    true = np.array([value for row in rows for value in row["true_advantage"]])
    generator = torch.Generator().manual_seed(0)
    null = []
    for _ in range(200):
        given = []
        for row in rows:
            values, trained = np.array(row["advantages_own_step"]), np.flatnonzero(row["completion_mask"])
            order = torch.randperm(len(trained), generator=generator).numpy()
            moved = values.copy()
            moved[trained] = values[trained[order]]
            given += by_unit(row, moved.tolist())
        null.append(np.corrcoef(given, true)[0, 1])
    low, high = np.quantile(null, [0.005, 0.995])
    assert low <= found["shuffled", "quality/pearson"] <= high
