"""How much the policy's own final answer depends on each token before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..verifiers import InputError
from .policy import Policy
from .scorers import evaluating, scored_rows, trained_rows
from .seeds import named_generator

__all__ = ["CounterfactualSpans", "GradientInfluence", "PerturbationInfluence", "answer_tokens"]


def answer_tokens(batch: CreditBatch, source: str, ends: Sequence[int]) -> Tensor:
    """The tokens of each row's final answer, (B, T) bool.

    They are those of the last span that the verifier ``source`` located; where it located none, the row's last token
    that is not an end token.

    Args:
        source: name of a verifier; one that the batch does not know has located nothing.
        ends: ids of end tokens.
    """
    mask, width = batch.completion_mask, batch.completion_mask.shape[1]
    located = torch.zeros_like(mask)
    if source in batch.spans:
        table = batch.spans[source]
        last = table.mask & (table.mask.flip(1).cumsum(dim=1).flip(1) == 1)
        located = table.token_mask(last, width) & mask
    if batch.completion_ids is None:
        raise ValueError("the batch has no completion_ids")
    content = mask & ~torch.isin(batch.completion_ids, torch.tensor(list(ends)))
    tail = content & (content.flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(located.any(dim=1, keepdim=True), located, tail)


@dataclass(frozen=True)
class GradientInfluence:
    """``|grad_t J . e_t|``, J the KL from the answer's clean distribution to that under noise (OAR, arXiv 2601.07408).

    The noise, normal with the standard deviation ``noise``, is added to all embeddings e; J is summed over the
    positions that predict the answer's tokens. Two forwards and one backward, in the precision of the weights without
    autocast, since bfloat16 would round the noise away. A token of the answer itself gets the row's largest influence:
    nothing decides the answer more; what comes after it gets none.

    Args:
        answer: name of the verifier that locates the answer, see :func:`answer_tokens`.
        noise: standard deviation.
        rows: answers side by side.
    """

    answer: str = "answer"
    noise: float = 1e-3
    rows: int = 16
    requires: ClassVar[frozenset[str]] = frozenset({"completion_ids"})

    def __post_init__(self) -> None:
        _check_rows(self.rows)
        if not self.noise > 0:
            raise InputError(f"the scorer's noise={self.noise}: must be over 0, or there is no divergence to derive")

    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:
        answer = answer_tokens(batch, self.answer, policy.eos_ids)
        chosen = [row for row in trained_rows(batch) if answer[row].any()]
        scores = []
        with evaluating(policy.model):
            for start in range(0, len(chosen), self.rows):
                rows = chosen[start : start + self.rows]
                inputs = [_Input.of(rollouts[row], answer[row]) for row in rows]
                influence = self._influence(policy, inputs, [(batch.seed, row) for row in rows])
                scores += [own[one.prompt : len(one.ids)] for own, one in zip(influence, inputs)]
        return crowned(scored_rows(batch, chosen, scores), answer)

    def _influence(self, policy: Policy, inputs: Sequence[_Input], seeds: Sequence[tuple[int, int]]) -> Tensor:
        """(R, L) on the CPU."""
        with torch.no_grad():
            clean = _answer_logprobs(policy, inputs)
            clean_embedding = policy.model.get_input_embeddings()(_padded(inputs, policy.device))
        noise = torch.zeros(clean_embedding.shape)
        for row, (one, (seed, index)) in enumerate(zip(inputs, seeds)):
            draw = named_generator(seed, "influence", index).standard_normal((len(one.ids), noise.shape[2]))
            noise[row, : len(one.ids)] = torch.from_numpy(draw)
        with torch.enable_grad():
            embedding = (clean_embedding + self.noise * noise.to(clean_embedding)).requires_grad_()
            noisy = _answer_logprobs(policy, inputs, embedding)
            divergence = (clean.exp() * (clean - noisy)).sum()
            (gradient,) = torch.autograd.grad(divergence, embedding)
        return (gradient.float() * clean_embedding.float()).sum(dim=2).abs().cpu()


@dataclass(frozen=True)
class PerturbationInfluence:
    """KL from the answer's distribution to that with the token replaced by a blank one (OAR, arXiv 2601.07408).

    Summed over the positions that predict the answer's tokens: one forward for every token before the answer. A token
    of the answer itself gets the row's largest influence, what comes after it none.

    Args:
        answer: name of the verifier that locates the answer, see :func:`answer_tokens`.
        blank: id that stands for nothing; None takes the tokenizer's padding, unknown or end token, in this order.
        rows: texts side by side.
    """

    answer: str = "answer"
    blank: int | None = None
    rows: int = 64
    requires: ClassVar[frozenset[str]] = frozenset({"completion_ids"})

    def __post_init__(self) -> None:
        _check_rows(self.rows)

    @torch.no_grad()
    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:
        answer = answer_tokens(batch, self.answer, policy.eos_ids)
        own = (policy.tokenizer.pad_token_id, policy.tokenizer.unk_token_id, policy.eos_ids[0])
        blank = self.blank if self.blank is not None else next(index for index in own if index is not None)

        def variants(one: _Input, row: int) -> Iterator[tuple[list[int], _Input]]:
            for token in range(int(answer[row].nonzero()[-1])):
                if batch.completion_mask[row, token] and not answer[row, token]:
                    place = one.prompt + token
                    yield [token], one.with_ids([*one.ids[:place], blank, *one.ids[place + 1 :]])

        def divergence(clean: Tensor, other: Tensor, _: Tensor) -> Tensor:
            return (clean.exp() * (clean - other)).sum(dim=1)

        return crowned(_compared(policy, rollouts, batch, answer, variants, divergence, self.rows), answer)


@dataclass(frozen=True)
class CounterfactualSpans:
    """The answer's log-probability less that with a step out of sight (counterfactual spans, arXiv 2602.09331).

    A step is put out of sight by masking it from the attention of all later tokens; positions stay. Every token of the
    step gets the difference, which is negative for a distractor: one forward for each step. Of a step that holds the
    answer, only what precedes the answer is masked. A token of the answer itself gets the row's largest difference,
    what comes after it none.

    Args:
        steps: name of the verifier whose spans are the steps.
        answer: name of the verifier that locates the answer, see :func:`answer_tokens`.
        rows: texts side by side.
    """

    steps: str = "steps"
    answer: str = "answer"
    rows: int = 32

    def __post_init__(self) -> None:
        _check_rows(self.rows)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"completion_ids", f"spans:{self.steps}"})

    @torch.no_grad()
    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:
        answer = answer_tokens(batch, self.answer, policy.eos_ids)
        step_ids = batch.judged(self.steps).step_ids(batch.completion_mask)

        def variants(one: _Input, row: int) -> Iterator[tuple[list[int], _Input]]:
            before = step_ids[row, : int(answer[row].nonzero()[0])]
            for step in before[before >= 0].unique().tolist():
                tokens = (before == step).nonzero()[:, 0].tolist()
                yield tokens, one.hiding([one.prompt + token for token in tokens])

        def drop(clean: Tensor, other: Tensor, target: Tensor) -> Tensor:
            return (clean - other).gather(1, target[:, None])[:, 0]

        return crowned(_compared(policy, rollouts, batch, answer, variants, drop, self.rows), answer)


def crowned(scores: Tensor, answer: Tensor) -> Tensor:
    """Scores in which the answer's own tokens have the largest one of their row, at least 0.

    Args:
        scores: (B, T).
        answer: (B, T) bool.
    """
    if not scores.shape[1]:
        return scores
    return torch.where(answer, scores.amax(dim=1, keepdim=True).clamp(min=0), scores)


@dataclass(frozen=True)
class _Input:
    """A text to be read: its ids, how many are the prompt's, which positions predict the answer, which are hidden."""

    ids: list[int]
    prompt: int
    predicting: list[int]
    hidden: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rollout: Rollout, answer: Tensor) -> _Input:
        prompt = len(rollout.prompt_ids)
        places = [prompt + token - 1 for token in answer.nonzero()[:, 0].tolist()]
        return cls([*rollout.prompt_ids, *rollout.completion_ids], prompt, places)

    def with_ids(self, ids: list[int]) -> _Input:
        return _Input(ids, self.prompt, self.predicting)

    def hiding(self, places: list[int]) -> _Input:
        return _Input(self.ids, self.prompt, self.predicting, places)


