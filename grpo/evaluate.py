"""Greedy evaluation on problems that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..verifiers.panel import PanelResult, judge
from .collect import check_panel, complete
from .engines import Engine
from .policy import Policy
from .processes import ALONE, Processes, shares
from .task import Problem, Task
from .together import merged_panels

__all__ = ["evaluate", "pass_rates"]


def evaluate(
    policy: Policy,
    task: Task,
    verifiers: Mapping[str, Callable[..., Any]],
    retention_verifier: Callable[..., Any] | None,
    *,
    success: str,
    format: str | None,
    **options: Any,
) -> dict[str, float]:
    """Pass rates on the task's held-out problems and in its retention skill, and the verifiers' faults on the way.

    Args:
        policy: to be evaluated.
        task: gives the problems.
        verifiers: by name.
        retention_verifier: judges the retention skill; None leaves it out.
        success, format: names of the verifiers whose pass rates are wanted; ``format`` may be None.
        options: of :func:`pass_rates`.
    """
    metrics: dict[str, float] = {}
    if held_out := task.held_out():
        wanted = {name: verifiers[name] for name in (success, format) if name is not None}
        rates, metrics = pass_rates(policy, held_out, wanted, **options)
        metrics["eval/success"] = rates[success]
        if format is not None:
            metrics["eval/format_pass_rate"] = rates[format]
    if retention_verifier is not None and (retention := task.retention()):
        rates, errors = pass_rates(policy, retention, {"retention": retention_verifier}, **options)
        metrics |= {**errors, "retention/success": rates["retention"]}
    return metrics


def pass_rates(
    policy: Policy,
    problems: Sequence[Problem],
    verifiers: Mapping[str, Callable[..., Any]],
    *,
    max_new_tokens: int,
    batch: int,
    max_error_share: float = 1.0,
    timeout_s: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    engine: Engine | None = None,
    processes: Processes = ALONE,
) -> tuple[dict[str, float], dict[str, float]]:
    """Share of the likeliest completions that each verifier scores at least 0.5, and how often it failed.

    Args:
        problems: one completion is taken of each.
        max_new_tokens, batch, should_stop, engine: see :func:`apportion.grpo.collect.complete`.
        max_error_share: see :func:`apportion.grpo.collect.check_panel`.
        timeout_s: see :func:`apportion.verifiers.panel.judge`.
        processes: that share the problems.

    Returns:
        Rates by verifier, NaN where it always abstains; and counts by ``verifier/errors_NAME``, where not zero.
    """
    own = shares(range(len(problems)), processes.count)[processes.number]

    def judged() -> PanelResult:
        samples = complete(
            policy,
            [problems[place] for place in own],
            max_new_tokens=max_new_tokens,
            batch=batch,
            should_stop=should_stop,
            engine=engine,
        )
        return judge(verifiers, samples, timeout_s=timeout_s)

    panel = merged_panels(processes.each(judged))
    check_panel(panel, max_error_share)
    rates = {}
    for name in verifiers:
        scores = [score for row in panel.verdicts if (score := row[name].score) is not None]
        rates[name] = sum(score >= 0.5 for score in scores) / len(scores) if scores else math.nan
    return rates, {f"verifier/errors_{name}": float(count) for name, count in panel.errors.items() if count}
