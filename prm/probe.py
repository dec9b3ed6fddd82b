"""A reward model in seconds: a linear probe on a frozen model's hidden states, kept in a folder, used as a verifier."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..verifiers import InputError, Sample, Span, Verdict
from ..verifiers.segmenters import Segmenter
from .best_of_n import Aggregation
from .encoding import Template
from .features import FeatureSettings, FrozenBackbone, Progress
from .linear_probe import (
    FOLDS,
    STRENGTHS,
    LinearProbe,
    OutOfFold,
    as_predictions,
    fit_probe,
    out_of_fold,
    step_columns,
)
from .score import step_verdict
from .settings import segmenter_of, segmenter_record
from .steps import StepExample

__all__ = ["ProbeResult", "SavedProbe", "StepProbe", "train_probe"]


@dataclass(frozen=True, eq=False)
class SavedProbe:
    """A probe and all that is needed to use it, but for the weights of the backbone.

    Args:
        probe: as fitted.
        settings: how the backbone is read; its one layer is the probe's.
        backbone: folder or hub name of the backbone; None where it was given in memory.
        dtype: of its weights.
        digest: of its weights, so that no other ones are taken for them.
        segmenter: how the steps were cut, as a record; None where nobody knows.
    """

    probe: LinearProbe
    settings: FeatureSettings
    backbone: str | None
    dtype: str
    digest: str
    segmenter: dict[str, Any] | None = None

    def predict(
        self,
        backbone: FrozenBackbone,
        examples: Sequence[StepExample],
        *,
        batch_tokens: int = 4096,
        cache: str | Path | None = None,
    ) -> list[list[float | None]]:
        """For each example the probability of "right" for each step; None where the backbone did not read it.

        Args:
            backbone: that the probe was fitted on.
            examples: solutions; their labels are not looked at.
            batch_tokens, cache: see :meth:`~apportion.prm.features.FrozenBackbone.features`.
        """
        return as_predictions(examples, self.probe(backbone.features(examples, batch_tokens=batch_tokens, cache=cache)))

    def save(self, folder: str | Path) -> None:
        """Write ``probe.json`` and ``probe.npz``: plain values and plain arrays."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = self.probe
        record = {
            **{name: getattr(self, name) for name in ("backbone", "dtype", "digest", "segmenter")},
            "settings": asdict(self.settings),
            "probe": {name: getattr(probe, name) for name in ("layer", "intercept", "strength")},
        }
        arrays = folder / "probe.npz.part"
        with arrays.open("wb") as file:
            np.savez(file, weights=probe.weights, place_weights=probe.place_weights)
        arrays.replace(folder / "probe.npz")
        values = folder / "probe.json.part"
        values.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        values.replace(folder / "probe.json")

    @classmethod
    def load(cls, folder: str | Path) -> SavedProbe:
        """What :meth:`save` wrote; nothing in it is run."""
        try:
            record = json.loads((Path(folder) / "probe.json").read_text(encoding="utf-8"))
            with np.load(Path(folder) / "probe.npz", allow_pickle=False) as arrays:
                probe = LinearProbe(weights=arrays["weights"], place_weights=arrays["place_weights"], **record["probe"])
            found = record["settings"]
            settings = FeatureSettings(
                **{**found, "layers": tuple(found["layers"]), "template": Template(**found["template"])}
            )
            names = ("backbone", "dtype", "digest", "segmenter")
            return cls(probe, settings, **{name: record[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: holds no probe ({str(error) or type(error).__name__}); train it anew"
            ) from error


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What became of a training.

    Args:
        saved: the probe fitted on all examples.
        path: its folder.
        out_of_fold: what to judge it by: predictions for ``evaluate_steps`` beside the baselines; None if not wanted.
        feature_seconds, fit_seconds: for the features (next to nothing where the cache held them), and for all fits.
    """

    saved: SavedProbe
    path: Path
    out_of_fold: OutOfFold | None
    feature_seconds: float
    fit_seconds: float


def train_probe(
    examples: Sequence[StepExample],
    backbone: FrozenBackbone,
    folder: str | Path,
    *,
    position: bool = False,
    strengths: Sequence[float] = STRENGTHS,
    folds: int = FOLDS,
    cross_validate: bool = True,
    labelled_only: bool = False,
    cache: str | Path | None = None,
    batch_tokens: int = 4096,
    segmenter: Segmenter | None = None,
    progress: Progress | None = None,
) -> ProbeResult:
    """Features, predictions by folds, and a probe of all examples, saved for the verifier ``step_probe``.

    Args:
        examples: solutions with labelled steps.
        backbone: what is read of them.
        folder: for the probe.
        position: look at the step's place as well; it knows how long the whole solution is.
        strengths, folds: see :func:`~apportion.prm.linear_probe.out_of_fold`.
        cross_validate: make its predictions; not needed where other problems are held out.
        labelled_only, cache, batch_tokens, progress: see :meth:`~apportion.prm.features.FrozenBackbone.features`.
        segmenter: that cut the examples, to be remembered.
    """
    started = time.perf_counter()
    features = backbone.features(
        examples, labelled_only=labelled_only, cache=cache, batch_tokens=batch_tokens, progress=progress
    )
    read = time.perf_counter()
    options: dict[str, Any] = {"position": position, "strengths": strengths, "folds": folds}
    judged = out_of_fold(examples, features, **options) if cross_validate else None
    labels, problems, _ = step_columns(examples)
    probe = fit_probe(features, labels, problems, **options)
    saved = SavedProbe(
        probe,
        replace(backbone.settings, layers=(probe.layer,)),
        backbone.source,
        str(backbone.model.dtype).removeprefix("torch."),
        backbone.digest,
        None if segmenter is None else segmenter_record(segmenter),
    )
    saved.save(folder)
    return ProbeResult(saved, Path(folder), judged, read - started, time.perf_counter() - read)


@dataclass(frozen=True)
class StepProbe:
    """A probe that ``train_probe`` left, asked for every step of every answer.

    Spans are the steps, their score the probability that the step is right. An answer without steps has no score, nor
    has one with a step that the backbone could not read; the steps that it did read keep their spans. A causal
    backbone reads the policy's sampled ids where the sample's metadata name its tokenizer, else the text.

    Args:
        path: folder of the probe.
        backbone: folder or hub name of the model it was fitted on; None: where that was then.
        segmenter: cuts a completion into steps; None: as for the training.
        aggregate: score of the whole from its steps: ``min``, ``prod``, ``mean`` or ``last``.
        batch_tokens: most tokens of a forward, padding counted.
        device: ``cpu``, ``cuda``, or ``auto``: cuda where there is one.
    """

    path: str
    backbone: str | None = None
    segmenter: Segmenter | None = None
    aggregate: Literal["min", "prod", "mean", "last"] = "min"
    batch_tokens: int = 16_384
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.aggregate not in get_args(Aggregation):
            raise InputError(f"aggregate={self.aggregate}: give one of {', '.join(get_args(Aggregation))}")
        if self.batch_tokens < 1:
            raise InputError(f"batch_tokens={self.batch_tokens}: give a number of tokens from 1 on")
        _ = self._saved

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        cut = self.segmenter or segmenter_of(self._saved.segmenter)
        examples = [_example(sample, cut(sample.completion)) for sample in samples]
        scored = self._saved.predict(self._backbone, examples, batch_tokens=self.batch_tokens)
        return [_verdict(example.steps, row, self.aggregate) for example, row in zip(examples, scored)]

    def prepare(self) -> None:
        """Load the backbone now, so that a missing or another one is refused before anything costs time."""
        _ = self._backbone, self.segmenter or segmenter_of(self._saved.segmenter)

    def __getstate__(self) -> dict[str, Any]:
        """Options only: a copy in another process loads the model itself."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _saved(self) -> SavedProbe:
        return SavedProbe.load(self.path)

    @cached_property
    def _backbone(self) -> FrozenBackbone:
        saved = self._saved
        source = self.backbone or saved.backbone
        if source is None:
            raise InputError(f"{self.path}: its backbone was in memory; save that, and give backbone=FOLDER")
        device = None if self.device == "auto" else self.device
        loaded = FrozenBackbone.load(source, saved.settings, dtype=saved.dtype, device=device)
        if loaded.digest != saved.digest:
            raise InputError(f"backbone={source}: has other weights than the probe was fitted on; give those, or refit")
        return loaded


def _example(sample: Sample, steps: Sequence[tuple[int, int]]) -> StepExample:
    return StepExample(sample.prompt, sample.completion, tuple(steps), (None,) * len(steps), "", sample.metadata)


def _verdict(steps: Sequence[tuple[int, int]], row: Sequence[float | None], aggregate: Aggregation) -> Verdict:
    chances = [chance for chance in row if chance is not None]
    if len(chances) == len(row):
        return step_verdict(steps, chances, aggregate)
    spans = (Span(*step, chance, "step") for step, chance in zip(steps, row) if chance is not None)
    return Verdict(None, tuple(spans))
