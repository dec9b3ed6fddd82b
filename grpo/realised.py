"""What one real optimiser step does to the probabilities of the tokens, tried out on a copy of the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch
from .kl import kl_estimate
from .loss import LossConfig, token_loss
from .policy import Policy
from .update import NonFinite, OptimConfig, accumulate_gradients, build_optimizer, optimizer_step
from .window import Window

__all__ = ["RealisedUpdate", "class_means", "realised_update"]

NO_CLIP = ("cispo", "sapo", "vespo")  # or none that takes a token its gradient


@dataclass(frozen=True)
class RealisedUpdate:
    """The policy after one step against the policy before, on the tokens of the rollouts.

    Args:
        change: (B, T) float64, log-probability after minus before; zero outside the mask.
        by_class: mean change over the tokens of each class; NaN for a class without any.
        kl: KL(before || after) over the whole vocabulary, mean over the sampled positions.
        kl_k3: the same, estimated from the sampled tokens alone; see :func:`apportion.grpo.kl.kl_estimate`.
        clip_fraction: share of tokens whose gradient a second step on the same rollouts would cut off: the ratio is
            outside the clip range, on the side to which the advantage drives it. Zero for surrogates without a clip.
        grad_norm: length of the gradient before it was cut to ``max_grad_norm``.
    """

    change: Tensor
    by_class: dict[str, float]
    kl: float
    kl_k3: float
    clip_fraction: float
    grad_norm: float


def realised_update(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    batch: CreditBatch,
    credit: Credit,
    loss: LossConfig,
    optim: OptimConfig,
    *,
    max_tokens: int,
    temperature: float,
    classes: Tensor,
    class_names: Sequence[str],
) -> RealisedUpdate:
    """One AdamW step on all rollouts, from a fresh optimiser and at the full learning rate, on a copy of the policy.

    Nothing of the policy changes: not its weights, gradients, mode or random streams. Adam's first step moves each
    weight by about ``lr``, whatever the gradient's length is: what differs between strategies is the direction.

    Args:
        policy: before the step.
        prompts, completions: token ids of B rollouts.
        batch: the same as tensors, with ``old_logprobs``, and ``ref_logprobs`` where the KL is in the loss.
        credit: of the strategy.
        loss: options of the objective.
        optim: options of the step; its schedule and warm-up are left out.
        max_tokens: see :func:`apportion.grpo.loss.aggregation_weights`.
        temperature: of sampling.
        classes: (B, T) long, index of each token's class in ``class_names``; -1 for none.
        class_names: of the classes.

    Raises:
        NonFinite: a loss, or a log-probability after the step, is not finite; names the row and the token. Or the
            gradient is not; names the parameter.
    """
    if batch.old_logprobs is None:
        raise ValueError("a step on a batch needs its old_logprobs")
    after = replace(policy, model=copy.deepcopy(policy.model))
    after.model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        grad_norm = _step(after, prompts, completions, batch, credit, loss, optim, max_tokens, temperature)
        change, new, kl = _compare(policy, after, prompts, completions, batch, temperature, optim.micro_batch_rows)
    mask = batch.completion_mask
    for row, token in (~change.isfinite()).nonzero()[:1].tolist():
        token_id = completions[row][token]
        raise NonFinite(
            f"after the step the log-probability is not finite in row {row} at token {token} (id {token_id})"
        )
    return RealisedUpdate(
        change,
        class_means(change, classes.where(mask, -1), class_names),
        float(kl[mask].mean()),
        float(kl_estimate(new - change, new)[mask].mean()),
        _clip_fraction(new, batch, credit, loss),
        grad_norm,
    )


def class_means(values: Tensor, classes: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean of ``values`` over the tokens of each class, both (B, T); NaN for a class without any.

    >>> class_means(torch.tensor([[0.5, 1.5, 9.0]]), torch.tensor([[0, 0, -1]]), ["error", "other"])
    {'error': 1.0, 'other': nan}
    """
    return {name: float(values[classes == index].double().mean()) for index, name in enumerate(names)}


def _step(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    batch: CreditBatch,
    credit: Credit,
    loss: LossConfig,
    optim: OptimConfig,
    max_tokens: int,
    temperature: float,
) -> float:
    """The step as the trainer takes it, on the policy given; the gradient's norm, 0 where there is nothing to train."""
    optimizer, schedule = build_optimizer(policy, replace(optim, schedule="constant", warmup_steps=0), 1)
    ids = [[list(row) for row in rows] for rows in (prompts, completions)]
    window = Window(0, ids[0], ids[1], batch, credit, batch.ref_logprobs)
    with torch.enable_grad():
        seen = accumulate_gradients(
            policy,
            window,
            torch.arange(len(ids[0])),
            loss,
            micro_batch_rows=optim.micro_batch_rows,
            micro_batch_tokens=optim.micro_batch_tokens,
            max_tokens=max_tokens,
            temperature=temperature,
        )
    return optimizer_step(policy, optimizer, schedule, max_grad_norm=optim.max_grad_norm, step=0) if seen else 0.0


@torch.no_grad()
def _compare(
    before: Policy,
    after: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    batch: CreditBatch,
    temperature: float,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token in the mask: change and new value of its log-probability, and KL(before || after); (B, T) each."""
    change, new, kl = (torch.zeros(batch.completion_mask.shape, dtype=torch.float64) for _ in range(3))
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        some = [
            _distributions(policy, prompts[part], completions[part], batch.completion_mask[part], temperature)
            for policy in (before, after)
        ]
        for at, (old_row, new_row) in enumerate(zip(*some), start=start):
            mask = batch.completion_mask[at]
            chosen = torch.tensor(list(completions[at]), device=old_row.device)[mask[: len(completions[at])], None]
            old_chosen, new_chosen = (row.gather(1, chosen)[:, 0] for row in (old_row, new_row))
            change[at, mask], new[at, mask] = (new_chosen - old_chosen).cpu(), new_chosen.cpu()
            kl[at, mask] = (old_row.exp() * (old_row - new_row)).sum(dim=1).cpu()
    return change, new, kl


def _distributions(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    mask: Tensor,
    temperature: float,
) -> Iterator[Tensor]:
    """For each row the log-distributions from which its masked tokens were drawn, (tokens, V) float64."""
    rows = [torch.tensor([*prompt, *completion]) for prompt, completion in zip(prompts, completions)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(policy.device)  # causal: nobody sees the padding
    with policy.autocast():
        logits = policy.model(input_ids=ids, use_cache=False).logits
    for row, prompt, drawn in zip(logits, prompts, mask):
        places = drawn.nonzero()[:, 0].to(policy.device) + len(prompt) - 1
        yield (row[places].double() / temperature).log_softmax(dim=-1)


def _clip_fraction(logprobs: Tensor, batch: CreditBatch, credit: Credit, loss: LossConfig) -> float:
    """Share of the tokens whose ratio is out of the clip range on the side where that cuts the gradient off."""
    if loss.surrogate in NO_CLIP:
        return 0.0
    assert batch.old_logprobs is not None
    mask, advantages = batch.completion_mask, credit.advantages
    policy_term_only = replace(loss, kl_coef=0.0, kl_off_policy=False)
    ratio = token_loss(
        logprobs, batch.old_logprobs.double(), advantages.double(), policy_term_only, completion_mask=mask
    ).ratio
    low = (ratio < 1 - loss.clip_low) & (advantages < 0)
    high = (ratio > 1 + loss.clip_high) & (advantages > 0)
    return float((low | high)[mask].double().mean())
