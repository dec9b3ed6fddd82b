"""Do probabilities mean what they say: the reliability table and the expected calibration error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

__all__ = ["BINS", "RIGHT", "Bin", "BinKind", "bin_edges", "bin_of", "calibration_bins", "expected_calibration_error"]

BinKind = Literal["width", "mass"]
RIGHT = 0.5  # a soft label from here on counts as right
BINS = 10


class Bin(NamedTuple):
    """Steps of similar probability: mean probability and share of right steps are NaN where it is empty."""

    low: float
    high: float
    steps: int
    probability: float
    right: float


def bin_edges(probabilities: np.ndarray, kind: BinKind, bins: int = BINS) -> np.ndarray:
    """(K+1,) rising edges: of equal width over [0, 1], or of equal numbers of steps.

    Equal probabilities always share a bin, so bins of equal mass may be fewer than asked for.

    >>> bin_edges(np.array([0.1, 0.2, 0.2, 0.9]), "mass", 2).round(9).tolist()
    [0.0, 0.2, 1.0]
    """
    if kind == "width" or not len(probabilities):
        return np.linspace(0.0, 1.0, bins + 1)
    ordered = np.sort(probabilities)
    cuts = sorted({round(len(ordered) * k / bins) for k in range(1, bins)} - {0, len(ordered)})
    above_one = np.nextafter(1.0, 2.0)  # so that steps of probability 1 can have a bin of their own
    return np.unique(np.array([0.0, *ordered[cuts], above_one]))


def calibration_bins(
    labels: np.ndarray, probabilities: np.ndarray, kind: BinKind = "width", bins: int = BINS
) -> list[Bin]:
    """The reliability table: for each bin, edges [low, high), how often what was said was so. The last takes 1 in.

    >>> calibration_bins(np.array([1, 0, 1]), np.array([0.2, 0.3, 0.9]), bins=2)[0]
    Bin(low=0.0, high=0.5, steps=2, probability=0.25, right=0.5)
    """
    edges, right = bin_edges(probabilities, kind, bins), labels >= RIGHT
    place = bin_of(probabilities, edges)
    table = []
    for k in range(len(edges) - 1):
        inside = place == k
        count = int(inside.sum())
        means = (float(probabilities[inside].mean()), float(right[inside].mean())) if count else (math.nan, math.nan)
        table.append(Bin(float(edges[k]), float(edges[k + 1]), count, *means))
    return table


def bin_of(probabilities: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(N,) number of the bin of each probability."""
    return np.clip(np.searchsorted(edges, probabilities, side="right") - 1, 0, len(edges) - 2)


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """``sum_k n_k/N |share right_k - mean probability_k|`` (Naeini et al. 2015); depends on the bins: name them.

    >>> round(expected_calibration_error(calibration_bins(np.array([1, 0, 1]), np.array([0.2, 0.3, 0.9]), bins=2)), 9)
    0.2
    """
    total = sum(b.steps for b in bins)
    return sum(b.steps * abs(b.right - b.probability) for b in bins if b.steps) / total if total else math.nan
