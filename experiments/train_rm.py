"""Train a reward model of whole answers on human preferences (Bradley-Terry)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from ..grpo.files import write_text
from ..verifiers import InputError
from .app import build, check_keys, hydra_command, task_overrides
from .progress import StepProgress, console
from .rundir import hold_folder, plain_config, refuse_finished, run_path
from .train import device, set_threads

__all__ = ["main", "train_rm"]

KEYS = {
    *("preferences", "held_out", "backbone", "layout", "dtype", "training"),
    *("seed", "device", "threads", "run", "command"),
}


def main(arguments: list[str] | None = None) -> None:
    """``apportion train-rm preferences.path=pairs.jsonl backbone=MODEL``"""
    hydra_command("train-rm", run_command, sys.argv[1:] if arguments is None else arguments)


def run_command(config: DictConfig) -> None:
    """The command around :func:`train_rm`."""
    check_keys(config, KEYS, experiments=False)
    folder = run_path(config.run.dir).resolve()
    measures = train_rm(config, folder, command=shlex.join(["apportion", "train-rm", *task_overrides()]), progress=True)
    if measures is None:
        console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
    else:
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in measures.items())
        sys.stdout.write(f"held-out pairs: {shown}\n")
    sys.stdout.write(f"{folder}\n")
    if measures is None:
        raise SystemExit(130)


def train_rm(config: DictConfig, folder: Path, *, command: str, progress: bool = False) -> Mapping[str, float] | None:
    """Train, and leave ``model/`` for ``verifier=reward_model``, and ``result.json``.

    Args:
        config: composed from ``conf/train_rm.yaml``.
        folder: of the run.
        command: that did it, kept beside the result.
        progress: show it.

    Returns:
        Measures of the held-out pairs: accuracy (the better answer scores higher), margin, loss; None where stopped.
    """
    from ..grpo.interrupt import StopRequest
    from ..prm.preferences import reward_backbone, train_reward_model

    plain = plain_config(config)
    pairs = build(config.preferences, "preferences")
    training = replace(build(config.training, "training"), cpu=device(config.device) == "cpu")
    set_threads(config)
    with hold_folder(folder):
        refuse_finished(folder, plain, "result.json")
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        train, held_out = _split(pairs, config.held_out, config.seed)
        model, tokenizer = reward_backbone(config.backbone, dtype=config.dtype, seed=config.seed)
        stop = StopRequest()
        with StepProgress(progress) as bar, stop.listening():
            done = train_reward_model(
                model,
                tokenizer,
                train,
                held_out,
                training,
                folder,
                bar.fitting(),
                layout=config.layout,
                resume=True,
                stop=stop,
            )
        if not done.finished:
            return None
        result = {"command": command, "pairs": done.pairs, "held_out": len(held_out), "too_long": done.too_long}
        write_text(folder / "result.json", json.dumps({**result, **done.measures}, indent=2) + "\n")
    return done.measures


def _split(pairs: list[Any], held_out: float, seed: int) -> tuple[list[Any], list[Any]]:
    """By prompt, so that no prompt is in both."""
    from ..grpo.seeds import named_seed

    kept = {prompt for prompt in {p.prompt for p in pairs} if named_seed(seed, "held-out", prompt) / 2**63 < held_out}
    parts = [p for p in pairs if p.prompt not in kept], [p for p in pairs if p.prompt in kept]
    for name, part in zip(("train on", "measure on"), parts):
        if not part:
            raise InputError(f"held_out={held_out}: of {len(pairs)} pairs none is left to {name}; change the share")
    return parts


if __name__ == "__main__":
    from .train_rm import main as _main  # so that the functions belong to the module, not to __main__

    _main()
