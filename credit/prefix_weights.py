"""The objective of a token shared among the answers that have the same beginning (lambda-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit
from .uniform import Uniform
from .wrapping import also_told, evidence, keeps_sign

__all__ = ["PrefixShare", "prefix_counts"]


def prefix_counts(completion_ids: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """How many rows of the group, the row itself included, begin with the same ids up to and with a position.

    Args:
        completion_ids: (B, T) long.
        mask: (B, T) bool; a row counts up to its last True, and not at all without one.
        group_ids: (B,) long.

    Returns:
        (B, T) long; 1 beyond a row's last True.

    >>> ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8, 9]])
    >>> prefix_counts(ids, ids > 0, torch.zeros(3, dtype=torch.long)).tolist()
    [[3, 2, 1, 1], [3, 2, 1, 1], [3, 1, 1, 1]]
    """
    inside = mask.flip(1).cumsum(dim=1).flip(1) > 0  # up to the last True
    table = torch.cat([group_ids[:, None], completion_ids.where(inside, -1)], dim=1)
    # In lexical order, rows with a common beginning stand together; runs of them split as the beginning grows.
    rows, which, copies = torch.unique(table, dim=0, return_inverse=True, return_counts=True)
    differs = (rows[1:] != rows[:-1]).cumsum(dim=1) > 0
    first = torch.zeros_like(rows[:1], dtype=torch.long)[:, 1:]
    run = torch.cat([first, differs[:, 1:].long()]).cumsum(dim=0)[: len(rows)]
    size = torch.zeros_like(run).scatter_add_(0, run, copies[:, None].expand_as(run).contiguous())
    return torch.where(inside, size.gather(0, run)[which], 1)


@dataclass(frozen=True)
class PrefixShare:
    """Every beginning that answers share weighs as one: the objective at t times ``1 / n(i, t)`` (arXiv 2509.21154).

    n(i, t) is how many answers of the group begin with the ids of answer i up to t. Without it, GRPO counts a common
    beginning n times. The factor acts on the whole token objective, the KL included; the advantages stay as they are.
    It matters where beginnings overlap: at low temperature, in trees. Called lambda-GRPO in the paper, a name that
    arXiv 2510.06870 also uses.

    Args:
        inner: hands out the advantages; the outcome's by default (the paper's has ``ddof=1 eps=1e-4``).
    """

    inner: CreditStrategy = field(default_factory=Uniform)

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"completion_ids"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "the token ids of the group's answers")

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        counts = prefix_counts(evidence(batch, "completion_ids"), mask, batch.group_ids)
        weight = (1 / counts.double()).float()
        credit = assign_credit(self.inner, batch)
        shared = int(((counts > 1) & mask).sum()) / max(int(mask.sum()), 1)
        return replace(
            credit,
            loss_weight=weight if credit.loss_weight is None else weight * credit.loss_weight,
            metrics={**credit.metrics, "shared_prefix": shared},
        )
