"""Laws of training: the loss and its normaliser, one result whatever the batches, resuming, a learned task."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from apportion.prm.collate import collate_rows
from apportion.prm.fitting import has_checkpoint
from apportion.prm.model import StepModel
from apportion.prm.step_losses import ClassWeights, class_weights, step_losses
from apportion.prm.steps import StepExample
from apportion.prm.training import PrmTrainingConfig, PrmTrainingResult, train_prm
from apportion.verifiers import InputError

CHARACTERS = "0123456789+=\n?add"


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """Every training collects garbage first; what the libraries hold need not be searched each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def characters() -> Any:
    names = ["<pad>", "<unk>", *dict.fromkeys(CHARACTERS)]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")


def make_model(width: int = 16, seed: int = 0, dropout: float = 0.0, **options: Any) -> StepModel:
    tokenizer = characters()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = LlamaForCausalLM(config)
    return StepModel.from_backbone(backbone, tokenizer=tokenizer, **options)


def sums(number: int, seed: int = 0, steps: int = 5) -> list[StepExample]:
    """Lines ``a+b=c``, right or wrong by labels that say so."""
    draw, found = random.Random(seed), []
    for problem in range(number):
        lines, labels = [], []
        for _ in range(draw.randint(1, steps)):
            a, b = draw.randint(0, 4), draw.randint(0, 4)
            c = a + b if draw.random() < 0.6 else draw.randint(0, 8)
            lines.append(f"{a}+{b}={c}")
            labels.append(float(c == a + b))
        stops = [6 * line + 5 for line in range(len(lines))]
        found.append(
            StepExample("add", "\n".join(lines), tuple((s - 5, s) for s in stops), tuple(labels), f"{seed}-{problem}")
        )
    return found


def weights(model: StepModel) -> Tensor:
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


def train(model: StepModel, examples: list[StepExample], folder: Path, **options: Any) -> PrmTrainingResult:
    extra = {name: options.pop(name) for name in ("resume", "stop", "progress") if name in options}
    held_out = options.pop("held_out", [])
    config = PrmTrainingConfig(**{"cpu": True, "lr": 1e-3, "batch_rows": 4, **options})
    return train_prm(model, examples, held_out, config, folder, **extra)


def after(times: int) -> Callable[[], bool]:
    """Says yes when asked so often; the last update of a phase does not ask."""
    asked = count(1)
    return lambda: next(asked) >= times


# --- loss


def test_the_loss_is_the_cross_entropy_of_soft_labels() -> None:
    log_odds = torch.tensor([0.0, math.log(0.7 / 0.3)])
    assert step_losses(log_odds, torch.tensor([0.7, 0.7])).tolist() == pytest.approx([0.6931471806, 0.610864302])


def test_the_loss_is_that_over_two_classes_also_smoothed() -> None:
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 0, 0, 1, 1])
    for smoothing in (0.0, 0.2):
        two = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        one = step_losses(logits[:, 1] - logits[:, 0], labels.float(), label_smoothing=smoothing)
        assert one.tolist() == pytest.approx(two.tolist(), abs=1e-6)


def test_large_log_odds_have_a_finite_loss_and_gradient() -> None:
    log_odds = torch.tensor([1000.0, -1000.0], requires_grad=True)
    losses = step_losses(log_odds, torch.tensor([0.0, 1.0]))
    losses.sum().backward()
    assert losses.tolist() == [1000.0, 1000.0]
    assert log_odds.grad is not None
    assert log_odds.grad.tolist() == [1.0, -1.0]


def test_balanced_weights_give_both_classes_the_same_total() -> None:
    assert class_weights([1.0] * 95 + [0.0] * 5, "balanced") == ClassWeights(pytest.approx(0.5263157895), 10.0)
    soft = class_weights([0.75, 0.25, 0.5, 0.5, 1.0], "balanced")
    assert (soft.right * 3.0, soft.wrong * 2.0) == pytest.approx((2.5, 2.5))
    assert class_weights([1.0], 4.0) == ClassWeights(1.0, 4.0)
    assert class_weights([1.0], None) == ClassWeights(1.0, 1.0)
    with pytest.raises(InputError, match="one class only"):
        class_weights([1.0, 1.0], "balanced")


def test_weights_apply_to_their_class() -> None:
    found = step_losses(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), ClassWeights(0.5, 10.0))
    assert found.tolist() == pytest.approx([0.5 * math.log(2), 10 * math.log(2)])


# --- one result whatever the batches


