"""A weight that follows a constraint, and its state."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.adaptive import Adaptive, load_state, observe, state_of
from apportion.credit.compose import Composition
from apportion.credit.controls import Shuffled
from apportion.credit.dual import DualWeight
from apportion.credit.subreward import SubReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def judged(batch: Batch, *scores: float | None) -> CreditBatch:
    return batch(*({"tokens": 1, "reward": 0.0, "scores": {"format": score}} for score in scores))


def dual(**options: float) -> DualWeight:
    return DualWeight(SubReward(), **options)


def test_the_weight_rises_by_eta_times_the_excess_and_falls_to_zero(batch: Batch) -> None:
    strategy = dual(target=0.25, eta=0.5, initial=1.0)
    strategy.observe(judged(batch, 0.0, 0.0, 0.0, 1.0))
    assert strategy.weight == pytest.approx(1.25)
    for _ in range(9):
        strategy.observe(judged(batch, 1.0, 1.0))
    assert strategy.weight == pytest.approx(0.125)
    for _ in range(2):
        strategy.observe(judged(batch, 1.0, 1.0))
    assert strategy.weight == 0.0


def test_a_rate_at_its_target_and_an_abstention_move_nothing(batch: Batch) -> None:
    strategy = dual(target=0.5)
    strategy.observe(judged(batch, 0.0, 1.0, None))
    strategy.observe(judged(batch, None, None))
    assert strategy.weight == 1.0


def test_the_credit_is_the_inner_ones_times_the_weight(batch: Batch) -> None:
    made = judged(batch, 0.0, 1.0, 1.0, 1.0)
    strategy, inner = dual(initial=2.0), SubReward()(made)
    credit = strategy(made)
    assert credit.advantages.equal(2 * inner.advantages)
    assert credit.parts["format"].equal(credit.advantages)
    assert credit.metrics == {"dead_groups": 0.0, "weight": 2.0, "violation_rate": 0.25}


def test_handing_out_credit_changes_no_state(batch: Batch) -> None:
    made, strategy = judged(batch, 0.0, 0.0), dual()
    first = strategy(made).advantages
    assert strategy(made).advantages.equal(first)
    assert strategy.weight == 1.0


def nested() -> Composition:
    return Composition({"task": Uniform(), "format": Shuffled(dual()), "more": DualWeight(dual(eta=0.2))})


def test_adaptive_strategies_are_found_wherever_they_are(batch: Batch) -> None:
    strategy = nested()
    observe(strategy, judged(batch, 0.0, 0.0))
    assert state_of(strategy) == {
        "credit.terms.format.inner": {"weight": pytest.approx(1.095)},
        "credit.terms.more": {"weight": pytest.approx(1.095)},
        "credit.terms.more.inner": {"weight": pytest.approx(1.19)},
    }
    assert state_of(Uniform()) == {}
    assert isinstance(dual(), Adaptive)
    assert not isinstance(Uniform(), Adaptive)


def test_a_run_that_goes_on_from_its_state_is_the_same_run(batch: Batch) -> None:
    batches = [judged(batch, *scores) for scores in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0))]
    whole, first, second = nested(), nested(), nested()
    for made in batches:
        observe(whole, made)
    for made in batches[:2]:
        observe(first, made)
    file = io.BytesIO()
    torch.save(state_of(first), file)
    file.seek(0)
    load_state(second, torch.load(file, weights_only=True))
    for made in batches[2:]:
        observe(second, made)
    assert state_of(second) == state_of(whole)


def test_the_state_of_another_strategy_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match=r"credit\.terms\.format\.inner: .* only the checkpoint has it"):
        load_state(Uniform(), {"credit.terms.format.inner": {"weight": 1.0}})
    with pytest.raises(InputError, match="credit: a strategy with a state, but the checkpoint has none"):
        load_state(dual(), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 1.5}, r"target is a share of answers, so it must be in \[0, 1\], not 1.5"),
        ({"eta": 0.0}, r"eta must be over 0, not 0.0; for a fixed weight use weights of format/composed"),
        ({"initial": -1.0}, "initial must be at least 0, not -1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dual(**options)
