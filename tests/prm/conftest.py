"""Tokenizers and random language models so small that a test makes its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

SPECIAL = ["<pad>", "<eos>", "<bos>", "<extra_0>"]
CORPUS = [
    "Step 1: 12 + 7 = 19.\nStep 2: 19 * 3 = 57.\nAnswer: 57.\n\nThe cat sat.\n\nOn the mat.",
    "naïve café 合計は十九です 世界 👩\u200d👩\u200d👧 📷 ok 💩. ки яблоки",
]


def byte_level(*, bos: bool = False, whole: bool = False, chat: bool = False) -> Any:
    """Byte-level BPE; ``whole`` lets merges cross lines and words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=["<extra_0>"],
    )
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
        )
    return tokenizer


def make_backbone(kind: str, tokenizer: Any, seed: int = 0, **options: Any) -> Any:
    """A random causal language model with weights large enough for its outputs to differ."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=1, pad_token_id=1, **{**shape, **options}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="session")
def tokenizers() -> Callable[..., Any]:
    return byte_level


@pytest.fixture(scope="session")
def backbones() -> Callable[..., Any]:
    return make_backbone
