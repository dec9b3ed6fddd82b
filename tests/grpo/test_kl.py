"""KL estimates: hand numbers, and exact expectations over a small distribution, on and off the policy's samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.grpo.kl import KL_KINDS, corrected_kl, kl_estimate


def test_the_estimates_by_hand() -> None:
    logprobs, ref = torch.tensor([0.2], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
    values = [kl_estimate(logprobs, ref, kind=kind).item() for kind in KL_KINDS]
    assert values == pytest.approx([0.2, 0.02, math.exp(-0.2) + 0.2 - 1, math.exp(-0.2) + 0.2 - 1])
    assert round(values[2], 5) == 0.01873
    swapped = [kl_estimate(torch.tensor(-1.0), torch.tensor(-2.0), kind=kind).item() for kind in KL_KINDS]
    assert swapped == pytest.approx([1.0, 0.5, 0.3678794412, 0.3678794412])


def test_k3_plus_has_the_gradient_of_k2() -> None:
    logprobs = torch.linspace(-60, 60, 25, dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros_like(logprobs), kind="k3+")
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert torch.equal(gradient, logprobs.detach())
    torch.testing.assert_close(kl, kl_estimate(logprobs, torch.zeros_like(logprobs)))


def distributions() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits of a policy with gradient, its log-probabilities, those of a reference and an old policy, and the KL."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, 0.6, 0.1], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.9, 0.1, -0.3], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    return logits, policy, reference, old, (policy.exp() * (policy - reference)).sum()


@pytest.mark.parametrize(
    ("kind", "value_right", "gradient_right"),
    [("k1", True, False), ("k2", False, True), ("k3", True, False), ("k3+", True, True)],
)
def test_what_is_right_on_average_on_the_policys_own_samples(
    kind: Any, value_right: bool, gradient_right: bool
) -> None:
    logits, policy, reference, _, exact = distributions()
    estimate = (policy.detach().exp() * kl_estimate(policy, reference, kind=kind)).sum()
    assert (abs(estimate.item() - exact.item()) < 1e-12) == value_right
    (right,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert torch.allclose(gradient, right, atol=1e-12) == gradient_right


@pytest.mark.parametrize(("kind", "right"), [("k1", True), ("k3", True), ("k2", False), ("k3+", False)])
@pytest.mark.parametrize("on_policy", [True, False])
def test_weighted_by_the_ratio_k1_and_k3_are_right_in_value_and_gradient(
    kind: Any, right: bool, on_policy: bool
) -> None:
    logits, policy, reference, old, exact = distributions()
    sampler = policy.detach() if on_policy else old
    ratio = (policy - sampler).exp()
    estimate = (sampler.exp() * corrected_kl(kl_estimate(policy, reference, kind=kind), ratio)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert torch.allclose(gradient, expected, atol=1e-12) == right
    if right:
        assert estimate.item() == pytest.approx(exact.item())


def test_without_the_weight_old_samples_give_a_wrong_value() -> None:
    _, policy, reference, old, exact = distributions()
    estimate = (old.exp() * kl_estimate(policy, reference)).sum()
    assert abs(estimate.item() - exact.item()) > 0.01


def test_estimates_stay_finite_when_the_policy_drifts_away() -> None:
    for kind in KL_KINDS:
        logprobs = torch.tensor([-500.0, -1.0, 0.0], requires_grad=True)
        kl = kl_estimate(logprobs, torch.tensor([-1.0, -500.0, 0.0]), kind=kind)
        kl.sum().backward()
        assert torch.isfinite(kl).all()
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all()
    far = kl_estimate(torch.tensor(-101.0), torch.tensor(-1.0), kind="k3").item()
    assert far == pytest.approx(math.exp(20) - 21)


def test_unknown_kinds_and_shapes_that_differ_are_refused() -> None:
    one, two = torch.zeros(1, 2), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"kind must be one of k1, k2, k3, k3\+, not 'k4'"):
        kl_estimate(one, one, kind="k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logprobs \(1, 2\) and ref_logprobs \(2, 1\)"):
        kl_estimate(one, two)
