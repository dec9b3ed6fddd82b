"""Runs several verifiers over samples, so that no fault of a verifier ever becomes a reward."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, SupportsFloat

from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = ["PanelResult", "gives_spans", "judge", "weighted_reward"]

ABSTAIN = Verdict(None)
_CAUGHT = (Exception, SystemExit)  # KeyboardInterrupt is the user's and passes


@dataclass(frozen=True)
class PanelResult:
    """What a panel of verifiers said of some samples.

    Args:
        verdicts: one dict per sample, in order, with every verifier's name as a key.
        errors: by verifier, the number of samples that a fault left without a verdict (0 where all went well).
        first_error: by verifier, one line on its first fault. A batch call that failed while every sample passed
            alone stands here too, with ``errors`` 0: nothing was lost, but the verifier wants mending.
    """

    verdicts: list[dict[str, Verdict]]
    errors: dict[str, int]
    first_error: dict[str, str]


def judge(verifiers: Mapping[str, Callable[..., Any]], samples: Sequence[Sample]) -> PanelResult:
    """Ask every verifier about every sample; what faults is an abstention, counted and shown.

    A verifier gets the whole batch. Where that call raises or its answer is no sequence of the batch's length, each
    sample is asked alone, so that one bad sample does not cost the others their verdicts.

    Args:
        verifiers: by name; each takes a list of samples, or has TRL's shape (a parameter named ``completions``) and
            takes keyword arguments: prompts, completions, and the columns that every sample of the call has.
        samples: may be empty; then no verifier is called.

    >>> panel = {"short": lambda samples: [len(s.completion) < 3 for s in samples], "broken": lambda samples: [1 / 0]}
    >>> result = judge(panel, [Sample("q", "ab"), Sample("q", "abc")])
    >>> [verdicts["short"].score for verdicts in result.verdicts], result.errors
    ([1.0, 0.0], {'short': 0, 'broken': 2})
    >>> result.first_error["broken"]
    "verifier 'broken': ZeroDivisionError: division by zero (completion 'ab')"
    """
    columns: dict[str, list[Verdict]] = {}
    errors: dict[str, int] = {}
    first_error: dict[str, str] = {}
    for name, verifier in verifiers.items():
        columns[name], faults, note = _judge_all(name, verifier, samples)
        errors[name] = faults
        if note:
            first_error[name] = note
    rows = [{name: column[row] for name, column in columns.items()} for row in range(len(samples))]
    return PanelResult(rows, errors, first_error)


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


def _judge_all(
    name: str, verifier: Callable[..., Any], samples: Sequence[Sample]
) -> tuple[list[Verdict], int, str | None]:
    """Verdicts of one verifier in the samples' order, the number of faults, and a line on the first one."""
    if not samples:
        return [], 0, None
    batch_fault: BaseException | None = None
    try:
        replies = _ask(verifier, samples)
    except _CAUGHT as fault:
        batch_fault, replies = fault, None
    verdicts: list[Verdict] = []
    faults, note = 0, None
    for row, sample in enumerate(samples):
        try:
            if replies is not None:
                reply = replies[row]
            elif len(samples) == 1 and batch_fault is not None:
                raise batch_fault
            else:
                (reply,) = _ask(verifier, [sample])
            verdicts.append(_verdict(reply, sample))
        except _CAUGHT as fault:
            verdicts.append(ABSTAIN)
            faults += 1
            note = note or f"verifier {name!r}: {_in_words(fault)} (completion {sample.completion[:40]!r})"
    if batch_fault is not None and not faults:
        note = f"verifier {name!r}: {_in_words(batch_fault)} (the batch of {len(samples)}; each sample passed alone)"
    return verdicts, faults, note


def _ask(verifier: Callable[..., Any], samples: Sequence[Sample]) -> list[Any]:
    """Call the verifier in its shape and take exactly one reply per sample."""
    if _is_trl_shaped(verifier):
        reply = verifier(**_trl_arguments(verifier, samples))
    else:
        reply = verifier(list(samples))
    if inspect.iscoroutine(reply):
        reply = asyncio.run(reply)
    if not isinstance(reply, Iterable) or isinstance(reply, str | bytes | Mapping | set | frozenset):
        raise TypeError(f"returned {type(reply).__name__}, not a list of {len(samples)} verdicts")
    replies = list(islice(reply, len(samples) + 1))
    if len(replies) != len(samples):
        found = len(replies) if len(replies) < len(samples) else f"more than {len(samples)}"
        raise ValueError(f"returned {found} verdicts for {len(samples)} samples")
    return replies


def _is_trl_shaped(verifier: Callable[..., Any]) -> bool:
    try:
        return "completions" in inspect.signature(verifier).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False


def _trl_arguments(verifier: Callable[..., Any], samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Columns that every sample has, cut down to what the signature takes."""
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
    return "".join(char if char.isprintable() else "?" for char in line[:200])
