"""Figures of credit quality against numbers by hand, a slow loop, and what they must not depend on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from apportion.credit import CreditBatch
from apportion.credit.controls import Inverted, Shuffled, TrueAdvantage
from apportion.credit.intervals import bootstrap, estimates, ratio
from apportion.credit.quality import (
    FIGURES,
    Grading,
    difference_test,
    noise_floor,
    quality,
    quality_differences,
    quality_intervals,
    shuffle_test,
)
from apportion.credit.truth import Truth
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

NAN = math.nan


def flags(rows: int, width: int, *places: tuple[int, int]) -> torch.Tensor:
    made = torch.zeros(rows, width, dtype=torch.bool)
    for place in places:
        made[place] = True
    return made


def case(
    unit_ids: list[list[int]],
    true: list[list[float]],
    reward: list[float],
    *,
    groups: list[int] | None = None,
    wrong: list[tuple[int, int]] = (),
    inert: list[tuple[int, int]] = (),
    again: list[list[float]] | None = None,
) -> tuple[Truth, CreditBatch]:
    ids = torch.tensor(unit_ids)
    advantage = torch.tensor(true, dtype=torch.float64)
    second = None if again is None else torch.tensor(again, dtype=torch.float64)
    truth = Truth(
        ids, advantage, torch.zeros_like(advantage), flags(*ids.shape, *wrong), flags(*ids.shape, *inert), second
    )
    rewards = torch.tensor(reward, dtype=torch.float64)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return truth, CreditBatch(mask, torch.tensor(groups or [0] * len(ids)), rewards)


def short(figures: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("quality/"): value for name, value in figures.items()}


def random_case(
    seed: int, *, rows: int = 16, units: int = 5, each: int = 3, group: int = 4
) -> tuple[Truth, CreditBatch]:
    """Answers of ``units`` steps of ``each`` tokens and an end token; failed ones have one harmful step."""
    draw = torch.Generator().manual_seed(seed)
    reward = (torch.rand(rows, generator=draw) < 0.5).double()
    reward[:2] = torch.tensor([0.0, 1.0])
    bad = torch.randint(units, (rows,), generator=draw)
    true = 0.1 * torch.randn(rows, units, generator=draw, dtype=torch.float64) + 0.1 * reward[:, None]
    true[torch.arange(rows), bad] -= 0.6 * (1 - reward)
    ids = torch.arange(units).repeat_interleave(each).expand(rows, -1)
    ids = torch.cat([ids, torch.full((rows, 1), -1)], dim=1)
    place = torch.arange(units * each + 1)
    wrong = (ids == bad[:, None]) & (reward == 0)[:, None] & (place % each == each - 1)
    inert = (place % each == 0).expand(rows, -1)
    tokens = {"truth": Truth(ids, true, torch.zeros_like(true), wrong, inert).by_token()}
    mask = torch.ones(ids.shape, dtype=torch.bool)
    batch = CreditBatch(mask, torch.arange(rows) // group, reward, token_scores=tokens, seed=seed)
    return Truth(ids, true, torch.zeros_like(true), wrong, inert), batch


def normal(seed: int, batch: CreditBatch) -> torch.Tensor:
    return torch.randn(batch.completion_mask.shape, generator=torch.Generator().manual_seed(seed + 10**6))


# --- the figures -----------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    truth, batch = case(
        [[0, 0, 1, 2, -1], [0, 1, 1, 2, 2], [0, 0, 0, 0, 0]],
        [[0.2, -0.5, 0.0], [-0.4, 0.1, 0.3], [0.3, NAN, NAN]],
        [0.0, 0.0, 1.0],
        wrong=[(0, 2), (1, 0), (1, 1)],
        inert=[(0, 4), (2, 0)],
    )
    advantages = torch.tensor([[1.0, 0, -1, -1, 1], [-1, -2, 2, 0, 0], [2, 2, 2, 2, 2]])
    found = short(quality(advantages, truth, batch))
    credit, true = [0.5, -1, -1, -1, 0, 0, 2], [0.2, -0.5, 0, -0.4, 0.1, 0.3, 0.3]
    assert found.pop("pearson") == pytest.approx(np.corrcoef(credit, true)[0, 1], abs=1e-12)
    assert found == pytest.approx(
        {
            "sign_accuracy": 5 / 6,  # right, right, (0 is under tau), right, 0, 0, right
            "sign_ties": 2 / 6,
            "blame_at_1": (1 / 2 + 1) / 2,  # one of two least in the first answer, the right one in the second
            "error_auc": (3.5 / 4 + 1) / 2,
            "inert_mass": (1 + 2) / (4 + 5 + 10),
        }
    )


def slow(advantages: torch.Tensor, truth: Truth, batch: CreditBatch, grading: Grading) -> list[float]:
    credit, true, weight, areas, hits, inert, size = [], [], [], [], [], 0.0, 0.0
    for row, mask in enumerate(batch.completion_mask.tolist()):
        kept = [t for t, inside in enumerate(mask) if inside]
        a = advantages[row].double().tolist()
        failed = batch.reward[row].item() < grading.passing and bool(kept)
        size += sum(abs(a[t]) for t in kept)
        inert += sum(abs(a[t]) for t in kept if truth.inert[row, t])
        own = []
        for unit, value in enumerate(truth.advantage[row].tolist()):
            tokens = [t for t in kept if truth.unit_ids[row, t] == unit]
            if tokens and not math.isnan(value):
                own.append((sum(a[t] for t in tokens) / len(tokens), value))
                weight.append(1 if grading.weighting == "unit" else len(tokens))
        credit += [c for c, _ in own]
        true += [v for _, v in own]
        wrong = [bool(truth.wrong[row, t]) for t in kept]
        if failed and 0 < sum(wrong) < len(wrong):
            areas.append(roc_auc_score(wrong, [-a[t] for t in kept]))
        if failed and own and min(v for _, v in own) < -grading.tau:
            least, worst = min(c for c, _ in own), min(v for _, v in own)
            blamed = [v == worst for c, v in own if c == least]
            hits.append(sum(blamed) / len(blamed))
    judged = [(c, v, w) for c, v, w in zip(credit, true, weight) if abs(v) > grading.tau]
    total = sum(w for *_, w in judged)
    right = sum(w * (0.5 if c == 0 else float((c > 0) == (v > 0))) for c, v, w in judged)
    covariance = np.cov(credit, true, fweights=weight, ddof=0)
    return [
        covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1]),
        right / total,
        sum(w for c, _, w in judged if c == 0) / total,
        sum(hits) / len(hits) if hits else NAN,
        sum(areas) / len(areas) if areas else NAN,
        inert / size,
    ]


@pytest.mark.parametrize("weighting", ["unit", "token"])
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@drawn_from(seed=st.integers(0, 10**6), coarse=st.booleans())
def test_they_are_those_of_a_slow_loop(weighting: Any, seed: int, coarse: bool) -> None:
    truth, batch = random_case(seed, each=4)
    advantages = normal(seed, batch)
    if coarse:  # many ties, whole units without credit
        advantages = (0.5 * advantages).round()
    drawn = torch.rand(batch.completion_mask.shape, generator=torch.Generator().manual_seed(seed))
    batch = replace(batch, completion_mask=(drawn > 0.3) & (drawn[:, :1] > 0.1))
    advantage = truth.advantage.clone()
    advantage[3, 2:] = NAN
    truth = replace(truth, advantage=advantage)
    grading = Grading(tau=0.08, weighting=weighting)
    found = quality(advantages.where(batch.completion_mask, 0.0), truth, batch, grading=grading)
    assert list(found.values()) == pytest.approx(slow(advantages, truth, batch, grading), abs=1e-9, nan_ok=True)
    assert tuple(found) == FIGURES


def test_the_true_advantages_themselves_are_right() -> None:
    truth, batch = random_case(0)
    found = short(quality(TrueAdvantage()(batch).advantages, truth, batch))
    assert found["pearson"] == pytest.approx(1.0, abs=1e-12)
    assert (found["sign_accuracy"], found["blame_at_1"], found["sign_ties"]) == (1.0, 1.0, 0.0)
    # A wrong token shares its unit, the worst of its answer, with two of the 15 others.
    assert found["error_auc"] == pytest.approx((13 + 2 / 2) / 15)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@drawn_from(seed=st.integers(0, 10**6), coarse=st.booleans())
def test_the_inverse_of_credit_has_the_opposite_figures(seed: int, coarse: bool) -> None:
    truth, batch = random_case(seed)
    advantages = normal(seed, batch).round() if coarse else normal(seed, batch)
    plain, turned = (short(quality(a, truth, batch)) for a in (advantages, -advantages))
    assert turned["pearson"] == pytest.approx(-plain["pearson"])
    assert turned["sign_accuracy"] == pytest.approx(1 - plain["sign_accuracy"])
    assert turned["error_auc"] == pytest.approx(1 - plain["error_auc"])
    assert (turned["sign_ties"], turned["inert_mass"]) == (plain["sign_ties"], plain["inert_mass"])


def test_the_inverse_of_the_truth_is_wrong_in_everything() -> None:
    truth, batch = random_case(1)
    found = short(quality(Inverted(TrueAdvantage())(batch).advantages, truth, batch))
    assert found["pearson"] == pytest.approx(-1.0, abs=1e-12)
    assert (found["sign_accuracy"], found["blame_at_1"]) == (0.0, 0.0)


def test_uniform_credit_locates_nothing() -> None:
    truth, batch = random_case(2, units=4)
    found = short(quality(Uniform()(batch).advantages, truth, batch))
    assert (found["error_auc"], found["blame_at_1"]) == (0.5, 0.25)
    assert found["inert_mass"] == pytest.approx(5 / 13)  # of 12 tokens and an end token


def test_a_credit_of_zero_counts_half_where_a_sign_is_asked_for() -> None:
    truth, batch = case([[0, 1, 2, 3]], [[0.5, -0.5, 0.5, 0.01]], [0.0])
    found = short(quality(torch.tensor([[1.0, 0.0, -1.0, 9.0]]), truth, batch))
    assert (found["sign_accuracy"], found["sign_ties"]) == (0.5, pytest.approx(1 / 3))
    nothing = short(quality(torch.zeros(1, 4), truth, batch))
    assert (nothing["sign_accuracy"], nothing["sign_ties"]) == (0.5, 1.0)


def test_advantages_that_cancel_up_to_rounding_are_a_credit_of_zero() -> None:
    truth, batch = case([[0, 0, 0, 1]], [[0.5, -0.5]], [0.0])
    found = short(quality(torch.tensor([[0.1, 0.2, -0.3, -1.0]]), truth, batch))
    assert found["sign_ties"] == 0.5


def test_credit_that_is_equal_up_to_rounding_is_a_tie() -> None:
    truth, batch = case([[0, 1, 2, 3]], [[-0.5, 0.1, 0.1, 0.1]], [0.0], wrong=[(0, 0)])
    given = torch.tensor([[0.1, 0.2, 0.3, 0.5]]).cumsum(dim=1)[:, [0, 0, 1, 2]]
    given[0, 1] += 1e-8
    found = short(quality(given, truth, batch))
    assert (found["blame_at_1"], found["error_auc"]) == (0.5, pytest.approx(2.5 / 3))


def test_two_units_that_are_equally_bad_are_both_the_right_ones_to_blame() -> None:
    truth, batch = case([[0, 1, 2]], [[-0.5, 0.1, -0.5]], [0.0])
    assert short(quality(torch.tensor([[0.0, 0.0, -1.0]]), truth, batch))["blame_at_1"] == 1.0
    assert short(quality(torch.tensor([[0.0, -1.0, -1.0]]), truth, batch))["blame_at_1"] == 0.5


def test_what_failed_is_asked_of_the_reward() -> None:
    truth, batch = case([[0, 1]] * 3, [[-0.5, 0.1]] * 3, [0.2, 0.9, NAN], wrong=[(0, 0), (1, 0), (2, 0)])
    given = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [0.0, -1.0]])
    assert short(quality(given, truth, batch))["error_auc"] == 1.0
    strict = short(quality(given, truth, batch, grading=Grading(passing=1.0)))
    assert (strict["error_auc"], strict["blame_at_1"]) == (0.5, 0.5)


def test_a_weight_by_tokens_counts_long_units_more() -> None:
    truth, batch = case([[0, 0, 0, 1]], [[0.5, -0.5]], [1.0])
    given = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    by_unit, by_token = (
        short(quality(given, truth, batch, grading=Grading(weighting=weighting))) for weighting in ("unit", "token")
    )
    assert (by_unit["sign_accuracy"], by_token["sign_accuracy"]) == (0.5, 0.75)
    with pytest.raises(InputError, match="weighting must be unit or token, not 'step'"):
        Grading(weighting="step")  # type: ignore[arg-type]


def test_what_cannot_be_said_is_nan() -> None:
    truth, batch = case([[0, 1], [0, 1]], [[0.01, -0.02], [0.0, 0.01]], [1.0, 1.0])
    found = short(quality(torch.ones(2, 2), truth, batch))
    assert all(math.isnan(value) for value in found.values())
    some = short(quality(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), truth, batch, grading=Grading(tau=0.0)))
    assert {name for name, value in some.items() if math.isnan(value)} == {"blame_at_1", "error_auc", "inert_mass"}
    truth, batch = case([[0, 1]], [[-0.5, 0.1]], [0.0], wrong=[(0, 0), (0, 1)], inert=[(0, 1)])
    assert math.isnan(short(quality(torch.zeros(1, 2), truth, batch))["inert_mass"])
    assert math.isnan(short(quality(torch.ones(1, 2), truth, batch))["error_auc"])  # nothing to compare with


def test_nothing_at_all_is_nan() -> None:
    empty = torch.zeros(0, 3)
    for rows, width, units in ((0, 3, 2), (2, 0, 2), (2, 3, 0), (0, 0, 0)):
        ids = torch.full((rows, width), -1)
        none = flags(rows, width)
        truth = Truth(ids, torch.zeros(rows, units, dtype=torch.float64), torch.zeros(rows, units), none, none)
        batch = CreditBatch(~none, torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.float64))
        given = torch.ones(rows, width)
        assert all(math.isnan(value) for value in quality(given, truth, batch).values())
        assert all(math.isnan(value) for value in shuffle_test(given, truth, batch, permutations=3).values())
        assert all(math.isnan(one.low) for one in quality_intervals(given, truth, batch).values())
    with pytest.raises(ValueError, match=r"the advantages are \(0, 3\), the batch is \(0, 0\)"):
        quality(empty, truth, batch)


# --- what they must not depend on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e6])
def test_the_scale_of_credit_does_not_matter(factor: float) -> None:
    truth, batch = random_case(3)
    for given in (normal(3, batch), normal(3, batch).round(), Uniform()(batch).advantages):
        assert quality(factor * given, truth, batch) == pytest.approx(quality(given, truth, batch), abs=1e-6)


def widened(truth: Truth, batch: CreditBatch, columns: int) -> tuple[Truth, CreditBatch]:
    def pad(values: torch.Tensor, value: float = 0) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, columns), value=value)

    wide = replace(
        truth,
        unit_ids=pad(truth.unit_ids, -1),
        advantage=pad(truth.advantage, NAN),
        standard_error=pad(truth.standard_error),
        wrong=pad(truth.wrong),
        inert=pad(truth.inert),
    )
    return wide, CreditBatch(pad(batch.completion_mask), batch.group_ids, batch.reward)


def test_padding_does_not_matter() -> None:
    truth, batch = random_case(4)
    given = normal(4, batch).round()
    wide = torch.nn.functional.pad(given, (0, 3), value=7.0)  # and what stands outside the mask does not count
    assert quality(wide, *widened(truth, batch, 3)) == pytest.approx(quality(given, truth, batch), abs=1e-12)
    plain = quality_intervals(given, truth, batch)
    for name, one in quality_intervals(wide, *widened(truth, batch, 3)).items():
        assert one == pytest.approx(plain[name], abs=1e-9)


def moved(truth: Truth, batch: CreditBatch, order: torch.Tensor) -> tuple[Truth, CreditBatch]:
    names = ("unit_ids", "advantage", "standard_error", "wrong", "inert")
    rows = replace(truth, **{name: getattr(truth, name)[order] for name in names})
    return rows, CreditBatch(batch.completion_mask[order], batch.group_ids[order], batch.reward[order])


def test_the_order_of_answers_does_not_matter() -> None:
    truth, batch = random_case(5)
    given, order = normal(5, batch), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    here, there = quality_intervals(given, truth, batch), quality_intervals(given[order], *moved(truth, batch, order))
    for name, one in here.items():
        assert there[name] == pytest.approx(one, abs=1e-9)


def test_the_precision_and_the_gradient_of_credit_do_not_matter() -> None:
    truth, batch = random_case(6)
    given = normal(6, batch).round()
    for other in (given.bfloat16(), given.double(), given.clone().requires_grad_()):
        assert quality(other, truth, batch) == quality(given, truth, batch)


def test_shapes_that_do_not_fit_are_refused() -> None:
    truth, batch = random_case(7)
    with pytest.raises(ValueError, match=r"the advantages are \(16, 2\), the batch is \(16, 16\)"):
        quality(torch.zeros(16, 2), truth, batch)
    with pytest.raises(ValueError, match=r"the truth is of \(16, 17\) tokens, the batch of \(16, 16\)"):
        quality(torch.zeros(16, 16), widened(truth, batch, 1)[0], batch)


# --- intervals -------------------------------------------------------------------------------------------------------


def test_resamples_draw_whole_groups_and_count_them_as_often() -> None:
    truth, batch = random_case(8, rows=12)
    given = normal(8, batch)

    def repeated(groups: tuple[int, ...]) -> float:
        rows = torch.cat([(batch.group_ids == group).nonzero()[:, 0] for group in groups])
        return quality(given[rows], *moved(truth, batch, rows))["quality/pearson"]

    possible = [repeated((a, b, c)) for a in range(3) for b in range(a, 3) for c in range(b, 3)]
    found = quality_intervals(given, truth, batch, resamples=2000)["quality/pearson"]
    # With three groups the tails are widened so far that the interval is the range of all resamples.
    assert (found.low, found.high) == pytest.approx((min(possible), max(possible)), abs=1e-6)
    assert found.value == pytest.approx(repeated((0, 1, 2)), abs=1e-12)


@pytest.mark.slow
def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Signs that are right with the chance .7, alike for the answers of a group half of the time."""
    covered = 0
    for seed in range(150):
        draw = torch.Generator().manual_seed(seed)
        rows, groups = 48, torch.arange(48) // 4
        alike = torch.rand(12, 1, generator=draw).expand(12, 4).reshape(48)
        each = torch.rand(rows, generator=draw)
        right = torch.where(torch.rand(12, 1, generator=draw).expand(12, 4).reshape(48) < 0.5, alike, each) < 0.7
        none = flags(rows, 1)
        truth = Truth(torch.zeros(rows, 1).long(), torch.ones(rows, 1).double(), torch.zeros(rows, 1), none, none)
        batch = CreditBatch(~none, groups, torch.zeros(rows).double())
        found = quality_intervals(right[:, None] * 2.0 - 1, truth, batch, resamples=300)["quality/sign_accuracy"]
        covered += found.low <= 0.7 <= found.high
    assert 0.87 <= covered / 150 <= 0.99  # three standard errors around 93%, as it is for twelve groups


