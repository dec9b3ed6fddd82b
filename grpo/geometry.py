"""The gradients of several credit strategies on the same rollouts, and how they lie to each other; exact.

One forward over each block of rows, and backward passes for a basis of the strategies' coefficients there; the
gradient of every strategy in every group is a combination of these. What is kept of the gradients is their Gram matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch
from .coefficients import Objective, reduce_rows, touched_rows
from .forward import score_completions
from .gradient_store import GradientPart, gradient_parts, inner_products, trainable
from .gram import GradientGram, ReferenceGram, Work
from .loss import LossConfig
from .policy import Policy
from .update import NonFinite, accumulate_gradients, merge_sums
from .window import Window

__all__ = ["TRAINED", "ReferenceRollouts", "accumulate_by_group", "group_gram"]

TRAINED = "trained"  # name of the strategy that is trained, where it has no other


@dataclass(frozen=True)
class ReferenceRollouts:
    """Further rollouts, as many as can be had, whose gradient stands for the true one.

    Args:
        prompts, completions: token ids of the rollouts.
        batch: the same as tensors, with ``old_logprobs``.
        credit: that of the rule held to be right.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    batch: CreditBatch
    credit: Credit


def group_gram(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    batch: CreditBatch,
    credits: Mapping[str, Credit],
    loss: LossConfig,
    *,
    max_tokens: int,
    temperature: float,
    reference: ReferenceRollouts | None = None,
    micro_batch_rows: int = 16,
    micro_batch_tokens: int | None = None,
    memory_gib: float = 1.0,
) -> GradientGram:
    """The Gram matrix of every strategy's gradient in every group; exact, whatever the options below are.

    The policy's weights, gradients and random streams stay as they are.

    Args:
        policy: at which the gradients are taken.
        prompts, completions: token ids of B rollouts.
        batch: the same as tensors, with ``old_logprobs``, and ``ref_logprobs`` where the KL is in the loss.
        credits: each strategy's credit for ``batch``, by name.
        loss: options of the objective, the same for all.
        max_tokens: see :func:`apportion.grpo.loss.aggregation_weights`.
        temperature: of sampling.
        reference: other rollouts; their gradient is compared with each strategy's.
        micro_batch_rows, micro_batch_tokens: rows and tokens in one forward, at most.
        memory_gib: for the gradients of all groups. Where they need more, all is done several times over, each time
            for a part of the parameters.

    Raises:
        InputError: that would be over 50 times.
        NonFinite: a coefficient is not finite; names the strategy, the row and the token. Or a gradient is not; names
            the strategy and the rows.
    """
    source = _Source(prompts, completions, Objective.of(credits, batch, loss, max_tokens=max_tokens))
    further = []
    if reference is not None:
        one = Objective.of({"reference": reference.credit}, reference.batch, loss, max_tokens=max_tokens)
        further.append(_Source(reference.prompts, reference.completions, one))
    run = _Run(policy, temperature, micro_batch_rows, micro_batch_tokens, Counter())
    parts = gradient_parts(trainable(policy), source.live_pairs + 2 * len(further), memory_gib)
    products = []
    with _streams_kept(policy), torch.enable_grad():
        for part in parts:
            products.append(_products([_groups(run, source, part), *(_halves(run, other, part) for other in further)]))
    total = torch.stack(products).sum(dim=0)
    return _as_gram(tuple(credits), source.groups, total, Work(**run.work, rounds=len(parts)))


def accumulate_by_group(
    policy: Policy,
    window: Window,
    rows: Tensor,
    loss_config: LossConfig,
    *,
    micro_batch_rows: int,
    max_tokens: int,
    temperature: float,
    micro_batch_tokens: int | None = None,
    memory_gib: float = 1.0,
) -> tuple[dict[str, float], GradientGram]:
    """:func:`apportion.grpo.update.accumulate_gradients`, one group after the other; with the groups' Gram matrix.

    The gradients and the sums are those of that function, and so are the arguments. The Gram matrix has one strategy,
    ``trained``.

    Args:
        memory_gib: for the gradients of all groups.

    Raises:
        InputError: they need more.
        NonFinite: a token's loss is not finite.
    """
    parameters, groups = trainable(policy), window.batch.group_ids[rows].unique()
    before = [parameter.grad for parameter in parameters]
    (part,) = gradient_parts(parameters, len(groups), memory_gib, most=1)
    sums: dict[str, float] = {}
    found, seen_at_all = part.empty(len(groups)), [False] * len(parameters)
    for at, its_rows in _with_dead_groups(window, rows, groups, loss_config):
        policy.model.zero_grad(set_to_none=True)
        seen = accumulate_gradients(
            policy,
            window,
            its_rows,
            loss_config,
            micro_batch_rows=micro_batch_rows,
            micro_batch_tokens=micro_batch_tokens,
            max_tokens=max_tokens,
            temperature=temperature,
            step_rows=rows,
        )
        merge_sums(sums, seen)
        gradients = [parameter.grad for parameter in parameters]
        part.fill(found[at], gradients)
        seen_at_all = [known or new is not None for known, new in zip(seen_at_all, gradients)]
    total = found.sum(dim=0)
    for piece, old, is_seen in zip(part.pieces, before, seen_at_all):
        new = total[piece.at : piece.at + piece.stop - piece.start].view_as(piece.parameter).to(piece.parameter.dtype)
        piece.parameter.grad = old if not is_seen else new if old is None else old + new
    gram = inner_products([found]).view(1, len(groups), 1, len(groups))
    return sums, GradientGram((TRAINED,), groups, gram)


