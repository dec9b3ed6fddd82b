"""The rewards of a task written for the PyPI package ``verifiers`` (Prime Intellect), as one of our verifiers."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ..verifiers import InputError, Sample, Verdict

__all__ = ["PrimeRubric"]


@dataclass(frozen=True)
class PrimeRubric:
    """The weighted sum of a task's rewards, plugged judges included; written against ``verifiers`` 0.4.

    A sample becomes their trace of one exchange: the system prompt if the metadata have one, the prompt, and the
    completion as the model's reply, which was cut short where our sample was. The task's own fields are taken from
    the metadata by name; its ``setup`` and ``finalize``, which need a sandbox, are not run. What raises, or leaves a
    reward unscored, is a fault of that sample.

    It runs in the trainer's own thread: what ``verifiers`` offers to compare answers stops the clock by signals, and
    outside the main thread it would take every answer for wrong.

    Args:
        task: dotted path to a ``Task`` or ``Taskset`` class, or the id of an installed taskset.
        reward: one of the rewards, by name and without its weight; None takes the weighted sum of all.
        reference: the task's field that gets the right answer; None if it has none.
        config: options of the task's config: judges, weights, further rewards.
        concurrency: samples judged at a time.
    """

    spans: ClassVar[bool] = False

    task: str
    reward: str | None = None
    reference: str | None = "answer"
    config: Mapping[str, Any] | None = None
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"the rubric's concurrency={self.concurrency}: must be at least 1")
        _ = self._options

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        return asyncio.run(self._judge_all(samples))

    async def _judge_all(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        free = asyncio.Semaphore(self.concurrency)

        async def judged(sample: Sample) -> Verdict | Exception:
            async with free:
                try:
                    return Verdict(await self._score(sample))
                except Exception as fault:
                    return fault

        return list(await asyncio.gather(*map(judged, samples)))

    async def _score(self, sample: Sample) -> float | None:
        task = self._class(self._data(sample), self._options)
        signals = dict(_signals(task))
        unable = [name for name, function in signals.items() if _needs_runtime(function)]
        if unable or not signals:
            why = (
                f"{', '.join(unable)} of it needs a runtime, which a finished text lacks" if unable else "has no reward"
            )
            raise InputError(f"task={self.task}: {why}; name another task")
        trace = _trace(task, sample)
        async with asyncio.timeout(task.data.timeout.scoring):
            await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} of {self.task} gave no score")
        if self.reward is None:
            return float(trace.reward) if trace.rewards else None
        if self.reward not in trace.rewards:
            known = ", ".join(trace.rewards) or "none"
            raise InputError(f"reward={self.reward}: {self.task} gave no such reward; it gave {known}")
        return float(trace.rewards[self.reward].score)

    def _data(self, sample: Sample) -> Any:
        """The sample as the task's own data; what the base class holds (ids, images, limits) stays at its defaults."""
        data_type, base = self._class.data_type(), _prime().TaskData
        own = data_type.model_fields.keys() - base.model_fields.keys()
        fields = {name: sample.metadata[name] for name in (*own, "system_prompt") if name in sample.metadata}
        if self.reference is not None and sample.reference is not None:
            if self.reference not in own:
                known = ", ".join(sorted(own)) or "none"
                raise InputError(
                    f"reference={self.reference}: {self.task} has no such field, but {known}; null takes none"
                )
            fields[self.reference] = sample.reference
        return data_type(**fields, prompt=sample.prompt)

    @cached_property
    def _class(self) -> Any:
        """The task's class, from whatever the path names."""
        vf = _prime()
        module, _, name = self.task.rpartition(".")
        try:
            found: Any = getattr(importlib.import_module(module), name) if module else vf.task_type(self.task)
        except Exception as error:  # the module is a program: it raises what it likes
            reason = str(error).split("\n")[0] or type(error).__name__
            raise InputError(f"task={self.task}: cannot be imported ({reason}); give a dotted path") from error
        kinds = found.__mro__ if isinstance(found, type) else ()
        if vf.Taskset in kinds:
            return found.task_type()
        if vf.Task not in kinds:
            raise InputError(f"task={self.task}: is neither a Task nor a Taskset of the package verifiers")
        return found

    @cached_property
    def _options(self) -> Any:
        kind = self._class.config_type()
        try:
            return kind(**(self.config or {}))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"config: does not fit {kind.__name__} of {self.task} ({reason})") from error


def _prime() -> Any:
    """Their package; not our own folder of that name, which hides it in the root of this repository."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        if "apportion" in str(error):
            remedy = "Apportion's own folder hides it here; start in another directory"
        else:
            remedy = "pip install 'verifiers>=0.4,<0.5'"
        raise InputError(f"a rubric of Prime Intellect needs the package verifiers ({error}): {remedy}") from error


def _signals(task: Any) -> Iterator[tuple[str, Any]]:
    """Whatever makes up the score, by name."""
    for function in task.hooks("reward"):
        yield function.__name__, function
    for judge in task.plugged_judges():
        yield judge.reward_name, judge.score


def _needs_runtime(function: Any) -> bool:
    wanted = inspect.signature(function).parameters.get("runtime")
    return wanted is not None and wanted.default is inspect.Parameter.empty


def _trace(task: Any, sample: Sample) -> Any:
    """One finished exchange: what a rollout of their own would have left."""
    vf, data = _prime(), task.data
    asked = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    messages = [*asked, vf.UserMessage(content=sample.prompt), vf.AssistantMessage(content=sample.completion)]
    last = len(messages) - 1
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=place - 1 if place else None, message=message, sampled=place == last)
            for place, message in enumerate(messages)
        ],
        calls=[vf.ModelCall(node=last, finish_reason="length" if sample.metadata.get("truncated") else "stop")],
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
