"""What a segment changed in the chance of success; segments sum to the reward less the value of the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.batch import PrefixValues
from apportion.credit.resampled import ResampledCutpoints, ResampledSteps
from apportion.verifiers import InputError

NAN = float("nan")
THREE = [(0, 2, 1.0), (2, 3, 1.0), (3, 5, 1.0)]
MakeBatch = Callable[..., CreditBatch]


def valued(batch: CreditBatch, name: str, value: list[list[float]], count: int = 9) -> CreditBatch:
    values = torch.tensor(value, dtype=torch.float64)
    known = ~values.isnan()
    table = PrefixValues(values, count * known.long(), (values * (1 - values)).where(known, 0.0))
    return replace(batch, prefix_values={**batch.prefix_values, name: table})


def advantages(strategy: ResampledSteps | ResampledCutpoints, batch: CreditBatch) -> list[list[float]]:
    return [pytest.approx(row, abs=1e-6) for row in assign_credit(strategy, batch).advantages.tolist()]


def test_the_golden_numbers(batch: MakeBatch) -> None:
    made = valued(batch({"tokens": 5, "reward": 0.0, "spans": THREE}), "steps", [[0.5, 0.75, 0.25, NAN]])
    assert advantages(ResampledSteps(), made) == [[0.25, 0.25, -0.5, -0.25, -0.25]]


def test_the_steps_of_an_answer_sum_to_its_reward_less_the_prompts_value(batch: MakeBatch) -> None:
    rows = [{"tokens": 5, "reward": r, "spans": THREE} for r in (0.0, 1.0)]
    made = valued(batch(*rows), "steps", [[0.4, 0.9, 0.3, NAN], [0.4, 0.1, 0.6, NAN]])
    credit = assign_credit(ResampledSteps(), made).advantages
    per_step = credit[:, [0, 2, 3]].sum(dim=1)
    torch.testing.assert_close(per_step, torch.tensor([-0.4, 0.6]))


def test_a_separator_and_the_end_token_belong_to_the_step_before(batch: MakeBatch) -> None:
    row = {"tokens": 6, "reward": 1.0, "spans": [(1, 2, 1.0), (4, 5, 1.0)]}
    made = valued(batch(row), "steps", [[0.5, 0.75, NAN]])
    assert advantages(ResampledSteps(), made) == [[0.25, 0.25, 0.25, 0.25, 0.25, 0.25]]
    made = valued(batch(row), "steps", [[0.5, 0.25, NAN]])
    assert advantages(ResampledSteps(), made) == [[-0.25, -0.25, -0.25, -0.25, 0.75, 0.75]]


def test_shrinkage_draws_to_the_prompts_value(batch: MakeBatch) -> None:
    made = valued(batch({"tokens": 5, "reward": 0.0, "spans": THREE}), "steps", [[0.5, 0.75, 0.25, NAN]])
    shrunk = assign_credit(ResampledSteps(shrinkage=9.0), made).advantages[0, [0, 2, 3]]
    torch.testing.assert_close(shrunk, torch.tensor([0.125, -0.25, -0.375]))
    assert float(shrunk.sum()) == pytest.approx(-0.5)


def test_whitening_is_over_the_tokens_of_the_batch(batch: MakeBatch) -> None:
    rows = [{"tokens": 2, "reward": 1.0, "group": 0, "spans": [(0, 2, 1.0)]}, {"tokens": 2, "reward": 0.0, "group": 1}]
    made = valued(batch(*rows, {"tokens": 2, "reward": 0.0, "spans": [(0, 2, 1.0)]}), "steps", [[0.5, NAN]] * 3)
    credit = assign_credit(ResampledSteps(whiten=True), made).advantages
    torch.testing.assert_close(credit, torch.tensor([[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]]), atol=1e-4, rtol=0)


def test_what_is_not_known_gives_nothing_away(batch: MakeBatch) -> None:
    rows = [{"tokens": 5, "reward": None, "spans": THREE}, {"tokens": 5, "reward": 1.0}]
    made = valued(batch(*rows), "steps", [[0.5, 0.75, 0.25, NAN]] * 2)
    assert assign_credit(ResampledSteps(), made).advantages.eq(0).all()


def test_metrics_tell_how_much_was_sampled_and_how_sure_it_is(batch: MakeBatch) -> None:
    made = valued(batch({"tokens": 5, "reward": 0.0, "spans": THREE}), "steps", [[0.5, 0.5, 0.5, NAN]])
    assert assign_credit(ResampledSteps(), made).metrics == pytest.approx({"states": 3.0, "value_error": 1 / 6})


def chain(batch: MakeBatch, probabilities: list[float], values: list[float], reward: float = 1.0) -> CreditBatch:
    made = batch({"tokens": len(probabilities), "reward": reward})
    made = replace(made, old_logprobs=torch.tensor([probabilities]).log())
    return valued(made, ResampledCutpoints(interval=2).states, [values])


def test_segments_run_from_cutpoint_to_cutpoint_and_the_first_gets_nothing(batch: MakeBatch) -> None:
    made = chain(batch, [0.95, 0.5, 0.99, 0.6, 0.4, 0.2], [0.5, 0.6, 0.2, NAN])
    strategy = ResampledCutpoints(interval=2, mask_probability=1.0)
    assert advantages(strategy, made) == [[0.0, -0.4, -0.4, -0.4, 0.8, 0.8]]  # V(1) = .6, V(2) = .2, R = 1


def test_nearly_certain_tokens_get_nothing(batch: MakeBatch) -> None:
    made = chain(batch, [0.95, 0.5, 0.99, 0.6, 0.4, 0.2], [0.5, 0.6, 0.2, NAN])
    credit = assign_credit(ResampledCutpoints(interval=2), made)
    torch.testing.assert_close(credit.advantages, torch.tensor([[0.0, -0.4, 0.0, -0.4, 0.8, 0.8]]))
    assert credit.metrics["kept_tokens"] == pytest.approx(4 / 6)


def test_a_cutpoint_on_the_first_token_leaves_no_segment_out(batch: MakeBatch) -> None:
    made = chain(batch, [0.5, 0.5, 0.5, 0.5], [0.25, 0.25, 0.75, NAN], reward=0.0)
    assert advantages(ResampledCutpoints(interval=2), made) == [[0.5, 0.5, -0.75, -0.75]]


def test_an_answer_without_a_choice_gets_nothing(batch: MakeBatch) -> None:
    made = chain(batch, [0.99, 0.99], [0.25, NAN], reward=1.0)
    assert advantages(ResampledCutpoints(interval=2, mask_probability=1.0), made) == [[0.0, 0.0]]


def test_the_needed_states_stand_in_the_requirements() -> None:
    assert "prefix_values:cutpoints(0.8,3)" in ResampledCutpoints(cut_probability=0.8, interval=3).requires
    assert "prefix_values:lines" in ResampledSteps(steps="lines").requires


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ResampledSteps(shrinkage=-1), "shrinkage must be 0 or more"),
        (lambda: ResampledCutpoints(shrinkage=-1), "shrinkage must be 0 or more"),
        (lambda: ResampledCutpoints(cut_probability=0), "cut_probability is a probability"),
        (lambda: ResampledCutpoints(mask_probability=1.5), "mask_probability is a probability"),
        (lambda: ResampledCutpoints(interval=0), "interval must be at least 1"),
    ],
)
def test_bad_options_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build()
