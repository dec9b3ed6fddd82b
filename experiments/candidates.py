"""Several answers to each problem, scored by a reward model, for best-of-N."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..prm.best_of_n import BestOfN, Candidate, CandidateGroup, measure_best_of_n
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.panel import judge
from .build import build
from .tables import read_rows
from .verdict_file import read_samples

__all__ = ["best_of_n", "read_candidates"]


def best_of_n(config: DictConfig, samples: Sequence[Sample], model: Any) -> BestOfN:
    """Accuracy of picking among N answers by the model's step scores, beside majority vote and the oracle.

    Args:
        config: of ``eval-prm``: ``verifiers.answer``.
        samples: the answers.
        model: a step model, whose own segmenter cuts the answers, or a verifier that judges steps.
    """
    answer = build(config.verifiers.answer, "verifiers.answer", function=True)
    told = judge({"answer": answer}, samples, timeout_s=config.run.verifier_timeout_s)
    groups: dict[str, list[Candidate]] = {}
    for sample, said, scores in zip(samples, told.verdicts, _step_scores(model, samples)):
        if said["answer"].score is not None:
            groups.setdefault(sample.prompt, []).append(_candidate(sample, said["answer"], scores))
    if not groups:
        raise InputError(f"candidates={config.candidates}: verifiers.answer judged none; do the rows have references?")
    return measure_best_of_n([CandidateGroup(name, tuple(own)) for name, own in groups.items()], seed=config.seed)


def _candidate(sample: Sample, verdict: Verdict, scores: tuple[float, ...]) -> Candidate:
    given = sample.completion[verdict.spans[-1].start : verdict.spans[-1].stop].strip() if verdict.spans else None
    return Candidate(scores, given or None, bool(verdict.score is not None and verdict.score >= 0.5))


def _step_scores(model: Any, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
    from ..prm.model import StepModel
    from ..prm.score import step_probabilities
    from ..prm.settings import segmenter_of

    if not isinstance(model, StepModel):
        told = judge({"it": model}, samples)
        return [tuple(span.score for span in said["it"].spans) for said in told.verdicts]
    cut = segmenter_of(model.settings.segmenter)
    rows = [model.encode(s.prompt, s.completion, cut(s.completion), s.metadata) for s in samples]
    return step_probabilities(model, rows, calibrated=True)


def read_candidates(config: DictConfig) -> list[Sample]:
    """The answers of ``candidates``: the Parquet files of a folder, or a file."""
    given = str(config.candidates)
    path = Path(given).expanduser()
    files = sorted(str(file) for file in path.glob("*.parquet")) if path.is_dir() else [given]
    columns = {role: config[role] for role in ("prompt", "completion", "reference")}
    found = [s for file in files for _, s in read_samples(read_rows(file, "candidates"), file, **columns)]
    if not found:
        raise InputError(f"candidates={given}: holds no answer; give the rollouts/ of a run, or a file")
    return found
