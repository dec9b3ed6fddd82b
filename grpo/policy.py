"""A causal language model with the facts that sampling and training need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..verifiers import InputError

__all__ = ["ForwardCounter", "Policy", "Precision"]

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
        packing: score and train on real tokens alone where the model allows it (:mod:`apportion.grpo.packing`); False
            pads rows to equal length.
    """

    model: Any
    tokenizer: Any
    encode: Callable[[str], list[int]]
    eos_ids: tuple[int, ...]
    precision: Precision = "fp32"
    packing: bool = True

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise InputError(
                "policy: the model names no end token, so no completion would end; set eos_token_id in its "
                "generation_config.json"
            )
        if self.precision not in ("fp32", "bf16"):
            raise InputError(f"policy.precision={self.precision!r}: must be fp32 or bf16")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model can read, or None where it does not say."""
        config = self.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return getattr(text, "max_position_embeddings", None)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of every forward."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


class ForwardCounter:
    """Counts the forward calls of a model, and the tokens that go through it and through models beside it."""

    def __init__(self) -> None:
        self._count, self._tokens = 0, 0

    @contextmanager
    def counting(self, model: Any, *beside: Any) -> Iterator[None]:
        """Count inside the block; of the models ``beside`` the tokens alone."""
        handles = [model.register_forward_hook(self._add_call)]
        handles += [one.register_forward_hook(self._add_tokens, with_kwargs=True) for one in (model, *beside)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> float:
        """Forwards since the last call."""
        taken, self._count = float(self._count), 0
        return taken

    def take_tokens(self) -> float:
        """Tokens since the last call, padding included."""
        taken, self._tokens = float(self._tokens), 0
        return taken

    def _add_call(self, *_: Any) -> None:
        self._count += 1

    def _add_tokens(self, _: Any, given: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        ids = named.get("input_ids", given[0] if given else None)
        self._tokens += 0 if ids is None else ids.numel()
