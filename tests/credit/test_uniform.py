"""One advantage for the whole answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def test_every_token_gets_the_answers_advantage(batch: Batch) -> None:
    made = batch(*({"tokens": n, "reward": r} for n, r in ((2, 0.0), (1, 0.0), (3, 1.0), (2, 1.0))))
    out = Uniform(eps=0)(made).advantages
    assert out.tolist() == [[-1, -1, 0], [-1, 0, 0], [1, 1, 1], [1, 1, 0]]


def test_interleaved_prompts_are_told_apart_by_their_ids(batch: Batch) -> None:
    made = batch(*({"tokens": 1, "reward": r, "group": i % 2} for i, r in enumerate((1.0, 0, 0, 0, 1, 1, 0, 1))))
    assert Uniform(eps=0)(made).advantages[:, 0].tolist() == [1, -1, -1, -1, 1, 1, -1, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ({"ddof": 1, "eps": 1e-4}, [1.4997, -0.4999, -0.4999, -0.4999]),
        ({}, [1.7320, -0.5774, -0.5774, -0.5774]),
    ],
)
def test_scales_by_hand(batch: Batch, options: dict, expected: list[float]) -> None:
    made = batch(*({"tokens": 1, "reward": r} for r in (1.0, 0.0, 0.0, 0.0)))
    assert Uniform(**options)(made).advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_one_verifier_can_be_the_source(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": 1.0, "scores": {"format": s}} for s in (0.0, 1.0)]
    strategy = Uniform(source="format", eps=0)
    assert strategy.requires == {"score:format"}
    assert strategy(batch(*rows)).advantages.tolist() == [[-1], [1]]
    assert Uniform()(batch(*rows)).advantages.tolist() == [[0], [0]]


@pytest.mark.parametrize("source", ["reward", "format"])
def test_a_row_left_out_of_training_is_not_in_the_baseline_of_any_source(batch: Batch, source: str) -> None:
    rows = [{"tokens": 2, "reward": r, "truncated": r == 0.5} for r in (0.0, 1.0, 0.5, 0.5)]
    strategy = Uniform(source=source, scale="none")
    assert strategy(batch(*rows)).advantages[:, 0].tolist() == [-0.5, 0.5, 0, 0]
    rows[3] |= {"reward": 5.0}
    assert strategy(batch(*rows, mask_truncated=True)).advantages[:, 0].tolist() == [-0.5, 0.5, 0, 0]
    assert strategy(batch(*rows)).advantages[:, 0].tolist() == [-1.625, -0.625, -1.125, 3.375]


def test_dead_groups_are_counted(batch: Batch) -> None:
    rewards = [(0, 0.0), (0, 0.0), (1, 0.0), (1, 1.0), (2, 1.0), (2, 1.0), (3, None)]
    made = batch(*({"tokens": 1, "reward": r, "group": g} for g, r in rewards))
    assert Uniform()(made).metrics == {"dead_groups": pytest.approx(2 / 3)}


def test_a_float64_reward_far_from_zero_keeps_its_spread(batch: Batch) -> None:
    made = batch(*({"tokens": 1, "reward": r} for r in (1e9, 1e9 + 1, 1e9, 1e9 + 1)))
    out = Uniform(eps=0)(made).advantages
    assert out.dtype == torch.float32
    assert out[:, 0].tolist() == [-1, 1, -1, 1]


def test_unknown_options_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="scale must be group, batch or none, not 'global'"):
        Uniform(scale="global")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ddof must be 0 or 1, not 2"):
        Uniform(ddof=2)
