"""Another trainer's answers as verifiers see them: its sampled ids, decoded and never encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..grpo.collect import as_sample
from ..grpo.policy import Policy
from ..grpo.sampling import Generation
from ..grpo.task import Problem
from ..verifiers import Sample

__all__ = ["content_text", "make_ready", "make_sample"]


def make_sample(
    tokenizer: Any,
    eos_ids: Sequence[int],
    problem: Problem,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    limit: int | None = None,
    response_mask: Sequence[int] | None = None,
) -> Sample:
    """An answer as verifiers see it: its sampled ids decoded, never encoded again, with the characters of each id.

    Args:
        tokenizer: of the policy.
        eos_ids: every id that ends an answer.
        problem: that it answers.
        prompt_ids: of its last call.
        response_ids: of all its calls, tools included.
        limit: most ids of a response; one as long that does not end with an end id was cut. None: none was.
        response_mask: 0 for ids that a tool wrote; None: the policy wrote all.
    """
    truncated = limit is not None and len(response_ids) >= limit and response_ids[-1] not in eos_ids
    written = None if response_mask is None else [bool(one) for one in response_mask]
    generation = Generation(list(response_ids), [0.0] * len(response_ids), truncated, written)
    policy = Policy(model=None, tokenizer=tokenizer, encode=tokenizer.encode, eos_ids=tuple(eos_ids))
    return as_sample(policy, problem, prompt_ids, generation, located=True)


def make_ready(verifiers: Mapping[str, Any]) -> None:
    """Have every verifier load what it loads once."""
    for verifier in verifiers.values():
        prepare = getattr(verifier, "prepare", None)
        if callable(prepare):
            prepare()


def content_text(content: Any) -> str:
    """The text of a message, which may come in parts.

    >>> content_text([{"type": "text", "text": "1+1"}, {"type": "image"}])
    '1+1'
    """
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
