"""The built-in batched sampler as an engine: it reads the trainer's own model, so there is nothing to bring over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..policy import Policy
from ..sampling import Generation, RolloutConfig, sample_groups
from . import SamplingOptions

__all__ = ["Native", "NativeEngine"]


@dataclass(frozen=True)
class Native:
    """The built-in sampler; it has no options of its own."""

    def prepare(self) -> None:
        """Nothing can be missing."""

    def start(self, policy: Policy, rollout: RolloutConfig) -> NativeEngine:
        """The sampler of this policy."""
        del rollout
        return NativeEngine(policy)


@dataclass(frozen=True)
class NativeEngine:
    """Samples from the policy itself; see :func:`apportion.grpo.sampling.sample_groups`."""

    policy: Policy

    @property
    def native(self) -> bool:
        return True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        options: SamplingOptions,
        *,
        row_seeds: Sequence[int],
        should_stop: Callable[[], bool] | None = None,
        on_finished: Callable[[Mapping[int, Generation]], None] | None = None,
    ) -> list[Generation]:
        return sample_groups(
            self.policy,
            prompts,
            row_seeds,
            group_size=n,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            compact_below=options.compact_below,
            should_stop=should_stop,
            on_finished=on_finished,
        )

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """They are the policy's own."""

    def wake(self) -> None:
        """It is always awake."""

    def sleep(self) -> None:
        """It holds no memory of its own."""
