"""A rollout batch with its credit, worked off in several optimiser steps; can be saved half-way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, Rollout
from .seeds import named_generator

__all__ = ["Window", "minibatch_rows"]


@dataclass
class Window:
    """Everything that the optimiser steps on one rollout batch need.

    Args:
        step: number of the rollout batch, from 1.
        rollouts: B rollouts.
        batch, credit: evidence and credit, (B, T).
        ref_logprobs: (B, T) under the frozen reference, or None where nobody asks.
        metrics: what was measured so far.
        done: optimiser steps already taken.
        sums: running sums of the update's statistics.
    """

    step: int
    rollouts: list[Rollout]
    batch: CreditBatch
    credit: Credit
    ref_logprobs: Tensor | None
    metrics: dict[str, float]
    done: int
    sums: dict[str, float]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the window: tensors and plain values."""
        return {
            "step": self.step,
            "prompt_ids": [list(r.prompt_ids) for r in self.rollouts],
            "completion_ids": [list(r.completion_ids) for r in self.rollouts],
            "group_ids": self.batch.group_ids,
            "completion_mask": self.batch.completion_mask,
            "old_logprobs": self.batch.old_logprobs,
            "reward": self.batch.reward,
            "advantages": self.credit.advantages,
            "loss_weight": self.credit.loss_weight,
            "ref_logprobs": self.ref_logprobs,
            "metrics": dict(self.metrics),
            "done": self.done,
            "sums": dict(self.sums),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Window:
        """The window as saved; enough for its remaining optimiser steps."""
        rollouts = [
            Rollout(prompt, ids, [0.0] * len(ids), [(0, 0)] * len(ids), "", int(group))
            for prompt, ids, group in zip(state["prompt_ids"], state["completion_ids"], state["group_ids"])
        ]
        batch = CreditBatch(
            completion_mask=state["completion_mask"],
            group_ids=state["group_ids"],
            reward=state["reward"],
            old_logprobs=state["old_logprobs"],
        )
        return cls(
            step=state["step"],
            rollouts=rollouts,
            batch=batch,
            credit=Credit(state["advantages"], state["loss_weight"]),
            ref_logprobs=state["ref_logprobs"],
            metrics=dict(state["metrics"]),
            done=state["done"],
            sums=dict(state["sums"]),
        )

    def with_credit(self, credit: Credit) -> Window:
        return replace(self, credit=credit)


def minibatch_rows(group_ids: Tensor, *, minibatches: int, seed: int, step: int, epoch: int) -> list[Tensor]:
    """Rows of each optimiser step of one epoch: whole groups in random order, cut into ``minibatches`` parts.

    >>> rows = minibatch_rows(torch.tensor([5, 5, 7, 7]), minibatches=2, seed=0, step=1, epoch=0)
    >>> sorted(part.tolist() for part in rows)
    [[0, 1], [2, 3]]
    """
    groups = group_ids.unique()
    order = named_generator(seed, "minibatches", step, epoch).permutation(len(groups))
    parts = np.array_split(order, minibatches)
    return [torch.isin(group_ids, groups[torch.from_numpy(part)]).nonzero()[:, 0] for part in parts]
