"""What lies in the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from apportion.credit import Credit, Rollout, collate
from apportion.grpo.records import MetricsFile, drop_rollouts_after, read_metrics, rollouts_path, write_rollouts
from apportion.grpo.task import Problem
from apportion.verifiers import InputError, Span, Verdict


def test_lines_after_the_checkpoint_are_dropped_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.is_empty
    for step in range(4):
        file.log({"step": step, "reward/mean": 0.1 + 0.2 * step})
    assert not file.is_empty
    before = path.read_text()
    with path.open("a") as cut:
        cut.write('{"step": 4, "rew')  # a crash in the middle of a line
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    assert not MetricsFile(path, last_step=2).is_empty
    assert path.read_text() == "".join(before.splitlines(keepends=True)[:3])
    MetricsFile(path, last_step=2).log({"step": 3, "x": 1})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    assert MetricsFile(path).is_empty
    assert path.read_text() == ""
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_file_or_folder_that_vanished_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="No such file or directory"):
        file.log({"step": 0})
    assert not list(folder.iterdir())
    folder.rmdir()
    with pytest.raises(InputError) as caught:
        file.log({"step": 0})
    assert str(caught.value) == (
        f"{folder}/metrics.jsonl: cannot be written (No such file or directory); mend that, then repeat the command: "
        "it goes on from the last checkpoint"
    )
    assert not folder.exists()


def test_a_line_cut_short_by_a_full_disk_is_told_and_left_out_on_reading(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log({"step": 0})
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, line: whole(handle, line[:5]))
        with pytest.raises(InputError, match="cut short"):
            file.log({"step": 1})
    assert [row["step"] for row in read_metrics(path)] == [0]
    MetricsFile(path, last_step=0).log({"step": 1})
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        MetricsFile(tmp_path / "metrics.jsonl").log({"step": 0, "x": float("nan")})


def test_rollouts_of_later_steps_are_dropped(tmp_path: Path) -> None:
    for step in (1, 20, 100_000):
        path = rollouts_path(tmp_path, step)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    drop_rollouts_after(tmp_path, 20)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step_00001.parquet",
        "step_00020.parquet",
    ]
    drop_rollouts_after(tmp_path / "none", 0)


@pytest.fixture
def written(rollout_of: Callable[..., Rollout]) -> tuple[Any, ...]:
    problems = [Problem("p", "1+2=?", "3"), Problem("q", "é <b>", None)]
    verdicts = {"steps": Verdict(0.5, (Span(0, 2, 1.0, "step"), Span(2, 3, 0.0, 'a "quote"'))), "answer": Verdict(None)}
    rollouts = [
        rollout_of([5, 6, 7], group=0, reward=0.25, verdicts=verdicts),
        rollout_of([8], group=1, truncated=True, verdicts=verdicts),
        rollout_of([9, 5], group=0, reward=1.0, verdicts=verdicts),
    ]
    batch = collate(rollouts, mask_truncated=True)
    advantages = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.0, 0.0], [1.0, 2.0, 0.0]])
    return problems, rollouts, batch, Credit(advantages, torch.ones(3, 3) / 3, {"a": advantages / 2})


def test_a_row_holds_the_rollout_and_the_credit_without_padding(tmp_path: Path, written: tuple[Any, ...]) -> None:
    path = rollouts_path(tmp_path, 12)
    write_rollouts(path, 12, *written)
    rows = pq.read_table(path).to_pylist()
    assert [row["problem_id"] for row in rows] == ["p", "q", "p"]
    assert [(row["group_id"], row["sample"], row["reward"]) for row in rows] == [
        (0, 0, 0.25),
        (1, 0, None),
        (0, 1, 1.0),
    ]
    assert [row["completion_mask"] for row in rows] == [[True] * 3, [False], [True] * 2]
    assert rows[0]["advantages"] == torch.tensor([0.1, -0.2, 0.3]).tolist()
    assert json.loads(rows[2]["parts"]) == {"a": [0.5, 1.0]}
    assert rows[2]["loss_weight"] == pytest.approx([1 / 3] * 2)
    assert (rows[0]["token_start"], rows[0]["token_stop"]) == ([0, 1, 2], [1, 2, 3])
    assert (rows[1]["prompt"], rows[1]["reference"], rows[1]["truncated"], rows[1]["step"]) == ("é <b>", None, True, 12)
    assert json.loads(rows[0]["verdicts"]) == {
        "steps": {"score": 0.5, "spans": [[0, 2, 1.0, "step"], [2, 3, 0.0, 'a "quote"']]},
        "answer": {"score": None, "spans": []},
    }


def test_a_full_disk_is_one_clear_line_and_leaves_no_part(
    tmp_path: Path, written: tuple[Any, ...], monkeypatch: Any
) -> None:
    def full(table: Any, where: Path) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(InputError, match=r"step_00001.parquet: cannot be written \(No space left on device\)"):
        write_rollouts(rollouts_path(tmp_path, 1), 1, *written)
    assert list((tmp_path / "rollouts").iterdir()) == []
    with pytest.raises(InputError, match="No such file"):
        write_rollouts(rollouts_path(tmp_path / "gone", 1), 1, *written)
    assert not (tmp_path / "gone").exists()
