"""Options of ``apportion probe``, the keys under ``probe``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ...verifiers import InputError
from ...verifiers.panel import gives_spans
from ..build import check_options

if TYPE_CHECKING:
    from .choices import Choice

__all__ = ["NoiseOptions", "ProbeOptions", "TabularOptions"]

KINDS = ("miss", "false_alarm", "boundary", "calibration")


@dataclass(frozen=True)
class NoiseOptions:
    """Levels of each kind of fault of the step verifier; an empty list leaves the kind out.

    Args:
        miss: share of the wrong steps that are called right.
        false_alarm: share of the right steps that are called wrong.
        boundary: tokens by which every step's boundaries come too late.
        calibration: standard deviation of what is added to the log-odds of a score.
        draws: independent draws of the faults of a level; their answers are pooled.
        strategies: labels of the strategies to try; None: the first five that read the verdicts on steps.
    """

    miss: Sequence[float] = ()
    false_alarm: Sequence[float] = ()
    boundary: Sequence[int] = ()
    calibration: Sequence[float] = ()
    draws: int = 4
    strategies: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for kind in ("miss", "false_alarm"):
            for level in getattr(self, kind):
                if not 0 <= level <= 1:
                    raise InputError(f"probe.noise.{kind}: {level} is no share; give numbers between 0 and 1")
        for kind in ("boundary", "calibration"):
            if not all(0 <= level < math.inf for level in getattr(self, kind)):
                raise InputError(f"probe.noise.{kind}: levels are finite numbers of at least 0")
        if self.draws < 1:
            raise InputError(f"probe.noise.draws={self.draws}: must be at least 1")

    @property
    def levels(self) -> dict[str, list[float]]:
        """By kind, those kinds that have any."""
        kinds = {kind: [float(level) for level in getattr(self, kind)] for kind in KINDS}
        return {kind: levels for kind, levels in kinds.items() if levels}


@dataclass(frozen=True)
class TabularOptions:
    """Of a probe of a tabular task.

    Args:
        policies: random policies, each of a success between .1 and .9; they are the replicates.
        groups: of answers, for each policy.
        noise_policies: random policies at each level of noise.
        runs: policies that are trained at each level of noise; 0 trains none.
        steps, lr: of each such run.
    """

    policies: int = 60
    groups: int = 16
    noise_policies: int = 20
    runs: int = 3
    steps: int = 60
    lr: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("policies", 2), ("groups", 1), ("noise_policies", 2), ("runs", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise InputError(f"probe.tabular.{name}={getattr(self, name)}: must be at least {least}")
        if not self.lr > 0:
            raise InputError(f"probe.tabular.lr={self.lr}: must be over 0")


@dataclass(frozen=True)
class ProbeOptions:
    """What is measured, and how closely.

    Args:
        problems: number of problems; each gets ``rollout.group_size`` answers.
        rollouts: file or folder of rollouts that a run saved, or None.
        steps, answer, format: verifiers whose spans are the steps, the answer and the layout; the latter two may be
            None.
        tau: a true advantage over it counts as one, as a share of the range of rewards.
        resamples: bootstrap samples of the problems.
        geometry: exact gradients.
        reference_samples: further answers to each problem for the reference gradient; 0 leaves it out.
        reference_problems: number of other problems for it; 0: the same problems.
        update: one real optimiser step with each strategy.
        noise: faults of the step verifier.
        tabular: of a tabular task.
        drawn: answers in the page.
        memory_gib: most that the gradients may take at a time.
    """

    problems: int = 32
    rollouts: str | None = None
    steps: str = "steps"
    answer: str | None = "answer"
    format: str | None = "format"
    tau: float = 0.05
    resamples: int = 1000
    geometry: bool = True
    reference_samples: int = 8
    reference_problems: int = 512
    update: bool = True
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    tabular: TabularOptions = field(default_factory=TabularOptions)
    drawn: int = 6
    memory_gib: float = 1.0

    def __post_init__(self) -> None:
        lowest = {"problems": 2, "resamples": 10, "reference_samples": 0, "reference_problems": 0, "drawn": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise InputError(f"probe.{name}={getattr(self, name)}: must be at least {least}")
        if self.reference_samples and (self.reference_samples < 4 or self.reference_samples % 2):
            raise InputError(
                f"probe.reference_samples={self.reference_samples}: must be even and at least 4, for two halves, or 0"
            )
        for name in ("tau", "memory_gib"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"probe.{name}={getattr(self, name)}: must be a finite number over 0")

    @classmethod
    def of(cls, node: DictConfig) -> ProbeOptions:
        """From the configuration, every key checked."""
        plain: Any = OmegaConf.to_container(node, resolve=True)
        given = {name: value for name, value in plain.items() if name not in ("strategies", "controls")}
        below: dict[str, Any] = {"noise": NoiseOptions, "tabular": TabularOptions}
        for name, kind in below.items():
            inner = given.pop(name, None) or {}
            if not isinstance(inner, dict):
                raise InputError(f"probe.{name}={inner!r}: holds options; give them as probe.{name}.KEY=...")
            check_options(kind, inner, f"probe.{name}")
            below[name] = kind(**inner)
        check_options(cls, given, "probe")
        return cls(**given, **below)

    def check_names(self, choices: Sequence[Choice]) -> None:
        """Refuse labels that no strategy has, and what saved rollouts cannot tell."""
        labels = [choice.label for choice in choices]
        for name in self.noise.strategies or ():
            if name not in labels:
                raise InputError(
                    f"probe.noise.strategies: no strategy has the label {name!r}; there are: {', '.join(labels)}"
                )
        grown = [choice.label for choice in choices if "tree" in choice.requires]
        if grown and self.rollouts is not None:
            raise InputError(f"probe.rollouts: saved rollouts hold no tree, which {grown[0]} reads; sample new ones")

    def check_verifiers(self, verifiers: Mapping[str, Any], truth: Any) -> None:
        """Refuse names of verifiers that are not there or mark no spans, before anything is sampled.

        Args:
            verifiers: by name.
            truth: what values the answers.
        """
        spans = sorted(name for name, one in verifiers.items() if gives_spans(one))
        have = f"those with spans are: {', '.join(spans) or 'none'}"
        for key in ("steps", "answer", "format"):
            name = getattr(self, key)
            if name not in (None, key, *spans):  # its own name stands for none where there is no such verifier
                raise InputError(f"probe.{key}={name}: no verifier of this name marks spans; {have}")
        units, knows = getattr(truth, "units", None), getattr(truth, "truth", None)
        if units not in (None, "tokens", *spans):
            raise InputError(f"truth.units={units}: no verifier of this name marks spans; {have}; or give tokens")
        if knows not in (None, *spans):
            raise InputError(f"truth.truth={knows}: no verifier of this name marks spans; {have}; or give null")
