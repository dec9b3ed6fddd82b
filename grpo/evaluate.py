"""Greedy evaluation on problems that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..verifiers.panel import judge
from .collect import complete
from .policy import Policy
from .task import Problem

__all__ = ["pass_rates"]


def pass_rates(
    policy: Policy,
    problems: Sequence[Problem],
    verifiers: Mapping[str, Callable[..., Any]],
    *,
    max_new_tokens: int,
    batch: int,
) -> dict[str, float]:
    """Share of the likeliest completions that each verifier scores at least 0.5; NaN where it always abstains.

    Args:
        problems: one completion is taken of each.
        batch: completions sampled side by side.
    """
    samples = complete(policy, problems, max_new_tokens=max_new_tokens, batch=batch)
    verdicts = judge(verifiers, samples).verdicts
    rates = {}
    for name in verifiers:
        scores = [score for row in verdicts if (score := row[name].score) is not None]
        rates[name] = sum(score >= 0.5 for score in scores) / len(scores) if scores else math.nan
    return rates
