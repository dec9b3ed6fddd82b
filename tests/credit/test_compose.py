"""Several strategies at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from apportion.credit import Credit, CreditBatch, assign_credit
from apportion.credit.compose import Composition
from apportion.credit.controls import Oracle
from apportion.credit.process import ProcessReward
from apportion.credit.subreward import SubReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


@dataclass(frozen=True)
class Weighted:
    """Uniform credit with a factor on the objective, computed at each update."""

    factor: float = 1.0
    requires: ClassVar[frozenset[str]] = frozenset({"reward", "entropy"})
    phase: ClassVar[str] = "update"
    conserves: ClassVar[str] = "none"

    def __call__(self, batch: CreditBatch) -> Credit:
        ones = torch.ones(batch.completion_mask.shape)
        return Credit(0 * ones, loss_weight=self.factor * ones)


def two_answers(batch: Batch) -> CreditBatch:
    tags = [(0, 1, 0.0), (1, 2, 1.0)]
    return batch(
        {"tokens": 2, "reward": 0.0, "scores": {"format": 1.0}, "spans": tags},
        {"tokens": 2, "reward": 1.0, "scores": {"format": 0.0}, "spans": tags},
    )


def test_the_sum_is_weighted_and_each_term_stays_visible(batch: Batch) -> None:
    rule = Composition({"outcome": Uniform(eps=0), "format": SubReward(eps=0)}, weights={"format": 0.5})
    credit = rule(two_answers(batch))
    assert credit.parts["outcome"].tolist() == [[-1, -1], [1, 1]]
    assert credit.parts["format"].tolist() == [[0, 0.5], [-0.5, 0]]
    assert credit.advantages.tolist() == [[-1, -0.5], [0.5, 1]]
    assert credit.metrics == {"outcome/dead_groups": 0.0, "format/dead_groups": 0.0}


def test_terms_that_cancel_are_seen_in_the_parts(batch: Batch) -> None:
    totals = [(-3.0, 2.0), (2.0, -3.0), (0.0, -1.0), (-1.0, 0.0)]  # every sum is -1
    made = batch(*({"tokens": 1, "reward": a + b, "scores": {"format": a, "answer": b}} for a, b in totals))
    rule = Composition({name: Uniform(source=name) for name in ("format", "answer")})
    credit = rule(made)
    assert credit.advantages.abs().max() < 1e-6
    assert all(part.abs().max() > 1 for part in credit.parts.values())
    assert credit.metrics == {"format/dead_groups": 0.0, "answer/dead_groups": 0.0}
    assert Uniform()(made).metrics == {"dead_groups": 1.0}


def test_what_is_cut_off_is_a_part_too(batch: Batch) -> None:
    rule = Composition({"outcome": Uniform(eps=0)}, weights={"outcome": 3.0}, max_abs=2.0)
    credit = assign_credit(rule, two_answers(batch))
    assert credit.advantages.tolist() == [[-2, -2], [2, 2]]
    assert credit.parts["cut"].tolist() == [[1, 1], [-1, -1]]


def test_signals_phases_and_what_is_told_are_those_of_the_terms() -> None:
    plain = Composition({"outcome": Uniform(), "steps": ProcessReward()})
    assert plain.requires == {"reward", "spans:steps"}
    assert plain.phase == "rollout"
    assert plain.extra_information == "a score for every step"
    assert Composition({"outcome": Uniform()}).extra_information == Uniform.extra_information
    late = Composition({"outcome": Uniform(), "late": Weighted()})  # type: ignore[dict-item]
    assert late.phase == "update"
    assert late.requires == {"reward", "entropy"}


def test_loss_weights_multiply(batch: Batch) -> None:
    rule = Composition({"a": Weighted(0.5), "b": Uniform(), "c": Weighted(4.0)})  # type: ignore[dict-item]
    weight = rule(two_answers(batch)).loss_weight
    assert weight is not None
    assert weight.eq(2.0).all()
    assert Composition({"b": Uniform()})(two_answers(batch)).loss_weight is None


def test_compositions_nest(batch: Batch) -> None:
    inner = Composition({"outcome": Uniform(), "truth": Oracle()}, weights={"truth": 2.0})
    outer = Composition({"both": inner}, weights={"both": 0.5})
    made = two_answers(batch)
    torch.testing.assert_close(assign_credit(outer, made).advantages, 0.5 * inner(made).advantages)


def test_a_wrong_name_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"weights\.fromat: no term has this name \(there are: outcome, format\)"):
        Composition({"outcome": Uniform(), "format": SubReward()}, weights={"fromat": 1.0})
    with pytest.raises(InputError, match=r"terms is empty; add one"):
        Composition({})
    with pytest.raises(InputError, match="max_abs must be over 0"):
        Composition({"outcome": Uniform()}, max_abs=0.0)
    with pytest.raises(InputError, match=r"terms\.cut: this name is taken"):
        Composition({"cut": Uniform()}, max_abs=1.0)
