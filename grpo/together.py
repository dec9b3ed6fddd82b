"""What several processes of a run do in shares: sampling, verifying, evidence, scores.

Afterwards every process has the whole rollout batch, in the order in which one process would have it, so that whatever
is computed from it (credit, statistics) is the same in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout, collate
from ..credit.batch import PrefixValues, TreeIndex
from ..verifiers.panel import PanelResult
from .collect import Collected, collect
from .evidence import SAMPLING, Evidence, Gathered
from .forward import score_in_parts
from .policy import Policy
from .processes import Processes, deal, shares
from .sharding import whole
from .task import Problem

__all__ = ["collect_in_shares", "gather_in_shares", "merged_panels", "score_in_shares", "token_scores_in_shares"]


def collect_in_shares(
    processes: Processes, policy: Policy, problems: Sequence[Problem], *arguments: Any, **options: Any
) -> Collected:
    """:func:`apportion.grpo.collect.collect`, each process for its own share of the problems.

    Args:
        problems: N problems; groups of one problem stay in one process, as their random numbers count on.
        arguments, options: further ones of ``collect``.
    """
    if processes.count == 1:
        return collect(policy, problems, *arguments, **options)
    own = _own(processes, problems)

    def work() -> Collected:
        mine = collect(policy, [problems[place] for place in own], *arguments, **options)
        rollouts = [replace(rollout, group_id=own[rollout.group_id]) for rollout in mine.rollouts]
        return replace(mine, problems=(), rollouts=rollouts, panel=_without_verdicts(mine.panel))

    with whole(policy.model):
        parts = processes.each(work)
    rollouts = [rollout for part in parts for rollout in part.rollouts]
    order = sorted(range(len(rollouts)), key=lambda row: rollouts[row].group_id)
    return Collected(
        problems,
        [rollouts[row] for row in order],
        merged_panels([part.panel for part in parts]),
        max(part.seconds_sample for part in parts),
        max(part.seconds_verify for part in parts),
        sum(part.num_tokens for part in parts),
        _merged_trees([part.tree for part in parts if part.rollouts], order),
    )


def gather_in_shares(
    processes: Processes,
    evidence: Evidence,
    requires: frozenset[str],
    policy: Policy,
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
    *arguments: Any,
    masks_truncated: bool,
    **options: Any,
) -> Gathered:
    """:meth:`apportion.grpo.evidence.Evidence.gather`, each process for the groups that it sampled.

    Args:
        masks_truncated: how ``batch`` was made of the rollouts.
        arguments, options: further ones of ``gather``.
    """
    wanted = any(signal in SAMPLING or signal.startswith("prefix_values:") for signal in requires)
    if processes.count == 1 or not wanted:
        return evidence.gather(requires, policy, problems, rollouts, batch, *arguments, **options)
    own = set(_own(processes, problems))
    rows = [row for row, rollout in enumerate(rollouts) if rollout.group_id in own]

    def work() -> tuple[list[int], Gathered]:
        mine = [rollouts[row] for row in rows]
        part = replace(
            collate(mine, mask_truncated=masks_truncated, seed=batch.seed),
            tree=None if batch.tree is None else _rows_of(batch.tree, rows),
            progress=batch.progress,
        )
        gathered = (
            evidence.gather(requires, policy, problems, mine, part, *arguments, **options) if mine else Gathered(part)
        )
        panel = None if gathered.panel is None else _without_verdicts(gathered.panel)
        return rows, replace(gathered, batch=_evidence_only(gathered.batch), panel=panel)

    with whole(policy.model):
        parts = [(rows, gathered) for rows, gathered in processes.each(work) if rows]
    panels = [gathered.panel for _, gathered in parts if gathered.panel is not None]
    merged = _merged_evidence(batch, [(rows, gathered.batch) for rows, gathered in parts])
    return Gathered(
        merged,
        sum(gathered.tokens for _, gathered in parts),
        _merged_costs([gathered.metrics for _, gathered in parts], merged),
        merged_panels(panels) if panels else None,
    )


def score_in_shares(
    processes: Processes,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    group_ids: Tensor,
    **options: Any,
) -> Tensor:
    """Log-probabilities (B, T) of :func:`apportion.grpo.forward.score_in_parts`, each process of some groups."""
    costs = torch.tensor([float(len(completion)) for completion in completions])
    own = deal(costs, group_ids, processes.count)[processes.number].tolist()

    def work() -> tuple[list[int], Tensor | None]:
        mine = [completions[row] for row in own]
        return own, score_in_parts(policy, [prompts[row] for row in own], mine, **options).logprobs if own else None

    logprobs = torch.zeros(len(completions), max(map(len, completions)))
    with whole(policy.model):
        parts = processes.each(work)
    for rows, values in parts:
        if values is not None:
            logprobs[rows, : values.shape[1]] = values
    return logprobs


def token_scores_in_shares(
    processes: Processes,
    evidence: Evidence,
    requires: frozenset[str],
    learners: Mapping[str, Any],
    policy: Policy,
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
) -> tuple[CreditBatch, dict[str, float]]:
    """:meth:`apportion.grpo.evidence.Evidence.score`, each process for some groups.

    A scorer sees the whole batch, since its random numbers may be named by the row, with only the process's own rows to
    be trained. Scorers that learn do so in every process, from everything; the main process's scores are everybody's.

    Args:
        learners: scorers that learn, by name.
    """
    if processes.count == 1 or not any(signal.startswith("token_scores:") for signal in requires):
        return evidence.score(requires, policy, rollouts, batch)
    signals = {f"token_scores:{name}" for name in learners}
    costs = batch.completion_mask.sum(dim=1).double()
    own = torch.zeros(len(costs), 1, dtype=torch.bool)
    own[deal(costs, batch.group_ids, processes.count)[processes.number]] = True

    def score() -> dict[str, Tensor]:
        part = replace(batch, completion_mask=batch.completion_mask & own)
        scored, _ = evidence.score(requires - signals, policy, rollouts, part)
        return {name: scores.where(own, 0.0) for name, scores in scored.token_scores.items()}

    def learn() -> tuple[dict[str, Tensor], dict[str, float]]:
        scored, metrics = evidence.score(requires & signals, policy, rollouts, batch)
        return dict(scored.token_scores), metrics

    with whole(policy.model):
        parts = processes.each(score)
        learned, metrics = processes.each(learn)[0] if requires & signals else ({}, {})
    shared = {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}
    scores = shared | learned
    return replace(batch, token_scores={name: scores[name] for name in evidence.scorers if name in scores}), metrics


def merged_panels(panels: Sequence[PanelResult]) -> PanelResult:
    """What several panels of the same verifiers said, one after the other."""
    verdicts = [row for panel in panels for row in panel.verdicts]
    faulted: dict[str, list[int]] = {}
    first_error: dict[str, str] = {}
    seconds: Counter[str] = Counter()
    before = 0
    for panel in panels:
        for name, rows in panel.faulted.items():
            faulted.setdefault(name, []).extend(before + row for row in rows)
        first_error = {**panel.first_error, **first_error}
        seconds.update(panel.seconds)
        before += len(panel.verdicts)
    return PanelResult(verdicts, faulted, first_error, dict(seconds))


def _own(processes: Processes, problems: Sequence[Problem]) -> list[int]:
    """Places of this process's problems."""
    return shares([problem.id for problem in problems], processes.count)[processes.number]


