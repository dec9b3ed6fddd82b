"""Log-probabilities of given completions under a model, with or without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from .policy import Policy

__all__ = ["Scored", "score_completions", "score_in_parts"]


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

    Rows are right-padded: under causal attention a row never sees its padding, so no mask is needed. The vocabulary
    projection is done only from the first position that predicts a completion token on.

    Args:
        policy: model to score with; gradients flow where they are enabled.
        prompts, completions: B lists of ids; no prompt is empty.
        width: T of the result, at least the longest completion.
        temperature: logits are divided by it, as in sampling.
        squares: give ``sum_pi_squared`` too.
    """
    device = policy.device
    input_ids, _ = _padded([[*prompt, *completion] for prompt, completion in zip(prompts, completions)])
    target, real = _padded(completions, width)
    starts = torch.tensor([len(prompt) for prompt in prompts]) - 1  # the position that predicts a row's first token
    first = int(starts.min())
    row, column = real.nonzero(as_tuple=True)
    position = column + (starts - first)[row]
    with policy.autocast():
        output = policy.model(
            input_ids=input_ids.to(device), use_cache=False, logits_to_keep=input_ids.shape[1] - first
        )
    logits = output.logits[row.to(device), position.to(device)].float() / temperature  # (tokens, V)
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, target[real].to(device)[:, None])[:, 0]
    with torch.no_grad():
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).sum(dim=-1)
    real = real.to(device)
    total = _scatter(probabilities.square().sum(dim=-1), real) if squares else None
    return Scored(_scatter(chosen, real), _scatter(entropy, real), total)


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
    """:func:`score_completions` without gradient, ``rows`` rows in a forward, on the CPU."""
    width = max(map(len, completions))
    parts = []
    for start in range(0, len(prompts), rows):
        some = slice(start, start + rows)
        scored = score_completions(
            policy, prompts[some], completions[some], width=width, temperature=temperature, squares=squares
        )
        parts.append([s.cpu() for s in (scored.logprobs, scored.entropy, scored.sum_pi_squared) if s is not None])
    return Scored(*(torch.cat(stream) for stream in zip(*parts)))


def _padded(rows: Sequence[Sequence[int]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids (B, width) padded with zeros on the right, and where they are real, (B, width) bool."""
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(lengths.max()) if width is None else width) < lengths[:, None]
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long)
    return torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, ids), real


def _scatter(values: Tensor, real: Tensor) -> Tensor:
    return torch.zeros(real.shape, dtype=values.dtype, device=values.device).masked_scatter(real, values)
