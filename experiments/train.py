"""One GRPO run: build everything from the configuration, train, say where it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .app import build, hydra_command
from .progress import StepProgress, console

__all__ = ["main", "train"]


def main(arguments: list[str] | None = None) -> None:
    """``apportion train key=value ...``"""

    def command(config: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        state = train(config, overrides=list(HydraConfig.get().overrides.task), progress=True)
        if state == "interrupted":
            console().print("stopped; the same command with this run.dir goes on from here")
        sys.stdout.write(f"{Path(config.run.dir).resolve()}\n")
        if state == "interrupted":
            raise SystemExit(130)

    hydra_command("train", command, sys.argv[1:] if arguments is None else arguments)


def train(config: DictConfig, *, overrides: list[str], progress: bool = False) -> str:
    """Train as ``config`` says, in ``config.run.dir``; "finished" or "interrupted".

    Args:
        config: composed from ``conf/train.yaml``.
        overrides: what the user changed, kept beside the run.
        progress: show a progress bar.
    """
    from .rundir import run_folder

    plain: Any = OmegaConf.to_container(config, resolve=True)
    plain.pop("hydra", None)
    with run_folder(Path(config.run.dir), plain, overrides) as folder:
        return _run(config, folder, progress)


def _run(config: DictConfig, folder: Path, progress: bool) -> str:
    import torch

    from ..grpo.signals import check_signals
    from ..grpo.trainer import Trainer, TrainerConfig
    from .describe import write_description
    from .warmstart import warm_start

    if config.threads:
        torch.set_num_threads(int(config.threads))
    task = build(config.task, "task")
    verifiers = {name: build(node, f"verifiers.{name}") for name, node in config.verifiers.items() if node is not None}
    retention = (
        None if config.get("retention_verifier") is None else build(config.retention_verifier, "retention_verifier")
    )
    strategy = build(config.credit, "credit")
    rollout, loss, optim = (build(config[key], key) for key in ("rollout", "loss", "optim"))
    reward = {name: float(weight) for name, weight in (config.reward or {}).items() if weight is not None}
    settings = {k: v for k, v in config.run.items() if k not in ("dir", "save_model")}
    trainer_config = TrainerConfig(seed=int(config.seed), **settings)
    check_signals(  # before the costly part
        strategy, verifiers, reward, success=trainer_config.success, format=trainer_config.format
    )
    source = build(config.policy, "policy")
    policy = source.build(_device(str(config.device)))
    with StepProgress(progress) as bar:
        start = build(config.warm_start, "warm_start")
        warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))
        trainer = Trainer(
            policy,
            task,
            verifiers,
            reward,
            strategy,
            rollout=rollout,
            loss=loss,
            optim=optim,
            config=trainer_config,
            folder=folder,
            retention_verifier=retention,
            loggers=[build(node, f"logger.{name}")(folder=folder) for name, node in (config.logger or {}).items()],
            on_step=bar.training(trainer_config.steps),
        )
        write_description(folder, config, strategy, policy)
        state = trainer.train()
    if state == "finished" and config.run.save_model:
        policy.model.save_pretrained(folder / "model")
        policy.tokenizer.save_pretrained(folder / "model")
    return state


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


if __name__ == "__main__":
    main()
