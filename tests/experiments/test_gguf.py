"""Laws of weights from a GGUF file: quantised, they are the model's up to rounding, and are saved as any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from apportion.experiments.lora import save_policy
from apportion.experiments.policies import PretrainedPolicy
from apportion.grpo.forward import score_completions
from apportion.grpo.policy import Policy

gguf = pytest.importorskip("gguf")

HEADS, WIDTH = 2, 32
TOKENS = ["<s>", "<end>", "<pad>", "<u>", "<a>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ1"]
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"} | {
    f"model.layers.0.{theirs}.weight": f"blk.0.{ours}.weight" for theirs, ours in LAYER.items()
}


def llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    config = LlamaConfig(vocab_size=len(TOKENS), max_position_embeddings=64, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.2)
    return model


def interleaved(weight: np.ndarray) -> np.ndarray:
    """GGUF orders the halves of a rotated head in turn."""
    return weight.reshape(HEADS, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing but ``m.gguf``: a tiny Llama in 8 bits and its tokenizer."""
    (tmp_path / "gguf").mkdir()
    file = gguf.GGUFWriter(tmp_path / "gguf" / "m.gguf", "llama")
    file.add_context_length(64)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(WIDTH)
    file.add_block_count(1)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(len(TOKENS))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(TOKENS)
    file.add_token_types([3] * 5 + [1] * (len(TOKENS) - 5))
    file.add_token_merges(["Ġ 1"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_pad_token_id(2)
    file.add_chat_template("{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>")
    for name, value in llama().state_dict().items():
        if name in NAMES:
            array = value.numpy()
            array = interleaved(array) if "q_proj" in name or "k_proj" in name else array
            kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim == 2 else None
            stored = array if kind is None else gguf.quants.quantize(np.ascontiguousarray(array), kind)
            file.add_tensor(NAMES[name], stored, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return tmp_path / "gguf"


def scores(policy: Policy) -> torch.Tensor:
    return score_completions(policy, [policy.encode("a 1")], [[70, 71, 261, 1]], width=4).logprobs


def test_a_quantised_file_is_the_model_up_to_rounding_with_its_tokenizer_and_template(folder: Path) -> None:
    policy = PretrainedPolicy(str(folder), gguf_file="m.gguf").build()
    expected = llama().state_dict()
    found = policy.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - value).abs().max() <= value.abs().max() / 127
    assert policy.encode("a 1") == [3, TOKENS.index("a"), TOKENS.index("Ġ1"), 4]
    assert policy.eos_ids == (1,)


def test_it_is_saved_as_plain_weights(folder: Path, tmp_path: Path) -> None:
    policy = PretrainedPolicy(str(folder), gguf_file="m.gguf").build()
    save_policy(policy, tmp_path / "saved")
    assert torch.equal(scores(PretrainedPolicy(str(tmp_path / "saved")).build()), scores(policy))


@pytest.mark.integration
def test_it_takes_adapters(folder: Path) -> None:
    pytest.importorskip("peft")
    plain = PretrainedPolicy(str(folder), gguf_file="m.gguf").build()
    adapted = PretrainedPolicy(str(folder), gguf_file="m.gguf", lora={"r": 2}).build()
    assert torch.equal(scores(adapted), scores(plain))
    scores(adapted).sum().backward()
    assert all(("lora_" in name) == (p.grad is not None) for name, p in adapted.model.named_parameters())
