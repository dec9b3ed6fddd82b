"""Text to ids and back to characters, on top of a fast transformers tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..verifiers import InputError

__all__ = [
    "bare_ids",
    "encode_both",
    "encode_text",
    "one_bos",
    "sampled_starts",
    "special_texts",
    "tokenizer_fingerprint",
]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Equal for two tokenizers whose ids stand for the same tokens; computed once per tokenizer and vocabulary size."""
    known = _FINGERPRINTS.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        lines = (f"{index} {token}\n" for token, index in sorted(tokenizer.get_vocab().items()))
        digest = hashlib.blake2b("".join(lines).encode("utf-8", "surrogatepass"), digest_size=16)
        known = _FINGERPRINTS[tokenizer] = len(tokenizer), digest.hexdigest()
    return known[1]


_FINGERPRINTS: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def encode_both(tokenizer: Any, head: str, special: bool, body: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Prompt and completion as one text; only where the prompt holds special tokens each by itself.

    A completion never makes a special token, however it spells one.
    """
    if not any(token in head for token in special_texts(tokenizer)):
        return encode_text(tokenizer, head + body, special, split=True)
    ids, offsets = encode_text(tokenizer, head, special)
    more, places = encode_text(tokenizer, body, False, split=True)
    return ids + more, offsets + [(start + len(head), stop + len(head)) for start, stop in places]


def encode_text(
    tokenizer: Any, text: str, special: bool, *, split: bool = False
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a text that may go on, thus without an end token, and their character ranges.

    Args:
        special: let the tokenizer add its start token.
        split: read special tokens in the text as ordinary characters.
    """
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__}: gives no character offsets; a fast tokenizer is needed")
    found = tokenizer(
        _readable(text),
        add_special_tokens=special,
        split_special_tokens=split,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    ids, offsets, added = list(found["input_ids"]), list(found["offset_mapping"]), found["special_tokens_mask"]
    while added and added.pop():
        del ids[-1], offsets[-1]
    kept = len(ids) - len(one_bos(tokenizer, list(ids)))
    return ids[kept:], offsets[kept:]


def bare_ids(tokenizer: Any, texts: Sequence[str], *, split: bool = False) -> list[list[int]]:
    """Ids of each text alone, without start and end tokens."""
    texts = [_readable(text) for text in texts]
    found = tokenizer(texts, add_special_tokens=False, split_special_tokens=split, verbose=False)
    return [list(ids) for ids in found["input_ids"]]


def special_texts(tokenizer: Any) -> list[str]:
    """The special tokens, named or not, as they are spelled."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """A template or a text that spells the start token meets a tokenizer that adds it: keep one."""
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        del ids[0]
    return ids


def _readable(text: str) -> str:
    """Half a surrogate pair, which no tokenizer reads, becomes U+FFFD; the length stays."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def sampled_starts(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """First character of each sampled id: as the text is encoded where that gives these ids, else by decoding.

    Decoding goes token by token in a window that moves on with every finished character, so that it is linear.
    """
    again, offsets = encode_text(tokenizer, text, False, split=True)
    silent = set(tokenizer.all_special_ids)
    if again == ids[: len(again)] and silent.issuperset(ids[len(again) :]):
        return [start for start, _ in offsets] + [len(text)] * (len(ids) - len(again))

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    starts, shown, settled, window, read = [], 0, 0, 0, 0
    for place in range(len(ids)):
        starts.append(shown)
        before, after = decode(ids[window:read]), decode(ids[window : place + 1])
        whole = after if place - read >= _LONGEST_CHARACTER else after.rstrip("\ufffd")
        shown = max(shown, settled + len(whole) - len(before))
        if whole == after and len(after) > len(before):
            settled, window, read = shown, read, place + 1
    if decode(ids) != text:
        raise ValueError("the completion is not what completion_ids decode to; give their offsets")
    return starts


_LONGEST_CHARACTER = 4  # tokens, one a byte
_SURROGATE = re.compile("[\ud800-\udfff]")
