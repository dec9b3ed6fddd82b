"""What strategies that change another strategy's advantages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .strategy import CreditStrategy
from .uniform import Uniform

__all__ = ["added", "also_told", "evidence", "keeps_sign", "masked_share", "reweighted"]


def evidence(batch: CreditBatch, name: str) -> Tensor:
    """The per-token numbers (B, T) of that name; refuses a batch that has none."""
    values: Tensor | None = getattr(batch, name)
    if values is None:
        raise InputError(f"credit needs {name} of every token, and the batch has none; let the trainer supply it")
    return values


def reweighted(credit: Credit, weight: Tensor, metrics: Mapping[str, float]) -> Credit:
    """The credit with its advantages and every part times a weight.

    Args:
        credit: of the inner strategy.
        weight: (B, T) of any float type, or bool to keep or drop.
        metrics: added to the credit's own.

    >>> import torch
    >>> half = reweighted(Credit(torch.tensor([[2.0, -2.0]])), torch.tensor([[0.5, 0.0]]), {})
    >>> half.advantages.tolist(), half.parts["inner"].tolist()
    ([[1.0, 0.0]], [[1.0, 0.0]])
    """

    def times(values: Tensor) -> Tensor:
        return (values * weight).float() + 0.0  # no negative zeros

    parts = credit.parts or {"inner": credit.advantages}
    return replace(
        credit,
        advantages=times(credit.advantages),
        parts={name: times(part) for name, part in parts.items()},
        metrics={**credit.metrics, **metrics},
    )


def added(credit: Credit, name: str, amount: Tensor, metrics: Mapping[str, float]) -> Credit:
    """The credit with an amount (B, T) on top, which stands among the parts under its name.

    >>> import torch
    >>> more = added(Credit(torch.tensor([[1.0]])), "bonus", torch.tensor([[0.5]]), {})
    >>> more.advantages.tolist(), sorted(more.parts)
    ([[1.5]], ['bonus', 'inner'])
    """
    extra = amount.float()
    parts = dict(credit.parts or {"inner": credit.advantages})
    parts[name] = parts[name] + extra if name in parts else extra
    return replace(credit, advantages=credit.advantages + extra, parts=parts, metrics={**credit.metrics, **metrics})


def keeps_sign(inner: CreditStrategy) -> bool:
    """Whether each token's advantage has the sign of its row's centred reward, so that a positive weight keeps it."""
    by_reward = getattr(inner, "source", "reward") == "reward"
    return by_reward and (inner.conserves == "sign" or isinstance(inner, Uniform))


def also_told(inner: CreditStrategy, more: str) -> str:
    """What the inner strategy is told beyond the reward, and this."""
    told = getattr(inner, "extra_information", "")
    return f"{told}; {more}" if told and not told.startswith("nothing") else more


def masked_share(part: Tensor, whole: Tensor) -> float:
    """Share of the tokens of ``whole`` that are in ``part``; both (B, T) bool; 0 where there is no token.

    >>> import torch
    >>> masked_share(torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]]))
    0.5
    """
    return int((part & whole).sum()) / max(int(whole.sum()), 1)
