"""Six token processes: what each is made of, the answers drawn from it, the evidence on them, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

import apportion.conf
from apportion.credit import Credit
from apportion.credit.controls import Inverted, TrueAdvantage
from apportion.credit.states import cutpoint_states
from apportion.credit.strategy import assign_credit
from apportion.credit.truth import ExactValues, solve
from apportion.credit.uniform import Uniform
from apportion.experiments.build import build
from apportion.experiments.tasks.tabular import (
    ErrorRepairChain,
    FillerChain,
    FormatSpan,
    KeyAndLock,
    SelfCorrectingChain,
    UniquePathTree,
)
from apportion.experiments.tasks.tabular_evidence import Evidence, StepNoise
from apportion.experiments.tasks.tabular_gradient import gradient_figures, group_gradients
from apportion.experiments.tasks.tabular_learning import learn
from apportion.experiments.tasks.tabular_sampling import SIGNALS, TabularSample, random_logits, sample_batch
from apportion.experiments.tasks.tabular_tables import Move, TokenTables, build_tables
from apportion.verifiers import InputError

CONF = Path(apportion.conf.__file__).resolve().parent
# Small enough to list all answers.
TASKS = [
    ErrorRepairChain(steps=5),
    ErrorRepairChain(steps=4, repair=None),
    UniquePathTree(depth=3),
    FillerChain(steps=7, filler=4, checks=1, choices=2),
    KeyAndLock(length=5, words=2),
    FormatSpan(steps=2, words=1, choices=2),
    SelfCorrectingChain(results=3, doubts=1),
]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tables are so small that threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def policy_of(task: Any, seed: int = 0) -> ExactValues:
    tables = task.tables
    return solve(tables.process, tables.process.policy(random_logits(tables, seed)))


def sample_of(task: Any, seed: int = 0, groups: int = 8, **options: Any) -> TabularSample:
    options = {"states": (), **options}
    return sample_batch(task.tables, policy_of(task, seed), groups=groups, group_size=8, seed=seed, **options)


def answers_of(tables: TokenTables, state: int = 0) -> Iterator[list[tuple[int, int]]]:
    process = tables.process
    for token in process.allowed[state].nonzero()[:, 0].tolist():
        after = int(process.successor[state, token])
        for rest in answers_of(tables, after) if after >= 0 else [[]]:
            yield [(state, token), *rest]


def total(table: Tensor, path: list[tuple[int, int]]) -> float:
    return float(sum(table[place] for place in path))


@every_task
def test_values_are_those_of_all_answers(task: Any) -> None:
    tables, exact = task.tables, policy_of(task)
    value = mass = 0.0
    for path in answers_of(tables):
        probability = float(torch.stack([exact.policy[place] for place in path]).prod())
        outcome = total(tables.process.reward, path)
        assert total(exact.advantage, path) == pytest.approx(outcome - float(exact.value[0]), abs=1e-12)
        value, mass = value + probability * outcome, mass + probability
    assert (value, mass) == pytest.approx((float(exact.value[0]), 1.0), abs=1e-12)
    assert 0.1 < value < 0.9


@every_task
def test_an_answer_without_a_wrong_token_wins_everything_and_no_other_fails_for_nothing(task: Any) -> None:
    tables = task.tables
    for path in answers_of(tables):
        outcome, errors = total(tables.process.reward, path), total(tables.wrong, path)
        assert 0 <= outcome <= 1 + 1e-12
        assert errors > 0 or outcome == pytest.approx(1.0)
        assert total(tables.solves, path) == (outcome > 0.5)


@pytest.mark.parametrize("task", [ErrorRepairChain(), UniquePathTree(), FillerChain(), FormatSpan()], ids=repr)
def test_no_token_id_is_the_right_one_everywhere(task: Any) -> None:
    tables = task.tables
    right = torch.bincount((tables.lean > 0).nonzero()[:, 1], minlength=3)
    assert right.max() < 0.8 * right.sum()


def test_a_broken_chain_can_be_repaired_unless_told_otherwise() -> None:
    for task, repaired in ((ErrorRepairChain(steps=3), True), (ErrorRepairChain(steps=3, repair=None), False)):
        tables = task.tables
        solved = [total(tables.wrong, path) for path in answers_of(tables) if total(tables.solves, path)]
        assert (max(solved) > 0) is repaired


def test_half_of_the_long_chain_is_filler_and_only_the_check_repairs() -> None:
    tables, exact = FillerChain().tables, policy_of(FillerChain())
    path = next(answers_of(tables))
    filler = [tables.words[state][0].startswith("um") for state, _ in path]
    assert (len(path), sum(filler), filler[-1]) == (12, 6, False)
    mending = [state for state, row in enumerate(tables.words) if "mend" in row]
    assert len(mending) == 1
    for state, row in enumerate(tables.words):
        assert bool(exact.inert[state]) is not bool({"right", "mend"} & set(row))


def test_in_the_tree_nothing_matters_after_the_first_wrong_turn() -> None:
    tables, exact = UniquePathTree(depth=4).tables, policy_of(UniquePathTree(depth=4))
    assert len(tables.words) == 1 + 3 + 9 + 27  # every beginning is a state of its own
    assert (~exact.inert).sum() == 4
    for path in answers_of(tables):
        first = next((index for index, place in enumerate(path) if tables.wrong[place]), len(path))
        assert total(tables.wrong, path) <= 1
        assert all(exact.inert[state] for state, _ in path[first + 1 :])


def test_the_key_carries_the_advantage_and_what_lies_between_none() -> None:
    task = KeyAndLock(length=8)
    sample = sample_of(task)
    truth, start, exact = sample.truth, float(sample.exact.value[0]), sample.exact
    assert truth.advantage[:, 1:-1].eq(0).all()
    assert truth.inert[:, 1:-1].all()
    wrong_key = truth.wrong[:, 0]
    assert 0 < int(wrong_key.sum()) < len(wrong_key)
    assert torch.allclose(truth.advantage[wrong_key, 0], torch.tensor(-start, dtype=torch.float64))
    assert truth.advantage[wrong_key, 1:].eq(0).all()
    turned = exact.value[sample.answers.states[~wrong_key, 1]]
    assert torch.allclose(truth.advantage[~wrong_key, 0], turned - start)
    assert torch.allclose(truth.advantage[~wrong_key, -1], sample.batch.reward[~wrong_key] - turned)


def test_tags_are_worth_their_share_and_belong_to_no_step() -> None:
    sample = sample_of(FormatSpan(steps=3, words=2, format_weight=0.25), seed=1, groups=32)
    batch, table = sample.batch, sample.batch.spans["steps"]
    assert torch.allclose(batch.reward, 0.75 * batch.scores["answer"] + 0.25 * batch.scores["format"])
    assert (table.start[0].tolist(), table.stop[0].tolist()) == ([1, 4, 7], [4, 7, 10])
    malformed = batch.spans["format"].mask
    assert malformed[:, 1:-1].sum() == 0
    assert torch.equal(malformed.any(dim=1), batch.scores["format"] == 0)
    opening = malformed[:, 0]
    assert opening.any()
    worst, best = sample.truth.advantage[opening, 0], sample.truth.advantage[~opening, 0]
    assert worst.max() < 0 < best.min()


def test_a_self_correcting_answer_may_err_first_and_succeed() -> None:
    sample = sample_of(SelfCorrectingChain(), groups=32)
    erred = sample.truth.wrong.any(dim=1)
    assert (sample.batch.reward[erred] == 1).any()
    lengths = sample.batch.completion_mask.sum(dim=1)
    assert (int(lengths.min()), int(lengths.max())) == (6, 12)


@every_task
def test_a_perfect_verifier_calls_a_step_wrong_where_it_holds_a_wrong_token(task: Any) -> None:
    sample = sample_of(task)
    table = sample.batch.spans["steps"]
    for row in range(len(table.mask)):
        wrong = sample.truth.wrong[row].tolist()
        spans = zip(table.start[row].tolist(), table.stop[row].tolist(), table.mask[row].tolist())
        expected = [float(not any(wrong[start:stop])) for start, stop, there in spans if there]
        assert table.score[row][table.mask[row]].tolist() == expected


@every_task
def test_answers_come_as_often_as_the_policy_says(task: Any) -> None:
    sample = sample_of(task, groups=512)
    reward, start = sample.batch.reward, float(sample.exact.value[0])
    assert abs(float(reward.mean()) - start) < 4 * float(reward.std()) / len(reward) ** 0.5
    seen = torch.bincount(sample.answers.states[sample.answers.mask], minlength=len(sample.exact.visits))
    assert (seen / len(reward) - sample.exact.visits).abs().max() < 4 * 0.5 / len(reward) ** 0.5
    picked = sample.exact.policy[sample.answers.states, sample.answers.tokens].log().float()
    mask = sample.batch.completion_mask
    assert torch.allclose(sample.batch.old_logprobs[mask], picked[mask])
    assert torch.allclose(sample.truth.advantage.nan_to_num().sum(dim=1), reward - start)


def test_the_batch_gives_every_signal_that_is_promised() -> None:
    batch = sample_of(KeyAndLock()).batch
    streams = ("reward", "old_logprobs", "logprobs", "completion_ids", "entropy", "sum_pi_squared")
    found = {name for name in streams if getattr(batch, name) is not None}
    found |= {f"score:{name}" for name in batch.scores} | {f"spans:{name}" for name in batch.spans}
    assert found | {f"token_scores:{name}" for name in batch.token_scores} == SIGNALS


def test_worse_evidence_leaves_the_answers_as_they_are() -> None:
    clear, dim = (
        sample_of(FillerChain(), evidence=Evidence(noise, blur=blur, continuations=count))
        for noise, blur, count in ((StepNoise(), 0.0, 9), (StepNoise(0.4, 0.2, 1), 1.0, 1))
    )
    assert torch.equal(clear.answers.tokens, dim.answers.tokens)
    assert torch.equal(clear.batch.token_scores["truth"], dim.batch.token_scores["truth"])
    assert not torch.equal(clear.batch.spans["steps"].score, dim.batch.spans["steps"].score)


def test_every_wrong_step_is_missed_at_the_rate_one_and_every_right_one_is_blamed() -> None:
    perfect = sample_of(ErrorRepairChain()).batch.spans["steps"]
    noisy = sample_of(ErrorRepairChain(), evidence=Evidence(StepNoise(miss=1.0, false_alarm=1.0))).batch.spans["steps"]
    assert torch.equal(noisy.score, 1 - perfect.score)


def test_steps_are_misjudged_as_often_as_told_and_stay_so_with_more_noise() -> None:
    perfect, some, more = (
        sample_of(ErrorRepairChain(), groups=128, evidence=Evidence(StepNoise(miss, alarm))).batch.spans["steps"].score
        for miss, alarm in ((0.0, 0.0), (0.2, 0.1), (0.5, 0.3))
    )
    wrong, right = perfect == 0, perfect == 1
    for noisy, miss, alarm in ((some, 0.2, 0.1), (more, 0.5, 0.3)):
        for of, expected in ((wrong, miss), (right, alarm)):
            share = float((noisy != perfect)[of].double().mean())
            assert abs(share - expected) < 4 * (expected * (1 - expected) / int(of.sum())) ** 0.5
    assert ((some != perfect) <= (more != perfect)).all()


def test_critics_err_each_by_itself() -> None:
    spans = sample_of(ErrorRepairChain(), evidence=Evidence(StepNoise(0.3, 0.3))).batch.spans
    names = ("steps", "critic_1", "critic_2", "critic_3")
    assert len({tuple(spans[name].score.flatten().tolist()) for name in names}) == 4


def test_steps_lie_too_late_and_what_falls_off_is_lost() -> None:
    task = FormatSpan(steps=3, words=2)
    table = sample_of(task, evidence=Evidence(StepNoise(shift=3))).batch.spans["steps"]
    assert (table.start[0].tolist(), table.stop[0].tolist()) == ([4, 7, 10], [7, 10, 11])
    far = sample_of(task, evidence=Evidence(StepNoise(shift=4))).batch.spans["steps"]
    assert (far.mask[0].tolist(), far.uncovered) == ([True, True, False], len(far.mask))
    early = sample_of(task, evidence=Evidence(StepNoise(shift=-2))).batch.spans["steps"]
    assert (early.start[0].tolist(), early.stop[0].tolist()) == ([0, 2, 5], [2, 5, 8])


def test_values_follow_each_step_and_end_at_the_outcome() -> None:
    sample = sample_of(FormatSpan(format_weight=0.0))
    table, exact = sample.batch.spans["values"], sample.exact
    after = sample.answers.states.gather(1, table.stop)  # the state that comes after the step
    assert torch.allclose(table.score, exact.value[after].float())
    model = sample.batch.token_scores["reward_model"]
    assert torch.equal(model[:, -1].double(), sample.batch.reward)
    assert torch.allclose(model[:, :-1], exact.value[sample.answers.states[:, 1:]].float())


def test_calibration_is_a_factor_on_the_log_odds_of_values() -> None:
    exact, sure = (sample_of(FillerChain(), evidence=Evidence(calibration=scale)).batch for scale in (1.0, 3.0))
    values, bent = (batch.spans["values"].score.double() for batch in (exact, sure))
    assert torch.allclose(torch.sigmoid(3 * torch.logit(values.clamp(0.001, 0.999))), bent, atol=1e-6)


@pytest.mark.parametrize("name", ["steps", cutpoint_states(0.9, 2)])
def test_values_of_states_are_exact_or_the_mean_of_continuations(name: str) -> None:
    task = SelfCorrectingChain()
    exact = sample_of(task, evidence=Evidence(continuations=None), states=[name]).batch.prefix_values[name]
    drawn = sample_of(task, evidence=Evidence(continuations=200), states=[name]).batch.prefix_values[name]
    known = ~exact.value.isnan()
    assert torch.equal(known, ~drawn.value.isnan())
    assert exact.variance.eq(0).all()
    assert drawn.count.tolist() == torch.where(known, 200, 0).tolist()
    error = (drawn.value - exact.value)[known] / (exact.value * (1 - exact.value) / 200).clamp(min=1e-12).sqrt()[known]
    assert error.abs().max() < 5
    assert 0.8 < float(error.square().mean()) < 1.2
    p = drawn.value[known]
    assert torch.allclose(drawn.variance[known], p * (1 - p))  # of outcomes that are 0 or 1


def test_the_closed_form_is_the_gradient_of_the_log_probabilities() -> None:
    task = SelfCorrectingChain()
    logits = random_logits(task.tables, 3).requires_grad_()
    process = task.tables.process
    exact = solve(process, process.policy(logits.detach()))
    sample = sample_batch(task.tables, exact, groups=2, group_size=8, seed=0)
    generator = torch.Generator().manual_seed(0)
    given, weight = (torch.randn(sample.batch.completion_mask.shape, generator=generator) for _ in range(2))
    log = logits.masked_fill(~process.allowed, -torch.inf).log_softmax(dim=-1)
    log = log[sample.answers.states, sample.answers.tokens]
    amount = (weight.double() * given).where(sample.batch.completion_mask, 0.0)
    (expected,) = torch.autograd.grad((amount * log.where(sample.batch.completion_mask, 0.0)).sum() / 16, logits)
    found = group_gradients(sample, Credit(given.where(sample.batch.completion_mask, 0.0), loss_weight=weight))
    assert found.shape == (2, *logits.shape)
    assert torch.allclose(found.mean(dim=0), expected, atol=1e-9)


@every_task
def test_the_gradient_of_the_true_advantages_is_exact_on_average(task: Any) -> None:
    ratios = []
    for seed in range(8):
        sample = sample_of(task, seed, groups=100)
        gradients = group_gradients(sample, assign_credit(TrueAdvantage(), sample.batch))
        error = gradients.mean(dim=0) - sample.exact.gradient
        ratios.append(float(error.square().sum() / (gradients.var(dim=0).sum() / 100)))
    assert sum(ratios) / 8 < 2.2  # of a mean of 1, with a standard deviation of at most sqrt(2 / 8)


def test_bias_is_the_sine_of_the_angle_whatever_the_noise_and_the_scale() -> None:
    exact = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    noise = 3 * torch.randn(20_000, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tilted = 7 * (torch.tensor([[0.8, 0.6]], dtype=torch.float64) + noise)
    figures = gradient_figures(tilted, exact)
    assert figures["gradient/bias"] == pytest.approx(0.6, abs=0.03)
    assert figures["gradient/snr"] == pytest.approx(1 / 18, rel=0.1)
    assert gradient_figures(-tilted, exact)["gradient/bias"] == 1.0


def test_a_group_without_a_gradient_has_the_cosine_zero() -> None:
    exact = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    figures = gradient_figures(torch.stack([exact, 0 * exact]), exact)
    assert (figures["gradient/cosine"], figures["gradient/norm"]) == pytest.approx((0.5, 2**0.5 / 2))


def test_true_advantages_teach_and_their_inverse_unteaches() -> None:
    right, wrong = (
        learn(FillerChain(), strategy, steps=25) for strategy in (TrueAdvantage(), Inverted(TrueAdvantage()))
    )
    assert (len(right), right[0]) == (26, wrong[0])
    assert right[-1] > right[0] + 0.2
    assert wrong[-1] < wrong[0] - 0.1
    assert right == learn(FillerChain(), TrueAdvantage(), steps=25)


def test_groups_of_one_teach_nothing_where_the_mean_is_the_baseline() -> None:
    assert len(set(learn(ErrorRepairChain(), Uniform(), steps=5, group_size=1))) == 1


def test_a_step_of_training_is_a_step_up_the_exact_gradient() -> None:
    task, lr = ErrorRepairChain(), 1e-3
    logits = random_logits(task.tables, 0, "learn")
    exact = solve(task.tables.process, task.tables.process.policy(logits))
    start, after = learn(task, TrueAdvantage(), steps=1, lr=lr, groups=500)
    assert start == float(exact.value[0])
    assert after - start == pytest.approx(lr * float(exact.gradient.norm()), rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FillerChain(steps=4, filler=4), "task.filler=4: an answer of 4 steps needs one that is none"),
        (lambda: ErrorRepairChain(choices=1), "task.choices=1: must be 2 or more"),
        (lambda: UniquePathTree(depth=20), "task.depth=20, task.branching=3: over 10000 leaves"),
        (lambda: FormatSpan(format_weight=1.5), "task.format_weight=1.5: is a share"),
        (lambda: StepNoise(miss=2.0), "miss=2.0: is a chance"),
        (lambda: Evidence(calibration=0.0), "calibration=0.0: is a factor on log-odds"),
        (lambda: Evidence(blur=-1.0), "blur=-1.0: is a standard deviation"),
        (lambda: Evidence(continuations=0), "continuations=0: must be 1 or more"),
        (lambda: Evidence().worse("luck", 1.0), "noise=luck: must be miss"),
        (lambda: random_logits(hopeless(), 0), "task: none of 1000 random policies"),
    ],
)
def test_impossible_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        make()


def hopeless() -> TokenTables:
    return build_tables("all", lambda _: [Move("lose", None), Move("lose again", None)])


@pytest.mark.parametrize("path", sorted((CONF / "task" / "tabular").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_builds_its_task_as_the_code_has_it(path: Path) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        task = build(compose("train", [f"task=tabular/{path.stem}"]).task, "task")
        default = build(compose("train", ["task=tabular"]).task, "task")
    assert task == type(task)()
    assert default == FillerChain()
    assert 0.1 < float(policy_of(task).value[0]) < 0.9


def test_another_weight_of_the_format_is_another_outcome() -> None:
    task = FormatSpan()
    light, heavy = (sample_of(replace(task, format_weight=weight)).batch for weight in (0.0, 1.0))
    assert torch.equal(light.reward, light.scores["answer"])
    assert torch.equal(heavy.reward, heavy.scores["format"])
