"""Every figure of every strategy on the common rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...credit import Credit, CreditBatch
from ...credit.intervals import Estimate
from ...credit.quality import difference_test, noise_floor, quality_differences, quality_intervals, shuffle_test
from ...credit.quality_sums import Grading
from ...credit.sequence import LeaveOneOut
from ...credit.shape import CLASSES, shape_intervals
from ...credit.strategy import assign_credit
from ...credit.truth import Truth
from ...grpo.geometry import ReferenceRollouts, group_gram
from ...grpo.gram import (
    GradientGram,
    agreement,
    bias,
    cosines,
    norms,
    reference_cosines,
    resample_groups,
    signal_to_noise,
)
from ...grpo.policy import Policy
from ...grpo.realised import realised_update
from ..parts import Parts
from ..report.statistics import holm
from .record import Figure
from .rollouts import Probed

P_VALUE, PLACED = "quality/pearson_p", "quality/placed_p"

__all__ = [
    "P_VALUE",
    "Figures",
    "Measures",
    "Resampling",
    "corrected",
    "figures_of_gram",
    "geometry",
    "located",
    "updates",
]

Figures = dict[str, dict[str, Figure]]
"""By strategy, then by key."""


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: number of resamples of the problems, their seed, and what counts as right credit."""

    resamples: int
    seed: int
    grading: Grading


@dataclass(frozen=True)
class Measures:
    """What is known of the rollouts besides credit.

    Args:
        truth: true advantages.
        classes: (B, T) long, see :func:`apportion.credit.shape.token_classes`.
        resampling: of the problems.
    """

    truth: Truth
    classes: Tensor
    resampling: Resampling

    def floor(self, halves: Truth | None, batch: CreditBatch) -> dict[str, Figure]:
        """One estimate of the truth against another; empty where it is exact."""
        how = self.resampling
        if halves is None:
            return {}
        found = noise_floor(halves, batch, grading=how.grading, resamples=how.resamples, seed=how.seed)
        return {key: Figure(*value) for key, value in found.items()}


def located(
    advantages: Mapping[str, Tensor], measures: Measures, batch: CreditBatch, uniform: str, *, tests: bool = True
) -> Figures:
    """Quality of credit, and its difference from that of ``uniform`` on the same resamples.

    Args:
        advantages: (B, T) by strategy.
        uniform: name of the strategy that the others are compared with; where it is missing there are no differences.
        tests: give the shape of credit too, and two p, not corrected yet: that the correlation is uniform's, and that
            the steps' credit is placed by chance.
    """
    how, truth = measures.resampling, measures.truth
    again = {"resamples": how.resamples, "seed": how.seed}
    found: Figures = {}
    for name, given in advantages.items():
        figures = dict(quality_intervals(given, truth, batch, grading=how.grading, **again))
        if uniform in advantages and name != uniform:
            base = advantages[uniform]
            less = quality_differences(given, base, truth, batch, grading=how.grading, **again)
            figures |= {f"{key}_minus_uniform": value for key, value in less.items()}
            if tests:
                p = difference_test(given, base, truth, batch, grading=how.grading, **again)
                figures[P_VALUE] = Estimate(p["quality/pearson"])
        if tests:
            placed = shuffle_test(given, truth, batch, grading=how.grading, permutations=how.resamples, seed=how.seed)
            figures[PLACED] = Estimate(placed["quality/pearson"])
            figures |= shape_intervals(given, measures.classes, batch, **again)
        found[name] = {key: Figure(*value) for key, value in figures.items()}
    return found


def corrected(figures: Figures, names: Sequence[str]) -> None:
    """Holm's correction of each p of the named strategies, as one family; the others lose theirs."""
    for key in (P_VALUE, PLACED):
        kept = {name: figures[name].pop(key) for name in list(figures) if key in figures[name]}
        family = [name for name in names if name in kept]
        for name, p in zip(family, holm([kept[name].value for name in family])):
            figures[name][key] = Figure(p)


