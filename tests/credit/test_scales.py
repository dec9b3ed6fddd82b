"""Sequence-level credit with other scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from apportion.credit import CreditBatch
from apportion.credit.scales import BetaNormalized, LiveScaled, MeanScaled
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def groups(*rewards: Sequence[float | None]) -> list[dict]:
    return [{"tokens": 1, "reward": r, "group": g} for g, group in enumerate(rewards) for r in group]


def first_tokens(strategy: object, made: CreditBatch) -> list[float]:
    return strategy(made).advantages[:, 0].tolist()  # type: ignore[operator]


def test_the_mean_as_the_scale_by_hand(batch: Batch) -> None:
    made = batch(*groups([1, 0, 0, 0], [1, 1, 1, 0], [0, 0], [1, 1]))
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0]
    assert first_tokens(MeanScaled(), made) == pytest.approx(expected, abs=1e-4)


def test_with_one_right_answer_the_mean_scale_weighs_it_by_the_group_size_less_one(batch: Batch) -> None:
    for size in (2, 5, 16):
        assert first_tokens(MeanScaled(), batch(*groups([1, *[0] * (size - 1)])))[0] == pytest.approx(
            size - 1, rel=1e-4
        )


def test_a_negative_reward_would_turn_the_sign_of_the_mean_scale_and_is_refused(batch: Batch) -> None:
    with pytest.raises(InputError, match=r"sequence/maxrl .* must be >= 0; row 1 has -0\.5"):
        MeanScaled()(batch(*groups([1, -0.5])))


def beta_density(x: float, a: float, b: float) -> float:
    return x ** (a - 1) * (1 - x) ** (b - 1) * math.gamma(a + b) / math.gamma(a) / math.gamma(b)


def test_the_beta_density_as_the_scale_by_hand(batch: Batch) -> None:
    """p = .25 and .75: m = 1/2, v = 1/8, so a = b = 1/2 and alpha = beta = 7/6."""
    credit = BetaNormalized()(batch(*groups([1, 0, 0, 0], [1, 1, 1, 0])))
    assert credit.metrics == {"dead_groups": 0, "alpha": pytest.approx(7 / 6), "beta": pytest.approx(7 / 6)}
    density = beta_density(0.25, 7 / 6, 7 / 6)
    expected = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
    assert credit.advantages[:, 0].tolist() == pytest.approx([value / density for value in expected])


def test_a_skewed_batch_gets_a_skewed_density(batch: Batch) -> None:
    """p = .1, .2, .6: m = .3, v = .07, so a = .6, b = 1.4, alpha = 1.2, beta = 1.4667."""
    credit = BetaNormalized()(batch(*groups([0.0, 0.2], [0.1, 0.3], [0.5, 0.7])))
    assert (credit.metrics["alpha"], credit.metrics["beta"]) == pytest.approx((1.2, 1 + 1.4 / 3))
    expected = [sign * 0.1 / beta_density(p, 1.2, 1 + 1.4 / 3) for p in (0.1, 0.2, 0.6) for sign in (-1, 1)]
    assert credit.advantages[:, 0].tolist() == pytest.approx(expected)


def test_alpha_and_beta_of_three_halves_are_grpo_up_to_a_constant(batch: Batch) -> None:
    """Success rates of 1/2 -+ sqrt(1/32) have the sample variance 1/16, so a = b = 3/2, and f ~ sqrt(p (1 - p))."""
    low, high = 0.5 - math.sqrt(1 / 32), 0.5 + math.sqrt(1 / 32)
    made = batch(*groups([low - 0.1, low + 0.1], [high - 0.1, high + 0.1]))
    credit = BetaNormalized()(made)
    assert credit.metrics["alpha"] == pytest.approx(1.5)
    spread = [8 / math.pi * math.sqrt(p * (1 - p)) for p in (low, low, high, high)]
    assert credit.advantages[:, 0].tolist() == pytest.approx([s * 0.1 / d for s, d in zip((-1, 1, -1, 1), spread)])


@pytest.mark.parametrize("rewards", [[[1, 0, 0]], [[1, 0], [0, 1], [1, 0]], [[1, 0], [None, None]]])
def test_without_a_spread_of_success_rates_it_is_the_centred_reward(batch: Batch, rewards: list) -> None:
    made = batch(*groups(*rewards))
    credit = BetaNormalized()(made)
    assert (credit.metrics["alpha"], credit.metrics["beta"]) == (1, 1)
    assert credit.advantages.tolist() == Uniform(scale="none")(made).advantages.tolist()


def test_solved_and_unsolved_prompts_shape_the_density_and_get_nothing(batch: Batch) -> None:
    credit = BetaNormalized()(batch(*groups([1, 1], [0, 0], [1, 0], [1, 0])))
    assert credit.advantages[:, 0].tolist()[:4] == [0, 0, 0, 0]
    assert credit.metrics["alpha"] == pytest.approx(1 + 0.5 * (0.25 / (1 / 6) - 1) / 3)


def test_rewards_outside_the_declared_range_are_refused_and_inside_it_mapped(batch: Batch) -> None:
    made = batch(*groups([-1, 3], [-1, 3, 3]))
    with pytest.raises(InputError, match=r"sequence/bnpo takes reward from low=0\.0 to high=1\.0; row 0 has -1"):
        BetaNormalized()(made)
    mapped = first_tokens(BetaNormalized(low=-1, high=3), made)
    assert mapped == pytest.approx(first_tokens(BetaNormalized(), batch(*groups([0, 1], [0, 1, 1]))))
    with pytest.raises(InputError, match="low must be under high"):
        BetaNormalized(low=1, high=1)


def test_dead_groups_scale_up_the_live_ones(batch: Batch) -> None:
    made = batch(*groups([1, 0], [1, 1], [0, 0], [None, None]))
    live = LiveScaled()(made)
    assert live.metrics == {"dead_groups": pytest.approx(2 / 3), "alpha": 3}
    assert live.advantages[:, 0].tolist() == [1.5, -1.5, 0, 0, 0, 0, 0, 0]
    assert LiveScaled(count="rewarded")(made).metrics["alpha"] == 2


def test_the_live_scale_makes_the_mean_over_the_batch_that_over_live_answers(batch: Batch) -> None:
    mixed = first_tokens(LiveScaled(), batch(*groups([1, 0, 0], [0.5] * 3, [2] * 6)))
    alone = first_tokens(Uniform(scale="none"), batch(*groups([1, 0, 0])))
    assert [value / 12 for value in mixed[:3]] == pytest.approx([value / 3 for value in alone])


def test_a_batch_without_any_signal_gets_nothing(batch: Batch) -> None:
    for strategy in (LiveScaled(), LiveScaled(count="rewarded"), MeanScaled(), BetaNormalized()):
        assert first_tokens(strategy, batch(*groups([0, 0], [0, 0]))) == [0] * 4


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InputError, match="count must be live or rewarded, not 'all'"):
        LiveScaled(count="all")  # type: ignore[arg-type]
