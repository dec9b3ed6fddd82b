"""Attention over packed tokens, inside any transformers model whose attention can be exchanged.

The model runs as it is, on one row of packed tokens; only the function by which it attends is another one for the time
of the forward. Under gradient checkpointing the layers run again in the backward pass, long after that: what is
checkpointed carries the exchange with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from . import varlen
from .attention import Attend, can_exchange, exchanged, register, unwrapped
from .packing import Packed

__all__ = ["NotPackable", "packed_attention", "refusal"]

NAME = "apportion_packed"
LAYERS = {"full_attention", "sliding_attention"}


class NotPackable(Exception):
    """The model mixes tokens in a way that the packed layout does not know; the message says which."""


def refusal(model: Any) -> str | None:
    """Why the model cannot run on packed tokens, as far as its class and configuration tell; None where it can."""
    from transformers import PreTrainedModel

    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        return "it is no transformers model"
    config = inner.config.get_text_config()
    if not can_exchange(inner):
        return "its attention cannot be exchanged"
    if inner._is_stateful or set(getattr(config, "layer_types", None) or LAYERS) - LAYERS:
        return "not all of its layers are attention"
    missing = {"position_ids", "logits_to_keep"} - inspect.signature(inner.forward).parameters.keys()
    if missing:
        return f"its forward does not take {', '.join(sorted(missing))}"
    adapters = getattr(model, "active_peft_config", None)
    if adapters is not None and getattr(adapters, "is_prompt_learning", False):
        return "its adapter puts tokens before the prompt"
    return None


@contextmanager
def packed_attention(model: Any, packed: Packed) -> Iterator[None]:
    """The model attends within packed rows inside the block, and in what the block's checkpoints run again.

    Raises:
        NotPackable: the forward attended otherwise than once in each layer.
    """
    inner = unwrapped(model)
    run = _Run(packed, _attend_of(inner.config.get_text_config()._attn_implementation))
    with _checkpoints(inner, run), _running(inner, run):
        yield
        layers = inner.config.get_text_config().num_hidden_layers
        if run.calls != layers:
            raise NotPackable(f"it attended {run.calls} times in {layers} layers")


@contextmanager
def _running(model: Any, run: _Run) -> Iterator[None]:
    _register()
    token = _RUN.set(run)
    try:
        with exchanged(model, NAME):
            yield
    finally:
        _RUN.reset(token)


@contextmanager
def _checkpoints(model: Any, run: _Run) -> Iterator[None]:
    """What gradient checkpointing runs again attends as it did the first time."""
    layers = [part for part in model.modules() if vars(part).get("gradient_checkpointing")]
    before = [(layer, layer._gradient_checkpointing_func) for layer in layers]

    def carrying(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any) -> Any:
            def again(*inputs: Any) -> Any:
                with _running(model, run):
                    return function(*inputs)

            return checkpoint(again, *args)

        return call

    try:
        for layer, checkpoint in before:
            layer._gradient_checkpointing_func = carrying(checkpoint)
        yield
    finally:
        for layer, checkpoint in before:
            layer._gradient_checkpointing_func = checkpoint


@cache
def _register() -> None:
    register(NAME, _attention)


def _attend_of(name: str) -> Attend:
    """How the model attends on padded rows; flash attention takes no masks, so sdpa stands in for it there."""
    from transformers import AttentionInterface

    known = AttentionInterface()
    return known["sdpa" if "flash" in name or name not in known else name]


class _Spread(torch.autograd.Function):
    """Packed (N, C) to the queries of all rows (Q, C); backwards a gather, and a sum where a token stands twice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        packed, grad = ctx.packed, grads[0]
        total = grad.index_select(0, packed.place)
        if len(packed.again):
            total.index_add_(0, packed.again, grad.index_select(0, packed.again_place))
        return total, None, None


@dataclass
class _Run:
    """One packed forward: its layout, how the model attends otherwise, and how often it attended."""

    packed: Packed
    attend: Attend
    calls: int = 0
    queries: Tensor = field(init=False)
    keys: Tensor = field(init=False)
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queries = torch.cat([rows.queries.flatten() for rows in self.packed.rows])
        same = all(rows.start is None for rows in self.packed.rows)
        self.keys = self.queries if same else torch.cat([rows.keys.flatten() for rows in self.packed.rows])

    @cached_property
    def sequences(self) -> varlen.Sequences:
        return varlen.sequences(self.packed.spans, self.packed.input_ids.device)

    def window(self, window: int | None) -> int | None:
        """The window, unless it is so wide that all rows fit in."""
        return None if window is None or window >= self.packed.longest else window

    def spread(self, states: Tensor, of_keys: bool) -> list[Tensor]:
        """Packed (N, H, D) to one (R, H, L, D) for each bucket of rows."""
        if of_keys and self.keys is not self.queries:
            flat = states.index_select(0, self.keys)
        else:
            flat = _Spread.apply(states, self.queries, self.packed)
        shapes = [(rows.keys if of_keys else rows.queries).shape for rows in self.packed.rows]
        parts = flat.split([shape.numel() for shape in shapes])
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes)]

    def mask(self, bucket: int, window: int | None) -> Tensor | None:
        """(R, 1, Lq, Lk) bool, or None where plain causal attention does; built once for all layers."""
        rows = self.packed.rows[bucket]
        window = self.window(window)
        if rows.start is None and window is None:
            return None
        if (bucket, window) not in self.masks:
            key = torch.arange(rows.keys.shape[1], device=rows.keys.device)
            start = rows.keys.new_zeros(1) if rows.start is None else rows.start
            query = start[:, None] + torch.arange(rows.queries.shape[1], device=key.device)
            behind = query[:, :, None] - key  # how far the key lies behind the query
            seen = (behind >= 0) & (behind < (self.packed.longest if window is None else window))
            self.masks[bucket, window] = seen[:, None]
        return self.masks[bucket, window]


_RUN: ContextVar[_Run | None] = ContextVar("packed_run", default=None)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of packed tokens (1, H, N, D) for transformers' ``AttentionInterface``: (1, N, H, D)."""
    run = _RUN.get()
    if run is None:
        raise RuntimeError(f"{NAME} attends in packed forwards only")
    _refuse_strange(run, query, attention_mask, options)
    run.calls += 1
    q_flat, k_flat, v_flat = (states[0].transpose(0, 1) for states in (query, key, value))  # (N, H, D)
    if varlen.fits(q_flat, v_flat, options.get("dropout", 0.0)):
        window = run.window(sliding_window)
        return varlen.attend(run.sequences, q_flat, k_flat, v_flat, options.get("scaling"), window)[None], None
    of_rows = zip(run.spread(q_flat, False), run.spread(k_flat, True), run.spread(v_flat, True))
    outputs = [
        run.attend(module, q, k, v, run.mask(bucket, sliding_window), **options)[0].flatten(0, 1)
        for bucket, (q, k, v) in enumerate(of_rows)
    ]
    return torch.cat(outputs).index_select(0, run.packed.place)[None], None


def _refuse_strange(run: _Run, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    if attention_mask is not None or query.shape[2] != run.packed.input_ids.shape[1]:
        raise NotPackable("it masks its attention by itself")
    strange = [name for name, value in options.items() if isinstance(value, Tensor) and name != "position_ids"]
    strange += [name for name in ("softcap", "is_causal") if options.get(name) not in (None, True)]
    if strange:
        raise NotPackable(f"its attention takes {', '.join(strange)}")
