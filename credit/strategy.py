"""What every credit strategy is, and the checks that each one passes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch

from ..verifiers import InputError
from .batch import Credit, CreditBatch

__all__ = ["Conserves", "CreditStrategy", "Phase", "assign_credit", "check_choice", "missing_signals"]

Phase = Literal["rollout", "update"]
Conserves = Literal["none", "mass", "sign", "zero_mean", "potential"]


class CreditStrategy(Protocol):
    """A frozen dataclass whose fields are its options, called with a batch.

    ``requires`` names the signals: ``reward``, ``score:NAME`` or ``spans:NAME`` of the verifier NAME,
    ``old_logprobs``, ``ref_logprobs``, ``entropy``, ``sum_pi_squared``, ``completion_ids``, ``token_scores:NAME``,
    ``prefix_values:NAME``, ``tree``, ``logprobs`` (in the phase "update"). ``phase`` says when it is computed: once per
    rollout batch, or again at each optimiser step ("update"). ``conserves`` is a claim that tests hold it to, where the
    outcome is the reward, or the score that the strategy's option ``source`` names:

    - ``mass``: the mean over each row's tokens is the row's centred outcome times one positive number of its group;
    - ``sign``: no token's advantage disagrees in sign with its row's centred outcome;
    - ``zero_mean``: the advantages of each group's tokens sum to zero;
    - ``potential``: the advantages of each row's steps, each counted once, sum to its centred outcome times one
      positive number of its group;
    - ``none``: no such claim.

    A strategy may also have ``extra_information``: a few words on what it is told beyond the answer's reward, for
    reports.
    """

    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def conserves(self) -> Conserves: ...
    def __call__(self, batch: CreditBatch) -> Credit: ...


def missing_signals(strategy: CreditStrategy, available: Iterable[str], also: Iterable[str] = ()) -> list[str]:
    """Signals that ``strategy`` needs, or that are needed ``also``, and that the run does not have, sorted."""
    return sorted((strategy.requires | set(also)) - set(available))


def check_choice(key: str, value: object, choices: Iterable[object]) -> None:
    """Refuse an option's value that is none of its choices.

    >>> check_choice("ddof", 2, (0, 1))
    Traceback (most recent call last):
    apportion.verifiers.errors.InputError: ddof must be 0 or 1, not 2
    """
    known = list(choices)
    if value not in known:
        *most, last = (str(choice) for choice in known)
        raise InputError(f"{key} must be {', '.join(most)} or {last}, not {value!r}")


def assign_credit(strategy: CreditStrategy, batch: CreditBatch) -> Credit:
    """Run a strategy and hold its answer to the contract: shape, type, finite, zero outside the mask, true parts.

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
        if value.dtype != torch.float32 or value.requires_grad:
            kind = f"{value.dtype}, with a gradient" if value.requires_grad else f"{value.dtype}"
            raise InputError(f"credit: {name} gave {label} as {kind}; need torch.float32, detached")
        _refuse_rows(~torch.isfinite(value), f"credit: {name} gave {label} that are not finite")
    _refuse_rows(credit.advantages.ne(0) & ~mask, f"credit: {name} gave advantages outside the completion mask")
    if credit.parts:
        missing = (credit.advantages - torch.stack([*credit.parts.values()]).sum(dim=0)).abs()
        _refuse_rows(missing > 1e-4 * (1 + credit.advantages.abs()), f"credit: {name} gave parts with another sum")
    return credit


def _refuse_rows(bad: torch.Tensor, message: str) -> None:
    rows = bad.any(dim=1).nonzero()
    if len(rows):
        raise InputError(f"{message} in row {int(rows[0])}")
