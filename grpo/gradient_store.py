"""Gradients of many losses kept side by side, all of the parameters or a part at a time, and their inner products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..verifiers import InputError
from .policy import Policy

__all__ = ["GradientPart", "gradient_parts", "inner_products", "trainable"]

AT_ONCE = 2**18  # numbers in one product: few enough for the cache
GIB = 2**30
MOST_ROUNDS = 50  # each takes all forward and backward passes anew


class Piece(NamedTuple):
    """Entries ``start`` to ``stop`` of a flat parameter, kept from ``at`` on."""

    parameter: Tensor
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class GradientPart:
    """Those parameters, or slices of them, whose gradients are kept at a time."""

    pieces: list[Piece]

    @property
    def parameters(self) -> list[Tensor]:
        return [piece.parameter for piece in self.pieces]

    def empty(self, vectors: int) -> Tensor:
        """Zeros for so many gradients, of at least float32."""
        first, size = self.pieces[0].parameter, sum(piece.stop - piece.start for piece in self.pieces)
        dtype = torch.promote_types(first.dtype, torch.float32)
        return torch.zeros(vectors, size, dtype=dtype, device=first.device)

    def fill(self, row: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the pieces' parameters into one row."""
        for piece, gradient in zip(self.pieces, gradients):
            if gradient is not None:
                row[piece.at : piece.at + piece.stop - piece.start] = gradient.flatten()[piece.start : piece.stop]


def gradient_parts(
    parameters: Sequence[Tensor], vectors: int, memory_gib: float, *, most: int = MOST_ROUNDS
) -> list[GradientPart]:
    """Cut the parameters so that as many gradients of each part as ``vectors`` fit into the memory.

    Args:
        parameters: of which gradients are taken.
        vectors: number of gradients.
        memory_gib: for all gradients of a part.
        most: parts that may be made.

    Raises:
        InputError: there would be more; names the memory that is needed.
    """
    if not 0 < memory_gib < math.inf:
        raise InputError(f"memory_gib={memory_gib:g}: must be a finite number over 0")
    number = sum(parameter.numel() for parameter in parameters)
    each = torch.promote_types(parameters[0].dtype, torch.float32).itemsize * max(vectors, 1)
    room = int(memory_gib * GIB / each)
    if room * most < number:
        need = math.ceil(number / most) * each / GIB
        rounds = "" if most == 1 else f", and then {most} rounds"
        raise InputError(
            f"memory_gib={memory_gib:g}: {vectors} gradients of {number} numbers need at least "
            f"{1.01 * need:.3g}{rounds}; raise it, or take fewer prompts"
        )
    parts, pieces, used = [], [], 0
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + room - used)
            pieces.append(Piece(parameter, start, stop, used))
            used, start = used + stop - start, stop
            if used == room:
                parts.append(GradientPart(pieces))
                pieces, used = [], 0
    return [*parts, GradientPart(pieces)] if pieces else parts


def trainable(policy: Policy) -> list[Tensor]:
    """The parameters that gradients are taken of."""
    return [parameter for parameter in policy.model.parameters() if parameter.requires_grad]


def inner_products(vectors: Sequence[Tensor]) -> Tensor:
    """Of the rows of all ``vectors`` with each other, (R, R) float64, on the CPU.

    Summed in float64: in float32 the cosine between gradients of 8 million parameters is off by up to 2e-3.

    >>> inner_products([torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])]).tolist()
    [[25.0, 3.0], [3.0, 1.0]]
    """
    rows = sum(map(len, vectors))
    if not rows:
        return torch.zeros(0, 0, dtype=torch.float64)
    total = torch.zeros(rows, rows, dtype=torch.float64, device=vectors[0].device)
    width = max(AT_ONCE // rows, 1024)
    for pieces in zip(*(vector.split(width, dim=1) for vector in vectors)):
        piece = torch.cat(pieces).double()
        total += piece @ piece.T
    return total.cpu()
