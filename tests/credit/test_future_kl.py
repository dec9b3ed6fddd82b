"""Advantages weighted by what the update has changed behind a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch
from apportion.credit.future_kl import FutureKL, discounted_return
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
PLAIN = Uniform(eps=0)


def changed(batch: Batch, *changes: list[float]) -> CreditBatch:
    """A right and a wrong answer; log pi - log pi_old of each token."""
    made = batch(*({"tokens": len(row), "reward": reward} for row, reward in zip(changes, (1.0, 0.0))))
    now = made.old_logprobs.clone()  # type: ignore[union-attr]
    for row, change in enumerate(changes):
        now[row, : len(change)] += torch.tensor(change)
    return replace(made, logprobs=now)


def test_the_published_sum_and_its_weight(batch: Batch) -> None:
    made = changed(batch, [0.1, -0.2, 0.05], [0.0, 0.0, 0.0])
    out = FutureKL(PLAIN)(made).advantages
    torch.testing.assert_close(out, torch.tensor([[1, 1, math.exp(0.05)], [-1, -1, -1]]), rtol=0, atol=1e-5)
    both = FutureKL(PLAIN, high_only=False)(made).advantages[0]
    torch.testing.assert_close(both, torch.tensor([-0.0478, -0.1511, 0.05]).exp(), rtol=0, atol=1e-4)


def test_the_first_update_changes_nothing(batch: Batch) -> None:
    credit = FutureKL()(changed(batch, [0.0] * 4, [0.0] * 2))
    assert torch.equal(credit.advantages, Uniform()(changed(batch, [0.0] * 4, [0.0] * 2)).advantages)
    assert credit.metrics["future_weight"] == 1


def test_the_weight_is_clipped(batch: Batch) -> None:
    made = changed(batch, [2.0, -2.0], [-2.0, -2.0])
    out = FutureKL(PLAIN, half_life=0.1, high_only=False)(made).advantages
    torch.testing.assert_close(out, torch.tensor([[1.2, 0.8], [-0.8, -0.8]]))


def test_tokens_whose_ratio_ran_away_are_left_out_of_the_sum(batch: Batch) -> None:
    far = math.log(10.5)
    dropped = FutureKL(PLAIN, high_only=False)(changed(batch, [0.1, far], [0.0, 0.0]))
    torch.testing.assert_close(dropped.advantages[0], torch.tensor([math.exp(0.1), 1.0]))


def test_a_blamed_token_whose_ratio_ran_away_is_not_blamed_more(batch: Batch) -> None:
    far = math.log(4.5)
    made = changed(batch, [far, 0.0], [far, 0.0])
    credit = FutureKL(PLAIN)(made)
    torch.testing.assert_close(credit.advantages, torch.tensor([[1.2, 1.0], [-1.0, -1.0]]))
    assert credit.metrics["tamed_tokens"] == 0.25


rows = st.lists(st.tuples(st.floats(-2, 2, width=32), st.booleans()), min_size=1, max_size=20)


@settings(deadline=None, max_examples=60)
@given(row=rows, half_life=st.sampled_from([0.5, 3.0, 32.0, 1e9]))
def test_the_return_is_the_slow_loops(row: list[tuple[float, bool]], half_life: float) -> None:
    values, kept = zip(*row)
    discount, carry, expected = 2 ** (-1 / half_life), 0.0, [0.0] * len(row)
    for place in reversed(range(len(row))):
        if kept[place]:
            carry = values[place] + discount * carry
            expected[place] = carry
    out = discounted_return(torch.tensor([values]), torch.tensor([kept]), discount)
    torch.testing.assert_close(out, torch.tensor([expected], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_long_answers_neither_overflow_nor_fade() -> None:
    tokens = 100_000
    out = discounted_return(torch.full((1, tokens), 0.5), torch.ones(1, tokens, dtype=torch.bool), 2 ** (-1 / 32))
    assert out[0, 0].item() == pytest.approx(0.5 / (1 - 2 ** (-1 / 32)), rel=1e-9)
    assert out[0, -1].item() == pytest.approx(0.5, rel=1e-9)


def test_it_is_computed_at_each_update_and_needs_both_policies(batch: Batch) -> None:
    assert FutureKL().phase == "update"
    assert FutureKL().requires == {"reward", "logprobs", "old_logprobs"}
    with pytest.raises(InputError, match="credit needs logprobs of every token"):
        FutureKL()(batch({"tokens": 2, "reward": 1.0}))


@pytest.mark.parametrize(("option", "value"), [("half_life", 0.0), ("clip", 1.5), ("drop_over", 0.0)])
def test_impossible_options_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{option} must .*{value}$"):
        FutureKL(**{option: value})  # type: ignore[arg-type]
