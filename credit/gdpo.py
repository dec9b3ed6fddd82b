"""Several reward channels, each against its group by itself, then their sum against the batch (GDPO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .compose import Composition
from .ops import dead_group_share, group_normalize
from .parts import CENTRING, whiten_parts
from .strategy import Conserves, CreditStrategy, Phase, check_choice

__all__ = ["Gdpo", "TokenGdpo"]


@dataclass(frozen=True)
class Gdpo:
    """Channels normalised apart, so that different mixtures of rewards stay different (GDPO, arXiv 2601.05242).

    ``Z_c = (s_c - mean_g) / (std_g + eps)`` for each channel c, ``z = sum_c w_c Z_c``, and
    ``A = (z - mean) / (std + eps)`` over the batch, on all tokens of the answer. Adding up first would give the groups
    (0, 0), (0, 1) and (0, 0), (1, 1) the same advantages. A channel that is constant in a group adds 0 there; one that
    abstained on an answer adds 0 to it and stays out of the statistics.

    Args:
        channels: weight of each verifier's score, by the verifier's name.
        over: the batch's mean and std count every ``sequence`` once (as in the paper's TRL form), or every ``token``
            (its verl form), so that long answers decide; ``none`` leaves z as it is.
        max_abs: each Z_c is cut to this range, or null as published. One failure among G answers has
            ``|Z| = sqrt(G - 1)``, 2.65 for 8, so that a channel that fails rarely weighs much.
        ddof, eps: of all the normalisations.
    """

    channels: Mapping[str, float] = field(default_factory=lambda: {"answer": 1.0, "format": 1.0})
    over: Literal["sequence", "token", "none"] = "sequence"
    max_abs: float | None = None
    ddof: int = 1
    eps: float = 1e-4
    phase: ClassVar[Phase] = "rollout"
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        if not self.channels:
            raise InputError("channels is empty; add one, for example +credit.channels.answer=1")
        if CENTRING in self.channels:
            raise InputError(f"channels.{CENTRING}: this name is taken by what the batch's mean takes off; rename it")
        check_choice("over", self.over, ("sequence", "token", "none"))
        check_choice("ddof", self.ddof, (0, 1))
        if self.max_abs is not None and not self.max_abs > 0:
            raise InputError(f"max_abs must be over 0, or null for no limit, not {self.max_abs}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(f"score:{name}" for name in self.channels)

    @property
    def extra_information(self) -> str:
        return f"the scores of {', '.join(self.channels)}, each by itself"

    def __call__(self, batch: CreditBatch) -> Credit:
        judged = torch.zeros_like(batch.group_ids, dtype=torch.bool)
        parts, metrics = {}, {}
        for name, weight in self.channels.items():
            score = batch.outcome(name)
            judged = judged | ~score.isnan()
            z = group_normalize(score, batch.group_ids, ddof=self.ddof, eps=self.eps)
            z = z if self.max_abs is None else z.clamp(-self.max_abs, self.max_abs)
            parts[name] = (weight * z)[:, None].where(batch.completion_mask, 0.0)  # float64: channels may cancel
            metrics[f"dead_groups_{name}"] = dead_group_share(score, batch.group_ids)
        if self.over != "none":
            mask = batch.completion_mask & judged[:, None]
            parts = whiten_parts(parts, mask, over=self.over, ddof=self.ddof, eps=self.eps)
        parts = {name: part.float() for name, part in parts.items()}
        return Credit(torch.stack([*parts.values()]).sum(dim=0), parts=parts, metrics=metrics)


@dataclass(frozen=True)
class TokenGdpo:
    """Channels put where they belong before they are added: each a strategy of its own, then one scale for the batch.

    ``A = (sum_c w_c A_c) / (std + eps)``, std over all trained tokens of the batch. GDPO at the level of tokens
    (arXiv 2601.05242): an outcome on the whole answer, a format fault on its span, each normalised by its own strategy.

    Args:
        terms: a strategy for each channel, by name.
        weights: a number for each name; a name left out weighs 1.
        center: also subtract the mean over tokens. A sparse penalty then praises every clean token a little.
        ddof, eps: of the standard deviation.
    """

    terms: Mapping[str, CreditStrategy]
    weights: Mapping[str, float] = field(default_factory=dict)
    center: bool = False
    ddof: int = 1
    eps: float = 1e-4
    conserves: ClassVar[Conserves] = "none"

    def __post_init__(self) -> None:
        check_choice("ddof", self.ddof, (0, 1))
        if CENTRING in self.terms:
            raise InputError(f"terms.{CENTRING}: this name is taken by what the batch's mean takes off; rename it")
        Composition(self.terms, self.weights)  # its checks of the names

    @property
    def requires(self) -> frozenset[str]:
        return Composition(self.terms).requires

    @property
    def phase(self) -> Phase:
        return Composition(self.terms).phase

    @property
    def extra_information(self) -> str:
        return Composition(self.terms).extra_information

    def __call__(self, batch: CreditBatch) -> Credit:
        credit = Composition(self.terms, self.weights)(batch)
        parts = whiten_parts(credit.parts, batch.completion_mask, center=self.center, ddof=self.ddof, eps=self.eps)
        return Credit(torch.stack([*parts.values()]).sum(dim=0), credit.loss_weight, parts, credit.metrics)
