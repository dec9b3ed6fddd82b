"""Surrogates: hand numbers, a slow loop, gradients against finite differences, and what becomes of token credit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.grpo.loss import aggregation_weights
from apportion.grpo.surrogates import (
    SURROGATES,
    cispo_surrogate,
    clipped_surrogate,
    delta_clip_surrogate,
    dual_clip_surrogate,
    policy_term,
    refuse_cancelled_credit,
    sapo_surrogate,
    sequence_ratio,
    sequence_token_ratio,
    vespo_surrogate,
)
from apportion.verifiers import InputError

every_surrogate = pytest.mark.parametrize("surrogate", SURROGATES)
OPTIONS: dict[str, dict[str, float]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual-clip": {"max_ratio": 1.6},
    "delta-clip": {"max_ratio": 1.15},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo-token": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"clip_low": 0.4, "clip_high": 0.3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.3},
    "vespo": {},
}


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_the_clip_by_hand() -> None:
    ratio, advantages = torch.tensor([1.4, 0.6, 10.0, 0.5, 1.4]), torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    assert clipped_surrogate(ratio, advantages).tolist() == pytest.approx([1.2, -0.8, -10, 0.5, -1.4])
    assert dual_clip_surrogate(ratio, advantages).tolist() == pytest.approx([1.2, -0.8, -3, 0.5, -1.4])
    assert delta_clip_surrogate(ratio, advantages, max_ratio=4).tolist() == pytest.approx([1.2, -0.8, -4, 0.5, -1.4])


def test_a_row_has_the_geometric_mean_of_its_ratios() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_ratio = torch.log(torch.tensor([[2.0, 8.0, 99.0], [3.0, 3.0, 3.0]]))
    for ratio in (sequence_ratio(log_ratio, mask), sequence_token_ratio(log_ratio, mask)):
        torch.testing.assert_close(ratio, torch.tensor([[4.0] * 3, [1.0] * 3]))


def test_the_bounded_weight_by_hand() -> None:
    ratio, advantages = torch.tensor([9.0, 0.5, 0.5]), torch.tensor([1.0, 2.0, 2.0])
    logprobs = torch.tensor([-1.0, -3.0, -3.0])
    assert cispo_surrogate(ratio, advantages, logprobs).tolist() == pytest.approx([-5, -3, -3])
    bounded = cispo_surrogate(ratio, advantages, logprobs, clip_low=0.2, clip_high=0.28)
    assert bounded.tolist() == pytest.approx([-1.28, -4.8, -4.8])


def test_the_soft_gate_by_hand_and_its_slope_at_one() -> None:
    ratio = torch.tensor([1.0, 1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([3.0, -3.0, 1.0, -1.0], dtype=torch.float64)
    gain = sapo_surrogate(ratio, advantages)
    gain.sum().backward()
    expected = [6.0, -6 / 1.05, 4 / (1 + math.exp(-1)), -4 / 1.05 / (1 + math.exp(1.05))]
    assert gain.tolist() == pytest.approx(expected)
    assert ratio.grad is not None
    assert ratio.grad[:2].tolist() == pytest.approx([3, -3])
    assert abs(float(ratio.grad[2])) < 1
    zero = sapo_surrogate(torch.tensor([5.0]), torch.tensor([0.0]))
    assert zero.item() == 0.0


def test_the_weight_of_a_whole_row_by_hand() -> None:
    """W = 1/2 x 1/2: phi = e^3 W^2 e^(-3 W) for praise, e^2 W^3 e^(-2 W) for blame."""
    log_ratio, mask = torch.log(torch.tensor([[0.5, 0.5, 7.0]])), torch.tensor([[True, True, False]])
    advantages, logprobs = torch.tensor([[1.0, -1.0, 0.0]]), torch.tensor([[-1.0, -1.0, -1.0]])
    gain = vespo_surrogate(log_ratio, advantages, logprobs, mask)[0].tolist()
    praise, blame = math.exp(3 - 0.75) / 16, math.exp(2 - 0.5) / 64
    assert gain == pytest.approx([-praise, blame, 0])


# --- a slow loop and finite differences ------------------------------------------------------------------------------


def slow_gain(surrogate: str, new: float, frozen: float, old: float, row: list[float], a: float, o: dict) -> float:
    """One token in plain Python; ``frozen`` is its log-probability where the gradient stops, ``row`` its row's l."""
    low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", 0.2)
    ratio, weight = math.exp(new - old), math.exp(frozen - old)
    if surrogate == "cispo":
        return min(max(weight, low), high) * a * new
    if surrogate == "vespo":
        k, d = (2, 3) if a >= 0 else (3, 2)
        whole = math.exp(sum(row))
        return math.exp(d) * whole**k * math.exp(-d * whole) * a * new
    if surrogate == "sapo":
        tau = o["tau_positive"] if a > 0 else o["tau_negative"]
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if surrogate == "gspo":
        ratio = math.exp(sum(row) / len(row))
    if surrogate == "gspo-token":
        ratio = math.exp(sum(row) / len(row)) * math.exp(new - frozen)
    cut = min(max(ratio, low), high) * a
    if surrogate == "delta-clip":
        return min(min(ratio, o["max_ratio"]) * a, cut)
    gain = min(ratio * a, cut)
    return max(gain, o["max_ratio"] * a) if surrogate == "dual-clip" and a < 0 else gain


