"""One GRPO run: build everything from the configuration, train, say where it is.

``torchrun`` and ``accelerate launch`` start it several times; these processes share the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .app import build, hydra_command, task_overrides
from .build import check_options
from .parts import Parts, build_parts, build_task, check_line_breaks, prepare
from .progress import StepProgress, console
from .rundir import plain_config, refuse_other_run, run_folder, run_path

if TYPE_CHECKING:
    from ..grpo.parallel import ParallelConfig
    from ..grpo.policy import Policy
    from ..grpo.processes import Processes

__all__ = ["check_prompts", "device", "main", "set_threads", "train"]


def main(arguments: list[str] | None = None) -> None:
    """``apportion train key=value ...``"""
    hydra_command("train", run_command, sys.argv[1:] if arguments is None else arguments)


def run_command(config: DictConfig) -> None:
    """The command around :func:`train`."""
    folder = run_path(config.run.dir).resolve()
    if config.prm.path is not None and not any(_reads(node, config.prm.path) for node in config.verifiers.values()):
        raise InputError(f"prm.path={config.prm.path}: no verifier reads it; add verifier@verifiers.steps=prm")
    if _is_one_of_several():
        state = _train_together(config, task_overrides())
    else:
        state = train(config, overrides=task_overrides(), progress=True)
        _say_where(folder, state)
    if state == "interrupted":
        raise SystemExit(130)


def _say_where(folder: Path, state: str) -> None:
    if state == "interrupted":
        console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
    sys.stdout.write(f"{folder}\n")


def _train_together(config: DictConfig, overrides: list[str]) -> str:
    """One run by all processes that were started, in the folder of the main one, which alone speaks."""
    from ..grpo.processes import joined

    with joined(device(config.device), _parallel(config).timeout_s) as processes:
        folder = processes.main(lambda: run_path(config.run.dir).resolve())
        OmegaConf.update(config, "run.dir", str(folder))
        if not processes.is_main:
            logging.disable(logging.WARNING)
        try:
            state = train(config, overrides=overrides, progress=processes.is_main, processes=processes)
        except Exception as error:
            if processes.is_main or not processes.all_know(error):
                raise
            raise SystemExit(2) from error  # the main process says why
        else:
            processes.main(lambda: _say_where(folder, state))
    return state


def train(
    config: DictConfig, *, overrides: list[str], progress: bool = False, processes: Processes | None = None
) -> str:
    """Train as ``config`` says, in ``config.run.dir``; "finished" or "interrupted".

    Args:
        config: composed from ``conf/train.yaml``.
        overrides: what the user changed, kept beside the run.
        progress: show a progress bar.
        processes: that share the run; None: it has this one alone.
    """
    check_line_breaks(overrides)
    plain = plain_config(config)
    folder = run_path(config.run.dir)
    if processes is None:
        refuse_other_run(folder, plain)  # which need not wait for torch
        from ..grpo.processes import ALONE

        processes = ALONE
    parts, task = processes.jointly(lambda: (build_parts(config), build_task(config)))
    with contextlib.ExitStack() as held:
        processes.main(lambda: held.enter_context(run_folder(folder, plain, overrides)))
        return _run(config, parts, task, folder, overrides, progress, processes)


def _run(
    config: DictConfig,
    parts: Parts,
    task: Any,
    folder: Path,
    overrides: list[str],
    progress: bool,
    processes: Processes,
) -> str:
    from ..grpo.engines.native import Native
    from ..grpo.parallel import as_launched
    from ..grpo.trainer import Trainer
    from .describe import write_description
    from .warmstart import warm_start

    set_threads(config)

    def begun() -> tuple[ParallelConfig, Any, Any, Policy]:
        parallel = as_launched(_parallel(config), str(config.policy.get("precision", "fp32")))
        prepare(parts.verifiers)
        parts.engine.prepare()
        if processes.count > 1 and not isinstance(parts.engine, Native):
            raise InputError("engine: several processes sample with engine=native; with another one start one process")
        source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
        policy = source.build(device(config.device))
        check_prompts(policy, task, parts)
        return parallel, source, start, policy

    parallel, source, start, policy = processes.jointly(begun)
    nodes = (config.logger or {}).items() if processes.is_main else ()
    with StepProgress(progress) as bar:
        section = bar.section("warm start", start.steps)
        processes.jointly(lambda: warm_start(policy, source.key, task, start, progress=section))
        engine = processes.jointly(lambda: parts.engine.start(policy, parts.rollout))
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
            engine=engine,
            geometry=parts.geometry,
            retention_verifier=parts.retention_verifier,
            loggers=processes.jointly(lambda: [build(node, f"logger.{name}")(folder=folder) for name, node in nodes]),
            on_step=bar.training(parts.run.steps),
            processes=processes,
            parallel=parallel,
        )
        processes.main(lambda: write_description(folder, config, parts.strategy, policy, overrides))
        state = trainer.train()
    if state == "finished" and config.run.save_model:
        whole = trainer.whole_policy()
        processes.main(lambda: _save_model(whole, folder))
    return state


def _is_one_of_several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _parallel(config: DictConfig) -> ParallelConfig:
    """The options under ``parallel``."""
    from ..grpo.parallel import ParallelConfig

    node = config.get("parallel")
    options: Any = {} if node is None else OmegaConf.to_container(node, resolve=True)
    check_options(ParallelConfig, options, "parallel")
    return ParallelConfig(**options)


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
    """A torch device; ``auto`` is CUDA where there is one. Of several processes each has a GPU of its own."""
    import torch

    if wanted == "auto":
        barred = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        wanted = "cuda" if torch.cuda.is_available() and not barred else "cpu"
    if wanted.startswith("cuda") and _is_one_of_several() and torch.cuda.is_available():
        wanted = _own_gpu(wanted, torch.cuda.device_count())
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).split("\n", 1)[0].split(". ", 1)[0]
        raise InputError(f"device={wanted}: cannot be used ({reason}); use device=cpu") from error
    return wanted


def _own_gpu(wanted: str, there_are: int) -> str:
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted != "cuda":
        raise InputError(f"device={wanted}: several processes take a GPU each; set device=cuda")
    if number >= there_are:
        raise InputError(
            f"device=cuda: process {number} of this machine has no GPU of its own, there are {there_are}; start fewer "
            "processes, or set device=cpu"
        )
    return f"cuda:{number}"


def _save_model(policy: Policy, folder: Path) -> None:
    """A ``from_pretrained`` folder, whole or not there."""
    from transformers.utils import logging

    from .lora import save_policy

    temporary, target = folder / ".model.tmp", folder / "model"
    shutil.rmtree(temporary, ignore_errors=True)
    logging.disable_progress_bar()
    try:
        save_policy(policy, temporary)
    finally:
        logging.enable_progress_bar()
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


if __name__ == "__main__":
    from .train import main as _main  # so that the functions belong to the module, not to __main__

    _main()
