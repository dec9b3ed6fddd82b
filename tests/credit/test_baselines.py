"""Credit from statistics over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.baselines import OptimalTokenBaseline, WhitenedAdvantage, WhitenedReturn
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def test_the_return_is_whitened_over_all_tokens_by_hand(batch: Batch) -> None:
    """Tokens 1, 0, 0, 0: mean 1/4, deviation sqrt(3)/4. The groups do not matter."""
    made = batch({"tokens": 1, "reward": 1.0}, {"tokens": 3, "reward": 0.0, "group": 1})
    out = WhitenedReturn(eps=0)(made).advantages
    root = math.sqrt(3)
    torch.testing.assert_close(out, torch.tensor([[root, 0, 0], [-1 / root] * 3]))


def test_counting_answers_instead_of_tokens_takes_the_length_out_of_the_statistics(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 1.0}, {"tokens": 3, "reward": 0.0, "group": 1})
    assert WhitenedReturn(over="sequence", eps=0)(made).advantages.tolist() == [[1, 0, 0], [-1, -1, -1]]


def test_the_kl_of_a_token_is_charged_to_it_and_all_before_it(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 2, "reward": 1.0})
    made = replace(made, ref_logprobs=made.old_logprobs - torch.tensor([[0.0, 0.2, 0.4], [0.0, 0.0, 0.0]]))
    credit = WhitenedReturn(kl_coef=0.5, eps=0)(made)
    returns = torch.tensor([0.7, 0.7, 0.8, 1.0, 1.0])
    white = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(credit.advantages[made.completion_mask], white)
    torch.testing.assert_close(credit.parts["outcome"] + credit.parts["kl"], credit.advantages)
    assert WhitenedReturn()(made).advantages.eq(0).all()  # equal rewards and no KL


def test_a_reference_is_needed_only_for_the_kl(batch: Batch) -> None:
    assert WhitenedReturn().requires == {"reward"}
    assert WhitenedReturn(kl_coef=0.1).requires == {"reward", "old_logprobs", "ref_logprobs"}
    with pytest.raises(InputError, match="the signal 'ref_logprobs', which the batch does not have"):
        WhitenedReturn(kl_coef=0.1)(batch({"tokens": 1, "reward": 1.0}))


def test_the_groups_mean_first_then_the_batch_by_hand(batch: Batch) -> None:
    """Tokens .5, -.5 x 3, 0, 0: mean -1/6, mean square 1/6."""
    made = batch(
        {"tokens": 1, "reward": 1.0},
        {"tokens": 3, "reward": 0.0},
        {"tokens": 2, "reward": 0.0, "group": 1},
    )
    std = math.sqrt(1 / 6 - 1 / 36)
    out = WhitenedAdvantage(eps=0)(made).advantages
    expected = torch.tensor([[2 / 3, 0, 0], [-1 / 3] * 3, [1 / 6, 1 / 6, 0]]) / std
    torch.testing.assert_close(out, expected)
    kept = WhitenedAdvantage(center=False, eps=0)(made).advantages
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0, 0], [-0.5] * 3, [0, 0, 0]]) / std)


def test_sample_deviation_and_eps_are_options(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 1.0}, {"tokens": 1, "reward": 0.0})
    assert WhitenedAdvantage(ddof=1, eps=0)(made).advantages[0].item() == pytest.approx(math.sqrt(0.5))
    assert WhitenedAdvantage(eps=0.5)(made).advantages[0].item() == pytest.approx(0.5)


def with_probabilities(made: CreditBatch, chosen: float, squared: list[list[float]]) -> CreditBatch:
    width = made.completion_mask.shape[1]
    rows = [row + [0.0] * (width - len(row)) for row in squared]
    old = torch.full(made.completion_mask.shape, math.log(chosen))
    return replace(made, old_logprobs=old, sum_pi_squared=torch.tensor(rows))


def test_the_optimal_token_baseline_by_hand(batch: Batch) -> None:
    """pi = 1/2, so w = sum pi^2; W = .25, .75 and .5, 1, and a third row with one token of weight 1."""
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 2, "reward": 0.0}, {"tokens": 1, "reward": 0.5})
    made = with_probabilities(made, 0.5, [[0.25, 0.5], [0.5, 0.5], [1.0]])
    first, second = (0.25 + 0.5) / 1.75, 0.75 / 1.75
    out = OptimalTokenBaseline(eps=0)(made).advantages
    expected = [[1 - first, 1 - second], [-first, -second], [0.5 - first, 0]]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_rows_of_equal_uncertainty_have_the_groups_mean_as_their_baseline(batch: Batch) -> None:
    made = batch(*({"tokens": 3, "reward": r} for r in (1.0, 0.0, 0.0, 0.0)))
    for squared in (0.3, 1.0):
        for chosen in (0.5, 1.0):  # with 1 and 1 there is no uncertainty at all
            out = OptimalTokenBaseline()(with_probabilities(made, chosen, [[squared] * 3] * 4)).advantages
            torch.testing.assert_close(out, torch.tensor([[0.75] * 3, *[[-0.25] * 3] * 3]))


def test_alone_past_the_others_a_row_gets_nothing_or_its_plain_reward(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 1, "reward": 0.0}, {"tokens": 2, "reward": 0.25, "group": 1})
    made = with_probabilities(made, 0.5, [[0.5] * 3, [0.5], [0.5] * 2])
    assert OptimalTokenBaseline()(made).advantages.tolist() == [[0.5, 0, 0], [-0.5, 0, 0], [0, 0, 0]]
    raw = OptimalTokenBaseline(raw_tail=True)(made).advantages
    assert raw.tolist() == [[0.5, 1, 1], [-0.5, 0, 0], [0.25, 0.25, 0]]


def test_the_optimal_baseline_has_the_least_variance_of_all_constant_ones() -> None:
    """A bandit of three arms, exactly: Var of s (R - b) over b, against b = E[|s|^2 R] / E[|s|^2]."""
    pi = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    reward = torch.tensor([0.2, 1.0, 0.0], dtype=torch.float64)
    score = torch.eye(3, dtype=torch.float64) - pi  # of the logits, one row for each arm
    energy = 1 - 2 * pi + pi.square().sum()
    torch.testing.assert_close(score.square().sum(dim=1), energy)
    best = (pi * energy * reward).sum() / (pi * energy).sum()

    def variance(baseline: torch.Tensor) -> float:
        samples = score * (reward - baseline)[:, None]
        mean = (pi[:, None] * samples).sum(dim=0)
        return float((pi[:, None] * (samples - mean).square()).sum())

    assert all(variance(best) < variance(best + step) for step in (-0.1, -0.01, 0.01, 0.1))
    assert variance(best) < variance((pi * reward).sum())


def test_the_needed_signals_are_named(batch: Batch) -> None:
    assert OptimalTokenBaseline().requires == {"reward", "old_logprobs", "sum_pi_squared"}
    with pytest.raises(InputError, match="the signal 'sum_pi_squared', which the batch does not have"):
        OptimalTokenBaseline()(batch({"tokens": 1, "reward": 1.0}))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InputError, match="over must be token or sequence, not 'batch'"):
        WhitenedReturn(over="batch")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="over must be token or sequence, not 'row'"):
        WhitenedAdvantage(over="row")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kl_coef must be 0 or more, not -1"):
        WhitenedReturn(kl_coef=-1)
