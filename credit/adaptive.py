"""State of strategies that adapt in the course of a run: told of every batch, saved and restored with a checkpoint.

A strategy is a pure function of its batch, and may be called any number of times. One that adapts holds an explicit
state, changed by ``observe`` alone. Those who run a strategy call the three functions here, and not the strategy's own:
they find adaptive strategies inside others (a term of a composition, the inner strategy of a control) by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from ..verifiers import InputError
from .batch import CreditBatch
from .strategy import CreditStrategy

__all__ = ["Adaptive", "load_state", "observe", "state_of"]


@runtime_checkable
class Adaptive(Protocol):
    """What a strategy that adapts has besides being a :class:`apportion.credit.CreditStrategy`."""

    def observe(self, batch: CreditBatch) -> None:
        """Move the state on by one rollout batch, once the batch's last optimiser step is done."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, texts and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state that ``state_dict`` gave."""


def observe(strategy: CreditStrategy, batch: CreditBatch) -> None:
    """Tell every adaptive strategy in ``strategy`` of a batch; call it once for each rollout batch."""
    for _, part in _adaptive_in(strategy, "credit"):
        part.observe(batch)


def state_of(strategy: CreditStrategy) -> dict[str, dict[str, Any]]:
    """State of every adaptive strategy in ``strategy``, by its place, for a checkpoint; empty where none adapts."""
    return {place: part.state_dict() for place, part in _adaptive_in(strategy, "credit")}


def load_state(strategy: CreditStrategy, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put every adaptive strategy in ``strategy`` where :func:`state_of` found it.

    Raises:
        InputError: the state is of another strategy; names the place.
    """
    parts = dict(_adaptive_in(strategy, "credit"))
    for place in sorted(parts.keys() ^ state.keys()):
        whose = "the checkpoint has none" if place in parts else "only the checkpoint has it"
        raise InputError(f"{place}: a strategy with a state, but {whose}; go on with the credit that it was saved with")
    for place, part in parts.items():
        part.load_state_dict(state[place])


def _adaptive_in(value: Any, place: str) -> Iterator[tuple[str, Adaptive]]:
    """Adaptive strategies in the fields of a strategy, and in mappings there, itself included."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _adaptive_in(inner, f"{place}.{name}")
    if not is_dataclass(value) or isinstance(value, type):
        return
    if isinstance(value, Adaptive):
        yield place, value
    for field in fields(value):
        yield from _adaptive_in(getattr(value, field.name), f"{place}.{field.name}")