def geometry(
    policy: Policy,
    probed: Probed,
    batch: CreditBatch,
    credits: Mapping[str, Credit],
    parts: Parts,
    reference: Probed | None,
    *,
    memory_gib: float,
) -> GradientGram:
    """The exact Gram matrix of all strategies' gradients, with the reference gradient where there are rollouts for it.

    The reference is the plain policy gradient of the expected reward: the reward less the mean of the other answers to
    the same problem, not scaled, on rollouts of their own.
    """
    further = None
    if reference is not None:
        credit = assign_credit(LeaveOneOut(), reference.batch)
        further = ReferenceRollouts(*_ids(reference), reference.batch, credit)
    return group_gram(
        policy,
        *_ids(probed),
        batch,
        credits,
        replace(parts.loss, kl_coef=0.0),  # the policy is its own reference here, where the KL has no gradient
        max_tokens=parts.rollout.max_new_tokens,
        temperature=parts.rollout.temperature,
        reference=further,
        micro_batch_rows=parts.optim.micro_batch_rows,
        micro_batch_tokens=parts.optim.micro_batch_tokens,
        memory_gib=memory_gib,
    )


def figures_of_gram(gram: GradientGram, how: Resampling) -> tuple[Figures, list[list[float]]]:
    """Length, cosine and bias to the reference, and signal-to-noise of each gradient, and the cosines of all pairs."""
    weights = resample_groups(len(gram.groups), how.resamples, how.seed)
    columns: dict[str, Callable[..., Tensor]] = {"gradient/norm": norms, "gradient/snr": signal_to_noise}
    if gram.reference is not None:
        columns |= {"gradient/cosine": reference_cosines, "gradient/bias": lambda g, w=None: bias(g, None, w)}
    found: Figures = {name: {} for name in gram.names}
    for key, function in columns.items():
        value, samples = function(gram), function(gram, weights)
        for at, name in enumerate(gram.names):
            found[name][key] = _figure(float(value[at]), samples[:, at])
    if gram.reference is not None:
        found["reference"] = {"gradient/cosine": Figure(agreement(gram)[1])}
    return found, cosines(gram).tolist()


def updates(
    policy: Policy, probed: Probed, batch: CreditBatch, credits: Mapping[str, Credit], parts: Parts, classes: Tensor
) -> tuple[Figures, dict[str, Tensor]]:
    """One real optimiser step with each strategy: figures, and the change of every log-probability, (B, T)."""
    found: Figures = {}
    changes = {}
    for name, credit in credits.items():
        step = realised_update(
            policy,
            *_ids(probed),
            batch,
            credit,
            parts.loss,
            parts.optim,
            max_tokens=parts.rollout.max_new_tokens,
            temperature=parts.rollout.temperature,
            classes=classes,
            class_names=CLASSES,
        )
        changes[name] = step.change
        found[name] = {f"update/{name}": Figure(value) for name, value in step.by_class.items()}
        found[name] |= {"update/kl": Figure(step.kl), "update/clip_fraction": Figure(step.clip_fraction)}
    return found, changes


def stacked(
    draws: Sequence[Mapping[str, Tensor]], measures: Measures, batch: CreditBatch
) -> tuple[dict[str, Tensor], Measures, CreditBatch]:
    """Several draws of credit for the same answers as one: each answer once for each draw, in its own group."""
    number = len(draws)
    truth = measures.truth

    def again(values: Tensor) -> Tensor:
        return values.repeat(number, *([1] * (values.ndim - 1)))

    many = Truth(
        again(truth.unit_ids),
        again(truth.advantage),
        again(truth.standard_error),
        again(truth.wrong),
        again(truth.inert),
        method=truth.method,
    )
    rows = CreditBatch(again(batch.completion_mask), again(batch.group_ids), again(batch.reward))
    joined = {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}
    return joined, replace(measures, truth=many, classes=again(measures.classes)), rows


def _ids(probed: Probed) -> tuple[list[list[int]], list[list[int]]]:
    return (
        [list(rollout.prompt_ids) for rollout in probed.rollouts],
        [list(rollout.completion_ids) for rollout in probed.rollouts],
    )


def _figure(value: float, samples: Tensor) -> Figure:
    known = samples[~samples.isnan()]
    if len(known) < 0.9 * len(samples):
        return Figure(value)
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=known.dtype)).tolist()
    return Figure(value, low, high)
