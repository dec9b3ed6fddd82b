"""Laws of the policies: symbols are tokens, weights follow from the seed, and the key holds what decides them."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.experiments.policies import PretrainedPolicy, TinyPolicy, symbol_tokenizer
from apportion.experiments.tasks.chain import SYMBOLS
from apportion.verifiers import InputError

SMALL = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16}
TOKENIZER = symbol_tokenizer(SYMBOLS)


@given(st.lists(st.sampled_from(SYMBOLS), max_size=40))
def test_every_symbol_is_one_token_and_comes_back(symbols):
    """Read as one text, the longest symbol wins: [/T] is never [ / T ]."""
    ids = TOKENIZER.encode("".join(symbols), add_special_tokens=False)
    assert TOKENIZER.convert_ids_to_tokens(ids) == symbols
    assert TOKENIZER.decode(ids) == "".join(symbols)


@given(st.text(max_size=20))
def test_what_is_no_symbol_is_one_unknown_token_a_character(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    known = [symbol for symbol in TOKENIZER.convert_ids_to_tokens(ids) if symbol != "<unk>"]
    assert set(known) <= {*SYMBOLS, "<eos>", "<pad>", "<unk>"}
    if not any(character in "".join(SYMBOLS) for character in text):
        assert len(ids) == len(text)


def test_the_default_is_the_model_that_was_measured():
    policy = TinyPolicy().build()
    assert sum(p.numel() for p in policy.model.parameters()) == 99_264
    assert policy.eos_ids == (policy.tokenizer.eos_token_id,)
    assert policy.max_positions == 160


def test_the_weights_follow_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = TinyPolicy(**SMALL).build()
    assert torch.equal(torch.rand(1), expected)
    again, other = TinyPolicy(**SMALL).build(), TinyPolicy(**SMALL, seed=1).build()
    pairs = list(zip(first.model.parameters(), again.model.parameters()))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.model.parameters()), next(other.model.parameters()))


def test_a_prompt_with_an_unknown_symbol_is_refused():
    with pytest.raises(InputError, match=r"policy=tiny knows only the symbols.*'What is'.*policy=smollm2"):
        TinyPolicy(**SMALL).build().encode("What is")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"heads": 3}, r"policy\.hidden_size=64: must be an even multiple of policy\.heads=3"),
        ({"heads": 64}, r"policy\.hidden_size=64: must be an even multiple"),
        ({"layers": 0}, r"policy\.layers=0"),
        ({"max_positions": 0}, r"policy\.max_positions=0"),
    ],
)
def test_sizes_that_make_no_model_are_refused_by_name(options, key):
    with pytest.raises(InputError, match=key):
        TinyPolicy(**options)


def test_the_symbols_of_ones_own_task_are_used(monkeypatch):
    module = types.ModuleType("my_symbols")
    module.GOOD, module.TWICE, module.NUMBER = ("a", "<b>"), ("a", "a"), 7
    monkeypatch.setitem(sys.modules, "my_symbols", module)
    assert len(TinyPolicy(symbols="my_symbols.GOOD", **SMALL).build().encode("a<b>a")) == 3
    for name, reason in (("TWICE", "holds a symbol twice"), ("NUMBER", "not a sequence of texts"), ("GONE", "no GONE")):
        with pytest.raises(InputError, match=rf"policy\.symbols=my_symbols\.{name}: .*{reason}"):
            TinyPolicy(symbols=f"my_symbols.{name}", **SMALL).build()


def test_other_weights_at_the_same_path_are_another_start(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = PretrainedPolicy(str(tmp_path)).key
    assert PretrainedPolicy(str(tmp_path)).key == before
    (tmp_path / "model.safetensors").write_bytes(b"three")
    assert PretrainedPolicy(str(tmp_path)).key != before
    assert PretrainedPolicy("owner/name").key["files"] == []
    assert PretrainedPolicy(str(tmp_path), precision="bf16").key != PretrainedPolicy(str(tmp_path)).key
