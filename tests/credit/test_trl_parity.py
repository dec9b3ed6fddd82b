"""The same batch through TRL's own trainer and through this package: advantages, losses and gradients agree to 1e-5.

Runs where the extra ``peers`` is installed. Offline: a tiny random Llama, completions and rewards that are given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import apportion.conf
from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.ops import normalize_then_sum, whiten
from apportion.grpo.forward import score_completions
from apportion.grpo.kl import corrected_kl, kl_estimate
from apportion.grpo.loss import aggregate
from apportion.grpo.policy import Policy
from apportion.grpo.surrogates import policy_term

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
CORRECT: list[float | None] = [1.0, 0.0, 0.0, 1.0, 0.25, None, 1.0, 0.5]
FORMAT: list[float | None] = [0.0, 1.0, 1.0, 1.0, None, None, 0.0, 1.0]
WEIGHTS = (1.0, 0.5)
LIMIT, GROUP = 8, 4


# --- TRL's side ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A saved model and tokenizer; TRL loads its reference from there."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **shape, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield folder


def nudge(model: Any, seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=draw))


@dataclass
class Peer:
    """A trainer of TRL's on the fixed completions, and what it made of them."""

    trainer: Any
    out: dict[str, Any]

    @property
    def policy(self) -> Policy:
        return Policy(self.trainer.model, self.trainer.processing_class, encode_words, eos_ids=(1,))


def encode_words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.fixture
def peer(model_folder: Path, tmp_path: Path) -> Callable[..., Peer]:
    """``peer(rewards, kind, **options)``: TRL's trainer of that kind, after it scored the completions."""

    def build(rewards: Sequence[Sequence[float | None]] = (CORRECT,), kind: str = "GRPO", **options: Any) -> Peer:
        import trl
        from datasets import Dataset
        from transformers import AutoTokenizer, LlamaForCausalLM

        config = getattr(trl, f"{kind}Config")(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(COMPLETIONS),
            num_generations=GROUP,
            num_iterations=2,  # else it takes the new log-probabilities for the old ones
            max_completion_length=LIMIT,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        model = LlamaForCausalLM.from_pretrained(model_folder)
        trainer = getattr(trl, f"{kind}Trainer")(
            model,
            [_function(f"f{i}", values) for i, values in enumerate(rewards)],
            config,
            Dataset.from_list([{"prompt": PROMPTS[0]}] * len(PROMPTS)),
            processing_class=tokenizer,
        )
        trainer._generate_single_turn = lambda *_: (COMPLETIONS, None) if kind == "GRPO" else COMPLETIONS
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        nudge(trainer.model, 1, 0.1)  # away from the reference
        return Peer(trainer, trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS]))

    return build


def _function(name: str, values: Sequence[float | None]) -> Callable[..., list[float | None]]:
    def reward(**_: Any) -> list[float | None]:
        return list(values)

    reward.__name__ = name
    return reward


# --- our side --------------------------------------------------------------------------------------------------------


def weighted(rewards: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """The sum over the functions that gave a score, or None where none did."""
    rows = zip(*rewards, strict=True)
    return [
        None if all(v is None for v in row) else sum(w * v for w, v in zip(weights, row, strict=True) if v is not None)
        for row in rows
    ]


def our_batch(rewards: Sequence[float | None], *, mask_truncated: bool = False) -> CreditBatch:
    rows = [
        Rollout(
            prompt_ids=encode_words(prompt),
            completion_ids=ids,
            logprobs=[0.0] * len(ids),
            offsets=[(0, 0)] * len(ids),
            text="",
            group_id=index // GROUP,
            truncated=ids[-1] != 1,
            reward=reward,
        )
        for index, (prompt, ids, reward) in enumerate(zip(PROMPTS, COMPLETIONS, rewards, strict=True))
    ]
    return collate(rows, mask_truncated=mask_truncated)


def preset(name: str, **changes: Any) -> Any:
    """The strategy of a file of conf/credit, with other options."""
    path = Path(apportion.conf.__file__).parent / "credit" / f"{name}.yaml"
    options = yaml.safe_load(path.read_text(encoding="utf-8")) | changes
    module, _, kind = options.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), kind)(**options)


