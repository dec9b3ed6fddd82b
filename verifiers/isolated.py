"""Runs any verifier in processes of its own, where one that hangs or crashes costs one sample and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import InputError
from .panel import judge
from .verdict import Sample, Span, Verdict
from .worker_main import load
from .workers import WorkerFailure, shared_pool

__all__ = ["Isolated", "serve"]


@dataclass(frozen=True)
class Isolated:
    """The verdicts of another verifier, asked sample by sample in killable processes.

    A sample on which it hangs (even in one call that never lets go of the interpreter), crashes, raises or needs too
    much memory has no verdict and is counted as an error; all others keep theirs.

    Args:
        target: dotted path of a verifier: a class or factory of one, or a function of TRL's shape, sync or async.
        options: what the class or factory is called with; plain JSON values. None where the target is the verifier.
        timeout_s: wall seconds for one sample.
        memory_mb: address space of each process; 0 for no limit. A target that imports torch wants 8192 or more.
        workers: processes side by side.

    >>> Isolated("apportion.verifiers.number.NumberAnswer", {"extract": "last_number"}, workers=1).workers
    1
    """

    background: ClassVar[bool] = True

    target: str
    options: Mapping[str, Any] | None = field(default=None, hash=False)
    timeout_s: float = 10.0
    memory_mb: int = 2048
    workers: int = 1

    def __post_init__(self) -> None:
        if not all(part.isidentifier() for part in self.target.split(".")) or "." not in self.target:
            raise InputError(f"target: {self.target!r} is no dotted path; give one like my_file.MyVerifier")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | WorkerFailure]:
        pool = shared_pool(
            f"{__name__}.serve",
            {"target": self.target, "options": None if self.options is None else dict(self.options)},
            workers=self.workers,
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
        )
        try:
            replies = pool.map([_plain(sample) for sample in samples])
        except InputError as fault:  # names what the pool serves; the user wrote the verifier's own path
            raise InputError(str(fault).replace(f"{__name__}.serve", self.target)) from None
        return [_verdict(reply) for reply in replies]

    def prepare(self) -> None:
        """Load the verifier in a process, so that one that is not there is refused at once."""
        self([Sample("", "")])


def serve(target: str, options: Mapping[str, Any] | None) -> Callable[[tuple[Any, ...]], Any]:
    """In the child: build the verifier and judge one sample at a time."""
    verifier = load(target)
    if options is not None or isinstance(verifier, type):
        verifier = verifier(**(options or {}))

    def answer(sample: tuple[Any, ...]) -> Any:
        result = judge({"it": verifier}, [Sample(*sample)])
        if result.errors["it"]:
            words = result.first_error["it"].removeprefix("verifier 'it': ")
            raise MemoryError(words) if words.startswith("MemoryError") else RuntimeError(words)
        verdict = result.verdicts[0]["it"]
        return [verdict.score, [[span.start, span.stop, span.score, span.label] for span in verdict.spans]]

    return answer


def _plain(sample: Sample) -> tuple[str, str, str | None, dict[str, Any]]:
    return sample.prompt, sample.completion, sample.reference, dict(sample.metadata)


def _verdict(reply: Any) -> Verdict | WorkerFailure:
    if isinstance(reply, WorkerFailure):
        return reply
    score, spans = reply
    return Verdict(score, tuple(Span(*span) for span in spans))
