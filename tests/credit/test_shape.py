"""Classes of tokens and figures of where credit lies: by hand, against a slow loop, and what must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.controls import Inverted, Shuffled
from apportion.credit.process import ProcessReward
from apportion.credit.shape import CLASSES, FIGURES, shape, shape_intervals, token_classes
from apportion.credit.uniform import Uniform
from apportion.verifiers import Sample
from apportion.verifiers.chain import ChainAnswer, ChainFormat, ChainSteps

Batch = Callable[..., CreditBatch]


def names(classes: torch.Tensor) -> list[list[str]]:
    return [["" if place < 0 else CLASSES[place] for place in row] for row in classes.tolist()]


def figures(advantages: torch.Tensor, batch: CreditBatch, classes: torch.Tensor | None = None) -> dict[str, float]:
    classes = torch.full(advantages.shape, 5) if classes is None else classes
    return {name.removeprefix("shape/"): value for name, value in shape(advantages, classes, batch).items()}


def random_batch(seed: int, *, rows: int = 12, width: int = 7) -> tuple[torch.Tensor, torch.Tensor, CreditBatch]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=draw) < 0.8
    reward = torch.randint(0, 3, (rows,), generator=draw).double() / 2
    reward[0] = math.nan
    classes = torch.randint(0, 6, (rows, width), generator=draw).where(mask, -1)
    advantages = torch.randn(rows, width, generator=draw).where(mask, 0.0)
    return advantages, classes, CreditBatch(mask, torch.arange(rows) // 4, reward)


# --- classes ---------------------------------------------------------------------------------------------------------


def test_every_token_has_the_class_of_its_place(batch: Batch) -> None:
    steps = [(0, 2, 1.0), (3, 5, 0.0), (5, 6, 1.0), (6, 9, 0.0)]
    spans = {"steps": steps, "format": [(0, 1, 1.0), (7, 9, 0.0)], "answer": [(8, 9, 0.0)]}
    made = batch({"tokens": 10, "reward": 0.0, "by_verifier": spans})
    found = names(token_classes(made))[0]
    assert found == [
        *("format", "before", "filler", "first_wrong", "first_wrong"),
        *("later", "later", "format", "answer", "filler"),
    ]


def test_an_answer_without_a_wrong_step_has_no_later_ones(batch: Batch) -> None:
    only = {"format": [], "answer": [], "steps": [(0, 1, 1.0), (1, 3, 0.5)]}
    made = batch({"tokens": 3, "reward": 1.0, "by_verifier": only}, {"tokens": 2, "reward": 1.0})
    assert names(token_classes(made)) == [["before"] * 3, ["filler", "filler", ""]]
    assert names(token_classes(made, threshold=0.6))[0] == ["before", "first_wrong", "first_wrong"]


def test_spans_may_come_in_any_order_and_tokens_of_a_tool_have_no_class(batch: Batch) -> None:
    judged = {"format": [], "answer": [], "steps": [(3, 4, 1.0), (1, 3, 0.0), (0, 1, 1.0)]}
    made = batch({"tokens": 4, "reward": 0.0, "by_verifier": judged, "written": [True, False, True, True]})
    assert names(token_classes(made)) == [["before", "", "first_wrong", "later"]]


def test_verifiers_go_by_other_names_or_are_not_there(batch: Batch) -> None:
    made = batch({"tokens": 2, "reward": 0.0, "by_verifier": {"truth": [(0, 1, 0.0)]}, "spans": [(1, 2, 1.0)]})
    assert names(token_classes(made, steps="truth", format="absent", answer="absent")) == [["first_wrong", "filler"]]
    assert names(token_classes(replace(made, spans={}))) == [["filler", "filler"]]


def test_the_classes_of_a_chain() -> None:
    prompt, text = "7+9-a*1=?", "[T]7+9=5\n5-a=7\n7*1=7\n[/T][A]7[/A]"
    sample = Sample(prompt, text, "6")
    judges = {"steps": ChainSteps(), "format": ChainFormat(), "answer": ChainAnswer()}
    verdicts = {name: judge([sample])[0] for name, judge in judges.items()}
    length = len(text)
    offsets = [(i, i + 1) for i in range(length)] + [(length, length)]
    rollout = Rollout([1], [1] * (length + 1), [-0.1] * (length + 1), offsets, text, 0, verdicts=verdicts, reward=0.0)
    (found,) = names(token_classes(collate([rollout])))
    pieces = {kind: "".join(c for c, k in zip(text, found) if k == kind) for kind in CLASSES}
    assert pieces == {
        "first_wrong": "5-a=7",
        "later": "7*1=7",
        "before": "7+9=5",
        "format": "[T][/T][A][/A]",
        "answer": "7",
        "filler": "\n\n\n",
    }
    assert found[-1] == "filler"


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, True, True, False]])
    batch = CreditBatch(mask, torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0, 1.0]))
    advantages = torch.tensor([[3.0, 1, 0, -1], [-2, -2, 9, 9], [0, 0, 0, 0]])
    classes = torch.tensor([[0, 1, 2, 5], [0, 5, -1, -1], [3, 3, 3, -1]])
    found = figures(advantages, batch, classes)
    gini = (-3 * 0 - 1 * 1 + 1 * 1 + 3 * 3) / (4 * 5)
    expected = {
        "first_wrong": 5 / 9,
        "later": 1 / 9,
        "before": 0.0,
        "format": 0.0,
        "answer": math.nan,
        "filler": 3 / 9,
        "gini": (gini + 0) / 2,
        "effective_tokens": (25 / 11 + 2) / 2,
        "sign_flips": 1 / 5,
        "mass_ratio": (3 + 4) / (4 + 2),
    }
    assert found == pytest.approx(expected, abs=3e-6, nan_ok=True)
    assert tuple(shape(advantages, classes, batch)) == FIGURES


def slow(advantages: torch.Tensor, classes: torch.Tensor, batch: CreditBatch) -> list[float]:
    kept = [[t for t, inside in enumerate(row) if inside] for row in batch.completion_mask.tolist()]
    size = [[abs(advantages[row, t].item()) for t in tokens] for row, tokens in enumerate(kept)]
    total = sum(map(sum, size))
    shares = []
    for place in range(6):
        inside = [
            abs(advantages[row, t].item()) for row in range(len(kept)) for t in kept[row] if classes[row, t] == place
        ]
        shares.append(sum(inside) / total if inside else math.nan)
    rows = [np.array(row) for row in size if sum(row) > 0]
    gini = [np.abs(row[:, None] - row[None]).mean() / (2 * row.mean()) for row in rows]
    effective = [row.sum() ** 2 / (row**2).sum() for row in rows]
    flips = credited = 0
    along = uniform = 0.0
    for row, tokens in enumerate(kept):
        mates = batch.reward[(batch.group_ids == batch.group_ids[row]) & ~batch.reward.isnan()]
        centred = (batch.reward[row] - mates.mean()).item()
        if not tokens or math.isnan(centred) or abs(centred) < 1e-12:
            continue
        given = [advantages[row, t].item() for t in tokens]
        credited += sum(a != 0 for a in given)
        flips += sum(a * centred < 0 for a in given)
        along += math.copysign(1, centred) * sum(given)
        uniform += len(tokens) * abs(centred) / (mates.std(correction=0).item() + 1e-6)
    return [*shares, float(np.mean(gini)), float(np.mean(effective)), flips / credited, along / uniform]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), coarse=st.booleans())
def test_they_are_those_of_a_slow_loop(seed: int, coarse: bool) -> None:
    advantages, classes, batch = random_batch(seed)
    batch = replace(batch, completion_mask=batch.completion_mask | (torch.arange(7) == 0))  # no row is left out
    if coarse:
        advantages = advantages.round()
    assert list(shape(advantages, classes, batch).values()) == pytest.approx(
        slow(advantages, classes, batch), abs=1e-9, nan_ok=True
    )


def test_uniform_credit_lies_everywhere_alike_and_goes_with_the_outcome(batch: Batch) -> None:
    made = batch(*({"tokens": 8, "reward": float(i % 3 == 0), "group": i // 4} for i in range(8)))
    found = figures(Uniform()(made).advantages, made, torch.arange(8).remainder(2).expand(8, 8))
    assert found["mass_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert (found["gini"], found["sign_flips"]) == (0.0, 0.0)
    assert found["effective_tokens"] == pytest.approx(8.0)
    assert (found["first_wrong"], found["later"]) == (0.5, 0.5)


def test_one_token_with_everything_is_as_uneven_as_can_be() -> None:
    batch = CreditBatch(torch.ones(1, 5, dtype=torch.bool), torch.tensor([0]), torch.tensor([1.0]))
    found = figures(torch.tensor([[0.0, 0, -3, 0, 0]]), batch)
    assert (found["gini"], found["effective_tokens"]) == (pytest.approx(0.8), 1.0)


def long_rows(batch: Batch) -> CreditBatch:
    def row(index: int) -> dict[str, Any]:
        spans = [(i, i + 2, float((i + index) % 5 > 1)) for i in range(0, 20, 2)]
        return {"tokens": 20, "reward": float(index % 2), "spans": spans, "group": index // 4}

    return batch(*map(row, range(8)))


def test_shuffling_keeps_concentration_and_mass_and_inverting_turns_them(batch: Batch) -> None:
    made, rule = long_rows(batch), ProcessReward(accumulate="own")
    plain, shuffled, turned = (figures(r(made).advantages, made) for r in (rule, Shuffled(rule), Inverted(rule)))
    for name in ("gini", "effective_tokens", "mass_ratio"):
        assert shuffled[name] == pytest.approx(plain[name], rel=1e-6)
    assert turned["mass_ratio"] == pytest.approx(-plain["mass_ratio"])
    assert turned["sign_flips"] == pytest.approx(1 - plain["sign_flips"])  # every token has credit


@pytest.mark.parametrize("factor", [1e-5, 7.0, 1e5])
def test_the_scale_of_credit_matters_to_the_mass_alone(factor: float) -> None:
    advantages, classes, batch = random_batch(1)
    plain, scaled = shape(advantages, classes, batch), shape(factor * advantages, classes, batch)
    plain["shape/mass_ratio"] *= factor
    assert scaled == pytest.approx(plain, rel=1e-5)


def test_padding_and_the_order_of_answers_do_not_matter() -> None:
    advantages, classes, batch = random_batch(2)
    plain = shape_intervals(advantages, classes, batch)
    pad = torch.nn.functional.pad
    wide = CreditBatch(pad(batch.completion_mask, (0, 3)), batch.group_ids, batch.reward)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = CreditBatch(batch.completion_mask[order], batch.group_ids[order], batch.reward[order])
    others = (
        shape_intervals(pad(advantages, (0, 3), value=9.0), pad(classes, (0, 3), value=4), wide),
        shape_intervals(advantages[order], classes[order], moved),
    )
    for other in others:
        for name, one in other.items():
            assert one == pytest.approx(plain[name], abs=1e-9)


def test_what_cannot_be_said_is_nan() -> None:
    ones = torch.ones(2, 3, dtype=torch.bool)
    flat = CreditBatch(ones, torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))
    assert all(math.isnan(value) for value in figures(torch.zeros(2, 3), flat).values())
    given = figures(torch.ones(2, 3), flat)
    assert {name for name, value in given.items() if math.isnan(value)} == {
        *("first_wrong", "later", "before", "format", "answer"),
        *("sign_flips", "mass_ratio"),
    }
    for rows, width in ((0, 3), (2, 0), (0, 0)):
        none = torch.zeros(rows, width)
        empty = CreditBatch(none.bool(), torch.zeros(rows, dtype=torch.long), torch.zeros(rows))
        classes = token_classes(empty)
        assert classes.shape == (rows, width)
        assert all(math.isnan(value) for value in shape(none, classes, empty).values())
        assert all(math.isnan(one.low) for one in shape_intervals(none, classes, empty).values())


def test_an_interval_is_as_wide_as_the_spread_between_groups_makes_it() -> None:
    """Linearised: the share x/y of sums over 64 groups has the variance ``sum_g (x_g - r y_g)^2 / y^2``."""
    advantages, classes, batch = random_batch(3, rows=256)
    found = shape_intervals(advantages, classes, batch)["shape/first_wrong"]
    size = advantages.abs().double()
    x, y = (
        torch.zeros(64, dtype=torch.float64).index_add_(0, batch.group_ids, part.sum(dim=1))
        for part in (size * (classes == 0), size)
    )
    share = float(x.sum() / y.sum())
    error = float((x - share * y).square().sum().sqrt() / y.sum())
    assert found.value == pytest.approx(share)
    assert found.low < share < found.high
    assert found.high - found.low == pytest.approx(2 * 2.0 * error, rel=0.1)


def test_shapes_that_do_not_fit_are_refused() -> None:
    advantages, classes, batch = random_batch(4)
    with pytest.raises(ValueError, match=r"the advantages are \(12, 6\), the batch is \(12, 7\)"):
        shape(advantages[:, :6], classes, batch)
    with pytest.raises(ValueError, match=r"the classes are \(11, 7\)"):
        shape(advantages, classes[:11], batch)
