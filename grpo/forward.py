"""Log-probabilities of given completions under a model, with or without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import Policy

__all__ = ["Scored", "score_completions"]


@dataclass(frozen=True)
class Scored:
    """Per token of the completions, (B, T), zero beyond each row's end: log-probability and entropy, in nats."""

    logprobs: Tensor
    entropy: Tensor


def score_completions(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    temperature: float = 1.0,
) -> Scored:
    """Score every completion token given its prompt and the tokens before it.

    Rows are right-padded: under causal attention a row never sees its padding, so no mask is needed. The vocabulary
    projection is done only from the first position that predicts a completion token on.

    Args:
        policy: model to score with; gradients flow where they are enabled.
        prompts, completions: B lists of ids.
        width: T of the result, at least the longest completion.
        temperature: logits are divided by it, as in sampling.
    """
    device = policy.device
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions)]
    longest = max(lengths)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    target = torch.zeros(len(prompts), width, dtype=torch.long)
    real = torch.zeros(len(prompts), width, dtype=torch.bool)
    position = torch.zeros(len(prompts), width, dtype=torch.long)
    first = min(len(p) for p in prompts) - 1
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        input_ids[row, : lengths[row]] = torch.tensor([*prompt, *completion])
        target[row, : len(completion)] = torch.tensor(list(completion))
        real[row, : len(completion)] = True
        position[row, : len(completion)] = torch.arange(len(completion)) + len(prompt) - 1 - first
    kept = longest - first
    with policy.autocast():
        output = policy.model(input_ids=input_ids.to(device), use_cache=False, logits_to_keep=kept)
    target, real, position = target.to(device), real.to(device), position.to(device)
    rows = torch.arange(len(prompts), device=device)[:, None].expand_as(position)
    logits = output.logits[rows[real], position[real]].float() / temperature  # (tokens, V)
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, target[real][:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return Scored(_scatter(chosen, real), _scatter(entropy, real))


def _scatter(values: Tensor, real: Tensor) -> Tensor:
    return torch.zeros(real.shape, dtype=values.dtype, device=values.device).masked_scatter(real, values)
