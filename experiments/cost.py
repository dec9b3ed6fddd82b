"""What credit strategies cost in tokens, operations, time and memory, before a run. See docs/scale-out.md."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf

from ..grpo.files import write_text
from ..verifiers import InputError
from .app import CONFIG_FOLDER, build, check_keys, hydra_command, task_overrides
from .build import check_options, check_value
from .cost_ledger import PHASES, Estimate, estimate
from .cost_model import Bytes, Hardware, model_size
from .cost_options import Answers, Engine, Judge, Plan, Rollouts, Run, Update
from .cost_view import draw
from .describe import label_of
from .explain import explain
from .rundir import hold_folder, plain_config, run_path
from .targets import nearest

__all__ = ["main", "plan_of"]

KEYS = {
    *("all", "answer", "bytes", "command", "credit", "gpu", "gpus", "hardware", "loss", "optim", "passes", "policy"),
    *("prefix_valuer", "reward", "rollout", "run", "sampler", "samplers", "scorers", "sharding", "verifiers"),
}
BASELINE = "uniform"
MEAN_SHARE = 0.3  # of a completion's limit that its mean takes where nothing is said
OF_TRAINING = ("dir", "rollouts_every", "save_every", "save_model", "keep_checkpoints", "success", "format")


def main(arguments: list[str] | None = None) -> None:
    """``apportion cost credit=a,b key=value ...``; ``strategy=`` is another word for ``credit=``."""
    given = sys.argv[1:] if arguments is None else arguments
    given = ["credit=" + argument.removeprefix("strategy=") if argument.startswith("strategy=") else argument
             for argument in given]  # fmt: skip
    several = [argument for argument in given if argument.startswith("credit=") and "," in argument]
    names = [name.strip() for argument in several for name in argument.removeprefix("credit=").split(",")]

    def run(config: DictConfig) -> None:
        run_command(config, names, shlex.join(["apportion", "cost", *given]))

    hydra_command("cost", run, [argument for argument in given if argument not in several])


def run_command(config: DictConfig, names: Sequence[str], command: str) -> None:
    """Estimate, print and write ``cost.json``.

    Args:
        config: composed from ``conf/cost.yaml``; its own strategy is the one where there are no ``names``.
        names: options of ``credit``.
        command: that was given.
    """
    folder = run_path(config.run.dir).resolve()
    check_keys(config, KEYS)
    check_value(config.all, bool, "all")
    plan = plan_of(config)
    found, left_out = _estimates(config, plan, names)
    with hold_folder(folder):
        if (folder / "config.yaml").exists():
            raise InputError(f"run.dir={folder}: holds something already; choose another run.dir")
        plain = plain_config(config)
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        write_text(folder / "cost.json", json.dumps(_record(plan, found, left_out, command), indent=2) + "\n")
    draw(plan, found, left_out)
    sys.stdout.write(f"{folder}\n")


def plan_of(config: DictConfig) -> Plan:
    """Everything but the strategy, checked.

    Args:
        config: composed from ``conf/cost.yaml``.
    """
    from ..grpo.evidence import Evidence

    check_value(config.gpus, int, "gpus")
    if config.gpus < 1:
        raise InputError(f"gpus={config.gpus}: must be at least 1")
    check_value(config.sharding, Literal["fsdp2", "ddp"], "sharding")
    policy = _plain(config.policy)
    judges = {str(name): _read(Judge, node, f"verifiers.{name}") for name, node in config.verifiers.items() if node}
    reward = [str(name) for name, weight in (config.reward or {}).items() if weight is not None]
    scorers = {str(name): build(node, f"scorers.{name}") for name, node in config.scorers.items() if node is not None}
    valuer = config.get("prefix_valuer")
    rollouts = _read(Rollouts, config.rollout, "rollout")
    answer = _plain(config.answer)
    if answer.get("tokens") is None:
        answer["tokens"] = MEAN_SHARE * rollouts.max_new_tokens
    # An experiment may hold what only training reads.
    run = {key: value for key, value in _plain(config.run).items() if key not in OF_TRAINING}
    passes = _plain(config.passes)
    check_value(passes, Mapping[str, float], "passes")
    return Plan(
        policy=model_size(policy),
        device=_chosen(Hardware, config, "gpu", "hardware"),
        gpus=config.gpus,
        sharding=config.sharding,
        engine=_chosen(Engine, config, "sampler", "samplers"),
        answers=_read(Answers, answer, "answer"),
        rollouts=rollouts,
        update=_read(Update, {**_plain(config.optim), **_plain(config.loss)}, "optim"),
        run=_read(Run, run, "run"),
        bytes=_read(Bytes, config.bytes, "bytes"),
        reward=reward,
        judges={name: judge for name, judge in judges.items() if name != "other"},
        other=judges.get("other", Judge()),
        evidence=Evidence(scorers, None if valuer is None else build(valuer, "prefix_valuer")),
        passes=passes,
        sized=lambda params: model_size({"params": params}, "verifiers"),
    )


def _estimates(config: DictConfig, plan: Plan, names: Sequence[str]) -> tuple[list[Estimate], dict[str, str]]:
    """Of the baseline and of every strategy that was asked for; and those left out, with the reason."""
    if config.all:
        folder = CONFIG_FOLDER / "credit"
        names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    found: dict[str, Estimate] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys([BASELINE, *names]):
        try:
            found[name] = estimate(name, build(_composed(name).credit, "credit"), plan)
        except Exception as error:
            message = explain(error)
            if message is None or name == BASELINE or not config.all:
                raise
            left_out[name] = message
    if not names:
        label = label_of(config)
        found[label] = estimate(label, build(config.get("credit"), "credit"), plan)
    return list(found.values()), left_out


def _composed(name: str) -> DictConfig:
    """The configuration of the command line with another strategy; options of ``credit`` are the named one's."""
    from hydra import compose

    shared = [text for text in task_overrides() if not text.lstrip("+~").startswith("credit")]
    own = [text for text in task_overrides() if text.startswith("credit.")] if name != BASELINE else []
    return compose("cost", overrides=[*shared, f"credit={name}", *own])


