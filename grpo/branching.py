"""Reading token after token on rows that branch: each row keeps a cache of its own, copied where it splits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..verifiers import InputError
from .attention import unwrapped
from .decoding import cache_argument
from .policy import Policy
from .sampling import RolloutConfig, filtered

__all__ = ["Branches", "next_chances"]


@dataclass
class Branches:
    """Rows of equal length, each read so far into the cache.

    Args:
        policy: that reads.
        cache: keys and values of the rows.
        length: tokens read of each.
    """

    policy: Policy
    cache: Any
    length: int = 0

    @classmethod
    def of(cls, policy: Policy, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Branches]:
        """Read prompts of equal length, which need no padding; logits (N, V) of what follows, and the rows."""
        from transformers import DynamicCache

        rows = cls(policy, DynamicCache(config=policy.model.config))
        logits = rows.read(torch.tensor([list(prompt) for prompt in prompts]))
        if not all(hasattr(layer, "batch_select_indices") for layer in rows.cache.layers):
            raise InputError(
                f"policy: {type(policy.model).__name__} keeps a state that cannot be shared among the branches of an "
                "answer; use a model with attention layers, or truth=monte_carlo"
            )
        return logits, rows

    def read(self, ids: Tensor) -> Tensor:
        """Read further ids (rows, n); logits (rows, V) of what follows."""
        device, count = self.policy.device, ids.shape[1]
        position = torch.arange(self.length, self.length + count, device=device).expand(len(ids), count)
        with self.policy.autocast():
            output = self.policy.model(
                input_ids=ids.to(device),
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(unwrapped(self.policy.model)): self.cache},
            )
        self.length += count
        logits: Tensor = output.logits[:, -1]
        return logits

    def take(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order; a row that comes several times has branched."""
        self.cache.batch_select_indices(rows.to(self.policy.device))

    def part(self, rows: Tensor) -> Branches:
        """A copy with these rows alone."""
        own = Branches(self.policy, copy.deepcopy(self.cache), self.length)
        own.take(rows)
        return own


def next_chances(logits: Tensor, config: RolloutConfig) -> Tensor:
    """Probabilities (n, V), float64, with which the sampler draws each token.

    >>> config = RolloutConfig(temperature=0.5, top_k=3, top_p=0.75)
    >>> chances = next_chances(torch.tensor([[4.0, 2.0, 2.0, 1.0]]).log(), config)  # as 16 : 4 : 4 : 1
    >>> chances.round(decimals=6).tolist()  # the three likeliest, of them those before which under 3/4 have come
    [[0.8, 0.2, 0.0, 0.0]]
    """
    chance = (logits.double() / config.temperature).softmax(dim=-1)
    chance = filtered(chance, config.top_k, config.top_p)
    return chance / chance.sum(dim=-1, keepdim=True)
