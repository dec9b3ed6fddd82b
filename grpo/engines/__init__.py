"""Where completions come from: the built-in sampler, vLLM in this process, or a vLLM server.

What the trainer does with an engine, between two updates of the policy::

    wake -> sync(weights) -> generate, as often as wanted -> sleep -> update
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..policy import Policy
from ..sampling import Generation, RolloutConfig
from .weights import PolicyWeights

__all__ = ["Engine", "EngineOptions", "SamplingOptions", "awake"]


@dataclass(frozen=True)
class SamplingOptions:
    """How one call draws its tokens.

    Args:
        max_new_tokens: longest completion, its end token included.
        temperature: 0 takes the likeliest token.
        top_k, top_p, compact_below: see :class:`~apportion.grpo.sampling.RolloutConfig`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    compact_below: float = 0.75

    @classmethod
    def of(cls, config: RolloutConfig, max_new_tokens: int | None = None) -> SamplingOptions:
        """Those of a rollout batch, with another limit where one is given."""
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        return cls(limit, config.temperature, config.top_k, config.top_p, config.compact_below)


class Engine(Protocol):
    """Samples completions from the policy's weights.

    ``native`` says that it samples from the trainer's own model: its log-probabilities are those of training, and
    completions of any number may be asked for at once only as far as memory goes. The others hold a copy of the
    weights, in other kernels and maybe another precision (see :mod:`apportion.grpo.importance`).
    """

    @property
    def native(self) -> bool: ...

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
        """``n`` completions of every prompt, in order: all of the first prompt, then of the second, ...

        Args:
            prompts: N lists of ids.
            n: completions of each.
            options: how tokens are drawn.
            row_seeds: N * n seeds, one per completion.
            should_stop: asked now and then; True raises :class:`~apportion.grpo.sampling.Interrupted`.
            on_finished: may get completions by row as soon as they are whole; the others are only in what is returned.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights; forget whatever was computed from earlier ones.

        Args:
            weights: names and tensors as in the model's checkpoint; may be gone through several times.
        """
        ...

    def wake(self) -> None:
        """Get ready for :meth:`sync`, which follows."""
        ...

    def sleep(self) -> None:
        """Leave the memory to training; nothing is generated until :meth:`wake` and :meth:`sync`."""
        ...


class EngineOptions(Protocol):
    """What a configuration describes: an engine that is not running yet."""

    def prepare(self) -> None:
        """Refuse at once what cannot work, before anything costs time."""
        ...

    def start(self, policy: Policy, rollout: RolloutConfig) -> Engine:
        """The engine, running, for this policy."""
        ...


@contextmanager
def awake(engine: Engine, policy: Policy) -> Iterator[None]:
    """Have the engine awake inside the block, with the weights that the policy has now."""
    engine.wake()
    try:
        engine.sync(PolicyWeights(policy.model))
        yield
    except BaseException:
        with suppress(Exception):  # it must not hide what went wrong
            engine.sleep()
        raise
    engine.sleep()
