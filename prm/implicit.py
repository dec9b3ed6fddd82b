"""Implicit reward model: rewards of tokens from a language model trained on the outcomes of whole answers alone.

PRIME, arXiv 2502.01456: the reward of a token is ``beta (log pi_phi(y_t) - log pi_ref(y_t))``, and the sum over an
answer is the log-odds that the answer is right. Nobody labels a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence

from ..verifiers import InputError
from .batching import cut_batches, epoch_batches
from .collate import pad_right
from .data import StepData, load_steps
from .rows import BadRow, Row, as_text, column, example_of, plain, shorten
from .steps import StepExample
from .tokenizing import bare_ids, encode_text

__all__ = [
    "ImplicitOptions",
    "OutcomeRow",
    "completion_logprobs",
    "encode_outcomes",
    "implicit_rewards",
    "outcome_loss",
    "outcomes",
    "train_implicit",
]


def outcome_loss(log_ratios: Tensor, mask: Tensor, outcome: Tensor, *, beta: float = 0.05) -> Tensor:
    """Cross-entropy of ``sigmoid(beta sum_t q_t)`` and the outcome, in nats (PRIME, arXiv 2502.01456, eq. of L_CE).

    Args:
        log_ratios: (B, T), ``q_t = log pi_phi(y_t) - log pi_ref(y_t)``, in nats.
        mask: (B, T) bool, the tokens of the answer.
        outcome: (B,) in [0, 1], 1 for a right answer.
        beta: .05 in the paper.

    Returns:
        (B,) float64.

    >>> ratios, mask = torch.tensor([[20.0, 0.0], [10.0, -30.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> outcome_loss(ratios, mask, torch.tensor([1.0, 1.0])).tolist()  # log(1 + 1/e) and log(1 + e)
    [0.31326168751822286, 1.3132616875182228]
    """
    logits = beta * log_ratios.double().where(mask, 0.0).sum(dim=1)
    return binary_cross_entropy_with_logits(logits, outcome.double(), reduction="none")


def outcomes(row: Row, *, label: str = "label", problem_id: str | None = None) -> list[StepExample]:
    """A row ``{prompt, completion, label}``: the whole answer as one step. A reader for ``load_steps``.

    Args:
        row: the label is true, false, 1, 0 or a probability between. Columns ``prompt_ids`` and ``completion_ids``, as
            saved rollouts have them, are kept, so that nothing is encoded anew.
        label: column of the label; ``reward`` for saved rollouts.
        problem_id: column that names the problem; None takes a hash of the prompt.

    >>> outcomes({"prompt": "1+1=?", "completion": "2", "label": True})[0].labels
    (1.0,)
    """
    prompt, completion = as_text(column(row, "prompt"), "prompt"), as_text(column(row, "completion"), "completion")
    value = plain(column(row, label))
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise BadRow("unknown_label", f"column {label!r} is {shorten(value)}; known are true, false and 0 to 1")
    if not completion.strip():
        raise BadRow("empty_step", "the completion is empty")
    problem = None if problem_id is None else str(column(row, problem_id))
    return [example_of(prompt, [completion], [float(value)], "", problem, _sampled(row))]


def load_outcomes(
    path: str | Path,
    *,
    label: str = "label",
    problem_id: str | None = None,
    on_bad_row: Literal["stop", "skip"] = "stop",
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
) -> StepData:
    """Whole answers with their outcomes, from a file, folder, pattern or the hub (see :func:`outcomes`).

    Args:
        path, on_bad_row, split, subset, limit: see :func:`apportion.prm.data.load_steps`.
        label, problem_id: see :func:`outcomes`.
    """
    return load_steps(
        path,
        outcomes,
        on_bad_row=on_bad_row,
        split=split,
        subset=subset,
        limit=limit,
        label=label,
        problem_id=problem_id,
    )


def _sampled(row: Row) -> Row:
    """The ids that a policy read and wrote, where the row has both."""
    names = ("prompt_ids", "completion_ids")
    return {name: [*map(int, row[name])] for name in names} if all(row.get(name) for name in names) else {}


@dataclass(frozen=True)
class OutcomeRow:
    """An answer in tokens, and the probability that it is right."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    label: float

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def encode_outcomes(
    examples: Iterable[StepExample],
    tokenizer: Any,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    max_length: int | None = None,
) -> list[OutcomeRow]:
    """Examples of :func:`outcomes` in tokens. Sampled ids are used as they are; text gets the end token put behind it.

    Args:
        examples: whole answers, each with one label.
        tokenizer: of model and reference, fast.
        encode: prompt to ids, as the policy reads it (chat template); None: the tokenizer alone.
        max_length: most tokens of prompt and answer; None for no limit.

    Raises:
        InputError: an example is longer than ``max_length``, as half an answer has no outcome, or has no prompt.
    """
    read = encode or (lambda prompt: encode_text(tokenizer, prompt, True)[0])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = []
    for number, example in enumerate(examples, start=1):
        ids = example.metadata
        prompt = ids.get("prompt_ids") or read(example.prompt)
        text = ids.get("completion_ids") or bare_ids(tokenizer, [example.completion], split=True)[0] + end
        if len(example.labels) != 1 or example.labels[0] is None or not prompt or not text:
            raise InputError(f"example {number}: is no whole answer with a prompt and a label; read it with `outcomes`")
        row = OutcomeRow(tuple(prompt), tuple(text), example.labels[0])
        if max_length is not None and row.length > max_length:
            raise InputError(f"example {number}: {row.length} tokens; raise max_length={max_length}, or leave it out")
        rows.append(row)
    return rows


def completion_logprobs(model: Any, rows: Sequence[OutcomeRow]) -> tuple[Tensor, Tensor]:
    """Log-probability of every token of the answers, in nats: (B, T), and where there are tokens, (B, T) bool.

    Answers stand at their row's start. The padding lies on the right, where a causal model does not see it.
    """
    ids, real = pad_right([[*row.prompt_ids, *row.completion_ids] for row in rows], 0)
    answers, mask = pad_right([row.completion_ids for row in rows], 0)
    starts = torch.tensor([len(row.prompt_ids) for row in rows])[:, None] - 1  # predicts the answer's first token
    places = (starts + torch.arange(answers.shape[1])).clamp(max=ids.shape[1] - 1).to(model.device)
    logits = model(input_ids=ids.to(model.device), attention_mask=real.to(model.device), use_cache=False).logits
    chosen = logits.gather(1, places[:, :, None].expand(-1, -1, logits.shape[-1])).float().log_softmax(dim=-1)
    logprobs = chosen.gather(2, answers.to(model.device)[:, :, None])[:, :, 0]
    kept = mask.bool().to(model.device)
    return logprobs.where(kept, 0.0), kept


def implicit_rewards(
    model: Any, reference: Any, rows: Sequence[OutcomeRow], *, beta: float = 0.05, batch_tokens: int = 16_384
) -> list[Tensor]:
    """``beta (log pi_phi(y_t) - log pi_ref(y_t))`` of every token of each answer; the sum is the answer's log-odds.

    Args:
        model, reference: causal language models of one vocabulary, in evaluation mode.
        rows: N answers.
        batch_tokens: in one forward, padding included.

    Returns:
        N tensors (T_i,) on the CPU.
    """
    both = (_logprobs_in_parts(one, rows, batch_tokens) for one in (model, reference))
    return [beta * (own - other) for own, other in zip(*both)]


@dataclass(frozen=True)
class ImplicitOptions:
    """How to train on outcomes. ``beta``, ``lr``, ``max_grad_norm`` and no weight decay are PRIME's, for 7B models.

    Args:
        beta: of the reward.
        lr: of AdamW, constant.
        max_grad_norm: the gradient's norm is cut to it.
        epochs: passes over the answers.
        batch_rows: answers in an optimiser step.
        micro_batch_tokens: in one forward and backward, padding included; changes memory, not the result.
        seed: of the order.
    """

    beta: float = 0.05
    lr: float = 1e-6
    max_grad_norm: float = 10.0
    epochs: int = 1
    batch_rows: int = 64
    micro_batch_tokens: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("beta", "lr", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)}: must be over 0")
        for name in ("epochs", "batch_rows", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")


def train_implicit(
    model: Any, reference: Any, rows: Sequence[OutcomeRow], options: ImplicitOptions | None = None
) -> list[float]:
    """Train ``model`` in place on the outcomes of whole answers (see :func:`outcome_loss`).

    Args:
        model: causal language model that learns; its trainable parameters must be float32. In the paper it begins as a
            copy of the reference.
        reference: frozen; asked once for each answer.
        rows: N answers.
        options: how.

    Returns:
        Mean loss of each optimiser step's answers, in nats, before the step: of answers not yet seen in the first
        epoch. ln 2 = 0.693 is what a model that knows nothing has.

    Raises:
        InputError: there is no answer, or a gradient is not finite.
    """
    options = options or ImplicitOptions()
    if not rows:
        raise InputError("no answer to train on; give rows with prompt, completion and label")
    lengths = [row.length for row in rows]
    known = _logprobs_in_parts(reference, rows, options.micro_batch_tokens)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0)
    generator, losses = np.random.default_rng(options.seed), []
    for _ in range(options.epochs):
        for batch in epoch_batches(lengths, "random", rows=options.batch_rows, tokens=None, generator=generator):
            losses.append(_accumulate(model, [rows[i] for i in batch], [known[i] for i in batch], options))
            norm = torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
            if not torch.isfinite(norm):
                raise InputError(f"optimiser step {len(losses)}: the gradient is not finite; lower lr={options.lr}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses


def _accumulate(model: Any, rows: Sequence[OutcomeRow], known: Sequence[Tensor], options: ImplicitOptions) -> float:
    """Add the gradient of the rows' mean loss, in parts of like length; the mean loss."""
    loss, order = 0.0, sorted(range(len(rows)), key=lambda row: -rows[row].length)
    for part in cut_batches(order, [row.length for row in rows], None, options.micro_batch_tokens):
        logprobs, mask = completion_logprobs(model, [rows[index] for index in part])
        ratios = logprobs - pad_sequence([known[index] for index in part], batch_first=True).to(logprobs)
        labels = torch.tensor([rows[index].label for index in part], device=mask.device)
        share = outcome_loss(ratios, mask, labels, beta=options.beta).sum() / len(rows)
        share.backward()
        loss += float(share.detach())
    return loss


@torch.no_grad()
def _logprobs_in_parts(model: Any, rows: Sequence[OutcomeRow], batch_tokens: int) -> list[Tensor]:
    """(T_i,) of each answer, on the CPU."""
    found: list[Tensor] = [torch.zeros(0)] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: -rows[row].length)
    for part in cut_batches(order, [row.length for row in rows], None, batch_tokens):
        logprobs, mask = completion_logprobs(model, [rows[index] for index in part])
        for index, own, real in zip(part, logprobs.cpu(), mask.cpu()):
            found[index] = own[real]
    return found
