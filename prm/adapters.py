"""Low-rank adapters by peft: put in before training, merged into the weights after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..verifiers import InputError

__all__ = ["add_lora", "head_names", "load_trainable", "merge_lora", "save_trainable"]

FILE = "trainable.safetensors"


def add_lora(model: Any, options: Mapping[str, Any], seed: int) -> Any:
    """Put adapters into a transformers model in place; the rest but its head is frozen. Returns what merges them.

    Args:
        model: a transformers model.
        options: of ``peft.LoraConfig`` (Hu et al. 2021, arXiv 2106.09685).
        seed: of the adapters' first weights.

    Raises:
        InputError: peft is not installed, or refuses the options.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError(f"lora: needs peft ({error}); pip install 'apportion[lora]', or set lora=null") from error
    head = head_names(model)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted = get_peft_model(model, LoraConfig(**options))
    except (TypeError, ValueError) as error:
        raise InputError(f"lora: {' '.join(str(error).split())[:200]}") from error
    for name, weight in model.named_parameters():
        if name in head:
            weight.requires_grad_(True)
    return adapted


def head_names(model: Any) -> set[str]:
    """Weights outside the body of a classifier; none of a language model, whose output layer may be its embedding."""
    if model.get_output_embeddings() is not None:
        return set()
    prefix = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(prefix)}


def merge_lora(adapted: Any) -> None:
    """Add the adapters to the weights that they adapt, in place, and take them out."""
    adapted.merge_and_unload()


def save_trainable(model: nn.Module, folder: Path) -> None:
    """Write the weights that are trained, and no others."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in _trainable(model).items()}, str(folder / FILE))


def load_trainable(model: nn.Module, folder: Path) -> None:
    """Read back what :func:`save_trainable` wrote."""
    from safetensors.torch import load_file

    found, wanted = load_file(str(folder / FILE)), _trainable(model)
    if found.keys() != wanted.keys():
        raise InputError(f"{folder}: holds other adapters than lora makes; resume with the same options")
    model.load_state_dict(found, strict=False)


def _trainable(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
