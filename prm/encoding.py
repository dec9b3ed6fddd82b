"""One row of tokens for a problem and its solution, and the token at which each step is scored.

Training and scoring both come through here, so that both read a step at the same token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..verifiers import InputError
from .tokenizing import (
    bare_ids,
    encode_both,
    encode_text,
    one_bos,
    sampled_starts,
    special_texts,
    tokenizer_fingerprint,
)

__all__ = ["Encoded", "StepBatch", "Template", "collate_steps", "encode_steps", "tokenizer_fingerprint"]

Offsets = Sequence[tuple[int, int]]
PromptForm = Literal["raw", "chat", "policy"]


@dataclass(frozen=True)
class Template:
    """How a reward model reads a problem and its solution.

    Args:
        prompt: ``raw``, the problem and the separator; ``chat``, the problem as the user's turn of the tokenizer's chat
            template; ``policy``, the ids that the policy read where they are known, raw where they are not.
        separator: between problem and solution of a raw prompt.
        step_tag: text put after each step, at whose last token the step is scored; None: at the step's own last token.
        pieces: every step is encoded by itself, and what lies between the steps is left out, as TRL's PRM trainer does;
            otherwise problem and solution are one text.
    """

    prompt: PromptForm = "raw"
    separator: str = "\n"
    step_tag: str | None = None
    pieces: bool = False

    def __post_init__(self) -> None:
        if self.prompt not in get_args(PromptForm):
            raise InputError(f"template.prompt={self.prompt}: give one of {', '.join(get_args(PromptForm))}")
        if self.step_tag == "":
            raise InputError("template.step_tag='': give a text, or null for none")


@dataclass(frozen=True)
class Encoded:
    """Tokens up to the last step that fits; a causal model sees nothing of what follows it.

    Args:
        input_ids: T ids.
        step_ends: for each kept step the index of the token that holds its last character, or of its tag.
        kept_steps: how many of the first steps fit; 0 where there is nothing to score.
    """

    input_ids: tuple[int, ...]
    step_ends: tuple[int, ...]
    kept_steps: int

    @property
    def shared_ends(self) -> int:
        """Steps that end in the same token as the step before, and so get its score."""
        return sum(left == right for left, right in pairwise(self.step_ends))


NOTHING = Encoded((), (), 0)


class StepBatch(NamedTuple):
    """Rows padded on the right, and where their steps are scored.

    Args:
        input_ids: (B, T) long.
        attention_mask: (B, T) long, 1 for real tokens: by length, so that the padding id may be any id.
        step_rows, step_positions: (S,) long, row and token of every step of the batch, row by row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    step_rows: Tensor
    step_positions: Tensor


def encode_steps(
    tokenizer: Any,
    prompt: str,
    completion: str,
    steps: Sequence[tuple[int, int]],
    *,
    template: Template,
    max_length: int | None,
    prompt_ids: Sequence[int] | None = None,
    completion_ids: Sequence[int] | None = None,
    offsets: Offsets | None = None,
) -> Encoded:
    """One row of tokens with the place of every step's score.

    Sampled ids are used as they are; text is encoded once, prompt and completion together. Of a character that several
    tokens make up, the last one counts; a token across the border of two steps belongs to the first one's end. Steps
    that end beyond ``max_length`` are dropped, whole and from the first such on; the prompt is never cut.

    Args:
        tokenizer: the reward model's own, fast.
        prompt: the problem.
        completion: the solution.
        steps: half-open character ranges in the completion, in order.
        template: how the model reads them.
        max_length: most tokens; None for no limit.
        prompt_ids: what the policy read, in place of the prompt.
        completion_ids: what the policy sampled, of this same vocabulary; a template of ``pieces`` cannot use them.
        offsets: character range of each sampled id in the completion; found here where not given.
    """
    if not steps:
        return NOTHING
    if template.pieces:
        ids, ends = _by_pieces(tokenizer, prompt, completion, steps, template)
    elif completion_ids is None:
        ids, ends = _by_text(tokenizer, prompt, completion, steps, template)
    else:
        head = _prompt_ids(tokenizer, prompt, template) if prompt_ids is None else list(prompt_ids)
        sampled = list(completion_ids)
        starts = sampled_starts(tokenizer, sampled, completion) if offsets is None else [start for start, _ in offsets]
        if len(starts) != len(sampled):
            raise ValueError(f"{len(starts)} offsets for {len(sampled)} completion_ids")
        ids, ends = _by_ids(tokenizer, head, sampled, starts, steps, template)
    kept = len(ends) if max_length is None else bisect_left(ends, max_length)
    return Encoded(tuple(ids[: ends[kept - 1] + 1]), tuple(ends[:kept]), kept) if kept else NOTHING


