"""Credit from a sampled tree of answers: a segment is worth what became of the answers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch, TreeIndex
from .ops import group_mean, group_normalize
from .resampled import chosen_tokens
from .strategy import Conserves, Phase, check_choice

__all__ = ["SampledTree", "TreeDifference", "TreeReturn", "sampled_tree", "tree_index"]


@dataclass(frozen=True)
class SampledTree:
    """A batch's trees with the rewards at their leaves. Nodes are numbered from 0, each group's root included.

    Shapes: rows B, depths D, nodes K. A row without a reward or a trained token is no leaf.

    Args:
        node: (B, D) long, -1 beyond the row's end and in rows that are no leaf.
        root: (B,) long, root of the row's group.
        parent, top: (K,) long, the node above and the root; a root's own are itself.
        depth: (K,) long, the column in which the node stands; -1 for roots.
        reward: (B,) float64, less the group's mean, so that equal rewards give exact zeros; NaN where there is none.
    """

    node: Tensor
    root: Tensor
    parent: Tensor
    top: Tensor
    depth: Tensor
    reward: Tensor

    def leaves(self) -> Tensor:
        """Answers below each node, (K,) float64."""
        return self._over_leaves(torch.ones_like(self.reward))

    def leaf_mean(self) -> Tensor:
        """Mean reward of the answers below each node, (K,) float64; NaN where there is none."""
        return self._over_leaves(self.reward) / self.leaves()

    def child_mean(self) -> Tensor:
        """Each node's value, (K,) float64: the mean over its children, a leaf's its reward; NaN as above.

        Children are independent draws, so this estimates the node's value without bias also where a child ended early
        and has fewer answers below it than its siblings.
        """
        total, count = torch.zeros_like(self.depth, dtype=torch.float64), torch.zeros_like(self.depth)
        last = (self.node >= 0).sum(dim=1) - 1
        row = last >= 0
        leaf = self.node.gather(1, last.clamp(min=0)[:, None])[row, 0]
        total.index_add_(0, leaf, self.reward[row])
        count.index_add_(0, leaf, torch.ones_like(leaf))
        for depth in reversed(range(self.node.shape[1])):
            here = (self.depth == depth) & (count > 0)
            total.index_add_(0, self.parent, (total / count).where(here, 0.0))
            count.index_add_(0, self.parent, here.long())
        return total / count

    def on_tokens(self, values: Tensor, index: TreeIndex, completion_mask: Tensor) -> Tensor:
        """Each token gets the value of its segment's node, (B, T) float32; zero where no segment holds it.

        Args:
            values: (K,).
            index: the tree as it was sampled.
            completion_mask: (B, T) bool.
        """
        rows, width = completion_mask.shape
        real = self.node >= 0
        start = index.start.where(real, width).contiguous()
        token = torch.arange(width, device=start.device).expand(rows, width).contiguous()
        depth = torch.searchsorted(start, token, right=True) - 1
        at = depth.clamp(min=0)
        inside = completion_mask & (depth >= 0) & (token < index.stop.where(real, 0).gather(1, at))
        return values.float()[self.node.gather(1, at).clamp(min=0)].where(inside, 0.0)

    def _over_leaves(self, row_values: Tensor) -> Tensor:
        counted = row_values.where(~self.reward.isnan(), 0.0)
        real = self.node >= 0
        total = torch.zeros(len(self.depth), dtype=torch.float64, device=counted.device)
        total.index_add_(0, self.root, counted)
        return total.index_add_(0, self.node[real], counted[:, None].expand_as(self.node)[real])


def tree_index(batch: CreditBatch) -> TreeIndex:
    """The batch's tree; refuses answers that were not sampled as one."""
    if batch.tree is None:
        raise InputError("credit needs answers that were sampled as a tree, and these were not; use rollout=tree")
    return batch.tree


