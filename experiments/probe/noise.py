"""What becomes of credit when the step verifier gets worse: the same answers, judged again with faults of one kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from ...credit import CreditBatch, Rollout, collate
from ...verifiers import Sample, Verdict
from ...verifiers.noisy import Noisy
from ...verifiers.panel import judge
from .choices import Choice
from .evidence import credit_of, effective
from .options import NoiseOptions
from .record import Figure, NoisePoint

__all__ = ["affected", "sweep", "worse"]

Measure = Callable[[Sequence[Mapping[str, Tensor]]], Mapping[str, Mapping[str, Figure]]]
"""Figures by strategy, from what each handed out in every draw of the faults."""
MOST = 5


def affected(choices: Sequence[Choice], steps: str, options: NoiseOptions) -> list[Choice]:
    """The strategies to try: those named, or the first few that read the verdicts on steps; controls are none of them.

    Args:
        choices: all strategies.
        steps: name of the step verifier.
        options: of the sweep.
    """
    signals = {f"spans:{steps}", f"score:{steps}"}
    if options.strategies is not None:
        return [choice for choice in choices if choice.label in options.strategies]
    return [choice for choice in choices if signals & choice.requires and not choice.control][:MOST]


def sweep(
    choices: Sequence[Choice],
    rollouts: Sequence[Rollout],
    samples: Sequence[Sample],
    batch: CreditBatch,
    options: NoiseOptions,
    measure: Measure,
    *,
    steps: str,
    seed: int,
) -> list[NoisePoint]:
    """The figures of every strategy at every level of every kind of fault.

    Args:
        choices: strategies.
        rollouts, samples: B answers, as strategies and as verifiers see them.
        batch: evidence about them.
        options: kinds and levels.
        measure: figures from credit.
        steps: name of the verifier whose verdicts get worse.
        seed: of the faults.
    """
    found, told = [], _Told(tuple(rollout.verdicts[steps] for rollout in rollouts))
    for kind, levels in options.levels.items():
        # Values of prefixes belong to the boundaries as they were; of others nothing can be told here.
        tried = [c for c in choices if kind != "boundary" or f"prefix_values:{steps}" not in c.requires]
        for level in levels:
            draws = []
            for draw in range(options.draws if level and kind != "boundary" else 1):  # the others hold no chance
                noisy = _judged_again(worse(told, kind, level, seed + draw), rollouts, samples, batch, steps)
                credits, _ = credit_of(tried, noisy)
                draws.append(effective(credits))
            figures = measure(draws)
            found += [NoisePoint(kind, level, choice.label, figures[choice.label]) for choice in tried]
    return found


def worse(verifier: Callable[..., Any], kind: str, level: float, seed: int) -> Noisy:
    """The verifier with faults of one kind."""
    if kind == "miss":
        return Noisy(verifier, miss=level, seed=seed)
    if kind == "false_alarm":
        return Noisy(verifier, false_alarm=level, seed=seed)
    if kind == "boundary":
        return Noisy(verifier, shift=int(level), seed=seed)
    return Noisy(verifier, blur=level, seed=seed)


@dataclass(frozen=True)
class _Told:
    """What a verifier said of the answers, to be said again: it may be a model that is paid, or that says otherwise."""

    verdicts: tuple[Verdict, ...]
    spans: ClassVar[bool] = True

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return list(self.verdicts[: len(samples)])


def _judged_again(
    verifier: Noisy, rollouts: Sequence[Rollout], samples: Sequence[Sample], batch: CreditBatch, steps: str
) -> CreditBatch:
    """The batch with the verdicts of another step verifier."""
    verdicts = judge({steps: verifier}, samples).verdicts
    told = collate([replace(rollout, verdicts=own) for rollout, own in zip(rollouts, verdicts)])
    return replace(
        batch,
        spans={**batch.spans, steps: told.spans[steps]},
        scores={**batch.scores, steps: told.scores[steps]},
    )
