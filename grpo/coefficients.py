"""A strategy's gradient as a row of numbers, one a token, and how few of such rows many strategies need.

At any ratio the gradient of the loss is ``sum_t c_t grad log p_t``: all that strategies on the same rollouts differ in
is the coefficients c. Equal, scaled and mixed strategies are linear combinations of a few rows, and only these few
need a backward pass. K strategies, B rollouts, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..credit import Credit, CreditBatch
from .loss import LossConfig, aggregation_weights, live_rows, token_loss

__all__ = ["Objective", "plan_blocks", "reduce_rows", "touched_rows"]

TOLERANCE = 1e-6  # what a row may differ from its linear combination, relative to its own norm
OVERHEAD_TOKENS = 100  # what a pass costs whatever its size, in tokens (two-layer Llama on a CPU core)
FORWARD_COST = 1.0  # of a forward with its bookkeeping, in backward passes


@dataclass(frozen=True)
class Objective:
    """The losses of K strategies on the same B rollouts, as functions of the tokens' log-probabilities.

    Args:
        names: of the strategies.
        advantages: (K, B, T).
        loss_weight: (K, B, T).
        live: (K, B) bool, see :func:`apportion.grpo.loss.live_rows`.
        touched: (K, B) bool, see :func:`touched_rows`.
        weights: (B, T), of every token in the loss, see :func:`apportion.grpo.loss.aggregation_weights`.
        batch: evidence; the log-probabilities of the sampler, and of the reference where the KL is in the loss.
        loss: options.
    """

    names: tuple[str, ...]
    advantages: Tensor
    loss_weight: Tensor
    live: Tensor
    touched: Tensor
    weights: Tensor
    batch: CreditBatch
    loss: LossConfig

    @classmethod
    def of(cls, credits: Mapping[str, Credit], batch: CreditBatch, loss: LossConfig, *, max_tokens: int) -> Objective:
        """The objective of all rows of ``batch`` under each credit; ``max_tokens`` as in ``aggregation_weights``."""
        if batch.old_logprobs is None:
            raise ValueError("the coefficients of a batch need its old_logprobs")
        ones = torch.ones(batch.completion_mask.shape)
        return cls(
            tuple(credits),
            torch.stack([credit.advantages for credit in credits.values()]),
            torch.stack([ones if credit.loss_weight is None else credit.loss_weight for credit in credits.values()]),
            torch.stack([live_rows(credit.advantages, batch.group_ids) for credit in credits.values()]),
            torch.stack([touched_rows(credit, batch, loss) for credit in credits.values()]),
            aggregation_weights(batch.completion_mask, mode=loss.aggregation, max_tokens=max_tokens),
            batch,
            loss,
        )

    def coefficients(self, rows: Tensor, logprobs: Tensor) -> Tensor:
        """The slope of every strategy's loss in every log-probability, whatever surrogate, weight and KL it has.

        Args:
            rows: (b,) long, some of the B rows.
            logprobs: (b, width) of these rows' tokens under the policy; ``width`` covers their tokens.

        Returns:
            (K, b, width) float64, zero outside the mask; not finite where a token's loss is not.
        """
        count, width = len(self.names), logprobs.shape[1]

        def cut(values: Tensor) -> Tensor:
            """(K b, width): the rows of every strategy, one strategy after the other."""
            return values[..., rows, :width].expand(count, len(rows), width).reshape(-1, width)

        assert self.batch.old_logprobs is not None
        reference, mask = self.batch.ref_logprobs, cut(self.batch.completion_mask)
        leaf = logprobs.detach().cpu().double().repeat(count, 1).requires_grad_()
        with torch.enable_grad():
            tokens = token_loss(
                leaf,
                cut(self.batch.old_logprobs).double(),
                cut(self.advantages).double(),
                self.loss,
                completion_mask=mask,
                ref_logprobs=None if reference is None else cut(reference).double(),
                loss_weight=cut(self.loss_weight).double(),
                live_rows=self.live[:, rows].reshape(-1),
            )
            loss = (tokens.loss.where(mask, 0.0) * cut(self.weights)).sum()
            (slope,) = torch.autograd.grad(loss, leaf)
        slope = slope.where(tokens.loss.isfinite() | ~mask, torch.nan)  # a clip hides a loss that is not a number
        return slope.view(count, len(rows), width)

    def blocks(self, rows: Tensor, prompt_tokens: int, max_rows: int, max_tokens: int | None) -> list[Tensor]:
        """The touched ones of ``rows``, parted so that the backward passes cost little; see :func:`plan_blocks`.

        The plan is made at the ratio one and without the KL. It decides about cost alone: any parting gives the same
        gradient.

        Args:
            rows: (b,) long, of one group.
            prompt_tokens: read by every forward.
            max_rows, max_tokens: at most so many rows and tokens in a block; a longer row stands alone.
        """
        rows = rows[self.touched[:, rows].any(dim=0)]
        if not len(rows):
            return []
        slopes = ((self.advantages * self.loss_weight)[:, rows] * self.weights[rows]).double().nan_to_num(0, 0, 0)
        slopes = slopes / slopes.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]
        products = torch.einsum("kbt,lbt->bkl", slopes, slopes).numpy()
        mask = self.batch.completion_mask[rows]
        lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1).numpy()
        room = None if max_tokens is None else max_tokens - prompt_tokens
        plan = plan_blocks(products, lengths, prompt_tokens + OVERHEAD_TOKENS, max_rows, room)
        return [rows[part] for part in plan]


def touched_rows(credit: Credit, batch: CreditBatch, loss: LossConfig) -> Tensor:
    """Rows whose gradient may be other than zero, (B,) bool: every surrogate is a multiple of the advantage."""
    moved = credit.advantages.ne(0) & batch.completion_mask
    if credit.loss_weight is not None:
        moved &= credit.loss_weight.ne(0)
    rows = moved.any(dim=1)
    if loss.kl_coef and loss.kl_in == "loss":
        rows = live_rows(credit.advantages, batch.group_ids) if loss.mask_dead_groups else torch.ones_like(rows)
        rows = rows & batch.completion_mask.any(dim=1)
    return rows


def reduce_rows(rows: Tensor, tolerance: float = TOLERANCE) -> tuple[Tensor, Tensor]:
    """Few orthonormal rows of which all ``rows`` are combinations: a pivoted QR decomposition of the rows at unit norm.

    Args:
        rows: (K, M) float64.
        tolerance: the largest part of a row, by norm, that may be missing from its combination.

    Returns:
        ``mix`` (K, r) and ``basis`` (r, M), so that ``rows = mix @ basis``. Rows of zeros add nothing to r.

    >>> rows = torch.tensor([[1.0, 1, 0], [-2, -2, 0], [0, 0, 0], [1, 0, 0], [3, 1, 0]], dtype=torch.float64)
    >>> mix, basis = reduce_rows(rows)
    >>> len(basis), torch.allclose(mix @ basis, rows)
    (2, True)
    """
    from scipy.linalg import qr

    norms = rows.norm(dim=1)
    alive = norms.nonzero()[:, 0]
    if not len(alive):
        return rows.new_zeros(len(rows), 0), rows.new_zeros(0, rows.shape[1])
    unit = (rows[alive] / norms[alive, None]).numpy()
    # The diagonal falls: each entry is the largest norm left in any row once the pivots before it are taken out.
    columns, upper, pivots = qr(unit.T, mode="economic", pivoting=True)
    rank = int((np.abs(np.diag(upper)) > tolerance).sum())
    order = alive[torch.from_numpy(pivots).long()]
    mix = rows.new_zeros(len(rows), rank)
    mix[order] = torch.from_numpy(upper[:rank].T).to(rows) * norms[order, None]
    return mix, torch.from_numpy(columns[:, :rank].T).to(rows)


def plan_blocks(
    products: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64],
    overhead: float,
    max_rows: int,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Part the rows of a group into blocks, each with one forward and as many backward passes as its own rank.

    Where strategies agree in most rows, these need few passes, and only the rows in which they differ need many: a
    strategy that differs from another in few rows costs a pass over these. Rows are put in order of their own rank;
    among all ways to cut that order into pieces the cheapest is found by dynamic programming, with the cost
    ``(FORWARD_COST + rank) (overhead + tokens)`` of a block.

    Args:
        products: (B, K, K) inner products of the strategies' coefficients in each row, each strategy at unit norm.
        lengths: (B,) tokens.
        overhead: of a pass, in tokens.
        max_rows, max_tokens: at most so many rows and tokens in a block; a longer row stands alone.

    Returns:
        Row indices of every block.

    >>> one = np.ones((2, 2))
    >>> plan_blocks(np.stack([one, one, one, np.eye(2)]), np.array([90, 90, 90, 90]), 10.0, 16)
    [[3], [0, 1, 2]]
    """
    own = _ranks(products)
    order: Sequence[int] = sorted(range(len(lengths)), key=lambda row: (-own[row], -lengths[row], row))
    grams = np.concatenate([np.zeros_like(products[:1]), products[list(order)].cumsum(axis=0)])
    tokens = np.concatenate([[0], lengths[list(order)].cumsum()])
    stops = range(1, len(order) + 1)
    pairs = [(start, stop) for stop in stops for start in range(max(0, stop - max_rows), stop)]
    if max_tokens is not None:
        pairs = [(a, b) for a, b in pairs if b - a == 1 or tokens[b] - tokens[a] <= max_tokens]
    first, last = np.array(pairs).T
    costs = (FORWARD_COST + _ranks(grams[last] - grams[first])) * (overhead + tokens[last] - tokens[first])
    cheapest = {0: (0.0, 0)}  # of the rows before each stop: what they cost, and where their last block starts
    for (start, stop), cost in zip(pairs, costs.tolist()):
        choice = (cheapest[start][0] + cost, start)
        cheapest[stop] = min(cheapest.get(stop, choice), choice)
    blocks, stop = [], len(order)
    while stop:
        start = cheapest[stop][1]
        blocks.append(sorted(order[start:stop]))
        stop = start
    return blocks[::-1]


def _ranks(products: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Rank of each (K, K) matrix of inner products of rows whose norms are at most one."""
    return (np.linalg.eigvalsh(products) > 1e-10).sum(axis=-1)
