"""Every likely answer of a policy as a tree, and the expectation of anything over the answers below a node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..verifiers import InputError
from .branching import Branches, next_chances
from .policy import Policy
from .sampling import Interrupted, RolloutConfig

__all__ = ["Answer", "AnswerTree", "grow_tree"]

State = tuple[int, tuple[int, ...]]  # index of a prompt, and the first ids of an answer to it


class Answer(NamedTuple):
    """A whole answer.

    Args:
        prompt: index of its prompt.
        ids: its tokens.
        truncated: the length limit ended it, not an end token.
    """

    prompt: int
    ids: list[int]
    truncated: bool


@dataclass(frozen=True)
class AnswerTree:
    """N nodes, each the prompt or a beginning of an answer; parents come before their children.

    Args:
        parent: (N,) long; -1 for the prompts.
        chance: (N,) float64, probability of the node's last token after its parent, as it is sampled.
        depth: (N,) long, tokens of the answer so far.
        leaf: (L,) long, nodes that are whole answers.
        answers: the L answers.
        states: the node of each state that was asked for.
    """

    parent: Tensor
    chance: Tensor
    depth: Tensor
    leaf: Tensor
    answers: list[Answer]
    states: dict[State, int]

    def expectation(self, of: Tensor) -> Tensor:
        """Sum of ``P(leaf | node) of[leaf]`` over the leaves below each node: ``E(n) = sum of P(c | n) E(c)``.

        Args:
            of: (L,) a number for each leaf; of ones it gives the probability that the tree covers.

        Returns:
            (N,) float64.

        >>> fork = AnswerTree(torch.tensor([-1, 0, 0]), torch.tensor([1.0, 0.75, 0.125]).double(),
        ...                   torch.tensor([0, 1, 1]), torch.tensor([1, 2]), [], {})
        >>> fork.expectation(torch.tensor([1.0, 0.0])).tolist(), fork.expectation(torch.ones(2)).tolist()
        ([0.75, 1.0, 0.0], [0.875, 1.0, 1.0])
        """
        total = torch.zeros(len(self.parent), dtype=torch.float64).index_copy(0, self.leaf, of.double())
        order = self.depth.argsort(stable=True)
        levels = order.split(self.depth.bincount().tolist())
        for level in reversed(levels[1:]):
            total.index_add_(0, self.parent[level], self.chance[level] * total[level])
        return total


@torch.no_grad()
def grow_tree(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    states: Iterable[State],
    config: RolloutConfig,
    *,
    tau: float,
    rows: int,
    max_nodes: int,
    should_stop: Callable[[], bool] | None = None,
) -> AnswerTree:
    """One tree for all states: below each of them every branch whose probability, given the state, is at least ``tau``.

    A node of probability ``w`` given the nearest state above it is expanded to its children of ``w P(child) >= tau``.
    Given a state further up it is less likely still, so no state misses a branch that its own tree would have, and
    nothing is expanded twice. The ids that lead to a state are followed however unlikely they are.

    Args:
        policy: to be enumerated.
        prompts: N lists of ids.
        states: beginnings of answers, none of them whole.
        config: how answers are sampled: their limit, temperature, top_k and top_p.
        tau: least probability of a branch; 0 takes all that can be sampled.
        rows: most nodes that are read side by side; changes memory, not the result.
        max_nodes: of the tree; what needs more is refused.
        should_stop: asked before each forward; True raises :class:`apportion.grpo.sampling.Interrupted`.
    """
    growing = _Growing(policy, config, tau, max_nodes, _Paths(states))
    was_training = policy.model.training
    policy.model.eval()
    try:
        fronts = [growing.plant(prompts, chosen) for chosen in _of_equal_length(prompts, rows)]
        while fronts:  # the deepest first, so that few wait
            if should_stop is not None and should_stop():
                raise Interrupted
            front = fronts.pop()
            if len(front.node) > rows:
                fronts += front.halves()
            elif (grown := growing.expand(front)) is not None:
                fronts.append(grown)
    finally:
        policy.model.train(was_training)
    return growing.tree()


def _of_equal_length(prompts: Sequence[Sequence[int]], rows: int) -> Iterator[list[int]]:
    """Indices of at most ``rows`` prompts of one length at a time.

    >>> list(_of_equal_length(["ab", "c", "de", "fg"], 2))
    [[1], [0, 2], [3]]
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for _, equal in itertools.groupby(order, key=lambda index: len(prompts[index])):
        together = list(equal)
        for start in range(0, len(together), rows):
            yield together[start : start + rows]


class _Paths:
    """The states of all prompts, merged where they begin alike; place p is a beginning of at least one state."""

    def __init__(self, states: Iterable[State]) -> None:
        self.roots: dict[int, int] = {}
        self.following: list[dict[int, int]] = []  # place by next id
        self.asked: dict[int, State] = {}
        for state in states:
            prompt, ids = state
            if prompt not in self.roots:
                self.roots[prompt] = self._new()
            place = self.roots[prompt]
            for token in ids:
                if token not in self.following[place]:
                    self.following[place][token] = self._new()
                place = self.following[place][token]
            self.asked[place] = state

    def _new(self) -> int:
        self.following.append({})
        return len(self.following) - 1


