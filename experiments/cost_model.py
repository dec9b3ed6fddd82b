"""What a pass of a language model costs: operations, bytes, seconds and memory. Nothing here knows strategies.

The estimates are rooflines: a pass takes the time of its arithmetic at a share of the peak, decoding the longer of
that and of the time to read weights and cache, and every layer that is called adds a fixed time on top. Transfers
between GPUs are not modelled; the shares of the peak are as runs reach them, so that they contain the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..verifiers import InputError

__all__ = ["Bytes", "Decoding", "Hardware", "Memory", "ModelSize", "decode", "model_size", "training_memory"]

# Of published models: parameters, layers, hidden size, numbers in a token's keys of one layer, vocabulary, tied head.
_KNOWN = (
    (1.35e8, 30, 576, 192, 49_152, True),
    (4.94e8, 24, 896, 128, 151_936, True),
    (1.54e9, 28, 1536, 256, 151_936, True),
    (3.09e9, 36, 2048, 256, 151_936, True),
    (7.62e9, 28, 3584, 512, 152_064, False),
    (1.48e10, 48, 5120, 1024, 152_064, False),
    (3.28e10, 64, 5120, 1024, 152_064, False),
    (7.27e10, 80, 8192, 1024, 152_064, False),
)


@dataclass(frozen=True)
class ModelSize:
    """What a decoder costs depends on.

    Args:
        params: all parameters.
        layers, hidden_size: of the decoder; queries are taken to be as wide as the hidden states.
        kv_size: numbers in the keys of one token in one layer, which is key heads times their size.
        vocabulary: ids.
        tied: input and output embeddings are one matrix.
    """

    params: float
    layers: int
    hidden_size: int
    kv_size: int
    vocabulary: int
    tied: bool = True

    @property
    def head(self) -> float:
        """Weights of the vocabulary projection."""
        return float(self.vocabulary * self.hidden_size)

    @property
    def body(self) -> float:
        """Weights that every token is multiplied with, the projection aside."""
        return self.params - self.head * (1 if self.tied else 2)

    def forward_flops(self, tokens: float, *, context: float, predicted: float | None = None) -> float:
        """``2 P`` operations a token, and ``4 L H c`` for attention over a mean context of ``c`` tokens.

        Args:
            tokens: that run through the decoder.
            context: mean number of tokens that one looks at.
            predicted: positions whose next token is predicted; None: all.

        >>> ModelSize(10, 1, 1, 1, 4).forward_flops(3, context=0)
        60.0
        """
        attention = 4.0 * self.layers * self.hidden_size * context
        return tokens * (2.0 * self.body + attention) + 2.0 * self.head * (tokens if predicted is None else predicted)

    def cache_bytes(self, bytes_each: float) -> float:
        """Of the keys and values of one token."""
        return 2.0 * self.layers * self.kv_size * bytes_each


@dataclass(frozen=True)
class Hardware:
    """One device, and the share of its peaks that is reached.

    Args:
        flops: peak operations a second, of dense matrix products in the type of the forwards.
        bandwidth: of its memory, bytes a second.
        memory: bytes.
        train, forward, decode: share of ``flops`` that training, other forwards and decoding reach.
        stream: share of ``bandwidth`` that decoding reaches.
        layer_seconds: what each call of a layer takes whatever its size, in training and other forwards.
    """

    flops: float
    bandwidth: float
    memory: float
    train: float = 0.35
    forward: float = 0.45
    decode: float = 0.45
    stream: float = 0.6
    layer_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory", "train", "forward", "decode", "stream"):
            if not getattr(self, name) > 0:
                raise InputError(f"hardware.{name}={getattr(self, name)}: must be over 0")


@dataclass(frozen=True)
class Bytes:
    """Bytes a number, by what it is for.

    Args:
        state: weights, gradient and optimiser of a parameter that is trained; 16 is AdamW in float32.
        frozen: a weight of a reference or a reward model.
        sampling: a weight of the copy that samples.
        cache: of keys and values.
        activation: kept for the backward pass.
    """

    state: float = 16.0
    frozen: float = 4.0
    sampling: float = 2.0
    cache: float = 2.0
    activation: float = 2.0


@dataclass(frozen=True)
class Decoding:
    """A call of a sampler: operations and seconds, and the completions that it works on side by side."""

    flops: float
    seconds: float
    side_by_side: float


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for."""

    state: float
    frozen: float
    activations: float
    sampling: float
    cache: float

    @property
    def peak(self) -> float:
        """Activations and the sampler's memory are not needed at the same time."""
        return self.state + self.frozen + max(self.activations, self.sampling + self.cache)


