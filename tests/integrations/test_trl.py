"""Laws of TRL's trainer with our credit: its own loss for uniform credit, and what was trained on in its logs.

Runs where the extra ``peers`` is installed. Offline: a tiny random Llama and completions that are given.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from apportion.credit import Credit, CreditBatch
from apportion.credit.blame_masks import WrongStepsOnly
from apportion.credit.localized import FirstError
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.panel import Panel

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (extra: peers)"),
]

WORDS = ("<pad>", "<eos>", "<unk>", *map(str, range(10)))
PROMPTS = ["1 2"] * 4 + ["7 3 5"] * 4
COMPLETIONS = [
    [3, 4, 5, 1],
    [6, 7, 1],
    [8, 9, 10, 11, 12, 1],
    [3, 3, 9, 9, 3, 4, 5, 6],  # ends at the limit, without an end token
    [5, 1],
    [7, 8, 9, 1],
    [12, 11, 10, 9, 8, 7, 1],
    [4, 6, 1],
]
LIMIT, GROUP = 8, 4
AS_TRL = Uniform(ddof=1, eps=1e-4)


@dataclass(frozen=True)
class ByIds:
    """The advantage of a token is a tenth of its id, so that it says which token it belongs to."""

    phase: ClassVar[str] = "rollout"
    conserves: ClassVar[str] = "none"
    requires: ClassVar[frozenset[str]] = frozenset({"reward", "completion_ids"})

    def __call__(self, batch: CreditBatch) -> Credit:
        assert batch.completion_ids is not None
        return Credit((batch.completion_ids / 10).where(batch.completion_mask, 0.0))


@dataclass(frozen=True)
class Streams:
    """Keeps the log-probabilities and entropies that it is shown."""

    seen: list[CreditBatch]
    requires: frozenset[str] = frozenset({"old_logprobs", "entropy", "ref_logprobs"})
    phase: ClassVar[str] = "rollout"
    conserves: ClassVar[str] = "none"

    def __call__(self, batch: CreditBatch) -> Credit:
        self.seen.append(batch)
        return Credit(torch.zeros(batch.completion_mask.shape), 0.5 * batch.completion_mask)


class Nines:
    """Right where the answer has no 9, unknown where it is a lone 2; every word is a step, wrong where it is a 9."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self.judge(sample.completion) for sample in samples]

    def judge(self, text: str) -> Verdict:
        places = [(at, char) for at, char in enumerate(text) if char != " "]
        spans = tuple(Span(at, at + 1, float(char != "9")) for at, char in places)
        return Verdict(None if text == "2" else float("9" not in text), spans)


class Length:
    """Words over ten."""

    spans: ClassVar[bool] = False

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [len(sample.completion.split()) / 10 for sample in samples]


PANEL = Panel({"nines": Nines(), "length": Length()}, {"nines": 1.0, "length": 0.5})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield folder


def save_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **shape, **ids)).save_pretrained(
        folder
    )


def configured(output: Path, **options: Any) -> Any:
    from trl import GRPOConfig

    fixed = {"num_generations": GROUP, "max_completion_length": LIMIT, "use_cpu": True, "bf16": False, "report_to": []}
    sized = {"per_device_train_batch_size": len(COMPLETIONS), "num_iterations": 2, "gradient_checkpointing": False}
    return GRPOConfig(output_dir=str(output), **(fixed | sized | options))


