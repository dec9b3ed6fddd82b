"""Runs several verifiers over samples, so that no fault of a verifier ever becomes a reward."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any, SupportsFloat, TypeVar

from .deadline import call_within
from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = ["Panel", "PanelResult", "awaited", "gives_spans", "judge", "trl_columns", "weighted_reward"]

Result = TypeVar("Result")

ABSTAIN = Verdict(None)
_MAX_TIMEOUTS = 2  # of samples asked alone, before the rest of the batch is given up


class _WrongLength(ValueError):
    """A verifier's answer to a batch was not one reply for each sample."""


@dataclass(frozen=True)
class PanelResult:
    """What a panel of verifiers said of some samples.

    Args:
        verdicts: one dict per sample, in order, with every verifier's name as a key.
        faulted: by verifier, the samples (places, in order) that a fault left without a verdict.
        first_error: by verifier, one line on its first fault. A batch call that failed while every sample passed
            alone stands here too, without a faulted sample: nothing was lost, but the verifier wants mending.
        seconds: by verifier, wall time of its calls.
    """

    verdicts: list[dict[str, Verdict]]
    faulted: dict[str, list[int]]
    first_error: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def errors(self) -> dict[str, int]:
        """By verifier, the number of samples that a fault left without a verdict (0 where all went well)."""
        return {name: len(rows) for name, rows in self.faulted.items()}


@dataclass(frozen=True)
class Panel:
    """Some verifiers, what each counts in the reward, and how long one may take.

    Args:
        verifiers: by name, see :func:`judge`.
        reward_weights: by verifier; those without a weight are asked, but have no say in the reward.
        timeout_s: longest one call of a verifier may take, in seconds; None waits for ever.
    """

    verifiers: Mapping[str, Callable[..., Any]]
    reward_weights: Mapping[str, float]
    timeout_s: float | None = None

    def judge(self, samples: Sequence[Sample]) -> PanelResult:
        """Ask every verifier about every sample."""
        return judge(self.verifiers, samples, timeout_s=self.timeout_s)

    def reward(self, verdicts: Mapping[str, Verdict]) -> float | None:
        """Reward of one completion, see :func:`weighted_reward`."""
        return weighted_reward(verdicts, self.reward_weights)

    def rewarding(self) -> Panel:
        """The same panel without the verifiers that have no weight."""
        return replace(self, verifiers={n: v for n, v in self.verifiers.items() if n in self.reward_weights})


def judge(
    verifiers: Mapping[str, Callable[..., Any]], samples: Sequence[Sample], *, timeout_s: float | None = None
) -> PanelResult:
    """Ask every verifier about every sample; what faults is an abstention, counted and shown.

    A verifier gets the whole batch. Where that call raises or takes too long, each sample is asked alone, so that one
    bad sample does not cost the others their verdicts. Where its answer is no sequence of the batch's length, nobody
    knows which verdict belongs to which sample, and all of them abstain. An exception *in* the answer is the verifier's
    own word that it failed on that sample.

    Args:
        verifiers: by name; each takes a list of samples, or has TRL's shape (a parameter named ``completions``) and
            takes keyword arguments: prompts, completions, and the columns that every sample of the call has.
        samples: may be empty; then no verifier is called.
        timeout_s: longest one call of a verifier may take, in seconds, and of one with ``background`` this for each
            sample; None waits for ever. Once two samples asked alone have taken longer, the others of the batch
            abstain unasked.

    >>> panel = {"short": lambda samples: [len(s.completion) < 3 for s in samples], "broken": lambda samples: [1 / 0]}
    >>> result = judge(panel, [Sample("q", "ab"), Sample("q", "abc")])
    >>> [verdicts["short"].score for verdicts in result.verdicts], result.errors
    ([1.0, 0.0], {'short': 0, 'broken': 2})
    >>> result.first_error["broken"]
    "verifier 'broken': ZeroDivisionError: division by zero (completion 'ab')"
    """
    columns: dict[str, list[Verdict]] = {}
    faulted: dict[str, list[int]] = {}
    first_error: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name, verifier in verifiers.items():
        began = time.perf_counter()
        own = [replace(sample, metadata=dict(sample.metadata)) for sample in samples]  # none changes what the next sees
        columns[name], faulted[name], note = _judge_all(name, verifier, own, timeout_s)
        seconds[name] = time.perf_counter() - began
        if note:
            first_error[name] = note
    rows = [{name: column[row] for name, column in columns.items()} for row in range(len(samples))]
    return PanelResult(rows, faulted, first_error, seconds)


