"""Credit for a batch of verl: ``DataProto``-like batch -> ``CreditBatch`` -> strategy -> advantages. Needs no verl.

verl hands an estimator the rewards, the response mask and the uids. What else a strategy needs travels beside them: the
verdicts as one text per row, written where the answers are judged (spans already in tokens of the sampled ids), and the
log-probabilities that the trainer computed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, CreditStrategy, assign_credit
from ..credit.adaptive import observe
from ..credit.align import SpanTable, spans_table
from ..grpo.metrics import credit_metrics
from ..verifiers import InputError, Sample, Verdict
from .verl_config import VerlCredit

__all__ = ["Evidence", "Rows", "advantages", "decode", "encode", "read_batch", "session_index"]


@dataclass(frozen=True)
class Evidence:
    """What the verifiers said of one session, in tokens of its sampled ids.

    Args:
        tokens: how many ids were judged, those of tools included.
        reward: weighted sum of the scores; None where all abstained.
        truncated: the length limit ended it.
        scores: by verifier; None where it abstained.
        spans: by verifier, (first token, one past the last, score).
        uncovered: by verifier, spans that no token covers.
        errors: verifiers that failed on it.
    """

    tokens: int
    reward: float | None
    truncated: bool = False
    scores: Mapping[str, float | None] = field(default_factory=dict)
    spans: Mapping[str, Sequence[tuple[int, int, float]]] = field(default_factory=dict)
    uncovered: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[str] = ()


@dataclass(frozen=True)
class Rows:
    """What verl does not hand to an estimator, for the R rows of a batch.

    Args:
        keys: ``{uid}_{session}_{index}``; rows of one session are pieces of one answer, in the order of their index.
        lengths: ids of each row's response, without padding.
        evidence: of each row's session, as :func:`encode` wrote it, or None where nothing was judged.
        scores: (R, T) verl's ``rm_scores``: the reward before any KL.
        tensors: further (R, T) tensors by their name in :class:`apportion.credit.CreditBatch`.
        progress, seed: see :class:`apportion.credit.CreditBatch`.
    """

    keys: Sequence[str]
    lengths: Sequence[int]
    evidence: Sequence[str | None]
    scores: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    progress: float = 0.0
    seed: int = 0


def encode(sample: Sample, verdicts: Mapping[str, Verdict], reward: float | None, errors: Sequence[str] = ()) -> str:
    """One line of JSON: verl drops strings from its averages, and refuses lists of unequal length.

    Args:
        sample: with the ``offsets`` of its ids, their number and whether they were ``truncated`` in its metadata.
        verdicts: by verifier.
        reward: of these verdicts.
        errors: verifiers that failed on it.

    >>> from apportion.verifiers import Span
    >>> sample = Sample("q", "1+1=3", None, {"offsets": [(0, 4), (4, 5)], "num_tokens": 2, "truncated": False})
    >>> decode(encode(sample, {"steps": Verdict(0.0, (Span(4, 5, 0.0),))}, -1.0)).spans
    {'steps': [(1, 2, 0.0)]}
    """
    facts, text = sample.metadata, sample.completion
    tables = {name: spans_table([facts["offsets"]], [verdict.spans], [text]) for name, verdict in verdicts.items()}
    seen = Evidence(
        tokens=facts["num_tokens"],
        reward=reward,
        truncated=facts["truncated"],
        scores={name: verdict.score for name, verdict in verdicts.items()},
        spans={name: _listed(table) for name, table in tables.items()},
        uncovered={name: table.uncovered for name, table in tables.items()},
        errors=list(errors),
    )
    return json.dumps(vars(seen), allow_nan=False)


def decode(text: str) -> Evidence:
    """What :func:`encode` wrote."""
    seen = json.loads(text)
    spans = {name: [(start, stop, score) for start, stop, score in spans] for name, spans in seen["spans"].items()}
    return Evidence(**(seen | {"spans": spans}))


def session_index(keys: Sequence[str], lengths: Sequence[int], width: int) -> tuple[list[list[int]], Tensor]:
    """Rows of each session, and where its tokens stand in the flattened rows: (B, W) long, -1 beyond its end.

    verl writes a session of several outputs as several rows. Here they are one answer, so that a session has one vote
    in its group however often it called the model.

    Args:
        keys: see :class:`Rows`.
        lengths: see :class:`Rows`.
        width: T, of the padded rows.

    >>> session_index(["a_0_1", "a_1_0", "a_0_0"], [1, 2, 2], 2)
    ([[2, 0], [1]], tensor([[ 4,  5,  0],
            [ 2,  3, -1]]))
    """
    sessions: dict[str, list[tuple[int, int]]] = {}
    for row, key in enumerate(keys):
        session, _, place = key.rpartition("_")
        sessions.setdefault(session, []).append((int(place), row))
    rows = [[row for _, row in sorted(pieces)] for pieces in sessions.values()]
    places = [torch.cat([row * width + torch.arange(lengths[row]) for row in pieces]) for pieces in rows]
    return rows, torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)


def read_batch(
    rewards: Tensor, response_mask: Tensor, uids: Sequence[Any], rows: Rows, *, mask_truncated: bool = False
) -> tuple[CreditBatch, Tensor, list[Evidence | None]]:
    """What strategies see, one row per session; the place of its tokens in verl's rows; and what verifiers said of it.

    Args:
        rewards: (R, T) ``token_level_rewards``: the scores, less a KL penalty where verl puts it into the reward.
        response_mask: (R, T) 1 for ids that the policy wrote.
        uids: of each row's prompt.
        rows: the rest.
        mask_truncated: see :class:`apportion.integrations.verl_config.VerlCredit`.
    """
    dense = (rows.scores != 0).sum(dim=1).gt(1).nonzero()
    if len(dense):
        raise InputError(
            f"row {rows.keys[int(dense[0])]}: rm_scores has rewards on several tokens, and their places would be lost; "
            "give verl one reward per answer and let verifiers of algorithm.credit.verifiers judge the steps"
        )
    sessions, index = session_index(rows.keys, rows.lengths, response_mask.shape[1])
    mask = _take(response_mask.bool(), index)
    seen = [_evidence(rows, pieces, bool(trained)) for pieces, trained in zip(sessions, mask.any(dim=1))]
    truncated = torch.tensor([one is not None and one.truncated for one in seen])
    penalty = (rewards.double() - rows.scores.double()).sum(dim=1)
    reward = [float(rows.scores[pieces[-1]].double().sum() + penalty[pieces].sum()) for pieces in sessions]
    unknown = torch.tensor([one is not None and one.reward is None for one in seen])
    if mask_truncated:
        mask, unknown = mask & ~truncated[:, None], unknown | truncated
    names = list(dict.fromkeys(name for one in seen if one is not None for name in one.scores))
    groups = {uid: group for group, uid in enumerate(dict.fromkeys(uids))}
    batch = CreditBatch(
        completion_mask=mask,
        group_ids=torch.tensor([groups[uids[pieces[-1]]] for pieces in sessions]),
        reward=torch.tensor(reward, dtype=torch.float64).masked_fill(unknown, float("nan")),
        scores={name: _scores(seen, name) for name in names},
        spans={name: _table(seen, name) for name in names},
        truncated=truncated,
        progress=rows.progress,
        seed=rows.seed,
        **{name: _take(value, index) for name, value in rows.tensors.items()},  # type: ignore[arg-type]
    )
    return batch, index, seen


def advantages(
    credit: VerlCredit, rewards: Tensor, response_mask: Tensor, uids: Sequence[Any], rows: Rows
) -> tuple[Tensor, dict[str, float]]:
    """The advantage of every token, (R, T), and numbers to log.

    A weight of the objective that the strategy gives is a factor of the advantage: the policy's loss is linear in it.

    Args:
        credit: of the run.
        rewards, response_mask, uids, rows: see :func:`read_batch`.
    """
    batch, index, seen = read_batch(rewards, response_mask, uids, rows, mask_truncated=credit.mask_truncated)
    _check_signals(credit.strategy, batch)
    found = assign_credit(credit.strategy, batch)
    observe(credit.strategy, batch)
    values = found.advantages if found.loss_weight is None else found.advantages * found.loss_weight
    flat = torch.zeros(response_mask.numel())
    flat[index[index >= 0]] = values[index >= 0]
    return flat.view(response_mask.shape).to(response_mask.device), _metrics(batch, found, seen)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Values of the rows (R, T) in their sessions (B, W), 0 beyond the end."""
    return torch.where(index >= 0, values.cpu().flatten()[index.clamp(min=0)], torch.zeros((), dtype=values.dtype))


