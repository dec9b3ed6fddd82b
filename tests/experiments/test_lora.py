"""Laws of low-rank adapters: nothing changes until they learn, they alone do, and what is saved needs no peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from apportion.experiments.lora import merge_adapters, save_policy, without_dropout
from apportion.experiments.policies import PretrainedPolicy, symbol_tokenizer
from apportion.grpo.checkpoint import load_checkpoint, save_checkpoint
from apportion.grpo.forward import score_completions
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import sample_groups
from apportion.grpo.update import OptimConfig, build_optimizer, optimizer_step
from apportion.verifiers import InputError

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
KINDS = {
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.2, "resid_pdrop": 0.2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3},
}


def saved(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    symbol_tokenizer(("a", "b")).save_pretrained(folder)
    return str(folder)


PROMPTS = [[3, 40, 41, 60, 70], [3, 80, 90]]
TEXTS = [[50, 51, 52, 53, 54, 1], [61, 62, 1]]


def scores(policy: Policy) -> torch.Tensor:
    return score_completions(policy, PROMPTS, TEXTS, width=6).logprobs


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    scores(policy).square().sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_score_and_no_gradient(tmp_path: Path, kind: str) -> None:
    """Also where the model has dropout, which its training mode would switch on."""
    path = saved(tmp_path, kind)
    plain, checkpointed = (PretrainedPolicy(path, gradient_checkpointing=on).build() for on in (False, True))
    assert checkpointed.model.training
    assert torch.equal(scores(plain), scores(checkpointed))
    expected, found = gradients(plain), gradients(checkpointed)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    sampled = [sample_groups(p, PROMPTS, [1, 2], group_size=1, max_new_tokens=12) for p in (plain, checkpointed)]
    assert sampled[0] == sampled[1]


def test_no_dropout_is_left_anywhere(tmp_path: Path) -> None:
    path = saved(tmp_path, "opt")
    model = AutoModelForCausalLM.from_pretrained(path).train()
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(without_dropout(model)(ids).logits, model(ids).logits)


def test_half_precision_weights_and_forwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path, "llama")
    exact = scores(PretrainedPolicy(path).build())
    assert not caplog.records
    mixed = PretrainedPolicy(path, precision="bf16").build()
    assert mixed.model.dtype == torch.float32
    torch.testing.assert_close(scores(mixed), exact, rtol=0.1, atol=0.1)
    assert not torch.equal(scores(mixed), exact)
    pure = PretrainedPolicy(path, dtype="bfloat16").build()
    torch.testing.assert_close(scores(pure), exact, rtol=0.1, atol=0.1)
    assert scores(pure).dtype == torch.float32
    assert "policy.dtype=bfloat16: most updates are lost to rounding" in caplog.text


def test_both_attentions_of_torch_agree_and_a_missing_one_is_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    fused, eager = (PretrainedPolicy(path, attn_implementation=name).build() for name in ("sdpa", "eager"))
    torch.testing.assert_close(scores(fused), scores(eager), rtol=1e-4, atol=1e-5)
    if not torch.cuda.is_available():
        with pytest.raises(
            InputError, match=r"^policy\.attn_implementation=flash_attention_2: .*not installed"
        ) as caught:
            PretrainedPolicy(path, attn_implementation="flash_attention_2").build()
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"policy\.path=.*; leave policy\.attn_implementation=null") as caught:
        PretrainedPolicy(path, attn_implementation="fast").build()
    assert "\n" not in str(caught.value)


def adapted(path: str, **options: Any) -> Policy:
    pytest.importorskip("peft")
    return PretrainedPolicy(path, lora={"r": 2, **options.pop("lora", {})}, **options).build()


def learn(policy: Policy, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        scores(policy).sum().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_the_model_learn_alone_and_are_saved_as_plain_weights(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path / "base", kind)
    base, policy = PretrainedPolicy(path).build(), adapted(path)
    assert torch.equal(scores(policy), scores(base))
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    learn(policy)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.model.named_parameters() if name in frozen)
    after = scores(policy).detach()
    assert (after - scores(base)).abs().max() > 0.1
    save_policy(policy, tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("*adapter*"))
    again = PretrainedPolicy(str(tmp_path / "merged")).build()
    torch.testing.assert_close(scores(again), after, rtol=1e-4, atol=1e-4)
    assert again.model.state_dict().keys() == base.model.state_dict().keys()
    assert type(again.model) is type(base.model)


@pytest.mark.integration
def test_the_first_weights_of_adapters_follow_from_their_seed(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    first, again, other = (adapted(path, lora={"seed": seed}).model.state_dict() for seed in (0, 0, 1))
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.integration
def test_adapters_checkpoint_and_work_over_half_precision_weights(tmp_path: Path, caplog: Any) -> None:
    path = saved(tmp_path, "llama")
    plain = adapted(path, dtype="bfloat16")
    assert not caplog.records
    assert {p.dtype for p in plain.model.parameters() if p.requires_grad} == {torch.float32}
    saving = adapted(path, dtype="bfloat16", gradient_checkpointing=True)
    for policy in (plain, saving):
        learn(policy, 1)
    expected, found = gradients(plain), gradients(saving)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0.05, atol=0.05)


@pytest.mark.integration
def test_a_copy_taken_before_learning_stays_the_reference(tmp_path: Path) -> None:
    policy = adapted(saved(tmp_path, "qwen3"))
    reference = copy.deepcopy(policy.model)
    before = scores(policy).detach()
    learn(policy)
    kept = Policy(reference, policy.tokenizer, policy.encode, policy.eos_ids)
    assert torch.equal(scores(kept), before)


@pytest.mark.integration
def test_a_checkpoint_of_adapters_goes_on_bit_for_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "base", "llama")

    def begin() -> tuple[Policy, Any, Any]:
        policy = adapted(path)
        return policy, *build_optimizer(policy, OptimConfig(lr=0.05), total_steps=4)

    def step(policy: Policy, optimizer: Any, schedule: Any) -> None:
        scores(policy).sum().neg().backward()
        optimizer_step(policy, optimizer, schedule, max_grad_norm=1.0, step=1)

    policy, optimizer, schedule = begin()
    step(policy, optimizer, schedule)
    state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    checkpoint = save_checkpoint(tmp_path / "checkpoints", "step_1", policy.model, state)
    resumed, its_optimizer, its_schedule = begin()
    found = load_checkpoint(checkpoint, resumed.model)
    its_optimizer.load_state_dict(found["optimizer"])
    its_schedule.load_state_dict(found["schedule"])
    for _ in range(2):
        step(policy, optimizer, schedule)
        step(resumed, its_optimizer, its_schedule)
    assert torch.equal(scores(resumed), scores(policy))
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), policy.model.parameters()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_dropout": 0.1}, r"policy\.lora\.lora_dropout=0\.1: must be 0\.0"),
        ({"inference_mode": True}, r"policy\.lora\.inference_mode=True: must be False"),
    ],
)
def test_adapters_that_would_not_train_as_they_sample_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    path = saved(tmp_path, "llama")
    with pytest.raises(InputError, match=said):
        PretrainedPolicy(path, lora=options).build()


@pytest.mark.integration
@pytest.mark.parametrize("options", [{"rank": 3}, {"target_modules": ["nowhere"]}, {"r": 0}])
def test_options_that_peft_refuses_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    path = saved(tmp_path, "llama")
    with pytest.raises(InputError, match=r"^policy\.lora: ") as caught:
        PretrainedPolicy(path, lora=options).build()
    assert "\n" not in str(caught.value)


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"^policy\.lora: needs peft .*pip install 'apportion\[lora\]'"):
        PretrainedPolicy(saved(tmp_path, "llama"), lora={"r": 2}).build()


def test_the_key_tells_adapters_and_templates_apart_and_stays_without_them() -> None:
    plain = PretrainedPolicy("owner/name").key
    assert not {"lora", "chat_kwargs"} & plain.keys()
    assert PretrainedPolicy("owner/name", lora={"r": 2}).key == {**plain, "lora": {"r": 2}}
    assert PretrainedPolicy("owner/name", chat_kwargs={"think": False}).key == {
        **plain,
        "chat_kwargs": {"think": False},
    }
    json.dumps(PretrainedPolicy("owner/name", lora={"r": 2}).key)


def test_a_model_without_adapters_is_left_alone_by_merging(tmp_path: Path) -> None:
    policy = PretrainedPolicy(saved(tmp_path, "llama")).build()
    before = scores(policy)
    merge_adapters(policy.model)
    assert torch.equal(scores(policy), before)
