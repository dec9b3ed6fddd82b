"""Log-probabilities of given completions under a model, with or without gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from .attention import unwrapped
from .chunked_logprobs import chosen_logprobs, chunked_logprobs
from .packed_attention import NotPackable, packed_attention, refusal
from .packing import micro_batches, pack
from .policy import Policy

__all__ = ["Scored", "packs", "score_completions", "score_in_parts"]

log = logging.getLogger(__name__)
LOGITS_AT_ONCE = 2**25  # numbers, 128 MiB in float32; more are formed in chunks, and again in the backward pass
_REFUSED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # models that run on padded rows, and why
_SCALED: WeakSet[Any] = WeakSet()  # models that do more to their logits than project them


@dataclass(frozen=True)
class Scored:
    """Per token of the completions, (B, T), zero beyond each row's end.

    Args:
        logprobs: log-probability of the token, in nats.
        entropy: of the distribution that it was drawn from, in nats.
        sum_pi_squared: sum of the squared probabilities of that distribution; None where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor | None = None


def score_completions(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    temperature: float = 1.0,
    squares: bool = False,
) -> Scored:
    """Score every completion token given its prompt and the tokens before it.

    Real tokens alone run through the model, and a prompt that several rows share once (see
    :mod:`apportion.grpo.packing`). A model for which :func:`packs` is False reads right-padded rows: under causal
    attention a row never sees its padding, so no mask is needed.

    Args:
        policy: model to score with; gradients flow where they are enabled.
        prompts, completions: B lists of ids; none is empty.
        width: T of the result, at least the longest completion.
        temperature: logits are divided by it, as in sampling.
        squares: give ``sum_pi_squared`` too.
    """
    target, real = _padded(completions, width)
    target, real = target[real].to(policy.device), real.to(policy.device)

    def logprobs(inputs: dict[str, Any], pick: Callable[[Tensor], Tensor]) -> Streams:
        return _logprobs(policy, inputs, pick, target, temperature, squares)

    def attempt() -> Streams:
        streams = _packed_logprobs(policy, prompts, completions, logprobs) if packs(policy) else None
        return _padded_logprobs(policy, prompts, completions, logprobs) if streams is None else streams

    try:
        streams = attempt()
    except _Scaled:
        streams = attempt()
    return Scored(*(None if values is None else _scatter(values, real) for values in streams))  # type: ignore[arg-type]


def packs(policy: Policy) -> bool:
    """Whether the policy's model runs on packed tokens; says once why not."""
    if not policy.packing:
        return False
    if policy.model in _REFUSED:
        return False
    reason = refusal(policy.model)
    if reason is not None:
        _refuse(policy.model, reason)
    return reason is None


def _refuse(model: Any, reason: str) -> None:
    _REFUSED[model] = reason
    log.warning("%s runs on padded rows, which is slower: %s", type(unwrapped(model)).__name__, reason)


@torch.no_grad()
def score_in_parts(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float,
    rows: int,
    squares: bool = False,
) -> Scored:
    """:func:`score_completions` without gradient, at most ``rows`` rows in a forward, on the CPU."""
    width = max(map(len, completions))
    streams = [torch.zeros(len(prompts), width) for _ in range(3 if squares else 2)]
    for part in micro_batches(prompts, list(map(len, completions)), rows=rows):
        scored = score_completions(
            policy,
            [prompts[row] for row in part],
            [completions[row] for row in part],
            width=width,
            temperature=temperature,
            squares=squares,
        )
        for stream, values in zip(streams, (scored.logprobs, scored.entropy, scored.sum_pi_squared)):
            assert values is not None
            stream[part] = values.cpu()
    return Scored(*streams)


class _Scaled(Exception):
    """The model was found to do more to its logits than to project them; it is now known."""


Streams = tuple[Tensor, Tensor, Tensor | None]
Run = Callable[[dict[str, Any], Callable[[Tensor], Tensor]], Streams]


def _packed_logprobs(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], run: Run
) -> Streams | None:
    """(M,) streams, or None where the model turns out to mix tokens by other means than attention."""
    packed = pack(prompts, completions).to(policy.device)
    inputs = {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "logits_to_keep": packed.predicting,
    }
    try:
        with packed_attention(policy.model, packed):
            return run(inputs, lambda output: output[0])
    except NotPackable as error:
        _refuse(policy.model, str(error))
        return None


def _padded_logprobs(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], run: Run
) -> Streams:
    """(M,) streams of right-padded rows; the vocabulary is projected on from the first position that predicts."""
    device = policy.device
    input_ids, _ = _padded([[*prompt, *completion] for prompt, completion in zip(prompts, completions)])
    _, real = _padded(completions)
    starts = torch.tensor([len(prompt) for prompt in prompts]) - 1  # the position that predicts a row's first token
    first = int(starts.min())
    row, column = real.nonzero(as_tuple=True)
    position = (column + (starts - first)[row]).to(device)
    row = row.to(device)
    inputs = {"input_ids": input_ids.to(device), "logits_to_keep": input_ids.shape[1] - first}
    return run(inputs, lambda output: output[row, position])


def _logprobs(
    policy: Policy,
    inputs: dict[str, Any],
    pick: Callable[[Tensor], Tensor],
    target: Tensor,
    temperature: float,
    squares: bool,
) -> Streams:
    """The model's forward, and of the positions that ``pick`` chooses the log-probabilities of ``target``."""
    inner = unwrapped(policy.model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    rows = LOGITS_AT_ONCE // inner.config.get_text_config().vocab_size
    if len(target) > rows and head is not None and inner not in _SCALED and _is_local(head):
        hidden, project = pick(_hidden(policy, inputs, head)), _within(policy, head)
        return chunked_logprobs(project, hidden, target, rows=max(rows, 1), temperature=temperature, squares=squares)
    with policy.autocast():
        output = policy.model(**inputs, use_cache=False)
    return chosen_logprobs(pick(output.logits), target, temperature=temperature, squares=squares)


def _hidden(policy: Policy, inputs: dict[str, Any], head: Any) -> Tensor:
    """What goes into the vocabulary projection.

    The forward runs as ever, hooks and all, but the projection gets a single position to do.

    Raises:
        _Scaled: what the model gives for that position is not what the projection gives.
    """
    seen: list[Tensor] = []

    def one_position(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(arguments[0])
        return (arguments[0][:1, :1], *arguments[1:])

    hook = head.register_forward_pre_hook(one_position)
    try:
        with policy.autocast():
            output = policy.model(**inputs, use_cache=False)
    finally:
        hook.remove()
    with torch.no_grad():
        plain = len(seen) == 1 and torch.equal(output.logits, _within(policy, head)(seen[0][:1, :1]))
    if not plain:
        _SCALED.add(unwrapped(policy.model))
        raise _Scaled
    return seen[0]


def _within(policy: Policy, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(states: Tensor) -> Tensor:
        with policy.autocast():
            return head(states)

    return call


def _is_local(module: Any) -> bool:
    """Whether this process holds the whole of the module's parameters."""
    return not any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def _padded(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids (B, width) padded with zeros on the right, and where they are real, (B, width) bool."""
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(lengths.max()) if width is None else width) < lengths[:, None]
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
    return torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, ids), real


def _scatter(values: Tensor, real: Tensor) -> Tensor:
    return torch.zeros(real.shape, dtype=values.dtype, device=values.device).masked_scatter(real, values)
