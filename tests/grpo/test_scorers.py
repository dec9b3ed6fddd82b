"""Scores of tokens agree with a slow count, one answer at a time, and leave the policy as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.redistribution import RewardDifference
from apportion.grpo.influence import CounterfactualSpans, GradientInfluence, PerturbationInfluence, answer_tokens
from apportion.grpo.policy import Policy
from apportion.grpo.reward_model import RewardModelScorer
from apportion.grpo.scorers import LastTokenAttention, LogRatio, TokenScorer
from apportion.verifiers import InputError, Span, Verdict

ENDED = (7, 8, 9, 10, 11, 12)


def rollout(ids: Sequence[int], prompt: Sequence[int] = (4, 5), answer: tuple[int, int] | None = (4, 5)) -> Rollout:
    """One character a token; steps of two tokens, and the answer's place."""
    steps = tuple(Span(at, min(at + 2, len(ids)), 1.0) for at in range(0, len(ids), 2))
    located = () if answer is None else (Span(0, 1), Span(*answer))
    verdicts = {"steps": Verdict(1.0, steps), "answer": Verdict(1.0, located)}
    offsets = [(at, at + 1) for at in range(len(ids))]
    return Rollout(list(prompt), list(ids), [-0.5] * len(ids), offsets, "x" * len(ids), 0, verdicts=verdicts)


def three(policy: Policy) -> list[Rollout]:
    """Two answers of other lengths and prompts, and one without a place, which ends with an end token."""
    end = policy.eos_ids[0]
    return [rollout(ENDED), rollout(ENDED[:5], prompt=(4, 5, 6, 7)), rollout([9, 8, 7, end], (6,), answer=None)]


SCORERS: list[TokenScorer] = [
    LastTokenAttention(),
    GradientInfluence(),
    PerturbationInfluence(),
    CounterfactualSpans(),
]
every_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)


@every_scorer
def test_a_score_depends_on_its_own_answer_alone(policy: Policy, scorer: Any) -> None:
    rows = three(policy)
    batch = collate(rows, seed=5)
    together = scorer(policy, rows, batch)
    assert together.shape == batch.completion_mask.shape
    assert together.dtype == torch.float32
    assert together[~batch.completion_mask].eq(0).all()
    small = replace(scorer, rows=1)(policy, rows, batch)
    torch.testing.assert_close(small, together, rtol=1e-3, atol=1e-7)
    assert all(row.ne(0).any() for row in together)


@every_scorer
def test_the_policy_stays_as_it_was(policy: Policy, scorer: Any) -> None:
    rows = three(policy)
    policy.model.train()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    state = torch.random.get_rng_state()
    first = scorer(policy, rows, collate(rows))
    assert torch.equal(first, scorer(policy, rows, collate(rows)))
    assert policy.model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert policy.model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())


@every_scorer
def test_rows_left_out_of_training_cost_nothing(policy: Policy, scorer: Any) -> None:
    rows = [replace(row, truncated=True) for row in three(policy)]
    calls: list[int] = []
    handle = policy.model.register_forward_hook(lambda *_: calls.append(1))
    assert scorer(policy, rows, collate(rows, mask_truncated=True)).eq(0).all()
    handle.remove()
    assert not calls


def test_attention_is_the_last_tokens_averaged_over_the_heads(new_policy: Any) -> None:
    policy = new_policy(layers=2)
    rows = three(policy)
    for layer in (0, -1):
        scores = LastTokenAttention(layer=layer)(policy, rows, collate(rows))
        policy.model.set_attn_implementation("eager")
        for row, one in enumerate(rows):
            ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
            with torch.no_grad():
                weights = policy.model(input_ids=ids, output_attentions=True).attentions[layer]
            assert float(weights[0, :, -1].sum()) == pytest.approx(2.0)
            expected = weights[0, :, -1, len(one.prompt_ids) :].mean(dim=0)
            torch.testing.assert_close(scores[row, : len(one.completion_ids)], expected)
        policy.model.set_attn_implementation("sdpa")


