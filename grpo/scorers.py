"""Scores of single tokens, from the policy itself or from a model beside it: evidence for redistributing rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..verifiers import InputError
from .policy import ForwardCounter, Policy

if TYPE_CHECKING:  # both only name a type here
    from .sampling import RolloutConfig
    from .update import OptimConfig

__all__ = [
    "LastTokenAttention",
    "LearningScorer",
    "LogRatio",
    "TokenScorer",
    "evaluating",
    "scored_rows",
    "trained_rows",
]


class TokenScorer(Protocol):
    """Scores every token of a batch: (B, T) on the CPU, finite, zero where there is nothing to say.

    ``requires`` names the signals that it reads from the batch, as those of a strategy do
    (see :class:`apportion.credit.CreditStrategy`). It leaves the policy, its gradients and its mode as they were, and
    draws random numbers from streams named by ``batch.seed`` alone.
    """

    @property
    def requires(self) -> frozenset[str]: ...
    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor: ...


@runtime_checkable
class LearningScorer(TokenScorer, Protocol):
    """A scorer that learns in the course of a run. Its state changes by ``begin``, ``observe`` and ``load_state_dict``
    alone, and belongs to the checkpoint.
    """

    @property
    def learns(self) -> Literal["before", "after"]:
        """Whether it is told of a batch before it scores it, or afterwards."""

    def begin(self, policy: Policy, *, rollout: RolloutConfig, optim: OptimConfig, forwards: ForwardCounter) -> None:
        """Start anew beside a policy that has the weights that the run starts from, which are those of the reference.

        Called before the first batch and before any state is loaded.

        Args:
            policy: copied, never kept: its weights will change.
            rollout, optim: how the policy samples and learns.
            forwards: counts the run's forwards; the scorer has it count those of its own models.
        """

    def observe(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Mapping[str, float]:
        """Learn from one rollout batch; gives numbers to log, without the scorer's name before them."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, texts and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state that ``state_dict`` gave; ValueError where it is of another scorer."""


@dataclass(frozen=True)
class LogRatio:
    """``log pi(y_t) - log pi_ref(y_t)``: the policy as its own implicit reward model (PRIME, arXiv 2502.01456).

    All zero before the first update, while the policy still is the reference.

    Args:
        scale: factor on it.
        cumulative: the sum up to and including each token, a score of the text so far, for a rule that takes its
            differences (RED).
    """

    scale: float = 1.0
    cumulative: bool = False
    requires: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "ref_logprobs"})

    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:  # noqa: ARG002
        if batch.old_logprobs is None or batch.ref_logprobs is None:
            raise InputError("the scorer LogRatio reads ref_logprobs, and the batch has none")
        ratio = (self.scale * (batch.old_logprobs - batch.ref_logprobs)).where(batch.completion_mask, 0.0)
        return ratio.cumsum(dim=1).where(batch.completion_mask, 0.0) if self.cumulative else ratio


@dataclass(frozen=True)
class LastTokenAttention:
    """Attention of an answer's last token on each of its tokens, averaged over the heads of one layer (ABC).

    The paper takes it from a reward model; here it is the policy's own. Everything before the last token is read with
    the model's own attention; for that one token it is switched to ``eager``, the implementation that hands its
    weights out, so that no (L, L) table of weights is kept.

    Args:
        layer: index of the layer; -1 is the last one.
        rows: answers read side by side.
    """

    layer: int = -1
    rows: int = 16
    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InputError(f"the scorer's rows={self.rows}: must be at least 1")

    @torch.no_grad()
    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:
        chosen = trained_rows(batch)
        scores = []
        with evaluating(policy.model):
            for start in range(0, len(chosen), self.rows):
                part = [rollouts[row] for row in chosen[start : start + self.rows]]
                attention = self._attention(policy, [[*r.prompt_ids, *r.completion_ids] for r in part])
                scores += [row[-len(r.completion_ids) :] for row, r in zip(attention, part)]
        return scored_rows(batch, chosen, scores)

    def _attention(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> Tensor:
        """(R, L) attention of the last position on all of them; rows are padded on the left."""
        longest, device = max(map(len, sequences)), policy.device
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in sequences], device=device)
        real = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in sequences], device=device)
        position = (real.cumsum(dim=1) - 1).clamp(min=0)
        model = policy.model
        with policy.autocast():
            read = model(
                input_ids=ids[:, :-1],
                attention_mask=real[:, :-1],
                position_ids=position[:, :-1],
                use_cache=True,
                logits_to_keep=1,
            )
            # Newer transformers call the field and the argument ``cache``, older ones ``past_key_values``.
            name = "cache" if "cache" in read else "past_key_values"
            with _eager_attention(model):
                last = model(
                    input_ids=ids[:, -1:],
                    attention_mask=real,
                    position_ids=position[:, -1:],
                    use_cache=True,
                    output_attentions=True,
                    **{name: read[name]},
                )
        weights = (last.attentions or [None])[self.layer]
        if weights is None:
            raise InputError(f"the scorer LastTokenAttention: {type(model).__name__} gives no attention weights")
        return weights[:, :, -1].float().mean(dim=1).cpu()


def trained_rows(batch: CreditBatch) -> list[int]:
    """Rows with a trained token; the others are not worth a forward."""
    return batch.completion_mask.any(dim=1).nonzero()[:, 0].tolist()


def scored_rows(batch: CreditBatch, rows: Sequence[int], scores: Sequence[Tensor]) -> Tensor:
    """(B, T) float32, zero outside the mask, from the scores of the completion tokens of some rows."""
    table = torch.zeros(batch.completion_mask.shape)
    for row, own in zip(rows, scores):
        table[row, : len(own)] = own
    return table.where(batch.completion_mask, 0.0)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """No dropout inside the block; afterwards the model is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
