"""Where each sampled id lies in the decoded text.

Sampled ids are the truth and are never encoded again. Offsets count Unicode code points of the decoded completion.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

__all__ = ["Offsets", "decode_text", "fill_holes", "repair_offsets", "token_offsets"]

Offsets = Sequence[tuple[int, int]]


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What verifiers see: the ids decoded without special tokens, blanks left as they are."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_offsets(tokenizer: Any, ids: Sequence[int] | Tensor, text: str | None = None) -> list[tuple[int, int]]:
    """Half-open character range of each sampled id in ``decode_text(tokenizer, ids)``.

    The bytes of each id are looked up, joined and checked against the decoded text; only where they differ are the
    ranges found by decoding ever longer prefixes. All tokens of a split character have that character's range; special
    tokens, and tokens that leave no text, have an empty range at their place.

    Args:
        tokenizer: a transformers tokenizer.
        ids: T sampled ids.
        text: ``decode_text(tokenizer, ids)``, where the caller has it already.
    """
    sampled: list[int] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    text = decode_text(tokenizer, sampled) if text is None else text
    table = _TABLES.get(tokenizer)
    if table is None:
        table = _TABLES[tokenizer] = _PieceTable(tokenizer)
    offsets = table.offsets(tokenizer, sampled, text)
    if offsets is None and table.special != _special_ids(tokenizer):  # declared since the table was begun
        table = _TABLES[tokenizer] = _PieceTable(tokenizer)
        offsets = table.offsets(tokenizer, sampled, text)
    return _offsets_by_prefix(tokenizer, sampled, text, table) if offsets is None else offsets


def repair_offsets(offsets: Offsets, text_length: int) -> list[tuple[int, int]]:
    """Give zero-width tokens the characters up to the next token's start, where no other token has them.

    Some tokenizers report zero widths for ordinary tokens; every span would then miss every token.

    >>> repair_offsets([(0, 0), (2, 2), (5, 5), (8, 8), (9, 9)], 9)
    [(0, 2), (2, 5), (5, 8), (8, 9), (9, 9)]
    """
    covered = _covered(offsets, text_length)
    borders = [*sorted({start for start, _ in offsets}), text_length]
    repaired = []
    for start, stop in offsets:
        if stop <= start < text_length and not covered[start]:
            stop = borders[bisect_right(borders, start)]
        repaired.append((start, stop))
    return repaired


def fill_holes(offsets: Offsets, text_length: int) -> list[tuple[int, int]]:
    """Extend tokens over characters that no token covers: up to the next token's start, the first token back to 0.

    Libraries leave such holes where a normaliser composed two characters into one.

    >>> fill_holes([(0, 1), (0, 1), (2, 3)], 3)
    [(0, 2), (0, 2), (2, 3)]
    """
    covered = _covered(offsets, text_length)
    first = covered.find(1)
    filled = []
    for start, stop in offsets:
        if stop > start:
            following = covered.find(1, stop)
            start, stop = 0 if start == first else start, text_length if following < 0 else following
        filled.append((start, stop))
    return filled


def _covered(offsets: Offsets, text_length: int) -> bytearray:
    covered = bytearray(text_length)
    for start, stop in offsets:
        covered[start:stop] = b"\x01" * (min(stop, text_length) - start)
    return covered


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 itself, all others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd".encode()


class _PieceTable:
    """What each id adds to the decoded text, as UTF-8; learned once per tokenizer, as ids turn up.

    Byte-level tokens are spelled in GPT-2's alphabet, byte-fallback tokens as ``<0x0A>``; any other token is what
    decoding it after an ordinary word adds, and at the start of a text what it is alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            decoder = b"ByteFallback"
        else:
            decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self.special = _special_ids(tokenizer)
        self.byte_level = b'"ByteLevel"' in decoder
        self.byte_fallback = b"ByteFallback" in decoder
        self.word = None if self.byte_level else self._ordinary_word(tokenizer)
        self.pieces: dict[int, bytes] = {}
        self.leads: dict[int, bytes] = {}
        self.byte_ids: set[int] = set()
        self.left_out: set[int] = set()

    def silent(self, tokenizer: Any, index: int) -> bool:
        """Whether decoding leaves the id out: special tokens, and ids beyond the vocabulary."""
        return index in self.special or tokenizer.convert_ids_to_tokens(index) is None

    def offsets(self, tokenizer: Any, ids: list[int], text: str) -> list[tuple[int, int]] | None:
        """Character ranges of the ids; None where the joined pieces are not the text."""
        if not self.byte_level and self.word is None:
            return None
        pieces = self._row(tokenizer, ids)
        data = b"".join(pieces)
        if data.isascii():
            borders = list(accumulate(map(len, pieces), initial=0))
            return list(pairwise(borders)) if data.decode("ascii") == text else None
        decoded, starts = _decode_lossy(data)
        if decoded != text:
            return None
        sizes = np.fromiter(map(len, pieces), np.int64, count=len(pieces))
        ends = np.cumsum(sizes)
        character = np.append(np.cumsum(starts) - 1, len(text))
        begin = character[ends - sizes]
        return list(zip(begin.tolist(), np.where(sizes > 0, character[ends - 1] + 1, begin).tolist()))

    def _row(self, tokenizer: Any, ids: list[int]) -> list[bytes]:
        try:
            pieces = [self.pieces[index] for index in ids]
        except KeyError:
            self._learn(tokenizer, set(ids) - self.pieces.keys())
            pieces = [self.pieces[index] for index in ids]
        if not self.byte_level:
            first = next((place for place, index in enumerate(ids) if index not in self.left_out), None)
            if first is not None and ids[first] in self.leads:
                pieces[first] = self.leads[ids[first]]
            if not self.byte_ids.isdisjoint(ids):
                self._settle_byte_runs(ids, pieces)
        return pieces

    def _learn(self, tokenizer: Any, ids: Iterable[int]) -> None:
        for index in ids:
            token = tokenizer.convert_ids_to_tokens(index)
            if token is None or index in self.special:
                self.left_out.add(index)
                self.pieces[index] = b""
            elif self.byte_level:
                spelled = all(character in _ALPHABET for character in token)
                self.pieces[index] = bytes(_ALPHABET[c] for c in token) if spelled else token.encode()
            elif self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                self.byte_ids.add(index)
                self.pieces[index] = bytes.fromhex(match[1])
            else:
                assert self.word is not None
                before, both = decode_text(tokenizer, [self.word]), decode_text(tokenizer, [self.word, index])
                self.leads[index] = decode_text(tokenizer, [index]).encode()
                self.pieces[index] = both.removeprefix(before).encode()

    def _settle_byte_runs(self, ids: list[int], pieces: list[bytes]) -> None:
        """Byte fallback decodes a run of byte tokens as a whole, or every byte of it to U+FFFD."""
        run: list[int] = []
        for place in range(len(ids) + 1):
            index = ids[place] if place < len(ids) else None
            if index in self.byte_ids:
                run.append(place)
            elif run and (index is None or index in self.leads):
                if not _is_utf8(b"".join(pieces[at] for at in run)):
                    for at in run:
                        pieces[at] = _REPLACEMENT
                run = []

    @staticmethod
    def _ordinary_word(tokenizer: Any) -> int | None:
        for index in range(len(tokenizer)):
            alone = decode_text(tokenizer, [index])
            if alone.isascii() and alone.isalnum():
                return index
        return None


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decoding leaves out; of a fast tokenizer all that are marked so, named or not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)


