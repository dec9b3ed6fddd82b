"""Laws of the preference model: the Bradley-Terry loss, pairs kept together, what is read, saved and refused."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from apportion.prm.fit_config import FitConfig
from apportion.prm.preference_data import Preference, load_preferences
from apportion.prm.preferences import PreferenceResult, preference_losses, reward_backbone, train_reward_model
from apportion.prm.reward_model import RewardModel, encode_answer
from apportion.verifiers import InputError, Sample

CARDS = "0123456789"


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """Every training collects garbage first; what the libraries hold need not be searched each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_model(tokenizer: Any, kind: str = "llama", padding: int | None = 1) -> Any:
    shape = {
        "vocab_size": len(tokenizer),
        "num_labels": 1,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": padding,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "gpt2":
            rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return GPT2ForSequenceClassification(
                GPT2Config(n_embd=24, n_layer=1, n_head=2, n_positions=128, **rates, **shape)
            ).eval()
        config = LlamaConfig(hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, **shape)
        return LlamaForSequenceClassification(config).eval()


def pairs(number: int, seed: int = 0) -> list[Preference]:
    """The answer that names the higher card is preferred; answers are of many lengths."""
    draw, found = random.Random(seed), []
    for _ in range(number):
        low, high = sorted(draw.sample(CARDS, 2))
        chosen, rejected = (f"{'so ' * draw.randint(0, 6)}{card}" for card in (high, low))
        found.append(Preference("card?", chosen, rejected))
    return found


def train(model: Any, tokenizer: Any, some: list[Preference], folder: Path, **options: Any) -> PreferenceResult:
    names = ("resume", "stop", "layout", "progress")
    extra = {name: options.pop(name) for name in names if name in options}
    held_out = options.pop("held_out", [])
    config = FitConfig(**{"cpu": True, "lr": 1e-3, "batch_rows": 4, **options})
    return train_reward_model(model, tokenizer, some, held_out, config, folder, **extra)


def weights(model: Any) -> Tensor:
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


# --- loss


def test_the_loss_is_the_surprise_that_the_better_answer_wins() -> None:
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 200.0])
    losses = preference_losses(chosen, rejected, torch.zeros(3)).tolist()
    assert losses == pytest.approx([math.log1p(math.exp(-2)), math.log(2), 200.0])
    assert preference_losses(chosen[:1], rejected[:1], torch.tensor([2.0])).tolist() == pytest.approx([math.log(2)])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("padding", [1, None])
