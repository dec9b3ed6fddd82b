"""Where credit lies, without asking whether it is right: shares by class of token, concentration, and the outcome."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .batch import CreditBatch
from .intervals import RESAMPLES, Estimate, bootstrap, estimates, ratio
from .ops import group_mean, group_normalize

__all__ = ["CLASSES", "FIGURES", "shape", "shape_intervals", "token_classes"]

CLASSES = ("first_wrong", "later", "before", "format", "answer", "filler")
FIGURES = (
    *(f"shape/{name}" for name in CLASSES),
    *("shape/gini", "shape/effective_tokens", "shape/sign_flips", "shape/mass_ratio"),
)


def token_classes(
    batch: CreditBatch, *, steps: str = "steps", format: str = "format", answer: str = "answer", threshold: float = 0.5
) -> Tensor:
    """Class of each token, an index of ``CLASSES``: (B, T) long, -1 where nothing is trained.

    A token that touches a span of ``answer`` is of the answer; else one that touches a span of ``format`` is format;
    else one of a step is ``first_wrong`` in the answer's first wrong step, ``later`` after it and ``before`` ahead of
    it. In an answer without a wrong step all are ``before``. A token of two steps belongs to the first, as
    for :class:`~.align.SpanTable`. Tokens of no span (separators, the end token) are ``filler``. A verifier that the
    batch does not have locates nothing.

    Args:
        batch: with the spans of the verifiers.
        steps, format, answer: names of the verifiers.
        threshold: a step with a score below this is wrong.

    >>> from .align import spans_table
    >>> from ..verifiers import Span
    >>> judged = spans_table([[(i, i + 1) for i in range(5)]], [[Span(0, 1, 1.0), Span(1, 3, 0.0), Span(3, 4, 1.0)]])
    >>> mask, group, reward = torch.ones(1, 5, dtype=torch.bool), torch.tensor([0]), torch.tensor([1.0])
    >>> [CLASSES[place] for place in token_classes(CreditBatch(mask, group, reward, spans={"steps": judged}))[0]]
    ['before', 'first_wrong', 'first_wrong', 'later', 'filler']
    """
    mask = batch.completion_mask
    width = mask.shape[1]
    classes = torch.full_like(mask, CLASSES.index("filler"), dtype=torch.long)
    if steps in batch.spans:
        table = batch.spans[steps]
        columns = table.mask.shape[1]
        wrong = table.mask & (table.score < threshold)
        first = (
            torch.arange(columns, device=mask.device).where(wrong, columns).amin(dim=1, keepdim=True) if columns else 0
        )
        own = table.step_ids(torch.ones_like(mask))
        place = torch.full_like(own, CLASSES.index("before"))
        place = place.masked_fill(own == first, CLASSES.index("first_wrong"))
        place = place.masked_fill(own > first, CLASSES.index("later"))
        classes = place.where(table.token_mask(table.mask, width), classes)
    for source, name in ((format, "format"), (answer, "answer")):
        if source in batch.spans:
            table = batch.spans[source]
            classes = classes.masked_fill(table.token_mask(table.mask, width), CLASSES.index(name))
    return classes.where(mask, -1)


def shape(advantages: Tensor, classes: Tensor, batch: CreditBatch) -> dict[str, float]:
    """Figures of where credit lies; NaN where one is undefined, never 0.

    - ``shape/<class>``: share of ``sum |A|`` on the tokens of each class; undefined where no token is of the class.
    - ``shape/gini``: Gini coefficient of ``|A|`` over an answer's n trained tokens, ``sum_i (2i - n - 1) x_i /
      (n sum x)`` for rising x; 0 where all are equal, ``1 - 1/n`` where one has everything. The mean over the answers
      with credit.
    - ``shape/effective_tokens``: ``(sum |A|)^2 / sum A^2`` of an answer, the number of equal tokens that would be as
      concentrated; the mean over the answers with credit.
    - ``shape/sign_flips``: of the tokens with credit, in answers whose reward is not that of their group's mean, the
      share whose sign is not that of reward minus mean.
    - ``shape/mass_ratio``: ``sum_i sgn(Z_i) sum_t A[i,t] / sum_i n_i |Z_i|`` with Z the reward normalised in its group
      (``ops.group_normalize``) and n the number of trained tokens: what credit adds up to along the outcome,
      measured by the uniform rule, which has 1. Answers with Z = 0 or without a reward do not enter.

    Args:
        advantages: (B, T).
        classes: (B, T) long, see :func:`token_classes`.
        batch: the answers; tokens outside its mask do not count.

    >>> batch = CreditBatch(torch.ones(2, 4, dtype=torch.bool), torch.tensor([0, 0]), torch.tensor([1.0, 0.0]))
    >>> found = shape(torch.tensor([[1.0, 1, 1, 1], [0, -4, 0, 0]]), torch.full((2, 4), 5), batch)
    >>> {name: round(found[f"shape/{name}"], 3) for name in ("filler", "gini", "effective_tokens", "mass_ratio")}
    {'filler': 1.0, 'gini': 0.375, 'effective_tokens': 2.5, 'mass_ratio': 1.0}
    """
    return dict(zip(FIGURES, _figures(_row_sums(advantages, classes, batch).sum(dim=0)).tolist()))


def shape_intervals(
    advantages: Tensor, classes: Tensor, batch: CreditBatch, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """The figures of :func:`shape` with 95% bootstrap intervals over groups.

    Args:
        advantages, classes, batch: see :func:`shape`.
        resamples, seed: see :func:`.intervals.bootstrap`.
    """
    groups = batch.group_ids.cpu()
    rows = _row_sums(advantages, classes, batch)
    return estimates(FIGURES, *bootstrap(rows, groups, _figures, resamples=resamples, seed=seed), groups)


def _row_sums(advantages: Tensor, classes: Tensor, batch: CreditBatch) -> Tensor:
    """(B, C): what each answer adds to the sums that :func:`_figures` reads."""
    mask = batch.completion_mask.cpu()
    for name, given in (("advantages", advantages), ("classes", classes)):
        if given.shape != mask.shape:
            raise ValueError(f"the {name} are {tuple(given.shape)}, the batch is {tuple(mask.shape)}")
    signed = advantages.detach().cpu().double().where(mask, 0.0)
    size, classes = signed.abs(), classes.cpu().where(mask, -1)
    members = torch.stack([classes == place for place in range(len(CLASSES))])
    by_class = [*(size * members).sum(dim=2), *members.sum(dim=2).double()]
    total, squares = size.sum(dim=1), size.square().sum(dim=1)
    has = total > 0
    effective = (total.square() / squares).where(has, 0.0)
    outcome, groups = batch.outcome().cpu(), batch.group_ids.cpu()
    unit = group_normalize(outcome, groups)
    side = (outcome - group_mean(outcome, groups)).nan_to_num().sign() * (unit != 0)
    credited = (size > 0) & (side != 0)[:, None]
    flips = credited & (signed.sign() != side[:, None])
    columns = [
        *by_class,
        total,
        has,
        _gini(size, mask).where(has, 0.0),
        effective,
        credited.sum(dim=1),
        flips.sum(dim=1),
    ]
    columns += [side * signed.sum(dim=1), unit.abs() * mask.sum(dim=1)]
    return torch.stack([column.double() for column in columns], dim=1)


def _figures(sums: Tensor) -> Tensor:
    """(..., 10): the ``FIGURES`` from sums (..., C)."""
    by_class, count = sums[..., : len(CLASSES)], sums[..., len(CLASSES) : 2 * len(CLASSES)]
    total, answers, gini, effective, credited, flips, along, uniform = sums[..., 2 * len(CLASSES) :].unbind(dim=-1)
    shares = ratio(by_class, total[..., None]).where(count > 0, math.nan)
    others = (ratio(gini, answers), ratio(effective, answers), ratio(flips, credited), ratio(along, uniform))
    return torch.cat([shares, torch.stack(others, dim=-1)], dim=-1)


def _gini(size: Tensor, mask: Tensor) -> Tensor:
    """(B,) Gini coefficient of each row's masked sizes; NaN where they sum to 0."""
    number = mask.sum(dim=1, keepdim=True)
    ordered = size.where(mask, -1.0).sort(dim=1).values  # the unmasked ones first
    rank = torch.arange(1, size.shape[1] + 1) - (size.shape[1] - number)
    weight = (2 * rank - number - 1).where(rank > 0, 0)
    return (weight * ordered).sum(dim=1) / (number[:, 0] * size.sum(dim=1))
