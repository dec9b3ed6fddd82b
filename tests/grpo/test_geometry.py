"""The Gram matrix is that of separate backward passes, for less work; figures of it are those of explicit gradients."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from apportion.credit import Credit, CreditBatch, Rollout, collate
from apportion.credit.controls import Inverted
from apportion.credit.uniform import Uniform
from apportion.grpo.coefficients import Objective
from apportion.grpo.geometry import ReferenceRollouts, accumulate_by_group, group_gram
from apportion.grpo.gradient_store import gradient_parts
from apportion.grpo.gram import (
    GradientGram,
    agreement,
    bias,
    cosines,
    group_cosines,
    norms,
    reference_cosines,
    resample_groups,
    signal_to_noise,
)
from apportion.grpo.loss import AGGREGATIONS, LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.strategy_geometry import StrategyGeometry, geometry_metrics
from apportion.grpo.surrogates import SURROGATES
from apportion.grpo.update import NonFinite, accumulate_gradients
from apportion.grpo.window import Window
from apportion.verifiers import InputError

LENGTHS = (4, 1, 7, 3, 5, 5, 2, 6, 4, 3, 3, 6)
OPTIONS: Mapping[str, Any] = {"max_tokens": 9, "temperature": 0.8}


@pytest.fixture
def policy(new_policy: Callable[..., Policy]) -> Policy:
    policy = new_policy()
    policy.model.double()
    return policy


@pytest.fixture
def window(policy: Policy, rollout_of: Callable[..., Rollout]) -> Window:
    """Twelve rows in four groups, two of them with a row less: one left out, one with a token of another writer."""
    draw = torch.Generator().manual_seed(0)
    rollouts = [
        rollout_of(
            torch.randint(3, 24, (length,), generator=draw).tolist(),
            prompt=torch.randint(3, 24, (1 + row % 4,), generator=draw).tolist(),
            group=(7, 2, 5, 3)[row % 4],
            truncated=row == 3,
            model_mask=[at != 2 for at in range(length)] if row == 5 else None,
        )
        for row, length in enumerate(LENGTHS)
    ]
    batch = collate(rollouts, mask_truncated=True)
    shape = batch.completion_mask.shape
    old = -3.2 + 0.3 * torch.randn(shape, generator=draw)
    return Window.open(
        5, rollouts, replace(batch, old_logprobs=old, ref_logprobs=old + 0.2 * torch.randn(shape, generator=draw))
    )


def random_credit(batch: CreditBatch, seed: int) -> Credit:
    draw = torch.Generator().manual_seed(seed)
    mask = batch.completion_mask
    return Credit(torch.randn(mask.shape, generator=draw).where(mask, 0.0))


def some_credits(batch: CreditBatch) -> dict[str, Credit]:
    """Two unlike strategies, one that weighs the loss, and one without credit."""
    first, second = (random_credit(batch, seed).advantages for seed in (1, 2))
    weight = torch.rand(first.shape, generator=torch.Generator().manual_seed(3))
    return {"one": Credit(first), "two": Credit(second), "weighed": Credit(first, weight), "none": Credit(first * 0)}


def gram_of(policy: Policy, window: Window, credits: Mapping[str, Credit], **options: Any) -> GradientGram:
    loss = options.pop("loss", LossConfig())
    return group_gram(
        policy, window.prompt_ids, window.completion_ids, window.batch, credits, loss, **{**OPTIONS, **options}
    )


def gradients(policy: Policy, window: Window, credits: Mapping[str, Credit], loss: LossConfig) -> torch.Tensor:
    """(K, N, P): a forward and a backward pass for every strategy and group."""
    ids, found = window.batch.group_ids, []
    for credit, group in itertools.product(credits.values(), ids.unique()):
        policy.model.zero_grad(set_to_none=True)
        accumulate_gradients(
            policy,
            replace(window, credit=credit, ref_logprobs=window.batch.ref_logprobs),
            (ids == group).nonzero()[:, 0],
            loss,
            micro_batch_rows=16,
            step_rows=torch.arange(len(ids)),
            **OPTIONS,
        )
        parameters = list(policy.model.parameters())
        found.append(
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]).double()
        )
    policy.model.zero_grad(set_to_none=True)
    return torch.stack(found).view(len(credits), len(ids.unique()), -1)


def as_gram(vectors: torch.Tensor) -> GradientGram:
    """Of explicit gradients (K, N, P)."""
    names = tuple(map(str, range(len(vectors))))
    return GradientGram(names, torch.arange(vectors.shape[1]), torch.einsum("knp,lmp->knlm", vectors, vectors))


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-6) -> None:
    assert torch.allclose(found, expected, rtol=0, atol=relative * float(expected.abs().max())), (
        found - expected
    ).abs().max() / expected.abs().max()


# --- the Gram matrix -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_gram_matrix_is_that_of_separate_backward_passes(policy: Policy, window: Window, surrogate: Any) -> None:
    loss = LossConfig(surrogate=surrogate, kl_coef=0.1, clip_high=0.28)
    credits = some_credits(window.batch)
    vectors = gradients(policy, window, credits, loss)
    found = gram_of(policy, window, credits, loss=loss)
    assert found.names == ("one", "two", "weighed", "none")
    assert found.groups.tolist() == [2, 3, 5, 7]
    assert_close(found.gram, as_gram(vectors).gram)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_it_is_so_under_every_aggregation_and_with_dead_groups_spared(
    policy: Policy, window: Window, aggregation: Any
) -> None:
    loss = LossConfig(aggregation=aggregation, kl_coef=0.1, mask_dead_groups=True, kl_off_policy=True)
    credits = some_credits(window.batch)
    credits["two"].advantages[window.batch.group_ids == 5] = 0.0
    found = gram_of(policy, window, credits, loss=loss)
    assert_close(found.gram, as_gram(gradients(policy, window, credits, loss)).gram)
    assert not found.gram[1, 2].any()
    assert not found.gram[3].any()


def test_in_float32_too(new_policy: Callable[..., Policy], window: Window) -> None:
    policy, credits = new_policy(), some_credits(window.batch)
    found = gram_of(policy, window, credits)
    assert_close(found.gram, as_gram(gradients(policy, window, credits, LossConfig())).gram, 1e-5)


@pytest.mark.parametrize(
    "options",
    [{"micro_batch_rows": 1}, {"micro_batch_rows": 2}, {"memory_gib": 3e-5}, {"memory_gib": 1e-4}],
    ids=str,
)
def test_neither_the_size_of_the_micro_batches_nor_the_memory_change_it(
    policy: Policy, window: Window, options: Mapping[str, float]
) -> None:
    credits = some_credits(window.batch)
    whole, found = gram_of(policy, window, credits), gram_of(policy, window, credits, **options)
    assert_close(found.gram, whole.gram)
    assert whole.work.rounds == 1
    assert (found.work.rounds > 1) == ("memory_gib" in options)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("change", ["frozen", "checkpointed", "tied", "experts"])
def test_it_holds_for_other_models_as_well(policy: Policy, window: Window, change: str, packing: bool) -> None:
    if change == "frozen":
        policy.model.model.layers.requires_grad_(False)
    elif change == "checkpointed":
        policy.model.gradient_checkpointing_enable()
        policy.model.train()
    else:
        kind, options = {
            "tied": ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0}),
            "experts": (
                "qwen3_moe",
                {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2},
            ),
        }[change]
        shape = {"vocab_size": 26, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **options}))
        policy = replace(policy, model=model.eval())
    policy, credits = replace(policy, packing=packing), some_credits(window.batch)
    found = gram_of(policy, window, credits)
    assert_close(found.gram, as_gram(gradients(policy, window, credits, LossConfig())).gram, 1e-5)
    assert cosines(found)[0, 1].abs() < 0.9


def test_a_part_of_the_parameters_holds_what_fits_and_all_parts_hold_everything_once(policy: Policy) -> None:
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in parameters)
    parts = gradient_parts(parameters, vectors=8, memory_gib=8 * 8 * 1000 / 2**30)
    sizes = [part.empty(1).shape[1] for part in parts]
    assert sum(sizes) == total
    assert set(sizes[:-1]) == {1000}
    gradient = [torch.arange(p.numel()).view_as(p).double() for p in parameters]
    rows = []
    for part in parts:
        row = part.empty(1)[0]
        part.fill(row, [next(g for p, g in zip(parameters, gradient) if p is q) for q in part.parameters])
        rows.append(row)
    assert torch.equal(torch.cat(rows), torch.cat([g.flatten() for g in gradient]))


def named_memory(error: Exception) -> float:
    """What a refusal says is needed."""
    found = re.search(r"at least ([\d.e+-]+\d)", str(error))
    assert found is not None
    return float(found[1])


def test_memory_for_which_all_would_be_done_over_fifty_times_is_refused(policy: Policy, window: Window) -> None:
    credits = some_credits(window.batch)
    with pytest.raises(InputError, match=r"^memory_gib=1e-06: .* need at least [^ ]*, and then 50 rounds;") as error:
        gram_of(policy, window, credits, memory_gib=1e-6)
    parameters = list(policy.model.parameters())
    total, enough = sum(p.numel() for p in parameters), named_memory(error.value)
    live = 12  # three strategies with a gradient in four groups
    assert enough == pytest.approx(total * 8 * live / 50 / 2**30, rel=0.03)
    assert len(gradient_parts(parameters, live, enough)) in (49, 50)
    for memory in (math.inf, math.nan, 0.0, -1.0):
        with pytest.raises(InputError, match=f"^memory_gib={memory:g}: must be a finite number over 0"):
            gram_of(policy, window, credits, memory_gib=memory)


def test_neither_padding_nor_the_order_of_rows_change_it(policy: Policy, window: Window) -> None:
    credits = some_credits(window.batch)
    whole = gram_of(policy, window, credits)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1))

    def moved(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values[order], (0, 3))

    batch = window.batch
    other = replace(
        window,
        prompt_ids=[window.prompt_ids[row] for row in order],
        completion_ids=[window.completion_ids[row] for row in order],
        batch=CreditBatch(
            moved(batch.completion_mask),
            batch.group_ids[order],
            batch.reward[order],
            old_logprobs=moved(batch.old_logprobs),
            ref_logprobs=moved(batch.ref_logprobs),
        ),
    )
    turned = {
        name: Credit(moved(c.advantages), None if c.loss_weight is None else moved(c.loss_weight))
        for name, c in credits.items()
    }
    assert_close(gram_of(policy, other, turned).gram, whole.gram)


def test_the_groups_add_up_to_the_gradient_of_the_whole_batch(policy: Policy, window: Window) -> None:
    credits = some_credits(window.batch)
    found = gram_of(policy, window, credits)
    for at, credit in enumerate(credits.values()):
        policy.model.zero_grad(set_to_none=True)
        rows = torch.arange(len(LENGTHS))
        accumulate_gradients(policy, replace(window, credit=credit), rows, LossConfig(), micro_batch_rows=16, **OPTIONS)
        square = sum(float(p.grad.double().square().sum()) for p in policy.model.parameters() if p.grad is not None)
        assert float(found.gram[at, :, at].sum()) == pytest.approx(square, rel=1e-6)
        assert norms(found)[at].item() == pytest.approx(math.sqrt(square), rel=1e-6)


def test_the_policy_is_left_as_it_was(policy: Policy, window: Window) -> None:
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    streams, training = torch.get_rng_state(), policy.model.training
    with torch.no_grad():  # the caller's mode does not matter
        gram_of(policy, window, some_credits(window.batch))
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert torch.equal(torch.get_rng_state(), streams)
    assert policy.model.training == training


def test_a_loss_that_is_not_finite_names_strategy_row_and_token(policy: Policy, window: Window) -> None:
    credits = some_credits(window.batch)
    credits["two"].advantages[4, 2] = math.nan
    with pytest.raises(NonFinite, match="the loss of two is not finite in row 4 at token 2"):
        gram_of(policy, window, credits)
    weight = next(policy.model.parameters())
    hook = weight.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(NonFinite, match=r"the gradient of (one|two|weighed) is not finite in rows \d+"):
        gram_of(policy, window, some_credits(window.batch))
    hook.remove()
    with pytest.raises(ValueError, match="old_logprobs"):
        gram_of(policy, replace(window, batch=replace(window.batch, old_logprobs=None)), some_credits(window.batch))


# --- what it costs ---------------------------------------------------------------------------------------------------


def on_policy(window: Window, policy: Policy) -> Window:
    """The same rows with the policy's own log-probabilities: the ratio is one, and nothing is clipped."""
    from apportion.grpo.forward import score_in_parts

    scored = score_in_parts(policy, window.prompt_ids, window.completion_ids, temperature=0.8, rows=16)
    return replace(window, batch=replace(window.batch, old_logprobs=scored.logprobs))