def test_the_log_ratio_and_its_sum(policy: Policy) -> None:
    rows = [rollout([7, 8, 9])]
    batch = replace(collate(rows), ref_logprobs=torch.tensor([[-0.75, -0.25, -1.5]]))
    torch.testing.assert_close(LogRatio()(policy, rows, batch), torch.tensor([[0.25, -0.25, 1.0]]))
    levels = LogRatio(scale=2.0, cumulative=True)(policy, rows, batch)
    torch.testing.assert_close(levels, torch.tensor([[0.5, 0.0, 2.0]]))
    with pytest.raises(InputError, match="reads ref_logprobs"):
        LogRatio()(policy, rows, collate(rows))


def test_the_answer_is_the_last_located_span_else_the_last_token_before_the_end(policy: Policy) -> None:
    rows = three(policy)
    batch = collate(rows)
    places = answer_tokens(batch, "answer", policy.eos_ids).nonzero().tolist()
    assert places == [[0, 4], [1, 4], [2, 2]]
    places = answer_tokens(batch, "nobody", policy.eos_ids).nonzero().tolist()
    assert places == [[0, 5], [1, 4], [2, 2]]


def log_probabilities(policy: Policy, ids: Sequence[int], **facts: Any) -> torch.Tensor:
    """(L, V) of one text."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([list(ids)]), use_cache=False, **facts).logits[0]
    return logits.float().log_softmax(dim=1)


def test_perturbation_is_the_divergence_of_the_answer(policy: Policy) -> None:
    rows = [rollout(ENDED, answer=(3, 5))]
    scores = PerturbationInfluence(blank=6)(policy, rows, collate(rows))[0]
    ids, predicting = [4, 5, *ENDED], [4, 5]  # the answer's tokens stand at 5 and 6
    clean = log_probabilities(policy, ids)[predicting]
    for token in range(3):
        changed = [*ids[: 2 + token], 6, *ids[3 + token :]]
        other = log_probabilities(policy, changed)[predicting]
        assert float(scores[token]) == pytest.approx(float((clean.exp() * (clean - other)).sum()), rel=1e-4)
    assert scores[3] == scores[4] == scores.max()  # the answer itself
    assert scores[5] == 0  # what follows it


def test_a_token_that_is_blank_already_has_no_influence(policy: Policy) -> None:
    rows = [rollout(ENDED)]
    scores = PerturbationInfluence(blank=ENDED[1])(policy, rows, collate(rows))[0]
    assert float(scores[1]) == pytest.approx(0.0, abs=1e-6)
    assert scores[0] > 1e-6


def test_gradient_influence_is_the_change_of_the_divergence_along_the_embedding(policy: Policy) -> None:
    """Against finite differences in float64, with the noise as the scorer drew it."""
    policy.model.double()
    rows, noise = [rollout(ENDED)], 0.1
    seen: list[torch.Tensor] = []
    handle = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            seen.append(kwargs["inputs_embeds"].detach().clone()) if "inputs_embeds" in kwargs else None
        ),
        with_kwargs=True,
    )
    scores = GradientInfluence(noise=noise)(policy, rows, collate(rows))[0]
    handle.remove()
    ids = torch.tensor([[4, 5, *ENDED]])
    embedding = policy.model.get_input_embeddings()(ids).detach()
    (noisy,) = seen
    assert float((noisy - embedding).std()) == pytest.approx(noise, rel=0.2)

    def divergence(inputs: torch.Tensor) -> float:
        with torch.no_grad():
            clean = policy.model(input_ids=ids).logits[0, 5].log_softmax(dim=0)
            other = policy.model(inputs_embeds=inputs).logits[0, 5].log_softmax(dim=0)
        return float((clean.exp() * (clean - other)).sum())

    for token in range(4):
        step = torch.zeros_like(noisy)
        step[0, 2 + token] = 1e-4 * embedding[0, 2 + token]
        slope = (divergence(noisy + step) - divergence(noisy - step)) / 2e-4
        assert float(scores[token]) == pytest.approx(abs(slope), rel=0.02, abs=1e-6)
    assert scores[4] == scores.max()
    assert scores[5] == 0


def test_the_noise_comes_from_the_batchs_seed(policy: Policy) -> None:
    rows = [rollout(ENDED)]
    one, same, other = (GradientInfluence()(policy, rows, collate(rows, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_step_out_of_sight_costs_the_answer_its_likelihood(policy: Policy) -> None:
    rows = [rollout(ENDED)]
    scores = CounterfactualSpans()(policy, rows, collate(rows))[0]
    ids, answer = [4, 5, *ENDED], 6
    clean = float(log_probabilities(policy, ids)[answer - 1, ids[answer]])
    for step in range(2):
        mask = torch.ones(1, len(ids), dtype=torch.long)
        mask[0, 2 + 2 * step : 4 + 2 * step] = 0
        place = torch.arange(len(ids))[None]
        other = log_probabilities(policy, ids, attention_mask=mask, position_ids=place)
        drop = clean - float(other[answer - 1, ids[answer]])
        assert scores[2 * step : 2 * step + 2].tolist() == pytest.approx([drop, drop], rel=1e-3, abs=1e-6)
    assert scores[4] == max(float(scores[:4].max()), 0.0)
    assert scores[5] == 0


def test_of_the_answers_own_step_only_what_precedes_it_is_hidden(policy: Policy) -> None:
    rows = [rollout(ENDED, answer=(3, 4))]
    scores = CounterfactualSpans()(policy, rows, collate(rows))[0]
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, 4] = 0  # the first token of the second step
    ids = [4, 5, *ENDED]
    other = log_probabilities(policy, ids, attention_mask=mask, position_ids=torch.arange(8)[None])[4, ids[5]]
    drop = float(log_probabilities(policy, ids)[4, ids[5]] - other)
    assert float(scores[2]) == pytest.approx(drop, rel=1e-3, abs=1e-6)
    assert scores[4:].eq(0).all()


@pytest.fixture
def reward_model(policy: Policy, tmp_path: Path) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(policy.tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.5,
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    return model


def test_every_beginning_is_scored_as_the_model_scores_it_alone(
    policy: Policy, reward_model: Any, tmp_path: Path
) -> None:
    rows = three(policy)
    batch = collate(rows)
    scores = RewardModelScorer(str(tmp_path), rows=2)(policy, rows, batch)

    def alone(ids: Sequence[int]) -> float:
        with torch.no_grad():
            return float(reward_model(input_ids=torch.tensor([list(ids)])).logits[0, 0])

    for row, one in enumerate(rows):
        for token in range(len(one.completion_ids)):
            expected = alone([*one.prompt_ids, *one.completion_ids[: token + 1]]) - alone(one.prompt_ids)
            assert float(scores[row, token]) == pytest.approx(expected, abs=1e-4)
    scored: CreditBatch = replace(batch, reward=torch.zeros(3).double(), token_scores={"reward_model": scores})
    assert RewardDifference()(scored).advantages.ne(0).any()


def test_models_that_cannot_score_beginnings_are_refused(policy: Policy, reward_model: Any, tmp_path: Path) -> None:
    rows = [rollout(ENDED)]
    with pytest.raises(InputError, match="cannot be read as a reward model"):
        RewardModelScorer(str(tmp_path / "nothing"))(policy, rows, collate(rows))
    from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification

    config = reward_model.config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "two")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    bert = BertForSequenceClassification(BertConfig(vocab_size=config.vocab_size, num_labels=1, **shape))
    bert.save_pretrained(tmp_path / "bert")
    for name in ("two", "bert"):
        policy.tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(InputError, match="one label and a head called score"):
            RewardModelScorer(str(tmp_path / name))(policy, rows, collate(rows))


def test_a_model_that_looks_ahead_is_refused(
    policy: Policy, reward_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apportion.grpo import reward_model as module

    def backwards(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[float(sum(row))] * len(row) for row in sequences])

    monkeypatch.setattr(module, "_levels", backwards)
    rows = [rollout(ENDED)]
    with pytest.raises(InputError, match="looks ahead"):
        RewardModelScorer(str(tmp_path))(policy, rows, collate(rows))


def test_another_vocabulary_is_refused(policy: Policy, reward_model: Any, tmp_path: Path) -> None:
    other = replace(policy, tokenizer=type("Other", (), {"get_vocab": lambda self: {"a": 0}})())
    rows = [rollout(ENDED)]
    with pytest.raises(InputError, match="vocabulary is not the policy's"):
        RewardModelScorer(str(tmp_path))(other, rows, collate(rows))


@every_scorer
def test_bad_options_are_refused(scorer: Any) -> None:
    with pytest.raises(InputError, match="the scorer's rows=0: must be at least 1"):
        replace(scorer, rows=0)
    with pytest.raises(InputError, match="the scorer's noise=0"):
        GradientInfluence(noise=0)
