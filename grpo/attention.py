"""Exchanging the function by which a transformers model attends, for the time of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

__all__ = ["Attend", "can_exchange", "exchanged", "register", "unwrapped"]

Attend = Callable[..., tuple[Tensor, Any]]  # (module, query, key, value, mask, ...) to (B, L, H, D)


def unwrapped(model: Any) -> Any:
    """The transformers model inside wrappers for several processes or adapters."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def can_exchange(model: Any) -> bool:
    """Whether the model asks transformers for its attention by name, and by another than ``eager``."""
    inner: Any = unwrapped(model)
    if not getattr(inner, "_supports_attention_backend", False):
        return False
    return inner.config.get_text_config()._attn_implementation not in (None, "eager")


@contextmanager
def exchanged(model: Any, name: str) -> Iterator[None]:
    """The model attends by the function registered as ``name`` inside the block."""
    owned = (vars(part).get("config") for part in unwrapped(model).modules())
    configs = {id(config): config for config in owned if config is not None}.values()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def register(name: str, attend: Attend) -> None:
    """Make ``attend`` known by ``name``, to models that then build no attention mask of their own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