def test_one_group_has_no_interval() -> None:
    truth, batch = random_case(9)
    one = replace(batch, group_ids=torch.zeros(16, dtype=torch.long))
    found = quality_intervals(normal(9, batch), truth, one)
    assert all(math.isfinite(figure.value) for figure in found.values())
    assert all(math.isnan(figure.low) and math.isnan(figure.high) for figure in found.values())


def test_a_figure_that_many_resamples_lack_has_no_interval() -> None:
    rows = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    groups = torch.arange(4)
    found = estimates(["share"], *bootstrap(rows, groups, lambda s: ratio(s[..., :1], s[..., 1:])), groups)["share"]
    assert found.value == 1.0
    assert math.isnan(found.low)


def test_credit_against_itself_differs_by_exactly_nothing() -> None:
    truth, batch = random_case(10)
    given = normal(10, batch)
    found = quality_differences(given, given, truth, batch)
    assert set(found.values()) == {(0.0, 0.0, 0.0)}


def test_differences_are_paired_and_change_sign_with_the_sides() -> None:
    truth, batch = random_case(11, rows=64)
    given, uniform = normal(11, batch), Uniform()(batch).advantages
    near = given + 0.1 * normal(12, batch)
    there, back = quality_differences(near, given, truth, batch), quality_differences(given, near, truth, batch)
    alone = quality_intervals(given, truth, batch)
    for name, one in there.items():
        assert back[name] == pytest.approx((-one.value, -one.high, -one.low), abs=1e-9)
        assert one.high - one.low <= 0.5 * (alone[name].high - alone[name].low)
    better = short(quality_differences(TrueAdvantage()(batch).advantages, uniform, truth, batch))
    assert min(better[name].low for name in ("pearson", "sign_accuracy", "blame_at_1", "error_auc")) > 0


