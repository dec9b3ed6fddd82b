"""A rollout batch with its credit, worked off in several optimiser steps; can be saved half-way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, Rollout
from ..credit.align import SpanTable
from ..credit.batch import PrefixValues, TreeIndex
from .seeds import named_generator

__all__ = ["Window", "minibatch_rows"]


@dataclass
class Window:
    """Everything that the optimiser steps on one rollout batch need. All tensors lie on the CPU.

    Args:
        step: number of the rollout batch, from 1.
        prompt_ids, completion_ids: of B rollouts.
        batch: evidence, (B, T).
        credit: (B, T); of a strategy with ``phase="update"``, that of the latest optimiser step.
        ref_logprobs: (B, T) under the frozen reference, or None where nobody asks.
        importance: (B, T) weights of answers that another engine sampled (:mod:`apportion.grpo.importance`), or None.
        metrics: what was measured so far.
        done: optimiser steps already taken.
        sums: running sums of the update's statistics.
    """

    step: int
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    batch: CreditBatch
    credit: Credit
    ref_logprobs: Tensor | None = None
    importance: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    done: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, step: int, rollouts: Sequence[Rollout], batch: CreditBatch) -> Window:
        """The window of a fresh rollout batch, without credit as yet."""
        prompts, completions = [list(r.prompt_ids) for r in rollouts], [list(r.completion_ids) for r in rollouts]
        return cls(step, prompts, completions, batch, Credit(torch.zeros(batch.completion_mask.shape)))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the window: tensors and plain values."""
        batch = _shallow(self.batch)
        for name in ("scores", "token_scores"):
            batch[name] = dict(batch[name])
        for name in ("spans", "prefix_values"):
            batch[name] = {key: _shallow(value) for key, value in batch[name].items()}
        batch["tree"] = None if self.batch.tree is None else _shallow(self.batch.tree)
        return {
            **_shallow(self),
            "batch": batch,
            "credit": {"advantages": self.credit.advantages, "loss_weight": self.credit.loss_weight},
            "metrics": dict(self.metrics),
            "sums": dict(self.sums),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Window:
        """The window as saved; the credit's parts and metrics, which no further step needs, are left out."""
        saved = state["batch"]
        evidence = {
            "spans": {name: SpanTable(**table) for name, table in saved["spans"].items()},
            "prefix_values": {name: PrefixValues(**values) for name, values in saved["prefix_values"].items()},
            "tree": None if saved["tree"] is None else TreeIndex(**saved["tree"]),
        }
        batch = CreditBatch(**{**saved, **evidence})
        return cls(**{**state, "batch": batch, "credit": Credit(**state["credit"])})


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


def _shallow(value: Any) -> dict[str, Any]:
    """A dataclass's fields by name, not copied."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
