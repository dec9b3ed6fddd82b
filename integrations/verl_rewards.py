"""Our verifiers inside verl's reward workers: a response's sampled ids in, the reward and the evidence out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..grpo.task import Problem
from ..verifiers import Sample, Verdict
from .samples import content_text, make_ready
from .verl import encode
from .verl_config import VerlCredit

__all__ = ["EVIDENCE", "Judge", "problem_of"]

EVIDENCE = "apportion"  # key of the evidence in verl's reward_extra_info


@dataclass
class Judge:
    """Asks the verifiers about answers as they come, one call at a time, with all that waited meanwhile in one batch.

    Args:
        credit: of the run.
    """

    credit: VerlCredit
    _waiting: list[tuple[Sample, asyncio.Future[tuple[dict[str, Verdict], list[str]]]]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "verifiers"))

    def __post_init__(self) -> None:
        make_ready(self.credit.panel.verifiers)

    async def __call__(self, sample: Sample) -> dict[str, Any]:
        """What verl's ``run_single`` returns: one number, and beside it the evidence as text.

        An abstention is 0 in verl's own averages; the evidence says None, and the answer has no part in the credit.
        """
        verdicts, errors = await self._judged(sample)
        reward = self.credit.panel.reward(verdicts)
        success = reward if self.credit.success is None else verdicts[self.credit.success].score
        text = encode(sample, verdicts, reward, errors)
        return {"reward_score": reward or 0.0, "reward_extra_info": {"acc": success or 0.0, EVIDENCE: text}}

    async def _judged(self, sample: Sample) -> tuple[dict[str, Verdict], list[str]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[dict[str, Verdict], list[str]]] = loop.create_future()
        self._waiting.append((sample, answer))
        async with self._turn:
            if not answer.done():
                batch, self._waiting = self._waiting, []
                await self._judge_all(loop, batch)
        return answer.result()

    async def _judge_all(self, loop: asyncio.AbstractEventLoop, batch: Sequence[tuple[Sample, Any]]) -> None:
        try:
            samples = [sample for sample, _ in batch]
            result = await loop.run_in_executor(self._thread, self.credit.panel.judge, samples)
            for row, (_, answer) in enumerate(batch):
                failed = [name for name, rows in result.faulted.items() if row in rows]
                answer.set_result((result.verdicts[row], failed))
        except Exception as fault:  # each of those who wait has to hear of it
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(fault)


def problem_of(columns: Mapping[str, Any]) -> Problem:
    """The problem of a row of verl's data set.

    The prompt is what the user said last. A right answer that is no text is given as JSON.

    Args:
        columns: ``raw_prompt`` (messages), ``reward_model`` (its ``ground_truth``), ``extra_info``, ``data_source``.

    >>> problem_of({"raw_prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": 2}}).reference
    '2'
    """
    messages = [dict(message) for message in columns.get("raw_prompt", ())]
    asked = [message["content"] for message in messages if message.get("role") == "user"]
    truth = (columns.get("reward_model") or {}).get("ground_truth")
    extra = columns.get("extra_info")
    facts = {**(extra if isinstance(extra, Mapping) else {}), "messages": messages}
    if "data_source" in columns:
        facts["data_source"] = columns["data_source"]
    return Problem(
        id=str(columns.get("uid", "")),
        prompt=content_text(asked[-1]) if asked else "",
        reference=truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=str),
        metadata=facts,
    )
