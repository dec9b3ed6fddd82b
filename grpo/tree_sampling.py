"""Sample the answers of a prompt as a tree: they share their beginnings, and branch after every segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..credit.batch import TreeIndex
from ..verifiers import InputError
from .engines import Engine, SamplingOptions
from .engines.native import NativeEngine
from .policy import Policy
from .sampling import Generation, RolloutConfig
from .seeds import named_seed

__all__ = ["TreeRolloutConfig", "TreeSamples", "sample_trees"]


@dataclass(frozen=True)
class TreeRolloutConfig(RolloutConfig):
    """How completions are sampled as trees.

    ``group_size`` is the most answers that a tree can have, the product of ``branching``; an answer that ends before
    its last branching stays one answer, so that a group may be smaller.

    Args:
        branching: children of the prompt, of each of these, and so on.
        segment_tokens: tokens of a segment; those of the last depth run to the end.
    """

    branching: tuple[int, ...] = (2, 2, 2)
    segment_tokens: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "branching", tuple(self.branching))
        if not self.branching or min(self.branching) < 1:
            raise InputError(f"rollout.branching={list(self.branching)}: needs at least one number, each at least 1")
        if prod(self.branching) != self.group_size:
            raise InputError(
                f"rollout.branching={list(self.branching)} makes {prod(self.branching)} answers; set "
                f"rollout.group_size={prod(self.branching)}, not {self.group_size}"
            )
        begun = (len(self.branching) - 1) * self.segment_tokens
        if self.segment_tokens < 1 or begun >= self.max_new_tokens:
            raise InputError(
                f"rollout.segment_tokens={self.segment_tokens}: the last of {len(self.branching)} segments begins at "
                f"token {begun}; need at least 1 and a begin before rollout.max_new_tokens={self.max_new_tokens}"
            )


@dataclass(frozen=True)
class TreeSamples:
    """The leaves of N trees, those of one prompt together, in the order of their branches.

    Args:
        generations: B completions, each the whole path from the prompt to a leaf.
        prompt: of each completion, the index of its prompt.
        tree: which segments they share.
        num_tokens: tokens generated; those of a shared segment count once.
    """

    generations: list[Generation]
    prompt: list[int]
    tree: TreeIndex
    num_tokens: int


@dataclass(frozen=True)
class _Path:
    """A path from a prompt downwards: the branches taken, what was sampled, and for each segment its node and end.

    ``truncated``: no end token has come so far.
    """

    prompt: int
    branches: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    truncated: bool = True


def sample_trees(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    prompt_seeds: Sequence[int],
    config: TreeRolloutConfig,
    *,
    should_stop: Callable[[], bool] | None = None,
    engine: Engine | None = None,
) -> TreeSamples:
    """A tree for every prompt, depth by depth: each open path is read once and its children sampled from there.

    A segment that ends with an end token is a leaf, whatever the depth, and one row. All children of a node are
    independent draws, so the mean of their values estimates the node's, which the mean of the leaves does not where
    children differ in how many leaves they have. The log-probabilities are those of the sampling policy; the random
    numbers of a segment come from its prompt's seed and its branches alone.

    Args:
        policy: the model to sample from.
        prompts: N lists of ids.
        prompt_seeds: N seeds.
        config: shape of the trees, and how tokens are drawn.
        should_stop: see :func:`apportion.grpo.sampling.sample_groups`.
        engine: awake, with the policy's weights; None: the built-in sampler.
    """
    engine = NativeEngine(policy) if engine is None else engine
    if len(prompt_seeds) != len(prompts):
        raise ValueError(f"{len(prompt_seeds)} prompt_seeds for {len(prompts)} prompts")
    open_paths, leaves, nodes, tokens = [_Path(index) for index in range(len(prompts))], [], 0, 0
    for depth, width in enumerate(config.branching):
        last = depth + 1 == len(config.branching)
        children = [replace(p, branches=(*p.branches, branch)) for p in open_paths for branch in range(width)]
        limit = config.max_new_tokens - depth * config.segment_tokens if last else config.segment_tokens
        generations = engine.generate(
            [[*prompts[path.prompt], *path.ids] for path in open_paths],
            width,
            SamplingOptions.of(config, limit),
            row_seeds=[named_seed(prompt_seeds[child.prompt], *child.branches) for child in children],
            should_stop=should_stop,
        )
        paths = [_extended(child, own, nodes + index) for index, (child, own) in enumerate(zip(children, generations))]
        nodes, tokens = nodes + len(paths), tokens + sum(len(own.ids) for own in generations)
        leaves += [path for path in paths if last or not path.truncated]
        open_paths = [path for path in paths if path.truncated]
    leaves.sort(key=lambda path: (path.prompt, path.branches))
    return TreeSamples(
        [Generation(list(path.ids), list(path.logprobs), path.truncated) for path in leaves],
        [path.prompt for path in leaves],
        _index(leaves, len(config.branching)),
        tokens,
    )


def _extended(path: _Path, generation: Generation, node: int) -> _Path:
    ids = (*path.ids, *generation.ids)
    return replace(
        path,
        ids=ids,
        logprobs=(*path.logprobs, *generation.logprobs),
        nodes=(*path.nodes, node),
        stops=(*path.stops, len(ids)),
        truncated=generation.truncated,
    )


def _index(leaves: Sequence[_Path], depths: int) -> TreeIndex:
    node = torch.full((len(leaves), depths), -1)
    start, stop = torch.zeros(2, len(leaves), depths, dtype=torch.long)
    for row, path in enumerate(leaves):
        taken = len(path.nodes)
        node[row, :taken] = torch.tensor(path.nodes)
        start[row, :taken] = torch.tensor((0, *path.stops[:-1]))
        stop[row, :taken] = torch.tensor(path.stops)
    return TreeIndex(node, start, stop)
