"""A row's text is its own: it depends on its prompt and its random numbers, on nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from apportion.experiments.policies import TinyPolicy
from apportion.grpo.forward import score_completions
from apportion.grpo.policy import ForwardCounter, Policy
from apportion.grpo.sampling import Generation, Interrupted, RolloutConfig, _invert, sample_groups
from apportion.grpo.seeds import named_seed, row_uniforms
from apportion.verifiers import InputError

Prompts = list[list[int]]
SEEDS = list(range(12))


def sample(policy: Policy, prompts: Prompts, seeds: list[int] = SEEDS, **options: Any) -> list[Generation]:
    options = {"group_size": len(seeds) // len(prompts), "max_new_tokens": 12, **options}
    return sample_groups(policy, prompts, seeds, **options)


def ids(generations: list[Generation]) -> list[list[int]]:
    return [generation.ids for generation in generations]


def test_a_row_does_not_depend_on_its_neighbours(policy: Policy, prompts: Prompts) -> None:
    together = sample(policy, prompts)
    alone = [sample(policy, [prompts[row // 4]], [seed], group_size=1)[0] for row, seed in enumerate(SEEDS)]
    backwards = sample(policy, prompts[::-1], SEEDS[::-1])[::-1]
    assert len({len(row) for row in ids(together)}) > 2  # they end at different steps
    assert ids(together) == ids(alone) == ids(backwards)
    for row, other in zip(together, alone):
        assert row.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_dropping_finished_rows_changes_nothing(policy: Policy, prompts: Prompts) -> None:
    never, often = sample(policy, prompts, compact_below=0.0), sample(policy, prompts, compact_below=1.0)
    assert ids(never) == ids(often)
    for row, other in zip(never, often):
        assert row.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_equal_seeds_give_equal_texts_and_others_do_not(policy: Policy, prompts: Prompts) -> None:
    assert sample(policy, prompts) == sample(policy, prompts)
    assert len({tuple(row) for row in ids(sample(policy, [prompts[0]]))}) == len(SEEDS)
    assert ids(sample(policy, [prompts[0]] * 3, [5] * 12)) == ids(sample(policy, [prompts[0]], [5])) * 12


def test_a_longer_limit_goes_on_from_the_same_beginning(policy: Policy, prompts: Prompts) -> None:
    short, long = sample(policy, prompts, max_new_tokens=3), sample(policy, prompts, max_new_tokens=20)
    assert any(row.truncated for row in short)
    for before, after in zip(short, long):
        assert after.ids[: len(before.ids)] == before.ids
        assert before.truncated == (len(after.ids) > 3)


def test_each_prompt_is_read_once_and_finished_rows_stop_costing(policy: Policy, prompts: Prompts) -> None:
    counter, shapes = ForwardCounter(), []
    handle = policy.model.register_forward_hook(
        lambda *call: shapes.append(tuple(call[2]["input_ids"].shape)), with_kwargs=True
    )
    with counter.counting(policy.model):
        rows = sample(policy, prompts, compact_below=1.0)
    handle.remove()
    longest = max(len(row.ids) for row in rows)
    assert shapes[0] == (3, max(map(len, prompts)))
    assert counter.take() == len(shapes) == longest  # the prompts, then one for each token but the last
    assert [shape[0] for shape in shapes[1:]] == [
        sum(len(row.ids) > step for row in rows) for step in range(1, longest)
    ]


def test_every_end_id_ends_a_row_is_kept_and_nothing_follows(policy: Policy, prompts: Prompts) -> None:
    ends = (policy.eos_ids[0], 5, 9)
    rows = sample(replace(policy, eos_ids=ends), prompts * 4, list(range(48)), max_new_tokens=20)
    finished = [row for row in rows if not row.truncated]
    assert {row.ids[-1] for row in finished} == set(ends)
    for row in rows:
        assert not set(row.ids[:-1]) & set(ends)
        assert len(row.logprobs) == len(row.ids) <= 20
        assert row.truncated == (row.ids[-1] not in ends)
        assert not row.truncated or len(row.ids) == 20


def test_an_end_token_at_the_limit_is_no_truncation(policy: Policy, prompts: Prompts) -> None:
    (row,) = sample(policy, prompts[:1], [1], max_new_tokens=40)
    length = len(row.ids)
    assert not row.truncated
    assert length > 1
    (exact,) = sample(policy, prompts[:1], [1], max_new_tokens=length)
    (cut,) = sample(policy, prompts[:1], [1], max_new_tokens=length - 1)
    assert (exact.ids, exact.truncated) == (row.ids, False)
    assert (cut.ids, cut.truncated) == (row.ids[:-1], True)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_kept_log_probabilities_are_those_of_one_forward(policy: Policy, prompts: Prompts, temperature: float) -> None:
    rows = sample(policy, prompts, temperature=temperature, top_k=7, top_p=0.9)
    read = [prompt for prompt in prompts for _ in range(4)]
    scored = score_completions(policy, read, ids(rows), width=12, temperature=temperature)
    for row, expected in zip(rows, scored.logprobs):
        assert row.logprobs == pytest.approx(expected[: len(row.ids)].tolist(), abs=1e-5)


def expected_distribution(policy: Policy, prompt: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    return (logits / temperature).softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_the_model_says(policy: Policy, prompts: Prompts, temperature: float) -> None:
    count = 20_000
    rows = sample(
        policy, prompts[:1], [named_seed(0, row) for row in range(count)], max_new_tokens=1, temperature=temperature
    )
    expected = expected_distribution(policy, prompts[0], temperature)
    seen = np.bincount([row.ids[0] for row in rows], minlength=len(expected))
    assert chisquare(seen, expected / expected.sum() * count).pvalue > 0.01


def test_the_second_token_follows_the_distribution_given_the_first(policy: Policy, prompts: Prompts) -> None:
    count = 20_000
    rows = sample(policy, prompts[:1], [named_seed(1, row) for row in range(count)], max_new_tokens=2)
    first = np.bincount([row.ids[0] for row in rows]).argmax()
    seconds = [row.ids[1] for row in rows if row.ids[0] == first and len(row.ids) > 1]
    expected = expected_distribution(policy, [*prompts[0], int(first)])
    seen = np.bincount(seconds, minlength=len(expected))
    assert chisquare(seen, expected / expected.sum() * len(seconds)).pvalue > 0.01


def test_top_k_and_top_p_draw_among_the_likeliest_in_proportion(policy: Policy, prompts: Prompts) -> None:
    count, expected = 20_000, expected_distribution(policy, prompts[0])
    order = (-expected).argsort()
    enough = int((expected[order].cumsum() < 0.6).sum()) + 1
    for options, kept in (({"top_k": 3}, 3), ({"top_p": 0.6}, enough)):
        seeds = [named_seed(2, row) for row in range(count)]
        rows = sample(policy, prompts[:1], seeds, max_new_tokens=1, **options)
        seen = np.bincount([row.ids[0] for row in rows], minlength=len(expected))[order]
        assert not seen[kept:].any()
        wanted = expected[order[:kept]]
        assert chisquare(seen[:kept], wanted / wanted.sum() * count).pvalue > 0.01


def test_a_uniform_of_zero_or_almost_one_never_picks_what_cannot_be(policy: Policy, monkeypatch: Any) -> None:
    def only(logits: torch.Tensor) -> torch.Tensor:
        kept = torch.tensor([6, 8])
        return torch.full_like(logits, -torch.inf).index_copy(-1, kept, logits[..., kept])

    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: only(logits))
    for point, token in ((0.0, 6), (1 - 2.0**-52, 8)):
        monkeypatch.setattr(
            "apportion.grpo.sampling.row_uniforms", lambda seeds, steps, p=point: np.full((len(seeds), steps), p)
        )
        assert ids(sample(policy, [[4, 5]], [0], max_new_tokens=3)) == [[token] * 3]


@pytest.mark.parametrize("size", [30, 700, 5000])
def test_the_drawn_id_is_the_first_whose_cumulative_weight_exceeds_the_point(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    weights = torch.rand(400, size, generator=draw) ** 8
    weights[:200, torch.randperm(size, generator=draw)[: size // 2]] = 0.0
    points = torch.rand(400, generator=draw, dtype=torch.float64)
    points[:4] = torch.tensor([0.0, 1 - 2.0**-52, 1e-300, 0.5], dtype=torch.float64)
    found = _invert(weights, points)
    sums = weights.double().numpy().cumsum(axis=1)
    wanted = [np.searchsorted(row, point * row[-1], side="right") for row, point in zip(sums, points.numpy())]
    assert found.tolist() == wanted
    assert (weights.gather(1, found[:, None]) > 0).all()
    assert _invert(weights[7:8], points[7:8]).tolist() == wanted[7:8]
    assert int(_invert(weights[:1] * torch.nan, points[:1]).max()) < size


def test_random_numbers_stay_under_one_by_enough() -> None:
    numbers = row_uniforms([1, 2], 50)
    assert 0 <= numbers.min() <= numbers.max() <= 1 - 2.0**-52
    totals = np.random.default_rng(0).uniform(0.5, 2, 1000)
    assert ((1 - 2.0**-52) * totals < totals).all()
    assert (row_uniforms([2], 20)[0] == numbers[1, :20]).all()


def test_greedy_is_what_transformers_generates(policy: Policy, prompts: Prompts) -> None:
    rows = sample(policy, prompts, [0] * 3, group_size=1, temperature=0, max_new_tokens=16)
    for prompt, row in zip(prompts, rows):
        wanted = policy.model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=policy.eos_ids[0],
        )
        assert row.ids == wanted[0, len(prompt) :].tolist()


def test_sampling_leaves_the_model_as_it_was_also_when_it_is_stopped(policy: Policy, prompts: Prompts) -> None:
    policy.model.train()
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        sample(policy, prompts, should_stop=lambda: next(asked))
    assert policy.model.training
    sample(policy, prompts)
    assert policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_no_prompts_no_rows_and_seeds_must_be_as_many_as_rows(policy: Policy, prompts: Prompts) -> None:
    assert sample_groups(policy, [], [], group_size=2, max_new_tokens=4) == []
    with pytest.raises(ValueError, match="11 row_seeds for 3 prompts x 4"):
        sample_groups(policy, prompts, SEEDS[:11], group_size=4, max_new_tokens=4)


def test_under_bf16_the_kept_log_probabilities_are_near_those_of_training(policy: Policy, prompts: Prompts) -> None:
    half = replace(policy, precision="bf16")
    rows = sample(half, prompts)
    read = [prompt for prompt in prompts for _ in range(4)]
    scored = score_completions(half, read, ids(rows), width=12)
    assert scored.logprobs.dtype == torch.float32
    for row, expected in zip(rows, scored.logprobs):
        assert row.logprobs == pytest.approx(expected[: len(row.ids)].tolist(), abs=0.1)
    assert ids(rows) == ids(sample(half, prompts, compact_below=0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "rollout.group_size=1: a group of one has nothing to compare with; use at least 2"),
        ({"prompts_per_step": 0}, "rollout.prompts_per_step=0: must be at least 1"),
        ({"max_new_tokens": 0}, "rollout.max_new_tokens=0: must be at least 1"),
        ({"temperature": 0.0}, "rollout.temperature=0.0: must be over 0"),
        ({"temperature": float("nan")}, "rollout.temperature=nan: must be over 0"),
        ({"truncated": "drop"}, "rollout.truncated='drop': must be keep or mask"),
        ({"top_p": 0.0}, "rollout.top_p=0.0"),
        ({"top_k": -1}, "rollout.top_k=-1"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        RolloutConfig(**options)
    assert message in str(caught.value)


def test_a_policy_of_sixteen_bits_samples() -> None:
    policy = TinyPolicy(hidden_size=16, layers=1, heads=2, intermediate_size=16).build()
    policy.model.to(torch.bfloat16)
    prompts = [policy.encode("7+9=?"), policy.encode("7+9-a=?")]  # of two lengths, so that there is a mask
    made = sample_groups(policy, prompts, [1, 2, 3, 4], group_size=2, max_new_tokens=4)
    assert all(len(one.ids) == len(one.logprobs) > 0 for one in made)