def test_inverted_scaled_and_mixed_strategies_cost_nothing(policy: Policy, window: Window) -> None:
    window = on_policy(window, policy)
    one, two = (random_credit(window.batch, seed).advantages for seed in (1, 2))
    bare = {"one": Credit(one), "two": Credit(two)}
    mixed = {"inverted": Credit(-one), "scaled": Credit(3 * two), "mixture": Credit(one + 0.3 * two)}
    alone, found = gram_of(policy, window, bare), gram_of(policy, window, bare | mixed)
    assert alone.work.backwards == 8  # two strategies in four groups
    assert found.work == alone.work
    assert_close(found.gram, as_gram(gradients(policy, window, bare | mixed, LossConfig())).gram)
    assert cosines(found)[0, 2].item() == pytest.approx(-1.0, abs=1e-12)


def test_a_dead_group_costs_nothing(policy: Policy, window: Window) -> None:
    credits = {"one": random_credit(window.batch, 1)}
    credits["one"].advantages[window.batch.group_ids == 7] = 0.0
    work = gram_of(policy, window, credits).work
    assert (work.forwards, work.backwards) == (3, 3)
    assert gram_of(policy, window, credits, loss=LossConfig(kl_coef=0.1)).work.forwards == 4  # the KL moves it
    spared = LossConfig(kl_coef=0.1, mask_dead_groups=True)
    assert gram_of(policy, window, credits, loss=spared).work.forwards == 3
    nothing = gram_of(policy, window, {"none": Credit(credits["one"].advantages * 0)})
    assert (nothing.work.forwards, nothing.work.backwards) == (0, 0)
    assert not nothing.gram.any()


