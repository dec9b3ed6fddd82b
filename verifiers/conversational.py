"""For reward functions that want completions as chat messages, as TRL's own do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from .errors import InputError
from .panel import trl_columns
from .verdict import Sample

__all__ = ["Conversational"]


@dataclass(frozen=True)
class Conversational:
    """Calls a reward function of TRL's shape with every completion as ``[{"role": "assistant", "content": text}]``.

    Prompts become one message of the user. The answer is what the function gives, ``await`` included.

    Args:
        target: dotted path of the function, such as ``trl.rewards.accuracy_reward``.
        options: further keyword arguments of every call.

    >>> Conversational("builtins.len")
    Conversational(target='builtins.len', options={})
    """

    spans: ClassVar[bool] = False

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self._function

    def __call__(self, samples: Sequence[Sample]) -> Any:
        columns = trl_columns(self._function, samples)
        for name, role in (("prompts", "user"), ("completions", "assistant")):
            if name in columns:
                columns[name] = [[{"role": role, "content": text}] for text in columns[name]]
        return self._function(**{**columns, **self.options})

    @cached_property
    def _function(self) -> Any:
        module, _, name = self.target.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"target={self.target}: {error}; give the dotted path of a reward function") from error
