"""Where everything is known the ranking of strategies is known, controls are what they must be, and noise does harm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

import apportion.conf
from apportion.credit import CreditStrategy
from apportion.credit.controls import Inverted, Oracle, Shuffled, TrueAdvantage
from apportion.credit.localized import FirstError, WrongSteps
from apportion.credit.min_form import MinForm
from apportion.credit.prefix_weights import PrefixShare
from apportion.credit.process import ProcessReward, StepDifference
from apportion.credit.resampled import ResampledCutpoints, ResampledSteps
from apportion.credit.strategy import assign_credit
from apportion.credit.token_weights import PlanBonus
from apportion.credit.truth import solve
from apportion.credit.uniform import Uniform
from apportion.experiments.app import build
from apportion.experiments.probe.tabular import draw_rollouts, probe_policies, probe_tabular, sweep_noise
from apportion.experiments.report.statistics import compare_paired
from apportion.experiments.tasks.tabular import (
    ErrorRepairChain,
    FillerChain,
    FormatSpan,
    SelfCorrectingChain,
    UniquePathTree,
)
from apportion.experiments.tasks.tabular_evidence import Evidence
from apportion.experiments.tasks.tabular_sampling import missing_on_tabular, random_logits, sample_batch, valued_states
from apportion.verifiers import InputError

CONF = Path(apportion.conf.__file__).resolve().parent
NAMES = sorted(p.relative_to(CONF / "credit").with_suffix("").as_posix() for p in (CONF / "credit").rglob("*.yaml"))
# Their evidence has no counterpart in a table: trees, attention, influence, a model trained on the side, plan words.
WITHOUT = {
    "process/prime",
    "redistribution/abc",
    "redistribution/counterfactual",
    "redistribution/oar",
    "tree/spo_tree",
    "tree/treerl",
    "tree/treerpo",
    "weights/hicra",
}
RANKED: dict[str, CreditStrategy] = {
    "uniform": Uniform(),
    "cliff": FirstError(),
    "levels": ProcessReward(steps="values"),  # values where the rule expects to be told right from wrong
    "capo": WrongSteps(),
    "vineppo": ResampledSteps(),  # of nine continuations
    "oracle": TrueAdvantage(),
    "pure_levels": MinForm(steps="values", signed=True, outcome_weight=0.0),
    "shuffled": Shuffled(TrueAdvantage()),
    "inverted": Inverted(TrueAdvantage()),
}
Found = Mapping[str, list[dict[str, float]]]
POLICIES = 100  # as many as tell neighbours in the ranking apart


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tables are so small that threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranked() -> Found:
    return probe_policies(FillerChain(), RANKED, policies=POLICIES, groups=12, group_size=8, seed=0)


def of(found: Found, name: str, key: str) -> dict[int, float]:
    return {index: figures[key] for index, figures in enumerate(found[name])}


def mean(found: Found, name: str, key: str) -> float:
    values = list(of(found, name, key).values())
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("gradient/cosine", ["pure_levels", "uniform", "cliff", "levels", "capo", "vineppo", "oracle"]),
        ("quality/pearson", ["pure_levels", "uniform", "levels", "cliff", "capo", "vineppo", "oracle"]),
    ],
)
def test_strategies_rank_as_they_are_known_to(ranked: Found, key: str, order: list[str]) -> None:
    for worse, better in pairwise(order):
        difference = compare_paired(of(ranked, better, key), of(ranked, worse, key))
        assert difference.interval.low > 0, f"{better} - {worse}: {difference.mean} {difference.interval}"


@pytest.mark.parametrize(
    ("name", "pearson", "error_auc"),
    [
        ("uniform", 0.29, 0.5),
        ("cliff", 0.38, 0.71),
        ("levels", 0.35, 0.77),
        ("capo", 0.44, 1.0),
        ("vineppo", 0.61, 0.91),
    ],
)
def test_figures_are_near_those_that_were_measured_independently(
    ranked: Found, name: str, pearson: float, error_auc: float
) -> None:
    assert mean(ranked, name, "quality/pearson") == pytest.approx(pearson, abs=0.06)
    assert mean(ranked, name, "quality/error_auc") == pytest.approx(error_auc, abs=0.15)


def test_the_oracle_is_right_and_its_inverse_wrong_for_every_policy(ranked: Found) -> None:
    for right, wrong in zip(ranked["oracle"], ranked["inverted"], strict=True):
        assert (right["quality/pearson"], wrong["quality/pearson"]) == pytest.approx((1.0, -1.0), abs=1e-6)
        assert (right["quality/sign_accuracy"], wrong["quality/sign_accuracy"]) == (1.0, 0.0)
        assert right["quality/inert_mass"] == wrong["quality/inert_mass"] == 0.0
        assert wrong["gradient/cosine"] == pytest.approx(-right["gradient/cosine"])
        assert (right["quality/blame_at_1"], wrong["gradient/bias"]) == (1.0, 1.0)


def test_what_is_shuffled_finds_errors_no_better_than_a_coin(ranked: Found) -> None:
    half = dict.fromkeys(range(POLICIES), 0.5)
    interval = compare_paired(of(ranked, "shuffled", "quality/error_auc"), half).interval
    assert interval.low < 0 < interval.high


def test_what_is_shuffled_correlates_by_the_outcome_alone() -> None:
    task, found, null = FillerChain(), {}, {}
    shuffled = {"shuffled": Shuffled(TrueAdvantage())}
    for index, figures in enumerate(
        probe_policies(task, shuffled, policies=40, groups=12, group_size=8, seed=3)["shuffled"]
    ):
        process = task.tables.process
        exact = solve(process, process.policy(random_logits(task.tables, 3, index)))
        truth = sample_batch(task.tables, exact, groups=12, group_size=8, seed=3, names=(index,), states=()).truth
        rows = truth.advantage.mean(dim=1, keepdim=True)
        found[index] = figures["quality/pearson"]
        null[index] = float(rows.var(correction=0) / truth.advantage.var(correction=0))
    interval = compare_paired(found, null).interval
    assert interval.low < 0 < interval.high
    assert interval.high - interval.low < 0.04


def test_filler_gets_what_is_handed_out_by_the_answer(ranked: Found) -> None:
    assert mean(ranked, "uniform", "quality/inert_mass") > 0.5  # half of the tokens are filler, more are past help
    assert mean(ranked, "vineppo", "quality/inert_mass") < mean(ranked, "capo", "quality/inert_mass")


def test_rules_of_the_first_error_lose_their_sign_where_errors_are_mended() -> None:
    strategies = {"first": FirstError(), "all": WrongSteps(), "told": ProcessReward(accumulate="own")}
    mended = probe_policies(SelfCorrectingChain(), strategies, policies=30, groups=8, group_size=8, seed=0)
    key = "quality/sign_accuracy"
    for other in ("all", "told"):
        assert compare_paired(of(mended, other, key), of(mended, "first", key)).interval.low > 0
    final = probe_policies(ErrorRepairChain(repair=None), strategies, policies=30, groups=8, group_size=8, seed=0)
    assert mean(mended, "first", key) < mean(final, "first", key) - 0.05


def test_exact_values_make_step_differences_the_truth() -> None:
    exact = Evidence(continuations=None)
    found = probe_policies(
        FillerChain(), {"vine": ResampledSteps()}, policies=4, groups=4, group_size=8, seed=0, evidence=exact
    )
    assert [figures["quality/pearson"] for figures in found["vine"]] == pytest.approx([1.0] * 4, abs=1e-6)


def test_more_continuations_come_nearer_to_the_truth() -> None:
    pearson = []
    for count in (1, 4, 16):
        found = probe_policies(
            FillerChain(),
            {"vine": ResampledSteps()},
            policies=4,
            groups=3,
            group_size=8,
            seed=0,
            evidence=Evidence(continuations=count),
        )
        pearson.append(mean(found, "vine", "quality/pearson"))
    assert pearson[0] + 0.1 < pearson[1] < pearson[2] - 0.1


def test_costs_are_those_of_an_answer() -> None:
    strategies = {"uniform": Uniform(), "vineppo": ResampledSteps(), "capo": WrongSteps(), "oracle": TrueAdvantage()}
    found = {
        probed.name: {key: figure.value for key, figure in probed.figures.items() if key.startswith("cost/")}
        for probed in probe_tabular(FillerChain(), strategies, policies=2, groups=2, group_size=4)
    }
    rollouts = {name: figures["cost/rollouts"] for name, figures in found.items()}
    assert rollouts == {"uniform": 0, "vineppo": 12 * 9, "capo": 0, "oracle": 0}  # a state before each of 12 steps
    calls = {name: figures["cost/verifier_calls"] for name, figures in found.items()}
    assert calls == {"uniform": 1, "vineppo": 2, "capo": 2, "oracle": 0}
    assert all(figures["cost/milliseconds"] > 0 for figures in found.values())


def test_controls_are_marked_and_intervals_hold_their_means() -> None:
    strategies = {"uniform": Uniform(), "capo": WrongSteps()}
    uniform, capo = probe_tabular(FormatSpan(), strategies, policies=6, groups=4, group_size=8)
    assert (uniform.kind, capo.kind) == ("control", "strategy")
    assert capo.told == "which steps are wrong, in every answer"
    for key, figure in capo.figures.items():
        assert key.endswith("_p") or figure.low <= figure.value <= figure.high
    difference = capo.figures["quality/pearson_minus_uniform"]
    assert difference.value == pytest.approx(
        capo.figures["quality/pearson"].value - uniform.figures["quality/pearson"].value
    )
    assert 0 < capo.figures["quality/pearson_p"].value < 1
    assert (
        probe_tabular(FormatSpan(), strategies, policies=2, groups=4, group_size=8, controls=())[0].kind == "strategy"
    )


def test_a_loss_weight_is_part_of_what_is_handed_out() -> None:
    strategies = {"share": PrefixShare(inner=TrueAdvantage())}  # less weight on beginnings that answers share
    found = probe_policies(UniquePathTree(), strategies, policies=5, groups=4, group_size=8, seed=0)
    assert max(of(found, "share", "quality/pearson").values()) < 0.99


def test_where_every_error_is_missed_located_credit_is_uniform() -> None:
    strategies = {"uniform": Uniform(), "cliff": FirstError(), "capo": WrongSteps(), "oracle": Oracle()}
    points = sweep_noise(
        FillerChain(), strategies, {"miss": [0.0, 0.5, 1.0], "boundary": [0, 1]}, policies=6, groups=8, runs=2, steps=10
    )
    table = {(p.noise, p.level, p.strategy): {key: figure.value for key, figure in p.figures.items()} for p in points}
    assert len(points) == 20
    for key in ("quality/pearson", "gradient/cosine", "quality/error_auc", "learning/gain"):
        uniform = table["miss", 1.0, "uniform"][key]
        assert [table["miss", 1.0, name][key] for name in ("cliff", "capo")] == pytest.approx([uniform] * 2, abs=1e-4)
        for name in ("uniform", "oracle"):  # they read no step verifier
            assert len({table[kind, level, name][key] for kind, level in (("miss", 0.5), ("boundary", 1))}) == 1
    for name in ("cliff", "capo"):
        pearson = [table["miss", level, name]["quality/pearson"] for level in (0.0, 0.5, 1.0)]
        assert pearson == sorted(pearson, reverse=True)
        assert table["boundary", 1, name]["quality/pearson"] < pearson[0] - 0.05
        assert table["boundary", 0, name]["gradient/cosine"] == table["miss", 0.0, name]["gradient/cosine"]


def test_values_of_a_blurred_model_say_less() -> None:
    strategies = {"difference": StepDifference(steps="values"), "uniform": Uniform()}
    points = sweep_noise(FillerChain(), strategies, {"calibration": [0.0, 1.0, 3.0]}, policies=6, groups=4, runs=0)
    pearson = [point.figures["quality/pearson"].value for point in points if point.strategy == "difference"]
    assert pearson[0] > 0.9
    assert pearson[1] + 0.1 < pearson[0]
    assert pearson[2] + 0.1 < pearson[1]
    assert "learning/gain" not in points[0].figures


def test_drawn_answers_are_text_with_the_credit_of_each_word() -> None:
    task = SelfCorrectingChain()
    drawn = draw_rollouts(task, {"oracle": TrueAdvantage(), "vine": ResampledSteps()}, count=8, seed=1)
    assert [one.reward for one in drawn] == sorted(one.reward or 0.0 for one in drawn)
    exact = solve(task.tables.process, task.tables.process.policy(random_logits(task.tables, 1, 0)))
    for one in drawn:
        words = [one.text[start:stop] for start, stop in one.offsets]
        assert " ".join(words) == one.text
        assert [word in ("slip", "so", "stop") for word in words] == list(one.wrong)
        assert math.fsum(one.truth) == pytest.approx((one.reward or 0.0) - float(exact.value[0]))
        assert list(one.advantages["oracle"]) == pytest.approx(list(one.truth), abs=1e-6)
        assert {len(one.ids), len(one.trained), len(one.advantages["vine"])} == {len(words)}


def test_missing_evidence_is_named_before_anything_is_drawn() -> None:
    with pytest.raises(InputError, match=r"^credit: mine needs spans:plan, which no tabular task gives"):
        probe_tabular(FillerChain(), {"mine": PlanBonus()}, policies=1)


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"+credit@all.s{index}={name}" for index, name in enumerate(NAMES)])
        return {name: build(config.all[f"s{index}"], "credit") for index, name in enumerate(NAMES)}


def test_every_strategy_but_those_whose_evidence_a_table_lacks_runs(built: dict[str, Any]) -> None:
    assert {name for name, strategy in built.items() if missing_on_tabular(strategy)} == WITHOUT
    task = FormatSpan()
    process = task.tables.process
    exact = solve(process, process.policy(random_logits(task.tables, 0)))
    fit = {name: strategy for name, strategy in built.items() if name not in WITHOUT}
    sample = sample_batch(task.tables, exact, groups=4, group_size=8, seed=0, states=valued_states(fit.values()))
    for name, strategy in fit.items():
        credit = assign_credit(strategy, sample.batch)
        # The best of a group is no better than the second best where two answers are right.
        assert credit.advantages.abs().sum() > 0 or name == "sequence/pass_at_k", name
    assert ResampledCutpoints().states in sample.batch.prefix_values
    assert torch.equal(sample.batch.spans["critic_1"].score, sample.batch.spans["steps"].score)