# --- the test against shuffles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("among", ["unit", "token"])
def test_right_credit_is_better_placed_than_all_its_shuffles(among: Any) -> None:
    truth, batch = random_case(12, rows=32)
    found = short(shuffle_test(TrueAdvantage()(batch).advantages, truth, batch, among=among, permutations=99))
    at_least = {"pearson", "sign_accuracy", "blame_at_1"} | ({"error_auc"} if among == "token" else set())
    assert {found[name] for name in at_least} == {0.01}
    assert ("inert_mass" in found) == (among == "token")


@pytest.mark.parametrize("among", ["unit", "token"])
def test_credit_that_shuffling_leaves_alone_has_a_p_of_one(among: Any) -> None:
    truth, batch = random_case(13)
    found = shuffle_test(Uniform()(batch).advantages, truth, batch, among=among, permutations=50)
    assert set(found.values()) == {1.0}


def share_of_small(p: list[float]) -> float:
    return sum(value <= 0.1 for value in p) / len(p)


@pytest.mark.parametrize("among", ["unit", "token"])
def test_shuffled_credit_is_within_its_null(among: Any) -> None:
    p: dict[str, list[float]] = {}
    for seed in range(150):
        truth, batch = random_case(seed)
        given = Shuffled(TrueAdvantage())(batch).advantages
        for name, value in shuffle_test(given, truth, batch, among=among, permutations=99, seed=seed).items():
            p.setdefault(name, []).append(value)
    assert stats.kstest(p["quality/pearson"], "uniform").pvalue > 0.01
    for values in p.values():  # at most one in ten, up to three standard errors; ties make it fewer
        assert share_of_small(values) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 150)


