"""Stop before the first rollout where the configuration asks for what the run does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..credit import CreditStrategy
from ..credit.strategy import missing_signals
from ..verifiers import InputError
from ..verifiers.panel import gives_spans
from .loss import LossConfig

__all__ = ["available_signals", "check_signals"]

# How to get the evidence of a kind, for messages.
_PROVIDERS = {
    "token_scores": "+scorer@scorers.{name}=... (there are: see conf/scorer)",
    "prefix_values": "prefix_valuer=rollouts",
    "tree": "rollout=tree",
}


def available_signals(verifiers: Mapping[str, Any], reward_weights: Mapping[str, float]) -> set[str]:
    """Signals that a run with these verifiers gives: see :class:`apportion.credit.CreditStrategy`."""
    available = {"old_logprobs", "completion_ids", *(["reward"] if reward_weights else [])}
    for name, verifier in verifiers.items():
        available |= {f"score:{name}", *([f"spans:{name}"] if gives_spans(verifier) else [])}
    return available


def check_signals(
    strategy: CreditStrategy,
    verifiers: Mapping[str, Any],
    reward_weights: Mapping[str, float],
    *,
    success: str | None = None,
    format: str | None = None,
    loss: LossConfig | None = None,
    further: Iterable[str] = (),
    requires: Iterable[str] = (),
) -> None:
    """Refuse a strategy, reward or reported rate whose verifier is missing or cannot give what is needed.

    Args:
        strategy: declares ``requires``.
        verifiers: by name.
        reward_weights: by verifier.
        success, format: verifiers whose pass rates are reported, or None.
        further: signals that providers give, see :mod:`apportion.grpo.evidence`.
        requires: signals that are needed besides the strategy's own: those of the providers behind it.
        loss: options of the objective; a KL that is to be part of the reward needs a strategy that reads the reward.

    Raises:
        InputError: names the configuration key and what there is.
    """
    have = ", ".join(sorted(verifiers)) or "none"
    for name in reward_weights:
        if name not in verifiers:
            raise InputError(f"reward.{name}: no verifier of that name (there are: {have})")
    for key, wanted in (("run.success", success), ("run.format", format)):
        if wanted is not None and wanted not in verifiers:
            raise InputError(f"{key}={wanted}: no such verifier (there are: {have})")
    available = available_signals(verifiers, reward_weights) | set(further)
    available |= {"logprobs"} if strategy.phase == "update" else set()
    for signal in missing_signals(strategy, available, requires):
        kind, _, name = signal.partition(":")
        if kind == "spans" and name in verifiers:
            raise InputError(
                f"credit needs spans of verifiers.{name}, which gives scores only; use one that locates faults"
            )
        if kind in ("score", "spans"):
            raise InputError(
                f"credit needs the {kind} of verifiers.{name}, which is not there (there are: {have}); "
                f"add +verifier@verifiers.{name}=..., or name another verifier in the options of credit"
            )
        if kind in _PROVIDERS:
            raise InputError(f"credit needs {signal}; add {_PROVIDERS[kind].format(name=name)}")
        if kind == "reward":
            raise InputError("credit needs a reward, and reward is empty; give a weight, for example +reward.answer=1")
        raise InputError(f"credit needs the signal {signal!r}, which this run does not have")
    kl_in_reward = loss is not None and loss.kl_coef > 0 and loss.kl_in == "reward"
    if kl_in_reward and any(signal.startswith("prefix_values") for signal in strategy.requires):
        raise InputError("loss.kl_in=reward: the values of prefixes do not contain the KL; use loss.kl_in=loss")
    if kl_in_reward and "reward" not in strategy.requires:
        raise InputError(
            f"loss.kl_in=reward: {type(strategy).__name__} does not read the reward, so the KL would be lost; "
            "use loss.kl_in=loss"
        )