def mean_loss_step(model: StepModel, examples: list[StepExample], lr: float) -> Tensor:
    """Weights after one step of AdamW on the mean over all labelled steps, in a plain loop over the examples."""
    model = copy.deepcopy(model)
    losses = []
    for example in examples:
        encoded = model.encode(example.prompt, example.completion, example.steps)
        known = [step for step, label in enumerate(example.labels) if label is not None]
        ends = torch.tensor([encoded.step_ends[step] for step in known], dtype=torch.long)
        log_odds = model(torch.tensor([encoded.input_ids]), None, torch.zeros_like(ends), ends)
        losses += list(step_losses(log_odds, torch.tensor([example.labels[step] or 0.0 for step in known])))
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=lr).step()
    return weights(model)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_rows": 12},
        {"batch_rows": 12, "parts": 1},
        {"batch_rows": 6, "accumulate": 2},
        {"batch_rows": 5, "accumulate": 3},
        {"batch_rows": None, "batch_tokens": 60, "batching": "length_grouped", "accumulate": 50},
        {"batch_rows": 3, "accumulate": 4, "activation_checkpointing": True},
    ],
)
def test_an_update_is_the_mean_over_all_its_labelled_steps(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [*sums(11, seed=3), StepExample("add", "1+1=2\n1+1=3", ((0, 5), (6, 11)), (None, 0.3), "soft")]
    model = make_model()
    wanted = mean_loss_step(model, examples, lr=0.5)
    plain_gradient(monkeypatch)
    result = train(model, examples, tmp_path, lr=0.5, schedule="constant", **options)
    assert result.updates == 1
    assert float((weights(model) - wanted).abs().max()) < 1e-6


def plain_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descend along the gradient itself: AdamW's first step would hide its size."""
    from transformers import Trainer

    monkeypatch.setattr(
        Trainer,
        "get_optimizer_cls_and_kwargs",
        staticmethod(lambda args, model=None: (torch.optim.SGD, {"lr": args.learning_rate})),
    )


def test_the_same_seed_gives_the_same_weights_and_another_one_others(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model = make_model(dropout=0.2)
        train(model, sums(20), tmp_path / name, seed=seed, dropout=True)
        found.append(weights(model))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_dropout_is_off_unless_asked_for_and_as_before_afterwards(tmp_path: Path) -> None:
    found = []
    for name, rate in {"none": 0.0, "off": 0.3, "on": 0.3}.items():
        model = make_model(dropout=rate)
        model.model.dropout.p = rate
        train(model, sums(8), tmp_path / name, dropout=name == "on")
        found.append(weights(model))
        assert [layer.self_attn.attention_dropout for layer in model.model.model.layers] == [rate, rate]
        assert model.model.dropout.p == rate
        assert not model.training
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_batch_without_labels_has_loss_zero_and_no_gradient() -> None:
    model = make_model()
    batch = collate_rows([])
    assert batch["parts"] == []
    log_odds = model(
        torch.tensor([[3, 4]]), None, torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)
    )
    loss = step_losses(log_odds, batch["labels"]).sum()
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


def test_what_teaches_nothing_is_counted_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    examples = sums(8)
    idle = StepExample("add", "1+1=2", ((0, 5),), (None,), "idle")
    too_long = StepExample("add" * 50, "1+1=2", ((0, 5),), (1.0,), "long")
    models = [make_model(), make_model()]
    train(models[0], examples, tmp_path / "a", max_length=60)
    assert not caplog.messages
    result = train(models[1], [*examples, idle, too_long], tmp_path / "b", max_length=60)
    assert caplog.messages[0].startswith("1 examples are too long, 1 steps of them dropped, first example 10 ['addadd")
    assert caplog.messages[1].startswith("2 examples left out")
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert (result.examples, result.unused_examples) == (8, 2)
    assert (result.steps, result.unlabelled_steps, result.dropped_steps) == (sum(len(e.steps) for e in examples), 1, 1)


# --- phases


def test_the_head_learns_alone_first(tmp_path: Path) -> None:
    model = make_model()
    before = {name: weight.clone() for name, weight in model.model.named_parameters()}
    result = train(model, sums(12), tmp_path, head_epochs=2, head_lr=1e-2, lr=0.0, log_every=1)
    changed = {name for name, weight in model.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {"score.weight", "score.bias"}
    assert [(figures["phase"], figures["update"]) for figures in result.history] == [
        *((0.0, update) for update in range(1, 7)),
        *((1.0, update) for update in range(1, 4)),
    ]
    assert result.updates == 9
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_model_without_a_head_of_its_own_has_no_head_phase(tmp_path: Path) -> None:
    model = make_model(settings={"style": "tokens", "tokens": ["+", "="]})
    with pytest.raises(InputError, match="set head_epochs=0"):
        train(model, sums(4), tmp_path, head_epochs=1)


def test_two_tokens_of_the_vocabulary_can_be_trained_as_well(tmp_path: Path) -> None:
    model = make_model(settings={"style": "tokens", "tokens": ["+", "="]})
    result = train(model, sums(40), tmp_path, lr=1e-2, epochs=4, log_every=1)
    losses = [figures["train/loss"] for figures in result.history]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert StepModel.from_pretrained(tmp_path / "model").token_ids == model.token_ids


# --- saving and going on


@pytest.mark.parametrize(("asked", "updates"), [(2, 2), (3, 4), (6, 7)])
def test_a_resumed_run_ends_with_the_weights_of_one_without_a_break(asked: int, updates: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "head_epochs": 1,
        "epochs": 2,
        "dropout": True,
        "accumulate": 2,
        "warmup": 0.2,
        "seed": 5,
        "log_every": 1,
        "batching": "length_grouped",
        "batch_rows": None,
        "batch_tokens": 150,
    }
    whole, broken = make_model(dropout=0.2), make_model(dropout=0.2)
    wanted = train(whole, sums(30), tmp_path / "whole", **options)
    first = train(broken, sums(30), tmp_path / "broken", stop=after(asked), **options)
    assert not first.finished
    assert first.path is None
    assert first.updates == updates
    fresh = make_model(dropout=0.2, seed=9)
    second = train(fresh, sums(30), tmp_path / "broken", resume=True, **options)
    assert second.finished
    assert torch.equal(weights(whole), weights(fresh))
    assert second.history[-1]["train/loss"] == wanted.history[-1]["train/loss"]


def test_a_checkpoint_and_the_end_are_folders_that_the_reward_model_reads(tmp_path: Path) -> None:
    model = make_model()
    result = train(model, sums(16), tmp_path, save_every=2, keep_checkpoints=2)
    assert result.path == tmp_path / "model"
    assert torch.equal(weights(StepModel.from_pretrained(result.path)), weights(model))
    folders = sorted(path.name for path in (tmp_path / "checkpoints" / "all").iterdir())
    assert folders == ["checkpoint-2", "checkpoint-4"]
    newest = StepModel.from_pretrained(tmp_path / "checkpoints" / "all" / "checkpoint-4")
    assert torch.equal(weights(newest), weights(model))


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "model.safetensors").write_bytes(b"half")
    assert not has_checkpoint(tmp_path)


def test_a_resumed_run_must_be_the_same_run(tmp_path: Path) -> None:
    train(make_model(), sums(12), tmp_path, stop=after(1))
    with pytest.raises(InputError, match=r"lr=0\.01: the run in .* had 0\.001; give that"):
        train(make_model(), sums(12), tmp_path, resume=True, lr=0.01)
    with pytest.raises(InputError, match=r"examples=13: the run in .* had 12"):
        train(make_model(), sums(13), tmp_path, resume=True)
    assert train(make_model(), sums(12), tmp_path, resume=True, log_every=1).finished


def test_a_run_that_begins_anew_leaves_no_older_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    train(make_model(), sums(16), tmp_path, save_every=4)
    stopped = train(make_model(seed=1), sums(16), tmp_path, stop=after(1))
    assert stopped.updates == 1
    resumed, whole = make_model(), make_model(seed=1)
    train(resumed, sums(16), tmp_path, resume=True)
    train(whole, sums(16), tmp_path / "whole")
    assert torch.equal(weights(resumed), weights(whole))


def test_a_disk_that_refuses_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: StepModel, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(StepModel, "save_pretrained", full)
    with pytest.raises(InputError, match=r"a checkpoint cannot be written or read \(\[Errno 28\] No space left"):
        train(make_model(), sums(8), tmp_path, save_every=1)


def test_half_precision_keeps_the_weights_whole_and_the_loss_close(tmp_path: Path) -> None:
    losses = []
    for name, half in (("whole", False), ("half", True)):
        model = make_model()
        result = train(model, sums(16), tmp_path / name, bf16=half, log_every=1, lr=1e-2)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        losses.append([figures["train/loss"] for figures in result.history])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


# --- reports and refusals


def test_progress_is_told_what_the_history_holds_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, float]] = []
    result = train(
        make_model(),
        sums(16),
        tmp_path,
        held_out=sums(6, seed=1),
        eval_every=2,
        log_every=1,
        save_every=2,
        progress=lambda figures: told.append(dict(figures)),
    )
    assert told == [dict(figures) for figures in result.history]
    trained = [figures for figures in told if "train/loss" in figures]
    assert [(figures["update"], figures["updates"], figures["epoch"]) for figures in trained] == [
        (1, 4, 0.25),
        (2, 4, 0.5),
        (3, 4, 0.75),
        (4, 4, 1.0),
    ]
    assert [figures["update"] for figures in told if "eval/loss" in figures] == [2, 4]
    last = [figures for figures in told if "eval/loss" in figures][-1]
    assert result.measures == {name: value for name, value in last.items() if name.startswith("eval/")}
    assert capfd.readouterr() == ("", "")


