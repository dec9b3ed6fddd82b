"""Laws of equal compute: everything is charged to the run that spent it, and compared where all have spent as much."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from apportion.experiments.report.build import build_report
from apportion.experiments.report.costs import AXES, axes, cost_curve, equal_cost
from apportion.experiments.report.load import load_ablation

TOKENS = AXES[0]


def write(folder: Path, per_step, *, seeds=(0, 1), steps=4, further=None) -> Path:
    """Two strategies whose success rises by .1 (uniform) or .2 (dear) a step; ``per_step`` is what each pays for it."""
    plan = {
        "command": "apportion ablate", "baseline": "uniform", "strategies": ["uniform", "dear"], "seeds": list(seeds),
        "budget": {"kind": "steps", "value": steps}, "task": "chain",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.json").write_text(json.dumps(plan))
    for strategy, rise in (("uniform", 0.1), ("dear", 0.2)):
        for seed in seeds:
            cell = folder / "cells" / strategy / f"seed_{seed}"
            cell.mkdir(parents=True)
            rows, tokens = [], 0
            for step in range(steps + 1):
                spent = {} if step == 0 else dict(per_step[strategy])
                more = {} if step == 0 else (further or {}).get(strategy, {})
                tokens += int(spent.get("cost/tokens", 0))
                rows.append(
                    {"step": step, "tokens": tokens, "seconds": float(step), "cost/seconds_eval": 5.0, **spent,
                     "eval/success": 0.1 + rise * step + 0.01 * seed, **more}
                )  # fmt: skip
            (cell / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (cell / "status.json").write_text(json.dumps({"state": "finished", "step": steps, "steps": steps}))
    return folder


CHEAP = {"cost/tokens": 100, "cost/forwards": 10, "cost/seconds_sample": 1.0, "cost/seconds_update": 1.0}
DEAR = {**CHEAP, "cost/tokens": 400, "cost/seconds_evidence": 2.0}


@pytest.fixture
def ablation(tmp_path):
    return load_ablation(write(tmp_path, {"uniform": CHEAP, "dear": DEAR}))


def test_a_step_that_costs_four_times_counts_four_times(ablation):
    by_name = {at.axis.name: at for at in equal_cost(ablation)}
    tokens = by_name["tokens"]
    assert tokens.cost == 400  # uniform's end is dear's first step
    assert tokens.of("uniform").success.mean == pytest.approx(0.5 + 0.005)
    assert tokens.of("dear").success.mean == pytest.approx(0.3 + 0.005)
    assert tokens.of("dear").against_baseline.differences == pytest.approx((-0.2, -0.2))
    calls = by_name["forwards"]  # as many calls: the same steps are compared
    assert calls.cost == 40
    assert calls.of("dear").against_baseline.mean == pytest.approx(0.4)


def test_evidence_is_charged_in_time_and_evaluation_is_not(ablation):
    at = next(at for at in equal_cost(ablation) if at.axis.name == "seconds")
    assert at.cost == 8.0  # four steps of two seconds
    assert cost_curve(ablation.counted("dear")[0], at.axis)[0] == [0.0, 4.0, 8.0, 12.0, 16.0]
    assert at.of("dear").success.mean == pytest.approx(0.5 + 0.005)


def test_success_between_evaluations_is_interpolated(tmp_path):
    ablation = load_ablation(write(tmp_path, {"uniform": {**CHEAP, "cost/tokens": 150}, "dear": DEAR}))
    at = equal_cost(ablation)[0]
    assert (at.axis, at.cost) == (TOKENS, 600)
    assert at.of("dear").success.by_seed[0] == pytest.approx(0.1 + 0.2 * 1.5)


def test_tokens_through_models_take_the_place_of_calls_where_all_logged_them(tmp_path):
    both = {name: {"cost/forward_tokens": 7.0} for name in ("uniform", "dear")}
    full = load_ablation(write(tmp_path / "full", {"uniform": CHEAP, "dear": DEAR}, further=both))
    assert [axis.name for axis in axes(full.cells)] == ["tokens", "forward_tokens", "seconds"]
    half = load_ablation(write(tmp_path / "half", {"uniform": CHEAP, "dear": DEAR}, further={"dear": both["dear"]}))
    assert [axis.name for axis in axes(half.cells)] == ["tokens", "forwards", "seconds"]


def test_nothing_is_compared_that_was_not_measured(tmp_path):
    nothing = load_ablation(write(tmp_path / "a", {"uniform": {}, "dear": {}}))
    assert equal_cost(nothing) == []
    free = load_ablation(write(tmp_path / "b", {"uniform": {"cost/tokens": 0}, "dear": {"cost/tokens": 3}}))
    assert equal_cost(free) == []  # no cost above zero is common to all


def test_the_table_and_the_page_say_it(tmp_path):
    folder = write(tmp_path, {"uniform": CHEAP, "dear": DEAR}, seeds=(0, 1, 2))
    page = build_report(folder).read_text()
    assert "Success at equal cost" in page
    assert "at 400 generated tokens" in page
    assert (folder / "figures" / "cost_tokens.svg").exists()
    with (folder / "equal_cost.csv").open(newline="") as file:
        rows = {(row["axis"], row["strategy"]): row for row in csv.DictReader(file)}
    assert len(rows) == 6
    dear = rows["tokens", "dear"]
    assert (dear["cost"], dear["seeds"], float(dear["minus_uniform"])) == ("400", "3", pytest.approx(-0.2))
    assert float(dear["p_sign_flip"]) == 0.25
    assert rows["tokens", "uniform"]["minus_uniform"] == ""


def test_time_of_verifiers_is_that_of_their_calls_where_it_is_known(tmp_path):
    waited = {"uniform": {**CHEAP, "cost/seconds_verify": 0.5}, "dear": {**DEAR, "cost/seconds_verify": 0.5}}
    told = {"dear": {"cost/verifier_seconds": 3.0}}
    folder = write(tmp_path, waited, further=told)
    build_report(folder)
    with (folder / "summary.csv").open(newline="") as file:
        spent = {row["strategy"]: float(row["verifier_seconds"]) for row in csv.DictReader(file)}
    assert spent == {"uniform": 2.0, "dear": 12.0}