def test_tokens_that_are_clipped_for_every_strategy_need_no_backward_pass(policy: Policy, window: Window) -> None:
    raised = replace(window.batch, old_logprobs=torch.full(window.batch.completion_mask.shape, -60.0))
    credits = {"one": Credit(window.batch.completion_mask.float())}
    work = gram_of(policy, replace(window, batch=raised), credits).work
    assert (work.forwards, work.backwards) == (4, 0)


def test_a_strategy_that_differs_in_a_few_rows_costs_a_pass_over_these(
    policy: Policy, rollout_of: Callable[..., Rollout]
) -> None:
    rollouts = [rollout_of(list(range(3, 23)) * 2, group=0) for _ in range(8)]
    window = on_policy(Window.open(1, rollouts, collate(rollouts)), policy)
    one, two = random_credit(window.batch, 1).advantages, random_credit(window.batch, 2).advantages
    two[1:] = one[1:]
    found = gram_of(policy, window, {"one": Credit(one), "two": Credit(two)})
    assert found.work.forward_tokens == 8 * 40
    assert found.work.backward_tokens == 8 * 40 + 40
    assert_close(
        found.gram, as_gram(gradients(policy, window, {"one": Credit(one), "two": Credit(two)}, LossConfig())).gram
    )


def test_coefficients_are_the_slopes_of_the_loss(window: Window) -> None:
    """Hand numbers: minus advantage times ratio over the number of tokens, nothing where the clip bites."""
    batch = window.batch
    tokens = int(batch.completion_mask.sum())
    credit = Credit(2.0 * batch.completion_mask.float())
    objective = Objective.of({"one": credit}, batch, LossConfig(), max_tokens=9)
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs.double() + torch.tensor([0.0, 0.1, 0.5, -0.5, 0, 0, 0])
    slopes = objective.coefficients(torch.tensor([2]), logprobs[[2]])
    expected = [-2.0, -2 * math.exp(0.1), 0.0, -2 * math.exp(-0.5), -2.0, -2.0, -2.0]
    assert (slopes[0, 0] * tokens).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_strategy_without_a_gradient_has_no_cosine(policy: Policy, window: Window) -> None:
    gram = gram_of(policy, window, some_credits(window.batch))
    for found in (
        cosines(gram)[3],
        signal_to_noise(gram)[3:],
        group_cosines(gram)[3:],
        bias(gram, "none"),
        bias(gram, "one")[3:],
    ):
        assert found.isnan().all()
    assert norms(gram)[3] == 0
    assert cosines(gram)[0, 0].item() == pytest.approx(1.0)
    weights = resample_groups(4, 20, seed=0)
    assert cosines(gram, weights)[:, 3].isnan().all()
    assert not cosines(gram, torch.ones(2, 4))[:, :3, :3].isnan().any()


