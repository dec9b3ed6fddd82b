"""One token at a time for many rows: the prompts are read once, and keys and values are kept in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from ..verifiers import InputError
from .attention import can_exchange, exchanged, register, unwrapped
from .policy import Policy

__all__ = ["Decoding", "GrowingLayer", "cache_argument", "read_prompts"]

NAME = "apportion_decoding"
ROOM = 16  # tokens; with more of it the keys of a row lie so far apart that reading them takes longer


class GrowingLayer(DynamicLayer):
    """A layer of transformers' ``DynamicCache`` with some room ahead: most tokens are written in place, where the
    other copies everything for each.

    Args:
        keys, values: (N, H, L, D) so far.
        repeats: rows that go on from each of the N.
    """

    def __init__(self, keys: Tensor, values: Tensor, repeats: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._length = keys.shape[2]
        self._all_keys, self._all_values = _widened(keys, repeats), _widened(values, repeats)
        self._look()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens behind the old ones; gives them all."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        while self._length > self._all_keys.shape[2]:
            self._all_keys, self._all_values = _widened(self._all_keys), _widened(self._all_values)
        self._all_keys[:, :, start : self._length] = key_states
        self._all_values[:, :, start : self._length] = value_states
        self._look()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self._length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in rising order."""
        for states in (self._all_keys, self._all_values):
            states[: len(indices), :, : self._length] = states[:, :, : self._length].index_select(0, indices)
        self._all_keys, self._all_values = self._all_keys[: len(indices)], self._all_values[: len(indices)]
        self._look()

    def _look(self) -> None:
        self.keys, self.values = self._all_keys[:, :, : self._length], self._all_values[:, :, : self._length]


def _widened(states: Tensor, repeats: int = 1) -> Tensor:
    """(N, H, L, D) to (N * repeats, H, L + ROOM, D)."""
    rows, heads, length, width = states.shape
    wider = states.new_empty(rows, repeats, heads, length + ROOM, width)
    wider[:, :, :, :length] = states[:, None]
    return wider.flatten(0, 1)


@dataclass
class Decoding:
    """The cache and positions of the rows still in the batch.

    Args:
        cache_argument: name by which the model takes the cache.
        attention_mask: (rows, L), or ready to be added (rows, 1, 1, L), as long as rows can get; None: none is padded.
        position: (rows,) of the next token.
        length: tokens read so far, padding included.
        plain: all layers hold all tokens, and the model's attention can be exchanged.
    """

    cache: Any
    cache_argument: str
    attention_mask: Tensor | None
    position: Tensor
    length: int
    plain: bool

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, which are in rising order."""
        self.cache.batch_select_indices(rows)
        self.position = self.position[rows]
        if self.attention_mask is not None:
            self.attention_mask = self.attention_mask[rows]

    def advance(self, policy: Policy, token: Tensor) -> Tensor:
        """Feed one token a row; logits (rows, V) of the next."""
        self.length += 1
        with policy.autocast():
            output = policy.model(
                input_ids=token[:, None],
                attention_mask=None if self.attention_mask is None else self.attention_mask[..., : self.length],
                position_ids=self.position[:, None],
                use_cache=True,
                **{self.cache_argument: self.cache},
            )
        self.position = self.position + 1
        return output.logits[:, -1]

    @contextmanager
    def attending(self, policy: Policy) -> Iterator[None]:
        """On CPU two plain products beat the fused kernels for a single query."""
        if not self.plain or policy.device.type != "cpu":
            yield
            return
        _register()
        with exchanged(policy.model, NAME):
            yield


@cache
def _register() -> None:
    register(NAME, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one query a row (B, H, 1, D) to its keys (B, H', L, D), where H may be a multiple of H'."""
    strange = any(isinstance(value, Tensor) and name != "position_ids" for name, value in options.items())
    if query.shape[2] != 1 or strange:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, _, width = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, width) * (width**-0.5 if scaling is None else scaling)
    scores = grouped @ key.transpose(2, 3)
    if attention_mask is not None:
        scores = scores + attention_mask
    output = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def read_prompts(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, room: int
) -> tuple[Tensor, Decoding]:
    """One forward over the N prompts (left-padded), then everything repeated for the group.

    Args:
        room: tokens that a completion may have.

    Returns:
        Logits (N * group_size, V) of the first token, and the state to go on from.
    """
    longest, device, model = max(map(len, prompts)), policy.device, policy.model
    input_ids = torch.full((len(prompts), longest), policy.eos_ids[0], dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    padded = not bool(mask.all())
    filled, argument = DynamicCache(config=unwrapped(model).config), cache_argument(unwrapped(model))
    with policy.autocast():
        output = model(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device) if padded else None,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0).to(device),
            use_cache=True,
            logits_to_keep=1,
            **{argument: filled},
        )
    plain = _repeat(policy, filled, group_size) and can_exchange(model)
    position = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(group_size)
    kept = functional.pad(mask, (0, room), value=1).to(device).repeat_interleave(group_size, dim=0) if padded else None
    if kept is not None and plain:  # once for all steps and layers
        kept = torch.zeros(kept.shape, device=device).masked_fill(kept == 0, -torch.inf)[:, None, None]
    state = Decoding(filled, argument, kept, position, longest, plain)
    return output.logits[:, -1].repeat_interleave(group_size, dim=0), state


def _repeat(policy: Policy, filled: Any, group_size: int) -> bool:
    """Repeat each row of the cache for its group; whether all layers hold all tokens."""
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in filled.layers):
        raise InputError(
            f"policy: {type(unwrapped(policy.model)).__name__} keeps a state that cannot be shared among the samples "
            "of a prompt; use a model with attention layers"
        )
    for index, layer in enumerate(filled.layers):
        if type(layer) is DynamicLayer:
            filled.layers[index] = GrowingLayer(layer.keys, layer.values, group_size)
        else:
            layer.batch_repeat_interleave(group_size)
    return all(isinstance(layer, GrowingLayer) for layer in filled.layers)


def cache_argument(model: Any) -> str:
    """Newer transformers call the argument ``cache``, older ones ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
