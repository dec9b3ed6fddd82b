"""What is logged of a rollout batch and of its credit; each key is explained in docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, Rollout
from ..credit.ops import group_normalize

__all__ = ["credit_metrics", "drop_missing", "length_metrics", "reward_metrics", "truth_name"]


def drop_missing(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without NaN: what was not measured is not written."""
    return {key: float(value) for key, value in metrics.items() if not math.isnan(value)}


def reward_metrics(batch: CreditBatch, *, success: str | None, format: str | None) -> dict[str, float]:
    """Rewards, groups without signal, and pass rates of one rollout batch.

    Args:
        batch: the evidence.
        success, format: names of the verifiers whose score of at least 0.5 counts as a pass.
    """
    reward = batch.reward[~batch.reward.isnan()]
    groups = batch.group_ids.unique()
    spread = [batch.reward[(batch.group_ids == group) & ~batch.reward.isnan()] for group in groups]
    judged = [values for values in spread if len(values)]
    dead = [values for values in judged if bool((values == values[0]).all())]
    # "Right" and "wrong" need a middle of the scale: that of the rewards seen in the batch, or 0.5.
    middle = 0.5 if len(reward) == 0 or reward.min() == reward.max() else float(reward.min() + reward.max()) / 2
    metrics = {
        "reward/mean": _mean(reward),
        "reward/std": float(reward.std(correction=0)) if len(reward) else math.nan,
        "reward/dead_groups": _share(len(dead), len(judged)),
        "reward/dead_groups_right": _share(sum(float(v[0]) > middle for v in dead), len(judged)),
        "reward/dead_groups_wrong": _share(sum(float(v[0]) <= middle for v in dead), len(judged)),
        "reward/effective_samples": float(sum(len(v) for v in judged) - sum(len(v) for v in dead)),
    }
    for key, name in (("task/success", success), ("format/pass_rate", format)):
        if name is not None and name in batch.scores:
            scores = batch.scores[name]
            metrics[key] = _mean((scores[~scores.isnan()] >= 0.5).double())
    for name, scores in batch.scores.items():
        metrics[f"verifier/{name}"] = _mean(scores[~scores.isnan()])
    return drop_missing(metrics)


def length_metrics(rollouts: Sequence[Rollout], *, success: str | None) -> dict[str, float]:
    """Tokens of completions: all, right, wrong, and the share that the limit cut."""
    lengths = torch.tensor([float(len(r.completion_ids)) for r in rollouts])
    truncated = torch.tensor([r.truncated for r in rollouts])
    metrics = {
        "length/mean": _mean(lengths),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/truncated": _mean(truncated.double()),
    }
    if success is not None:
        scores = [r.verdicts[success].score if success in r.verdicts else None for r in rollouts]
        right = torch.tensor([s is not None and s >= 0.5 for s in scores])
        wrong = torch.tensor([s is not None and s < 0.5 for s in scores])
        metrics["length/right"], metrics["length/wrong"] = _mean(lengths[right]), _mean(lengths[wrong])
    return drop_missing(metrics)


def truth_name(batch: CreditBatch) -> str | None:
    """The verifier taken for the truth about errors: ``truth`` if there is one, else ``steps``, else none."""
    return next((name for name in ("truth", "steps") if name in batch.spans), None)


def credit_metrics(batch: CreditBatch, credit: Credit) -> dict[str, float]:
    """Shape and place of the credit that is trained on."""
    mask, size = batch.completion_mask, credit.advantages.abs()
    total = float(size.sum())
    nonzero = credit.advantages.ne(0) & mask
    outcome = group_normalize(batch.reward, batch.group_ids, scale="none").float()[:, None]
    flipped = nonzero & (credit.advantages.sign() * outcome.sign() < 0)
    compared = nonzero & outcome.ne(0)
    metrics = {
        "credit/abs_mean": _share(total, int(mask.sum())),
        "credit/nonzero_tokens": _share(int(nonzero.sum()), int(mask.sum())),
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
        metrics[f"credit/part_{part}"] = _share(float(values.abs().sum()), int(mask.sum()))
    return drop_missing(metrics | {f"credit/{key}": value for key, value in credit.metrics.items()})


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else math.nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
