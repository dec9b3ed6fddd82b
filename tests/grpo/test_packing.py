"""Packed tokens give the values and the gradients of padded rows, for any model whose attention can be exchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from apportion.grpo import forward, varlen
from apportion.grpo.forward import packs, score_completions, score_in_parts
from apportion.grpo.packing import micro_batches, pack, padded_micro_batches
from apportion.grpo.policy import Policy

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
PACKED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),  # learned positions
    ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}),  # positions offset by two
    ("qwen3", {"head_dim": 8}),
    ("phi3", {}),  # one matrix for queries, keys and values
    ("olmo2", {}),
    ("granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    ("cohere", {"logit_scale": 0.5}),  # its logits are more than a projection
    ("mistral", {"sliding_window": 6}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 6}),  # windows in some layers only
    ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
]
PADDED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {"n_head": 4, "n_layer": 2}, "attention cannot be exchanged"),
    ("gemma2", {"head_dim": 8, "attn_implementation": "eager"}, "attention cannot be exchanged"),
    ("mamba", {"state_size": 4}, "attention cannot be exchanged"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "not all of its layers are attention"),
]
LONG = list(range(3, 33))
# A shared prompt, rows of one token, equal rows, a single row, prompts of one token, a prompt that begins another.
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [4], [5, 6, 7], [5, 6, 7, 8, 9], [4], [5, 6, 7, 8, 9], [8, 8]]
COMPLETIONS = [[7, 8, 9, 2], [10], [11, 12, 13, 14, 15, 16, 17], [2], [7, 8, 9, 2], [9, 9], LONG[:20], [3, 3, 3]]


def build(kind: str, **options: Any) -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SHAPE, **options})
        implementation = options.get("attn_implementation")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    return Policy(model, None, lambda text: [], (2,))


def gradients(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities, and the gradient of a sum of them that weighs every token differently."""
    policy.model.zero_grad(set_to_none=True)
    width = max(map(len, completions))
    scored = score_completions(policy, prompts, completions, width=width, **options)
    weights = torch.randn(scored.logprobs.shape, generator=torch.Generator().manual_seed(1))
    (scored.logprobs * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return torch.stack([scored.logprobs.detach(), scored.entropy]), found


def assert_equal_to_padded(
    policy: Policy,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    completions: Sequence[Sequence[int]] = COMPLETIONS,
    **options: Any,
) -> None:
    packed, fast = gradients(policy, prompts, completions, **options)
    padded, slow = gradients(replace(policy, packing=False), prompts, completions, **options)
    assert torch.allclose(packed, padded, atol=1e-5)
    assert fast.keys() == slow.keys()
    size = torch.nn.utils.get_total_norm(list(slow.values()))
    apart = torch.nn.utils.get_total_norm([fast[name] - slow[name] for name in slow])
    assert size > 0
    assert apart <= 1e-5 * size


@pytest.mark.parametrize(("kind", "options"), PACKED)
def test_values_and_gradients_are_those_of_padded_rows(kind: str, options: dict[str, Any]) -> None:
    policy = build(kind, **options)
    assert packs(policy)
    assert_equal_to_padded(policy, temperature=0.7)
    assert packs(policy)  # still: nothing was found on the way
    assert policy.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "options", "reason"), PADDED)
def test_models_that_mix_tokens_by_other_means_run_on_padded_rows_and_say_so_once(
    kind: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build(kind, **options)
    with caplog.at_level(logging.WARNING):
        assert_equal_to_padded(policy)
        assert_equal_to_padded(policy)
    (message,) = [record.getMessage() for record in caplog.records if "padded rows" in record.getMessage()]
    assert message.startswith(type(policy.model).__name__)
    assert reason in message
    assert not packs(policy)


def test_a_model_found_to_mix_tokens_otherwise_is_run_again_on_padded_rows(caplog: pytest.LogCaptureFixture) -> None:
    policy = build("llama")
    policy.model.config.num_hidden_layers = 3  # as if a layer did not attend
    policy.model.model.layers.append(torch.nn.Module())
    policy.model.model.layers[2].forward = lambda states, **_: states + states.roll(1, dims=1)
    assert packs(policy)
    assert_equal_to_padded(policy)
    assert not packs(policy)
    assert "it attended 2 times in 3 layers" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_long_prompts_attend_once_for_all_of_their_rows(kind: str) -> None:
    policy = build(kind, sliding_window=12)
    prompts = [LONG, LONG, LONG, LONG[:25], [7]]
    completions = [[4, 5, 6], [7], [8, 9, 10, 11, 12], [4, 4], [5]]
    rows = pack(prompts, completions).rows
    assert sum(part.queries.shape[0] for part in rows if part.start is None) == 3  # the prompts
    assert_equal_to_padded(policy, prompts, completions)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_attend_in_the_backward_pass_as_they_did_before(reentrant: bool) -> None:
    policy = build("llama")
    _, plain = gradients(replace(policy, packing=False), PROMPTS, COMPLETIONS)
    policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        policy.model.enable_input_require_grads()
    policy.model.train()
    _, found = gradients(policy, PROMPTS, COMPLETIONS)
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, atol=1e-5 * float(gradient.abs().max()))
    assert packs(policy)


