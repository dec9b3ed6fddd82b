"""True advantages by enumeration of the likely answers, with bounds that hold whatever the others are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..verifiers import InputError
from ..verifiers.panel import Panel, PanelResult
from .collect import as_sample
from .policy import Policy
from .sampling import Generation, RolloutConfig
from .task import Problem
from .truth_units import Units, Valuation, check_options, find_units, greatest, mean_known, reward_range, widened
from .value_tree import AnswerTree, State, grow_tree

__all__ = ["TreeTruth"]


@dataclass(frozen=True)
class TreeTruth:
    """True advantages by enumeration: from every state every branch of probability ``tau`` or more, to its end.

    The answers that the tree covers give ``V = sum of P(answer) R(answer)``. Those beyond it have the probability
    ``uncovered`` and count as the lowest reward, so that the true value lies in ``[V, V + uncovered * range]``: what a
    policy seldom writes is mostly wrong. Answers on which all verifiers abstain are left out of the mean, as they are
    of sampled values.

    Args:
        tau: least probability of a branch; 0 enumerates all answers.
        units, truth, eps: see :class:`MonteCarloTruth`.
        reward_range: lowest and highest reward; None takes those of the weights, for verifiers that score in [0, 1].
        rows: nodes read side by side.
        max_nodes: of the tree; what needs more is refused.
    """

    tau: float = 1e-4
    units: str = "steps"
    truth: str | None = "truth"
    eps: float = 1e-3
    reward_range: tuple[float, float] | None = None
    rows: int = 512
    max_nodes: int = 2_000_000

    def __post_init__(self) -> None:
        check_options(self.eps, rows=self.rows, max_nodes=self.max_nodes)
        if not 0 <= self.tau < 1:
            raise InputError(f"truth.tau={self.tau}: is a probability, 0 or more and under 1")
        if self.reward_range is not None:
            object.__setattr__(self, "reward_range", tuple(self.reward_range))
            if len(self.reward_range) != 2 or not self.reward_range[0] <= self.reward_range[1]:
                raise InputError(
                    f"truth.reward_range={list(self.reward_range)}: give the lowest reward and the highest"
                )

    def __call__(
        self,
        policy: Policy,
        problems: Sequence[Problem],
        rollouts: Sequence[Rollout],
        batch: CreditBatch,
        panel: Panel,
        rollout_config: RolloutConfig,
        *,
        seed: int = 0,
        step: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> Valuation:
        """Value the units of every rollout that has a reward; the arguments are those of :class:`MonteCarloTruth`.

        Args:
            seed, step: change nothing, since nothing is drawn.
        """
        del seed, step
        began = time.perf_counter()
        units = find_units(batch, rollouts, rollout_config, self.units, self.eps)
        roots, places = _places(units, problems, rollouts)
        tree = grow_tree(
            policy,
            [prompt for _, prompt in roots],
            dict.fromkeys(places.values()),
            rollout_config,
            tau=self.tau,
            rows=self.rows,
            max_nodes=self.max_nodes,
            should_stop=should_stop,
        )
        by_id = {problem.id: problem for problem in problems}
        told, rewards = _judge(policy, [by_id[name] for name, _ in roots], tree, panel)
        limits = self._limits(panel, [batch.outcome(), rewards])
        value, low, high, uncovered = (
            _table(units, places, tree, column) for column in _state_values(tree, rewards, limits)
        )
        advantage = units.advantages(value)
        exact = torch.zeros_like(advantage).where(~advantage.isnan(), float("nan"))
        most, nodes = greatest(uncovered), len(tree.parent) - len(roots)
        method = (
            f"tree of all branches of probability {self.tau:g} and more; not covered: {mean_known(uncovered):.2g} on "
            f"average, {most:.2g} at most"
        )
        return Valuation(
            units.truth(advantage, exact, self.truth, method),
            None,
            units.bounds(value, low, high, limits[1] - limits[0]),
            nodes,
            time.perf_counter() - began,
            told,
            {
                "cost/value_tokens": float(nodes),
                "cost/value_states": float(len(tree.states)),
                "truth/answers": float(len(tree.answers)),
                "truth/uncovered": mean_known(uncovered),
                "truth/uncovered_max": most,
                "truth/drift": greatest(units.drift),
            },
        )

    def _limits(self, panel: Panel, rewards: Sequence[Tensor]) -> tuple[float, float]:
        """Lowest and highest reward; refuses rewards outside, with which no bound would hold."""
        limits = reward_range(panel) if self.reward_range is None else self.reward_range
        seen = widened(limits, rewards)
        if seen[0] < limits[0] - 1e-9 or seen[1] > limits[1] + 1e-9:
            raise InputError(
                f"truth.reward_range: rewards reach from {seen[0]:g} to {seen[1]:g}, beyond {list(limits)}; "
                "give the lowest reward and the highest that there can be"
            )
        return limits


def _places(
    units: Units, problems: Sequence[Problem], rollouts: Sequence[Rollout]
) -> tuple[list[tuple[str, tuple[int, ...]]], dict[tuple[int, int], State]]:
    """The problems with their prompts, each once, and by row and column of a unit the state that it sets out from."""
    roots: dict[tuple[str, tuple[int, ...]], int] = {}
    places: dict[tuple[int, int], State] = {}
    for row, column, length in units.asked():
        rollout = rollouts[row]
        key = problems[rollout.group_id].id, tuple(rollout.prompt_ids)
        places[row, column] = roots.setdefault(key, len(roots)), tuple(rollout.completion_ids[:length])
    return list(roots), places


def _judge(policy: Policy, problems: Sequence[Problem], tree: AnswerTree, panel: Panel) -> tuple[PanelResult, Tensor]:
    """What the verifiers say of the tree's answers, and their rewards (L,), NaN where all abstain."""
    prompts = [policy.encode(problem.prompt) for problem in problems]
    told = panel.rewarding().judge(
        [
            as_sample(
                policy, problems[answer.prompt], prompts[answer.prompt], Generation(answer.ids, [], answer.truncated)
            )
            for answer in tree.answers
        ]
    )
    rewards = (panel.reward(verdicts) for verdicts in told.verdicts)
    return told, torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64)


def _state_values(tree: AnswerTree, rewards: Tensor, limits: tuple[float, float]) -> list[Tensor]:
    """Value of each node, the lowest and the highest that it can be, and the probability that is not covered.

    Where all covered answers were abstained on, the value is not known.

    >>> fork = AnswerTree(torch.tensor([-1, 0, 0]), torch.tensor([1.0, 0.75, 0.125]).double(),
    ...                   torch.tensor([0, 1, 1]), torch.tensor([1, 2]), [], {})
    >>> [float(column[0]) for column in _state_values(fork, torch.tensor([1.0, 0.0]), (0.0, 1.0))]
    [0.75, 0.75, 0.875, 0.125]
    """
    judged, total = tree.expectation(~rewards.isnan()), tree.expectation(rewards.nan_to_num())
    covered = tree.expectation(torch.ones_like(rewards))
    uncovered = (1 - covered).clamp(min=0)
    low, high = ((total + uncovered * limit) / (judged + uncovered) for limit in limits)
    return [low.where((judged > 0) | (covered == 0), float("nan")), low, high, uncovered]


def _table(units: Units, places: dict[tuple[int, int], State], tree: AnswerTree, column: Tensor) -> Tensor:
    """(B, S + 1) float64: a number of the tree's nodes at the states that units set out from, else NaN."""
    table = torch.full(units.lengths.shape, float("nan"), dtype=torch.float64)
    for place, state in places.items():
        table[place] = column[tree.states[state]]
    return table