LENGTHS = (5, 2, 0, 4)


def random_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)

    def normal() -> Tensor:
        return torch.randn(len(LENGTHS), max(LENGTHS), generator=draw, dtype=torch.float64)

    old, advantages = 0.3 * normal() - 1.5, normal()
    new = old + 0.3 * normal()
    return new, old, advantages, torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]


def slow_objective(surrogate: str, new: Tensor, frozen: Tensor, old: Tensor, advantages: Tensor) -> float:
    total = 0.0
    detached = surrogate in ("gspo-token", "vespo")
    for i, length in enumerate(LENGTHS):
        row = [float((frozen if detached else new)[i, t] - old[i, t]) for t in range(length)]
        for t in range(length):
            token = (float(new[i, t]), float(frozen[i, t]), float(old[i, t]))
            total += slow_gain(surrogate, *token, row, float(advantages[i, t]), OPTIONS[surrogate])
    return total


@every_surrogate
def test_value_and_gradient_are_those_of_a_slow_loop(surrogate: Any) -> None:
    new, old, advantages, mask = random_rows()
    new.requires_grad_()
    gain = policy_term(new, old, advantages, mask, surrogate=surrogate, **OPTIONS[surrogate]).gain
    objective = gain.where(mask, 0.0).sum()
    (gradient,) = torch.autograd.grad(objective, new)
    point = new.detach()
    assert objective.item() == pytest.approx(slow_objective(surrogate, point, point, old, advantages))
    step = 1e-6
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            up, down = point.clone(), point.clone()
            up[i, t] += step
            down[i, t] -= step
            values = [slow_objective(surrogate, moved, point, old, advantages) for moved in (up, down)]
            assert gradient[i, t].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)
    assert not gradient[~mask].any()


@every_surrogate
def test_without_a_change_the_gradient_is_the_advantage_of_each_token_or_its_rows_mean(surrogate: Any) -> None:
    _, old, advantages, mask = random_rows()
    new = old.clone().requires_grad_()
    gain = policy_term(new, old, advantages, mask, surrogate=surrogate, **OPTIONS[surrogate]).gain
    (gradient,) = torch.autograd.grad(gain.where(mask, 0.0).sum(), new)
    mean = advantages.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    expected = mean.expand_as(advantages) if surrogate == "gspo" else advantages
    torch.testing.assert_close(gradient, expected.where(mask, 0.0))


@every_surrogate
@pytest.mark.parametrize("size", [20.0, 40.0, 80.0])
def test_huge_log_ratios_give_finite_gains_and_gradients(surrogate: Any, size: float) -> None:
    change = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [1, 0, 0, 0]]) * size
    old, mask = torch.full((4, 4), -90.0), torch.ones(4, 4, dtype=torch.bool)
    for sign in (1.0, 0.0, -1.0):
        new = (old + change).requires_grad_()
        gain = policy_term(new, old, torch.full((4, 4), sign), mask, surrogate=surrogate).gain
        gain.sum().backward()
        assert torch.isfinite(gain).all()
        assert new.grad is not None
        assert torch.isfinite(new.grad).all()
        if sign == 0:
            assert not new.grad.any()
        if size > 20 and surrogate not in ("cispo", "vespo"):  # whose weight is bounded, and stays
            assert not new.grad[:2].any()


@every_surrogate
def test_what_lies_outside_the_mask_changes_nothing(surrogate: Any) -> None:
    new, old, advantages, mask = random_rows()
    one = policy_term(new, old, advantages, mask, surrogate=surrogate).gain
    noise = torch.full_like(new, 5.0).where(~mask, 0.0)
    two = policy_term(new + noise, old - noise, advantages + noise, mask, surrogate=surrogate).gain
    assert torch.equal(one[mask], two[mask])


# --- token credit ----------------------------------------------------------------------------------------------------


