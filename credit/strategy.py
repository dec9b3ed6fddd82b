"""What every credit strategy is, and the checks that each one passes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch

from ..verifiers import InputError
from .batch import Credit, CreditBatch

__all__ = ["Conserves", "CreditStrategy", "Phase", "assign_credit", "missing_signals"]

Phase = Literal["rollout", "update"]
Conserves = Literal["none", "mass", "sign", "zero_mean"]


class CreditStrategy(Protocol):
    """A frozen dataclass whose fields are its options, called with a batch.

    ``requires`` names the signals: ``reward``, ``score:NAME`` or ``spans:NAME`` of the verifier NAME,
    ``old_logprobs``, ``entropy``, ``completion_ids``. ``phase`` says when it is computed: once per rollout batch, or
    again at each optimiser step ("update"). ``conserves`` is a claim that tests hold it to:

    - ``mass``: each row's sum of advantages equals the row's centred outcome times its number of tokens;
    - ``sign``: no token's advantage disagrees in sign with its row's centred outcome;
    - ``zero_mean``: the advantages of each group's tokens (or rows) sum to zero;
    - ``none``: no such claim.
    """

    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def conserves(self) -> Conserves: ...
    def __call__(self, batch: CreditBatch) -> Credit: ...


def missing_signals(strategy: CreditStrategy, available: Iterable[str]) -> list[str]:
    """Signals that ``strategy`` needs and the run does not have, sorted."""
    return sorted(strategy.requires - set(available))


def assign_credit(strategy: CreditStrategy, batch: CreditBatch) -> Credit:
    """Run a strategy and hold its answer to the contract: shape, finite, zero outside the mask.

    Raises:
        InputError: the answer breaks the contract; names the strategy and the first row at fault.
    """
    credit = strategy(batch)
    name = type(strategy).__name__
    if not isinstance(credit, Credit):
        raise InputError(f"credit: {name} returned {type(credit).__name__}; return a Credit")
    mask = batch.completion_mask
    streams = {"advantages": credit.advantages, **{f"part {k!r}": v for k, v in credit.parts.items()}}
    if credit.loss_weight is not None:
        streams["loss_weight"] = credit.loss_weight
    for label, value in streams.items():
        if value.shape != mask.shape:
            raise InputError(f"credit: {name} gave {label} of shape {tuple(value.shape)}; need {tuple(mask.shape)}")
        bad_rows = (~torch.isfinite(value)).any(dim=1).nonzero()
        if len(bad_rows):
            raise InputError(f"credit: {name} gave {label} that are not finite in row {int(bad_rows[0])}")
    stray = (credit.advantages.ne(0) & ~mask).any(dim=1).nonzero()
    if len(stray):
        raise InputError(f"credit: {name} gave advantages outside the completion mask in row {int(stray[0])}")
    return credit
