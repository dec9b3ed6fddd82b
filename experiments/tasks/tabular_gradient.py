"""The policy gradient of a table of logits in closed form, and how a strategy's compares with the exact one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...credit import Credit
from .tabular_sampling import TabularSample

__all__ = ["gradient_figures", "group_gradients"]


def group_gradients(sample: TabularSample, credit: Credit) -> Tensor:
    """The gradient that each group of G answers gives, (N, X, V) float64.

    ``g[x, v] = 1/G sum over the group's tokens in state x of w A (1[v = token] - pi(v|x))``: the score-function
    estimate with token advantages A and loss weights w, summed over tokens and divided by answers. With the true
    advantages its mean is the exact gradient.

    Args:
        sample: answers of N groups.
        credit: what a strategy made of its batch.
    """
    answers, policy = sample.answers, sample.exact.policy
    weight = 1.0 if credit.loss_weight is None else credit.loss_weight.double()
    amount = (credit.advantages.double() * weight).where(answers.mask, 0.0)
    groups, group = torch.unique(sample.batch.group_ids, return_inverse=True)
    states, tokens = policy.shape
    place = (group[:, None] * states + answers.states) * tokens + answers.tokens
    handed = torch.zeros(len(groups) * states * tokens, dtype=torch.float64)
    handed = handed.index_add(0, place.flatten(), amount.flatten()).reshape(len(groups), states, tokens)
    size = torch.bincount(group)[:, None, None]
    return (handed - policy * handed.sum(dim=-1, keepdim=True)) / size


def gradient_figures(gradients: Tensor, exact: Tensor) -> dict[str, float]:
    """How the gradients of N groups compare with the exact gradient; none depends on a positive factor but the norm.

    - ``gradient/norm``: mean norm of a group's gradient.
    - ``gradient/cosine``: mean cosine of a group's gradient with the exact one; a group whose gradient is zero has 0.
    - ``gradient/snr``: ``||E g||^2 / tr Cov(g)`` over groups.
    - ``gradient/bias``: ``||c E g - e|| / ||e||`` at the best factor c, for the exact gradient e: the sine of their
      angle; 0 where the mean gradient points along e, 1 where it is at a right angle, or away from it.

    ``E g`` is not known, so its square and its product with e come from pairs of *different* groups: the noise of
    one mean is not taken for bias, nor for signal.

    Args:
        gradients: (N, X, V).
        exact: (X, V).

    >>> exact = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    >>> gradients = torch.stack([3 * exact, exact, 2 * exact])
    >>> {name: round(value, 6) for name, value in gradient_figures(gradients, exact).items()}
    {'gradient/norm': 2.828427, 'gradient/cosine': 1.0, 'gradient/snr': 3.666667, 'gradient/bias': 0.0}
    """
    given, unit = gradients.flatten(1), exact.flatten() / exact.norm()
    norms, along, count = given.norm(dim=1), given @ unit, len(gradients)
    cosine = (along / norms).where(norms > 0, 0.0)
    figures = {"gradient/norm": float(norms.mean()), "gradient/cosine": float(cosine.mean())}
    if count < 2:
        return {**figures, "gradient/snr": math.nan, "gradient/bias": math.nan}
    square = _between(given)
    spread = float(given.var(dim=0).sum())
    towards = _between(along[:, None]) if float(along.sum()) > 0 else 0.0
    signal = square / spread if spread > 0 else math.nan
    return {**figures, "gradient/snr": signal, "gradient/bias": _sine(towards, square)}


def _between(vectors: Tensor) -> float:
    """Unbiased ``||E v||^2`` of N independent vectors (N, D): the mean product of two different ones."""
    count = len(vectors)
    return float(vectors.sum(dim=0).square().sum() - vectors.square().sum()) / (count * (count - 1))


def _sine(towards: float, square: float) -> float:
    """``sqrt(1 - towards / square)`` kept within [0, 1]; NaN where noise leaves no mean gradient to speak of."""
    return math.sqrt(min(1.0, max(0.0, 1.0 - max(0.0, towards) / square))) if square > 0 else math.nan