def step_at_random(truth: Truth, batch: CreditBatch, seed: int) -> torch.Tensor:
    step = torch.randint(5, (len(batch.reward),), generator=torch.Generator().manual_seed(seed))
    return (2 * batch.reward - 1)[:, None].float() * (truth.unit_ids == step[:, None])


@pytest.mark.slow
def test_a_whole_step_at_random_is_within_the_null_of_units_but_not_of_tokens() -> None:
    p: dict[str, list[float]] = {"unit": [], "token": []}
    for seed in range(100):
        truth, batch = random_case(seed)
        given = step_at_random(truth, batch, seed)
        for among, values in p.items():
            found = shuffle_test(given, truth, batch, among=among, permutations=99, seed=seed)  # type: ignore[arg-type]
            values.append(found["quality/pearson"])
    assert stats.kstest(p["unit"], "uniform").pvalue > 0.01
    assert stats.kstest(p["token"], "uniform").pvalue < 1e-6


def test_shuffles_are_named_by_their_seed_and_leave_the_global_stream_alone() -> None:
    truth, batch = random_case(14)
    state, given = torch.get_rng_state(), normal(14, batch)
    first, second, other = (shuffle_test(given, truth, batch, permutations=50, seed=seed) for seed in (1, 1, 2))
    quality_intervals(given, truth, batch)
    assert first == second != other
    assert torch.equal(torch.get_rng_state(), state)


