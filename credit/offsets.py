"""Where each sampled id lies in the decoded text.

Sampled ids are the truth and are never encoded again. Offsets count Unicode code points of the decoded completion.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

__all__ = ["OffsetArrays", "Offsets", "decode_text", "token_offsets"]

Offsets = Sequence[tuple[int, int]]


class OffsetArrays(Sequence[tuple[int, int]]):
    """Character ranges in two arrays, to read like a list of (start, stop) pairs, and equal to that list.

    A batch has hundreds of thousands of tokens, and to make a pair of each would cost more than all else in alignment.

    Args:
        start, stop: (T,) int64, half-open range of each token.

    >>> offsets = OffsetArrays(np.array([0, 3]), np.array([3, 7]))
    >>> offsets, offsets[-1], offsets == [(0, 3), (3, 7)]
    ([(0, 3), (3, 7)], (3, 7), True)
    """

    __slots__ = ("start", "stop")
    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def __init__(self, start: np.ndarray, stop: np.ndarray) -> None:
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.start.tolist(), self.stop.tolist())

    @overload
    def __getitem__(self, place: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, place: slice) -> OffsetArrays: ...
    def __getitem__(self, place: int | slice) -> tuple[int, int] | OffsetArrays:
        if isinstance(place, slice):
            return OffsetArrays(self.start[place], self.stop[place])
        return int(self.start[place]), int(self.stop[place])

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, OffsetArrays) else other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[tuple[int, int]]]]:
        """Pickled as the list, which processes without this package, and verifiers' workers, can read."""
        return list, (list(self),)


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What verifiers see: the ids decoded without special tokens, blanks left as they are."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_offsets(tokenizer: Any, ids: Sequence[int] | Tensor, text: str | None = None) -> OffsetArrays:
    """Half-open character range of each sampled id in ``decode_text(tokenizer, ids)``.

    The bytes of each id are looked up, joined and checked against the decoded text; only where they differ are the
    ranges found by decoding ever longer prefixes. All tokens of a split character have that character's range; special
    tokens, and tokens that leave no text, have an empty range at their place.

    Args:
        tokenizer: a transformers tokenizer.
        ids: T sampled ids.
        text: ``decode_text(tokenizer, ids)``, where the caller has it already.
    """
    sampled: Sequence[int] = ids.tolist() if isinstance(ids, Tensor) else ids
    text = decode_text(tokenizer, sampled) if text is None else text
    table = _TABLES.get(tokenizer)
    if table is None:
        table = _TABLES[tokenizer] = _PieceTable(tokenizer)
    offsets = table.offsets(tokenizer, sampled, text)
    if offsets is None and table.state != _state(tokenizer):  # tokens added or declared since the table was begun
        table = _TABLES[tokenizer] = _PieceTable(tokenizer)
        offsets = table.offsets(tokenizer, sampled, text)
    return _offsets_by_prefix(tokenizer, sampled, text, table) if offsets is None else offsets


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
        self.state = _state(tokenizer)
        self.byte_level = b'"ByteLevel"' in decoder
        self.byte_fallback = b"ByteFallback" in decoder
        self.word = None if self.byte_level else self._ordinary_word(tokenizer)
        # One place further on than its id, each piece and its size: None and -1 until the id turns up. The outer
        # places are for ids outside the vocabulary, which leave no text.
        places = 3 + max(tokenizer.get_vocab().values(), default=-1)
        self.pieces, self.sizes = np.full(places, None, dtype=object), np.full(places, -1, dtype=np.int64)
        self.pieces[[0, -1]], self.sizes[[0, -1]] = b"", 0
        self.leads: dict[int, bytes] = {}
        self.byte_ids: set[int] = set()

    def silent(self, tokenizer: Any, index: int) -> bool:
        """Whether decoding leaves the id out: special tokens, and ids beyond the vocabulary."""
        return index in self.state[0] or tokenizer.convert_ids_to_tokens(index) is None

    def offsets(self, tokenizer: Any, ids: Sequence[int], text: str) -> OffsetArrays | None:
        """Character ranges of the ids; None where the joined pieces are not the text."""
        if not self.byte_level and self.word is None:
            return None
        pieces, sizes = self._row(tokenizer, ids)
        data = b"".join(pieces)
        # Every run of ASCII bytes is sound, so that only other texts need a look at their byte tokens.
        if not data.isascii() and not self.byte_ids.isdisjoint(ids):
            self._settle_byte_runs(ids, pieces, sizes)
            data = b"".join(pieces)
        borders = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(sizes, out=borders[1:])
        begin, end = borders[:-1], borders[1:]
        if data.isascii():
            return OffsetArrays(begin, end) if data.decode("ascii") == text else None
        decoded, starts = _decode_lossy(data)
        if decoded != text:
            return None
        begun = np.cumsum(starts)
        first = begun[begin] - 1
        return OffsetArrays(first, np.where(end > begin, begun[end - 1], first))

    def _row(self, tokenizer: Any, ids: Sequence[int]) -> tuple[list[bytes], np.ndarray]:
        """The piece of each id and its size; byte tokens are not settled yet."""
        places = np.fromiter(ids, np.int64, count=len(ids)) + 1
        sizes = self.sizes.take(places, mode="clip")
        if sizes.min(initial=0) < 0:
            self._learn(tokenizer, set((places[sizes < 0] - 1).tolist()))
            sizes = self.sizes.take(places, mode="clip")
        pieces = self.pieces.take(places, mode="clip").tolist()
        if not self.byte_level:
            for place, index in enumerate(ids):
                if index in self.leads:
                    pieces[place], sizes[place] = self.leads[index], len(self.leads[index])
                if index in self.leads or index in self.byte_ids:
                    break
        return pieces, sizes

    def _learn(self, tokenizer: Any, ids: Iterable[int]) -> None:
        for index in ids:
            token = tokenizer.convert_ids_to_tokens(index)
            if token is None or index in self.state[0]:
                piece = b""
            elif self.byte_level:
                spelled = all(character in _ALPHABET for character in token)
                piece = bytes(_ALPHABET[c] for c in token) if spelled else token.encode()
            elif self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                self.byte_ids.add(index)
                piece = bytes.fromhex(match[1])
            else:
                assert self.word is not None
                before, both = decode_text(tokenizer, [self.word]), decode_text(tokenizer, [self.word, index])
                self.leads[index] = decode_text(tokenizer, [index]).encode()
                piece = both.removeprefix(before).encode()
            self.pieces[index + 1], self.sizes[index + 1] = piece, len(piece)

    def _settle_byte_runs(self, ids: Sequence[int], pieces: list[bytes], sizes: np.ndarray) -> None:
        """Byte fallback decodes a run of byte tokens as a whole, or every byte of it to U+FFFD."""
        run: list[int] = []
        for place in range(len(ids) + 1):
            index = ids[place] if place < len(ids) else None
            if index in self.byte_ids:
                run.append(place)
            elif run and (index is None or index in self.leads):
                if not _is_utf8(b"".join(pieces[at] for at in run)):
                    for at in run:
                        pieces[at], sizes[at] = _REPLACEMENT, len(_REPLACEMENT)
                run = []

    @staticmethod
    def _ordinary_word(tokenizer: Any) -> int | None:
        for index in range(len(tokenizer)):
            alone = decode_text(tokenizer, [index])
            if alone.isascii() and alone.isalnum():
                return index
        return None


