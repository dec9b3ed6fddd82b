"""How long a run is, and what it measures and writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..verifiers import InputError
from .alarms import AlarmConfig, alarm_config
from .drift import DriftConfig, drift_config

__all__ = ["TrainerConfig"]


@dataclass(frozen=True)
class TrainerConfig:
    """How long a run is and what it writes.

    Args:
        seed: of problems, sampling and minibatches.
        steps: rollout batches.
        budget_tokens: stop after the rollout batch in which so many tokens were generated, or None.
        eval_every, save_every, rollouts_every: in rollout batches; 0 is never (the first batch's
            rollouts are always kept).
        keep_checkpoints: how many stay.
        success, format: verifiers whose pass rate is reported; ``format`` may be None.
        reference_kl: measure the KL to the starting weights at each evaluation although it is not in the objective.
        max_error_share: stop once a verifier failed on more than this share of a batch.
        verifier_timeout_s: longest one call of a verifier may take, in seconds; None waits for ever.
        alarms: what is watched of a run that trusts a learned reward model; or its keys, as a mapping.
        drift: limits of what may drift in any run; or its keys, as a mapping.
    """

    seed: int = 0
    steps: int = 60
    budget_tokens: int | None = None
    eval_every: int = 10
    save_every: int = 20
    rollouts_every: int = 10
    keep_checkpoints: int = 2
    success: str = "answer"
    format: str | None = None
    reference_kl: bool = True
    max_error_share: float = 0.5
    verifier_timeout_s: float | None = 300.0
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.alarms, AlarmConfig):
            object.__setattr__(self, "alarms", alarm_config(self.alarms))
        if not isinstance(self.drift, DriftConfig):
            object.__setattr__(self, "drift", drift_config(self.drift))
        lowest = {"steps": 0, "eval_every": 0, "save_every": 0, "rollouts_every": 0, "keep_checkpoints": 1}
        if self.budget_tokens is not None:
            lowest["budget_tokens"] = 1
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"run.{name}={value!r}: must be a whole number of at least {least}")
        share = self.max_error_share
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"run.max_error_share={share!r}: is a share, so between 0 and 1")
        limit = self.verifier_timeout_s
        if limit is not None and (not isinstance(limit, int | float) or not limit > 0):
            raise InputError(f"run.verifier_timeout_s={limit!r}: must be a number of seconds over 0, or null")

    def is_last(self, step: int, tokens: int) -> bool:
        """Whether the run is over once ``step`` rollout batches, of ``tokens`` tokens, are done."""
        return step >= self.steps or (self.budget_tokens is not None and tokens >= self.budget_tokens)

    def evaluates(self, step: int, tokens: int) -> bool:
        """Whether there is an evaluation after ``step``: each ``eval_every`` steps, and at the end."""
        return _due(step, self.eval_every) or self.is_last(step, tokens)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``; the one at the end comes besides."""
        return _due(step, self.save_every)

    def keeps_rollouts(self, step: int) -> bool:
        """Whether the rollouts of ``step`` are written."""
        return step == 1 or _due(step, self.rollouts_every)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
