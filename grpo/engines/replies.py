"""What an engine outside the trainer says, taken for a completion only where nothing in it is amiss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..sampling import Generation
from . import SamplingOptions

__all__ = ["WrongReply", "generation", "generations"]

IMPOSSIBLE = -9000.0  # vLLM writes -9999 for minus infinity
ROUNDING = 1e-3  # so far a log-probability may lie over 0


class WrongReply(Exception):
    """An engine's reply is not what was asked for; asking again would not help. Says what is amiss and what to do."""


def generation(
    ids: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None,
    options: SamplingOptions,
    eos_ids: Sequence[int],
) -> Generation:
    """One completion, checked.

    An end token at the limit is an end, whichever of the two the engine saw first.

    Args:
        ids: of the completion, its end token included.
        logprobs: of each of them.
        reason: why it ended: ``stop`` or ``length``.
        options: that it was asked for with.
        eos_ids: ids that end a completion.

    Raises:
        WrongReply: it did not end as it should, or its log-probabilities are none.

    >>> generation([7, 2], [-0.5, -0.1], "stop", SamplingOptions(4), (2,)).truncated
    False
    """
    if reason not in ("stop", "length"):
        raise WrongReply(f"a completion ended for the reason {reason!r}; see the engine's log")
    if len(logprobs) != len(ids):
        raise WrongReply(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
    if not ids or len(ids) > options.max_new_tokens:
        raise WrongReply(f"a completion of {len(ids)} tokens, where 1 to {options.max_new_tokens} were asked for")
    if any(id in eos_ids for id in ids[:-1]):
        raise WrongReply("a completion goes on behind its end token; vLLM 0.10 or later stops at stop_token_ids")
    ended = ids[-1] in eos_ids
    if not ended and (reason == "stop" or len(ids) < options.max_new_tokens):
        raise WrongReply(
            f"a completion ended after {len(ids)} tokens without an end token; leave stop strings out of the engine's "
            "generation_config, and let --max-model-len hold prompt and rollout.max_new_tokens"
        )
    if not all(isinstance(logprob, int | float) and IMPOSSIBLE < logprob <= ROUNDING for logprob in logprobs):
        raise WrongReply("the log-probability of a sampled token is none")
    return Generation(list(ids), [float(logprob) for logprob in logprobs], truncated=not ended)


def generations(
    reply: Any, prompt: Sequence[int], n: int, options: SamplingOptions, eos_ids: Sequence[int]
) -> list[Generation]:
    """The completions in a reply of ``/v1/completions`` that was asked for token ids.

    Args:
        reply: the JSON.
        prompt: ids that were sent; the reply names those that were read.
        n: completions asked for.
        options, eos_ids: see :func:`generation`.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise WrongReply("no reply of /v1/completions")
    if len(choices) != n:
        raise WrongReply(f"{len(choices)} completions for a prompt, where {n} were asked for")
    by_number = {choice.get("index"): choice for choice in choices if isinstance(choice.get("index"), int)}
    if sorted(by_number) != list(range(n)):
        raise WrongReply("completions without their numbers")
    return [_generation(by_number[number], prompt, options, eos_ids) for number in range(n)]


def _generation(
    choice: Mapping[str, Any], prompt: Sequence[int], options: SamplingOptions, eos_ids: Sequence[int]
) -> Generation:
    read = choice.get("prompt_token_ids")
    if read is not None and read != list(prompt):
        raise WrongReply(
            f"it read another prompt than the {len(prompt)} tokens that were sent; something between here and the "
            "model changes prompts"
        )
    said = choice.get("logprobs")
    if not isinstance(said, dict) or not isinstance(said.get("token_logprobs"), list):
        raise WrongReply("a completion without log-probabilities; vLLM gives them for logprobs=0")
    try:
        ids = [int(token.removeprefix("token_id:")) for token in said["tokens"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise WrongReply("tokens that are not named by their ids; vLLM does for return_tokens_as_token_ids") from None
    if choice.get("token_ids") not in (None, ids):
        raise WrongReply("two different lists of the tokens of a completion")
    return generation(ids, said["token_logprobs"], choice.get("finish_reason"), options, eos_ids)
