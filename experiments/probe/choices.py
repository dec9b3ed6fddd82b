"""Which strategies are probed, built side by side: what they have in common must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ...verifiers import InputError
from ..explain import explain
from ..parts import Parts, build_parts
from ..plan import read_strategies

if TYPE_CHECKING:
    from ...grpo.evidence import Evidence

__all__ = ["Choice", "Common", "choose"]

Compose = Callable[[Sequence[str]], DictConfig]

# What all strategies of a probe share; verifiers, scorers and the valuer of prefixes are added up instead.
SHARED = ("task", "policy", "warm_start", "rollout", "loss", "optim", "reward", "run", "seed", "device", "threads")


@dataclass(frozen=True)
class Choice:
    """One strategy to be probed: its label, whether it is a control, and its parts."""

    label: str
    control: bool
    parts: Parts

    @property
    def requires(self) -> frozenset[str]:
        """The signals it reads, those of the providers behind them included."""
        return self.parts.evidence.needed(self.parts.strategy.requires)


@dataclass(frozen=True)
class Common:
    """What the chosen strategies share.

    Args:
        config: that of the first strategy.
        parts: its parts, with the verifiers of all of them.
        evidence: the providers of all of them.
    """

    config: DictConfig
    parts: Parts
    evidence: Evidence


def choose(
    config: DictConfig, arguments: Iterable[str], compose: Compose, further: Iterable[str]
) -> tuple[list[Choice], Common]:
    """The strategies and controls of ``probe.strategies`` and ``probe.controls``, or of ``credit=a,b``.

    Args:
        config: composed from ``conf/probe.yaml``.
        arguments: overrides of the command line.
        compose: a configuration from overrides.
        further: signals that the probe itself gives.

    Raises:
        InputError: one cannot be built, or differs from the others in more than its rule.
    """
    strategies, shared = read_strategies(config.probe.strategies, arguments, "probe")
    controls, _ = read_strategies(config.probe.controls, (), "probe", key="controls")
    strategies = {label: own for label, own in strategies.items() if label not in controls}
    both = {**strategies, **controls}
    configs = {label: _composed(_key(label, controls), [*shared, *own], compose) for label, own in both.items()}
    if not configs:
        raise InputError("probe.strategies: is empty; name what is to be probed, as in credit=uniform,localized/cliff")
    first = next(iter(configs))
    for label, one in configs.items():
        _check_shared(_key(label, controls), one, first, configs[first])
    choices = [
        Choice(label, label in controls, _parts(_key(label, controls), one, further)) for label, one in configs.items()
    ]
    return choices, _common(configs, choices)


def _key(label: str, controls: Mapping[str, Any]) -> str:
    return f"probe.{'controls' if label in controls else 'strategies'}.{label}"


def _composed(key: str, overrides: Sequence[str], compose: Compose) -> DictConfig:
    try:
        return compose(overrides)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        raise InputError(f"{key}: {message}") from error


def _parts(key: str, config: DictConfig, further: Iterable[str]) -> Parts:
    try:
        return build_parts(config, further)
    except InputError as error:
        without = f"; {key}=null leaves it out" if str(error).startswith("credit") else ""
        raise InputError(f"{key}: {error}{without}") from error


def _check_shared(name: str, config: DictConfig, first: str, other: DictConfig) -> None:
    for key in SHARED:
        mine, theirs = (OmegaConf.to_container(OmegaConf.create({key: one.get(key)})) for one in (config, other))
        if mine != theirs:
            raise InputError(
                f"{name}: has another {key} than {first}; all are probed on the same rollouts, so "
                "give it for all of them"
            )


def _common(configs: Mapping[str, DictConfig], choices: Sequence[Choice]) -> Common:
    from ...grpo.evidence import Evidence

    verifiers, scorers = _Pool("verifiers"), _Pool("scorers")
    valuer = _Pool("prefix_valuer")
    for choice in choices:
        config, parts = configs[choice.label], choice.parts
        verifiers.add(choice.label, config.verifiers, parts.verifiers)
        scorers.add(choice.label, config.scorers, parts.evidence.scorers)
        valuer.add(choice.label, {"": config.prefix_valuer}, {"": parts.evidence.prefix_valuer})
    evidence = Evidence(scorers.built, valuer.built.get(""))
    first = choices[0]
    return Common(configs[first.label], replace(first.parts, verifiers=verifiers.built), evidence)


@dataclass
class _Pool:
    """Things by name, of all strategies; two of one name must be equal, or nobody could tell which is read."""

    group: str
    built: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)

    def add(self, label: str, nodes: Mapping[str, Any] | None, built: Mapping[str, Any]) -> None:
        for name, one in built.items():
            if one is None:
                continue
            node = (nodes or {}).get(name)
            if self.nodes.setdefault(name, node) != node:
                key = f"{self.group}.{name}".rstrip(".")
                raise InputError(
                    f"probe.strategies.{label}: has another {key} than the others; give it a name of its own"
                )
            self.built.setdefault(name, one)
