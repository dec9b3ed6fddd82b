"""The evidence about a batch of rollouts, as padded tensors, and the credit made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from ..verifiers import InputError, Verdict
from .align import SpanTable, spans_table

__all__ = ["Credit", "CreditBatch", "PrefixValues", "Rollout", "TreeIndex", "collate"]


@dataclass(frozen=True)
class Rollout:
    """One sampled completion with everything that was seen of it.

    Args:
        prompt_ids: token ids of the prompt as the policy read it.
        completion_ids: sampled token ids, the end token included; never re-encoded.
        logprobs: log-probability of each sampled id under the sampling policy, in nats.
        offsets: half-open character range of each id in ``text``; empty range for special tokens.
        text: what verifiers see: the completion decoded without special tokens.
        group_id: equal for the samples of one prompt in one batch.
        truncated: the length limit ended it, not an end token.
        verdicts: what each verifier said, by the verifier's name.
        reward: weighted sum of the scores, or None where all abstained.
        model_mask: False for ids that the policy did not write (tool output); None means it wrote all.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    offsets: Sequence[tuple[int, int]]
    text: str
    group_id: int
    truncated: bool = False
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    reward: float | None = None
    model_mask: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        for name in ("logprobs", "offsets", "model_mask"):
            value = getattr(self, name)
            if value is not None and len(value) != num_tokens:
                raise ValueError(f"rollout of group {self.group_id}: {len(value)} {name} for {num_tokens} tokens")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"rollout of group {self.group_id}: the reward is {self.reward}; give None for no reward")


@dataclass(frozen=True)
class PrefixValues:
    """Estimated success from the states before, between and after an answer's steps; column 0 is the bare prompt.

    Args:
        value: (B, S + 1) mean reward of continuations from the state; NaN where it was not estimated.
        count: (B, S + 1) how many continuations; 0 where none.
        variance: (B, S + 1) variance of their rewards.
    """

    value: Tensor
    count: Tensor
    variance: Tensor


@dataclass(frozen=True)
class TreeIndex:
    """The path of each row through a sampled tree: D segments, the first one hanging from the root (the prompt).

    Args:
        node: (B, D) long, id of the node in which the segment ends, unique within the batch; -1 beyond the row's end.
            Rows that share a segment share its node. A row's last node is its leaf.
        start, stop: (B, D) long, half-open token range of the segment.
    """

    node: Tensor
    start: Tensor
    stop: Tensor


@dataclass(frozen=True)
class CreditBatch:
    """Evidence about B rollouts of at most T tokens. Strategies see this and nothing else: no text, no model.

    Args:
        completion_mask: (B, T) bool, True where the policy wrote a token that may be trained.
        group_ids: (B,) long, equal for samples of one prompt; rows may come in any order.
        reward: (B,) float64, NaN where no verifier gave a score or the row is left out of training.
        scores: each verifier's score by its name, (B,) float64, NaN where it abstained.
        spans: each verifier's judged spans by its name, in tokens.
        truncated: (B,) bool, True where the length limit ended the row.
        completion_ids: (B, T) long, or None.
        old_logprobs: (B, T) log-probabilities of the sampling policy, or None.
        entropy: (B, T) entropy of the sampling distribution in nats, or None.
        sum_pi_squared: (B, T) sum over the vocabulary of the squared sampling probabilities, or None.
        ref_logprobs: (B, T) log-probabilities of the frozen reference, or None.
        logprobs: (B, T) log-probabilities of the policy at this optimiser step; only in the phase "update".
        token_scores: scores of token scorers (implicit reward, influence, reward model) by name, (B, T).
        prefix_values: values of the states between the steps of a verifier, by that verifier's name.
        tree: which node of a sampled tree each row's segments belong to, or None.
        progress: share of the run's rollout batches that are done, in [0, 1); for weights that decay.
        seed: names the random stream of strategies that draw (the shuffled control).
    """

    completion_mask: Tensor
    group_ids: Tensor
    reward: Tensor
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    spans: Mapping[str, SpanTable] = field(default_factory=dict)
    truncated: Tensor | None = None
    completion_ids: Tensor | None = None
    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    ref_logprobs: Tensor | None = None
    logprobs: Tensor | None = None
    token_scores: Mapping[str, Tensor] = field(default_factory=dict)
    prefix_values: Mapping[str, PrefixValues] = field(default_factory=dict)
    tree: TreeIndex | None = None
    progress: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rows = self.completion_mask.shape[0]
        if self.completion_mask.ndim != 2 or self.completion_mask.dtype != torch.bool:
            raise ValueError("completion_mask must be a (B, T) bool tensor")
        for name, value in {"group_ids": self.group_ids, "reward": self.reward, **self.scores}.items():
            if value.shape != (rows,):
                raise ValueError(f"{name} must have the shape ({rows},), not {tuple(value.shape)}")
        names = ("completion_ids", "old_logprobs", "entropy", "sum_pi_squared", "ref_logprobs", "logprobs")
        streams = {name: getattr(self, name) for name in names} | {
            f"token_scores of {n}": v for n, v in self.token_scores.items()
        }
        for name, value in streams.items():
            if value is not None and value.shape != self.completion_mask.shape:
                shape = tuple(self.completion_mask.shape)
                raise ValueError(f"{name} must have the shape {shape} of completion_mask, not {tuple(value.shape)}")
        for name, table in self.spans.items():
            if len(table.mask) != rows:
                raise ValueError(f"spans of {name}: {len(table.mask)} rows for {rows} rollouts")

    def outcome(self, source: str = "reward") -> Tensor:
        """The reward, or the score of one verifier, as strategies should take it into a statistic: (B,) float64.

        NaN where there is none, and in rows without a trained token: a row that is left out of training leaves the
        baseline of its group as well, whatever the source.

        Args:
            source: ``reward`` or the name of a verifier.
        """
        if source != "reward" and source not in self.scores:
            have = ", ".join(sorted(self.scores)) or "none"
            raise InputError(f"credit needs the score of verifiers.{source}; the batch has scores of: {have}")
        values = self.reward if source == "reward" else self.scores[source]
        return values.double().masked_fill(~self.completion_mask.any(dim=1), float("nan"))

    def judged(self, source: str) -> SpanTable:
        """The spans that one verifier judged."""
        if source not in self.spans:
            have = ", ".join(sorted(self.spans)) or "none"
            raise InputError(f"credit needs the spans of verifiers.{source}; the batch has spans of: {have}")
        return self.spans[source]

    def with_reward(self, reward: Tensor) -> CreditBatch:
        """The same evidence with another outcome reward (B,)."""
        return replace(self, reward=reward)


