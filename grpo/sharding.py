"""A model whose weights, gradients and optimiser state are split over the processes (FSDP2).

Only the optimiser's forwards and backwards run on shards: layer by layer the whole weights are gathered, and each
process keeps its part of the summed gradient. Whatever runs without gradient (sampling, scoring) runs inside
:func:`whole`, where each process has all weights and none waits for another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..verifiers import InputError
from .attention import unwrapped
from .files import one_line

__all__ = ["Shards", "is_sharded", "load_optimizer", "optimizer_state", "shard", "whole"]

_RESHARD: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # sharded models, and whether their layers give up weights


@dataclass(frozen=True)
class Shards:
    """A sharded model, and what whole copies of it look like.

    Args:
        model: the model; it was sharded in place.
        outline: the same modules without weights (on the device ``meta``).
    """

    model: Any
    outline: Any

    def gathered(self, *, keep: bool) -> Any | None:
        """A whole copy on the CPU. All processes take part; those that do not ``keep`` it get None."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            value = _full(parameter.detach())
            if keep:
                weights[name] = _compact(value)
        if not keep:
            return None
        copied = {id(p): nn.Parameter(weights[n], p.requires_grad) for n, p in self.outline.named_parameters()}
        return copy.deepcopy(self.outline, copied)


def shard(model: Any, *, reshard: bool) -> Shards:
    """Split the weights of ``model`` over all processes, in place: each decoder layer, and what is left.

    The gradients are summed over the processes, not averaged.

    Args:
        model: the same in every process; a transformers model, on this process's device.
        reshard: see :class:`apportion.grpo.parallel.ParallelConfig`.

    Raises:
        InputError: it cannot be split.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    outline = _outline(model)
    try:
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise InputError(
            f"parallel.shard=true: this policy cannot be sharded ({one_line(error)}); set it to false"
        ) from error
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the only kind that Gloo knows
    _RESHARD[model] = reshard
    return Shards(model, outline)


def is_sharded(model: Any) -> bool:
    """Whether :func:`shard` was called on it."""
    return model in _RESHARD


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """Each process has all weights of ``model`` inside the block; all enter it together. Not for training.

    Forwards inside may differ in number from process to process.
    """
    if not is_sharded(model) or not any(_is_shard(parameter) for parameter in model.parameters()):
        yield
        return
    modules = _sharded_modules(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)  # some scorers derive by embeddings
    model.set_requires_gradient_sync(False)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(_RESHARD[model] or module is model, recurse=False)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """``optimizer.state_dict()`` as if nothing were sharded, whole tensors on the CPU; all processes take part."""
    state: dict[str, Any] = optimizer.state_dict()
    gathered = {
        index: {name: _compact(_full(value)) if _is_shard(value) else value for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": gathered}


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load what :func:`optimizer_state` or a plain optimiser's ``state_dict`` gave; each process takes its part."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(value: Any, parameter: Tensor) -> Any:
        same = isinstance(value, Tensor) and _is_shard(parameter) and value.shape == parameter.shape
        return _part_of(value, parameter) if same else value

    own = {
        index: {name: part(value, parameters[index]) for name, value in entries.items()}
        for index, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": own})


def _layers(model: Any) -> list[nn.Module]:
    """The model's repeated blocks; transformers models name their classes."""
    names = set(getattr(unwrapped(model), "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _sharded_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "unshard")]


def _outline(model: Any) -> Any:
    """The model with parameters on the device ``meta``; weights that are tied stay tied."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def _is_shard(value: Any) -> bool:
    return hasattr(value, "device_mesh")


def _full(value: Any) -> Tensor:
    result: Tensor = value.full_tensor() if _is_shard(value) else value
    return result


def _compact(value: Tensor) -> Tensor:
    """A copy on the CPU without the padding behind what was gathered from shards of unequal size."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def _part_of(value: Tensor, parameter: Any) -> Tensor:
    """This process's part of a whole tensor, laid out as the parameter is."""
    from torch.distributed.tensor import distribute_tensor

    there = value.to(parameter.device)
    return distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)