def model_size(options: Mapping[str, Any], key: str = "policy") -> ModelSize:
    """The size that ``options`` describe: of the model at ``path``, or of ``params`` parameters.

    What is not given is that of the published model with about as many parameters.

    Args:
        options: the fields of :class:`ModelSize`, and ``path``; None is not given.
        key: where they stand, for messages.
    """
    given = {name: value for name, value in options.items() if value is not None}
    path = given.pop("path", None)
    params = given.get("params", 0)
    if not isinstance(params, int | float) or not (path is not None or 0 < params < math.inf):
        raise InputError(f"{key}.params={params}: must be a number over 0; or give {key}.path")
    if path is not None:
        return replace(_size_at(path, key), **{name: value for name, value in given.items() if name != "params"})
    near = min(_KNOWN, key=lambda known: abs(math.log(known[0] / given["params"])))
    size = replace(ModelSize(*near), **given)
    if size.body <= 0:
        raise InputError(
            f"{key}.params={size.params:g}: fewer than a vocabulary of {size.vocabulary} takes; give {key}.vocabulary "
            f"and {key}.hidden_size, or {key}.path"
        )
    return size


def decode(
    size: ModelSize,
    device: Hardware,
    bytes_each: Bytes,
    *,
    rows: float,
    tokens: float,
    longest: float,
    context: float,
    read: float,
    at_most: float,
    layer_seconds: float,
    shards: int = 1,
) -> Decoding:
    """Sample ``rows`` completions on one group of ``shards`` devices.

    Each step of ``longest`` reads the weights once and the cache of the completions that still run. Where not all fit
    side by side, the next ones follow when the first are done.

    Args:
        rows: completions; what is less than one is a share of a call.
        tokens: mean length of one.
        longest: length of the longest one.
        context: mean number of tokens before a sampled one.
        read: tokens of prompts, read before, all rows together.
        at_most: completions side by side.
        layer_seconds: what each call of a layer takes whatever its size.
    """
    side_by_side = max(min(rows, at_most), 1.0)
    steps = longest * math.ceil(rows / side_by_side) if rows > 1 else longest * rows
    sampled = rows * tokens
    reading = size.forward_flops(read, context=context / 2, predicted=rows)
    sampling = size.forward_flops(sampled, context=context)
    moved = steps * size.params * bytes_each.sampling + sampled * context * size.cache_bytes(bytes_each.cache)
    arithmetic = sampling / (device.flops * device.decode)
    seconds = max(arithmetic, moved / (device.bandwidth * device.stream)) + reading / (device.flops * device.forward)
    return Decoding(reading + sampling, seconds / shards + steps * size.layers * layer_seconds, side_by_side)


def training_memory(
    size: ModelSize,
    bytes_each: Bytes,
    *,
    micro_tokens: float,
    checkpointing: bool,
    sharded_over: int,
    whole: float,
    spread: float,
    also_trained: float,
) -> Memory:
    """Memory of the update; the sampler's is not in it.

    A layer keeps ``34 H`` bytes a token in 16 bits without the table of attention weights (arXiv 2205.05198, eq. 2);
    with checkpointing one layer does, and the others keep their inputs. Logits are formed 2^25 at a time, three times.

    Args:
        micro_tokens: tokens of a micro-batch.
        sharded_over: devices that the states are spread over.
        whole, spread: parameters of frozen models that each device holds, and that are spread like the states.
        also_trained: parameters of other models that learn.
    """
    kept = 17.0 * size.hidden_size * bytes_each.activation
    layers = kept + size.layers * size.hidden_size * bytes_each.activation if checkpointing else size.layers * kept
    logits = 3 * 4.0 * min(micro_tokens * size.vocabulary, 2.0**25)
    return Memory(
        state=(size.params + also_trained) * bytes_each.state / sharded_over,
        frozen=(whole + spread / sharded_over) * bytes_each.frozen,
        activations=micro_tokens * layers + logits,
        sampling=0.0,
        cache=0.0,
    )


def _size_at(path: str, key: str) -> ModelSize:
    """Of a folder or a name on the hub; the weights are not read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise InputError(f"{key}.path={path}: no model is there ({str(error).splitlines()[0]})") from error
    return size_of(model)


def size_of(model: Any) -> ModelSize:
    """Of a causal language model of transformers."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSize(
        params=float(sum(parameter.numel() for parameter in model.parameters())),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        kv_size=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        vocabulary=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
    )
