"""The parts of a run, built from its configuration; what is cheap to check is checked before anything costs time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ..verifiers import InputError
from .build import build, check_options, check_value
from .targets import nearest

if TYPE_CHECKING:  # they load torch, which a refused command need not wait for
    from ..credit import CreditStrategy
    from ..grpo.engines import EngineOptions
    from ..grpo.evidence import Evidence
    from ..grpo.loss import LossConfig
    from ..grpo.sampling import RolloutConfig
    from ..grpo.strategy_geometry import StrategyGeometry
    from ..grpo.trainer import TrainerConfig
    from ..grpo.update import OptimConfig

__all__ = ["Parts", "build_parts", "build_task", "check_line_breaks", "prepare"]

KEYS = {
    *(
        "task",
        "policy",
        "warm_start",
        "rollout",
        "engine",
        "verifiers",
        "retention_verifier",
        "credit",
        "scorers",
        "prefix_valuer",
        "geometry",
        "parallel",
        "loss",
        "optim",
        "logger",
        "prm",
    ),
    *("seed", "device", "threads", "label", "reward", "run", "command", "ablate", "probe", "truth"),
}
OF_OTHER_COMMANDS = ("completions", "num_problems", "num_held_out")  # which an experiment may set
WITH_LINE_BREAKS = ("template", "system", "separator", "step_tag")  # options whose text holds line breaks now and then
NOT_THE_TRAINERS = ("dir", "save_model")  # keys of ``run`` that the commands read themselves


@dataclass(frozen=True)
class Parts:
    """Everything of a run but its task, its policy and its loggers."""

    verifiers: Mapping[str, Any]
    retention_verifier: Any
    reward: Mapping[str, float]
    strategy: CreditStrategy
    evidence: Evidence
    geometry: StrategyGeometry | None
    rollout: RolloutConfig
    engine: EngineOptions
    loss: LossConfig
    optim: OptimConfig
    run: TrainerConfig


def build_parts(config: DictConfig, further: Iterable[str] = ()) -> Parts:
    """Build them and see that they fit together.

    Args:
        config: of a command that trains or probes.
        further: signals that the command itself gives.

    Raises:
        InputError: an option that nothing reads or of the wrong type, a part that cannot be built, a missing signal.
    """
    _check_keys(config)
    reward = {name: weight for name, weight in (config.reward or {}).items() if weight is not None}
    for name, weight in reward.items():
        check_value(weight, float, f"reward.{name}")
    options = _run_options(config)
    verifiers = {
        str(name): build(node, f"verifiers.{name}", function=True)
        for name, node in (config.verifiers or {}).items()
        if node is not None
    }
    retention = config.get("retention_verifier")
    retention = None if retention is None else build(retention, "retention_verifier", function=True)
    strategy, rollout, engine, loss, optim = (
        build(config.get(key), key) for key in ("credit", "rollout", "engine", "loss", "optim")
    )

    for name in ("requires", "phase", "conserves"):
        if not hasattr(strategy, name):
            raise InputError(
                f"credit: {type(strategy).__name__} has no {name}, which every strategy declares; see "
                "docs/add-a-strategy.md"
            )

    from ..grpo.alarms import check_alarms
    from ..grpo.evidence import Evidence
    from ..grpo.signals import check_signals
    from ..grpo.trainer import TrainerConfig
    from ..grpo.update import check_minibatches

    scorers = {
        str(name): build(node, f"scorers.{name}") for name, node in (config.scorers or {}).items() if node is not None
    }
    valuer = config.get("prefix_valuer")
    evidence = Evidence(scorers, None if valuer is None else build(valuer, "prefix_valuer"))
    geometry = _geometry(config.get("geometry"))

    check_options(TrainerConfig, options, "run")
    run = TrainerConfig(seed=config.seed, **options)
    check_alarms(run.alarms, verifiers)
    check_minibatches(optim, rollout)
    requires = evidence.needed(strategy.requires | (frozenset() if geometry is None else geometry.requires))
    check_signals(
        strategy,
        verifiers,
        reward,
        success=run.success,
        format=run.format,
        loss=loss,
        further={*evidence.available(requires, rollout), *further},
        requires=requires,
    )
    return Parts(verifiers, retention, reward, strategy, evidence, geometry, rollout, engine, loss, optim, run)


def build_task(config: DictConfig) -> Any:
    """The source of problems; refuses what only a probe can take."""
    task = build(config.get("task"), "task")
    if not all(callable(getattr(task, name, None)) for name in ("batch", "held_out", "retention")):
        raise InputError(
            f"task._target_={config.task._target_}: gives no problems to train on; apportion probe takes it"
        )
    return task


def _geometry(node: Any) -> StrategyGeometry | None:
    """What compares the gradients of other strategies; None where nobody asks."""
    from ..grpo.strategy_geometry import StrategyGeometry

    if node is None:
        return None
    plain: Any = OmegaConf.to_container(node, resolve=True)
    plain.pop("strategies", None)
    check_options(StrategyGeometry, plain, "geometry")
    strategies = {
        str(name): build(one, f"geometry.strategies.{name}")
        for name, one in (node.strategies or {}).items()
        if one is not None
    }
    found = StrategyGeometry(strategies, **plain)
    return found if found.strategies or found.groups else None


def prepare(verifiers: Mapping[str, Any], key: str = "verifiers.") -> None:
    """Have those verifiers make ready that can (see :class:`apportion.verifiers.Verifier`).

    Args:
        verifiers: by name.
        key: what stands before the name, for messages.
    """
    for name, verifier in verifiers.items():
        make_ready = getattr(verifier, "prepare", None)
        if callable(make_ready):
            try:
                make_ready()
            except InputError as error:
                raise InputError(f"{key}{name}: {error}") from error


def check_line_breaks(overrides: Iterable[str]) -> None:
    r"""Refuse ``task.template='{prompt}\nAnswer:'`` from a shell: it is a backslash and an n, and nothing would say so.

    A file keeps what it says: there ``"\n"`` is a line break and ``'\n'`` is not.
    """
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key.rpartition(".")[2] in WITH_LINE_BREAKS and re.search(r"\\[nrt]", value):
            raise InputError(
                f"{key}: holds a backslash and a letter, not a line break; bash makes one of $'{key}=\"...\\n...\"', "
                'and a YAML file of "...\\n..."'
            )


def _run_options(config: DictConfig) -> dict[str, Any]:
    """The keys of ``run`` that are the trainer's."""
    plain: Any = OmegaConf.to_container(config.run, resolve=True)
    return {str(name): value for name, value in plain.items() if name not in NOT_THE_TRAINERS}


def _check_keys(config: DictConfig) -> None:
    """Refuse what nothing reads, such as ``+rewards.answer=1``, and check the plain keys at the top."""
    text = OmegaConf.to_yaml(config)
    for key in map(str, config):
        if key in (*KEYS, *OF_OTHER_COMMANDS) or f"${{{key}" in text:  # what others refer to is read
            continue
        if key in ("verifier", "experiment"):
            raise InputError(f"{key}: nothing reads this key; to add a verifier write +verifier@verifiers.NAME=...")
        raise InputError(f"{key}: nothing reads this key; {nearest(key, sorted(KEYS))}")
    check_value(config.seed, int, "seed")
    check_value(config.device, str, "device")
    check_value(config.threads, int | None, "threads")
    check_value(config.run.save_model, bool, "run.save_model")