def _state(tokenizer: Any) -> tuple[frozenset[int], int]:
    """Ids that decoding leaves out, of a fast tokenizer all that are marked so; and the number of all its ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids), len(tokenizer)
    special = frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)
    return special, len(tokenizer)


_TABLES: WeakKeyDictionary[Any, _PieceTable] = WeakKeyDictionary()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decode_lossy(data: bytes) -> tuple[str, np.ndarray]:
    """The text, one U+FFFD per ill-formed part, and where characters start: a bool per byte, and True for the end."""
    values = np.frombuffer(data + b"\0", dtype=np.uint8)
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


def _offsets_by_prefix(tokenizer: Any, ids: Sequence[int], text: str, table: _PieceTable) -> OffsetArrays:
    """Ranges from decoding every prefix: for any tokenizer, every character covered, at quadratic cost.

    A token settles the characters that its prefix adds to what agrees with the whole text. One that settles none is
    part of a character that a later token completes, and shares that token's range.
    """
    if decode_text(tokenizer, ids) != text:
        raise ValueError("text is not what the ids decode to; pass decode_text(tokenizer, ids)")
    settled = [0]
    for count in range(1, len(ids) + 1):
        settled.append(max(settled[-1], _agreement(decode_text(tokenizer, ids[:count]), text)))
    begin, end = settled[:-1], settled[:-1]
    for place, index in enumerate(ids):
        if not table.silent(tokenizer, index) and begin[place] < len(text):
            end[place] = settled[bisect_right(settled, begin[place], lo=place)]
    return OffsetArrays(np.array(begin, dtype=np.int64), np.array(end, dtype=np.int64))


def _agreement(prefix: str, text: str) -> int:
    """Length of the longest common prefix."""
    if text.startswith(prefix):
        return len(prefix)
    return next((place for place, (a, b) in enumerate(zip(prefix, text)) if a != b), min(len(prefix), len(text)))