def sampled_tree(batch: CreditBatch) -> SampledTree:
    """The trees of the batch, with the rewards at their leaves."""
    index, reward = tree_index(batch), batch.outcome()
    real = (index.node >= 0) & ~reward.isnan()[:, None]
    groups, group = torch.unique(batch.group_ids, return_inverse=True)
    ids, number = torch.unique(index.node[real], return_inverse=True)
    node = torch.full_like(index.node, -1).masked_scatter(real, number)
    root = group + len(ids)
    above = torch.cat([root[:, None], node[:, :-1]], dim=1)
    parent = torch.arange(len(ids) + len(groups), device=node.device)
    top, depth = parent.clone(), torch.full_like(parent, -1)
    parent[number] = above[real]
    top[number] = root[:, None].expand_as(node)[real]
    depth[number] = torch.arange(node.shape[1], device=node.device).expand_as(node)[real]
    return SampledTree(node, root, parent, top, depth, reward - group_mean(reward, batch.group_ids))


@dataclass(frozen=True)
class TreeReturn:
    """A node against the root and against its parent (TreeRL, arXiv 2506.11902).

    ``A[t] = ((V(n) - V(root)) + (V(n) - V(parent))) / sqrt(L(n))`` for the node n whose segment holds t, where V is the
    mean reward of the L answers below. A segment stands in the rows of all its L answers, so that it weighs sqrt(L) in
    the objective. Centring the rewards leave-one-out first would multiply all of it by ``G / (G - 1)``, G answers in
    the group.
    """

    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "which answers share their beginning"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", "tree"})

    def __call__(self, batch: CreditBatch) -> Credit:
        tree = sampled_tree(batch)
        value, leaves = tree.leaf_mean(), tree.leaves()

        def gain(base: Tensor) -> Tensor:
            gained = ((value - base) / leaves.sqrt()).nan_to_num(0.0)
            return tree.on_tokens(gained, tree_index(batch), batch.completion_mask)

        parts = {"against_root": gain(value[tree.top]), "against_parent": gain(value[tree.parent])}
        return Credit(parts["against_root"] + parts["against_parent"], parts=parts, metrics=_tree_metrics(tree))


@dataclass(frozen=True)
class TreeDifference:
    """A node against its siblings: ``A[t] = V(n) - V(parent)`` for the node n whose segment holds t.

    V is the mean over the children, a leaf's the reward (SPO-tree, arXiv 2505.23564): the segments of an answer sum to
    its reward less the root's value. With ``scale="siblings"`` it is divided by the standard deviation of the
    siblings' values, each set of siblings a group of its own (TreeRPO, arXiv 2506.05183). A segment that stands in the
    rows of several answers counts once: the objective of its tokens is divided by the number of these rows.

    Args:
        scale: ``none`` or ``siblings``.
        mask_probability: a token that was sampled with more than this gets nothing; None masks none.
        ddof, eps: of the siblings' standard deviation.
    """

    scale: Literal["none", "siblings"] = "none"
    mask_probability: float | None = 0.9
    ddof: int = 0
    eps: float = 1e-6
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"
    extra_information: ClassVar[str] = "which answers share their beginning"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("none", "siblings"))
        check_choice("ddof", self.ddof, (0, 1))
        if self.mask_probability is not None and not 0 < self.mask_probability <= 1:
            raise InputError(f"mask_probability is over 0, up to 1, or null for none, not {self.mask_probability}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward", "tree", *([] if self.mask_probability is None else ["old_logprobs"])})

    def __call__(self, batch: CreditBatch) -> Credit:
        tree, index, mask = sampled_tree(batch), tree_index(batch), batch.completion_mask
        value = tree.child_mean().masked_fill(tree.depth < 0, float("nan"))
        scale: Literal["group", "none"] = "group" if self.scale == "siblings" else "none"
        gain = group_normalize(value, tree.parent, ddof=self.ddof, eps=self.eps, scale=scale)
        chosen = mask if self.mask_probability is None else chosen_tokens(batch, self.mask_probability)
        advantages = tree.on_tokens(gain, index, mask).where(chosen, 0.0)
        rows = tree.on_tokens(tree.leaves(), index, mask).clamp(min=1)
        metrics = {**_tree_metrics(tree), "shared_tokens": float((rows > 1).sum()) / max(int(mask.sum()), 1)}
        return Credit(advantages, 1 / rows, {"gain": advantages}, metrics)


def _tree_metrics(tree: SampledTree) -> dict[str, float]:
    """Answers of a tree: fewer than sampling has branches for where segments ended early."""
    leaves = tree.leaves()[tree.depth < 0]
    return {"tree_leaves": float(leaves.mean()) if len(leaves) else 0.0}