@dataclass
class _Front:
    """Nodes of one depth d that wait to be expanded.

    Args:
        node: (n,) their numbers.
        weight: (n,) float64, probability given the nearest state above.
        place: (n,) long, in the paths to states; -1 off them.
        prompt: (n,) index of the prompt.
        ids: (n, d) the answers so far.
        logits: (n, V) of the next token.
        branches: the same rows as the model has read them.
    """

    node: Tensor
    weight: Tensor
    place: Tensor
    prompt: Tensor
    ids: Tensor
    logits: Tensor
    branches: Branches

    def halves(self) -> list[_Front]:
        """The same nodes in two fronts."""
        middle = len(self.node) // 2
        return [self._part(slice(None, middle)), self._part(slice(middle, None))]

    def _part(self, part: slice) -> _Front:
        branches = self.branches.part(torch.arange(len(self.node))[part])
        node, weight, place, prompt = self.node[part], self.weight[part], self.place[part], self.prompt[part]
        return _Front(node, weight, place, prompt, self.ids[part], self.logits[part], branches)


@dataclass
class _Growing:
    """The tree so far, as lists of (n,) tensors in the order of the nodes' numbers."""

    policy: Policy
    config: RolloutConfig
    tau: float
    max_nodes: int
    paths: _Paths
    parent: list[Tensor] = field(default_factory=list)
    chance: list[Tensor] = field(default_factory=list)
    depth: list[Tensor] = field(default_factory=list)
    leaf: list[Tensor] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    states: dict[State, int] = field(default_factory=dict)
    count: int = 0

    def plant(self, prompts: Sequence[Sequence[int]], chosen: Sequence[int]) -> _Front:
        """Read the chosen prompts."""
        logits, branches = Branches.of(self.policy, [prompts[index] for index in chosen])
        place = torch.tensor([self.paths.roots.get(index, -1) for index in chosen])
        node = self._number(torch.full((len(chosen),), -1), torch.ones(len(chosen), dtype=torch.float64), 0)
        # A prompt that is no state itself is only passed through.
        weight = self._begin(node, torch.zeros(len(chosen), dtype=torch.float64), place)
        return _Front(node, weight, place, torch.tensor(chosen), torch.zeros(len(chosen), 0).long(), logits, branches)

    def expand(self, front: _Front) -> _Front | None:
        """Add the children, and read those that are no whole answers; None where there are none."""
        chance = next_chances(front.logits, self.config).cpu()
        row, token, place = self._children(front, chance)
        own, depth = chance[row, token], front.ids.shape[1] + 1
        node = self._number(front.node[row], own, depth)
        weight = self._begin(node, front.weight[row] * own, place)
        ids, prompt = torch.cat([front.ids[row], token[:, None]], dim=1), front.prompt[row]
        ended = torch.isin(token, torch.tensor(self.policy.eos_ids))
        whole = ended | (depth >= self.config.max_new_tokens)
        self.leaf.append(node[whole])
        told = zip(prompt[whole].tolist(), ids[whole].tolist(), (~ended[whole]).tolist())
        self.answers += [Answer(*one) for one in told]
        left = ~whole
        if not left.any():
            return None
        if not torch.equal(row[left], torch.arange(len(front.node))):
            front.branches.take(row[left])
        logits = front.branches.read(token[left, None])
        return _Front(node[left], weight[left], place[left], prompt[left], ids[left], logits, front.branches)

    def tree(self) -> AnswerTree:
        """What has grown."""
        none = torch.zeros(0, dtype=torch.long)
        parent, depth, leaf = (torch.cat([none, *values]) for values in (self.parent, self.depth, self.leaf))
        return AnswerTree(parent, torch.cat([none.double(), *self.chance]), depth, leaf, self.answers, self.states)

    def _children(self, front: _Front, chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token and place of each child to add: the likely ones, and those that lead to a state."""
        forced = [
            (row, token, place)
            for row, here in enumerate(front.place.tolist())
            if here >= 0
            for token, place in sorted(self.paths.following[here].items())
        ]
        keep = (front.weight[:, None] * chance >= self.tau) & (chance > 0)
        if not forced:
            row, token = keep.nonzero(as_tuple=True)
            return row, token, torch.full_like(row, -1)
        rows, tokens, places = torch.tensor(forced).unbind(1)
        keep[rows, tokens] = True
        row, token = keep.nonzero(as_tuple=True)
        width, place = chance.shape[1], torch.full_like(row, -1)
        place[torch.searchsorted(row * width + token, rows * width + tokens)] = places
        return row, token, place

    def _number(self, parent: Tensor, chance: Tensor, depth: int) -> Tensor:
        """Numbers of new nodes."""
        node = torch.arange(self.count, self.count + len(parent))
        self.count += len(parent)
        if self.count > self.max_nodes:
            raise InputError(
                f"truth.tau={self.tau:g}: the tree of answers has over truth.max_nodes={self.max_nodes} nodes; raise "
                "truth.tau, or sample with truth=monte_carlo"
            )
        self.parent.append(parent)
        self.chance.append(chance)
        self.depth.append(torch.full_like(parent, depth))
        return node

    def _begin(self, node: Tensor, weight: Tensor, place: Tensor) -> Tensor:
        """The weights, one where a node is itself a state."""
        for index in (place >= 0).nonzero()[:, 0].tolist():
            state = self.paths.asked.get(int(place[index]))
            if state is not None:
                weight[index] = 1.0
                self.states[state] = int(node[index])
        return weight