def _evidence(rows: Rows, pieces: Sequence[int], trained: bool) -> Evidence | None:
    """What was seen of a session; nothing of the rows without a token that verl fills a batch up with."""
    text = rows.evidence[pieces[-1]]
    if text is None or not trained:
        return None
    seen = decode(text)
    tokens = sum(rows.lengths[row] for row in pieces)
    if seen.tokens != tokens:
        raise InputError(
            f"row {rows.keys[pieces[-1]]}: {seen.tokens} ids were judged but the session has {tokens}; its spans would "
            "fall on other tokens"
        )
    return seen


def _scores(seen: Sequence[Evidence | None], name: str) -> Tensor:
    found = [None if one is None else one.scores.get(name) for one in seen]
    return torch.tensor([float("nan") if value is None else value for value in found], dtype=torch.float64)


def _table(seen: Sequence[Evidence | None], name: str) -> SpanTable:
    spans = [[] if one is None else list(one.spans.get(name, ())) for one in seen]
    shape = (len(spans), max(map(len, spans), default=0))
    start, stop = torch.zeros(2, *shape, dtype=torch.long)
    score, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, found in enumerate(spans):
        if found:
            first, last, values = zip(*found)
            start[row, : len(found)], stop[row, : len(found)] = torch.tensor(first), torch.tensor(last)
            score[row, : len(found)], mask[row, : len(found)] = torch.tensor(values), True
    return SpanTable(start, stop, score, mask, sum(0 if one is None else one.uncovered.get(name, 0) for one in seen))