def _plain(node: Any) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return {str(name): value for name, value in (plain or {}).items()}


def _read(kind: Callable[..., Any], node: Any, key: str) -> Any:
    """The dataclass whose fields ``node`` holds."""
    options = _plain(node)
    check_options(kind, options, key)
    return kind(**options)


def _chosen(kind: Callable[..., Any], config: DictConfig, key: str, among: str) -> Any:
    name, choices = config[key], config[among]
    if name not in choices:
        raise InputError(f"{key}={name}: not one of {among}; {nearest(str(name), [str(one) for one in choices])}")
    return _read(kind, choices[name], f"{among}.{name}")


def _record(plan: Plan, found: Sequence[Estimate], left_out: Mapping[str, str], command: str) -> dict[str, Any]:
    baseline = found[0]
    return {
        "command": command,
        "policy": asdict(plan.policy),
        "tensor_parallel": plan.tensor_parallel,
        "strategies": {
            one.label: {
                "requires": list(one.requires),
                "generated_tokens": one.total("generated"),
                "read_tokens": one.total("read"),
                "trained_tokens": one.total("trained"),
                "flops": one.total("flops"),
                "verifier_seconds": one.total("judging"),
                "seconds_per_step": one.total("seconds"),
                "seconds_by_phase": {phase: one.total("seconds", phase) for phase in PHASES},
                "gpu_hours": one.gpu_hours,
                "times_uniform": one.gpu_hours / baseline.gpu_hours,
                "memory_bytes": {**asdict(one.memory), "peak": one.memory.peak},
                "fits": one.fits,
                "items": [asdict(item) for item in one.items],
                "assumed": list(one.assumed),
            }
            for one in found
        },
        "left_out": dict(left_out),
    }


if __name__ == "__main__":
    from .cost import main as _main  # so that the functions belong to the module, not to __main__

    _main()