# --- a reference from other rollouts ---------------------------------------------------------------------------------


def test_the_reference_is_the_gradient_of_its_own_rollouts(policy: Policy, window: Window) -> None:
    credits = some_credits(window.batch)
    other = replace(
        window,
        completion_ids=[[3 + (token + 5) % 20 for token in row] for row in window.completion_ids],
    )
    right = random_credit(window.batch, 9)
    reference = ReferenceRollouts(other.prompt_ids, other.completion_ids, other.batch, right)
    gram = gram_of(policy, window, credits, reference=reference)
    mine = gradients(policy, window, credits, LossConfig())
    theirs = gradients(policy, other, {"right": right}, LossConfig())[0]
    halves = torch.stack([theirs[::2].sum(dim=0), theirs[1::2].sum(dim=0)])
    assert gram.reference is not None
    assert_close(gram.gram, as_gram(mine).gram)
    assert_close(gram.reference.cross, torch.einsum("knp,hp->knh", mine, halves))
    assert_close(gram.reference.halves, halves @ halves.T)
    whole = halves.sum(dim=0)
    expected = torch.nn.functional.cosine_similarity(mine.sum(dim=1), whole[None], dim=1)
    assert reference_cosines(gram)[:3].tolist() == pytest.approx(expected[:3].tolist(), abs=1e-6)
    assert reference_cosines(gram)[3].isnan()
    between = float(torch.nn.functional.cosine_similarity(*halves, dim=0))
    assert agreement(gram)[0] == pytest.approx(between, abs=1e-6)
    small = gram_of(policy, window, credits, reference=reference, memory_gib=1e-4)
    assert_close(small.reference.cross, gram.reference.cross)
    along = torch.einsum("knp,p->kn", mine, whole) / whole.norm()
    rest = mine - along[..., None] * whole / whole.norm()
    pairs = [(n, m) for n, m in itertools.product(range(4), repeat=2) if n != m]
    for at, found in enumerate(bias(gram)[:3].tolist()):
        parts = [sum(float(v[at, n] @ v[at, m]) for n, m in pairs) for v in (rest, mine)]
        if parts[1] > 0:
            assert found == pytest.approx(math.sqrt(min(max(parts[0] / parts[1], 0.0), 1.0)), abs=1e-4)
        else:
            assert math.isnan(found)


