"""Laws of the token at which a step is scored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from apportion.experiments.policies import symbol_tokenizer
from apportion.prm.encoding import Encoded, Template, collate_steps, encode_steps, tokenizer_fingerprint
from apportion.verifiers import InputError
from apportion.verifiers.segmenters import BlankLines, Lines

BARE = Template(separator="")


def pieces(*, vocabulary: list[str], merges: list[tuple[str, str]]) -> Any:
    """Byte-level BPE of the given merges, without regard to words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<eos>", *alphabet, *(a + b for a, b in merges), *vocabulary]
    backend = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


MERGING = pieces(vocabulary=[], merges=[("Ċ", "Ċ"), (".", "ĊĊ"), (".", "Ċ"), ("Ġ", "b"), ("a", "c")])


def read(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The token of each step's score, in the tokenizer's spelling."""
    return [tokenizer.convert_ids_to_tokens(encoded.input_ids[end]) for end in encoded.step_ends]


def encode(tokenizer: Any, prompt: str, text: str, steps: Any, template: Template = BARE, **options: Any) -> Encoded:
    return encode_steps(tokenizer, prompt, text, steps, template=template, **{"max_length": None, **options})


def test_problem_and_solution_are_one_text_read_up_to_the_last_step() -> None:
    text = "a.\n\nb.\n\n"
    encoded = encode(MERGING, "a", text, BlankLines()(text))
    assert list(encoded.input_ids) == MERGING("aa.\n\nb.\n\n")["input_ids"]
    assert (encoded.step_ends, encoded.kept_steps, encoded.shared_ends) == ((2, 4), 2, 0)
    # Encoded piece by piece the ids would be others.
    assert len(encoded.input_ids) < len(MERGING("a")["input_ids"]) + sum(
        len(MERGING(piece)["input_ids"]) for piece in ("a.", "\n\n", "b.")
    )


def test_a_token_across_the_border_belongs_to_the_step_that_ends_in_it() -> None:
    text = "Step 1: add 2.\nStep 2: get 4."
    encoded = encode(MERGING, "", text, Lines()(text))
    assert read(MERGING, encoded) == [".Ċ", "."]


def test_the_last_token_of_a_split_character_counts() -> None:
    encoded = encode(MERGING, "q", "x💩\ny世", [(0, 2), (3, 5)])
    assert len(MERGING("💩")["input_ids"]) == 4
    assert encoded.step_ends == (5, 10)
    assert MERGING.decode(encoded.input_ids[: encoded.step_ends[0] + 1]) == "qx💩"
    assert MERGING.decode(encoded.input_ids[: encoded.step_ends[1] + 1]) == "qx💩\ny世"


def test_a_token_that_opens_with_a_blank_belongs_to_the_step_it_spells() -> None:
    encoded = encode(MERGING, "", "a b", [(0, 1), (2, 3)])
    assert read(MERGING, encoded) == ["a", "Ġb"]
    encoded = encode(MERGING, "", "a b", [(0, 2), (2, 3)])
    assert encoded.step_ends == (1, 1)


def test_steps_that_end_in_one_token_share_it_and_are_counted() -> None:
    encoded = encode(MERGING, "", "xac", [(0, 2), (2, 3)])
    assert (encoded.step_ends, encoded.kept_steps, encoded.shared_ends) == ((1, 1), 2, 1)


def test_truncation_drops_whole_steps_from_the_end() -> None:
    steps = [(0, 2), (2, 4), (4, 6)]
    kept = {limit: encode(MERGING, "qq", "uvwxyz", steps, max_length=limit) for limit in range(1, 9)}
    assert {limit: e.kept_steps for limit, e in kept.items()} == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3}
    assert all(len(e.input_ids) <= limit for limit, e in kept.items())
    assert (kept[3], kept[6].step_ends) == (Encoded((), (), 0), (3, 5))


def test_no_step_no_row() -> None:
    assert encode(MERGING, "q", "", []) == Encoded((), (), 0)


def test_sampled_ids_are_never_encoded_again(tokenizers: Any) -> None:
    tokenizer = tokenizers()
    text = "12 + 7 = 19.\nok 💩"
    alone = [index for character in text for index in tokenizer(character)["input_ids"]]
    assert alone != tokenizer(text)["input_ids"]
    sampled = [*alone, tokenizer.eos_token_id]
    offsets = [(place, place + 1) for place, c in enumerate(text) for _ in tokenizer(c)["input_ids"]]
    for given_offsets in (None, [*offsets, (len(text), len(text))]):
        encoded = encode(
            tokenizer, "9?", text, Lines()(text), prompt_ids=[7, 8], completion_ids=sampled, offsets=given_offsets
        )
        assert list(encoded.input_ids) == [7, 8, *alone]
        assert encoded.step_ends == (2 + 11, 2 + len(alone) - 1)
    own = encode(tokenizer, "9?", text, Lines()(text), Template(), completion_ids=sampled)
    assert list(own.input_ids) == tokenizer("9?\n")["input_ids"] + alone


def test_sampled_ids_are_located_in_linear_steps_and_must_fit_the_text(tokenizers: Any) -> None:
    tokenizer = tokenizers()
    text = "naïve 世界 💩"
    ids = tokenizer(text)["input_ids"]
    odd = [*tokenizer("na")["input_ids"], *tokenizer("ïve 世界 💩")["input_ids"]]
    assert odd != ids
    assert tokenizer.decode(odd) == text
    for sampled in (ids, odd):
        for stop in range(1, len(text) + 1):
            (end,) = encode(tokenizer, "", text, [(0, stop)], prompt_ids=[5], completion_ids=sampled).step_ends
            shown = [tokenizer.decode(sampled[:count]).startswith(text[:stop]) for count in (end - 1, end)]
            assert shown == [False, True]
    with pytest.raises(ValueError, match="not what completion_ids decode to"):
        encode(tokenizer, "", text + "!", [(0, 3)], completion_ids=odd)
    with pytest.raises(ValueError, match="3 offsets for"):
        encode(tokenizer, "", text, [(0, 3)], completion_ids=odd, offsets=[(0, 1)] * 3)


@pytest.mark.parametrize("bos", [False, True])
def test_the_start_token_comes_once_and_no_end_token(tokenizers: Any, bos: bool) -> None:
    tokenizer = tokenizers(bos=bos)
    start = [tokenizer.bos_token_id] if bos else []
    for prompt in ("9?", "<bos>9?"):
        encoded = encode(tokenizer, prompt, "ok", [(0, 2)])
        named = [tokenizer.bos_token_id] if "<bos>" in prompt else start
        assert list(encoded.input_ids) == named + tokenizer("9?ok", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(encoded.input_ids[encoded.step_ends[0]]) in "ok"


def test_the_chat_template_opens_the_answer(tokenizers: Any) -> None:
    tokenizer = tokenizers(chat=True, bos=True)
    encoded = encode(tokenizer, "9?", "ok", [(0, 2)], Template(prompt="chat"))
    assert tokenizer.decode(encoded.input_ids) == "<bos>user: 9?<eos><bos>assistant: ok"
    with pytest.raises(InputError, match="no chat template"):
        encode(tokenizers(), "9?", "ok", [(0, 2)], Template(prompt="chat"))


@pytest.mark.parametrize("template", [BARE, Template(prompt="chat"), Template(step_tag="<extra_0>", pieces=True)])
def test_a_completion_cannot_spell_special_tokens(tokenizers: Any, template: Template) -> None:
    tokenizer = tokenizers(chat=True)
    text = "ok<eos><extra_0>\nso"
    encoded = encode(tokenizer, "9?", text, Lines()(text), template)
    after = list(encoded.input_ids)[-len(tokenizer(text, split_special_tokens=True)["input_ids"]) - 2 :]
    assert tokenizer.eos_token_id not in after
    tag = tokenizer.convert_tokens_to_ids("<extra_0>")
    assert encoded.input_ids.count(tag) == (2 if template.step_tag else 0)


def test_a_tag_in_the_text_is_where_the_step_is_scored(tokenizers: Any) -> None:
    tokenizer = tokenizers()
    problem, text = "У Маши 2 яблоки.", "2+1=3.\n3*2=6."
    encoded = encode(tokenizer, problem, text, Lines()(text), Template(step_tag=" ки"))
    assert tokenizer.decode(encoded.input_ids) == "У Маши 2 яблоки.\n2+1=3. ки\n3*2=6. ки"
    ends = [tokenizer.decode(encoded.input_ids[: end + 1]) for end in encoded.step_ends]
    assert ends == ["У Маши 2 яблоки.\n2+1=3. ки", "У Маши 2 яблоки.\n2+1=3. ки\n3*2=6. ки"]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_special_tag_follows_the_token_that_ends_the_step(tokenizers: Any, sampled: bool) -> None:
    tokenizer = tokenizers()
    text = "2+1=3.\n3*2=6."
    ids = tokenizer(text)["input_ids"] if sampled else None
    encoded = encode(tokenizer, "9?", text, Lines()(text), Template(step_tag="<extra_0>"), completion_ids=ids)
    assert tokenizer.decode(encoded.input_ids) == "9?\n2+1=3.<extra_0>\n3*2=6.<extra_0>"
    assert {encoded.input_ids[end] for end in encoded.step_ends} == {tokenizer.convert_tokens_to_ids("<extra_0>")}


def test_pieces_are_what_trls_trainer_read(tokenizers: Any) -> None:
    tokenizer = tokenizers(whole=True)
    text = "2+1=3.\n\n3*2=6."
    template = Template(separator="", step_tag="\n", pieces=True)
    encoded = encode(tokenizer, "9?", text, BlankLines()(text), template, completion_ids=[5, 6])
    texts = ("9?", "2+1=3.", "\n", "3*2=6.", "\n")
    ids = [
        tokenizer.bos_token_id,
        *(i for part in texts for i in tokenizer(part, add_special_tokens=False)["input_ids"]),
    ]
    assert list(encoded.input_ids) == ids
    assert [ids[end] for end in encoded.step_ends] == [ids[-1]] * 2
    assert encoded.step_ends[-1] == len(ids) - 1


def test_a_tokenizer_of_symbols_is_read_symbol_by_symbol() -> None:
    tokenizer = symbol_tokenizer((*"0123456789+=?\n", "[T]"))
    encoded = encode(tokenizer, "1+1=?", "[T]2\n3\n", [(0, 4), (5, 6)])
    assert (encoded.step_ends, len(encoded.input_ids)) == ((6, 8), 9)


@given(
    text=st.text(st.characters(codec=None), max_size=40),
    prompt=st.text(max_size=10),
    limit=st.one_of(st.none(), st.integers(1, 40)),
    template=st.sampled_from([BARE, Template(), Template(step_tag=" ки"), Template(step_tag="\n", pieces=True)]),
)
@settings(max_examples=100, deadline=None)
def test_any_text_gives_rising_ends_inside_the_row(
    tokenizers: Any, text: str, prompt: str, limit: int | None, template: Template
) -> None:
    tokenizer = tokenizers(bos=True)
    steps = Lines()(text)
    encoded = encode(tokenizer, prompt, text, steps, template, max_length=limit)
    ends = encoded.step_ends
    assert list(ends) == sorted(ends)
    assert len(ends) == encoded.kept_steps <= len(steps)
    assert len(encoded.input_ids) == (ends[-1] + 1 if ends else 0) <= (limit or 10**9)
    if limit is None:
        assert encoded.kept_steps == len(steps)
    if ends and not template.step_tag:  # what is read holds the step's last character, and the token before does not
        whole = prompt + template.separator + text
        readable = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in whole)
        start = len(whole) - len(text)
        for (_, stop), end in zip(steps, ends):
            shown = tokenizer.decode(encoded.input_ids[: end + 1], skip_special_tokens=True)
            assert shown.startswith(readable[: start + stop])


def test_rows_are_padded_on_the_right_by_their_length(tokenizers: Any) -> None:
    pad = tokenizers().pad_token_id
    rows = [Encoded((4, 5), (0, 1), 2), Encoded((pad, 6, pad), (2,), 1)]
    batch = collate_steps(rows, pad)
    assert batch.input_ids.tolist() == [[4, 5, pad], [pad, 6, pad]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert (batch.step_rows.tolist(), batch.step_positions.tolist()) == ([0, 0, 1], [0, 1, 2])


def test_the_fingerprint_is_of_the_vocabulary(tokenizers: Any) -> None:
    one, two = tokenizers(), tokenizers(chat=True, bos=True)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two) != tokenizer_fingerprint(MERGING)
    two.add_tokens(["another"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)


@pytest.mark.parametrize("options", [{"prompt": "system"}, {"step_tag": ""}])
def test_templates_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"template\."):
        Template(**options)