def score(policy: Policy) -> Tensor:
    prompts = [encode_words(prompt) for prompt in PROMPTS]
    return score_completions(policy, prompts, COMPLETIONS, width=LIMIT).logprobs


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5)


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "strategy"),
    [
        ("group", preset("sequence/trl")),
        ("none", preset("sequence/dr_grpo")),
        ("batch", preset("sequence/lite_ppo", ddof=1, eps=1e-4)),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_grpo_advantages(peer: Callable[..., Peer], scale: str, strategy: Any, number: int) -> None:
    rewards, weights = (CORRECT, FORMAT)[:number], WEIGHTS[:number]
    theirs = peer(rewards, scale_rewards=scale, reward_weights=list(weights)).out["advantages"]
    ours = strategy(our_batch(weighted(rewards, weights))).advantages[:, 0]
    assert_equal(ours, theirs)
    assert theirs[5] == 0  # no function scored it
    assert theirs.count_nonzero() == 7


def test_advantages_of_functions_normalised_apart(peer: Callable[..., Peer]) -> None:
    rewards = (CORRECT, FORMAT)
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": list(WEIGHTS)}
    theirs = peer(rewards, **options).out["advantages"]
    batch = our_batch(weighted(rewards, WEIGHTS))
    table = torch.tensor([[float("nan") if v is None else v for v in row] for row in zip(*rewards)])
    z = normalize_then_sum(table, batch.group_ids, weights=torch.tensor(WEIGHTS), ddof=1, eps=1e-4)
    scored = batch.completion_mask & ~batch.outcome().isnan()[:, None]
    ours = whiten(z[:, None].expand(scored.shape), scored, over="sequence", ddof=1, eps=1e-4)[:, 0]
    assert_equal(ours, theirs)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_advantages(peer: Callable[..., Peer], beta: float) -> None:
    made = peer(kind="RLOO", beta=beta)
    batch = our_batch(CORRECT)
    if beta:
        with torch.no_grad():
            k1 = kl_estimate(score(made.policy), score(reference(made)), kind="k1").where(batch.completion_mask, 0.0)
        batch = batch.with_reward(batch.reward - beta * k1.double().sum(dim=1))
    assert_equal(preset("sequence/rloo")(batch).advantages[:, 0], made.out["advantages"])


def reference(made: Peer) -> Policy:
    return Policy(made.trainer.ref_model, made.trainer.processing_class, encode_words, eos_ids=(1,))


# --- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A loss of TRL's by its options, and how it is put together here."""

    theirs: Mapping[str, Any]
    mode: Any = "token-mean"
    ours: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    corrected: bool = False


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
BY_ROW = {"importance_sampling_level": "sequence"}
KL = {"beta": 0.04}
CASES = {
    "grpo": Case({"loss_type": "grpo", **CLIP}, "seq-mean-token-mean", WIDE),
    "dr_grpo": Case({"loss_type": "dr_grpo", **CLIP}, "seq-mean-token-sum-norm", WIDE),
    "dapo": Case({"loss_type": "dapo", **CLIP}, "token-mean", WIDE),
    "bnpo": Case({"loss_type": "bnpo", **CLIP}, "token-mean", WIDE),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.3},
        "token-mean",
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
        "seq-mean-token-mean",
        {"surrogate": "sapo", "tau_negative": 1.3},
    ),
    "vespo": Case({"loss_type": "vespo"}, "token-mean", {"surrogate": "vespo"}),
    "gspo": Case({"loss_type": "grpo", **BY_ROW, **CLIP}, "seq-mean-token-mean", {"surrogate": "gspo", **WIDE}),
    "luspo": Case({"loss_type": "luspo", **BY_ROW, **CLIP}, "seq-mean-token-sum", {"surrogate": "gspo", **WIDE}),
    "luspo by token": Case({"loss_type": "luspo", **CLIP}, "seq-mean-token-sum", WIDE),
    "delta over the clip": Case(
        {"loss_type": "dapo", "delta": 1.5, **CLIP}, "token-mean", {"surrogate": "delta-clip", "max_ratio": 1.5, **WIDE}
    ),
    "delta is the dual clip": Case(
        {"loss_type": "dapo", "delta": 1.5, **CLIP}, "token-mean", {"surrogate": "dual-clip", "max_ratio": 1.5, **WIDE}
    ),
    "delta under the clip": Case(
        {"loss_type": "dapo", "delta": 1.1, **CLIP}, "token-mean", {"surrogate": "delta-clip", "max_ratio": 1.1, **WIDE}
    ),
    "kl": Case({"loss_type": "grpo", **KL, "use_bias_correction_kl": False}, "seq-mean-token-mean", {}, 0.04),
    "corrected kl": Case({"loss_type": "grpo", **KL}, "seq-mean-token-mean", {}, 0.04, corrected=True),
    "corrected kl, cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.3, **KL},
        "token-mean",
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        0.04,
        corrected=True,
    ),
    "corrected kl, gspo": Case(
        {"loss_type": "grpo", **BY_ROW, **KL}, "seq-mean-token-mean", {"surrogate": "gspo"}, 0.04, corrected=True
    ),
}


