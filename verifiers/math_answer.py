"""Whether the final answer of a completion is the reference, as mathematics and not as text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from .answer_extraction import POLICIES, Answer, Policy, extract_answer, trim
from .errors import InputError
from .math_notation import MAX_LENGTH, canonical
from .math_numbers import Rules, read_quantity, same_quantity
from .verdict import Sample, Span, Verdict
from .workers import WorkerFailure, WorkerPool, shared_pool

__all__ = ["MathAnswer"]

_SWITCHES = {
    "percent": ("exact", "lenient"),
    "units": ("optional", "require"),
    "decimals": ("exact", "reference_precision"),
}
_JUDGEMENTS = {"right": 1.0, "wrong": 0.0}  # all others are no verdict


@dataclass(frozen=True)
class MathAnswer:
    r"""1 where the final answer equals the reference, else 0; the answer is located.

    Numbers, fractions, percentages, e-notation, roots, expressions, equations, sets, pairs, intervals, lists, matrices,
    words and letters of choice are read in LaTeX, plain text and Unicode. Plain numbers are compared as fractions, at
    once; the rest by sympy in killable processes. Model text is never evaluated as Python.

    A completion without an answer scores 0 and has no span, and so does one whose answer cannot be read, with a span.
    The verdict is an abstention where the reference is missing or cannot be read, and where an answer is too large to
    be computed (a tower of powers). A comparison that runs out of time or memory is no verdict either: it is counted
    as an error, never as right or wrong.

    Args:
        extract: which text is the answer; see :func:`apportion.verifiers.answer_extraction.extract_answer`.
        percent: 28% is 0.28. ``lenient`` takes a bare 28 for 28%, and 28% for 28, too.
        units: ``optional`` takes "12" for "12 cm" and "12 cm" for "12"; ``require`` wants the reference's unit. In both
            "12 m" is not "12 cm", and "120 mm" is. Signs of currency and degree are units.
        decimals: ``exact`` takes 33.3 for 100/3 neither way, only a decimal of ten digits or more as a computer prints
            it (0.0833333333333333 for 1/12). ``reference_precision`` takes 100/3 where the reference says 33.3: what
            rounds to its decimals. A whole number is always exact.
        assume_positive: whether variables are positive, so that sqrt(x^2) is x. Otherwise expressions are equal where
            they agree wherever both are real, as 1/sqrt(n) and sqrt(1/n) do.
        timeout_s: wall seconds for one comparison.
        memory_mb: address space of each process.
        workers: processes side by side.

    >>> text = r"Half of it: $\boxed{\frac{1}{2}}$."
    >>> verdict, = MathAnswer()([Sample("", text, reference="0.5")])
    >>> verdict.score, text[verdict.spans[0].start : verdict.spans[0].stop]
    (1.0, '\\frac{1}{2}')
    """

    background: ClassVar[bool] = True

    extract: Policy = "auto"
    percent: Literal["exact", "lenient"] = "exact"
    units: Literal["optional", "require"] = "optional"
    decimals: Literal["exact", "reference_precision"] = "exact"
    assume_positive: bool = False
    timeout_s: float = 5.0
    memory_mb: int = 1024
    workers: int = 2

    def __post_init__(self) -> None:
        if self.extract not in POLICIES:
            raise InputError(f"extract: {self.extract!r} is no policy; give one of {', '.join(POLICIES)}")
        for name, choices in _SWITCHES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"{name}: {getattr(self, name)!r} is unknown; give one of {', '.join(choices)}")
        if importlib.util.find_spec("math_verify") is None:
            raise InputError("math_answer: math-verify is not installed; pip install 'apportion[math]'")
        self._pool()

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | WorkerFailure]:
        answers = [extract_answer(sample.completion, self.extract) for sample in samples]
        pairs = [_pair(sample, answer) for sample, answer in zip(samples, answers)]
        known: dict[tuple[str, str | None], str | WorkerFailure | None] = {
            pair: self._at_once(*pair) for pair in pairs if pair is not None
        }
        asked = [pair for pair, judgement in known.items() if judgement is None]
        if asked:
            known |= dict(zip(asked, self._pool().map(asked)))
        return [
            Verdict(None) if pair is None else _verdict(known[pair], answer) for pair, answer in zip(pairs, answers)
        ]

    def prepare(self) -> None:
        """Start a worker now, so that one that cannot is refused before anything costs time."""
        self([Sample("", r"\boxed{1+x}", "x+1")])

    def _at_once(self, reference: str, answer: str | None) -> str | None:
        """The judgement on plain numbers; None where more than arithmetic is needed."""
        wanted = read_quantity(reference)
        if wanted is None:
            return None
        if answer is None:
            return "wrong"
        given = read_quantity(answer)
        if given is None:
            return None
        return "right" if same_quantity(wanted, given, self._rules()) else "wrong"

    def _rules(self) -> Rules:
        return Rules(self.percent, self.units, self.decimals, self.assume_positive)

    def _pool(self) -> WorkerPool:
        return shared_pool(
            "apportion.verifiers.math_equivalence.serve",
            asdict(self._rules()),
            workers=self.workers,
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
        )


def _pair(sample: Sample, answer: Answer | None) -> tuple[str, str | None] | None:
    """Reference and answer in one spelling; None where there is no reference."""
    if sample.reference is None or len(sample.reference) > MAX_LENGTH:
        return None
    reference = canonical(sample.reference[slice(*trim(sample.reference))])
    if not reference:
        return None
    too_long = answer is not None and len(answer.text) > MAX_LENGTH  # it cannot be cut: no part of it is the answer
    return reference, None if answer is None or too_long else canonical(answer.text)


def _verdict(judgement: str | WorkerFailure | None, answer: Answer | None) -> Verdict | WorkerFailure:
    if isinstance(judgement, WorkerFailure):
        return judgement
    score = _JUDGEMENTS.get(judgement or "")
    if score is None or answer is None:
        return Verdict(score)
    return Verdict(score, (Span(answer.start, answer.stop, score, f"{judgement} answer"),))