def test_shuffles_in_several_chunks_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, batch = random_case(15)
    given = normal(15, batch) + 2 * TrueAdvantage()(batch).advantages
    whole = shuffle_test(given, truth, batch, permutations=400)
    monkeypatch.setattr("apportion.credit.quality._CHUNK", 5000)
    for name, value in shuffle_test(given, truth, batch, permutations=400).items():
        assert value == pytest.approx(whole[name], abs=0.1)


# --- the noise floor -------------------------------------------------------------------------------------------------


def test_the_floor_is_one_estimate_against_the_other() -> None:
    truth, batch = case(
        [[0, 1, 2], [0, 1, 2]],
        [[0.5, -0.5, 0.2], [-0.4, 0.01, 0.3]],
        [0.0, 0.0],
        groups=[0, 1],
        again=[[0.4, -0.6, -0.1], [-0.2, -0.3, 0.2]],
    )
    found = short(noise_floor(truth, batch))
    expected = np.corrcoef([0.5, -0.5, 0.2, -0.4, 0.01, 0.3], [0.4, -0.6, -0.1, -0.2, -0.3, 0.2])[0, 1]
    assert found["pearson"].value == pytest.approx(expected)
    assert (found["sign_accuracy"].value, found["blame_at_1"].value) == (0.8, 0.5)
    assert found["sign_accuracy"].low == pytest.approx(2 / 3)
    assert found["sign_accuracy"].high == 1.0


