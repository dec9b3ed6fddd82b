"""The scorers of the package reasoning-gym as a verifier that pays for one right answer and for nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .answer_extraction import POLICIES, Policy
from .errors import InputError
from .gym_answers import answer_texts
from .verdict import Sample, Span, Verdict
from .workers import WorkerFailure, WorkerPool, shared_pool

__all__ = ["GymAnswer"]


@dataclass(frozen=True)
class GymAnswer:
    """The score of an answer to a problem of ``task=reasoning_gym``; the answer is located.

    The data set, its options and the problem's entry stand in the columns ``dataset``, ``config`` and ``entry``;
    without them the verdict is an abstention. The package's scorers are asked in killable processes. They are generous:
    some pay for the right answer among others, for a text that contains it, for any text at all, and some evaluate
    answers as code. Here an answer must be one answer (see :func:`apportion.verifiers.gym_answers.admitted`), keep the
    rules where its game is known (:mod:`apportion.verifiers.game_moves`), and it is never evaluated. A completion
    without an answer scores 0. So does one that makes the scorer raise, where the right answer does not; where that
    does too, and where time or memory runs out, there is no score and an error is counted.

    Args:
        extract: which text is the answer; see :func:`apportion.verifiers.answer_extraction.extract_answer`. ``auto``
            and ``answer_tag`` take all that stands between the last ``<answer>`` tags, braces and quotes included.
        score: ``strict`` is 1 where the scorer gives 1, else 0. ``partial`` is what the scorer gives beyond nonsense.
        timeout_s: wall seconds for one answer.
        memory_mb: address space of each process.
        workers: processes side by side.
    """

    background: ClassVar[bool] = True

    extract: Policy = "auto"
    score: Literal["strict", "partial"] = "strict"
    timeout_s: float = 10.0
    memory_mb: int = 4096
    workers: int = 2

    def __post_init__(self) -> None:
        if self.extract not in POLICIES:
            raise InputError(f"extract: {self.extract!r} is no policy; give one of {', '.join(POLICIES)}")
        if self.score not in ("strict", "partial"):
            raise InputError(f"score: {self.score!r} is unknown; give strict or partial")
        self._pool()

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | WorkerFailure]:
        found = [answer_texts(sample.completion, self.extract) for sample in samples]
        asked = [place for place, sample in enumerate(samples) if _is_problem(sample) and found[place]]
        items = [_item(samples[place], [answer.text for answer in found[place]]) for place in asked]
        if items:
            self._check_package()
        scores: dict[int, Any] = dict(zip(asked, self._pool().map(items))) if items else {}
        replies: list[Verdict | WorkerFailure] = []
        for place, sample in enumerate(samples):
            score = scores.get(place, 0.0)
            if not _is_problem(sample):
                replies.append(Verdict(None))
            elif isinstance(score, WorkerFailure):
                replies.append(score)
            else:
                label = {0.0: "wrong answer", 1.0: "right answer"}.get(score, "partly right answer")
                replies.append(Verdict(score, tuple(Span(a.start, a.stop, score, label) for a in found[place][:1])))
        return replies

    def prepare(self) -> None:
        """Load the package in a process, so that a missing one is refused before anything costs time."""
        self._check_package()
        self._pool().map([("chain_sum", {}, {"answer": "1", "metadata": {"source_dataset": "chain_sum"}}, ["1"])])

    def _check_package(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise InputError("reasoning_gym: the package is not installed; pip install 'apportion[data]'")

    def _pool(self) -> WorkerPool:
        return shared_pool(
            "apportion.verifiers.gym_scoring.serve",
            {"partial": self.score == "partial"},
            workers=self.workers,
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
        )


def _is_problem(sample: Sample) -> bool:
    return isinstance(sample.metadata.get("entry"), Mapping) and isinstance(sample.metadata.get("dataset"), str)


def _item(sample: Sample, texts: list[str]) -> tuple[str, dict[str, Any], dict[str, Any], list[str]]:
    columns = sample.metadata
    return columns["dataset"], dict(columns.get("config") or {}), dict(columns["entry"]), texts