def our_loss(made: Peer, batch: CreditBatch, advantages: Tensor, old: Tensor, case: Case) -> Tensor:
    logprobs, mask = score(made.policy), batch.completion_mask
    term = policy_term(logprobs, old, advantages, mask, **case.ours)
    loss = -term.gain
    if case.kl_coef:
        with torch.no_grad():
            ref = score(reference(made))
        kl = kl_estimate(logprobs, ref)
        loss = loss + case.kl_coef * (corrected_kl(kl, term.ratio) if case.corrected else kl)
    return aggregate(loss, mask, mode=case.mode, max_tokens=LIMIT)


def move(made: Peer) -> Tensor:
    """The old policy's log-probabilities, before it is moved away from the samples."""
    with torch.no_grad():
        old = score(made.policy)
    nudge(made.trainer.model, 2, 0.05)
    return old


def gradients(made: Peer, loss: Tensor) -> Tensor:
    parameters = [p for p in made.trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def assert_same_loss(made: Peer, batch: CreditBatch, advantages: Tensor, case: Case) -> None:
    old = move(made)
    theirs = made.trainer._compute_loss(made.trainer.model, made.out)
    ours = our_loss(made, batch, advantages, old, case)
    assert_equal(ours, theirs)
    assert_equal(gradients(made, ours), gradients(made, theirs))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(peer: Callable[..., Peer], name: str) -> None:
    case = CASES[name]
    batch = our_batch(CORRECT)
    assert_same_loss(peer(**case.theirs), batch, preset("sequence/trl")(batch).advantages, case)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "delta over the clip"])
def test_loss_and_gradient_with_credit_that_differs_by_token(peer: Callable[..., Peer], name: str) -> None:
    batch, made = our_batch(CORRECT), peer(**CASES[name].theirs)
    draw = torch.Generator().manual_seed(5)
    advantages = torch.randn(batch.completion_mask.shape, generator=draw).where(batch.completion_mask, 0.0)
    made.out["advantages"] = advantages
    assert_same_loss(made, batch, advantages, CASES[name])


def test_the_moved_policy_is_clipped_on_both_sides(peer: Callable[..., Peer]) -> None:
    """Else the comparisons above would not see the clip."""
    made, batch = peer(), our_batch(CORRECT)
    old = move(made)
    ratio = (score(made.policy).detach() - old).exp()[batch.completion_mask]
    assert ratio.min() < 0.8
    assert ratio.max() > 1.5


# --- where this package differs on purpose ---------------------------------------------------------------------------


def test_a_row_left_out_as_truncated_still_votes_in_trls_baseline(peer: Callable[..., Peer]) -> None:
    made = peer(mask_truncated_completions=True)
    assert not made.out["completion_mask"][3].any()
    left_out = our_batch(CORRECT, mask_truncated=True)
    ours, voting = (preset("sequence/trl")(b).advantages[:, 0] for b in (left_out, our_batch(CORRECT)))
    assert_equal(voting, made.out["advantages"])
    assert (ours - voting)[:3].abs().min() > 0.1
    assert_equal(ours[4:], voting[4:])


@pytest.mark.parametrize(("name", "share"), [("grpo", 7 / 8), ("dr_grpo", 7 / 8), ("sapo", 7 / 8), ("dapo", 1.0)])
def test_a_row_left_out_as_truncated_still_counts_in_trls_mean_over_rows(
    peer: Callable[..., Peer], name: str, share: float
) -> None:
    made, batch = peer(**CASES[name].theirs, mask_truncated_completions=True), our_batch(CORRECT, mask_truncated=True)
    old = move(made)
    theirs = made.trainer._compute_loss(made.trainer.model, made.out)
    advantages = made.out["advantages"][:, None].where(batch.completion_mask, 0.0)
    assert_equal(share * our_loss(made, batch, advantages, old, CASES[name]), theirs)


def test_trls_bnpo_is_a_mean_over_the_tokens_of_each_micro_batch(peer: Callable[..., Peer]) -> None:
    """Here a token weighs the same however the step is split."""
    made, batch = peer(**CASES["bnpo"].theirs), our_batch(CORRECT)
    advantages = preset("sequence/trl")(batch).advantages
    old = move(made)
    made.trainer.current_gradient_accumulation_steps = 2
    halves = [slice(0, 5), slice(5, 8)]
    per_row = {k for k, v in made.out.items() if v.ndim}
    theirs = sum(
        made.trainer._compute_loss(made.trainer.model, {k: v[h] if k in per_row else v for k, v in made.out.items()})
        for h in halves
    )
    term = policy_term(score(made.policy), old, advantages, batch.completion_mask, **CASES["bnpo"].ours)
    by_half = [aggregate(-term.gain[h], batch.completion_mask[h]) for h in halves]
    assert_equal(sum(by_half) / 2, theirs)
    assert abs(our_loss(made, batch, advantages, old, CASES["bnpo"]).item() - theirs.item()) > 1e-3