_TABLES: WeakKeyDictionary[Any, _PieceTable] = WeakKeyDictionary()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decode_lossy(data: bytes) -> tuple[str, np.ndarray]:
    """The text, one U+FFFD per ill-formed part, and a bool per byte: True where a character starts."""
    values = np.frombuffer(data, dtype=np.uint8)
    starts = (values & 0xC0) != 0x80
    parts, position = [], 0
    while True:
        try:
            parts.append(data[position:].decode())
            return "".join(parts), starts
        except UnicodeDecodeError as error:
            bad, following = position + error.start, position + error.end
            parts += [data[position:bad].decode(), "\ufffd"]
            starts[bad], starts[bad + 1 : following] = True, False
            position = following


def _offsets_by_prefix(tokenizer: Any, ids: list[int], text: str, table: _PieceTable) -> list[tuple[int, int]]:
    """Ranges from decoding every prefix: for any tokenizer, every character covered, at quadratic cost.

    A token settles the characters that its prefix adds to what agrees with the whole text. One that settles none is
    part of a character that a later token completes, and shares that token's range.
    """
    if decode_text(tokenizer, ids) != text:
        raise ValueError("text is not what the ids decode to; pass decode_text(tokenizer, ids)")
    settled = [0]
    for count in range(1, len(ids) + 1):
        settled.append(max(settled[-1], _agreement(decode_text(tokenizer, ids[:count]), text)))
    offsets = []
    for place, index in enumerate(ids):
        start = stop = settled[place]
        if not table.silent(tokenizer, index) and start < len(text):
            stop = settled[bisect_right(settled, start, lo=place)]
        offsets.append((start, stop))
    return offsets


def _agreement(prefix: str, text: str) -> int:
    """Length of the longest common prefix."""
    if text.startswith(prefix):
        return len(prefix)
    return next((place for place, (a, b) in enumerate(zip(prefix, text)) if a != b), min(len(prefix), len(text)))
