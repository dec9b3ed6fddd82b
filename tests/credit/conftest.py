"""Batches made by hand: rows of one-character tokens with judged spans for four verifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from apportion.credit import CreditBatch, Rollout, collate
from apportion.verifiers import Span, Verdict

VERIFIERS = ("steps", "format", "truth", "answer")
Judged = Sequence[tuple[int, int, float]]


def make_rollout(
    tokens: int,
    reward: float | None = None,
    group: int = 0,
    *,
    spans: Judged = (),
    by_verifier: Mapping[str, Judged] | None = None,
    scores: Mapping[str, float | None] | None = None,
    truncated: bool = False,
    written: Sequence[bool] | None = None,
) -> Rollout:
    """A rollout of ``tokens`` one-character tokens.

    Args:
        spans: (start, stop, score) of every verifier that ``by_verifier`` does not name.
        scores: by verifier; the others give the reward as their score.
        written: False for a token of a tool.
    """
    verdicts = {}
    for name in VERIFIERS:
        judged = (by_verifier or {}).get(name, spans)
        score = (scores or {}).get(name, reward)
        verdicts[name] = Verdict(score, tuple(Span(start, stop, value) for start, stop, value in judged))
    return Rollout(
        prompt_ids=[1],
        completion_ids=list(range(tokens)),
        logprobs=[-0.5] * tokens,
        offsets=[(i, i + 1) for i in range(tokens)],
        text="x" * tokens,
        group_id=group,
        truncated=truncated,
        verdicts=verdicts,
        reward=reward,
        model_mask=written,
    )


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Rollout]:
    return make_rollout


@pytest.fixture(scope="session")
def batch() -> Callable[..., CreditBatch]:
    """``batch(row, row, ...)``: each row the arguments of :func:`make_rollout`, as a dict."""

    def make(*rows: Mapping[str, object], **options: object) -> CreditBatch:
        return collate([make_rollout(**row) for row in rows], **options)  # type: ignore[arg-type]

    return make
