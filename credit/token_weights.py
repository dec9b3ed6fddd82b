"""Cheap token weights: the policy's own numbers decide how much of an advantage each token gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..verifiers import InputError
from .batch import Credit, CreditBatch
from .strategy import Conserves, CreditStrategy, Phase, assign_credit, check_choice
from .uniform import Uniform
from .wrapping import added, also_told, evidence, keeps_sign, masked_share, reweighted

__all__ = ["EntropyMask", "EntropyWeight", "PlanBonus", "ProbabilityMask", "TraceDecay", "masked_quantile"]


def masked_quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """The value under which a share of the masked values lies, between two of them by straight line; NaN without any.

    Args:
        values, mask: (B, T); the mask is bool.
        share: in [0, 1].

    >>> masked_quantile(torch.tensor([[4.0, 1.0, 9.0, 2.0]]), torch.tensor([[True, True, False, True]]), 0.75).item()
    3.0
    """
    ordered = values[mask].double().sort().values
    if not len(ordered):
        return values.new_full((), float("nan"))
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class EntropyMask:
    """Only the tokens of highest entropy keep their advantage (Beyond the 80/20 rule, arXiv 2506.01939).

    ``A[t] = 0`` where ``H[t]`` is under the ``1 - share`` quantile of the entropies of all trained tokens of the batch.
    The loss still divides by all tokens, which acts like a learning rate cut to about ``share``; ``renormalise``
    multiplies what is kept by ``tokens / kept tokens`` instead.

    Args:
        inner: hands out the advantages; the outcome's by default.
        share: of the tokens that keep theirs; ties at the threshold are kept.
        renormalise: see above.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    share: float = 0.2
    renormalise: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share must be over 0 and at most 1, not {self.share}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"entropy"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "the policy's entropy at every token")

    def __call__(self, batch: CreditBatch) -> Credit:
        entropy, mask = evidence(batch, "entropy"), batch.completion_mask
        threshold = masked_quantile(entropy, mask, 1 - self.share)
        kept = mask & (entropy >= threshold)
        kept_share = masked_share(kept, mask)
        factor = 1 / kept_share if self.renormalise and kept_share else 1.0
        metrics = {"kept_tokens": kept_share, "entropy_threshold": float(threshold)}
        return reweighted(assign_credit(self.inner, batch), factor * kept, metrics)


@dataclass(frozen=True)
class ProbabilityMask:
    """Tokens that were nearly certain get no advantage (the probability mask of SPO, arXiv 2505.23564).

    ``A[t] = 0`` where ``pi_old(y_t) > limit``.

    Args:
        inner: hands out the advantages; the outcome's by default.
        limit: probability of the sampled token, over which it is masked.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    limit: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.limit <= 1:
            raise InputError(f"limit must be a probability over 0, at most 1, not {self.limit}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"old_logprobs"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "the policy's probability of every token")

    def __call__(self, batch: CreditBatch) -> Credit:
        kept = batch.completion_mask & (evidence(batch, "old_logprobs").double().exp() <= self.limit)
        metrics = {"kept_tokens": masked_share(kept, batch.completion_mask)}
        return reweighted(assign_credit(self.inner, batch), kept, metrics)


@dataclass(frozen=True)
class EntropyWeight:
    """Advantages lean towards tokens of high entropy: ``A[t] * max(0, 1 + strength * (H[t] / mean(H) - 1))``.

    Where the entropy is flat nothing changes.

    Args:
        inner: hands out the advantages; the outcome's by default.
        strength: 0 changes nothing; over 1 the surest tokens get 0.
        over: the mean is over the trained tokens of the ``batch``, or of each ``answer``, whose mean weight is then 1.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    strength: float = 0.1
    over: Literal["batch", "answer"] = "batch"

    def __post_init__(self) -> None:
        check_choice("over", self.over, ("batch", "answer"))
        if self.strength < 0:
            raise InputError(f"strength must be 0 or more, not {self.strength}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {"entropy"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        if self.over == "answer" and self.strength <= 1 and isinstance(self.inner, Uniform):
            return "mass" if keeps_sign(self.inner) else "none"
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "the policy's entropy at every token")

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        entropy = evidence(batch, "entropy").double().where(mask, 0.0)
        dim = None if self.over == "batch" else 1
        mean = entropy.sum(dim=dim, keepdim=True) / mask.sum(dim=dim, keepdim=True).clamp(min=1)
        relative = torch.where(mean > 0, entropy / mean.where(mean > 0, 1.0), 1.0)
        weight = (1 + self.strength * (relative - 1)).clamp(min=0)
        return reweighted(assign_credit(self.inner, batch), weight, {})


@dataclass(frozen=True)
class PlanBonus:
    """Planning tokens get more praise and less blame: ``A[t] + alpha * |A[t]| * 1[t plans]`` (HICRA, arXiv 2509.03646).

    Args:
        inner: hands out the advantages; the outcome's by default.
        plan: name of the verifier whose spans are the planning tokens, whatever their score.
        alpha: size of the bonus; over 1 it turns blame into praise.
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    plan: str = "plan"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if self.alpha < 0:
            raise InputError(f"alpha must be 0 or more, not {self.alpha}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires | {f"spans:{self.plan}"}

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if self.alpha <= 1 and keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return also_told(self.inner, "which phrases plan")

    def __call__(self, batch: CreditBatch) -> Credit:
        table, mask = batch.judged(self.plan), batch.completion_mask
        plans = table.token_mask(table.mask, mask.shape[1]) & mask
        credit = assign_credit(self.inner, batch)
        bonus = (self.alpha * credit.advantages.abs()).where(plans, 0.0)
        return added(credit, "plan", bonus, {"plan_tokens": masked_share(plans, mask)})


@dataclass(frozen=True)
class TraceDecay:
    """Tokens far from the answer's end get less: ``A[t] * max((gamma * lam)^n, floor)``.

    n is the number of trained tokens behind t. The eligibility trace of an outcome that comes at the end, as in
    GRPO-lambda (arXiv 2510.00194), whose exact weights are other ones; the defaults are ours.

    Args:
        inner: hands out the advantages; the outcome's by default.
        gamma, lam: discount and trace decay, each in [0, 1]; only their product counts.
        floor: least weight, in [0, 1].
    """

    inner: CreditStrategy = field(default_factory=Uniform)
    gamma: float = 1.0
    lam: float = 0.99
    floor: float = 0.1

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    @property
    def phase(self) -> Phase:
        return self.inner.phase

    @property
    def conserves(self) -> Conserves:
        return "sign" if keeps_sign(self.inner) else "none"

    @property
    def extra_information(self) -> str:
        return getattr(self.inner, "extra_information", "")

    def __call__(self, batch: CreditBatch) -> Credit:
        mask = batch.completion_mask
        behind = mask.sum(dim=1, keepdim=True) - mask.cumsum(dim=1)
        distance = torch.arange(mask.shape[1] + 1, device=mask.device).double()
        weight = torch.pow(self.gamma * self.lam, distance).clamp(min=self.floor)[behind]
        return reweighted(assign_credit(self.inner, batch), weight, {})
