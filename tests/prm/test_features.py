"""Laws of the features of steps: the model's own states at the right tokens, whatever the batch, never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from apportion.prm.backbones import packaged_model
from apportion.prm.encoding import Template, tokenizer_fingerprint
from apportion.prm.features import FeatureSettings, FrozenBackbone
from apportion.prm.steps import StepExample
from apportion.verifiers import InputError
from apportion.verifiers.segmenters import BlankLines

TEXTS = ["12 + 7 = 19.\n\nThe cat sat.", "The mat.", "On the mat 3.\n\n19 * 3 = 57.\n\nAnswer: 57. ok"]


def example(text: str, prompt: str = "The cat?", **metadata: Any) -> StepExample:
    steps = tuple(BlankLines()(text))
    return StepExample(prompt, text, steps, (None,) * len(steps), "p", metadata)


EXAMPLES = [example(text) for text in TEXTS]


def word_pieces() -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["12 + 7 = 19. The cat sat on the mat 3 * 57 answer: ok?"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **named
    )


def make_encoder(kind: str, tokenizer: Any) -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    tokenizer = word_pieces()
    return make_encoder("bert", tokenizer), tokenizer


@pytest.fixture(scope="module")
def llama(tokenizers: Any, backbones: Any) -> tuple[Any, Any]:
    tokenizer = tokenizers(chat=True)
    return backbones("llama", tokenizer), tokenizer


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_a_causal_model_is_read_at_each_steps_last_token(kind: str, tokenizers: Any, backbones: Any) -> None:
    tokenizer = tokenizers()
    model = backbones(kind, tokenizer, **({"num_key_value_heads": 2} if kind == "qwen2" else {}))
    backbone = FrozenBackbone(model, tokenizer, FeatureSettings(layers=(0, 1, -1)))
    found = backbone.features(EXAMPLES)
    assert backbone.causal
    assert found.layers == (0, 1, 2)
    row = 0
    for one in EXAMPLES:
        for _, stop in one.steps:
            ids = tokenizer(f"{one.prompt}\n{one.completion[:stop]}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                hidden = model(ids, output_hidden_states=True).hidden_states
            np.testing.assert_allclose(found.states[row], torch.stack([h[0, -1] for h in hidden]), atol=1e-5)
            row += 1
    assert row == len(found.states)


@pytest.mark.parametrize("context", ["problem", "step"])
def test_an_encoder_averages_over_the_steps_own_tokens(context: Any, bert: tuple[Any, Any]) -> None:
    model, tokenizer = bert
    backbone = FrozenBackbone(model, tokenizer, FeatureSettings(layers=(2,), context=context))
    found = backbone.features(EXAMPLES)
    assert not backbone.causal
    texts = [(one.prompt, step) for one in EXAMPLES for step in one.step_texts]
    for state, (prompt, step) in zip(found.states[:, 0], texts, strict=True):
        inputs = tokenizer(*([prompt, step] if context == "problem" else [step]), return_tensors="pt")
        own = len(tokenizer(step, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[2][0]
        np.testing.assert_allclose(state, hidden[-1 - own : -1].mean(dim=0), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_is_one_whatever_layers_are_kept(kind: str) -> None:
    tokenizer = word_pieces()
    assert not FrozenBackbone(make_encoder(kind, tokenizer), tokenizer, FeatureSettings(layers=(0,))).causal


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "gpt2"])
def test_features_do_not_depend_on_the_batch(kind: str, tokenizers: Any, backbones: Any) -> None:
    encoder = kind in ("bert", "roberta")
    tokenizer = word_pieces() if encoder else tokenizers()
    model = make_encoder(kind, tokenizer) if encoder else backbones(kind, tokenizer)
    backbone = FrozenBackbone(model, tokenizer)
    whole = backbone.features(EXAMPLES).states
    scale = np.abs(whole).max()
    for tokens in (1, 30):
        np.testing.assert_allclose(backbone.features(EXAMPLES, batch_tokens=tokens).states, whole, atol=1e-5 * scale)
    alone = np.concatenate([backbone.features([one]).states for one in EXAMPLES])
    np.testing.assert_allclose(alone, whole, atol=1e-5 * scale)
    assert np.array_equal(backbone.features(EXAMPLES).states, whole)


def test_nothing_after_a_step_changes_its_features(llama: tuple[Any, Any], bert: tuple[Any, Any]) -> None:
    for model, tokenizer in (llama, bert):
        backbone = FrozenBackbone(model, tokenizer)
        long, short = (backbone.features([example(text)]).states for text in (TEXTS[2], TEXTS[2].split("\n\n")[0]))
        np.testing.assert_allclose(long[:1], short, atol=1e-5 * np.abs(long).max())


def test_steps_that_do_not_fit_have_no_features(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    whole = FrozenBackbone(model, tokenizer).features(EXAMPLES)
    length = len(tokenizer(f"The cat?\n{TEXTS[0]}")["input_ids"])
    found = FrozenBackbone(model, tokenizer, FeatureSettings(max_length=length - 1)).features(EXAMPLES)
    assert whole.known.all()
    assert found.known.tolist() == [True, False, True, True, False, False]
    np.testing.assert_allclose(found.states[found.known], whole.states[found.known], atol=1e-5)


def test_labelled_only_reads_up_to_the_last_label_and_the_places_stay(llama: Any, bert: Any) -> None:
    whole = [
        StepExample(one.prompt, one.completion, one.steps, labels, "p")
        for one, labels in zip(EXAMPLES, [(1.0, None), (None,), (None, 1.0, None)], strict=True)
    ]
    for model, tokenizer in (llama, bert):
        backbone = FrozenBackbone(model, tokenizer)
        every, some = backbone.features(whole), backbone.features(whole, labelled_only=True)
        assert some.known.tolist() == [True, False, False, True, True, False]
        np.testing.assert_allclose(some.states[some.known], every.states[some.known], atol=1e-5)
        assert np.array_equal(some.places, every.places)


def test_an_encoder_drops_the_problem_before_the_step(bert: tuple[Any, Any]) -> None:
    model, tokenizer = bert
    prompt, step = "cat mat sat", "12 + 7 = 19"
    own = len(tokenizer(step, add_special_tokens=False)["input_ids"])

    def states(prompt: str, step: str, limit: int | None, context: Any = "problem") -> Any:
        known = FeatureSettings(layers=(-1,), context=context, max_length=limit)
        return FrozenBackbone(model, tokenizer, known).features([example(step, prompt)]).states

    np.testing.assert_allclose(states(prompt, step, own + 3 + 1), states("sat", step, None), atol=1e-5)
    np.testing.assert_allclose(states(prompt, step, own + 3), states("", step, None), atol=1e-5)
    np.testing.assert_allclose(states(prompt, step, 3 + 3), states("", "12 + 7", None), atol=1e-5)
    np.testing.assert_allclose(states(prompt, step, 3 + 2, "step"), states("", "12 + 7", None, "step"), atol=1e-5)
    assert FrozenBackbone(model, tokenizer).features([example("ok " * 500)]).known.all()


def test_a_step_without_tokens_has_no_features(bert: tuple[Any, Any]) -> None:
    found = FrozenBackbone(*bert).features([example("The cat.\n\n\x00\x01\n\nThe mat.")])
    assert found.known.tolist() == [True, False, True]


def test_sampled_ids_are_read_as_they_are(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    backbone = FrozenBackbone(model, tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "Themat."]
    name = tokenizer_fingerprint(tokenizer)
    sampled = backbone.features([example("Themat.", completion_ids=ids, tokenizer=name)])
    other = backbone.features([example("Themat.", completion_ids=ids, tokenizer="another")])
    text = backbone.features([example("Themat.")])
    assert np.array_equal(other.states, text.states)
    prompt = tokenizer("The cat?\n")["input_ids"]
    with torch.no_grad():
        hidden = model(torch.tensor([[*prompt, *ids]]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(sampled.states[0], torch.stack([hidden[k][0, -1] for k in sampled.layers]), atol=1e-5)
    assert not np.allclose(sampled.states, text.states, atol=1e-3)


def test_the_cache_gives_what_was_computed_and_is_never_stale(llama: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = llama
    backbone = FrozenBackbone(model, tokenizer)
    first = backbone.features(EXAMPLES, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    np.save(file, first.states + 1)  # so that reading it shows
    again = FrozenBackbone(model, tokenizer).features(EXAMPLES, cache=tmp_path)
    assert np.array_equal(again.states, first.states + 1)
    others = [
        FrozenBackbone(model, tokenizer, FeatureSettings(layers=(1,))).features(EXAMPLES, cache=tmp_path),
        FrozenBackbone(model, tokenizer, FeatureSettings(template=Template("chat"))).features(EXAMPLES, cache=tmp_path),
        backbone.features(EXAMPLES[::-1], cache=tmp_path),
    ]
    with torch.no_grad():
        weight = next(model.parameters())
        weight[0, 0] += 1
        others.append(FrozenBackbone(model, tokenizer).features(EXAMPLES, cache=tmp_path))
        weight[0, 0] -= 1
    assert len(list(tmp_path.iterdir())) == 1 + len(others)
    assert np.array_equal(others[2].states[-2:], first.states[:2])


def test_places_are_those_of_the_baseline(llama: tuple[Any, Any]) -> None:
    found = FrozenBackbone(*llama).features([example("ab.\n\ncd")])
    assert found.places.round(6).tolist() == [
        [0, 0, 0, 1, 0, 2, 0, round(3 / 7, 6), round(np.log(3), 6)],
        [1, round(np.log(2), 6), 1, 0, 1, 2, round(5 / 7, 6), 1, round(np.log(2), 6)],
    ]


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=[]), max_size=30), max_size=3), prompt=st.text(max_size=9)
)
@settings(max_examples=25, deadline=None)
def test_any_text_is_read(bert: tuple[Any, Any], llama: tuple[Any, Any], texts: list[str], prompt: str) -> None:
    examples = [example(text, prompt) for text in texts]
    count = sum(len(one.steps) for one in examples)
    for model, tokenizer in (bert, llama):
        found = FrozenBackbone(model, tokenizer).features(examples)
        assert len(found.states) == len(found.places) == count
    assert found.known.all()


def test_a_saved_model_gives_the_features_and_digest_of_the_one_in_memory(llama: Any, tmp_path: Path) -> None:
    model, tokenizer = llama
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    memory, loaded = FrozenBackbone(model, tokenizer), FrozenBackbone.load(tmp_path, device="cpu")
    assert loaded.digest == memory.digest
    assert (loaded.source, memory.source) == (str(tmp_path), None)
    assert np.array_equal(loaded.features(EXAMPLES).states, memory.features(EXAMPLES).states)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers": (3,)}, "layers: 3 is none of the model's; give 0 to 2"),
        ({"layers": (-4,)}, "layers: -4 is none"),
        ({"layers": ()}, "give at least one layer"),
        ({"context": "all"}, "context=all: give one of problem, step"),
    ],
)
def test_wrong_settings_are_told(options: Any, told: str, llama: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match=told):
        FrozenBackbone(*llama, FeatureSettings(**options))


def test_a_package_that_is_not_there_is_told() -> None:
    with pytest.raises(InputError, match=r"in the package no-such-model-here; pip install"):
        packaged_model("no-such-model-here", "model")
