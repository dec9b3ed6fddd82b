"""One GRPO run: build everything from the configuration, train, say where it is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ..verifiers import InputError
from .app import build, hydra_command, task_overrides
from .parts import Parts, build_parts, check_line_breaks, prepare
from .progress import StepProgress, console
from .rundir import plain_config, refuse_other_run, run_folder, run_path

if TYPE_CHECKING:
    from ..grpo.policy import Policy

__all__ = ["check_prompts", "device", "main", "set_threads", "train"]


def main(arguments: list[str] | None = None) -> None:
    """``apportion train key=value ...``"""
    hydra_command("train", run_command, sys.argv[1:] if arguments is None else arguments)


def run_command(config: DictConfig) -> None:
    """The command around :func:`train`."""
    folder = run_path(config.run.dir).resolve()
    if config.prm.path is not None and not any(_reads(node, config.prm.path) for node in config.verifiers.values()):
        raise InputError(f"prm.path={config.prm.path}: no verifier reads it; add verifier@verifiers.steps=prm")
    state = train(config, overrides=task_overrides(), progress=True)
    if state == "interrupted":
        console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
    sys.stdout.write(f"{folder}\n")
    if state == "interrupted":
        raise SystemExit(130)


def train(config: DictConfig, *, overrides: list[str], progress: bool = False) -> str:
    """Train as ``config`` says, in ``config.run.dir``; "finished" or "interrupted".

    Args:
        config: composed from ``conf/train.yaml``.
        overrides: what the user changed, kept beside the run.
        progress: show a progress bar.
    """
    check_line_breaks(overrides)
    plain = plain_config(config)
    folder = run_path(config.run.dir)
    refuse_other_run(folder, plain)
    parts = build_parts(config)
    task = build(config.get("task"), "task")
    with run_folder(folder, plain, overrides):
        return _run(config, parts, task, folder, overrides, progress)


def _run(config: DictConfig, parts: Parts, task: Any, folder: Path, overrides: list[str], progress: bool) -> str:
    from ..grpo.trainer import Trainer
    from .describe import write_description
    from .warmstart import warm_start

    set_threads(config)
    prepare(parts.verifiers)
    source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
    policy = source.build(device(config.device))
    check_prompts(policy, task, parts)
    with StepProgress(progress) as bar:
        warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))
        trainer = Trainer(
            policy,
            task,
            parts.verifiers,
            parts.reward,
            parts.strategy,
            rollout=parts.rollout,
            loss=parts.loss,
            optim=parts.optim,
            config=parts.run,
            folder=folder,
            evidence=parts.evidence,
            retention_verifier=parts.retention_verifier,
            loggers=[build(node, f"logger.{name}")(folder=folder) for name, node in (config.logger or {}).items()],
            on_step=bar.training(parts.run.steps),
        )
        write_description(folder, config, parts.strategy, policy, overrides)
        state = trainer.train()
    if state == "finished" and config.run.save_model:
        _save_model(policy, folder)
    return state


def _reads(node: Any, path: str) -> bool:
    return isinstance(node, DictConfig) and node.get("path") == path


def check_prompts(policy: Policy, task: Any, parts: Parts) -> None:
    """Refuse prompts that the policy cannot read before anything costs time."""
    from ..grpo.collect import encode_prompts

    first = task.batch(1, parts.rollout.prompts_per_step, parts.run.seed)
    encode_prompts(policy, [*first, *task.held_out(), *task.retention()], parts.rollout.max_new_tokens)


def set_threads(config: DictConfig) -> None:
    """Have torch use so many threads; the same number gives the same weights bit for bit."""
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)


def device(wanted: str) -> str:
    """A torch device; ``auto`` is CUDA where there is one."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).split("\n", 1)[0].split(". ", 1)[0]
        raise InputError(f"device={wanted}: cannot be used ({reason}); use device=cpu") from error
    return wanted


def _save_model(policy: Policy, folder: Path) -> None:
    """A ``from_pretrained`` folder, whole or not there."""
    from transformers.utils import logging

    temporary, target = folder / ".model.tmp", folder / "model"
    shutil.rmtree(temporary, ignore_errors=True)
    logging.disable_progress_bar()
    try:
        policy.model.save_pretrained(temporary)
        policy.tokenizer.save_pretrained(temporary)
    finally:
        logging.enable_progress_bar()
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


if __name__ == "__main__":
    from .train import main as _main  # so that the functions belong to the module, not to __main__

    _main()
