"""The weights of a policy as an inference engine takes them: whole, and under the names of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...verifiers import InputError

__all__ = ["PolicyWeights"]


class PolicyWeights:
    """Names and tensors of a model, made one at a time, each time anew.

    Weights that are tied come once, shards of FSDP2 are put together, and adapters of LoRA are added to the weights
    that they adapt; the model itself stays as it is (merging and unmerging would move it by rounding).

    Args:
        model: any ``AutoModelForCausalLM``, or one of peft around it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        adapted = {name: module for name, module in self._model.named_modules() if hasattr(module, "get_delta_weight")}
        for name, parameter in self._model.named_parameters():
            owner, _, rest = name.partition(".base_layer.")
            module = adapted.get(owner)
            if "original_module." in name or (module is None and _belongs_to(name, adapted)):
                continue  # the adapters themselves, and what peft replaced
            value = _whole(parameter.detach())
            if module is not None and rest == "weight":
                value = value + _delta(module, owner).to(value.dtype)
            yield _plain(name), value


def _belongs_to(name: str, adapted: dict[str, Any]) -> bool:
    """Whether a parameter lies inside an adapted module."""
    return any(name.startswith(f"{owner}.") for owner in adapted)


def _whole(value: Tensor) -> Tensor:
    """A tensor whose shards lie in several processes, put together; every process has to take part."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _delta(module: Any, name: str) -> Tensor:
    """What the active adapters add to a weight."""
    embedded = getattr(module, "lora_embedding_A", {})
    used = [adapter for adapter in module.active_adapters if adapter in module.lora_A or adapter in embedded]
    kinds = {"DoRA": getattr(module, "use_dora", {}), "a bias of its own": getattr(module, "lora_bias", {})}
    for kind, flags in kinds.items():
        if any(flags.get(adapter) for adapter in used):
            raise InputError(
                f"policy: {name} is adapted by {kind}, which rollout engines cannot take over; use engine=native"
            )
    deltas = [_whole(module.get_delta_weight(adapter)) for adapter in used]
    return sum(deltas[1:], deltas[0]) if deltas else module.get_base_layer().weight.new_zeros(())


def _plain(name: str) -> str:
    """The name in the checkpoint, without what peft, DDP and ``torch.compile`` put into it.

    >>> _plain("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapped in ("module.", "base_model.model."):
        name = name.removeprefix(wrapped)
    for inserted in ("_orig_mod.", "_checkpoint_wrapped_module.", "modules_to_save.default."):
        name = name.replace(inserted, "")
    return name.replace(".base_layer", "")
