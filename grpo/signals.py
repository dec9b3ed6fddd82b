"""Stop before the first rollout where the configuration asks for what the run does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..credit import CreditStrategy
from ..credit.strategy import missing_signals
from ..verifiers import InputError
from ..verifiers.panel import gives_spans

__all__ = ["available_signals", "check_signals"]


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
) -> None:
    """Refuse a strategy, reward or reported rate whose verifier is missing or cannot give what is needed.

    Args:
        strategy: declares ``requires``.
        verifiers: by name.
        reward_weights: by verifier.
        success, format: verifiers whose pass rates are reported, or None.

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
    for signal in missing_signals(strategy, available_signals(verifiers, reward_weights)):
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
        if kind == "reward":
            raise InputError("credit needs a reward, and reward is empty; give a weight, for example +reward.answer=1")
        raise InputError(f"credit needs the signal {signal!r}, which this run does not have")