def _compared(
    policy: Policy,
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
    answer: Tensor,
    variants: Callable[[_Input, int], Iterator[tuple[list[int], _Input]]],
    difference: Callable[[Tensor, Tensor, Tensor], Tensor],
    rows: int,
) -> Tensor:
    """(B, T): for each variant of a row, how the answer's distribution differs, on the tokens that the variant is of.

    Args:
        variants: of an input and its row: pairs of tokens and the changed input.
        difference: of the clean and the changed log-probabilities (A, V) and the answer's ids (A,): (A,), summed.
    """
    table = torch.zeros(batch.completion_mask.shape)
    with evaluating(policy.model):
        for row in trained_rows(batch):
            if not answer[row].any():
                continue
            one = _Input.of(rollouts[row], answer[row])
            clean = _answer_logprobs(policy, [one])
            target = torch.tensor([one.ids[place + 1] for place in one.predicting], device=clean.device)
            changed = list(variants(one, row))
            for start in range(0, len(changed), rows):
                part = changed[start : start + rows]
                other = _answer_logprobs(policy, [text for _, text in part]).unflatten(0, (len(part), -1))
                for (tokens, _), logprobs in zip(part, other):
                    table[row, tokens] = float(difference(clean, logprobs, target).sum())
    return table.where(batch.completion_mask, 0.0)


def _answer_logprobs(policy: Policy, inputs: Sequence[_Input], embedding: Tensor | None = None) -> Tensor:
    """Log-probabilities (sum of A, V) at the positions that predict the answers, row by row, without autocast.

    Args:
        embedding: (R, L, H) in the place of the ids' own.
    """
    device = policy.device
    ids = _padded(inputs, device)
    first = min(place for one in inputs for place in one.predicting)
    facts: dict[str, Any] = {"input_ids": ids} if embedding is None else {"inputs_embeds": embedding}
    if any(one.hidden for one in inputs):
        mask = torch.ones_like(ids)
        for row, one in enumerate(inputs):
            mask[row, one.hidden] = 0
        position = torch.arange(ids.shape[1], device=device).expand_as(ids)
        facts |= {"attention_mask": mask, "position_ids": position}
    logits = policy.model(**facts, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    row_of = torch.tensor([index for index, one in enumerate(inputs) for _ in one.predicting], device=device)
    place = torch.tensor([place - first for one in inputs for place in one.predicting], device=device)
    return logits[row_of, place].float().log_softmax(dim=1)


def _padded(inputs: Sequence[_Input], device: torch.device) -> Tensor:
    """Ids (R, L), zeros on the right: under causal attention no row sees its padding."""
    longest = max(len(one.ids) for one in inputs)
    return torch.tensor([one.ids + [0] * (longest - len(one.ids)) for one in inputs], device=device)


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise InputError(f"the scorer's rows={rows}: must be at least 1")
