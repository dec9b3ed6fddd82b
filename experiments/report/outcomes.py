"""Whether a run trained: it got better and kept it, stood still, or collapsed. The rule is in docs/statistics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...verifiers import InputError

if TYPE_CHECKING:
    from .load import Cell

__all__ = ["ALARMS", "OUTCOMES", "CollapseRule", "Kind", "Outcome", "collapse_rule", "has_collapsed", "outcome"]

Kind = Literal["trains", "stalls", "collapses", "unknown"]
OUTCOMES: tuple[Kind, ...] = ("trains", "stalls", "collapses", "unknown")
ALARMS = {  # as logged by apportion.grpo.drift, in words
    "entropy_collapse": "entropy fell",
    "entropy_explosion": "entropy rose",
    "kl": "KL to the start",
    "grad_spike": "gradient spike",
    "dead_groups": "dead groups",
    "length": "length drift",
    "format": "format drift",
}
SLACK = 1e-9  # of binary fractions: 0.6 is not under three quarters of 0.8
OWN_FAULT = ("Diverged", "Drifted", "Hacked")  # what ended the run is what it had learned


class Outcome(NamedTuple):
    """How a run ended, and why it is said to have."""

    kind: Kind
    why: str


@dataclass(frozen=True)
class CollapseRule:
    """When a run counts as collapsed, and when as having learned; success is ``eval/success`` at evaluations.

    Args:
        of_best: collapsed where the last success is under this share of the run's own best.
        below_start: or more than this below the one before training.
        alarms: or where one of these alarms of drift is on at the last step.
        gain: learned where the last success is at least this above the one before training.
    """

    of_best: float = 0.75
    below_start: float = 0.05
    alarms: tuple[str, ...] = ("entropy_explosion", "kl", "length", "format")
    gain: float = 0.05


def collapse_rule(options: Mapping[str, Any] | None) -> CollapseRule:
    """From the keys under ``ablate.collapse``; None is the defaults."""
    given = dict(options or {})
    known = [field.name for field in fields(CollapseRule)]
    for name in given:
        if name not in known:
            raise InputError(f"ablate.collapse.{name}: no such option; there are {', '.join(known)}")
    alarms = given.pop("alarms", CollapseRule.alarms)
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"ablate.collapse.{name}={value!r}: must be a number between 0 and 1")
    for alarm in [alarms] if isinstance(alarms, str) else alarms or ():
        if alarm not in ALARMS:
            raise InputError(f"ablate.collapse.alarms: there is no alarm {alarm!r}; there are {', '.join(ALARMS)}")
    return CollapseRule(**given, alarms=(alarms,) if isinstance(alarms, str) else tuple(alarms or ()))


def has_collapsed(status: Mapping[str, Any]) -> bool:
    """Whether ``status.json`` says that a run failed by what it had learned, not by an accident."""
    return status.get("state") == "failed" and status.get("error_type") in OWN_FAULT


def outcome(cell: Cell, rule: CollapseRule) -> Outcome:
    """How the run of ``cell`` ended."""
    if has_collapsed(cell.status):
        return Outcome("collapses", f"stopped: {cell.error or ''}")
    if not cell.counts:
        return Outcome("unknown", cell.state)
    _, success = cell.series("eval/success")
    start, best, final = success[0], max(success), success[-1]
    if final < rule.of_best * best - SLACK:
        return Outcome("collapses", f"success {final:.3f} after {best:.3f}")
    if final < start - rule.below_start - SLACK:
        return Outcome("collapses", f"success {final:.3f} from {start:.3f}")
    on = [ALARMS[name] for name in rule.alarms if cell.metrics[-1].get(f"alarm/{name}") == 1.0]
    if on:
        return Outcome("collapses", f"alarm at the end: {', '.join(on)}; success {final:.3f}")
    if final < start + rule.gain - SLACK:
        return Outcome("stalls", f"success {final:.3f} from {start:.3f}")
    return Outcome("trains", f"success {final:.3f} from {start:.3f}")
