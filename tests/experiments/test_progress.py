"""Progress: numbers on a terminal, a line now and then in a log, silence where it is not wanted; and the loggers."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from apportion.experiments import progress
from apportion.experiments.loggers import TensorBoardLogger, TrackioLogger, WandbLogger
from apportion.experiments.progress import StepProgress
from apportion.verifiers import InputError


@pytest.fixture
def screen(monkeypatch):
    """What a console shows; call with ``terminal=True`` for a terminal."""

    def make(terminal=False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
        monkeypatch.setattr(progress, "console", lambda: console)
        return text

    return make


def test_a_log_gets_a_line_at_each_evaluation_and_at_the_end(screen):
    text = screen()
    with StepProgress(True) as bar:
        assert bar.section("warm start", 9) is None
        update = bar.training(3)
        update(0, {"eval/success": 0.25})
        update(1, {"task/success": 0.5, "optim/grad_norm": 1.0})
        update(2, {"task/success": 0.625, "eval/success": 0.75, "policy/ref_kl": 0.001})
        update(3, {"task/success": 0.5})
    assert text.getvalue().splitlines() == [
        "step 0/3  held-out 0.25",
        "step 2/3  held-out 0.75  sampled 0.625  KL 0.001  grad 1",
        "step 3/3  held-out 0.75  sampled 0.5  KL 0.001  grad 1",
    ]


def test_a_terminal_gets_a_bar_with_the_numbers(screen):
    text = screen(terminal=True)
    with StepProgress(True) as bar:
        bar.section("warm start", 9)(9, 0.125)
        bar.training(3)(3, {"eval/success": 0.25})
    shown = text.getvalue()
    assert "warm start" in shown
    assert "loss 0.125" in shown
    assert "held-out 0.25" in shown
    assert "3/3" in shown


def test_silence_is_silent(screen):
    text = screen()
    with StepProgress(False) as bar, bar.cells([]):
        assert bar.section("warm start", 9) is None
        assert bar.training(3) is None
    assert text.getvalue() == ""


@dataclass(frozen=True)
class Cell:
    folder: Path


def test_cells_are_counted_by_what_they_say_of_themselves(screen, tmp_path):
    text, cells = screen(), [Cell(tmp_path / str(index)) for index in range(4)]
    for cell, state in zip(cells, ("finished", "failed", "running")):
        cell.folder.mkdir()
        (cell.folder / "status.json").write_text(json.dumps({"state": state}))
    with StepProgress(True) as bar, bar.cells(cells):
        pass
    assert text.getvalue().splitlines() == ["cells 2/4  1 running  1 failed"]


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.log(0, {"eval/success": 0.25})
    logger.log(1, {"eval/success": 0.5, "reward/mean": 0.125})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/success")] == [(0, 0.25), (1, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.125)]


@pytest.mark.parametrize(("kind", "library"), [(WandbLogger, "wandb"), (TrackioLogger, "trackio")])
def test_a_tracker_that_is_not_installed_is_named_with_the_remedy(kind, library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf'logger={library}: .*pip install "apportion\[tracking\]"'):
        kind(tmp_path)
