"""Turns solutions into rows of tokens for one reward model; needs its tokenizer, not its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..verifiers import InputError
from .encoding import Encoded, encode_steps
from .loading import positions_of, read_folder
from .settings import StepSettings
from .tokenizing import tokenizer_fingerprint

__all__ = ["StepReader"]


@dataclass(frozen=True)
class StepReader:
    """How one reward model reads.

    Args:
        tokenizer: its tokenizer.
        settings: its settings.
        positions: most tokens that it has positions for; None for no limit.
        vocabulary: how many ids it has embeddings for.
    """

    tokenizer: Any
    settings: StepSettings
    positions: int | None
    vocabulary: int

    @classmethod
    def from_pretrained(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> StepReader:
        """Of a saved reward model; arguments as of :meth:`apportion.prm.model.StepModel.from_pretrained`."""
        config, tokenizer, known = read_folder(path, settings or {})
        return cls(tokenizer, known, positions_of(config), config.get_text_config().vocab_size)

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def max_length(self) -> int | None:
        """Most tokens of a row; None for no limit."""
        return min((limit for limit in (self.settings.max_length, self.positions) if limit is not None), default=None)

    def encode(
        self,
        prompt: str,
        completion: str,
        steps: Sequence[tuple[int, int]],
        metadata: Mapping[str, Any] | None = None,
        *,
        max_length: int | None = None,
    ) -> Encoded:
        """The row of tokens of a solution, in training and in scoring alike.

        Args:
            prompt, completion, steps: see :func:`~apportion.prm.encoding.encode_steps`.
            metadata: may hold ``tokenizer``, the fingerprint of the policy's. Where it is this model's, the completion
                is read by its ``completion_ids`` (with their ``offsets``, if given), and in a template whose prompt is
                ``policy`` the prompt by its ``prompt_ids``.
            max_length: a lower limit than the model's own.
        """
        limits = [limit for limit in (max_length, self.max_length) if limit is not None]
        facts = metadata or {}
        shared = facts.get("completion_ids") is not None and facts.get("tokenizer") == self.fingerprint
        encoded = encode_steps(
            self.tokenizer,
            prompt,
            completion,
            steps,
            template=self.settings.template,
            max_length=min(limits, default=None),
            prompt_ids=facts.get("prompt_ids") if shared and self.settings.template.prompt == "policy" else None,
            completion_ids=facts["completion_ids"] if shared else None,
            offsets=facts.get("offsets") if shared else None,
        )
        beyond = max(encoded.input_ids, default=0)
        if beyond >= self.vocabulary:
            raise InputError(f"token id {beyond} has no embedding in the reward model; its tokenizer is not its own")
        return encoded
