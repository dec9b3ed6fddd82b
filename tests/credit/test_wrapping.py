"""What strategies around another strategy have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apportion.credit import Credit, CreditBatch
from apportion.credit.gtpo import EntropyShaping
from apportion.credit.localized import FirstError
from apportion.credit.subreward import SubReward
from apportion.credit.uniform import Uniform
from apportion.credit.wrapping import added, also_told, keeps_sign, masked_share, reweighted

CREDIT = Credit(
    torch.tensor([[1.0, -2.0]]),
    loss_weight=torch.tensor([[0.5, 1.0]]),
    parts={"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[-2.0, -2.0]])},
    metrics={"seen": 1.0},
)


def test_a_weight_acts_on_every_part_and_leaves_no_negative_zero() -> None:
    out = reweighted(CREDIT, torch.tensor([[True, False]]), {"kept": 0.5})
    assert str(out.advantages.tolist()) == "[[1.0, 0.0]]"
    assert {name: part.tolist() for name, part in out.parts.items()} == {"a": [[3, 0]], "b": [[-2, 0]]}
    assert out.loss_weight is CREDIT.loss_weight
    assert out.metrics == {"seen": 1.0, "kept": 0.5}


def test_what_is_added_joins_a_part_of_its_name() -> None:
    out = added(CREDIT, "a", torch.tensor([[0.5, 0.5]]), {})
    assert out.advantages.tolist() == [[1.5, -1.5]]
    assert {name: part.tolist() for name, part in out.parts.items()} == {"a": [[3.5, 0.5]], "b": [[-2, -2]]}
    assert CREDIT.parts["a"].tolist() == [[3, 0]]


def test_a_share_of_no_tokens_is_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_share(~nothing, nothing) == 0


def test_who_keeps_the_sign_of_the_reward() -> None:
    strategies = [Uniform(), Uniform(source="format"), SubReward(), FirstError(), EntropyShaping(keep_sign=True)]
    assert [keeps_sign(strategy) for strategy in strategies] == [True, False, False, False, True]


@dataclass(frozen=True)
class Untold:
    """A user's strategy that says nothing of what it is told."""

    requires = frozenset({"reward"})
    phase = "rollout"
    conserves = "none"

    def __call__(self, batch: CreditBatch) -> Credit:
        return Credit(torch.zeros(batch.completion_mask.shape))


def test_what_is_told_adds_up() -> None:
    assert also_told(Uniform(), "more") == "more"
    assert also_told(Untold(), "more") == "more"  # type: ignore[arg-type]
    assert also_told(FirstError(), "more") == "where the first error is; more"