def _listed(table: SpanTable) -> list[tuple[int, int, float]]:
    columns = (column[table.mask].tolist() for column in (table.start, table.stop, table.score))
    return list(zip(*columns))


def _check_signals(strategy: CreditStrategy, batch: CreditBatch) -> None:
    """Last resort, for trainers of verl that hand on less; :func:`verl_config.check_run` refuses sooner."""
    tables = {"score": "scores", "spans": "spans", "token_scores": "token_scores", "prefix_values": "prefix_values"}
    for signal in sorted(strategy.requires | ({"logprobs"} if strategy.phase == "update" else set())):
        kind, _, name = signal.partition(":")
        missing = name not in getattr(batch, tables[kind]) if kind in tables else getattr(batch, kind, None) is None
        if missing:
            raise InputError(
                f"algorithm.credit.strategy: {type(strategy).__name__} needs {signal}, which this trainer of verl does "
                "not hand on; use trainer.use_v1=true and reward.reward_manager.name=apportion"
            )


def _metrics(batch: CreditBatch, credit: Credit, seen: Sequence[Evidence | None]) -> dict[str, float]:
    errors = Counter(name for one in seen if one is not None for name in one.errors)
    means = {f"verifier/{name}": float(scores.nanmean()) for name, scores in batch.scores.items()}
    unscored = batch.outcome().isnan() & batch.completion_mask.any(dim=1)
    return {
        **credit_metrics(batch, credit),
        **{name: value for name, value in means.items() if value == value},
        **{f"verifier/errors_{name}": float(errors[name]) for name in batch.scores},
        "reward/unscored": float(unscored.sum()),
    }