def test_a_strategy_measured_against_itself_is_without_bias(policy: Policy, window: Window) -> None:
    credits = {"one": random_credit(window.batch, 1)}
    reference = ReferenceRollouts(window.prompt_ids, window.completion_ids, window.batch, credits["one"])
    gram = gram_of(policy, window, credits, reference=reference)
    assert reference_cosines(gram).tolist() == pytest.approx([1.0])
    halves, best = agreement(gram)
    assert math.isnan(best) or best == pytest.approx(math.sqrt(2 * halves / (1 + halves)))


# --- during training -------------------------------------------------------------------------------------------------


def test_gradients_group_by_group_are_those_of_one_step(policy: Policy, window: Window) -> None:
    window.credit, rows = random_credit(window.batch, 1), torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 10])
    loss, options = LossConfig(kl_coef=0.1), {"micro_batch_rows": 2, **OPTIONS}
    window.ref_logprobs = window.batch.ref_logprobs
    policy.model.zero_grad(set_to_none=True)
    plain = accumulate_gradients(policy, window, rows, loss, **options)
    expected = [None if p.grad is None else p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad(set_to_none=True)
    sums, gram = accumulate_by_group(policy, window, rows, loss, **options)
    assert sums == pytest.approx(plain, rel=1e-6)
    for parameter, gradient in zip(policy.model.parameters(), expected):
        assert_close(parameter.grad, gradient)
    assert gram.groups.tolist() == [2, 5, 7]
    square = sum(float(g.double().square().sum()) for g in expected if g is not None)
    assert norms(gram).item() ** 2 == pytest.approx(square, rel=1e-6)
    accumulate_by_group(policy, window, rows, loss, **options)  # adds to what is there, as one step does
    for parameter, gradient in zip(policy.model.parameters(), expected):
        assert_close(parameter.grad, 2 * gradient)
    assert geometry_metrics(gram).keys() == {"geometry/norm", "geometry/snr", "geometry/groups_cosine"}


def test_gradients_group_by_group_say_so_where_they_do_not_fit(policy: Policy, window: Window) -> None:
    window.credit = random_credit(window.batch, 1)
    options: dict[str, Any] = {"micro_batch_rows": 4, **OPTIONS}
    with pytest.raises(InputError, match=r"^memory_gib=1e-06: 4 gradients of .* at least [^ ]*; raise it") as error:
        accumulate_by_group(policy, window, torch.arange(12), LossConfig(), memory_gib=1e-6, **options)
    enough = named_memory(error.value)
    accumulate_by_group(policy, window, torch.arange(12), LossConfig(), memory_gib=enough, **options)
    with pytest.raises(InputError, match="4 gradients"):
        accumulate_by_group(policy, window, torch.arange(12), LossConfig(), memory_gib=enough * 0.97, **options)


def test_a_window_is_compared_with_the_strategies_that_were_asked_for(policy: Policy, window: Window) -> None:
    batch = window.batch.with_reward(torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1]).double())
    window.batch, window.credit = batch, Uniform()(batch)
    geometry = StrategyGeometry({"same": Uniform(), "inverted": Inverted(Uniform())}, every=3)
    metrics = geometry.measure(policy, window, loss=LossConfig(), micro_batch_rows=16, **OPTIONS)
    assert metrics["geometry/cosine_same"] == pytest.approx(1.0)
    assert metrics["geometry/norm_ratio_same"] == pytest.approx(1.0)
    assert metrics["geometry/snr_same"] == pytest.approx(metrics["geometry/snr"])
    assert metrics["geometry/norm_ratio_inverted"] > 0
    assert metrics["cost/seconds_geometry"] > 0
    assert [step for step in range(1, 9) if geometry.is_due(step)] == [1, 4, 7]
    assert geometry.requires == {"reward"}


def test_a_window_without_credit_or_with_a_broken_loss_gives_no_figures(policy: Policy, window: Window) -> None:
    geometry = StrategyGeometry({})
    options = {"loss": LossConfig(), "micro_batch_rows": 16, **OPTIONS}
    metrics = geometry.measure(policy, window, **options)
    assert metrics.keys() == {"geometry/norm", "cost/seconds_geometry"}
    window.credit = random_credit(window.batch, 1)
    assert window.batch.old_logprobs is not None
    window.batch.old_logprobs[0, 0] = math.nan
    assert geometry.measure(policy, window, **options).keys() == {"cost/seconds_geometry"}


def test_options_that_cannot_be_are_refused() -> None:
    for options, key in (({"every": 0}, "every"), ({"memory_gib": 0.0}, "memory_gib")):
        with pytest.raises(InputError, match=rf"geometry\.{key}="):
            StrategyGeometry({}, **options)
    with pytest.raises(InputError, match=r"geometry\.strategies\.trained"):
        StrategyGeometry({"trained": Uniform()})