def _without_verdicts(panel: PanelResult) -> PanelResult:
    """The panel's faults and their number of samples; the verdicts are in the rollouts."""
    return replace(panel, verdicts=[{} for _ in panel.verdicts])


def _rows_of(tree: TreeIndex, rows: Sequence[int]) -> TreeIndex:
    return TreeIndex(tree.node[rows], tree.start[rows], tree.stop[rows])


def _merged_trees(trees: Sequence[TreeIndex | None], order: Sequence[int]) -> TreeIndex | None:
    """The trees of several processes with nodes of their own, their rows in another order."""
    some = [tree for tree in trees if tree is not None]
    if not some:
        return None
    nodes, used = [], 0
    for tree in some:
        nodes.append(torch.where(tree.node >= 0, tree.node + used, -1))
        used = max(used, int(nodes[-1].max()) + 1)
    together = TreeIndex(torch.cat(nodes), torch.cat([t.start for t in some]), torch.cat([t.stop for t in some]))
    return _rows_of(together, order)


def _evidence_only(batch: CreditBatch) -> CreditBatch:
    """What :func:`_merged_evidence` reads; the rest is known everywhere."""
    return replace(batch, scores={}, spans={}, tree=None, completion_ids=None, old_logprobs=None, truncated=None)


def _merged_evidence(batch: CreditBatch, parts: Sequence[tuple[list[int], CreditBatch]]) -> CreditBatch:
    """The batch with the distributions and the values of prefixes that the processes found for their rows."""
    found: dict[str, Any] = {}
    for name in ("entropy", "sum_pi_squared"):
        streams = [(rows, getattr(part, name)) for rows, part in parts]
        if all(values is not None for _, values in streams):
            found[name] = _spread([(rows, values) for rows, values in streams], batch.completion_mask.shape[1], 0.0)
    names = dict.fromkeys(name for _, part in parts for name in part.prefix_values)
    found["prefix_values"] = {
        name: _merged_values([(rows, part.prefix_values[name]) for rows, part in parts]) for name in names
    }
    return replace(batch, **found)


def _merged_values(parts: Sequence[tuple[list[int], PrefixValues]]) -> PrefixValues:
    width = max(values.value.shape[1] for _, values in parts)

    def spread(of: Callable[[PrefixValues], Tensor], empty: float) -> Tensor:
        return _spread([(rows, of(values)) for rows, values in parts], width, empty)

    return PrefixValues(
        spread(lambda v: v.value, float("nan")), spread(lambda v: v.count, 0), spread(lambda v: v.variance, 0.0)
    )


def _spread(parts: Sequence[tuple[list[int], Tensor]], width: int, empty: float) -> Tensor:
    """(B, width) of the processes' rows, which are narrower where theirs are shorter."""
    rows = sum(len(own) for own, _ in parts)
    table = torch.full((rows, width), empty, dtype=parts[0][1].dtype)
    for own, values in parts:
        table[own, : values.shape[1]] = values
    return table


def _merged_costs(parts: Sequence[Mapping[str, float]], batch: CreditBatch) -> dict[str, float]:
    """Sums; the share of states that were asked for more than once is that of all."""
    names = dict.fromkeys(name for part in parts for name in part)
    total = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    if "cost/value_states_shared" in total:
        asked = sum(int((values.count > 0).sum()) for values in batch.prefix_values.values())
        total["cost/value_states_shared"] = 1 - total["cost/value_states"] / asked if asked else 0.0
    return total
