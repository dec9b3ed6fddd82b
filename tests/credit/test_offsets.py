"""Laws of the way from sampled ids to characters."""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from apportion.credit.align import (
    decode_text,
    fill_holes,
    repair_offsets,
    spans_table,
    spans_to_tokens,
    token_offsets,
)
from apportion.verifiers import Span

CORPUS = [
    "Step 1: 12 + 7 = 19\nStep 2: 19 * 3 = 57\nAnswer: 57",
    "the cat sat on the mat, naïve café e\u0301té",
    "合計は十九です 世界 👩\u200d👩\u200d👧 📷 ok 💩",
    "  two  blanks\n\n\nand lines\ttab",
]
SPECIAL = ["<pad>", "<eos>"]


def wrap(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def alphabet_tokenizer(merges: list[tuple[str, str]] | None = None, normalizer: Any = None) -> Any:
    """Byte-level BPE on the bare byte alphabet, plus the given merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet, *(a + b for a, b in merges or [])]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "é added"])
    return wrap(tokenizer)


def metaspace() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<pad>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL + byte_tokens, limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer marks every forced token special; a model's own file marks only the control tokens.
    pieces, merges = tokenizer.get_vocab(), []
    by_index = sorted(pieces, key=pieces.__getitem__)
    plain = Tokenizer(models.BPE({piece: place for place, piece in enumerate(by_index)}, merges, byte_fallback=True))
    plain.pre_tokenizer, plain.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    plain.add_special_tokens(SPECIAL)
    return wrap(plain)


def characters() -> Any:
    pieces = [*SPECIAL, "[T]", "[/T]", *sorted(set("".join(CORPUS)))]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


def word_piece() -> Any:
    pieces = [*SPECIAL, "cat", "##s", "sat", ",", ".", "'", "un", "##believ", "##able", "[unused]"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


def collapsing() -> Any:
    """A decoder that no table of pieces can follow: equal neighbours melt into one."""
    pieces = [*SPECIAL, "a", "b", "ab", "é"]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


BUILDERS = {f.__name__: f for f in (byte_level, metaspace, characters, word_piece, collapsing)}


@cache
def tokenizer_of(kind: str) -> Any:
    return BUILDERS[kind]()


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def hit(offsets: Any, *span: int, text: str | None = None) -> list[int]:
    """Indices of the tokens in one span."""
    return spans_to_tokens(offsets, [span], text)[0].nonzero().flatten().tolist()  # type: ignore[list-item]


def test_all_byte_tokens_of_a_character_carry_its_range() -> None:
    tokenizer = alphabet_tokenizer()
    offsets = token_offsets(tokenizer, encode(tokenizer, "i ⭢ j"))
    assert offsets == [(0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (3, 4), (4, 5)]
    assert hit(offsets, 2, 3) == [2, 3, 4]
    assert token_offsets(tokenizer, encode(tokenizer, "x💩y")) == [(0, 1), *[(1, 2)] * 4, (2, 3)]


def test_offsets_are_those_of_the_sampled_ids_not_of_the_canonical_ones() -> None:
    tokenizer = alphabet_tokenizer([("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])
    sampled = tokenizer.convert_tokens_to_ids(["he", "llo"])
    assert decode_text(tokenizer, sampled) == "hello"
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "hello")) == ["hello"]
    assert token_offsets(tokenizer, sampled) == [(0, 2), (2, 5)]
    assert spans_to_tokens(token_offsets(tokenizer, sampled), [(0, 5)]).shape == (1, 2)


def test_a_normaliser_does_not_shift_offsets() -> None:
    strip = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    tokenizer = alphabet_tokenizer(normalizer=strip)
    offsets = token_offsets(tokenizer, encode(tokenizer, "naïve x"))
    assert offsets == [(k, k + 1) for k in range(7)]
    assert hit(offsets, 2, 3) == [2]


def test_a_composed_letter_is_one_character_of_the_decoded_text() -> None:
    tokenizer = alphabet_tokenizer(normalizer=normalizers.NFC())
    ids = encode(tokenizer, "e\u0301x")
    assert decode_text(tokenizer, ids) == "\u00e9x"
    assert token_offsets(tokenizer, ids) == [(0, 1), (0, 1), (1, 2)]


def test_holes_of_library_offsets_are_closed() -> None:
    tokenizer = alphabet_tokenizer(normalizer=normalizers.NFC())
    library = tokenizer.backend_tokenizer.encode("e\u0301x", add_special_tokens=False).offsets
    assert library == [(0, 1), (0, 1), (2, 3)]
    assert hit(library, 1, 2) == []
    assert hit(fill_holes(library, 3), 1, 2) == [0, 1]
    assert fill_holes([(1, 2), (2, 4), (4, 4)], 6) == [(0, 2), (2, 6), (4, 4)]
    assert fill_holes([(0, 1), (0, 2), (2, 3)], 3) == [(0, 1), (0, 2), (2, 3)]


def test_zero_width_offsets_of_ordinary_tokens_are_repaired() -> None:
    repaired = repair_offsets([(0, 0), (2, 2), (5, 5), (8, 8)], len("is it so?"))
    assert repaired == [(0, 2), (2, 5), (5, 8), (8, 9)]
    assert hit(repaired, 3, 5) == [1]


def test_repair_leaves_special_tokens_empty() -> None:
    assert repair_offsets([(0, 2), (2, 2), (2, 4), (4, 4), (0, 0)], 4) == [(0, 2), (2, 2), (2, 4), (4, 4), (0, 0)]


def test_special_tokens_have_an_empty_range_at_their_place() -> None:
    tokenizer = tokenizer_of("characters")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    first, second = tokenizer.convert_tokens_to_ids(["[T]", "a"])
    assert token_offsets(tokenizer, [first, pad, second, eos]) == [(0, 3), (3, 3), (3, 4), (4, 4)]


def test_an_id_beyond_the_vocabulary_has_an_empty_range() -> None:
    tokenizer = tokenizer_of("characters")
    letter = tokenizer.convert_tokens_to_ids("a")
    assert token_offsets(tokenizer, [letter, 5000, letter]) == [(0, 1), (1, 1), (1, 2)]


def test_metaspace_drops_the_first_blank_and_keeps_the_others_with_their_word() -> None:
    tokenizer = tokenizer_of("metaspace")
    ids = tokenizer.convert_tokens_to_ids(["▁", "a", "▁", "a"])
    assert decode_text(tokenizer, ids) == "a a"
    assert token_offsets(tokenizer, ids) == [(0, 0), (0, 1), (1, 2), (2, 3)]


def test_byte_fallback_gives_every_byte_of_a_broken_run_its_own_character() -> None:
    tokenizer = tokenizer_of("metaspace")
    whole = tokenizer.convert_tokens_to_ids(["a", "<0xE4>", "<0xB8>", "<0x96>", "a"])
    assert decode_text(tokenizer, whole) == "a世a"
    assert token_offsets(tokenizer, whole) == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    broken = [*whole[:4], whole[1], whole[4]]
    assert decode_text(tokenizer, broken) == "a\ufffd\ufffd\ufffd\ufffda"
    assert token_offsets(tokenizer, broken) == [(k, k + 1) for k in range(6)]


def test_byte_level_gives_one_replacement_character_per_broken_part() -> None:
    tokenizer = alphabet_tokenizer()
    emoji, letter = encode(tokenizer, "💩"), encode(tokenizer, "a")
    ids = [*emoji[:2], *letter, emoji[3], tokenizer.eos_token_id]
    assert decode_text(tokenizer, ids) == "\ufffda\ufffd"
    assert token_offsets(tokenizer, ids) == [(0, 1), (0, 1), (1, 2), (2, 3), (3, 3)]


def test_word_piece_blanks_belong_to_the_word_after_them() -> None:
    tokenizer = tokenizer_of("word_piece")
    ids = tokenizer.convert_tokens_to_ids(["cat", "##s", "sat", ",", "un", "##believ", "##able"])
    assert decode_text(tokenizer, ids) == "cats sat, unbelievable"
    assert token_offsets(tokenizer, ids) == [(0, 3), (3, 4), (4, 8), (8, 9), (9, 12), (12, 18), (18, 22)]


def test_an_unknown_decoder_is_followed_by_decoding_prefixes() -> None:
    tokenizer = tokenizer_of("collapsing")
    a, b, eos = tokenizer.convert_tokens_to_ids(["a", "b", "<eos>"])
    assert decode_text(tokenizer, [b, b, a, eos]) == "ba"
    assert token_offsets(tokenizer, [b, b, a, eos]) == [(0, 1), (1, 2), (1, 2), (2, 2)]


def test_a_text_that_the_ids_do_not_give_is_refused() -> None:
    tokenizer = tokenizer_of("byte_level")
    with pytest.raises(ValueError, match="text is not what the ids decode to"):
        token_offsets(tokenizer, encode(tokenizer, "the cat"), "the dog")


def test_tensors_and_lists_of_ids_give_the_same() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = encode(tokenizer, CORPUS[2])
    assert token_offsets(tokenizer, torch.tensor(ids)) == token_offsets(tokenizer, ids)
    assert token_offsets(tokenizer, []) == []


def test_a_token_declared_special_later_is_empty_from_then_on() -> None:
    tokenizer = characters()
    ids = tokenizer.convert_tokens_to_ids(["a", "[T]", "b"])
    assert token_offsets(tokenizer, ids) == [(0, 1), (1, 4), (4, 5)]
    tokenizer.add_special_tokens({"bos_token": "[T]"})
    assert decode_text(tokenizer, ids) == "ab"
    assert token_offsets(tokenizer, ids) == [(0, 1), (1, 1), (1, 2)]


def test_a_token_added_later_has_its_text() -> None:
    tokenizer = characters()
    ids = [*tokenizer.convert_tokens_to_ids(["a", "b"]), len(tokenizer)]
    assert token_offsets(tokenizer, ids) == [(0, 1), (1, 2), (2, 2)]
    tokenizer.add_tokens(["[new]"])
    assert decode_text(tokenizer, ids) == "ab[new]"
    assert token_offsets(tokenizer, ids) == [(0, 1), (1, 2), (2, 7)]


def test_a_negative_id_learns_nothing_about_others() -> None:
    tokenizer = alphabet_tokenizer()
    with pytest.raises(OverflowError):
        token_offsets(tokenizer, [-1, *encode(tokenizer, "a")], "a!")
    last = len(tokenizer) - 1
    assert token_offsets(tokenizer, [0, last], decode_text(tokenizer, [0, last])) == [(0, 0), (0, 1)]


def test_offsets_read_like_a_list_of_pairs() -> None:
    tokenizer = alphabet_tokenizer()
    offsets, pairs = token_offsets(tokenizer, encode(tokenizer, "aé")), [(0, 1), (1, 2), (1, 2)]
    assert (offsets == pairs, pairs == offsets, offsets == offsets[:], offsets != pairs) == (True, True, True, False)
    assert (offsets != pairs[1:], pairs[1:] != offsets) == (True, True)
    assert (offsets == offsets[1:], offsets == "aé") == (False, False)
    assert (len(offsets), list(offsets), repr(offsets)) == (3, pairs, repr(pairs))
    assert (offsets[0], offsets[-1], offsets[1:]) == (pairs[0], pairs[-1], pairs[1:])
    assert all(type(edge) is int for pair in [*offsets, offsets[0]] for edge in pair)
    with pytest.raises(IndexError):
        offsets[3]


def test_offsets_are_pickled_as_a_list_that_needs_no_library() -> None:
    tokenizer = alphabet_tokenizer()
    written = pickle.dumps(token_offsets(tokenizer, encode(tokenizer, "ab")))
    assert b"apportion" not in written
    assert b"numpy" not in written
    read = pickle.loads(written)
    assert type(read) is list
    assert read == [(0, 1), (1, 2)]


def test_what_was_learned_of_a_tokenizer_goes_with_it() -> None:
    tokenizer = characters()
    token_offsets(tokenizer, [4, 5])
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_ids_lose_no_character(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=24))
    text, offsets = decode_text(tokenizer, ids), token_offsets(tokenizer, ids)
    assert len(offsets) == len(ids)
    assert all(0 <= start <= stop <= len(text) for start, stop in offsets)
    spans = [Span(place, place + 1) for place in range(len(text))]
    table, same = (spans_table([kind], [spans], [text]) for kind in (offsets, list(offsets)))
    assert table.uncovered == 0
    assert (table.start.tolist(), table.stop.tolist()) == (same.start.tolist(), same.stop.tolist())
    silent = [tokenizer.convert_ids_to_tokens(i) is None or i in tokenizer.all_special_ids for i in ids]
    assert all(start == stop for (start, stop), empty in zip(offsets, silent) if empty)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "characters", "word_piece"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_token_lies_where_its_own_text_is(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    text = decode_text(tokenizer, ids)
    for index, (start, stop) in zip(ids, token_offsets(tokenizer, ids)):
        alone = decode_text(tokenizer, [index])
        if "\ufffd" not in alone and "\ufffd" not in text[start:stop] and not alone.startswith("##"):
            assert text[start:stop].strip() == alone.strip()


@pytest.mark.parametrize("kind", ["byte_level", "characters"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(alphabet=sorted(set("".join(CORPUS))), max_size=30))
def test_no_token_crosses_the_end_of_a_prefix_that_decodes_cleanly(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = encode(tokenizer, text) if kind == "byte_level" else tokenizer.convert_tokens_to_ids(list(text))
    assert decode_text(tokenizer, ids) == text
    offsets = token_offsets(tokenizer, ids)
    for count in range(len(ids) + 1):
        prefix = decode_text(tokenizer, ids[:count])
        if text.startswith(prefix):
            assert max((stop for _, stop in offsets[:count]), default=0) == len(prefix)
            assert min((start for start, _ in offsets[count:]), default=len(text)) == len(prefix)
