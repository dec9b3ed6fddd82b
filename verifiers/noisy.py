"""A step verifier made worse on purpose, to learn how good one must be."""

from __future__ import annotations

import hashlib
import inspect
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar, Literal

from .errors import InputError
from .panel import awaited, gives_spans
from .verdict import Sample, Span, Verdict

__all__ = ["Noisy"]

CLAMP = 1e-3
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Noisy:
    """Another verifier's spans with faults: missed and false errors, boundaries off, scores badly calibrated.

    A span's score s is taken as its chance of being right, wrong below .5. In this order,

    - a wrong span is reported right with the chance ``miss``, a right one wrong with the chance ``false_alarm``: its
      score becomes 1 - s;
    - with calibration faults the score becomes ``sigmoid(logit(s) / temperature + bias + blur z)``, z standard normal
      for each span and s first brought into [.001, .999], since a certainty has no finite log-odds;
    - all boundaries move by ``shift`` tokens.

    The faults of a sample follow from ``seed``, its prompt and completion and the span's place in the verdict: the same
    sample is always judged alike, and the faults at a low rate are among those at a higher one. Without faults the
    verdict is the inner verifier's own.

    Tokens are those of ``sample.metadata["offsets"]``, or characters where there are none. Those of only white space
    do not count, since white space at a span's ends never does. A span that would leave the text keeps its last token
    in it, so that no fault of the answer vanishes.

    Args:
        inner: a verifier that gives spans with scores in [0, 1].
        miss: share of wrong spans that are reported right.
        false_alarm: share of right spans that are reported wrong.
        shift: tokens by which boundaries come too late; negative for too early.
        temperature: over 1 makes scores less sure, below 1 surer.
        bias: added to every score's log-odds; above 0 makes all look better.
        blur: standard deviation of what is added to each score's log-odds.
        score: of the whole answer: ``keep`` the inner one, so that only the location gets worse, or the ``min`` or
            ``mean`` of the spans' scores where there are spans. An abstention stays one.
        seed: of the faults.
    """

    spans: ClassVar[bool] = True

    inner: Callable[..., Any]
    miss: float = 0.0
    false_alarm: float = 0.0
    shift: int = 0
    temperature: float = 1.0
    bias: float = 0.0
    blur: float = 0.0
    score: Literal["keep", "min", "mean"] = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("miss", "false_alarm"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name}: {getattr(self, name)} is no share; give a number from 0 to 1")
        if not 0 < self.temperature < math.inf:
            raise InputError(f"temperature: {self.temperature} cannot divide log-odds; give a number over 0")
        if not math.isfinite(self.bias):
            raise InputError(f"bias: {self.bias} is not finite; give a finite number")
        if not 0 <= self.blur < math.inf:
            raise InputError(f"blur: {self.blur} is no standard deviation; give a number of 0 or more")
        if self.score not in ("keep", "min", "mean"):
            raise InputError(f"score must be keep, min or mean, not {self.score!r}")
        if not gives_spans(self.inner):
            raise InputError(f"inner: {type(self.inner).__name__} gives no spans, so that there is nothing to disturb")

    @property
    def background(self) -> bool:
        """As the inner verifier."""
        return getattr(self.inner, "background", False) is True

    def prepare(self) -> None:
        """Make the inner verifier ready."""
        prepare = getattr(self.inner, "prepare", None)
        if prepare is not None:
            prepare()

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        replies = self.inner(list(samples))
        if inspect.isawaitable(replies):
            replies = awaited(replies)
        return [
            self._disturbed(reply, sample) if isinstance(reply, Verdict) else reply
            for sample, reply in zip(samples, replies, strict=True)
        ]

    def _disturbed(self, verdict: Verdict, sample: Sample) -> Verdict | InputError:
        scores = []
        for span, draws in zip(verdict.spans, _draws(self.seed, sample)):
            if not 0 <= span.score <= 1:
                return InputError(f"noisy: the span score {span.score:g} is no chance; give one from 0 to 1")
            scores.append(self._judged(span.score, *draws))
        spans = tuple(replace(span, score=score) for span, score in zip(verdict.spans, scores))
        if self.shift and spans:
            spans = _shifted(spans, sample, self.shift)
        overall = verdict.score
        if overall is not None and scores and self.score != "keep":
            overall = min(scores) if self.score == "min" else math.fsum(scores) / len(scores)
        return Verdict(overall, spans)

    def _judged(self, score: float, chance: float, normal: float) -> float:
        if chance < (self.miss if score < 0.5 else self.false_alarm):
            score = 1.0 - score
        if (self.temperature, self.bias, self.blur) == (1.0, 0.0, 0.0):
            return score
        inside = min(max(score, CLAMP), 1 - CLAMP)
        odds = math.log(inside / (1 - inside)) / self.temperature + self.bias + self.blur * normal
        return 1 / (1 + math.exp(-odds)) if odds > 0 else 1 - 1 / (1 + math.exp(odds))


def _draws(seed: int, sample: Sample) -> Iterator[tuple[float, float]]:
    """For each span in order a uniform and a standard normal number, both from a hash."""
    base = hashlib.blake2b(digest_size=16)
    for part in (str(seed), sample.prompt, sample.completion):
        data = part.encode("utf-8", "surrogatepass")
        base.update(len(data).to_bytes(8, "little") + data)
    index = 0
    while True:
        place = base.copy()
        place.update(index.to_bytes(8, "little"))
        digest = place.digest()
        one, other = ((int.from_bytes(half, "little") >> 11) * 2.0**-53 for half in (digest[:8], digest[8:]))
        yield one, _NORMAL.inv_cdf(other or 0.5)
        index += 1


def _shifted(spans: Sequence[Span], sample: Sample, shift: int) -> tuple[Span, ...]:
    """The spans with both ends moved by ``shift`` tokens of the sample that hold more than white space."""
    text = sample.completion
    offsets = sample.metadata.get("offsets")
    ranges = ((i, i + 1) for i in range(len(text))) if offsets is None else offsets
    tokens = [(start, stop) for start, stop in ranges if text[start:stop].strip()]
    if not tokens:
        return tuple(spans)
    starts, stops = [start for start, _ in tokens], [stop for _, stop in tokens]
    last = len(tokens) - 1
    moved = []
    for span in spans:
        piece = text[span.start : span.stop]
        start = span.start + len(piece) - len(piece.lstrip())
        first = bisect_right(stops, start)  # the token that holds the first character
        end = bisect_left(starts, start + len(piece.strip()))
        if first < end:
            first = min(max(first + shift, 0), last)
            end = min(max(end + shift, first + 1), last + 1)
            moved.append(replace(span, start=starts[first], stop=stops[end - 1]))
        else:  # a place where something is missing, or white space alone
            place = bisect_left(starts, span.start) + shift
            at = starts[max(place, 0)] if place <= last else stops[last]
            moved.append(replace(span, start=at, stop=at))
    return tuple(moved)