def test_held_out_figures_are_those_of_the_saved_model(tmp_path: Path) -> None:
    held_out = sums(7, seed=1)
    result = train(make_model(), sums(12), tmp_path, held_out=held_out)
    model = StepModel.from_pretrained(tmp_path / "model")
    losses: list[float] = []
    for example in held_out:
        encoded = model.encode(example.prompt, example.completion, example.steps)
        ends = torch.tensor(encoded.step_ends)
        log_odds = model(torch.tensor([encoded.input_ids]), None, torch.zeros_like(ends), ends).detach()
        losses += step_losses(log_odds, torch.tensor(example.labels)).tolist()
    assert result.measures["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_a_loss_that_is_no_number_stops_in_one_line(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.score.weight.fill_(math.nan)
    with pytest.raises(InputError, match=r"^the loss is nan in update 1; lower lr, or set warmup$"):
        train(model, sums(8), tmp_path)


def test_max_updates_ends_the_schedule(tmp_path: Path) -> None:
    result = train(make_model(), sums(40), tmp_path, max_updates=4, log_every=1)
    assert (result.updates, result.finished) == (4, True)
    assert [figures["optim/lr"] for figures in result.history] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no examples"):
        train(make_model(), [], tmp_path)
    with pytest.raises(InputError, match="of 4 examples none has a labelled step that fits"):
        train(make_model(), sums(4), tmp_path, max_length=3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batching": "packed"}, "batching='packed': give one of random, length_grouped"),
        ({"schedule": "step"}, "schedule='step': give one of linear, cosine, constant"),
        ({"epochs": 0}, "epochs=0: must be a whole number of at least 1"),
        ({"batch_rows": 0}, "batch_rows=0: must be a whole number of at least 1"),
        ({"batch_rows": None}, "give at least one of them"),
        ({"lr": math.nan}, "lr=nan: must be a finite number"),
        ({"warmup": 1.5}, "warmup=1.5: is a share"),
        ({"head_epochs": -1}, "head_epochs=-1"),
        ({"class_weight": "even"}, "class_weight='even': give balanced, a number over 0, or null"),
        ({"class_weight": 0}, "class_weight=0: give balanced"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        PrmTrainingConfig(**options)


def test_the_run_is_noted_beside_the_model(tmp_path: Path) -> None:
    train(make_model(), sums(8), tmp_path, class_weight="balanced", seed=7)
    noted = json.loads((tmp_path / "training.json").read_text())
    assert (noted["examples"], noted["seed"], noted["class_weight"]) == (8, 7, "balanced")


# --- adapters


def test_adapters_without_their_library_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match=r"lora: needs peft .* pip install 'apportion\[lora\]'"):
        train(make_model(), sums(4), tmp_path, lora={"r": 2})


def test_adapters_train_alone_with_the_head_resume_and_end_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options: dict[str, Any] = {"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}, "epochs": 2}
    model = make_model()
    before = {name: weight.clone() for name, weight in model.model.named_parameters()}
    train(model, sums(16), tmp_path / "whole", **options)
    after_training = dict(model.model.named_parameters())
    assert after_training.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after_training[name])}
    assert changed == {
        *(f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qv"),
        *("score.weight", "score.bias"),
    }
    train(make_model(), sums(16), tmp_path / "broken", stop=after(3), **options)
    resumed = make_model()
    train(resumed, sums(16), tmp_path / "broken", resume=True, **options)
    assert torch.equal(weights(resumed), weights(model))
    with pytest.raises(InputError, match="lora:"):
        train(make_model(), sums(4), tmp_path / "bad", lora={"rank": 2})


# --- a learned task


@pytest.mark.slow
def test_a_small_model_learns_to_find_wrong_sums(tmp_path: Path) -> None:
    model = make_model(width=48)
    result = train(
        model,
        sums(1500),
        tmp_path,
        held_out=sums(200, seed=1),
        epochs=8,
        lr=4e-3,
        batch_rows=32,
        schedule="cosine",
        warmup=0.1,
        class_weight="balanced",
    )
    assert result.measures["eval/error_f1"] >= 0.95
    assert result.measures["eval/roc_auc"] >= 0.98
