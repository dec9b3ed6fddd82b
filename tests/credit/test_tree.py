"""A segment is worth what became of the answers below it; values are exact, whatever the order of rows and nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.batch import TreeIndex
from apportion.credit.tree import SampledTree, TreeDifference, TreeReturn, sampled_tree
from apportion.verifiers import InputError

NAN = float("nan")
Path = list[tuple[int, int, int]]

# Two children of the root, four leaves below each; segments of two tokens.
EIGHT: list[Path] = [[(row // 4, 0, 2), (2 + row, 2, 4)] for row in range(8)]
EIGHT_REWARDS = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
# The first child ends early, the second has two leaves.
UNEVEN: list[Path] = [[(0, 0, 2)], [(1, 0, 2), (2, 2, 4)], [(1, 0, 2), (3, 2, 3)]]


def tree_batch(
    paths: list[Path], rewards: list[float], groups: list[int] | None = None, **facts: object
) -> CreditBatch:
    """Rows from (node, start, stop) of their segments."""
    depths = max(map(len, paths))
    node = torch.full((len(paths), depths), -1)
    start, stop = torch.zeros(2, len(paths), depths, dtype=torch.long)
    for row, path in enumerate(paths):
        for depth, (number, begin, end) in enumerate(path):
            node[row, depth], start[row, depth], stop[row, depth] = number, begin, end
    lengths = torch.tensor([path[-1][2] for path in paths])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return CreditBatch(
        mask,
        torch.tensor(groups or [0] * len(paths)),
        torch.tensor(rewards, dtype=torch.float64),
        old_logprobs=torch.full(mask.shape, -0.5),
        tree=TreeIndex(node, start, stop),
        **facts,  # type: ignore[arg-type]
    )


def values_of(tree: SampledTree, values: torch.Tensor, mean: float) -> list[list[float]]:
    """By row, the values of the root and of the row's nodes, with the group's mean put back."""
    rows = [torch.cat([root[None], nodes[nodes >= 0]]) for root, nodes in zip(tree.root, tree.node)]
    return [pytest.approx((values[row] + mean).tolist()) for row in rows]


def test_the_golden_returns() -> None:
    credit = assign_credit(TreeReturn(), tree_batch(EIGHT, EIGHT_REWARDS)).advantages
    right, wrong = [0.25, 0.25, 0.75, 0.75], [0.25, 0.25, -1.25, -1.25]
    torch.testing.assert_close(credit[:4], torch.tensor([right, right, right, wrong]))


def test_node_values_are_exact() -> None:
    tree = sampled_tree(tree_batch(EIGHT, EIGHT_REWARDS))
    expected = [[0.5, 0.75, reward] for reward in EIGHT_REWARDS[:4]] + [[0.5, 0.25, r] for r in EIGHT_REWARDS[4:]]
    assert values_of(tree, tree.leaf_mean(), 0.5) == expected
    assert values_of(tree, tree.child_mean(), 0.5) == expected
    assert tree.leaves()[tree.root].tolist() == [8.0] * 8


def test_a_child_that_ended_early_counts_as_one_child_and_as_one_leaf() -> None:
    tree = sampled_tree(tree_batch(UNEVEN, [1.0, 0.0, 0.0]))
    by_child, by_leaf = values_of(tree, tree.child_mean(), 1 / 3), values_of(tree, tree.leaf_mean(), 1 / 3)
    assert by_child == [[0.5, 1.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert by_leaf == [[1 / 3, 1.0], [1 / 3, 0.0, 0.0], [1 / 3, 0.0, 0.0]]


def test_segments_of_an_answer_sum_to_its_reward_less_the_roots_value() -> None:
    credit = assign_credit(TreeDifference(mask_probability=None), tree_batch(EIGHT, EIGHT_REWARDS)).advantages
    torch.testing.assert_close(credit[:, 0] + credit[:, 2], torch.tensor(EIGHT_REWARDS) - 0.5)
    uneven = assign_credit(TreeDifference(), tree_batch(UNEVEN, [1.0, 0.0, 1.0])).advantages
    torch.testing.assert_close(
        uneven, torch.tensor([[0.25, 0.25, 0, 0], [-0.25, -0.25, -0.5, -0.5], [-0.25, -0.25, 0.5, 0]])
    )


def test_siblings_are_a_group_of_their_own() -> None:
    strategy = TreeDifference(scale="siblings", mask_probability=None, eps=0.0)
    credit = assign_credit(strategy, tree_batch(EIGHT, EIGHT_REWARDS)).advantages
    third = 3**0.5
    torch.testing.assert_close(credit[:, 0], torch.tensor([1.0] * 4 + [-1.0] * 4))
    torch.testing.assert_close(credit[:4, 2], torch.tensor([1 / third] * 3 + [-third]))


def test_equal_siblings_get_exactly_nothing_below_unequal_parents() -> None:
    strategy = TreeDifference(scale="siblings", mask_probability=None)
    credit = assign_credit(strategy, tree_batch(EIGHT, [0.1] * 4 + [0.3] * 4)).advantages
    assert credit[:, 2:].eq(0).all()
    assert credit[:4, :2].lt(0).all()


@pytest.mark.parametrize("strategy", [TreeReturn(), TreeDifference(), TreeDifference(scale="siblings")])
def test_equal_rewards_give_exactly_zero(strategy: TreeReturn | TreeDifference) -> None:
    for paths in (EIGHT, UNEVEN):
        assert assign_credit(strategy, tree_batch(paths, [0.1] * len(paths))).advantages.eq(0).all()


def test_a_shared_segment_counts_once() -> None:
    credit = assign_credit(TreeDifference(), tree_batch(UNEVEN, [1.0, 0.0, 1.0]))
    assert credit.loss_weight is not None
    torch.testing.assert_close(credit.loss_weight[:, :2], torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]]))
    assert credit.loss_weight[:, 2:].eq(1).all()
    assert credit.metrics == pytest.approx({"tree_leaves": 3.0, "shared_tokens": 4 / 9})


def test_nearly_certain_tokens_get_nothing() -> None:
    batch = tree_batch(UNEVEN, [1.0, 0.0, 1.0])
    old = torch.full((3, 4), -0.5)
    old[:, 1] = -0.05
    credit = assign_credit(TreeDifference(), replace(batch, old_logprobs=old)).advantages
    assert credit[:, 1].eq(0).all()
    assert credit[:, 0].ne(0).all()


def test_groups_are_trees_of_their_own_in_any_order_of_rows() -> None:
    there = [[(node + 10, start, stop) for node, start, stop in path] for path in UNEVEN]
    rewards, other = [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]
    paths, groups = [*UNEVEN, *there], [5, 5, 5, 2, 2, 2]
    order = [4, 0, 5, 2, 1, 3]
    mixed = tree_batch([paths[i] for i in order], [[*rewards, *other][i] for i in order], [groups[i] for i in order])
    for strategy in (TreeReturn(), TreeDifference(scale="siblings")):
        alone = [assign_credit(strategy, tree_batch(UNEVEN, r)).advantages for r in (rewards, other)]
        torch.testing.assert_close(assign_credit(strategy, mixed).advantages, torch.cat(alone)[torch.tensor(order)])


def test_an_answer_without_a_reward_is_no_leaf() -> None:
    batch = tree_batch(EIGHT, [*EIGHT_REWARDS[:7], NAN])
    tree = sampled_tree(batch)
    assert values_of(tree, tree.leaf_mean(), 4 / 7)[6] == [4 / 7, 1 / 3, 0.0]
    for strategy in (TreeReturn(), TreeDifference()):
        assert assign_credit(strategy, batch).advantages[7].eq(0).all()


def test_answers_that_were_not_sampled_as_a_tree_are_refused() -> None:
    batch = replace(tree_batch(EIGHT, EIGHT_REWARDS), tree=None)
    for strategy in (TreeReturn(), TreeDifference()):
        with pytest.raises(InputError, match="sampled as a tree, and these were not; use rollout=tree"):
            strategy(batch)
    with pytest.raises(InputError, match="needs old_logprobs for its mask_probability"):
        TreeDifference()(replace(tree_batch(EIGHT, EIGHT_REWARDS), old_logprobs=None))


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="mask_probability is over 0"):
        TreeDifference(mask_probability=0.0)
    with pytest.raises(InputError, match="scale must be none or siblings"):
        TreeDifference(scale="group")  # type: ignore[arg-type]
    assert "old_logprobs" not in TreeDifference(mask_probability=None).requires
