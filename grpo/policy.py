"""A causal language model with the facts that sampling and training need of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["Policy", "Precision"]

Precision = Literal["fp32", "bf16"]


@dataclass
class Policy:
    """Any ``AutoModelForCausalLM`` and its tokenizer.

    Args:
        model: called as ``model(input_ids=..., position_ids=..., ...)``, returns ``logits``.
        tokenizer: decodes ids; not used to encode completions, ever.
        encode: prompt text to ids (plain, or through the chat template).
        eos_ids: every id that ends a completion.
        precision: ``bf16`` runs forwards under autocast; the weights stay float32.
    """

    model: Any
    tokenizer: Any
    encode: Callable[[str], list[int]]
    eos_ids: tuple[int, ...]
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise ValueError("the policy has no end token; set policy.eos_token")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, not {self.precision!r}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model can read, or None where it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of every forward."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()
