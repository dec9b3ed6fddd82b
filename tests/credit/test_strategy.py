"""What a strategy's answer is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from apportion.credit import Credit, CreditBatch, assign_credit
from apportion.credit.strategy import missing_signals
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

ZEROS = torch.zeros(2, 2)
STRAY = torch.tensor([[0.0, 0.0], [0.0, 1.0]])


@dataclass(frozen=True)
class Says:
    """A user's strategy with a ready answer."""

    answer: Any
    requires: ClassVar[frozenset[str]] = frozenset({"reward", "score:tone", "entropy"})
    phase: ClassVar[str] = "rollout"
    conserves: ClassVar[str] = "none"

    def __call__(self, batch: CreditBatch) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ZEROS, "Says returned Tensor; return a Credit"),
        (Credit(torch.zeros(2, 3)), r"advantages of shape \(2, 3\); need \(2, 2\)"),
        (Credit(ZEROS.double()), "advantages as torch.float64; need torch.float32, detached"),
        (Credit(ZEROS.clone().requires_grad_()), "torch.float32, with a gradient; need torch.float32, detached"),
        (Credit(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])), "advantages that are not finite in row 1"),
        (Credit(STRAY), "advantages outside the completion mask in row 1"),
        (Credit(ZEROS, loss_weight=STRAY / 0), "loss_weight that are not finite in row 0"),
        (Credit(ZEROS, parts={"a": torch.zeros(2, 1)}), r"part 'a' of shape \(2, 1\)"),
        (Credit(ZEROS, parts={"a": ZEROS, "b": STRAY}), "parts with another sum in row 1"),
    ],
)
def test_an_answer_that_breaks_the_contract_names_the_strategy_and_the_row(
    answer: Any, message: str, batch: Callable[..., CreditBatch]
) -> None:
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 1, "reward": 0.0})
    with pytest.raises(InputError, match=f"credit: .*{message}"):
        assign_credit(Says(answer), made)


def test_an_answer_that_keeps_it_passes_unchanged(batch: Callable[..., CreditBatch]) -> None:
    made = batch({"tokens": 2, "reward": 1.0}, {"tokens": 1, "reward": 0.0})
    answer = Credit(ZEROS + 0.1 * made.completion_mask, loss_weight=ZEROS + 2)
    assert assign_credit(Says(answer), made) is answer


def test_missing_signals_are_listed_in_order() -> None:
    assert missing_signals(Says(None), {"reward", "score:answer"}) == ["entropy", "score:tone"]
    assert missing_signals(Uniform(), {"reward"}) == []
