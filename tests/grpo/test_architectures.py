"""Sampling and scoring agree for any causal language model: other positions, windows, caches and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from apportion.grpo.forward import score_completions
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import sample_groups
from apportion.verifiers import InputError

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
PROMPTS = [[3, 4, 5, 6, 8, 10, 11, 12, 13, 14], [3, 4], [20, 21, 2, 23, 24]]


def build(kind: str, **options: Any) -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **options})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    return Policy(model, None, lambda text: [], (2, 7, 9))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),  # learned positions
        ("bloom", {"n_head": 4, "n_layer": 2}),  # positions as a bias
        ("mistral", {"sliding_window": 6}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 6}),  # windows in some layers only
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    ],
)
def test_log_probabilities_of_sampling_and_of_training_agree(kind: str, options: dict[str, Any]) -> None:
    policy = build(kind, **options)
    rows = sample_groups(policy, PROMPTS, list(range(12)), group_size=4, max_new_tokens=20)
    read = [prompt for prompt in PROMPTS for _ in range(4)]
    scored = score_completions(policy, read, [row.ids for row in rows], width=20)
    for index, row in enumerate(rows):
        assert row.logprobs == pytest.approx(scored.logprobs[index, : len(row.ids)].tolist(), abs=2e-5)
        (alone,) = sample_groups(policy, [read[index]], [index], group_size=1, max_new_tokens=20)
        assert alone.ids == row.ids
    assert policy.max_positions == 128


def test_a_model_whose_state_cannot_be_shared_is_refused() -> None:
    with pytest.raises(InputError, match="MambaForCausalLM keeps a state that cannot be shared"):
        sample_groups(build("mamba", state_size=4), PROMPTS, [1, 2, 3], group_size=1, max_new_tokens=2)
