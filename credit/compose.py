"""Several strategies at once, each normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit

__all__ = ["Composition"]


@dataclass(frozen=True)
class Composition:
    """The weighted sum of several strategies' advantages: ``A = sum_k w_k A_k``; each term stays visible in ``parts``.

    Where terms give a ``loss_weight``, their product weighs the objective of every token, whatever the term.

    Args:
        terms: strategies by name.
        weights: a number for each name; a name left out weighs 1.
        max_abs: advantages are cut to this range at the end, or None.
    """

    terms: Mapping[str, CreditStrategy]
    weights: Mapping[str, float] = field(default_factory=dict)
    max_abs: float | None = None
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        if not self.terms:
            raise InputError("terms is empty; add one, for example +credit@credit.terms.outcome=uniform")
        for name in self.weights:
            if name not in self.terms:
                have = ", ".join(self.terms)
                raise InputError(f"weights.{name}: no term has this name (there are: {have}); drop it or add the term")
        if self.max_abs is not None and not self.max_abs > 0:
            raise InputError(f"max_abs must be over 0, or null for no limit, not {self.max_abs}")
        if self.max_abs is not None and "cut" in self.terms:
            raise InputError("terms.cut: this name is taken by what max_abs cuts off; call the term otherwise")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset().union(*(term.requires for term in self.terms.values()))

    @property
    def phase(self) -> Phase:
        return "update" if any(term.phase == "update" for term in self.terms.values()) else "rollout"

    @property
    def extra_information(self) -> str:
        told = (getattr(term, "extra_information", "") for term in self.terms.values())
        more = dict.fromkeys(text for text in told if text and not text.startswith("nothing"))
        return "; ".join(more) or "nothing: the answer's reward alone"

    def __call__(self, batch: CreditBatch) -> Credit:
        advantages = torch.zeros(batch.completion_mask.shape, device=batch.completion_mask.device)
        loss_weight: torch.Tensor | None = None
        parts: dict[str, torch.Tensor] = {}
        metrics: dict[str, float] = {}
        for name, term in self.terms.items():
            credit = assign_credit(term, batch)
            parts[name] = self.weights.get(name, 1.0) * credit.advantages
            advantages = advantages + parts[name]
            metrics |= {f"{name}/{key}": value for key, value in credit.metrics.items()}
            if credit.loss_weight is not None:
                loss_weight = credit.loss_weight if loss_weight is None else loss_weight * credit.loss_weight
        if self.max_abs is not None:
            cut = advantages.clamp(-self.max_abs, self.max_abs)
            parts["cut"], advantages = cut - advantages, cut
        return Credit(advantages, loss_weight=loss_weight, parts=parts, metrics=metrics)
