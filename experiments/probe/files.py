"""What a probe leaves beside its page, from which every figure can be computed again."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...credit.shape import CLASSES
from ...grpo.files import replacing, write_text
from ...grpo.gram import GradientGram
from .record import Figure, Probe

if TYPE_CHECKING:
    from .language import Probing

__all__ = ["write_figures", "write_files", "write_record"]


def write_files(
    folder: Path, found: Probe, state: Probing, gram: GradientGram | None, changes: Mapping[str, Tensor]
) -> None:
    """Write ``probe.parquet``, ``gradients.npz`` and the tables of :func:`write_figures`.

    Args:
        folder: of the probe.
        found: what is shown.
        state: rollouts, truth and credit.
        gram: inner products of gradients, or None.
        changes: by strategy, (B, T) change of the log-probabilities by one step; may be empty.
    """
    _write_rollouts(folder / "probe.parquet", state, changes)
    if gram is not None:
        with replacing(folder / "gradients.npz") as path, path.open("wb") as file:
            np.savez(file, **_arrays(gram))
    write_figures(folder, found)


def write_figures(folder: Path, found: Probe) -> None:
    """Write ``figures.csv``, one row for each strategy and figure, and ``noise.csv``."""
    rows = [
        [one.name, one.kind, key, *_numbers(value)] for one in found.strategies for key, value in one.figures.items()
    ]
    rows += [["noise floor", "", key, *_numbers(value)] for key, value in found.noise_floor.items()]
    write_text(folder / "figures.csv", _csv(["strategy", "kind", "figure", "value", "low", "high"], rows))
    if found.noise:
        rows = [
            [point.noise, point.level, point.strategy, key, *_numbers(value)]
            for point in found.noise
            for key, value in point.figures.items()
        ]
        heads = ["noise", "level", "strategy", "figure", "value", "low", "high"]
        write_text(folder / "noise.csv", _csv(heads, rows))


def write_record(folder: Path, found: Probe) -> None:
    """Write ``probe.json``, last of all: it says that everything else is there."""
    kept = {**asdict(found), "rollouts": len(found.rollouts), "noise": len(found.noise)}
    write_text(folder / "probe.json", json.dumps(_plain(kept), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _write_rollouts(path: Path, state: Probing, changes: Mapping[str, Tensor]) -> None:
    """One row for each answer; lists have an entry for each of its tokens, or for each of its units."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth, halves, batch = state.valuation.truth, state.valuation.halves, state.batch
    rows: list[dict[str, Any]] = []
    for index, rollout in enumerate(state.probed.rollouts):
        problem, length = state.probed.problems[rollout.group_id], len(rollout.completion_ids)

        def tokens(values: Tensor, row: int = index, stop: int = length) -> list[Any]:
            found: list[Any] = values[row, :stop].tolist()
            return found

        units = int((~truth.advantage[index].isnan()).sum())
        rows.append(
            {
                "problem_id": problem.id,
                "prompt": problem.prompt,
                "completion": rollout.text,
                "reference": problem.reference,
                "group_id": rollout.group_id,
                "truncated": rollout.truncated,
                "reward": rollout.reward,
                "prompt_ids": list(rollout.prompt_ids),
                "completion_ids": list(rollout.completion_ids),
                "logprobs": list(rollout.logprobs),
                "token_start": [start for start, _ in rollout.offsets],
                "token_stop": [stop for _, stop in rollout.offsets],
                "completion_mask": tokens(batch.completion_mask),
                "token_class": [CLASSES[place] if place >= 0 else None for place in tokens(state.measures.classes)],
                "unit": tokens(truth.unit_ids),
                "wrong": tokens(truth.wrong),
                "inert": tokens(truth.inert),
                "true_advantage": truth.advantage[index, :units].tolist(),
                "standard_error": truth.standard_error[index, :units].tolist(),
                "first_half": None if halves is None else halves.advantage[index, :units].tolist(),
                "second_half": None if halves is None or halves.again is None else halves.again[index, :units].tolist(),
                **{f"advantages_{name}": tokens(credit.advantages) for name, credit in state.credits.items()},
                **{
                    f"loss_weight_{name}": tokens(credit.loss_weight)
                    for name, credit in state.credits.items()
                    if credit.loss_weight is not None
                },
                **{f"change_{name}": tokens(change) for name, change in changes.items()},
            }
        )
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)


def _arrays(gram: GradientGram) -> dict[str, Any]:
    """``gram[k, n, l, m]`` is the inner product of strategy k in group n with strategy l in group m."""
    arrays = {"names": np.array(gram.names), "groups": gram.groups.numpy(), "gram": gram.gram.numpy()}
    if gram.reference is not None:
        arrays |= {"reference_cross": gram.reference.cross.numpy(), "reference_halves": gram.reference.halves.numpy()}
    return arrays


def _csv(heads: list[str], rows: list[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return text.getvalue()


def _numbers(figure: Figure) -> list[Any]:
    return ["" if math.isnan(value) else repr(float(value)) for value in figure]


def _plain(value: Any) -> Any:
    """Plain JSON: a number that is none is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