def gradients(
    surrogate: Any, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip: float = 0.03
) -> Tensor:
    """Of the mean over each answer's tokens, then over answers."""
    new = new.clone().requires_grad_()
    gain = policy_term(new, old, advantages, mask, surrogate=surrogate, clip_low=clip, clip_high=clip).gain
    weights = aggregation_weights(mask, mode="seq-mean-token-mean")
    (gradient,) = torch.autograd.grad((gain * weights).where(mask, 0.0).sum(), new)
    return gradient


def test_a_ratio_of_the_whole_row_cancels_token_credit_on_the_policys_own_samples() -> None:
    _, old, advantages, mask = random_rows()
    mean = advantages.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    flat = mean.expand_as(advantages)
    per_token, per_row = gradients("gspo", old, old, advantages, mask), gradients("gspo", old, old, flat, mask)
    torch.testing.assert_close(per_token, per_row, rtol=0, atol=1e-16)
    kept, plain = gradients("gspo-token", old, old, advantages, mask), gradients("gspo-token", old, old, flat, mask)
    assert (kept - plain).abs().max() > 0.1
    torch.testing.assert_close(kept, gradients("clip", old, old, advantages, mask))


def test_with_one_advantage_for_the_row_both_have_the_same_gradient_also_off_policy() -> None:
    new, old, advantages, mask = random_rows()
    flat = advantages[:, :1].expand_as(advantages)
    for clip in (0.02, 0.4):
        one = gradients("gspo", new, old, flat, mask, clip=clip)
        torch.testing.assert_close(one, gradients("gspo-token", new, old, flat, mask, clip=clip))
    assert one.any()


def test_a_row_is_clipped_as_a_whole_under_the_rows_ratio() -> None:
    mask, old = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    new = torch.tensor([[0.2, 0.0]])  # the row's ratio is e^.1, over 1.03: praise is clipped, blame is not
    gradient = gradients("gspo-token", new, old, torch.tensor([[1.0, -1.0]]), mask)
    assert gradient[0, 0].item() == 0
    assert gradient[0, 1].item() == pytest.approx(-math.exp(0.1) / 2)


def test_credit_that_would_cancel_is_refused_and_the_remedy_named() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    flat = torch.tensor([[0.5, 0.5, 0.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    split = torch.tensor([[0.5, 0.5, 0.0], [-1.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    refuse_cancelled_credit("gspo", flat, mask)
    with pytest.raises(InputError, match=r"loss\.surrogate=gspo .*\(row 1\).*use loss\.surrogate=gspo-token"):
        refuse_cancelled_credit("gspo", split, mask)
    with pytest.raises(InputError, match=r"\(row 0\)"):
        refuse_cancelled_credit("gspo", flat, mask, loss_weight=torch.tensor([[1.0, 0.5, 1.0]] * 3))
    for surrogate in SURROGATES:
        if surrogate != "gspo":
            refuse_cancelled_credit(surrogate, split, mask)
    refuse_cancelled_credit("gspo", torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool))


# --- relations -------------------------------------------------------------------------------------------------------


def test_dual_and_delta_clip_are_one_unless_delta_cuts_praise() -> None:
    ratio = torch.linspace(0.1, 8, 80).repeat(2)
    advantages = torch.tensor([1.0, -1.0]).repeat_interleave(80)
    for bound in (1.2, 2.0, 4.0):
        one, two = (f(ratio, advantages, max_ratio=bound) for f in (dual_clip_surrogate, delta_clip_surrogate))
        torch.testing.assert_close(one, two)
    low = delta_clip_surrogate(ratio, advantages, max_ratio=1.1)
    assert low[:80].max() == pytest.approx(1.1)


def test_under_the_bounded_weight_no_token_loses_its_gradient() -> None:
    new = torch.tensor([[1.0, -3.0]], requires_grad=True)  # far over the upper bound with praise, far under with blame
    old, advantages, mask = torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    lost = torch.autograd.grad(policy_term(new, old, advantages, mask).gain.sum(), new)[0]
    kept = torch.autograd.grad(policy_term(new, old, advantages, mask, surrogate="cispo").gain.sum(), new)[0]
    assert lost.tolist() == [[0, 0]]
    assert kept[0].tolist() == pytest.approx([1.2, -0.8])


def test_names_and_shapes_that_do_not_fit_are_refused() -> None:
    one, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"surrogate must be one of clip, .* not 'ppo'"):
        policy_term(one, one, one, mask, surrogate="ppo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ratio \(1, 2\) and advantages \(2, 1\)"):
        clipped_surrogate(one, torch.zeros(2, 1))
