"""The implicit reward model is what its formula says, and finds from outcomes alone which tokens made them."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from apportion.prm.data import load_steps
from apportion.prm.implicit import (
    ImplicitOptions,
    OutcomeRow,
    completion_logprobs,
    encode_outcomes,
    implicit_rewards,
    outcome_loss,
    outcomes,
    train_implicit,
)
from apportion.verifiers import InputError

torch.set_num_threads(1)

WORDS = ["<end>", *"0123456789", "+", "="]
END = 0


@pytest.fixture
def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **shape)).eval()


def one_by_one(model: Any, row: OutcomeRow) -> torch.Tensor:
    """Log-probabilities of an answer's tokens, each from a forward of its own."""
    found = []
    for place, token in enumerate(row.completion_ids):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids[:place]]])
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, -1].float().log_softmax(dim=0)[token])
    return torch.stack(found)


ROWS = [
    OutcomeRow((1, 2), (3, 4, 5, END), 1.0),
    OutcomeRow((6, 7, 8, 9), (1,), 0.0),
    OutcomeRow((5,), (9, 9, END), 0.25),
]


def test_the_loss_is_the_cross_entropy_of_the_summed_ratios() -> None:
    ratios = torch.tensor([[2.0, -1.0, 99.0], [4.0, 0.0, -1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss = outcome_loss(ratios, mask, torch.tensor([1.0, 0.25]), beta=0.5)
    first = -math.log(1 / (1 + math.exp(-0.5)))
    right = 1 / (1 + math.exp(-1.5))
    assert loss.tolist() == pytest.approx([first, -0.25 * math.log(right) - 0.75 * math.log(1 - right)])


def test_a_sum_beyond_all_floats_of_the_sigmoid_has_a_finite_loss() -> None:
    loss = outcome_loss(torch.tensor([[-3000.0]]), torch.tensor([[True]]), torch.tensor([1.0]), beta=1.0)
    assert loss.tolist() == [3000.0]


def test_the_slope_at_a_token_is_beta_times_probability_less_label() -> None:
    ratios = torch.tensor([[2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    outcome_loss(ratios, torch.tensor([[True, True]]), torch.tensor([0.0]), beta=0.5).sum().backward()
    assert ratios.grad.tolist()[0] == pytest.approx([0.5 / (1 + math.exp(-0.5))] * 2)


def test_padding_and_company_change_no_logprob(model: Any) -> None:
    together, mask = completion_logprobs(model, ROWS)
    assert mask.sum(dim=1).tolist() == [4, 1, 3]
    for row, own in zip(ROWS, together):
        alone = one_by_one(model, row)
        torch.testing.assert_close(own[: len(alone)], alone, atol=1e-6, rtol=1e-5)
        assert own[len(alone) :].eq(0).all()


def test_a_reward_is_beta_times_the_log_ratio(model: Any) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    for tokens in (1, 10_000):  # one row a forward, and all in one
        rewards = implicit_rewards(other, model, ROWS, beta=0.1, batch_tokens=tokens)
        for row, own in zip(ROWS, rewards):
            torch.testing.assert_close(own, 0.1 * (one_by_one(other, row) - one_by_one(model, row)), atol=1e-6, rtol=0)
    assert all(own.eq(0).all() for own in implicit_rewards(model, model, ROWS))


def test_one_step_is_the_step_of_a_slow_loop(model: Any) -> None:
    """Over single answers without padding, however the batch is cut."""
    slow, reference = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        for row in ROWS:
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            start = len(row.prompt_ids)
            logprobs = slow(input_ids=ids).logits[0, start - 1 : -1].log_softmax(dim=1)
            own = logprobs.gather(1, ids[0, start:, None])[:, 0]
            logit = 0.5 * (own - one_by_one(reference, row)).sum()
            loss = -row.label * logit.sigmoid().log() - (1 - row.label) * (-logit).sigmoid().log()
            (loss / 3).backward()
        torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.05)
        optimizer.step()
    for tokens in (1, 10_000):
        fast = copy.deepcopy(model)
        options = ImplicitOptions(beta=0.5, lr=1e-2, max_grad_norm=0.05, epochs=2, micro_batch_tokens=tokens)
        losses = train_implicit(fast, reference, ROWS, options)
        assert losses[0] == pytest.approx(math.log(2))
        for one, other in zip(fast.parameters(), slow.parameters()):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def planted(count: int, seed: int) -> list[OutcomeRow]:
    """Answers of five random digits: wrong where the digit 7 is among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        digits = (torch.randint(0, 10, (5,), generator=generator) + 1).tolist()
        rows.append(OutcomeRow((11, 12), (*digits, END), float(8 not in digits)))  # the token 8 is the digit 7
    return rows


def test_from_outcomes_alone_it_finds_the_token_that_made_them(model: Any) -> None:
    learner = copy.deepcopy(model)
    losses = train_implicit(learner, model, planted(1500, 0), ImplicitOptions(lr=3e-3, epochs=3, beta=0.5))
    assert losses[0] == pytest.approx(math.log(2))
    assert losses[-1] < 0.25
    fresh = planted(200, 1)
    rewards = implicit_rewards(learner, model, fresh, beta=0.5)
    agree = [(float(own.sum()) > 0) == (row.label == 1) for own, row in zip(rewards, fresh)]
    assert sum(agree) > 0.95 * len(fresh)
    places = [(own, row.completion_ids.index(8)) for own, row in zip(rewards, fresh) if row.label == 0]
    assert all(own[place] < -0.5 for own, place in places)
    assert all(own[:place].abs().max() < 0.5 for own, place in places if place)  # and nothing before it is blamed
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_order_comes_from_the_seed_alone(model: Any) -> None:
    def weights(seed: int) -> torch.Tensor:
        learner = copy.deepcopy(model)
        train_implicit(learner, model, planted(40, 0), ImplicitOptions(lr=1e-2, batch_rows=8, seed=seed))
        return torch.cat([parameter.detach().flatten() for parameter in learner.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_rows_are_read_with_their_labels_and_ids(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "1+2=", "completion": "4", "label": 0},
        {"prompt": [{"role": "user", "content": "1+3="}], "completion": "4", "label": 0.75},
        {"prompt": "1+4=", "completion": "5", "label": 1, "prompt_ids": [3, 3], "completion_ids": [9]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    examples = list(load_steps(file, outcomes))
    assert [example.labels for example in examples] == [(1.0,), (0.0,), (0.75,), (1.0,)]
    encoded = encode_outcomes(examples, tokenizer)
    assert encoded[:2] == [OutcomeRow((2, 11, 2, 12), (3, END), 1.0), OutcomeRow((2, 11, 3, 12), (5, END), 0.0)]
    assert encoded[2].prompt_ids == (2, 11, 4, 12)
    assert encoded[3] == OutcomeRow((3, 3), (9,), 1.0)
    assert encode_outcomes(examples[:1], tokenizer, encode=lambda text: [1, *map(int, text[::2])])[0].prompt_ids[0] == 1


def test_a_completion_that_spells_the_end_token_does_not_end_there(tokenizer: Any) -> None:
    example = outcomes({"prompt": "1", "completion": "2<end>3", "label": 1})
    ids = encode_outcomes(example, tokenizer)[0].completion_ids
    assert (ids.count(END), ids[-1]) == (1, END)


def test_saved_rollouts_are_read_by_their_reward() -> None:
    row = {"prompt": "1+1=", "completion": "2", "reward": 1.0, "problem_id": "p7", "completion_ids": None}
    example = outcomes(row, label="reward", problem_id="problem_id")[0]
    assert (example.problem_id, example.labels, dict(example.metadata)) == ("p7", (1.0,), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": None}, "column 'label' is null"),
        ({"label": 2}, "column 'label' is 2; known are true, false and 0 to 1"),
        ({"label": -0.1}, "column 'label' is -0.1"),
        ({"label": math.nan}, "column 'label' is nan"),
        ({"label": "yes"}, "column 'label' is 'yes'"),
        ({"completion": " \n"}, "the completion is empty"),
        ({"completion": ["2"]}, "completion is no text"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_a_bad_row_is_named_and_can_be_skipped(change: dict[str, Any], reason: str) -> None:
    good = {"prompt": "1+1=", "completion": "2", "label": 1}
    rows = [good, {**good, **change}]
    with pytest.raises(InputError) as caught:
        list(load_steps(rows, outcomes))
    assert "row 2" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    data = load_steps(rows, outcomes, on_bad_row="skip")
    assert len(list(data)) == 1
    assert data.report.skipped.total() == 1


def test_half_an_answer_has_no_outcome(tokenizer: Any) -> None:
    example = outcomes({"prompt": "1+1=", "completion": "22222", "label": 1})
    with pytest.raises(InputError, match="example 1: 10 tokens; raise max_length=9"):
        encode_outcomes(example, tokenizer, max_length=9)
    assert len(encode_outcomes(example, tokenizer, max_length=10)) == 1


def test_steps_are_no_outcomes(tokenizer: Any) -> None:
    steps = load_steps([{"prompt": "1", "completions": ["1", "2"], "labels": [1, 0]}])
    with pytest.raises(InputError, match="example 1: is no whole answer"):
        encode_outcomes(steps, tokenizer)


def test_what_cannot_be_trained_is_one_line(model: Any) -> None:
    with pytest.raises(InputError, match="no answer to train on"):
        train_implicit(model, model, [])
    with pytest.raises(InputError, match="lr=0: must be over 0"):
        ImplicitOptions(lr=0)
    with pytest.raises(InputError, match="epochs=0: must be at least 1"):
        ImplicitOptions(epochs=0)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[3, 0] = math.nan
    with pytest.raises(InputError, match="optimiser step 1: the gradient is not finite; lower lr=1e-06"):
        train_implicit(broken, model, ROWS)
