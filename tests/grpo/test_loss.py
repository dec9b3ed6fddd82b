"""The objective by hand, and its gradient against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.grpo.loss import (
    AGGREGATIONS,
    LossConfig,
    aggregate,
    aggregation_weights,
    clipped_surrogate,
    importance_ratio,
    kl_estimate,
    live_rows,
    token_loss,
)


def test_the_clip_depends_on_the_sign_of_the_advantage() -> None:
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    ratio = torch.tensor([1.4, 0.6, 10.0, 0.5, 1.4])
    assert clipped_surrogate(ratio, advantages).tolist() == pytest.approx([1.2, -0.8, -10.0, 0.5, -1.4])


def test_low_and_high_clip_are_apart() -> None:
    gain = clipped_surrogate(torch.tensor([1.4, 0.6]), torch.tensor([1.0, -1.0]), clip_low=0.1, clip_high=0.28)
    assert gain.tolist() == pytest.approx([1.28, -0.9])


def test_a_clipped_token_has_no_gradient_and_a_harmful_one_keeps_its_own() -> None:
    ratio = torch.tensor([1.4, 0.6, 1.4, 0.6, 1.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0])
    clipped_surrogate(ratio, advantages).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, 0.0, -1.0, 1.0, 2.0]


def test_shapes_that_differ_are_refused() -> None:
    one, two = torch.zeros(1, 2), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"ratio \(1, 2\) and advantages \(2, 1\)"):
        clipped_surrogate(one, two)
    with pytest.raises(ValueError, match=r"logprobs \(1, 2\) and ref_logprobs \(2, 1\)"):
        kl_estimate(one, two)
    with pytest.raises(ValueError, match=r"token_losses \(1, 2\) and completion_mask \(2, 1\)"):
        aggregate(one, two.bool())


LOSSES = torch.tensor([[1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0], [0.0] * 8])
MASK = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("seq-mean-token-mean", 0.5),  # (1 + 0) / 2
        ("token-mean", 0.2),  # 2 / 10
        ("seq-mean-token-sum", 1.0),  # (2 + 0) / 2
        ("seq-mean-token-sum-norm", 0.1),  # (2 + 0) / 2 / 10
    ],
)
def test_the_four_aggregations_by_hand(mode: Any, value: float) -> None:
    assert aggregate(LOSSES, MASK, mode=mode, max_tokens=10).item() == pytest.approx(value)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_mask_gives_zero_and_no_gradient(mode: Any) -> None:
    losses = torch.full((2, 3), float("nan"), requires_grad=True)
    total = aggregate(losses, torch.zeros(2, 3, dtype=torch.bool), mode=mode, max_tokens=3)
    total.backward()
    assert total.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0] * 3] * 2
    assert aggregate(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), mode=mode, max_tokens=3).item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_row_left_out_leaves_the_denominators_too(mode: Any) -> None:
    losses = torch.tensor([[1.0] * 4 + [0.0] * 8, [5.0] * 12])
    mask = torch.tensor([[True] * 4 + [False] * 8, [False] * 12])
    alone = aggregate(losses[:1, :4], mask[:1, :4], mode=mode, max_tokens=12)
    assert aggregate(losses, mask, mode=mode, max_tokens=12).item() == pytest.approx(alone.item())
    if mode == "token-mean":
        assert alone.item() == 1.0


def test_a_long_answer_is_punished_less_per_token_by_the_mean_of_means_and_not_by_a_constant() -> None:
    mask = torch.arange(100)[None] < torch.tensor([[10], [100]])
    weights = {
        mode: 2 * aggregation_weights(mask, mode=mode, max_tokens=100)[:, 0]
        for mode in ("seq-mean-token-mean", "seq-mean-token-sum-norm")
    }
    assert weights["seq-mean-token-mean"].tolist() == pytest.approx([0.1, 0.01])
    assert weights["seq-mean-token-sum-norm"].tolist() == pytest.approx([0.01, 0.01])


def test_the_constant_must_be_given_and_modes_known() -> None:
    with pytest.raises(ValueError, match="divides by max_tokens"):
        aggregation_weights(MASK, mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="token-mean"):
        aggregation_weights(MASK, mode="mean")  # type: ignore[arg-type]


def test_kl_estimates_by_hand() -> None:
    logprobs, ref = torch.tensor([0.2], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
    values = [kl_estimate(logprobs, ref, kind=kind).item() for kind in ("k1", "k2", "k3")]
    assert values == pytest.approx([0.2, 0.02, math.exp(-0.2) + 0.2 - 1])
    assert round(values[2], 5) == 0.01873
    with pytest.raises(ValueError, match="kind must be"):
        kl_estimate(logprobs, ref, kind="k4")  # type: ignore[arg-type]


def test_values_of_k1_and_k3_and_the_gradient_of_k2_are_right_on_average() -> None:
    """Exact expectations over a distribution of three tokens, against the KL divergence and its derivatives."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, 0.6, 0.1], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    probability = policy.detach().exp()
    forward = (policy.exp() * (policy - reference)).sum()
    backward = (reference.exp() * (reference - policy)).sum()
    (right,) = torch.autograd.grad(forward, logits, retain_graph=True)
    (other,) = torch.autograd.grad(backward, logits, retain_graph=True)
    gradients: dict[str, Tensor] = {}
    for kind in ("k1", "k2", "k3"):
        estimate = (probability * kl_estimate(policy, reference, kind=kind)).sum()  # type: ignore[arg-type]
        (gradients[kind],) = torch.autograd.grad(estimate, logits, retain_graph=True)
        if kind != "k2":
            assert estimate.item() == pytest.approx(forward.item())
    assert torch.allclose(gradients["k1"], torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(gradients["k2"], right)
    assert torch.allclose(gradients["k3"], other)


def test_k3_stays_finite_when_the_policy_drifts_away() -> None:
    logprobs = torch.tensor([-500.0, -1.0, 0.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-1.0, -500.0, 0.0]))
    kl.sum().backward()
    assert kl[0].item() == pytest.approx(math.exp(20) - 21)
    assert kl[1].item() == pytest.approx(498.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_a_huge_log_ratio_gives_a_finite_loss_and_gradient() -> None:
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    old, advantages = torch.full((1, 3), -100.0), torch.tensor([[1.0, 0.0, -1.0]])
    tokens = token_loss(logprobs, old, advantages, LossConfig())
    tokens.loss.sum().backward()
    assert tokens.loss[0].tolist() == pytest.approx([-1.2, 0.0, math.exp(20)])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert tokens.log_ratio.tolist() == [[99.0] * 3]
    assert importance_ratio(torch.tensor(-100.0), torch.tensor(-1.0)).item() == pytest.approx(math.exp(-20))


CASES = [
    LossConfig(aggregation=aggregation, kl_coef=coef, kl_kind=kind, clip_high=0.3)
    for aggregation in AGGREGATIONS
    for coef, kind in ((0.0, "k3"), (0.5, "k1"), (0.5, "k2"), (0.5, "k3"))
]


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.aggregation}-{c.kl_coef}-{c.kl_kind}")
def test_the_gradient_of_the_whole_objective_matches_finite_differences(config: LossConfig) -> None:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    logits, old, ref = normal(3, 5, 4), normal(3, 5) * 0.1 - 1.3, normal(3, 5) * 0.3 - 1.3
    ids = torch.randint(4, (3, 5, 1), generator=draw)
    advantages, weight = normal(3, 5), normal(3, 5).abs()
    mask = torch.arange(5)[None] < torch.tensor([[5], [2], [0]])

    def objective(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1).gather(2, ids)[..., 0]
        tokens = token_loss(logprobs, old, advantages, config, ref_logprobs=ref, loss_weight=weight)
        return (tokens.loss.where(mask, 0.0) * aggregation_weights(mask, mode=config.aggregation, max_tokens=7)).sum()

    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(objective(logits), logits)
    step = 1e-6
    for index in torch.randperm(logits.numel(), generator=draw)[:20].tolist():
        change = torch.zeros(logits.numel(), dtype=torch.float64)
        change[index] = step
        change = change.view_as(logits)
        with torch.no_grad():
            slope = (objective(logits + change) - objective(logits - change)) / (2 * step)
        assert gradient.flatten()[index].item() == pytest.approx(slope.item(), abs=1e-8)
    assert not gradient[2].any()  # the row left out
    assert not gradient[1, 2:].any()  # beyond the row's end