@pytest.mark.parametrize(
    "options", [{"batch_rows": 8}, {"batch_rows": 3, "accumulate": 3}, {"batch_rows": 8, "parts": 1}]
)
def test_an_update_is_the_mean_over_its_pairs(
    kind: str, padding: int | None, options: dict[str, Any], tokenizers: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    tokenizer, some = tokenizers(), [*pairs(7), Preference("card?", "9", "so 2", margin=0.5)]
    model = make_model(tokenizer, kind, padding)
    plain = copy.deepcopy(model)
    losses = []
    for pair in some:
        rewards = [
            plain(input_ids=torch.tensor([encode_answer(tokenizer, pair.prompt, answer).ids])).logits[0]
            for answer in (pair.chosen, pair.rejected)
        ]
        losses.append(preference_losses(*rewards, torch.tensor([pair.margin])))
    torch.cat(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    monkeypatch.setattr(
        "transformers.Trainer.get_optimizer_cls_and_kwargs",
        staticmethod(lambda args, model=None: (torch.optim.SGD, {"lr": args.learning_rate})),
    )
    result = train(model, tokenizer, some, tmp_path, lr=0.5, schedule="constant", **options)
    assert result.updates == 1
    assert float((weights(model) - weights(plain)).abs().max()) < 1e-6
    assert model.config.pad_token_id == padding


# --- training


def test_the_higher_card_is_learned_and_the_verifier_reads_the_folder(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    model, held_out = make_model(tokenizer), pairs(40, seed=1)
    result = train(model, tokenizer, pairs(200), tmp_path, held_out=held_out, epochs=4, lr=5e-3, batch_rows=16)
    assert result.path == tmp_path / "model"
    assert result.measures["eval/accuracy"] >= 0.95
    verdicts = [
        RewardModel(str(result.path))([Sample(pair.prompt, pair.chosen), Sample(pair.prompt, pair.rejected)])
        for pair in held_out
    ]
    differences = [better.score - worse.score for better, worse in verdicts]
    assert sum(difference > 0 for difference in differences) / 40 == result.measures["eval/accuracy"]
    assert sum(differences) / 40 == pytest.approx(result.measures["eval/margin"], abs=1e-4)


def test_a_resumed_run_ends_with_the_weights_of_one_without_a_break(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer, asked = tokenizers(), count(1)
    whole, broken = make_model(tokenizer), make_model(tokenizer)
    train(whole, tokenizer, pairs(14), tmp_path / "whole", epochs=2)
    first = train(broken, tokenizer, pairs(14), tmp_path / "broken", epochs=2, stop=lambda: next(asked) >= 3)
    assert (first.finished, first.path, first.updates) == (False, None, 3)
    resumed = make_model(tokenizer)
    assert train(resumed, tokenizer, pairs(14), tmp_path / "broken", epochs=2, resume=True).finished
    assert torch.equal(weights(resumed), weights(whole))


def test_a_language_model_gets_a_head_that_depends_on_the_seed_alone(
    backbones: Any, tokenizers: Any, tmp_path: Path
) -> None:
    tokenizer, backbone = tokenizers(), backbones("llama", tokenizers())
    backbone.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    heads = [reward_backbone(tmp_path, seed=seed)[0].score.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    model, _ = reward_backbone(tmp_path)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, backbone.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(InputError, match="cannot be read as a language model"):
        reward_backbone(tmp_path / "none")


def test_pairs_that_do_not_fit_are_counted(tokenizers: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    some = [*pairs(4), Preference("card?", "9", "so " * 60)]
    assert train(make_model(tokenizer), tokenizer, some, tmp_path, max_length=60).too_long == 1
    with pytest.raises(InputError, match="of 5 pairs none fits; raise max_length"):
        train(make_model(tokenizer), tokenizer, some, tmp_path / "none", max_length=2)


# --- data


def test_texts_and_messages_are_read_alike(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "card?"}
    answers = {"chosen": [{"role": "assistant", "content": "9"}], "rejected": [{"role": "assistant", "content": "2"}]}
    rows = [
        {"prompt": "card?", "chosen": "9", "rejected": "2", "margin": None},
        {"prompt": [turn], **answers},
        {name: [turn, *messages] for name, messages in answers.items()},
        {"prompt": "card?", "chosen": "9", "rejected": "2", "margin": 0.5},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Preference("card?", "9", "2")
    assert load_preferences(file) == [wanted, wanted, wanted, Preference("card?", "9", "2", 0.5)]
    assert load_preferences(file, limit=1) == [wanted]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "no column 'prompt'"),
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "column 'chosen' is null"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen is no text but 3"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "margin is -1, not a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin is 'big'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.nan}, "margin is nan"),
        ({"prompt": "\ud800", "chosen": "b", "rejected": "c"}, "half a surrogate pair"),
        ({"chosen": [{"role": "user", "content": "b"}], "rejected": [{"role": "user", "content": "c"}]}, "prompt"),
    ],
)
def test_bad_rows_stop_with_their_number_or_are_skipped(
    row: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(InputError, match=rf"row 2: .*{told}.*on_bad_row=skip"):
        load_preferences([good, row])
    assert load_preferences([good, row, good], on_bad_row="skip") == [Preference("a", "b", "c")] * 2
    assert "1 rows skipped, the first:" in caplog.text
    with pytest.raises(InputError, match="no pair to use"):
        load_preferences([row], on_bad_row="skip")