def collate_steps(rows: Sequence[Encoded], pad_id: int = 0) -> StepBatch:
    """Pad B rows on the right.

    >>> batch = collate_steps([Encoded((5, 6, 7), (1, 2), 2), Encoded((8,), (0,), 1)])
    >>> batch.input_ids.tolist(), batch.step_rows.tolist(), batch.step_positions.tolist()
    ([[5, 6, 7], [8, 0, 0]], [0, 0, 1], [1, 2, 0])
    """
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.tensor(list(chain.from_iterable(row.input_ids for row in rows)), dtype=torch.long)
    return StepBatch(
        torch.full(real.shape, pad_id).masked_scatter(real, ids),
        real.long(),
        torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.step_ends) for row in rows])),
        torch.tensor(list(chain.from_iterable(row.step_ends for row in rows)), dtype=torch.long),
    )


def _by_text(
    tokenizer: Any, prompt: str, completion: str, steps: Sequence[tuple[int, int]], template: Template
) -> tuple[list[int], list[int]]:
    """Prompt, completion and tags as one text; a tag that is a special token is put in by its id."""
    tag = template.step_tag or ""
    written = "" if tag in special_texts(tokenizer) else tag
    head, special = _prompt_text(tokenizer, prompt, template)
    cuts = [0, *(stop for _, stop in steps)]
    body = "".join(completion[a:b] + written for a, b in pairwise(cuts)) + completion[cuts[-1] :]
    ids, offsets = encode_both(tokenizer, head, special, body)
    # No step is scored on the prompt, whatever characters a tokenizer leaves out.
    border = len(head)
    first = next((i for i, (start, stop) in enumerate(offsets) if start >= border or stop > border), None)
    if first is None:
        return ids, []
    starts = _rising(start for start, _ in offsets)
    places = (border + stop + number * len(written) - 1 for number, stop in enumerate(cuts))
    ends = [max(first, bisect_right(starts, place) - 1) for place in places][1:]
    return (ids, ends) if written or not tag else _with_tags(ids, ends, bare_ids(tokenizer, [tag])[0])


def _by_ids(
    tokenizer: Any,
    head: list[int],
    sampled: list[int],
    starts: list[int],
    steps: Sequence[tuple[int, int]],
    template: Template,
) -> tuple[list[int], list[int]]:
    """Sampled ids as they are; the ids of a tag go after the token that ends the step."""
    if not sampled:
        return head, []
    starts = _rising(starts)
    ends = [len(head) + max(0, bisect_right(starts, stop - 1) - 1) for _, stop in steps]
    tag = [] if template.step_tag is None else bare_ids(tokenizer, [template.step_tag])[0]
    return _with_tags([*head, *sampled], ends, tag)


def _with_tags(ids: list[int], ends: list[int], tag: list[int]) -> tuple[list[int], list[int]]:
    """The row with the tag after each end, and where the tags end.

    >>> _with_tags([1, 2, 3], [0, 2], [9])
    ([1, 9, 2, 3, 9], [1, 4])
    """
    row: list[int] = []
    written, places = 0, []
    for end in ends:
        row += ids[written : end + 1] + tag
        written = max(written, end + 1)
        places.append(len(row) - 1)
    return row + ids[written:], places


def _by_pieces(
    tokenizer: Any, prompt: str, completion: str, steps: Sequence[tuple[int, int]], template: Template
) -> tuple[list[int], list[int]]:
    """Prompt, steps and tags each encoded alone; a raw prompt begins with the start token if there is one."""
    head, special = _prompt_text(tokenizer, prompt, template)
    ids, tag = bare_ids(tokenizer, [head, template.step_tag or ""])
    bodies = bare_ids(tokenizer, [completion[start:stop] for start, stop in steps], split=True)
    if special and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    ids, places = one_bos(tokenizer, ids), []
    for body in bodies:
        ids += body + tag
        places.append(len(ids) - 1)
    return ids, places


def _prompt_text(tokenizer: Any, prompt: str, template: Template) -> tuple[str, bool]:
    """What comes before the completion, and whether the tokenizer is to add its start token."""
    if template.prompt != "chat":
        return prompt + template.separator, True
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("template.prompt=chat: the tokenizer has no chat template; set template.prompt=raw")
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)), False


def _prompt_ids(tokenizer: Any, prompt: str, template: Template) -> list[int]:
    return encode_text(tokenizer, *_prompt_text(tokenizer, prompt, template))[0]


def _rising(starts: Any) -> list[int]:
    return list(accumulate(starts, max))
