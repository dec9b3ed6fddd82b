"""Laws of the reward model: where its numbers come from, what its folder keeps, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2Model,
)

from apportion.prm.calibration import Isotonic, Platt
from apportion.prm.encoding import Encoded, Template, collate_steps, encode_steps
from apportion.prm.model import StepModel
from apportion.prm.settings import QWEN, TRL, StepSettings, segmenter_of, segmenter_record
from apportion.verifiers import InputError
from apportion.verifiers.segmenters import BlankLines, Lines, NumberedSteps

KINDS = ("llama", "gpt2")
TOKENS = {"style": "tokens", "tokens": ["+", "-"]}
ROWS = [Encoded((5, 9, 30, 31, 7), (1, 4), 2), Encoded((8, 40, 3), (2,), 1), Encoded((77, 78, 79, 80), (0, 1, 3), 3)]


def logits(model: StepModel, rows: list[Encoded]) -> torch.Tensor:
    batch = collate_steps(rows, model.tokenizer.pad_token_id)
    return model(batch.input_ids, batch.attention_mask, batch.step_rows, batch.step_positions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [1, 2])
def test_a_heads_log_odds_are_those_of_its_softmax(backbones: Any, tokenizers: Any, kind: str, labels: int) -> None:
    tokenizer = tokenizers()
    model = StepModel.from_backbone(backbones(kind, tokenizer), tokenizer=tokenizer, labels=labels)
    found, place = logits(model, ROWS).detach(), 0
    for row in ROWS:
        outputs = model.model(torch.tensor([row.input_ids])).logits[0].detach()
        for end in row.step_ends:
            right = outputs[end].softmax(-1)[1] if labels == 2 else outputs[end, 0].sigmoid()
            assert float(found[place].sigmoid()) == pytest.approx(float(right), abs=1e-6)
            place += 1
    assert place == len(found) == 6


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2, "final_logit_softcapping": 0.7}),
        ("cohere", {"num_key_value_heads": 2, "logit_scale": 0.3}),
        ("granite", {"num_key_value_heads": 2, "logits_scaling": 5.0}),
        ("phi", {"num_key_value_heads": 2}),  # an output layer with a bias
    ],
)
def test_two_tokens_log_odds_are_those_of_the_whole_vocabulary(
    backbones: Any, tokenizers: Any, kind: str, options: dict[str, Any]
) -> None:
    tokenizer = tokenizers()
    backbone = backbones(kind, tokenizer, **options)
    if getattr(backbone.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(backbone.get_output_embeddings().bias, generator=torch.Generator().manual_seed(0))
    model = StepModel.from_backbone(backbone, tokenizer=tokenizer, settings=TOKENS)
    right, wrong = (tokenizer.convert_tokens_to_ids(token) for token in "+-")
    found, place = logits(model, ROWS).detach(), 0
    for row in ROWS:
        outputs = backbone(torch.tensor([row.input_ids])).logits[0].detach()
        for end in row.step_ends:
            assert float(found[place]) == pytest.approx(float(outputs[end, right] - outputs[end, wrong]), abs=1e-5)
            place += 1


def test_logits_changed_in_an_unknown_way_are_refused(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    backbone = backbones(
        "falcon_h1", tokenizer, num_key_value_heads=2, lm_head_multiplier=0.25, mamba_n_heads=4, mamba_d_ssm=32,
        mamba_d_head=8, mamba_d_state=8, mamba_expand=1, head_dim=8,
    )  # fmt: skip
    with pytest.raises(InputError, match="changes its logits in a way not known here"):
        StepModel.from_backbone(backbone, tokenizer=tokenizer, settings=TOKENS)


def test_no_logits_of_the_whole_vocabulary_are_made(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    model = StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer, settings=TOKENS)
    seen = []
    model.model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(True))
    logits(model, ROWS)
    assert seen == []


def test_a_model_that_looks_ahead_is_refused(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    config = AutoConfig.for_model(
        "bert", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="BertForTokenClassification looks ahead"):
        StepModel.from_pretrained(tmp_path)


def test_log_odds_have_a_gradient_in_every_weight(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    for settings in ({}, TOKENS):
        model = StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer, settings=settings)
        logits(model, ROWS).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, TOKENS])
def test_rows_do_not_feel_each_other_nor_the_padding(
    backbones: Any, tokenizers: Any, kind: str, settings: dict[str, Any]
) -> None:
    tokenizer = tokenizers()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    model = StepModel.from_backbone(backbones(kind, tokenizer), tokenizer=tokenizer, settings=settings)
    rows = [*ROWS, Encoded((1, 5, 1), (0, 2), 2)]  # ends in the padding id
    together = logits(model, rows)
    alone = torch.cat([logits(model, [row]) for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)
    batch = collate_steps(rows, 4)
    unmasked = model.step_logits(batch.input_ids, None, batch.step_rows, batch.step_positions)
    assert torch.allclose(unmasked, alone, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_share_a_row_do_not_feel_each_other(backbones: Any, tokenizers: Any, kind: str) -> None:
    tokenizer = tokenizers()
    model = StepModel.from_backbone(backbones(kind, tokenizer), tokenizer=tokenizer)
    ids = torch.tensor([[i for row in ROWS for i in row.input_ids]])
    places = torch.cat([torch.arange(len(row.input_ids)) for row in ROWS])[None]
    starts = [0, 5, 8]
    ends = torch.tensor([start + end for start, row in zip(starts, ROWS) for end in row.step_ends])
    packed = model.step_logits(ids, None, torch.zeros_like(ends), ends, position_ids=places)
    assert torch.allclose(packed, logits(model, ROWS), atol=1e-5)


def test_a_new_head_depends_on_the_seed_alone(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    backbone = backbones("llama", tokenizer)
    backbone.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    heads = []
    for source, seed in ((backbone, 3), (tmp_path, 3), (str(tmp_path), 4)):
        torch.manual_seed(len(heads))
        before = torch.random.get_rng_state()
        model = StepModel.from_backbone(source, tokenizer=tokenizer, seed=seed)
        if source is backbone:
            assert torch.equal(torch.random.get_rng_state(), before)
        heads.append(model.model.score.weight.detach())
        assert not model.model.score.bias.any()
        assert torch.equal(model.model.base_model.embed_tokens.weight, backbone.base_model.embed_tokens.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert heads[0].std() == pytest.approx(0.02, rel=0.3)


def test_the_backbone_is_copied(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    for settings in ({}, TOKENS):
        backbone = backbones("llama", tokenizer)
        model = StepModel.from_backbone(backbone, tokenizer=tokenizer, settings=settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all(p.any() for p in backbone.parameters() if p.dim() > 1)
        assert backbone.config.architectures != ["LlamaForTokenClassification"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["head", "tokens"])
def test_a_folder_brings_everything_back(
    backbones: Any, tokenizers: Any, tmp_path: Path, kind: str, style: str
) -> None:
    tokenizer = tokenizers(chat=True)
    settings = {
        "style": style,
        "tokens": ["+", 17],
        "template": Template(prompt="chat", separator="", step_tag=" ки", pieces=True),
        "segmenter": NumberedSteps(mode="list"),
        "max_length": 99,
        "calibration": Isotonic((0.1, 0.7), (0.0, 0.9)),
    }
    model = StepModel.from_backbone(backbones(kind, tokenizer), tokenizer=tokenizer, settings=settings)
    model.save_pretrained(tmp_path)
    again = StepModel.from_pretrained(tmp_path)
    assert again.settings == model.settings
    assert segmenter_of(again.settings.segmenter) == NumberedSteps(mode="list")
    assert torch.equal(logits(again, ROWS), logits(model, ROWS))
    assert again.fingerprint == model.fingerprint
    assert again.max_length == 99
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.part"))
    kind_of = AutoModelForTokenClassification if style == "head" else AutoModelForCausalLM
    plain, found = kind_of.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]  # noqa: PT018
    if style == "head":
        assert plain.config.id2label == {0: "wrong", 1: "right"}


def test_settings_can_be_changed_on_loading(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer).save_pretrained(tmp_path)
    changes = {
        "max_length": 7,
        "template": {"separator": " "},
        "calibration": {"method": "platt", "slope": 1, "intercept": 0},
    }
    model = StepModel.from_pretrained(tmp_path, settings=changes, dtype="bfloat16")
    assert model.settings == StepSettings(max_length=7, template=Template(separator=" "), calibration=Platt(1.0, 0.0))
    assert model.model.dtype == torch.bfloat16


def test_an_old_trl_checkpoint_is_read_as_it_was_trained(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers(whole=True)
    torch.manual_seed(1)
    old = AutoModelForTokenClassification.from_config(backbones("llama", tokenizer).config)
    old.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = StepModel.from_pretrained(tmp_path)
    assert model.settings == TRL
    text = "12 + 7 = 19.\n19 * 3 = 57."
    steps = segmenter_of(TRL.segmenter)(text)
    encoded = model.encode("9?", text, steps)
    ids, ends = [tokenizer.bos_token_id, *tokenizer("9?")["input_ids"]], []
    for start, stop in steps:
        ids += tokenizer(text[start:stop])["input_ids"] + tokenizer("\n")["input_ids"]
        ends.append(len(ids) - 1)
    assert encoded == Encoded(tuple(ids), tuple(ends), 2)
    expected = old.eval()(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1]
    assert torch.allclose(logits(model, [encoded]).sigmoid(), expected, atol=1e-6)


def test_qwens_reward_model_has_a_head_of_two_layers(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers(chat=True)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=256, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    body = Qwen2Model(config).eval()
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    from safetensors.torch import save_file

    tensors = {f"model.{name}": tensor for name, tensor in body.state_dict().items()}
    save_file({**tensors, **{f"score.{n}": t for n, t in head.state_dict().items()}}, tmp_path / "model.safetensors")
    written = {**config.to_dict(), "architectures": ["Qwen2ForProcessRewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    tokenizer.save_pretrained(tmp_path)
    model = StepModel.from_pretrained(tmp_path)
    assert model.settings == QWEN
    text = "12 + 7 = 19.\n\nok."
    encoded = model.encode("9?", text, BlankLines()(text))
    assert tokenizer.decode(encoded.input_ids) == (
        "<bos>user: 9?<eos><bos>assistant: 12 + 7 = 19.<extra_0>ok.<extra_0>"
    )
    hidden = body(torch.tensor([encoded.input_ids])).last_hidden_state[0, list(encoded.step_ends)]
    assert torch.allclose(logits(model, [encoded]).sigmoid(), head(hidden).softmax(-1)[:, 1], atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(StepModel.from_pretrained(tmp_path / "again"), [encoded]), logits(model, [encoded]))


def test_a_bare_language_model_is_read_when_told_how(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    backbones("gpt2", tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no prm\.json and is a GPT2LMHeadModel; say how"):
        StepModel.from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"tensors have no weights, first classifier\.bias"):
        StepModel.from_pretrained(tmp_path, settings={"style": "head"})
    model = StepModel.from_pretrained(tmp_path, settings={"style": "tokens", "template": {"step_tag": " ки"}})
    assert model.token_ids == tuple(tokenizer.convert_tokens_to_ids(list("+-")))


def test_sampled_ids_are_read_where_the_tokenizers_are_the_same(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    text = "12 + 7"
    sampled = [i for character in text for i in tokenizer(character)["input_ids"]]
    facts = {"completion_ids": sampled, "prompt_ids": [9], "tokenizer": None}
    for form, head in (("raw", tokenizer("9?\n")["input_ids"]), ("policy", [9])):
        settings = {"template": {"prompt": form}}
        model = StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer, settings=settings)
        own = model.encode("9?", text, [(0, 6)], {**facts, "tokenizer": model.fingerprint})
        assert list(own.input_ids) == [*head, *sampled]
        by_text = encode_steps(tokenizer, "9?", text, [(0, 6)], template=Template(), max_length=None)
        for other in (facts, None, {"tokenizer": model.fingerprint}):
            assert model.encode("9?", text, [(0, 6)], other) == by_text


def test_the_length_is_limited_by_settings_positions_and_request(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    steps = [(place, place + 1) for place in range(300)]
    for limit, wanted in ((None, 64), (40, 40), (4000, 64)):
        model = StepModel.from_backbone(
            backbones("gpt2", tokenizer, n_positions=64), tokenizer=tokenizer, settings={"max_length": limit}
        )
        assert model.max_length == wanted
        assert len(model.encode("", "w" * 300, steps).input_ids) == wanted
        assert len(model.encode("", "w" * 300, steps, max_length=20).input_ids) == 20
    assert logits(model, [model.encode("", "w" * 300, steps)]).isfinite().all()


def test_ids_without_an_embedding_are_refused(backbones: Any, tokenizers: Any) -> None:
    tokenizer = tokenizers()
    model = StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer)
    facts = {"completion_ids": [len(tokenizer)], "offsets": [(0, 1)], "tokenizer": model.fingerprint}
    with pytest.raises(InputError, match=f"token id {len(tokenizer)} has no embedding"):
        model.encode("9?", "x", [(0, 1)], facts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "both"}, "style=both"),
        ({"tokens": ["+"]}, "tokens="),
        ({"tokens": "+-"}, "tokens=\\+-"),
        ({"style": "tokens", "tokens": ["+", "12 + 7"]}, "'12 \\+ 7' is no single token"),
        ({"max_length": 0}, "max_length=0"),
        ({"color": 1}, "color: is no setting"),
        ({"template": {"tag": "x"}}, "template.tag: is no setting"),
        ({"template": {"prompt": "x"}}, "template.prompt=x"),
        ({"segmenter": {"mode": "x"}}, "names no _target_"),
        ({"calibration": {"method": "x"}}, "calibration: method 'x'"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    backbones: Any, tokenizers: Any, settings: dict[str, Any], message: str
) -> None:
    tokenizer = tokenizers()
    with pytest.raises(InputError, match=message):
        StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer, settings=settings)


def test_a_folder_cannot_choose_what_is_run() -> None:
    record = {"_target_": "apportion.verifiers.isolated.Isolated", "target": "os.system"}
    for target in ("os.system", "apportion.verifiers.isolated.Isolated", "apportion.verifiers.segmenters.re"):
        with pytest.raises(InputError, match=f"cut by {target}; give segmenter._target_"):
            segmenter_of({**record, "_target_": target})
    with pytest.raises(InputError, match="cannot be made"):
        segmenter_of({"_target_": "apportion.verifiers.segmenters.Lines", "no": 1})
    with pytest.raises(InputError, match="does not say how its steps were cut"):
        segmenter_of(None)
    assert segmenter_of(json.loads(json.dumps(segmenter_record(Lines(lone_cr=True))))) == Lines(lone_cr=True)


def test_unreadable_folders_are_told_in_one_line(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    for path in (tmp_path / "none", "nowhere", tmp_path):
        with pytest.raises(InputError) as caught:
            StepModel.from_pretrained(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    StepModel.from_backbone(backbones("llama", tokenizer), tokenizer=tokenizer).save_pretrained(tmp_path)
    for text, message in (("{", "is no JSON"), ("[]", "holds no object"), ('{"style": "x"}', "style=x")):
        (tmp_path / "prm.json").write_text(text)
        with pytest.raises(InputError, match=message):
            StepModel.from_pretrained(tmp_path)
    (tmp_path / "prm.json").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be read as a reward model"):
        StepModel.from_pretrained(tmp_path)


def test_other_numbers_of_labels_are_refused(backbones: Any, tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    config = backbones("llama", tokenizer).config
    config.num_labels = 3
    model = AutoModelForTokenClassification.from_config(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has 3 labels"):
        StepModel.from_pretrained(tmp_path)
