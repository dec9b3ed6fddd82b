"""Low-rank adapters on a policy: put in before training, merged into its weights where it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..grpo.policy import Policy
from ..grpo.seeds import named_seed
from ..prm.adapters import add_lora
from ..verifiers import InputError

__all__ = ["add_policy_lora", "merge_adapters", "save_policy", "without_dropout"]

DEFAULTS = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
FIXED = {"lora_dropout": 0.0, "inference_mode": False}  # what is sampled from is what is trained


def add_policy_lora(model: Any, options: Mapping[str, Any]) -> None:
    """Put adapters into the model, which stays what it was until they learn; only they are trained from now on.

    Args:
        model: a transformers model.
        options: of ``peft.LoraConfig`` (Hu et al. 2021, arXiv 2106.09685) in place of :data:`DEFAULTS`, and ``seed``
            of the adapters' first weights.

    Raises:
        InputError: peft is missing or refuses the options; the message begins with ``policy.lora``.
    """
    given = {**DEFAULTS, **options}
    seed = given.pop("seed", 0)
    for name, value in FIXED.items():
        if given.get(name, value) != value:
            raise InputError(f"policy.lora.{name}={given[name]}: must be {value}; adapters train as they sample")
    try:
        add_lora(model, given, named_seed(seed, "initial weights") % 2**63)
    except InputError as error:
        raise InputError(f"policy.{error}") from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("policy.lora: trains nothing; check target_modules")


def merge_adapters(model: Any) -> None:
    """Add every adapter to the weights that it adapts, in place, and take it out. Without any nothing happens."""
    if not any(hasattr(module, "get_base_layer") for module in model.modules()):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    model.requires_grad_(True)


def save_policy(policy: Policy, folder: Path) -> None:
    """Leave a folder that ``from_pretrained`` reads without peft; the policy has its adapters merged after it."""
    merge_adapters(policy.model)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch all dropout off, also in training mode: scores of a text must be those that it was sampled with."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:  # such as attention_dropout, which some pass on
                setattr(module, name, 0.0)
    return model
