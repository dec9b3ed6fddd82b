"""The loss of a step, and the weights of the two classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ..verifiers import InputError

__all__ = ["ClassWeights", "class_weights", "step_losses"]


@dataclass(frozen=True)
class ClassWeights:
    """How much the loss of a right and of a wrong step weighs."""

    right: float = 1.0
    wrong: float = 1.0


def step_losses(
    log_odds: Tensor, labels: Tensor, weights: ClassWeights = ClassWeights(), label_smoothing: float = 0.0
) -> Tensor:
    """(S,) ``-(w_right y log p + w_wrong (1 - y) log(1 - p))``, ``p = sigmoid(log_odds)``.

    Binary cross-entropy on the log-odds is the cross-entropy over two classes whose logits differ by them, with hard
    and with soft labels; of the style ``tokens`` it is that over the two tokens, not over the whole vocabulary.

    Args:
        log_odds: (S,) of "right".
        labels: (S,) probability of "right".
        weights: of the classes.
        label_smoothing: see :class:`PrmTrainingConfig`.

    >>> import torch
    >>> step_losses(torch.tensor([0.0, 2.0]), torch.tensor([0.7, 1.0]))
    tensor([0.6931, 0.1269])
    """
    y = labels.float() * (1 - label_smoothing) + label_smoothing / 2
    z = log_odds.float()
    right, wrong = nn.functional.softplus(-z), nn.functional.softplus(z)
    return weights.right * y * right + weights.wrong * (1 - y) * wrong


def class_weights(labels: Sequence[float], choice: Literal["balanced"] | float | None) -> ClassWeights:
    """The weights that a choice means for these labels; soft labels count for both classes.

    >>> class_weights([1.0] * 95 + [0.0] * 5, "balanced")
    ClassWeights(right=0.5263157894736842, wrong=10.0)
    """
    if choice is None:
        return ClassWeights()
    if choice != "balanced":
        return ClassWeights(1.0, float(choice))
    right, count = math.fsum(labels), len(labels)
    if not 0 < right < count:
        raise InputError("class_weight=balanced: the labels are of one class only; set class_weight=null")
    return ClassWeights(count / (2 * right), count / (2 * (count - right)))