def prepared(trainer: Any) -> Any:
    """The trainer, which answers prompts in the order of COMPLETIONS, whatever it is asked."""
    trainer._generate_single_turn = lambda ids, *_: (COMPLETIONS[: len(ids)], None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def parts(folder: Path, config: Any) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM

    rows = [{"prompt": "1 2", "answer": "3", "level": 1}, {"prompt": "7 3 5", "answer": "4", "level": 2}] * 4
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    return {"model": model, "args": config, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}


@pytest.fixture
def ours(model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """``ours(strategy, **options)``: a trainer with our credit."""

    def build(strategy: Any = AS_TRL, panel: Panel = PANEL, **options: Any) -> Any:
        from apportion.integrations.trl import CreditGRPOTrainer

        given = parts(model_folder, configured(tmp_path, **options))
        return prepared(CreditGRPOTrainer(strategy=strategy, panel=panel, **given))

    return build


@pytest.fixture
def theirs(model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """``theirs(**options)``: TRL's own trainer on the same rewards."""

    def build(**options: Any) -> Any:
        from trl import GRPOTrainer

        def nines(completions: Sequence[str], **_: Any) -> list[float | None]:
            return [Nines().judge(text).score for text in completions]

        def length(completions: Sequence[str], **_: Any) -> list[float]:
            return [len(text.split()) / 10 for text in completions]

        config = configured(tmp_path, reward_weights=[1.0, 0.5], **options)
        return prepared(GRPOTrainer(reward_funcs=[nines, length], **parts(model_folder, config)))

    return build


def scored(trainer: Any) -> dict[str, Any]:
    return trainer._generate_and_score_completions([{"prompt": prompt, "answer": "3"} for prompt in PROMPTS])


def moved_loss(trainer: Any, out: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Loss and gradient once the policy has moved away from the samples, so that ratios are clipped."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    loss = trainer._compute_loss(trainer.model, out)
    gradient = torch.autograd.grad(loss, [p for p in trainer.model.parameters() if p.requires_grad])
    return loss, torch.cat([part.flatten() for part in gradient])


LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "kl": {"loss_type": "grpo", "beta": 0.04},
}


@pytest.mark.parametrize("name", LOSSES)
def test_uniform_credit_is_trls_own_loss_and_gradient(ours: Any, theirs: Any, name: str) -> None:
    mine, peer = ours(**LOSSES[name]), theirs(**LOSSES[name])
    out, other = scored(mine), scored(peer)
    mask = out["completion_mask"]
    torch.testing.assert_close(out["advantages"], other["advantages"][:, None] * mask, atol=1e-6, rtol=1e-6)
    (loss, gradient), (wanted, wanted_gradient) = moved_loss(mine, out), moved_loss(peer, other)
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-6, rtol=1e-6)
    assert wanted_gradient.abs().max() > 1e-3


def test_trls_reward_metrics_are_those_of_its_own_functions(ours: Any, theirs: Any) -> None:
    mine, peer = ours(), theirs()
    scored(mine), scored(peer)
    names = ["reward", "reward_std", "frac_reward_zero_std", "rewards/nines/mean", "rewards/length/std"]
    for name in names:
        assert mine._metrics["train"][name] == pytest.approx(peer._metrics["train"][name])


def test_credit_falls_on_the_tokens_of_wrong_steps_as_they_were_sampled(ours: Any) -> None:
    trainer = ours(WrongStepsOnly(steps="nines", penalty=2.0))
    out = scored(trainer)
    nines = out["completion_ids"] == WORDS.index("9")
    assert torch.equal(out["advantages"], torch.where(nines, -2.0, 0.0))
    assert nines.sum() == 2
    assert trainer._metrics["train"]["credit/nonzero_tokens"] == [2 / sum(map(len, COMPLETIONS))]


def test_verifiers_see_the_row_of_the_data_set(ours: Any) -> None:
    seen: list[Sample] = []

    def watching(samples: Sequence[Sample]) -> list[float]:
        seen.extend(samples)
        return [1.0] * len(samples)

    scored(ours(panel=Panel({"watching": watching}, {"watching": 1.0})))
    assert [sample.prompt for sample in seen] == PROMPTS
    assert (seen[0].reference, seen[0].completion) == ("3", "0 1 2")
    assert seen[0].metadata["offsets"] == [(0, 1), (1, 3), (3, 5), (5, 5)]
    assert seen[0].metadata["completion_ids"] == (3, 4, 5, 1)
    assert seen[0].metadata["prompt_ids"] == (4, 5)
    assert [sample.metadata["truncated"] for sample in seen] == [False] * 3 + [True] + [False] * 4


def test_an_answer_that_no_verifier_could_judge_has_no_part(ours: Any) -> None:
    out = scored(ours(panel=Panel({"nines": Nines()}, {"nines": 1.0})))
    assert COMPLETIONS[4] == [5, 1]  # a lone 2
    assert not out["advantages"][4].any()
    assert out["advantages"][6, 0] == pytest.approx(-1.1547, abs=1e-3)  # -(2/3) over the deviation of 1, 0, 1


def test_an_answer_left_out_as_cut_leaves_its_groups_baseline(ours: Any) -> None:
    out = scored(ours(panel=Panel({"length": Length()}, {"length": 1.0}), mask_truncated_completions=True))
    mean = (3 + 2 + 5) / 3
    deviation = (((3 - mean) ** 2 + (2 - mean) ** 2 + (5 - mean) ** 2) / 2) ** 0.5
    wanted = [(n - mean) / deviation for n in (3, 2, 5)]
    assert out["advantages"][:3, 0].tolist() == pytest.approx(wanted, abs=5e-3)
    assert not out["advantages"][3].any()


def test_the_signals_that_a_strategy_asks_for_are_trls_own(ours: Any) -> None:
    seen: list[CreditBatch] = []
    trainer = ours(Streams(seen), beta=0.1)
    out = scored(trainer)
    mask = out["completion_mask"].bool()
    for name, theirs in (("old_logprobs", "old_per_token_logps"), ("ref_logprobs", "ref_per_token_logps")):
        torch.testing.assert_close(getattr(seen[0], name)[mask], out[theirs][mask], atol=1e-6, rtol=0)
    assert seen[0].entropy is not None
    assert 0 < seen[0].entropy[mask].min() < seen[0].entropy[mask].max() <= torch.tensor(len(WORDS)).log() + 1e-5


def test_every_minibatch_has_the_advantages_of_its_own_rows(ours: Any, monkeypatch: Any) -> None:
    """Rows are shuffled, split over accumulation steps, and used twice."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = ours(ByIds(), **options)
    seen: list[Tensor] = []
    original = type(trainer)._compute_loss

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        wanted = inputs["completion_ids"] / 10 * inputs["completion_mask"]
        torch.testing.assert_close(inputs["advantages"], wanted)
        seen.append(inputs["completion_ids"])
        return original(self, model, inputs)

    monkeypatch.setattr(type(trainer), "_compute_loss", compute_loss)
    trainer.train()
    assert [len(ids) for ids in seen] == [4] * 6
    assert torch.equal(seen[0], seen[2])  # the second pass over the same answers
    assert not torch.equal(seen[0], seen[1])


def test_the_log_shows_what_was_trained_on(ours: Any, tmp_path: Path) -> None:
    import pyarrow.parquet

    trainer = ours(ByIds(), log_completions=True, logging_steps=1, max_steps=1, num_completions_to_print=0)
    trainer.train()
    (file,) = sorted((tmp_path / "completions").glob("*.parquet"))
    table = pyarrow.parquet.read_table(file).to_pylist()
    for row, ids in zip(table, COMPLETIONS):
        assert row["token_advantages"] == pytest.approx([id / 10 for id in ids])
        assert row["advantage"] == pytest.approx(sum(ids) / 10 / len(ids))
    logged = trainer.state.log_history[0]
    assert logged["credit/abs_mean"] == pytest.approx(sum(map(sum, COMPLETIONS)) / 10 / sum(map(len, COMPLETIONS)))
    assert logged["verifier/errors_nines"] == 0.0


def test_a_verifiers_fault_is_counted(ours: Any) -> None:
    def brittle(samples: Sequence[Sample]) -> list[Any]:
        return [ValueError("no") if sample.completion == "2" else 1.0 for sample in samples]

    trainer = ours(panel=Panel({"brittle": brittle}, {"brittle": 1.0}))
    scored(trainer)
    assert trainer._metrics["train"]["verifier/errors_brittle"] == [1.0]


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (WrongStepsOnly(steps="truth"), {}, "WrongStepsOnly needs spans:truth, which this trainer does not have"),
        (WrongStepsOnly(steps="length"), {}, "WrongStepsOnly needs spans:length"),
        (Streams([]), {}, "Streams needs ref_logprobs, which this trainer does not have; set beta"),
        (AS_TRL, {"scale_rewards": "none"}, "scale_rewards, multi_objective_aggregation: have no effect"),
        (
            FirstError(steps="nines"),
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
            "importance_sampling_level=sequence: averages the credit of FirstError",
        ),
    ],
)
def test_what_trl_cannot_give_or_would_undo_is_refused(
    ours: Any, strategy: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ours(strategy, **options)


def test_a_panel_without_a_reward_is_refused(ours: Any) -> None:
    with pytest.raises(InputError, match="WrongStepsOnly needs reward"):
        ours(WrongStepsOnly(steps="nines"), Panel({"nines": Nines()}, {}))


# --- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_on_two_processes_has_the_credit_of_one(ours: Any, tmp_path: Path) -> None:
    """One group of eight; each process has four of its answers, padded to a width of its own."""
    alone = scored(ours(FirstError(steps="nines"), num_generations=8))
    save_model(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    subprocess.run([*command, str(tmp_path)], check=True, capture_output=True, cwd=tmp_path)
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for rank, half in enumerate(halves):
        wanted = alone["advantages"][4 * rank : 4 * rank + 4]
        assert torch.equal(half, wanted[:, : half.shape[1]])
        assert not wanted[:, half.shape[1] :].any()
    assert halves[0].any()


def on_one_of_two(folder: Path) -> None:
    from apportion.integrations.trl import CreditGRPOTrainer

    config = configured(folder / "out", per_device_train_batch_size=4, num_generations=8)
    trainer = CreditGRPOTrainer(strategy=FirstError(steps="nines"), panel=PANEL, **parts(folder, config))
    rank = trainer.accelerator.process_index
    own = COMPLETIONS[4 * rank : 4 * rank + 4]
    trainer._generate_single_turn = lambda *_: (own, None)
    trainer.model.train()
    out = trainer._generate_and_score_completions([{"prompt": "1 2"}] * 4)
    torch.save(out["advantages"], folder / f"{rank}.pt")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    on_one_of_two(Path(sys.argv[1]))
