"""During training: how the gradients of other strategies lie to that of the trained one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..credit import Credit, CreditBatch, CreditStrategy, assign_credit
from ..verifiers import InputError
from .forward import score_in_parts
from .geometry import TRAINED, group_gram
from .gram import GradientGram, cosines, group_cosines, norms, signal_to_noise
from .importance import weighed
from .loss import LossConfig
from .policy import Policy
from .reference import with_kl_in_reward
from .update import NonFinite
from .window import Window

__all__ = ["StrategyGeometry", "check_geometry", "geometry_metrics"]


@dataclass(frozen=True)
class StrategyGeometry:
    """Compares strategies on the rollouts of every n-th step, on which one of them is trained.

    Args:
        strategies: by name; what they need must be in the window.
        every: rollout batches from one measurement to the next.
        groups: at every optimiser step, take the gradient of one group after the other, for ``optim/groups_snr`` and
            ``optim/groups_cosine`` of the trained strategy.
        memory_gib: see :func:`apportion.grpo.geometry.group_gram`.
    """

    strategies: Mapping[str, CreditStrategy] = field(default_factory=dict)
    every: int = 10
    groups: bool = False
    memory_gib: float = 1.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"geometry.every={self.every}: must be at least 1")
        if not 0 < self.memory_gib < math.inf:
            raise InputError(f"geometry.memory_gib={self.memory_gib}: must be a finite number over 0")
        if TRAINED in self.strategies:
            raise InputError(f"geometry.strategies.{TRAINED}: the trained strategy has this name; choose another")

    @property
    def requires(self) -> frozenset[str]:
        """Signals that the strategies need."""
        return frozenset(signal for strategy in self.strategies.values() for signal in strategy.requires)

    def is_due(self, step: int) -> bool:
        """Whether rollout batch ``step``, counted from 1, is measured."""
        return bool(self.strategies) and (step - 1) % self.every == 0

    def measure(
        self,
        policy: Policy,
        window: Window,
        *,
        loss: LossConfig,
        max_tokens: int,
        temperature: float,
        micro_batch_rows: int,
        micro_batch_tokens: int | None = None,
    ) -> dict[str, float]:
        """Figures of a window with its credit, under the policy as it is now; see :func:`geometry_metrics`.

        Where a loss is not finite there are none: the update itself reports that.

        Args:
            max_tokens: see :func:`apportion.grpo.loss.aggregation_weights`.
            temperature: of sampling.
            micro_batch_rows, micro_batch_tokens: rows and tokens in one forward, at most.
        """
        began = time.perf_counter()
        reference = window.batch.ref_logprobs if window.ref_logprobs is None else window.ref_logprobs
        batch = replace(window.batch, ref_logprobs=reference)
        others = self._credits(policy, window, batch, loss, temperature, micro_batch_rows)
        metrics: dict[str, float] = {}
        try:
            gram = group_gram(
                policy,
                window.prompt_ids,
                window.completion_ids,
                batch,
                {TRAINED: window.credit, **others},
                loss,
                max_tokens=max_tokens,
                temperature=temperature,
                micro_batch_rows=micro_batch_rows,
                micro_batch_tokens=micro_batch_tokens,
                memory_gib=self.memory_gib,
            )
            metrics = geometry_metrics(gram)
        except NonFinite:
            pass
        return metrics | {"cost/seconds_geometry": time.perf_counter() - began}

    def _credits(
        self, policy: Policy, window: Window, batch: CreditBatch, loss: LossConfig, temperature: float, rows: int
    ) -> dict[str, Credit]:
        """Each strategy's credit, as it would be assigned if it were trained."""
        batch = with_kl_in_reward(batch, batch.ref_logprobs, loss)
        if any(strategy.phase == "update" for strategy in self.strategies.values()):
            scored = score_in_parts(
                policy, window.prompt_ids, window.completion_ids, temperature=temperature, rows=rows
            )
            batch = replace(batch, logprobs=scored.logprobs)
        return {
            name: weighed(assign_credit(strategy, batch), window.importance)
            for name, strategy in self.strategies.items()
        }


def check_geometry(geometry: StrategyGeometry | None, processes: int, *, sharded: bool) -> None:
    """Refuse what several processes cannot measure."""
    if geometry is None or processes == 1:
        return
    if geometry.groups:
        raise InputError("geometry.groups: needs one process, and there are several; set it to false")
    if geometry.strategies and sharded:
        raise InputError("geometry.strategies: needs whole weights in each process; set parallel.shard=false")


def geometry_metrics(gram: GradientGram) -> dict[str, float]:
    """What is logged of a Gram matrix whose first strategy is the trained one; what cannot be told is missing.

    Of each other strategy ``geometry/cosine_NAME`` with the trained one's gradient, ``geometry/norm_ratio_NAME`` to it
    and ``geometry/snr_NAME``; of the trained one ``geometry/norm``, ``geometry/snr`` and ``geometry/groups_cosine``.
    """
    cosine, norm, snr = cosines(gram)[0].tolist(), norms(gram).tolist(), signal_to_noise(gram).tolist()
    metrics = {
        "geometry/norm": norm[0],
        "geometry/snr": snr[0],
        "geometry/groups_cosine": float(group_cosines(gram)[0]),
    }
    for at, name in enumerate(gram.names[1:], start=1):
        metrics[f"geometry/cosine_{name}"] = cosine[at]
        metrics[f"geometry/norm_ratio_{name}"] = norm[at] / norm[0] if norm[0] else math.nan
        metrics[f"geometry/snr_{name}"] = snr[at]
    return {key: value for key, value in metrics.items() if math.isfinite(value)}
