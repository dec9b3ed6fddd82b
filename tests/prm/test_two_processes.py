"""Two processes learn what one does from all their batches, and measure the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.prm.model import StepModel
from apportion.prm.steps import StepExample
from apportion.prm.training import PrmTrainingConfig, train_prm


def examples(number: int) -> list[StepExample]:
    texts = [" ".join("ab" * (1 + (n * place) % 4) for place in range(1, 2 + n % 4)) for n in range(number)]
    found = []
    for n, text in enumerate(texts):
        ends = [place for place, letter in enumerate(text) if letter == " "] + [len(text)]
        steps = tuple(zip([0, *(end + 1 for end in ends[:-1])], ends))
        labels = tuple(float((n + place) % 3 > 0) for place in range(len(steps)))
        found.append(StepExample("ab?", text, steps, labels, str(n)))
    return found


def descend(folder: Path) -> None:
    """Two epochs of one update each, along the gradient itself; what came of it is left in ``folder``."""
    from transformers import Trainer

    torch.set_num_threads(1)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Trainer.get_optimizer_cls_and_kwargs = staticmethod(lambda args, model=None: (torch.optim.SGD, {"lr": 0.5}))
    model = StepModel.from_backbone(folder / "backbone")
    config = PrmTrainingConfig(epochs=2, batch_rows=12 // processes, schedule="constant", cpu=True, log_every=1)
    result = train_prm(model, examples(12), examples(7), config, folder / f"run-{processes}")
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    losses = [figures["train/loss"] for figures in result.history if "train/loss" in figures]
    torch.save((weights, result.updates, losses, dict(result.measures)), folder / f"{rank}-of-{processes}.pt")


@pytest.mark.slow
def test_two_processes_learn_what_one_does(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    backbones("llama", tokenizer).save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    for processes in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *launcher, __file__, str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    found = {
        processes: [torch.load(tmp_path / f"{rank}-of-{processes}.pt") for rank in range(processes)]
        for processes in (1, 2)
    }
    (weights, updates, losses, measures), *_ = found[1]
    for other in found[2]:
        assert float((other[0] - weights).abs().max()) < 1e-6
        assert other[1] == updates == 2
        assert other[2] == pytest.approx(losses, abs=1e-6)
        for name in ("eval/loss", "eval/brier"):  # ranks of equal scores are a matter of rounding
            assert other[3][name] == pytest.approx(measures[name], abs=1e-6)
    saved = StepModel.from_pretrained(tmp_path / "run-2" / "model")
    assert torch.equal(torch.cat([weight.flatten() for weight in saved.parameters()]), found[2][0][0])


if __name__ == "__main__":
    descend(Path(sys.argv[1]))
