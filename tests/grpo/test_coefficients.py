"""Few rows stand for many without loss, and the plan of blocks is the cheapest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from apportion.grpo.coefficients import FORWARD_COST, plan_blocks, reduce_rows


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_a_combination_of_the_basis(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rank = seed % 4
    few = torch.randn(rank, 40, generator=draw, dtype=torch.float64)
    mixed = torch.randn(9, rank, generator=draw, dtype=torch.float64) @ few
    rows = mixed * torch.logspace(-9, 9, 9, dtype=torch.float64)[:, None]
    mix, basis = reduce_rows(rows)
    assert basis.shape == (rank, 40)
    assert torch.allclose(basis @ basis.T, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    missing = (mix @ basis - rows).norm(dim=1)
    assert (missing <= 1e-6 * rows.norm(dim=1)).all()


def test_a_row_that_is_a_combination_but_for_more_than_the_tolerance_is_kept() -> None:
    rows = torch.eye(3, dtype=torch.float64)[:2]
    near = rows[0] + 1e-5 * torch.tensor([0.0, 0.0, 1.0]).double()
    assert len(reduce_rows(torch.stack([*rows, near]))[1]) == 3
    near = rows[0] + 1e-7 * torch.tensor([0.0, 0.0, 1.0]).double()
    assert len(reduce_rows(torch.stack([*rows, near]))[1]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_no_cut_of_the_ordered_rows_is_cheaper_than_the_plan(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((6, 4, 9)) / 6
    rows[:, 2:] *= draw.random((6, 2, 1)) < 0.4  # two strategies touch some rows only
    products, lengths = rows @ rows.transpose(0, 2, 1), draw.integers(1, 90, 6)

    def cost(block: list[int]) -> float:
        rank = np.linalg.matrix_rank(np.concatenate(rows[block], axis=1))
        return (FORWARD_COST + rank) * (20 + lengths[block].sum())

    plan = plan_blocks(products, lengths, 20.0, max_rows=4)
    assert sorted(row for block in plan for row in block) == list(range(6))
    assert max(map(len, plan)) <= 4
    order = sorted(range(6), key=lambda row: (-np.linalg.matrix_rank(rows[row]), -lengths[row], row))
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 6), n) for n in range(6))
    every = [[order[a:b] for a, b in itertools.pairwise((0, *cut, 6))] for cut in cuts]
    cheapest = min(sum(map(cost, blocks)) for blocks in every if max(map(len, blocks)) <= 4)
    assert sum(map(cost, plan)) == pytest.approx(cheapest)