def _with_dead_groups(window: Window, rows: Tensor, groups: Tensor, loss: LossConfig) -> list[tuple[int, Tensor]]:
    """Index and rows of each group that has a gradient; the first takes the rows of all that have none along.

    These rows are counted in the sums, but move nothing.
    """
    live, ids = touched_rows(window.credit, window.batch, loss)[rows], window.batch.group_ids[rows]
    alive = [at for at, group in enumerate(groups) if live[ids == group].any()] or [0]
    dead = ~torch.isin(ids, groups[alive])
    return [(at, rows[(ids == groups[at]) | (dead & (at == alive[0]))]) for at in alive]


# --- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Rollouts with the objective on them."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    objective: Objective

    @property
    def groups(self) -> Tensor:
        return self.objective.batch.group_ids.unique()

    @property
    def live_pairs(self) -> int:
        """Pairs of a strategy and a group that may have a gradient."""
        touched, ids = self.objective.touched, self.objective.batch.group_ids
        return sum(int(touched[:, ids == group].any(dim=1).sum()) for group in self.groups)


@dataclass(frozen=True)
class _Run:
    policy: Policy
    temperature: float
    max_rows: int
    max_tokens: int | None
    work: Counter[str]


@dataclass(frozen=True)
class _Kept:
    """Gradients, and how the wanted ones are made of them: ``mix`` (wanted, R) float64 times all R ``vectors``."""

    mix: Tensor
    vectors: list[Tensor]


def _groups(run: _Run, source: _Source, part: GradientPart) -> _Kept:
    """The gradient of every strategy in every group, strategies first."""
    strategies, number = len(source.objective.names), len(source.groups)
    mixes, vectors = [], []
    for at in range(number):
        blocks = list(_blocks(run, source, part, at))
        if not blocks:
            continue
        mix, gradients = torch.cat([m for m, _ in blocks], dim=1), torch.cat([g for _, g in blocks])
        if len(blocks) > 1:  # a group needs no more vectors than it has independent strategies
            mix, basis = reduce_rows(mix)
            gradients = basis.to(gradients) @ gradients
        whole = torch.zeros(strategies, number, mix.shape[1], dtype=torch.float64)
        whole[:, at] = mix
        mixes.append(whole.flatten(0, 1))
        vectors.append(gradients)
    return _Kept(torch.cat([torch.zeros(strategies * number, 0).double(), *mixes], dim=1), vectors)


def _halves(run: _Run, source: _Source, part: GradientPart) -> _Kept:
    """The gradient of the only strategy over every second group, and over the others."""
    halves = part.empty(2)
    for at in range(len(source.groups)):
        for mix, gradients in _blocks(run, source, part, at):
            halves[at % 2] += (mix.to(gradients) @ gradients)[0]
    return _Kept(torch.eye(2, dtype=torch.float64), [halves])


def _blocks(run: _Run, source: _Source, part: GradientPart, group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block of rows of a group: ``mix`` (K, r), and r gradients, by which each strategy's is made."""
    objective = source.objective
    rows = (objective.batch.group_ids == source.groups[group]).nonzero()[:, 0]
    longest = max(len(source.prompts[row]) for row in rows.tolist())
    for block in objective.blocks(rows, longest, run.max_rows, run.max_tokens):
        completions = [source.completions[row] for row in block.tolist()]
        width, tokens = max(map(len, completions)), sum(map(len, completions))
        logprobs = score_completions(
            run.policy,
            [source.prompts[row] for row in block.tolist()],
            completions,
            width=width,
            temperature=run.temperature,
        ).logprobs
        slopes = objective.coefficients(block, logprobs)
        _refuse_non_finite(slopes, objective.names, block)
        mix, basis = reduce_rows(slopes.flatten(1))
        gradients = part.empty(len(basis))
        for at, row in enumerate(basis):
            found = torch.autograd.grad(
                logprobs,
                part.parameters,
                row.view_as(logprobs).to(logprobs),
                retain_graph=at + 1 < len(basis),
                allow_unused=True,
            )
            part.fill(gradients[at], found)
            if not gradients[at].isfinite().all():
                name = objective.names[int(mix[:, at].nonzero()[0])]
                raise NonFinite(f"the gradient of {name} is not finite in rows {', '.join(map(str, block.tolist()))}")
        run.work.update(forwards=1, backwards=len(basis), forward_tokens=tokens, backward_tokens=len(basis) * tokens)
        yield mix, gradients


def _refuse_non_finite(slopes: Tensor, names: Sequence[str], rows: Tensor) -> None:
    bad = (~torch.isfinite(slopes)).nonzero()
    if len(bad):
        strategy, row, token = bad[0].tolist()
        raise NonFinite(f"the loss of {names[strategy]} is not finite in row {int(rows[row])} at token {token}")


def _streams_kept(policy: Policy) -> AbstractContextManager[None]:
    """Dropout, where a model has any, draws from the streams that the run's own forwards draw from."""
    return torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else [])


# --- inner products --------------------------------------------------------------------------------------------------


def _products(kept: Sequence[_Kept]) -> Tensor:
    """Inner products of all wanted gradients, those of one ``kept`` after those of the other; float64, on the CPU."""
    mix = torch.block_diag(*(one.mix for one in kept))
    return mix @ inner_products([vector for one in kept for vector in one.vectors]) @ mix.T


def _as_gram(names: tuple[str, ...], groups: Tensor, total: Tensor, work: Work) -> GradientGram:
    strategies, number = len(names), len(groups)
    own = strategies * number
    reference = None
    if len(total) > own:
        reference = ReferenceGram(total[:own, own:].view(strategies, number, 2), total[own:, own:])
    return GradientGram(names, groups, total[:own, :own].view(strategies, number, strategies, number), reference, work)
