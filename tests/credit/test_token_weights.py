"""Cheap token weights around another strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import Credit, CreditBatch
from apportion.credit.process import ProcessReward
from apportion.credit.token_weights import (
    EntropyMask,
    EntropyWeight,
    PlanBonus,
    ProbabilityMask,
    TraceDecay,
    masked_quantile,
)
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
PLAIN = Uniform(eps=0)


def two_rows(batch: Batch, entropy: list[list[float]], **more: torch.Tensor) -> CreditBatch:
    """A right and a wrong answer, advantages 1 and -1."""
    made = batch(*({"tokens": len(row), "reward": reward} for row, reward in zip(entropy, (1.0, 0.0))))
    filled = torch.zeros(made.completion_mask.shape)
    for row, values in enumerate(entropy):
        filled[row, : len(values)] = torch.tensor(values)
    return replace(made, entropy=filled, **more)


# --- 80/20 -----------------------------------------------------------------------------------------------------------


def test_the_fifth_of_highest_entropy_keeps_its_advantage(batch: Batch) -> None:
    made = two_rows(batch, [[0.1, 0.9, 0.2, 0.3, 0.4], [0.15, 0.25, 0.35, 0.8, 0.45]])
    credit = EntropyMask(PLAIN)(made)
    assert credit.advantages.tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, -1, 0]]
    assert credit.metrics["kept_tokens"] == 0.2
    assert credit.metrics["entropy_threshold"] == pytest.approx(0.52)  # 0.2 of the way from .45 to .8
    assert credit.metrics["dead_groups"] == 0


def test_renormalising_divides_by_the_kept_tokens_alone(batch: Batch) -> None:
    made = two_rows(batch, [[0.1, 0.9, 0.2, 0.3, 0.4], [0.15, 0.25, 0.35, 0.8, 0.45]])
    out = EntropyMask(PLAIN, renormalise=True)(made).advantages
    assert out.tolist() == [[0, 5, 0, 0, 0], [0, 0, 0, -5, 0]]
    assert float(out.abs().mean()) == float(PLAIN(made).advantages.abs().mean())


def test_the_threshold_is_over_trained_tokens_alone(batch: Batch) -> None:
    made = batch(
        {"tokens": 5, "reward": 1.0},
        {"tokens": 5, "reward": 0.0, "written": [True, False, False, False, False]},
        {"tokens": 2, "reward": 0.0},  # three columns of padding
    )
    loud = torch.full((3, 5), 9.0).masked_fill(made.completion_mask, 0.1)
    loud[0, 2] = 0.2
    credit = EntropyMask(PLAIN, share=0.1)(replace(made, entropy=loud))
    assert credit.advantages.ne(0).nonzero().tolist() == [[0, 2]]


def test_flat_entropy_keeps_every_token(batch: Batch) -> None:
    made = two_rows(batch, [[0.5] * 3, [0.5] * 3])
    assert torch.equal(EntropyMask()(made).advantages, Uniform()(made).advantages)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_the_quantile_is_torchs(share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values, mask = torch.rand(5, 7, generator=generator), torch.rand(5, 7, generator=generator) > 0.4
    expected = torch.quantile(values[mask].double(), share)
    torch.testing.assert_close(masked_quantile(values, mask, share), expected)


def test_an_empty_batch_has_no_quantile() -> None:
    assert masked_quantile(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), 0.5).isnan()


# --- probability -----------------------------------------------------------------------------------------------------


def test_tokens_over_the_limit_get_nothing(batch: Batch) -> None:
    old = torch.tensor([[0.95, 0.9, 0.5], [0.91, 0.1, 0.89]]).double().log()
    made = replace(two_rows(batch, [[0.0] * 3, [0.0] * 3]), old_logprobs=old)
    credit = ProbabilityMask(PLAIN, limit=0.9 + 1e-9)(made)
    assert credit.advantages.tolist() == [[0, 1, 1], [0, -1, -1]]
    assert credit.metrics["kept_tokens"] == pytest.approx(4 / 6)
    assert ProbabilityMask(PLAIN, limit=1.0)(made).advantages.ne(0).all()


# --- entropy weight --------------------------------------------------------------------------------------------------


def test_the_weight_leans_towards_high_entropy(batch: Batch) -> None:
    made = two_rows(batch, [[1.0, 3.0], [2.0, 2.0]])  # mean 2
    out = EntropyWeight(PLAIN)(made).advantages
    torch.testing.assert_close(out, torch.tensor([[0.95, 1.05], [-1, -1]]))
    strong = EntropyWeight(PLAIN, strength=3.0)(made).advantages
    torch.testing.assert_close(strong, torch.tensor([[0.0, 2.5], [-1, -1]]))


def test_over_each_answer_the_mean_weight_is_one(batch: Batch) -> None:
    made = two_rows(batch, [[1.0, 3.0], [0.0, 10.0]])
    rule = EntropyWeight(PLAIN, strength=1.0, over="answer")
    torch.testing.assert_close(rule(made).advantages, torch.tensor([[0.5, 1.5], [0.0, -2.0]]))
    assert rule.conserves == "mass"
    assert EntropyWeight(PLAIN, strength=1.1, over="answer").conserves == "sign"
    assert EntropyWeight(ProcessReward(), over="answer").conserves == "none"


@pytest.mark.parametrize("entropy", [0.0, 0.7])
def test_flat_entropy_changes_nothing(batch: Batch, entropy: float) -> None:
    made = two_rows(batch, [[entropy] * 2, [entropy] * 3])
    for over in ("batch", "answer"):
        rule = EntropyWeight(PLAIN, over=over)  # type: ignore[arg-type]
        torch.testing.assert_close(rule(made).advantages, PLAIN(made).advantages)


# --- planning --------------------------------------------------------------------------------------------------------


def test_planning_tokens_get_more_praise_and_less_blame(batch: Batch) -> None:
    plan = {"by_verifier": {"format": [(1, 3, 0.0)]}}
    made = batch({"tokens": 4, "reward": 1.0, **plan}, {"tokens": 4, "reward": 0.0, **plan})
    credit = PlanBonus(PLAIN, plan="format")(made)
    torch.testing.assert_close(credit.advantages, torch.tensor([[1, 1.2, 1.2, 1], [-1, -0.8, -0.8, -1]]))
    torch.testing.assert_close(credit.parts["plan"], torch.tensor([[0, 0.2, 0.2, 0]] * 2))
    assert credit.metrics["plan_tokens"] == 0.5


def test_a_bonus_on_a_bonus_still_has_true_parts(batch: Batch) -> None:
    plan = {"by_verifier": {"format": [(1, 3, 0.0)]}}
    made = batch({"tokens": 4, "reward": 1.0, **plan}, {"tokens": 4, "reward": 0.0, **plan})
    credit = PlanBonus(PlanBonus(PLAIN, plan="format"), plan="format")(made)
    torch.testing.assert_close(torch.stack([*credit.parts.values()]).sum(dim=0), credit.advantages)
    assert credit.advantages[0, 1] == pytest.approx(1.44)


def test_a_bonus_over_one_keeps_no_sign() -> None:
    assert [PlanBonus(alpha=alpha).conserves for alpha in (0.2, 1.0, 1.1)] == ["sign", "sign", "none"]


# --- trace -----------------------------------------------------------------------------------------------------------


def test_the_trace_fades_from_the_end_down_to_the_floor(batch: Batch) -> None:
    made = batch({"tokens": 4, "reward": 1.0}, {"tokens": 2, "reward": 0.0})
    out = TraceDecay(PLAIN, gamma=0.8, lam=0.5, floor=0.1)(made).advantages
    torch.testing.assert_close(out, torch.tensor([[0.1, 0.16, 0.4, 1], [-0.4, -1, 0, 0]]))


def test_a_tools_tokens_do_not_lengthen_the_trace(batch: Batch) -> None:
    written = {"tokens": 4, "written": [True, False, False, True]}
    made = batch({"reward": 1.0, **written}, {"reward": 0.0, **written})
    out = TraceDecay(PLAIN, lam=0.5)(made).advantages
    assert out.tolist() == [[0.5, 0, 0, 1], [-0.5, 0, 0, -1]]


def test_no_decay_changes_nothing(batch: Batch) -> None:
    made = two_rows(batch, [[0.0] * 3, [0.0] * 3])
    assert torch.equal(TraceDecay(lam=1.0)(made).advantages, Uniform()(made).advantages)


# --- all of them -----------------------------------------------------------------------------------------------------

WRAPPERS = [EntropyMask, ProbabilityMask, EntropyWeight, PlanBonus, TraceDecay]


class Weighing(Uniform):
    """An inner strategy that also weighs the objective, in the phase "update", without parts."""

    phase = "update"  # type: ignore[misc, assignment]

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = super().__call__(batch)
        return Credit(credit.advantages, torch.full_like(credit.advantages, 0.5), metrics={"inner": 1.0})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_the_inner_strategy_gives_else_is_kept(batch: Batch, wrapper: type) -> None:
    made = two_rows(batch, [[0.1, 0.5], [0.2, 0.1]])
    made = replace(made, spans={**made.spans, "plan": made.spans["steps"]})
    rule = wrapper(Weighing())
    credit = rule(made)
    assert rule.phase == "update"
    assert credit.loss_weight is not None
    assert credit.loss_weight.eq(0.5).all()
    assert credit.metrics["inner"] == 1
    torch.testing.assert_close(torch.stack([*credit.parts.values()]).sum(dim=0), credit.advantages)


def test_what_each_needs_is_what_it_adds() -> None:
    added = [wrapper().requires - {"reward"} for wrapper in WRAPPERS]
    assert added == [{"entropy"}, {"old_logprobs"}, {"entropy"}, {"spans:plan"}, frozenset()]
    assert EntropyMask(ProcessReward()).requires == {"spans:steps", "entropy"}
    assert EntropyMask(ProcessReward()).extra_information == (
        "a score for every step; the policy's entropy at every token"
    )


@pytest.mark.parametrize("wrapper", [EntropyMask, EntropyWeight])
def test_a_batch_without_entropy_is_refused(batch: Batch, wrapper: type) -> None:
    with pytest.raises(InputError, match="credit needs entropy of every token"):
        wrapper()(batch({"tokens": 2, "reward": 1.0}))


@pytest.mark.parametrize(
    ("wrapper", "option", "value"),
    [
        (EntropyMask, "share", 0.0),
        (ProbabilityMask, "limit", 1.1),
        (EntropyWeight, "strength", -1.0),
        (PlanBonus, "alpha", -0.1),
        (TraceDecay, "lam", 1.01),
        (TraceDecay, "floor", -0.5),
    ],
)
def test_impossible_options_are_refused_by_name(wrapper: type, option: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{option} must .*{value}$"):
        wrapper(**{option: value})
