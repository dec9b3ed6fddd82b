"""How right credit is: figures against true advantages, with intervals over problems and a test against shuffling."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .batch import CreditBatch
from .intervals import RESAMPLES, Estimate, bootstrap, estimates
from .quality_sums import (
    FIGURES,
    UNIT_FIGURES,
    Case,
    Grading,
    answer_figures,
    answer_sums,
    shuffle,
    unit_credit,
    unit_figures,
    unit_sums,
)
from .strategy import check_choice
from .truth import Truth

__all__ = [
    "FIGURES",
    "Grading",
    "difference_test",
    "noise_floor",
    "quality",
    "quality_differences",
    "quality_intervals",
    "shuffle_test",
]

LESS_IS_BETTER = ("quality/inert_mass",)
_CHUNK = 2_000_000  # numbers in a chunk of shuffles: tens of megabytes


def quality(
    advantages: Tensor, truth: Truth, batch: CreditBatch, *, grading: Grading | None = None
) -> dict[str, float]:
    """Figures of how right credit is; NaN where one is undefined, never 0.

    The credit of a unit (a step or token of the truth) is the mean of the advantages on its trained tokens.

    - ``quality/pearson``: correlation of the units' credit with their true advantages, pooled over all answers.
    - ``quality/sign_accuracy``: of the units whose true advantage is over tau in size, the share whose credit has its
      sign. A credit of zero says nothing and counts half, as a coin would; ``quality/sign_ties`` is the share of these.
    - ``quality/error_auc``: chance that a wrong token of a failed answer has less credit than another trained token of
      the same answer, equal credit counted half; the mean over failed answers that have tokens of both kinds. The same
      credit on all tokens of an answer has .5, however it differs between answers.
    - ``quality/blame_at_1``: in failed answers with a harmful unit, how often the unit of least credit is the one of
      least true advantage. Of m units that share the least credit each is taken with the chance 1/m.
    - ``quality/inert_mass``: share of ``sum |A|`` on trained tokens whose choice makes no difference.

    Args:
        advantages: (B, T); no figure depends on a positive factor.
        truth: true advantages of the same answers.
        batch: the answers; tokens outside its mask do not count.
        grading: what counts; None for the defaults.

    >>> batch = CreditBatch(torch.ones(1, 4, dtype=torch.bool), torch.tensor([0]), torch.tensor([0.0]))
    >>> wrong, inert = torch.tensor([[[False, False, True, False]], [[False] * 4]])
    >>> true = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    >>> truth = Truth(torch.tensor([[0, 0, 1, -1]]), true, torch.zeros(1, 2), wrong, inert)
    >>> found = quality(torch.tensor([[1.0, 1.0, -1.0, 0.0]]), truth, batch)
    >>> {name.removeprefix("quality/"): round(value, 3) for name, value in found.items()}
    {'pearson': 1.0, 'sign_accuracy': 1.0, 'sign_ties': 0.0, 'blame_at_1': 1.0, 'error_auc': 1.0, 'inert_mass': nan}
    """
    case = Case.of(truth, batch, grading)
    return dict(zip(FIGURES, answer_figures(answer_sums(case.on(advantages), case).sum(dim=0)).tolist()))


def quality_intervals(
    advantages: Tensor,
    truth: Truth,
    batch: CreditBatch,
    *,
    grading: Grading | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Estimate]:
    """The figures of :func:`quality` with 95% bootstrap intervals over groups.

    Args:
        advantages, truth, batch, grading: see :func:`quality`.
        resamples, seed: see :func:`.intervals.bootstrap`.
    """
    case, groups = Case.of(truth, batch, grading), batch.group_ids.cpu()
    found = bootstrap(answer_sums(case.on(advantages), case), groups, answer_figures, resamples=resamples, seed=seed)
    return estimates(FIGURES, *found, groups)


def quality_differences(
    advantages: Tensor,
    other: Tensor,
    truth: Truth,
    batch: CreditBatch,
    *,
    grading: Grading | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Estimate]:
    """The figures of one strategy minus those of another on the same answers, with intervals from the same resamples.

    Where an interval holds zero, no winner may be named.

    Args:
        advantages, other: (B, T) of the two strategies, such as one and the uniform rule.
        truth, batch, grading, resamples, seed: see :func:`quality_intervals`.
    """
    groups = batch.group_ids.cpu()
    difference, samples = _paired(advantages, other, Case.of(truth, batch, grading), groups, resamples, seed)
    return estimates(FIGURES, difference, samples, groups)


def difference_test(
    advantages: Tensor,
    other: Tensor,
    truth: Truth,
    batch: CreditBatch,
    *,
    grading: Grading | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, float]:
    """Two-sided p that a figure of two strategies does not differ: t with n - 1 degrees for n groups.

    ``t = difference / s`` with s the standard deviation of the difference over resamples of the groups, the same ones
    for both. Not corrected for several strategies. NaN where the figure is undefined or never differs.

    Args:
        advantages, other, truth, batch, grading, resamples, seed: see :func:`quality_differences`.
    """
    from scipy import stats

    groups = batch.group_ids.cpu()
    difference, samples = _paired(advantages, other, Case.of(truth, batch, grading), groups, resamples, seed)
    found = {}
    for name, value, column in zip(FIGURES, difference.tolist(), samples.unbind(dim=1)):
        known = column[~column.isnan()]
        spread = float(known.std()) if len(known) > 1 else math.nan
        t = abs(value) / spread if spread > 0 else math.nan
        found[name] = float(2 * stats.t.sf(t, len(groups.unique()) - 1))
    return found


def noise_floor(
    truth: Truth, batch: CreditBatch, *, grading: Grading | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """How well the second, independent estimate of the truth does against the first: nothing can be held to more.

    Args:
        truth: with ``again``; where it is exact there is no noise, and the answer is empty.
        batch, grading, resamples, seed: see :func:`quality_intervals`.
    """
    if truth.again is None:
        return {}
    case, groups = Case.of(truth, batch, grading), batch.group_ids.cpu()
    again = truth.again.cpu().double()
    if bool((again.isnan() & case.known).any()):
        raise ValueError("the second estimate of the truth lacks units that the first one has")
    rows = unit_sums(again.where(case.known, 0.0), case)
    return estimates(UNIT_FIGURES, *bootstrap(rows, groups, unit_figures, resamples=resamples, seed=seed), groups)


def shuffle_test(
    advantages: Tensor,
    truth: Truth,
    batch: CreditBatch,
    *,
    among: Literal["unit", "token"] = "unit",
    grading: Grading | None = None,
    permutations: int = 1_000,
    seed: int = 0,
) -> dict[str, float]:
    """One-sided p that credit is no better placed than by chance: permutations within each answer.

    ``p = (1 + number of shuffles at least as good) / (1 + permutations)``, not corrected for several strategies.

    Args:
        advantages, truth, batch, grading: see :func:`quality`.
        among: what is shuffled in each answer: the credit of whole ``unit``s, or the advantages of single ``token``s,
            as the shuffled control does. Shuffled tokens spread what a rule gave to one step thinly over all steps,
            which by itself moves the figures about units (mostly up), so that a rule for steps must be compared among
            units. Figures about tokens (``error_auc``, ``inert_mass``) have a p among tokens alone.
        permutations: number of shuffles.
        seed: of the shuffles.

    Returns:
        p by figure, that of ties excepted; NaN where the figure is undefined.
    """
    check_choice("among", among, ("unit", "token"))
    case = Case.of(truth, batch, grading)
    given, mask, names = case.on(advantages), case.mask, FIGURES
    sums, figures = answer_sums, answer_figures
    if among == "unit":
        given, mask, names = unit_credit(given, case), case.known, UNIT_FIGURES
        sums, figures = unit_sums, unit_figures
    sign = torch.tensor([-1.0 if name in LESS_IS_BETTER else 1.0 for name in names], dtype=torch.float64)
    observed = sign * figures(sums(given, case).sum(dim=-2))
    generator, reached, done = torch.Generator().manual_seed(seed), torch.zeros(len(names), dtype=torch.float64), 0
    while done < permutations:
        count = min(permutations - done, max(1, _CHUNK // max(1, given.numel())))
        moved = sign * figures(sums(shuffle(given, mask, count, generator), case).sum(dim=-2))
        reached += (~(moved < observed - 1e-9)).sum(dim=0)  # a shuffle without a value counts against the credit
        done += count
    p = ((1 + reached) / (1 + permutations)).masked_fill(observed.isnan(), math.nan).tolist()
    return {name: value for name, value in zip(names, p) if name != "quality/sign_ties"}


def _paired(
    advantages: Tensor, other: Tensor, case: Case, groups: Tensor, resamples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Differences in the figures of two strategies, (F,), and those in the same resamples of the groups, (R, F)."""
    (value, samples), (less, less_samples) = (
        bootstrap(answer_sums(case.on(given), case), groups, answer_figures, resamples=resamples, seed=seed)
        for given in (advantages, other)
    )
    return value - less, samples - less_samples
