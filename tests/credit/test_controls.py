"""The controls: shuffled credit and the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.controls import Inverted, Oracle, Shuffled, TrueAdvantage
from apportion.credit.localized import FirstError
from apportion.credit.prefix_weights import PrefixShare
from apportion.credit.process import ProcessReward
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def long_rows(batch: Batch, **options: object) -> CreditBatch:
    def row(length: int, shift: int) -> dict:
        spans = [(i, i + 1, float((i + shift) % 5)) for i in range(length)]
        return {"tokens": length, "reward": float(shift), "spans": spans, "written": [i % 3 > 0 for i in range(length)]}

    return batch(row(40, 0), row(25, 1), **options)


def test_shuffling_keeps_the_amounts_of_each_row_and_moves_them(batch: Batch) -> None:
    made = long_rows(batch)
    rule = ProcessReward(accumulate="own")
    plain, moved = rule(made), Shuffled(rule)(made)
    assert not torch.equal(moved.advantages, plain.advantages)
    assert torch.equal(moved.advantages.sort(dim=1).values, plain.advantages.sort(dim=1).values)
    assert moved.advantages[~made.completion_mask].eq(0).all()
    assert torch.equal(moved.parts["process"], moved.advantages)
    assert moved.metrics == plain.metrics


def test_shuffling_is_named_by_seed_and_salt(batch: Batch) -> None:
    rule = ProcessReward(accumulate="own")
    here = Shuffled(rule)(long_rows(batch, seed=3)).advantages
    assert torch.equal(Shuffled(rule)(long_rows(batch, seed=3)).advantages, here)
    assert not torch.equal(Shuffled(rule)(long_rows(batch, seed=4)).advantages, here)
    assert not torch.equal(Shuffled(rule, salt=1)(long_rows(batch, seed=3)).advantages, here)
    assert torch.isfinite(Shuffled(rule)(long_rows(batch, seed=2**63 - 1)).advantages).all()


def test_shuffling_leaves_the_global_random_stream_alone(batch: Batch) -> None:
    state = torch.get_rng_state()
    Shuffled(Uniform())(long_rows(batch))
    assert torch.equal(torch.get_rng_state(), state)


def test_every_trained_place_is_equally_likely(batch: Batch) -> None:
    spans = [(0, 1, 1.0), (1, 4, 0.0)]
    made = batch({"tokens": 4, "reward": 0.0, "spans": spans}, {"tokens": 4, "reward": 0.0, "spans": spans})
    rule = Shuffled(ProcessReward(accumulate="own"))
    praised = torch.stack([rule(replace(made, seed=seed)).advantages > 0 for seed in range(400)])
    assert praised.sum(dim=2).eq(1).all()
    share = praised.double().mean(dim=(0, 1))
    assert (share - 0.25).abs().max() < 0.06  # four standard errors of 800 draws


def test_shuffling_uniform_credit_changes_nothing(batch: Batch) -> None:
    made = long_rows(batch)
    assert torch.equal(Shuffled(Uniform())(made).advantages, Uniform()(made).advantages)


def test_a_shuffled_rule_needs_and_tells_what_its_inner_rule_does() -> None:
    rule = Shuffled(ProcessReward())
    assert rule.requires == {"spans:steps"}
    assert rule.phase == "rollout"
    assert rule.extra_information == "a score for every step, then moved to random places"


def test_inverting_turns_every_sign_and_nothing_else(batch: Batch) -> None:
    made = long_rows(batch)
    rule = FirstError()
    plain, turned = rule(made), Inverted(rule)(made)
    assert torch.equal(turned.advantages, -plain.advantages)
    assert {name: (-part).tolist() for name, part in turned.parts.items()} == {
        name: part.tolist() for name, part in plain.parts.items()
    }
    assert turned.metrics == plain.metrics
    assert not torch.signbit(turned.advantages[plain.advantages == 0]).any()
    assert torch.equal(Inverted(Inverted(rule))(made).advantages, plain.advantages)


def test_inverting_keeps_the_weight_of_the_objective(batch: Batch) -> None:
    made = long_rows(batch)
    weight = Inverted(PrefixShare())(made).loss_weight
    assert weight is not None
    assert torch.equal(weight, PrefixShare()(made).loss_weight)


def test_an_inverted_rule_claims_no_sign_and_no_mass() -> None:
    claims = [Inverted(rule).conserves for rule in (Uniform(), FirstError(), FirstError(center=False))]
    assert claims == ["none", "zero_mean", "none"]
    assert Inverted(FirstError()).extra_information == "where the first error is, then with the sign turned"
    assert Inverted(FirstError()).requires == {"reward", "spans:steps"}


def test_the_oracle_blames_the_very_tokens_that_are_wrong(batch: Batch) -> None:
    made = batch(
        {"tokens": 4, "reward": 1.0, "spans": [(0, 2, 1.0)]},  # tokens 2 and 3 are not judged
        {"tokens": 4, "reward": 1.0, "spans": [(0, 1, 1.0), (1, 2, 0.0)]},
        {"tokens": 2, "reward": 0.0, "spans": [(0, 2, 1.0)], "group": 1},  # nothing wrong in its group
    )
    out = Oracle(eps=0)(made).advantages  # 1, 1, 1, 0: mean .75, std .43301
    expected = torch.tensor([[0.57735, 0.57735, 0, 0], [0.57735, -1.73205, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_the_oracle_takes_a_token_in_a_right_and_a_wrong_span_for_wrong(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0, "spans": [(0, 3, 1.0), (2, 3, 0.0)]})
    assert Oracle(eps=0)(made).advantages[0].sign().tolist() == [1, 1, -1]


def test_true_advantages_are_handed_out_as_they_are_on_trained_tokens(batch: Batch) -> None:
    made = batch(
        {"tokens": 3, "reward": 1.0, "written": [True, False, True]},
        {"tokens": 2, "reward": 1.0, "group": 1},  # a group of equal rewards has credit all the same
    )
    truth = torch.tensor([[0.25, 0.5, -0.75], [0.1, 0.0, 9.0]], dtype=torch.float64)
    out = assign_credit(TrueAdvantage(), replace(made, token_scores={"truth": truth}))
    expected = torch.tensor([[0.25, 0.0, -0.75], [0.1, 0.0, 0.0]])
    assert torch.equal(out.advantages, expected)
    assert torch.equal(out.parts["truth"], expected)


def test_true_advantages_go_by_the_name_that_is_given(batch: Batch) -> None:
    made = replace(batch({"tokens": 2, "reward": 1.0}), token_scores={"exact": torch.ones(1, 2)})
    assert TrueAdvantage("exact").requires == {"token_scores:exact"}
    assert TrueAdvantage("exact")(made).advantages.tolist() == [[1.0, 1.0]]
    with pytest.raises(InputError, match=r"credit needs token_scores of scorers\.truth; the batch has those of: exact"):
        TrueAdvantage()(made)


def test_true_advantages_claim_no_conservation_and_tell_what_they_are() -> None:
    rule = TrueAdvantage()
    assert (rule.conserves, rule.phase) == ("none", "rollout")
    assert rule.extra_information == "the true advantages themselves: a ceiling, not a method"
    assert Inverted(rule).requires == Shuffled(rule).requires == {"token_scores:truth"}


def test_true_advantages_sum_to_the_reward_less_the_true_value_not_the_mean(batch: Batch) -> None:
    """With V_0 = .75 two answers that end at 0 and 1 sum to -.75 and .25; against the group's mean it were -.5, .5."""
    made = batch({"tokens": 2, "reward": 0.0}, {"tokens": 2, "reward": 1.0})
    truth = torch.tensor([[-0.25, -0.5], [0.0, 0.25]], dtype=torch.float64)
    out = TrueAdvantage()(replace(made, token_scores={"truth": truth})).advantages
    assert out.sum(dim=1).tolist() == [-0.75, 0.25]