def weighted_reward(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> float | None:
    """Sum of weight times score over the verifiers that gave a score; None where all abstained.

    A weight of zero has no vote: it cannot turn "nobody knows" into a reward of 0, unless all weights are zero.

    Args:
        verdicts: of one completion, by verifier.
        weights: by verifier; verifiers without a weight do not count.

    >>> weighted_reward({"answer": Verdict(1.0), "format": Verdict(0.5), "tone": Verdict(None)},
    ...                 {"answer": 1.0, "format": 0.2, "tone": 3.0})
    1.1
    """
    for name, weight in weights.items():
        if name not in verdicts:
            raise InputError(f"reward.{name}: no verifier has this name; verifiers: {', '.join(verdicts) or 'none'}")
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise InputError(f"reward.{name}: the weight is {weight!r}; give a finite number")
    voting = {name: weight for name, weight in weights.items() if weight} or weights
    terms = [weight * score for name, weight in voting.items() if (score := verdicts[name].score) is not None]
    return math.fsum(terms) if terms else None


def gives_spans(verifier: Callable[..., Any]) -> bool:
    """Whether the verifier may locate its verdicts: its own attribute ``spans`` says so, else its shape does.

    A verifier of TRL's shape answers in plain numbers; any other is taken to give spans.
    """
    declared = getattr(verifier, "spans", None)
    return declared if isinstance(declared, bool) else not _is_trl_shaped(verifier)


def trl_columns(verifier: Callable[..., Any], samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What a reward function of TRL's shape is called with: columns that every sample has, as far as it takes them."""
    shared = [key for key in samples[0].metadata if all(key in sample.metadata for sample in samples)]
    columns = {key: [sample.metadata[key] for sample in samples] for key in shared if isinstance(key, str)}
    if all(sample.reference is not None for sample in samples):
        columns["reference"] = [sample.reference for sample in samples]
    columns["prompts"] = [sample.prompt for sample in samples]
    columns["completions"] = [sample.completion for sample in samples]
    parameters = inspect.signature(verifier).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {key: column for key, column in columns.items() if key in parameters}


def _judge_all(
    name: str, verifier: Callable[..., Any], samples: Sequence[Sample], timeout_s: float | None
) -> tuple[list[Verdict], list[int], str | None]:
    """Verdicts of one verifier in the samples' order, where it faulted, and a line on the first fault."""
    if not samples:
        return [], [], None
    limit = timeout_s
    if limit is not None and getattr(verifier, "background", False) is True:
        limit *= len(samples)  # it judges them one by one, or some at a time, and has limits of its own
    batch_fault: Exception | None = None
    try:
        replies = _ask(verifier, samples, limit)
    except Exception as fault:
        alone = len(samples) > 1 and not isinstance(fault, _WrongLength)
        batch_fault, replies = fault, _each_alone(verifier, samples, timeout_s) if alone else [fault] * len(samples)
    verdicts: list[Verdict] = []
    faulted: list[int] = []
    note = None
    for row, (reply, sample) in enumerate(zip(replies, samples)):
        if isinstance(reply, Exception):
            faulted.append(row)
            note = note or f"verifier {name!r}: {_in_words(reply)} (completion {sample.completion[:40]!r})"
        verdicts.append(ABSTAIN if isinstance(reply, Exception) else reply)
    if batch_fault is not None and not faulted:
        note = f"verifier {name!r}: {_in_words(batch_fault)} (the batch of {len(samples)}; each sample passed alone)"
    return verdicts, faulted, note


def _each_alone(
    verifier: Callable[..., Any], samples: Sequence[Sample], timeout_s: float | None
) -> list[Verdict | Exception]:
    """A verdict, or the exception that came instead, per sample."""
    replies: list[Verdict | Exception] = []
    timeouts = 0
    for sample in samples:
        try:
            if timeouts == _MAX_TIMEOUTS:
                raise TimeoutError(f"not asked: {timeouts} completions of its batch took over {timeout_s:g} s each")
            replies += _ask(verifier, [sample], timeout_s)
        except Exception as fault:
            replies.append(fault)
            timeouts += timeouts < _MAX_TIMEOUTS and isinstance(fault, TimeoutError)
    return replies


def _ask(verifier: Callable[..., Any], samples: Sequence[Sample], timeout_s: float | None) -> list[Verdict | Exception]:
    """Call the verifier within the limit and read exactly one reply per sample; whatever it raises is an Exception."""

    def answer() -> list[Verdict | Exception]:  # a number or a span can hang as well, while it is read
        return [_verdict_or_fault(reply, sample) for reply, sample in zip(_replies(verifier, samples), samples)]

    try:
        return call_within(answer, timeout_s)
    except (Exception, KeyboardInterrupt):  # Ctrl-C is the user's and passes
        raise
    except BaseException as fault:  # SystemExit, a cancelled task, the panic of a library in Rust
        raise RuntimeError(_in_words(fault)) from fault


def _replies(verifier: Callable[..., Any], samples: Sequence[Sample]) -> list[Any]:
    """Call the verifier in its shape; what it gives is read here too, since an iterator can hang as well."""
    if _is_trl_shaped(verifier):
        reply = verifier(**trl_columns(verifier, samples))
    else:
        reply = verifier(list(samples))
    if inspect.isawaitable(reply):
        reply = awaited(reply)
    if not isinstance(reply, Iterable) or isinstance(reply, str | bytes | Mapping | set | frozenset):
        raise _WrongLength(f"returned {type(reply).__name__}, not a list of {len(samples)} verdicts")
    replies = list(islice(reply, len(samples) + 1))
    if len(replies) != len(samples):
        found = len(replies) if len(replies) < len(samples) else f"more than {len(samples)}"
        raise _WrongLength(f"returned {found} verdicts for {len(samples)} samples")
    return replies


def awaited(reply: Awaitable[Result]) -> Result:
    """Run an event loop for it; in a thread of its own where one runs already, as in a notebook."""

    async def wait() -> Result:
        return await reply

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _is_trl_shaped(verifier: Callable[..., Any]) -> bool:
    try:
        return "completions" in inspect.signature(verifier).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False


def _verdict_or_fault(reply: Any, sample: Sample) -> Verdict | Exception:
    try:
        return reply if isinstance(reply, Exception) else _verdict(reply, sample)
    except Exception as fault:
        return fault


def _verdict(reply: Any, sample: Sample) -> Verdict:
    """The reply as a verdict with plain floats, its spans inside the completion; raises on anything else."""
    if reply is None:
        return ABSTAIN
    if not isinstance(reply, Verdict):
        return Verdict(_number(reply))
    spans = tuple(_span(span, len(sample.completion)) for span in reply.spans)
    return Verdict(None if reply.score is None else _number(reply.score), spans)


def _number(value: object) -> float:
    if type(value) is float and math.isfinite(value):  # nearly always, and the general check is slow
        return value
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise TypeError(f"gave a {type(value).__name__}, not a number, a Verdict or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"gave {number}, not a finite number")
    return number


def _span(span: object, length: int) -> Span:
    if not isinstance(span, Span):
        raise TypeError(f"gave a {type(span).__name__} among its spans, not a Span")
    start, stop = index(span.start), index(span.stop)
    if not 0 <= start <= stop <= length:
        raise ValueError(f"gave the span [{start}, {stop}) for a completion of {length} characters")
    return Span(start, stop, _number(span.score), str(span.label))


def _in_words(fault: BaseException) -> str:
    """The exception's kind and message on one line of at most 200 printable characters."""
    line = " ".join("".join(traceback.format_exception_only(fault)).split())
    line = line.removeprefix(f"{type(fault).__module__}.").removeprefix("_")
    return "".join(char if char.isprintable() else "?" for char in line[:200])
