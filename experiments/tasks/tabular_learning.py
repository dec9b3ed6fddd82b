"""Training of a tabular policy with a strategy's sampled gradient: success after every step, exactly."""

from __future__ import annotations

from ...credit import CreditStrategy
from ...credit.strategy import assign_credit
from ...credit.truth import solve
from .tabular_evidence import PERFECT, Evidence
from .tabular_gradient import group_gradients
from .tabular_sampling import random_logits, refuse_missing, sample_batch, valued_states
from .tabular_tables import TabularTask

__all__ = ["learn"]


def learn(
    task: TabularTask,
    strategy: CreditStrategy,
    *,
    steps: int = 60,
    lr: float = 0.1,
    groups: int = 1,
    group_size: int = 8,
    seed: int = 0,
    evidence: Evidence = PERFECT,
) -> list[float]:
    """Gradient ascent on the logits with a strategy's sampled gradient; the exact expected reward before and after.

    Every step has the length ``lr`` whatever the scale of the advantages, as with Adam, so that strategies differ
    by the direction of their steps alone. A batch without any credit moves nothing.

    Args:
        task: a tabular task.
        strategy: makes the credit.
        steps: updates; each on a batch of its own.
        lr: length of a step in logits.
        groups, group_size: of a batch.
        seed: of the starting policy and the answers; runs of one seed start from one policy.
        evidence: how good the verifiers and values are.

    Returns:
        ``steps + 1`` numbers, the start first.
    """
    refuse_missing(strategy, type(strategy).__name__)
    tables, states = task.tables, valued_states([strategy])
    logits = random_logits(tables, seed, "learn")
    exact = solve(tables.process, tables.process.policy(logits))
    curve = [float(exact.value[0])]
    for step in range(steps):
        sample = sample_batch(
            tables,
            exact,
            groups=groups,
            group_size=group_size,
            seed=seed,
            names=("learn", step),
            evidence=evidence,
            states=states,
        )
        gradient = group_gradients(sample, assign_credit(strategy, sample.batch)).mean(dim=0)
        length = float(gradient.norm())
        if length > 0:
            logits = logits + lr / length * gradient
            exact = solve(tables.process, tables.process.policy(logits))
        curve.append(float(exact.value[0]))
    return curve
