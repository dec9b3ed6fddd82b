"""Whitening a sum of credit parts so that the parts still sum to the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .ops import Over, batch_moments

__all__ = ["CENTRING", "whiten_parts"]

CENTRING = "centring"
"""The part that holds what whitening subtracts."""


def whiten_parts(
    parts: Mapping[str, Tensor], mask: Tensor, *, over: Over = "token", center: bool = True, ddof: int, eps: float
) -> dict[str, Tensor]:
    """The parts of ``(x - mean) / (std + eps)``, x their sum: all on one scale, the mean as a part of its own.

    Args:
        parts: (B, T) each.
        mask: (B, T) bool, the places that count; parts are zero elsewhere.
        over: every token counts once, or every sequence.
        center: subtract the mean of the batch.
        ddof, eps: of the standard deviation.

    Returns:
        float32 parts; all zero where the sum is the same everywhere.

    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> parts = whiten_parts({"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([[2.0, 1.0]])}, mask, ddof=0, eps=0)
    >>> {name: part.tolist() for name, part in parts.items()}
    {'a': [[1.0, 0.0]], 'b': [[2.0, 1.0]], 'centring': [[-2.0, -2.0]]}
    """
    whole = torch.stack([part.double() for part in parts.values()]).sum(dim=0)
    mean, std = batch_moments(whole, mask, over=over, ddof=ddof)
    unit = torch.where(std > 0, 1 / (std + eps), 0.0)
    scaled = {name: (part.double() * unit).where(mask, 0.0) for name, part in parts.items()}
    if center:
        scaled[CENTRING] = (-mean * unit).expand(mask.shape).where(mask, 0.0)
    return {name: part.float() for name, part in scaled.items()}
