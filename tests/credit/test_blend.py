"""From step-level to outcome credit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.blend import Blend
from apportion.credit.process import ProcessReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

BLEND = Blend(Uniform(), ProcessReward(), first=0.5, last=0.005)


@pytest.fixture
def made(batch: Callable[..., CreditBatch]) -> CreditBatch:
    return batch(
        {"tokens": 2, "reward": 0.0, "spans": [(0, 1, 1.0), (1, 2, 0.0)]},
        {"tokens": 2, "reward": 1.0, "spans": [(0, 1, 1.0), (1, 2, 1.0)]},
    )


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.5), (0.5, 0.05), (1.0, 0.005)])
def test_the_process_share_decays_exponentially(made: CreditBatch, progress: float, share: float) -> None:
    outcome, process = Uniform()(made).advantages, ProcessReward()(made).advantages
    credit = BLEND(replace(made, progress=progress))
    torch.testing.assert_close(credit.advantages, (1 - share) * outcome + share * process)
    torch.testing.assert_close(credit.parts["process"], share * process)
    assert credit.metrics["process_share"] == pytest.approx(share)
    assert credit.metrics["process/steps"] == 2.0


def test_the_same_share_at_both_ends_never_changes() -> None:
    fixed = Blend(Uniform(), ProcessReward(), first=0.3, last=0.3)
    assert fixed.share(0.0) == fixed.share(0.7) == pytest.approx(0.3)


def test_a_blend_needs_what_its_strategies_need() -> None:
    assert BLEND.requires == {"reward", "spans:steps"}
    assert BLEND.phase == "rollout"
    assert BLEND.extra_information == "a score for every step"


@pytest.mark.parametrize("shares", [{"first": 0.0}, {"last": 0.0}, {"first": 1.5}])
def test_shares_outside_their_range_are_refused(shares: dict[str, float]) -> None:
    ((name, value),) = shares.items()
    with pytest.raises(InputError, match=f"{name} must be over 0 and at most 1, not {value}"):
        Blend(Uniform(), ProcessReward(), **shares)
