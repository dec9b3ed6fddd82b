"""A reward model that scores every beginning of an answer in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..verifiers import InputError
from .files import one_line
from .policy import Policy
from .scorers import scored_rows, trained_rows

__all__ = ["RewardModelScorer"]


@dataclass(frozen=True)
class RewardModelScorer:
    """Scores of all beginnings of an answer, ``s(prompt + y_<=t) - s(prompt)``, by a causal reward model (RED).

    Any ``AutoModelForSequenceClassification`` with one label whose head ``score`` reads the last token: as no position
    of a causal model sees what comes after it, the head at every position gives the scores of all beginnings at once.
    It reads the policy's own ids, so that it must have the policy's vocabulary. Both are checked.

    Args:
        path: folder, or name on the hub.
        rows: answers side by side.
    """

    path: str
    rows: int = 16
    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InputError(f"the scorer's rows={self.rows}: must be at least 1")

    @property
    def counted_models(self) -> tuple[Any, ...]:
        """Models whose tokens are charged to the run."""
        return (self._loaded[0].base_model,)

    @torch.no_grad()
    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:
        model, tokenizer = self._loaded
        if not _same_vocabulary(tokenizer, policy.tokenizer):
            raise InputError(
                f"{self.path}: the reward model's vocabulary is not the policy's, whose ids it has to read"
            )
        model.to(policy.device)
        chosen = trained_rows(batch)
        scores = []
        for start in range(0, len(chosen), self.rows):
            part = [rollouts[row] for row in chosen[start : start + self.rows]]
            levels = _levels(model, [[*r.prompt_ids, *r.completion_ids] for r in part])
            for own, rollout in zip(levels.cpu(), part):
                prompt = len(rollout.prompt_ids)
                scores.append(own[prompt : prompt + len(rollout.completion_ids)] - own[prompt - 1])
        return scored_rows(batch, chosen, scores)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """The model, frozen and checked, and its tokenizer."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path)
            model = AutoModelForSequenceClassification.from_pretrained(self.path).eval().requires_grad_(False)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: cannot be read as a reward model ({one_line(error)})") from error
        head = getattr(model, "score", None)
        if head is None or model.config.num_labels != 1:
            raise InputError(
                f"{self.path}: {type(model).__name__} with {model.config.num_labels} labels; a reward model has one "
                "label and a head called score on every position"
            )
        if not _is_causal(model):
            raise InputError(f"{self.path}: {type(model).__name__} looks ahead; a causal reward model is needed")
        return model, tokenizer


def _levels(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """(R, L): the head's output at every position; rows are padded with zeros on the right, which none of them sees."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in sequences], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return model.score(hidden)[:, :, 0].float()


@torch.no_grad()
def _is_causal(model: Any) -> bool:
    """Whether the scores of a beginning stay the same when the text goes on otherwise."""
    one, other = _levels(model, [[1, 2, 3, 1], [1, 2, 3, 2]])
    return torch.allclose(one[:3], other[:3], atol=1e-3)


@lru_cache(maxsize=4)
def _same_vocabulary(one: Any, other: Any) -> bool:
    return one is other or one.get_vocab() == other.get_vocab()
