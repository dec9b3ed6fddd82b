"""What a run writes while it goes: metrics.jsonl and the rollouts as Parquet."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..credit import Credit, CreditBatch, Rollout
from ..verifiers import InputError, Verdict
from .files import one_line, replacing, write_text
from .task import Problem

__all__ = ["MetricsFile", "drop_rollouts_after", "read_metrics", "rollouts_path", "write_rollouts"]


class MetricsFile:
    """``metrics.jsonl``: one line a step. Opening it for a resumed run drops the lines after ``last_step``.

    Args:
        path: the file; its folder must be there.
        last_step: of the checkpoint that the run goes on from; None begins a new file.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        self._path = path
        kept = [row for row in read_metrics(path) if last_step is not None and row["step"] <= last_step]
        self.is_empty = not kept
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, row: Mapping[str, float]) -> None:
        """Append one line; a file or folder that has vanished is an error, and never made anew."""
        line = (json.dumps(dict(row), allow_nan=False) + "\n").encode()
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(handle, line) != len(line):
                    raise OSError("the line was cut short")
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written ({one_line(error)}); mend that, then repeat the command: it goes on "
                "from the last checkpoint"
            ) from error
        self.is_empty = False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line cut by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def rollouts_path(folder: Path, step: int) -> Path:
    """Where the rollouts of a step lie."""
    return folder / "rollouts" / f"step_{step:05d}.parquet"


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Remove the rollouts of later steps: a run that was thrown back to ``step`` samples them again."""
    for path in (folder / "rollouts").glob("step_*.parquet"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()


def write_rollouts(
    path: Path,
    step: int,
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
    credit: Credit,
) -> None:
    """One row per rollout: text, ids, log-probabilities, verdicts, and the advantages that are trained on.

    Args:
        path: file to write; its folder is made where the run's folder is there.
        step: of the rollout batch.
        problems: N problems; a rollout's ``group_id`` is the index of its own.
        rollouts, batch: B rollouts, and the same as tensors.
        credit: (B, T); of a strategy that is computed anew at each optimiser step, that of the first.

    Raises:
        InputError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    rows, seen = [], dict.fromkeys(range(len(problems)), 0)
    for index, rollout in enumerate(rollouts):
        problem, length = problems[rollout.group_id], len(rollout.completion_ids)
        rows.append(
            {
                "step": step,
                "problem_id": problem.id,
                "prompt": problem.prompt,
                "completion": rollout.text,
                "reference": problem.reference,
                "group_id": rollout.group_id,
                "sample": seen[rollout.group_id],
                "truncated": rollout.truncated,
                "reward": rollout.reward,
                "prompt_ids": list(rollout.prompt_ids),
                "completion_ids": list(rollout.completion_ids),
                "logprobs": list(rollout.logprobs),
                "token_start": [start for start, _ in rollout.offsets],
                "token_stop": [stop for _, stop in rollout.offsets],
                "completion_mask": batch.completion_mask[index, :length].tolist(),
                "advantages": credit.advantages[index, :length].tolist(),
                "parts": json.dumps({k: v[index, :length].tolist() for k, v in credit.parts.items()}),
                "loss_weight": None if credit.loss_weight is None else credit.loss_weight[index, :length].tolist(),
                "verdicts": json.dumps({name: _plain(verdict) for name, verdict in rollout.verdicts.items()}),
            }
        )
        seen[rollout.group_id] += 1
    with replacing(path) as temporary:
        path.parent.mkdir(exist_ok=True)
        pq.write_table(_table(rows), temporary)


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {"score": verdict.score, "spans": [[s.start, s.stop, s.score, s.label] for s in verdict.spans]}


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """An Arrow table, by way of JSON: made of Python objects it would load pandas, 50 MB for nothing."""
    import pyarrow.json as pj

    text = "\n".join(json.dumps(row) for row in rows).encode()
    read = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pj.ParseOptions(explicit_schema=_schema(), unexpected_field_behavior="error")
    return pj.read_json(io.BytesIO(text), read_options=read, parse_options=parse)


def _schema() -> Any:
    import pyarrow as pa

    ints, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            ("step", pa.int32()),
            ("problem_id", pa.string()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("reference", pa.string()),
            ("group_id", pa.int32()),
            ("sample", pa.int32()),
            ("truncated", pa.bool_()),
            ("reward", pa.float64()),
            ("prompt_ids", ints),
            ("completion_ids", ints),
            ("logprobs", floats),
            ("token_start", ints),
            ("token_stop", ints),
            ("completion_mask", pa.list_(pa.bool_())),
            ("advantages", floats),
            ("parts", pa.string()),
            ("loss_weight", floats),
            ("verdicts", pa.string()),
        ]
    )
