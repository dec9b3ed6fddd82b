"""Log-probabilities of chosen tokens with the entropy of their distributions, by one pass over the logits.

The logits of a whole batch are the largest tensor of a training step. Here they are kept once, as probabilities, and
where even that is too much they are formed chunk by chunk and again, chunk by chunk, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["chosen_logprobs", "chunked_logprobs"]


class _Chosen(torch.autograd.Function):
    """Logits (M, V) and targets (M,) to log-probabilities, entropies and sums of squared probabilities (M,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, squares: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, target[:, None])[:, 0]
        probabilities = logprobs.exp()
        entropy = -torch.linalg.vecdot(probabilities, logprobs)
        total = torch.linalg.vecdot(probabilities, probabilities) if squares else None
        ctx.save_for_backward(probabilities, target)
        ctx.mark_non_differentiable(*(value for value in (entropy, total) if value is not None))
        return chosen, entropy, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, target = ctx.saved_tensors
        grad = probabilities * -grads[0][:, None]  # d log p_y / d z_v = [v = y] - p_v
        return grad.scatter_add_(1, target[:, None], grads[0][:, None]), None, None


def chosen_logprobs(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``log softmax(logits / temperature)`` at the targets, the distribution's entropy, and its sum of squares.

    The gradient flows through the first alone.

    Args:
        logits: (M, V).
        target: (M,) ids.
        squares: give the third, else None.

    >>> logprobs, entropy, squares = chosen_logprobs(torch.zeros(1, 4), torch.tensor([2]), squares=True)
    >>> round(logprobs.item(), 4), round(entropy.item(), 4), squares.item()
    (-1.3863, 1.3863, 0.25)
    """
    logits = logits.float()
    chosen, entropy, total = _Chosen.apply(logits if temperature == 1 else logits / temperature, target, squares)
    return chosen, entropy, total


def chunked_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    target: Tensor,
    *,
    rows: int,
    temperature: float = 1.0,
    squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`chosen_logprobs` of ``head(hidden)``, ``rows`` rows at a time; no more logits than that exist at once.

    Args:
        head: hidden states (m, H) to logits (m, V); it runs again in the backward pass.
        hidden: (M, H).
        target: (M,) ids.
    """

    def part(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return chosen_logprobs(head(states), ids, temperature=temperature, squares=squares)

    parts = []
    for states, ids in zip(hidden.split(rows), target.split(rows)):
        if torch.is_grad_enabled():
            parts.append(checkpoint(part, states, ids, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(states, ids))
    chosen, entropy, total = zip(*parts)
    return torch.cat(chosen), torch.cat(entropy), torch.cat(total) if squares else None
