"""Exact values of a token process agree with the enumeration of all its paths, and obey the laws of advantages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from apportion.credit.truth import TokenProcess, Truth, solve

SEEDS = range(6)


def random_process(seed: int, states: int = 7, tokens: int = 3) -> TokenProcess:
    """Any forward transitions, some ends, some tokens that are not offered, rewards on the way."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.rand(states, tokens, generator=generator)
    state = torch.arange(states)[:, None]
    ahead = (state + 1 + (reach * (states - state)).long()).clamp(max=states)
    successor = torch.where(ahead < states, ahead, -1)
    allowed = torch.rand(states, tokens, generator=generator) < 0.8
    allowed[:, 0] = True
    reward = torch.rand(states, tokens, generator=generator, dtype=torch.float64) - 0.3
    return TokenProcess(successor, reward, allowed)


def random_logits(process: TokenProcess, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000)
    return torch.randn(process.reward.shape, generator=generator, dtype=torch.float64)


def paths(process: TokenProcess, state: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Every answer from a state, as pairs of state and token."""
    for token in range(process.reward.shape[1]):
        if process.allowed[state, token]:
            after = int(process.successor[state, token])
            for rest in paths(process, after) if after >= 0 else [[]]:
                yield [(state, token), *rest]


def probability(path: list[tuple[int, int]], policy: Tensor) -> float:
    return float(torch.stack([policy[place] for place in path]).prod())


def outcome(path: list[tuple[int, int]], process: TokenProcess) -> float:
    return float(sum(process.reward[place] for place in path))


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_programming_agrees_with_all_paths(seed: int) -> None:
    process = random_process(seed)
    policy = process.policy(random_logits(process, seed))
    exact = solve(process, policy)
    for state in range(len(policy)):
        value, by_token = 0.0, torch.zeros(policy.shape[1], dtype=torch.float64)
        for path in paths(process, state):
            share = probability(path, policy) * outcome(path, process)
            value += share
            by_token[path[0][1]] += share / policy[state, path[0][1]]
        assert exact.value[state] == pytest.approx(value, abs=1e-12)
        assert exact.action_value[state].tolist() == pytest.approx(by_token.tolist(), abs=1e-12)
    visits = torch.zeros(len(policy), dtype=torch.float64)
    for path in paths(process):
        for state, _ in path:
            visits[state] += probability(path, policy)
    assert exact.visits.tolist() == pytest.approx(visits.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_a_state_have_the_mean_zero_under_its_policy(seed: int) -> None:
    process = random_process(seed)
    exact = solve(process, process.policy(random_logits(process, seed)))
    assert (exact.policy * exact.advantage).sum(dim=-1).abs().max() < 1e-14
    assert exact.advantage[~process.allowed].eq(0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_along_any_path_sum_to_its_outcome_less_the_start(seed: int) -> None:
    process = random_process(seed)
    exact = solve(process, process.policy(random_logits(process, seed)))
    for path in paths(process):
        gained = float(sum(exact.advantage[place] for place in path))
        assert gained == pytest.approx(outcome(path, process) - float(exact.value[0]), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_policy_gradient_is_that_of_finite_differences(seed: int) -> None:
    process = random_process(seed)
    logits, step = random_logits(process, seed), 1e-5
    exact = solve(process, process.policy(logits))
    nudges = torch.eye(logits.numel(), dtype=torch.float64).reshape(-1, *logits.shape) * step
    above = solve(process, process.policy(logits + nudges)).value[:, 0]  # all policies at once
    below = solve(process, process.policy(logits - nudges)).value[:, 0]
    assert torch.allclose(((above - below) / (2 * step)).reshape(logits.shape), exact.gradient, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_two_policies_differ_by_the_advantages_that_the_second_one_meets(first: int, second: int) -> None:
    process = random_process(first)
    old = solve(process, process.policy(random_logits(process, first)))
    new = solve(process, process.policy(random_logits(process, second)))
    met = (new.visits[:, None] * new.policy * old.advantage).sum()
    assert float(new.value[0] - old.value[0]) == pytest.approx(float(met), abs=1e-12)


def test_a_state_is_inert_where_its_tokens_lead_to_the_same_value() -> None:
    successor = torch.tensor([[1, 1], [2, 3], [-1, -1], [-1, -1]])
    reward = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.3, 0.3]], dtype=torch.float64)
    process = TokenProcess(successor, reward, torch.ones(4, 2, dtype=torch.bool))
    exact = solve(process, torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.7, 0.3], [0.1, 0.9]], dtype=torch.float64))
    assert exact.inert.tolist() == [True, False, False, True]
    assert exact.advantage[exact.inert].eq(0).all()
    assert exact.value[:2].tolist() == pytest.approx([0.5, 0.5])


def test_a_state_that_offers_one_token_is_inert() -> None:
    process = TokenProcess(
        torch.tensor([[-1, 0]]), torch.tensor([[0.1, 5.0]], dtype=torch.float64), torch.tensor([[True, False]])
    )
    exact = solve(process, process.policy(torch.zeros(1, 2)))
    assert (exact.inert.tolist(), exact.value.tolist(), exact.action_value.tolist()) == ([True], [0.1], [[0.1, 0.0]])


@pytest.mark.parametrize(
    ("successor", "allowed", "state"),
    [
        ([[1, -1], [0, -1]], [[1, 1], [1, 1]], 1),
        ([[0, -1]], [[1, 1]], 0),
        ([[2, -1], [-1, -1]], [[1, 1], [1, 1]], 0),
        ([[1, -1], [-1, -1]], [[1, 1], [0, 0]], 1),
    ],
)
def test_a_process_that_goes_back_or_nowhere_is_refused(
    successor: list[list[int]], allowed: list[list[int]], state: int
) -> None:
    reward = torch.zeros(len(successor), 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^state {state} offers no token, or leads to"):
        TokenProcess(torch.tensor(successor), reward, torch.tensor(allowed).bool())


def test_tables_of_another_shape_or_precision_are_refused() -> None:
    ends = torch.full((1, 2), -1)
    with pytest.raises(ValueError, match="tables of one shape"):
        TokenProcess(ends, torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="must be float64"):
        TokenProcess(ends, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))


def test_each_token_has_the_advantage_of_its_unit() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    advantage = torch.tensor([[0.5, -0.25], [1.0, float("nan")]], dtype=torch.float64)
    truth = Truth(torch.tensor([[0, 1, 1], [-1, 0, -1]]), advantage, torch.zeros(2, 2), none, none)
    assert truth.by_token().tolist() == [[0.5, -0.25, -0.25], [0.0, 1.0, 0.0]]