def test_the_kl_needs_a_reference_and_stays_out_of_the_loss_when_it_is_in_the_reward() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        token_loss(zeros, zeros, zeros, LossConfig(kl_coef=0.1))
    inside = token_loss(zeros, zeros, zeros, LossConfig(kl_coef=0.1), ref_logprobs=zeros - 1)
    outside = token_loss(zeros, zeros, zeros, LossConfig(kl_coef=0.1, kl_in="reward"), ref_logprobs=zeros - 1)
    assert inside.loss.item() == pytest.approx(0.1 * math.exp(-1))
    assert outside.loss.item() == 0.0


def test_the_loss_weight_scales_the_whole_token_objective() -> None:
    zeros = torch.zeros(1, 2)
    tokens = token_loss(
        zeros, zeros, zeros + 2, LossConfig(kl_coef=1.0), ref_logprobs=zeros - 1, loss_weight=torch.tensor([[1.0, 0.5]])
    )
    whole = -2 + math.exp(-1)
    assert tokens.loss[0].tolist() == pytest.approx([whole, whole / 2])


def test_groups_without_any_advantage_can_be_spared_the_kl() -> None:
    advantages = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    live = live_rows(advantages, torch.tensor([7, 7, 3, 3]))
    assert live.tolist() == [True, True, False, False]
    zeros, config = torch.zeros(4, 2), LossConfig(kl_coef=1.0, mask_dead_groups=True)
    tokens = token_loss(zeros, zeros, advantages, config, ref_logprobs=zeros - 1, live_rows=live)
    kl = math.exp(-1)
    assert tokens.loss.flatten().tolist() == pytest.approx([kl, kl, kl, kl - 1, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="needs live_rows"):
        token_loss(zeros, zeros, advantages, config, ref_logprobs=zeros)


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "mean"},
        {"kl_kind": "k4"},
        {"kl_in": "both"},
        {"clip_low": 1.1},
        {"surrogate": "ppo"},
        {"max_ratio": 0.5},
        {"kl_off_policy": True, "kl_kind": "k2"},
        {"clip_high": -0.1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LossConfig(**options)
