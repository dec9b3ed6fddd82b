"""Credit from which kinds of token right answers have and wrong ones have not (KTAE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .ops import group_mean, group_normalize
from .strategy import Conserves, CreditStrategy, Phase, assign_credit
from .uniform import Uniform
from .wrapping import added, also_told, evidence

__all__ = ["KeyTokens", "TypeCounts", "count_types", "fisher_p", "information_gain"]

SATURATION, LENGTH = 2.0, 0.5  # of the term frequencies, BM25's k1 and b


class TypeCounts(NamedTuple):
    """The K token types of all groups: a type is an id in one group.

    Args:
        places: (B, T) long, the type of each counted token, -1 elsewhere.
        ids: (K,) long, its token id.
        right_with, wrong_with: (K,) long, rows of the group that have it (a, b).
        right_without, wrong_without: (K,) long, those that have it not (c, d).
        right_share, wrong_share: (K,) float64, its share of the tokens of the group's right, wrong rows.
        right_tokens, wrong_tokens: (K,) long, how many tokens these have.
    """

    places: Tensor
    ids: Tensor
    right_with: Tensor
    wrong_with: Tensor
    right_without: Tensor
    wrong_without: Tensor
    right_share: Tensor
    wrong_share: Tensor
    right_tokens: Tensor
    wrong_tokens: Tensor


def count_types(completion_ids: Tensor, mask: Tensor, right: Tensor, group_ids: Tensor) -> TypeCounts:
    """Contingency tables of every token type: in how many right and wrong rows of its group it occurs.

    Args:
        completion_ids: (B, T) long.
        mask: (B, T) bool, the tokens that count.
        right: (B,) bool.
        group_ids: (B,) long.
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    row, column = mask.nonzero(as_tuple=True)
    ids, group = completion_ids[row, column], index[row]
    stride = int(ids.max()) + 1 if len(ids) else 1
    types, which = torch.unique(group * stride + ids, return_inverse=True)
    count, of_group = len(types), torch.div(types, stride, rounding_mode="floor")
    pairs = torch.unique(row * max(count, 1) + which)  # each row's types once
    pair_row, pair_type = torch.div(pairs, max(count, 1), rounding_mode="floor"), pairs % max(count, 1)
    places = torch.full_like(completion_ids, -1)
    places[row, column] = which
    counted = mask.any(dim=1)

    def side(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        having = torch.bincount(pair_type[rows[pair_row]], minlength=count)
        size = torch.bincount(index[rows & counted], minlength=len(groups))[of_group]
        tokens = torch.bincount(group[rows[row]], minlength=len(groups))[of_group]
        share = torch.bincount(which[rows[row]], minlength=count).double() / tokens.clamp(min=1)
        return having, size - having, share, tokens

    a, c, right_share, right_tokens = side(right)
    b, d, wrong_share, wrong_tokens = side(~right)
    return TypeCounts(places, types % stride, a, b, c, d, right_share, wrong_share, right_tokens, wrong_tokens)


def fisher_p(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Two-sided p of Fisher's exact test: the chance of all tables with these margins that are at most as likely.

    Args:
        a, b, c, d: (K,) long, the cells ``[[a, b], [c, d]]``.

    Returns:
        (K,) float64.

    >>> round(fisher_p(*torch.tensor([[3], [0], [0], [3]])).item(), 6)
    0.1
    """
    if not len(a):
        return a.new_zeros(0, dtype=torch.float64)
    base = int(torch.stack([a, b, c, d]).max()) + 1
    keys, which = torch.unique(((a * base + b) * base + c) * base + d, return_inverse=True)  # few tables are possible
    tables = torch.stack([torch.div(keys, base**power, rounding_mode="floor") % base for power in (3, 2, 1, 0)], dim=1)
    total, with_it = tables.sum(dim=1, keepdim=True), tables[:, :2].sum(dim=1, keepdim=True)
    first, second = tables[:, 0::2].sum(dim=1, keepdim=True), tables[:, 1::2].sum(dim=1, keepdim=True)
    log_factorial = torch.arange(1, int(total.max()) + 2, device=a.device).double().lgamma()

    def log_choose(n: Tensor, k: Tensor) -> Tensor:
        possible = (k >= 0) & (k <= n)
        k = k.where(possible, 0)
        return (log_factorial[n] - log_factorial[k] - log_factorial[n - k]).where(possible, -torch.inf)

    x = torch.arange(int(first.max()) + 1, device=a.device)  # right rows that may have the type
    log_chance = log_choose(first, x) + log_choose(second, with_it - x) - log_choose(total, with_it)
    chance = log_chance.exp()
    seen = chance.gather(1, tables[:, :1])
    return chance.where(chance <= seen * (1 + 1e-7), 0.0).sum(dim=1).clamp(max=1)[which]


def information_gain(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Bits that the presence of a type tells about an answer being right: ``H(Y) - H(Y | w)``.

    Args:
        a, b, c, d: (K,) long, right and wrong rows with the type, then without it.

    Returns:
        (K,) float64.

    >>> information_gain(*torch.tensor([[2, 1], [0, 1], [0, 1], [2, 1]])).tolist()
    [1.0, 0.0]
    """
    with_it, without = (a + b).double(), (c + d).double()
    total = (with_it + without).clamp(min=1)
    told = with_it / total * _binary_entropy(a, b) + without / total * _binary_entropy(c, d)
    return _binary_entropy(a + c, b + d) - told


def _binary_entropy(one: Tensor, other: Tensor) -> Tensor:
    """In bits; 0 where both are 0."""
    share = one.double() / (one + other).clamp(min=1)
    bits = torch.special.entr(share) + torch.special.entr(1 - share)
    return bits.where(one + other > 0, 0.0) / torch.log(bits.new_tensor(2.0))


@dataclass(frozen=True)
class KeyTokens:
    """Token types that right answers of the group have and wrong ones have not are praised (KTAE, arXiv 2505.16826).

    For a type w of token, with a, b the right and wrong answers that have it, c, d those that have not::

        strength  = (fisher * F + gain * IG) / (fisher + gain),  F = exp(-2 p) of Fisher's exact test, 0 where p = 1
        direction = asin(sqrt(a / (a + c))) - asin(sqrt(b / (b + d)))  [+ tf+ / tf- - tf- / tf+]
        A[i, t]   = A_i + 2 * top * (sigmoid(strength * direction) - 1/2)

    IG is the information gain in bits and tf the term frequency among the tokens of the right or wrong answers, damped
    as in BM25. A group without a right or without a wrong answer adds nothing. With eight answers or fewer few tables
    are possible, and the statistics say little.

    Right is an answer with a reward over its group's mean.

    Args:
        inner: hands out A_i; the outcome's by default.
        fisher, gain: weights of the two measures of strength.
        frequency: use the ratio of the term frequencies as well; a type that only one side has then counts in full.
        top: largest amount added or taken.
        end_ids: token ids that get nothing: the end token, which tells truncated answers apart.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    fisher: float = 1.0
    gain: float = 2.0
    frequency: bool = True
    top: float = 1.0
    end_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not (self.fisher >= 0 and self.gain >= 0 and self.fisher + self.gain > 0):
            raise InputError(f"fisher and gain must not be negative nor both 0, not {self.fisher} and {self.gain}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"reward", "completion_ids"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "the token ids of the group's answers")

    def __call__(self, batch: CreditBatch) -> Credit:
        outcome, ids = batch.outcome(), evidence(batch, "completion_ids")
        centred = group_normalize(outcome, batch.group_ids, scale="none")
        spread = group_mean(centred.abs().masked_fill(outcome.isnan(), float("nan")), batch.group_ids)
        mask = batch.completion_mask & ((spread > 0) & ~outcome.isnan())[:, None]
        counts = count_types(ids, mask, centred > 0, batch.group_ids)
        worth = self._worth(counts)
        padded = torch.cat([worth, worth.new_zeros(1)])  # the last one, -1, for tokens that were not counted
        key = padded[counts.places]
        mean_abs = float(key[mask].abs().mean()) if mask.any() else 0.0
        return added(assign_credit(self.inner, batch), "key_tokens", key, {"key_token_size": mean_abs})

    def _worth(self, counts: TypeCounts) -> Tensor:
        """(K,) float64: what each type adds."""
        cells = counts.right_with, counts.wrong_with, counts.right_without, counts.wrong_without
        p = fisher_p(*cells)
        fisher = (-2 * p).exp().where(p < 1 - 1e-9, 0.0)
        strength = (self.fisher * fisher + self.gain * information_gain(*cells)) / (self.fisher + self.gain)
        a, b, c, d = (cell.double() for cell in cells)
        direction = (a / (a + c).clamp(min=1)).sqrt().asin() - (b / (b + d).clamp(min=1)).sqrt().asin()
        if self.frequency:
            direction = direction + _frequency_ratio(counts)
        worth = 2 * self.top * (torch.sigmoid(strength * direction) - 0.5)
        ends = torch.tensor(list(self.end_ids), dtype=torch.long, device=worth.device)
        return worth.masked_fill(torch.isin(counts.ids, ends), 0.0)


def _frequency_ratio(counts: TypeCounts) -> Tensor:
    """(K,): ``tf+ / tf- - tf- / tf+``, near 0 for a type as frequent in right as in wrong answers."""
    mean_tokens = (counts.right_tokens + counts.wrong_tokens).double().clamp(min=1) / 2

    def damped(share: Tensor, tokens: Tensor) -> Tensor:
        return share * (SATURATION + 1) / (share + SATURATION * (1 - LENGTH + LENGTH * tokens / mean_tokens))

    right = damped(counts.right_share, counts.right_tokens)
    wrong = damped(counts.wrong_share, counts.wrong_tokens)
    return right / (wrong + 1e-5) - wrong / (right + 1e-5)