@dataclass(frozen=True)
class Credit:
    """What a strategy hands out.

    Args:
        advantages: (B, T) float32, zero outside ``completion_mask``.
        loss_weight: (B, T) factor on the whole token objective, or None for one.
        parts: named (B, T) tensors that sum to ``advantages``.
        metrics: numbers to log, without the ``credit/`` prefix.
    """

    advantages: Tensor
    loss_weight: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def collate(rollouts: Sequence[Rollout], *, mask_truncated: bool = False, seed: int = 0) -> CreditBatch:
    """Pad rollouts into a batch.

    Args:
        rollouts: B rollouts.
        mask_truncated: leave truncated rows out: no token is trained and the reward is NaN, so that the row
            does not enter its group's baseline either.
        seed: see :class:`CreditBatch`.
    """
    lengths = torch.tensor([len(r.completion_ids) for r in rollouts], dtype=torch.long)
    width = max((len(r.completion_ids) for r in rollouts), default=0)
    real = torch.arange(width) < lengths[:, None]
    truncated = torch.tensor([r.truncated for r in rollouts], dtype=torch.bool)
    left_out = truncated & mask_truncated
    written = ([True] * len(r.completion_ids) if r.model_mask is None else r.model_mask for r in rollouts)
    reward = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts], dtype=torch.float64)
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.verdicts))
    return CreditBatch(
        completion_mask=_padded(written, real, torch.bool) & ~left_out[:, None],
        group_ids=torch.tensor([r.group_id for r in rollouts], dtype=torch.long),
        reward=reward.masked_fill(left_out, math.nan),
        scores={name: _scores(rollouts, name) for name in names},
        spans={name: _spans(rollouts, name) for name in names},
        truncated=truncated,
        completion_ids=_padded((r.completion_ids for r in rollouts), real, torch.long),
        old_logprobs=_padded((r.logprobs for r in rollouts), real, torch.get_default_dtype()),
        seed=seed,
    )


def _padded(rows: Iterable[Sequence[float]], real: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows one below the other, (B, T), with zeros where ``real`` (B, T) is False."""
    padded = torch.zeros(real.shape, dtype=dtype)
    padded[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return padded


def _scores(rollouts: Sequence[Rollout], name: str) -> Tensor:
    verdicts = (rollout.verdicts.get(name) for rollout in rollouts)
    values = [float("nan") if v is None or v.score is None else float(v.score) for v in verdicts]
    return torch.tensor(values, dtype=torch.float64)


def _spans(rollouts: Sequence[Rollout], name: str) -> SpanTable:
    spans = [rollout.verdicts[name].spans if name in rollout.verdicts else () for rollout in rollouts]
    return spans_table([r.offsets for r in rollouts], spans, texts=[r.text for r in rollouts])
