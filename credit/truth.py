"""What each part of an answer was really worth: true advantages, where a task lets one compute them.

A finite process of tokens has exact ones, by dynamic programming. Shapes there: X states, V tokens that a state may
offer, and any leading dimensions for many policies at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["ExactValues", "TokenProcess", "Truth", "solve"]

_SAME_VALUE = 1e-12  # action values that differ by less are the same: the rounding of a sum of a few numbers in [0, 1]


@dataclass(frozen=True)
class Truth:
    """True advantages of the units (steps, or single tokens) of B answers, under the policy that sampled them.

    Args:
        unit_ids: (B, T) long, the unit that a token belongs to; -1 for none. Units of a row are numbered from 0.
        advantage: (B, U) float64, expected reward after the unit minus before it; NaN beyond a row's units.
        standard_error: (B, U) float64, of ``advantage``; 0 where it is exact.
        wrong: (B, T) bool, tokens that are in error by the task's own truth.
        inert: (B, T) bool, tokens whose choice makes no difference to the expected reward.
        again: (B, U) float64, a second, independent estimate of ``advantage`` for the noise floor; None where exact.
        method: a few words on how it was found, for reports.
    """

    unit_ids: Tensor
    advantage: Tensor
    standard_error: Tensor
    wrong: Tensor
    inert: Tensor
    again: Tensor | None = None
    method: str = "exact"

    def by_token(self) -> Tensor:
        """(B, T) float64: each token has its unit's advantage, tokens of no unit 0.

        >>> ids = torch.tensor([[0, 0, 1, -1]])
        >>> nothing = torch.zeros(1, 4, dtype=torch.bool)
        >>> values = torch.tensor([[0.5, -0.25]], dtype=torch.float64)
        >>> Truth(ids, values, torch.zeros(1, 2), nothing, nothing).by_token().tolist()
        [[0.5, 0.5, -0.25, 0.0]]
        """
        known = torch.nn.functional.pad(self.advantage.nan_to_num(nan=0.0), (0, 1))  # there may be no unit at all
        spread = known.gather(1, self.unit_ids.clamp(min=0))
        return spread.where(self.unit_ids >= 0, 0.0)


@dataclass(frozen=True)
class TokenProcess:
    """A finite decision process in which a token leads to one next state, as in text, and no state comes back.

    Args:
        successor: (X, V) long, the state after each token; -1 ends the answer. A state stands before its successors.
            State 0 is the prompt.
        reward: (X, V) float64, earned with the token.
        allowed: (X, V) bool, the tokens that a state offers; at least one.
    """

    successor: Tensor
    reward: Tensor
    allowed: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.successor.shape)
        if len(shape) != 2 or any(tuple(table.shape) != shape for table in (self.reward, self.allowed)):
            raise ValueError("successor, reward and allowed must be (X, V) tables of one shape")
        if self.reward.dtype != torch.float64:
            raise ValueError(f"reward must be float64, not {self.reward.dtype}")
        state = torch.arange(shape[0])[:, None]
        bad = self.allowed & (self.successor >= 0) & ((self.successor <= state) | (self.successor >= shape[0]))
        faulty = (bad.any(dim=1) | ~self.allowed.any(dim=1)).nonzero()
        if len(faulty):
            raise ValueError(f"state {int(faulty[0])} offers no token, or leads to a state that stands not after it")

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest answer, from whichever state."""
        depth = [1] * len(self.successor)
        for state, (row, offered) in enumerate(zip(self.successor.tolist(), self.allowed.tolist())):
            for after, token in zip(row, offered):
                if token and after >= 0:
                    depth[after] = max(depth[after], depth[state] + 1)
        return max(depth)

    def policy(self, logits: Tensor) -> Tensor:
        """Softmax over the offered tokens, (..., X, V) float64; 0 for the others."""
        return logits.double().masked_fill(~self.allowed, -torch.inf).softmax(dim=-1)


@dataclass(frozen=True)
class ExactValues:
    """What a policy gets from each state and token of a process, exactly.

    Args:
        policy: (..., X, V), probability of each token.
        value: (..., X), expected reward from the state to the end.
        action_value: (..., X, V), the same once the token is chosen; 0 for tokens that are not offered.
        advantage: (..., X, V), ``Q - V``; 0 for tokens that are not offered, and exactly 0 in inert states.
        visits: (..., X), probability that an answer passes through the state.
        inert: (..., X) bool, states in which every token has the same ``Q``: the choice makes no difference.
    """

    policy: Tensor
    value: Tensor
    action_value: Tensor
    advantage: Tensor
    visits: Tensor
    inert: Tensor

    @property
    def gradient(self) -> Tensor:
        """Exact policy gradient ``d V(prompt) / d logits[x, v] = d(x) pi(v|x) A(x, v)``, (..., X, V).

        It is the policy gradient theorem with the softmax worked out: the scores ``1[v=a] - pi(v|x)`` sum to
        ``pi(v|x) A(x, v)``, since the advantages of a state have the mean 0 under its policy.
        """
        return self.visits[..., None] * self.policy * self.advantage


def solve(process: TokenProcess, policy: Tensor) -> ExactValues:
    """Exact values by dynamic programming, for one policy or many at once.

    ``Q(x, v) = r(x, v) + V(x')``, ``V(x) = sum_v pi(v|x) Q(x, v)``, ``A = Q - V``; visits run the other way,
    ``d(x') = sum pi(v|x) d(x)`` over the tokens that lead there. As many sweeps as the longest answer has tokens are
    exact, since no state comes back.

    Args:
        process: X states, V tokens.
        policy: (..., X, V) float64, rows that sum to 1 over the offered tokens and are 0 elsewhere.

    >>> ends = torch.tensor([[1, -1], [-1, -1]])
    >>> reward = torch.tensor([[0.0, 0.5], [1.0, 0.0]], dtype=torch.float64)
    >>> process = TokenProcess(ends, reward, torch.ones(2, 2, dtype=torch.bool))
    >>> exact = solve(process, torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64))
    >>> exact.value.tolist(), exact.advantage[0].tolist(), exact.visits.tolist()
    ([0.375, 0.25], [-0.125, 0.125], [1.0, 0.5])
    """
    states = len(process.successor)
    goes_on = process.allowed & (process.successor >= 0)
    after = process.successor.where(goes_on, states)  # one more state: the end
    reward = process.reward.where(process.allowed, 0.0)
    value, visits = policy.new_zeros(*policy.shape[:-1]), policy.new_zeros(*policy.shape[:-1])
    begin = torch.zeros_like(visits)
    begin[..., 0] = 1.0
    action_value = torch.zeros_like(policy)
    for _ in range(process.longest):
        action_value = reward + _with_end(value)[..., after]
        value = (policy * action_value).sum(dim=-1)
        flow = (policy * visits[..., None]).flatten(-2)
        visits = begin + _with_end(torch.zeros_like(visits)).index_add(-1, after.flatten(), flow)[..., :states]
    action_value = action_value.where(process.allowed, 0.0)
    highest = action_value.masked_fill(~process.allowed, -torch.inf).amax(dim=-1)
    lowest = action_value.masked_fill(~process.allowed, torch.inf).amin(dim=-1)
    inert = highest - lowest <= _SAME_VALUE
    advantage = (action_value - value[..., None]).where(process.allowed & ~inert[..., None], 0.0)
    return ExactValues(policy, value, action_value, advantage, visits, inert)


def _with_end(of_states: Tensor) -> Tensor:
    """(..., X + 1): one more entry, 0, for the end of the answer."""
    return torch.cat([of_states, torch.zeros_like(of_states[..., :1])], dim=-1)
