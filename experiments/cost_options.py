"""What a cost estimate depends on beside the strategy: answers, rollouts, update, run and the machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..verifiers import InputError
from .cost_model import Bytes, Hardware, ModelSize

if TYPE_CHECKING:  # it loads torch
    from ..grpo.evidence import Evidence

__all__ = ["Answers", "Engine", "Judge", "Plan", "Rollouts", "Run", "Update"]


@dataclass(frozen=True)
class Answers:
    """What answers are like.

    Args:
        prompt_tokens, tokens: mean lengths of a prompt and of a completion.
        longest: completion of a batch; None: twice the mean, within the limit.
        steps: in a completion.
        uncertain: share of the tokens that were sampled with less than the probability of a cutpoint.
        dead_groups: share of the groups in which all rewards are equal.
        continuation: length of a completion continued from inside an answer, as a share of the mean completion.
    """

    prompt_tokens: float = 200.0
    tokens: float = 600.0
    longest: float | None = None
    steps: float = 8.0
    uncertain: float = 0.2
    dead_groups: float = 0.0
    continuation: float = 0.5

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "tokens", "steps"):
            if not getattr(self, name) > 0:
                raise InputError(f"answer.{name}={getattr(self, name)}: must be over 0")
        for name in ("uncertain", "dead_groups", "continuation"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"answer.{name}={getattr(self, name)}: is a share; give 0 to 1")


@dataclass(frozen=True)
class Rollouts:
    """The rollout batch; the keys mean what they mean in ``apportion train``.

    Args:
        branching: of trees, where a strategy needs them; None: the prime factors of ``group_size``.
        segment_tokens: of trees; None: equal shares of the mean completion.
    """

    prompts_per_step: int = 64
    group_size: int = 8
    max_new_tokens: int = 2048
    branching: Sequence[int] | None = None
    segment_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"rollout.{name}={getattr(self, name)}: must be at least 1")
        if self.branching is not None and math.prod(self.branching) != self.group_size:
            raise InputError(f"rollout.branching={list(self.branching)}: its product must be rollout.group_size")

    @property
    def widths(self) -> list[int]:
        """Branches of a tree at each depth."""
        return list(self.branching) if self.branching is not None else _factors(self.group_size)


@dataclass(frozen=True)
class Update:
    """Of the optimiser; the keys mean what they mean in ``apportion train``."""

    epochs: int = 1
    minibatches: int = 2
    micro_batch_rows: int = 4
    gradient_checkpointing: bool = True
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "micro_batch_rows"):
            if getattr(self, name) < 1:
                raise InputError(f"optim.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Run:
    """Length of the run.

    Args:
        steps: rollout batches.
        eval_every: steps between evaluations; 0: none.
        eval_answers: completions of an evaluation.
        reference_kl: the reference is asked at every evaluation.
    """

    steps: int = 500
    eval_every: int = 25
    eval_answers: int = 500
    reference_kl: bool = True


@dataclass(frozen=True)
class Engine:
    """The sampler.

    Args:
        layer_seconds: what each layer of a decoding step takes whatever its size.
        own_weights: it holds a copy of the weights.
    """

    layer_seconds: float
    own_weights: bool = True


@dataclass(frozen=True)
class Judge:
    """A verifier: seconds that one answer takes on a CPU core, and the parameters of its model, if it has one.

    Judges run in each of the processes that train, so on as many cores as there are GPUs.
    """

    seconds: float = 1e-3
    params: float | None = None


@dataclass(frozen=True)
class Plan:
    """Everything but the strategy.

    Args:
        gpus: devices, each with one process.
        sharding: ``fsdp2`` spreads the states over all devices, ``ddp`` gives each its own.
        reward: names of the verifiers whose scores are the reward.
        judges: verifiers by name; those that are not named are ``other``.
        passes: forwards of scorers that are not ours, by name.
        sized: the size of a model from its number of parameters.
    """

    policy: ModelSize
    device: Hardware
    gpus: int
    sharding: Literal["fsdp2", "ddp"]
    engine: Engine
    answers: Answers
    rollouts: Rollouts
    update: Update
    run: Run
    bytes: Bytes
    reward: Sequence[str]
    judges: Mapping[str, Judge]
    other: Judge
    evidence: Evidence
    passes: Mapping[str, float]
    sized: Callable[[float], ModelSize]

    @property
    def longest(self) -> float:
        """Tokens of the longest answer of a batch."""
        limit = self.rollouts.max_new_tokens
        own = 2 * self.answers.tokens if self.answers.longest is None else self.answers.longest
        return max(min(own, limit), self.answers.tokens)

    def __post_init__(self) -> None:
        if self.answers.tokens > self.rollouts.max_new_tokens:
            raise InputError(
                f"answer.tokens={self.answers.tokens:g}: the mean cannot be over "
                f"rollout.max_new_tokens={self.rollouts.max_new_tokens}"
            )

    @property
    def rows(self) -> int:
        """Answers of a rollout batch."""
        return self.rollouts.prompts_per_step * self.rollouts.group_size

    @property
    def context(self) -> float:
        """Tokens that a token of an answer sees, on average."""
        return self.answers.prompt_tokens + self.answers.tokens / 2

    @property
    def texts(self) -> float:
        """Tokens of all answers, each prompt once for the rows of a micro-batch."""
        copies = math.ceil(self.rollouts.group_size / self.update.micro_batch_rows)
        prompts = self.rollouts.prompts_per_step * copies * self.answers.prompt_tokens
        return self.rows * self.answers.tokens + prompts

    @property
    def tensor_parallel(self) -> int:
        """Devices that share a copy of the sampling weights: as few as leave 40% of the memory to the rest."""
        weights = self.policy.params * self.bytes.sampling
        wanted = 1
        while weights / wanted > 0.6 * self.device.memory and 2 * wanted <= self.gpus:
            wanted *= 2
        return wanted


def _factors(number: int) -> list[int]:
    """Prime factors, large ones first.

    >>> _factors(12)
    [3, 2, 2]
    """
    found, divisor = [], 2
    while divisor <= number:
        if number % divisor:
            divisor += 1
        else:
            found.append(divisor)
            number //= divisor
    return found[::-1] or [1]
