"""What is logged of a rollout batch and of its credit; each key is explained in docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, Rollout
from ..credit.ops import dead_group_share, group_mean, group_normalize, group_std
from .loss import kl_estimate

__all__ = ["credit_metrics", "drop_missing", "length_metrics", "reward_metrics", "rollout_metrics", "truth_name"]


def drop_missing(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain floats without NaN and infinity: what was not measured is not written, and the file stays JSON.

    >>> drop_missing({"reward/mean": 1, "length/right": math.nan})
    {'reward/mean': 1.0}
    """
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


def rollout_metrics(
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
    credit: Credit,
    ref_logprobs: Tensor | None,
    *,
    success: str,
    format: str | None,
) -> dict[str, float]:
    """All that is measured of a rollout batch before the policy learns from it.

    Args:
        rollouts, batch, credit: B rollouts, the same as tensors, and the credit that is trained on.
        ref_logprobs: (B, T) under the frozen reference, or None where the KL was not asked for.
        success, format: see :func:`reward_metrics`.
    """
    metrics = reward_metrics(rollouts, batch, success=success, format=format)
    metrics |= length_metrics(rollouts, success=success) | credit_metrics(batch, credit)
    if ref_logprobs is not None and batch.old_logprobs is not None:
        metrics["policy/ref_kl"] = _mean(kl_estimate(batch.old_logprobs, ref_logprobs)[batch.completion_mask])
    return drop_missing(metrics)


def reward_metrics(
    rollouts: Sequence[Rollout], batch: CreditBatch, *, success: str, format: str | None
) -> dict[str, float]:
    """Rewards, groups without signal, and pass rates of one rollout batch.

    Means are over all rollouts that were judged, those left out of training included; groups are as the baseline sees
    them: without rows left out. A dead group (all its rewards are equal) is right if all its answers pass ``success``,
    wrong if none does.

    Args:
        rollouts: B rollouts.
        batch: the same as tensors.
        success, format: names of the verifiers whose score of at least 0.5 counts as a pass.
    """
    rewards = _values([rollout.reward for rollout in rollouts])
    passed = _values([_score(rollout, success) for rollout in rollouts])
    passed = (passed >= 0.5).double().where(~passed.isnan(), math.nan)
    outcome = batch.outcome()
    voting = ~outcome.isnan()
    dead = voting & (group_std(outcome, batch.group_ids) == 0)
    pass_rate = group_mean(passed.where(voting, math.nan), batch.group_ids)
    groups = _count_groups(batch.group_ids, voting)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _mean((rewards - rewards.nanmean()).square()) ** 0.5,
        "reward/dead_groups": _share(_count_groups(batch.group_ids, dead), groups),
        "reward/dead_groups_right": _share(_count_groups(batch.group_ids, dead & (pass_rate == 1)), groups),
        "reward/dead_groups_wrong": _share(_count_groups(batch.group_ids, dead & (pass_rate == 0)), groups),
        "reward/effective_samples": float((voting & ~dead).sum()),
        "task/success": _mean(passed),
    }
    if format is not None:
        well_formed = _values([_score(rollout, format) for rollout in rollouts])
        metrics["format/pass_rate"] = _mean((well_formed[~well_formed.isnan()] >= 0.5).double())
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.verdicts):
        scores = _values([_score(rollout, name) for rollout in rollouts])
        metrics[f"verifier/{name}"] = _mean(scores)
        metrics[f"verifier/{name}_dead_groups"] = dead_group_share(scores, batch.group_ids)
    return drop_missing(metrics)


def length_metrics(rollouts: Sequence[Rollout], *, success: str) -> dict[str, float]:
    """Tokens of completions: all, right, wrong, and the share that the limit cut."""
    lengths = torch.tensor([float(len(rollout.completion_ids)) for rollout in rollouts], dtype=torch.float64)
    scores = _values([_score(rollout, success) for rollout in rollouts])
    metrics = {
        "length/mean": _mean(lengths),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/right": _mean(lengths[scores >= 0.5]),
        "length/wrong": _mean(lengths[scores < 0.5]),
        "length/truncated": _share(sum(rollout.truncated for rollout in rollouts), len(rollouts)),
    }
    return drop_missing(metrics)


def truth_name(batch: CreditBatch) -> str | None:
    """The verifier taken for the truth about errors: ``truth`` if there is one, else ``steps``, else none."""
    return next((name for name in ("truth", "steps") if name in batch.spans), None)


def credit_metrics(batch: CreditBatch, credit: Credit) -> dict[str, float]:
    """Shape and place of the credit that is trained on."""
    mask, size = batch.completion_mask, credit.advantages.double().abs()
    total, tokens = float(size.sum()), int(mask.sum())
    nonzero = credit.advantages.ne(0) & mask
    outcome = group_normalize(batch.outcome(), batch.group_ids, scale="none")[:, None]
    flipped = nonzero & (credit.advantages.sign() * outcome.sign() < 0)
    compared = nonzero & outcome.ne(0)
    metrics = {
        "credit/abs_mean": _share(total, tokens),
        "credit/nonzero_tokens": _share(int(nonzero.sum()), tokens),
        "credit/rows_with_credit": float(nonzero.any(dim=1).sum()),
        "credit/sign_flips": _share(int(flipped.sum()), int(compared.sum())),
        "credit/uncovered_spans": float(sum(table.uncovered for table in batch.spans.values())),
    }
    name = truth_name(batch)
    if name is not None and total > 0:
        table, width = batch.spans[name], mask.shape[1]
        wrong = table.token_mask(table.mask & (table.score < 0.5), width) & mask
        right = table.token_mask(table.mask & (table.score >= 0.5), width) & mask & ~wrong
        metrics["credit/mass_on_errors"] = float(size[wrong].sum()) / total
        metrics["credit/mass_on_right_steps"] = float(size[right].sum()) / total
    for part, values in credit.parts.items():
        metrics[f"credit/part_{part}"] = _share(float(values.double().abs().sum()), tokens)
    return drop_missing(metrics | {f"credit/{key}": value for key, value in credit.metrics.items()})


def _score(rollout: Rollout, name: str) -> float | None:
    verdict = rollout.verdicts.get(name)
    return None if verdict is None else verdict.score


def _values(numbers: Sequence[float | None]) -> Tensor:
    """(B,) float64 with NaN for None."""
    return torch.tensor([math.nan if number is None else float(number) for number in numbers], dtype=torch.float64)


def _count_groups(group_ids: Tensor, rows: Tensor) -> int:
    """How many groups have any of ``rows``, (B,) bool."""
    return len(group_ids[rows].unique())


def _mean(values: Tensor) -> float:
    """Mean without NaN; NaN where nothing is left."""
    return float(values.double().nanmean())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
