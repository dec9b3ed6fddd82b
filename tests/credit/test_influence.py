"""Weights move the outcome between the tokens of an answer and keep its sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.influence import InfluenceWeight, SpanWeight, influence_weights, row_quantile, span_weights
from apportion.verifiers import InputError

MakeBatch = Callable[..., CreditBatch]
masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3)
numbers = st.lists(st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0, 1e6]), min_size=15, max_size=15)
shares = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])


def scored(batch: CreditBatch, name: str, scores: list[list[float]]) -> CreditBatch:
    return replace(batch, token_scores={name: torch.tensor(scores)})


def one_row(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([values], dtype=torch.float64), torch.ones(1, len(values), dtype=torch.bool)


@given(mask=masks, influence=numbers, quantile=shares, boost=st.sampled_from([0.0, 1.0, 5.0]))
def test_influence_weights_have_the_mean_one(
    mask: list[list[bool]], influence: list[float], quantile: float, boost: float
) -> None:
    inside = torch.tensor(mask)
    values = torch.tensor(influence).view(3, 5)[: len(mask)]
    weights = influence_weights(values, inside, quantile=quantile, boost=boost, floor=0.1)
    assert weights[~inside].eq(0).all()
    assert weights[inside].gt(0).all()
    torch.testing.assert_close(weights.sum(dim=1), inside.sum(dim=1).double())


def test_the_golden_influence_weights() -> None:
    # log2(1 + I) = 0, 1, 2, 3: u = 0, 1/3, 2/3, 1 with the median .5; w = .1, 2/3, 4/3, 2 over their mean 1.025.
    weights = influence_weights(*one_row(0.0, 1.0, 3.0, 7.0), quantile=0.5, boost=1.0, floor=0.1)
    torch.testing.assert_close(weights, torch.tensor([[0.1, 2 / 3, 4 / 3, 2.0]]).double() / 1.025)


def test_more_influence_never_weighs_less() -> None:
    values = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)).double()
    weights = influence_weights(values, torch.ones(4, 50, dtype=torch.bool), quantile=0.8, boost=2.0, floor=0.1)
    ordered = weights.gather(1, values.argsort(dim=1))
    assert ordered.diff(dim=1).ge(0).all()


def test_equal_influence_is_the_outcome_rule(batch: MakeBatch) -> None:
    made = scored(batch(*({"tokens": 3, "reward": r} for r in (0.0, 1.0))), "influence", [[2.0] * 3] * 2)
    credit = assign_credit(InfluenceWeight(eps=0.0), made)
    torch.testing.assert_close(credit.advantages, torch.tensor([[-1.0] * 3, [1.0] * 3]))
    assert credit.parts["moved"].abs().max() < 1e-6
    assert credit.metrics["effective_tokens"] == pytest.approx(1.0)


def test_the_outcome_is_moved_and_not_made(batch: MakeBatch) -> None:
    made = scored(batch(*({"tokens": 4, "reward": r} for r in (0.0, 1.0))), "influence", [[0.0, 1.0, 3.0, 7.0]] * 2)
    credit = assign_credit(InfluenceWeight(eps=0.0), made)
    expected = torch.tensor([0.1, 2 / 3, 4 / 3, 2.0]) / 1.025
    torch.testing.assert_close(credit.advantages, torch.stack([-expected, expected]))
    torch.testing.assert_close(credit.parts["moved"].sum(dim=1), torch.zeros(2), atol=1e-6, rtol=0)


def test_a_quantile_is_linear_between_two_values() -> None:
    values, mask = one_row(4.0, 1.0, 2.0, 9.0)
    for q in (0.0, 0.25, 0.5, 0.9, 1.0):
        torch.testing.assert_close(row_quantile(values, mask, q), torch.quantile(values, q, dim=1))
    none = torch.zeros(1, 4, dtype=torch.bool)
    assert row_quantile(values, none, 0.5).tolist() == [0.0]


def test_the_golden_span_weights_and_their_control() -> None:
    values, mask = one_row(2.0, 0.0, -1.0)
    # 2, 1, .5 over their mean 7/6; inverted: the floor, 1, 1.5.
    torch.testing.assert_close(
        span_weights(values, mask, strength=1.0, floor=0.1), torch.tensor([[12 / 7, 6 / 7, 3 / 7]]).double()
    )
    inverted = span_weights(-values, mask, strength=1.0, floor=0.1)
    torch.testing.assert_close(inverted, torch.tensor([[0.1, 1.0, 1.5]]).double() * 3 / 2.6)


def test_inverting_turns_the_order_around(batch: MakeBatch) -> None:
    rows = [{"tokens": 3, "reward": r} for r in (0.0, 1.0)]
    made = scored(batch(*rows), "counterfactual", [[2.0, 0.0, -1.0]] * 2)
    upright = assign_credit(SpanWeight(eps=0.0), made).advantages
    inverted = assign_credit(SpanWeight(invert=True, eps=0.0), made).advantages
    assert upright[1].diff().lt(0).all()
    assert inverted[1].diff().gt(0).all()
    for credit in (upright, inverted):
        torch.testing.assert_close(credit.sum(dim=1), torch.tensor([-3.0, 3.0]))


def test_without_importance_all_spans_weigh_the_same() -> None:
    values, mask = one_row(0.0, 0.0, 0.0)
    assert span_weights(values, mask, strength=1.0, floor=0.1).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: InfluenceWeight(quantile=2.0), "quantile is a share"),
        (lambda: InfluenceWeight(floor=0.0), "floor over 0"),
        (lambda: InfluenceWeight(boost=-1.0), "boost must be 0 or more"),
        (lambda: SpanWeight(floor=2.0), "floor is a share"),
        (lambda: SpanWeight(strength=-1.0), "strength must be 0 or more"),
    ],
)
def test_bad_options_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build()