def test_an_exact_truth_has_no_floor() -> None:
    truth, batch = random_case(16)
    assert noise_floor(truth, batch) == {}
    same = short(noise_floor(replace(truth, again=truth.advantage), batch))
    assert same["pearson"].value == pytest.approx(1.0)
    assert (same["sign_accuracy"], same["blame_at_1"]) == ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))


def test_a_second_estimate_with_holes_is_refused() -> None:
    truth, batch = random_case(17)
    again = truth.advantage.clone()
    again[0, 0] = NAN
    with pytest.raises(ValueError, match="lacks units"):
        noise_floor(replace(truth, again=again), batch)


def test_the_p_of_a_difference_is_small_for_the_truth_and_none_for_itself() -> None:
    truth, batch = random_case(3)
    right, chance = truth.by_token().float(), normal(3, batch)
    assert difference_test(right, chance, truth, batch)["quality/pearson"] < 0.01
    assert math.isnan(difference_test(right, right, truth, batch)["quality/pearson"])


def test_the_p_of_two_strategies_without_skill_is_seldom_small() -> None:
    found = []
    for seed in range(60):
        truth, batch = random_case(seed)
        p = difference_test(normal(seed, batch), normal(seed + 1000, batch), truth, batch, resamples=200)
        found.append(p["quality/pearson"])
    assert sum(p < 0.05 for p in found) <= 10
