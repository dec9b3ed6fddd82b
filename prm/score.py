"""A reward model as a verifier: all steps of all answers of a batch from one causal forward each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch

from ..verifiers import InputError, Sample, Span, Verdict
from ..verifiers.segmenters import Segmenter
from .best_of_n import Aggregation
from .encoding import Encoded, collate_steps
from .loading import source_of
from .model import StepModel
from .settings import segmenter_of

__all__ = ["StepRewardModel", "check_aggregate", "length_buckets", "step_probabilities", "step_verdict"]


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of rows in batches of like length, each at most ``batch_tokens`` with its padding.

    A row that is longer than that is a batch by itself; empty rows are left out.

    >>> length_buckets([3, 9, 0, 4, 4], 12)
    [[1], [3, 4, 0]]
    """
    buckets: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not lengths[row]:
            break
        if not buckets or longest * (len(buckets[-1]) + 1) > batch_tokens:
            buckets.append([])
            longest = lengths[row]
        buckets[-1].append(row)
    return buckets


@torch.inference_mode()
def step_probabilities(
    model: StepModel, rows: Sequence[Encoded], *, batch_tokens: int = 16_384, calibrated: bool = False
) -> list[tuple[float, ...]]:
    """Probability of "right" for each kept step of each row, in the rows' order.

    A causal model shows at every token what it would show if the text ended there, so that one forward gives what
    scoring each beginning of the solution by itself gives. Rows of like length go together.

    Args:
        model: the reward model; its mode is kept.
        rows: encoded solutions; one with nothing to score gets no probability.
        batch_tokens: most tokens of a forward, padding counted.
        calibrated: apply the model's calibration, if it has one.
    """
    found: list[tuple[float, ...]] = [()] * len(rows)
    training = model.training
    model.eval()
    try:
        for bucket in length_buckets([len(row.input_ids) for row in rows], batch_tokens):
            ids, _, step_rows, positions = (part.to(model.device) for part in collate_steps([rows[i] for i in bucket]))
            logits = model.step_logits(ids, None, step_rows, positions)
            chances = torch.sigmoid(logits.double()).cpu()
            for row, own in zip(bucket, chances.split([rows[i].kept_steps for i in bucket])):
                found[row] = tuple(own.tolist())
    finally:
        model.train(training)
    calibration = model.settings.calibration
    if not calibrated or calibration is None:
        return found
    return [tuple(calibration(row).tolist()) if row else () for row in found]


def step_verdict(steps: Sequence[tuple[int, int]], probabilities: Sequence[float], aggregate: Aggregation) -> Verdict:
    """A span a scored step; the whole has a score only where every step has one.

    Args:
        steps: character ranges of all steps.
        probabilities: of the first steps, as many as could be scored.
        aggregate: ``min``, ``prod``, ``mean`` or ``last`` of them.

    >>> step_verdict([(0, 3), (4, 7)], [0.5, 0.25], "prod").score
    0.125
    >>> step_verdict([(0, 3), (4, 7)], [0.5], "prod")
    Verdict(score=None, spans=(Span(start=0, stop=3, score=0.5, label='step; 1 more did not fit'),))
    """
    left = len(steps) - len(probabilities)
    spans = [Span(start, stop, chance, "step") for (start, stop), chance in zip(steps, probabilities)]
    if spans and left:
        last = spans[-1]
        spans[-1] = Span(last.start, last.stop, last.score, f"step; {left} more did not fit")
    return Verdict(None if left or not spans else _WHOLE[aggregate](probabilities), tuple(spans))


_WHOLE: dict[Aggregation, Callable[[Sequence[float]], float]] = {
    "min": min,
    "prod": math.prod,
    "mean": lambda chances: math.fsum(chances) / len(chances),
    "last": lambda chances: chances[-1],
}


def check_aggregate(aggregate: str) -> None:
    """Refuse what names no summary of the steps."""
    if aggregate not in _WHOLE:
        raise InputError(f"aggregate={aggregate}: give one of {', '.join(_WHOLE)}")


@dataclass(frozen=True)
class StepRewardModel:
    """A trained process reward model, asked for every step of every answer.

    Spans are the steps, their score the probability that the step is right. An answer without steps, and one that does
    not fit into ``max_length``, has no score; the steps that do fit keep their spans. Where the sample's metadata name
    the reward model's own tokenizer, the policy's sampled ids are read, else the text.

    Args:
        path: folder of the model, or name on the hub.
        segmenter: cuts a completion into steps; None: as the model was trained.
        aggregate: score of the whole from its steps: ``min``, ``prod``, ``mean`` or ``last``.
        batch_tokens: most tokens of a forward, padding counted.
        max_length: most tokens of prompt and completion; None: the model's own limit.
        calibration: apply the model's calibration, if it has one.
        device: ``cpu``, ``cuda``, or ``auto``: cuda where there is one.
        dtype: of the weights: float32, bfloat16, float16; None: as stored.
        settings: values of the model's ``prm.json`` to replace, or to give where it has none.
    """

    path: str | None
    segmenter: Segmenter | None = None
    aggregate: Literal["min", "prod", "mean", "last"] = "min"
    batch_tokens: int = 16_384
    max_length: int | None = None
    calibration: bool = True
    device: str = "auto"
    dtype: str | None = "float32"
    settings: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not self.path:
            raise InputError("path: needs the folder or hub name of a reward model; give prm.path=... or this key")
        source_of(self.path)
        check_aggregate(self.aggregate)
        for name, value in (("batch_tokens", self.batch_tokens), ("max_length", self.max_length)):
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: give a number of tokens from 1 on")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise InputError(f"dtype={self.dtype}: give float32, bfloat16, float16 or null")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        model, segmenter = self.model, self._segmenter
        steps = [segmenter(sample.completion) for sample in samples]
        rows = [
            model.encode(sample.prompt, sample.completion, own, sample.metadata, max_length=self.max_length)
            for sample, own in zip(samples, steps)
        ]
        scored = step_probabilities(model, rows, batch_tokens=self.batch_tokens, calibrated=self.calibration)
        return [step_verdict(own, chances, self.aggregate) for own, chances in zip(steps, scored)]

    def prepare(self) -> None:
        """Load the model now, so that a broken one is refused before anything costs time."""
        _ = self.model, self._segmenter

    @property
    def counted_models(self) -> tuple[Any, ...]:
        """Models whose tokens are charged to the run that asks."""
        return (self.model.model.base_model,)

    def __getstate__(self) -> dict[str, Any]:
        """Options only: a copy in another process loads the model itself."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def model(self) -> StepModel:
        """The model, loaded when first asked for."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = StepModel.from_pretrained(str(self.path), dtype=self.dtype, settings=self.settings).to(device)
        return loaded.requires_grad_(False)

    @cached_property
    def _segmenter(self) -> Segmenter:
        return segmenter_of(self.model.settings.segmenter) if self.segmenter is None else self.segmenter