def test_several_backward_passes_go_through_one_forward() -> None:
    policy = build("llama")
    scored = score_completions(policy, PROMPTS, COMPLETIONS, width=20)
    parameters = list(policy.model.parameters())
    first = torch.autograd.grad(scored.logprobs[0].sum(), parameters, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(scored.logprobs[0].sum(), parameters, retain_graph=True, allow_unused=True)
    other = torch.autograd.grad(scored.logprobs[2].sum(), parameters, allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
    alone = score_completions(policy, PROMPTS[2:3], COMPLETIONS[2:3], width=20)
    wanted = torch.autograd.grad(alone.logprobs.sum(), parameters, allow_unused=True)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(other, wanted) if b is not None)


def test_under_bf16_packed_rows_are_as_near_to_exact_ones_as_padded_rows() -> None:
    policy = build("llama")
    exact, _ = gradients(policy, PROMPTS, COMPLETIONS)
    half = replace(policy, precision="bf16")
    packed, _ = gradients(half, PROMPTS, COMPLETIONS)
    padded, _ = gradients(replace(half, packing=False), PROMPTS, COMPLETIONS)
    assert (packed - exact).abs().max() <= 2 * (padded - exact).abs().max() + 0.01


def test_adapters_train_on_packed_rows() -> None:
    peft = pytest.importorskip("peft")
    policy = build("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
    policy = replace(policy, model=peft.get_peft_model(policy.model, config).eval())
    assert packs(policy)
    assert_equal_to_padded(policy)
    assert packs(policy)


@pytest.mark.parametrize("kind", ["llama", "cohere"])
@pytest.mark.parametrize("packing", [True, False])
def test_logits_in_chunks_give_the_values_and_gradients_of_all_at_once(
    kind: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(build(kind), packing=packing)
    whole, slow = gradients(policy, PROMPTS, COMPLETIONS, temperature=0.7)
    shapes: list[int] = []
    hook = policy.model.lm_head.register_forward_hook(lambda *call: shapes.append(call[2].shape[:-1].numel()))
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 50 * 4)
    parts, fast = gradients(policy, PROMPTS, COMPLETIONS, temperature=0.7)
    hook.remove()
    assert torch.allclose(parts, whole, atol=1e-6)
    for name, gradient in slow.items():
        assert torch.allclose(fast[name], gradient, atol=1e-5 * float(gradient.abs().max()))
    most = 4 if kind == "llama" else sum(map(len, COMPLETIONS))  # the logits of the other are more than a projection
    assert max(shapes) == most or (kind == "cohere" and not packing)
    assert packs(policy) == packing


def plain_varlen(
    query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, *_: int, scale: float, window_size: Any, **__: Any
) -> torch.Tensor:
    """What the flash kernels compute, spelled out: causal, aligned to the end, in a window."""
    outputs = []
    for (start, stop), (first, last) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist())):
        q, k, v = query[start:stop], key[first:last], value[first:last]
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3_text", {"head_dim": 8, "sliding_window": 6})])
def test_sequences_for_flash_kernels_mean_the_same_rows(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "fits", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    assert_equal_to_padded(build(kind, **options))


def test_equal_prompts_are_stored_once_and_last_tokens_not_at_all() -> None:
    packed = pack(PROMPTS, COMPLETIONS)
    prompts = {tuple(prompt) for prompt in PROMPTS}
    assert packed.input_ids.shape[1] == sum(map(len, prompts)) + sum(len(row) - 1 for row in COMPLETIONS)
    assert len(packed.predicting) == sum(map(len, COMPLETIONS))
    first = [sum(map(len, COMPLETIONS[:row])) for row in (0, 1, 4, 6)]  # of the rows with the first prompt
    assert packed.predicting[first].tolist() == [4] * 4


def test_micro_batches_keep_each_prompt_together_within_rows_and_tokens() -> None:
    prompts = [[1, 2]] * 5 + [[3]] * 2 + [[4]]
    lengths = [9, 2, 3, 4, 5, 6, 6, 50]
    for rows, tokens in ((3, None), (8, 20), (16, None), (1, 1)):
        parts = micro_batches(prompts, lengths, rows=rows, tokens=tokens)
        assert sorted(row for part in parts for row in part) == list(range(8))
        for part in parts:
            size = sum(len(p) for p in {tuple(prompts[row]) for row in part}) + sum(lengths[row] for row in part)
            assert len(part) == 1 or (len(part) <= rows and (tokens is None or size <= tokens))
    whole = micro_batches(prompts, lengths, rows=5)
    assert [sorted(part) for part in whole] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert micro_batches([], [], rows=3) == padded_micro_batches([], [], rows=3) == []


def test_scores_in_parts_are_in_the_order_of_the_rows() -> None:
    policy = build("llama")
    whole = score_completions(policy, PROMPTS, COMPLETIONS, width=20, squares=True)
    parts = score_in_parts(policy, PROMPTS, COMPLETIONS, temperature=1.0, rows=2, squares=True)
    for one, other in zip(vars(whole).values(), vars(parts).values()):
        assert torch.allclose(one, other, atol=1e-5)


def test_neither_neighbours_nor_order_change_a_row(new_policy: Callable[..., Policy]) -> None:
    policy = new_policy()
    ids = [[token % 20 + 3 for token in row] for row in COMPLETIONS]
    whole = score_completions(policy, PROMPTS, ids, width=20).logprobs
    order = [6, 0, 3, 1, 7, 2, 5, 4]
    other = score_completions(policy, [PROMPTS[row] for row in order], [ids[row] for row in order], width=20).logprobs
    assert torch.allclose(other, whole[order], atol=1e-6)
