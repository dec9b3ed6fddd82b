"""The implicit reward model learns what a slow loop learns, from outcomes it scored before, and resumes bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.implicit import ImplicitReward
from apportion.grpo.checkpoint import latest_checkpoint
from apportion.grpo.evidence import Evidence
from apportion.grpo.forward import score_in_parts
from apportion.grpo.implicit_prm import ImplicitPrm
from apportion.grpo.policy import ForwardCounter, Policy
from apportion.grpo.sampling import RolloutConfig
from apportion.grpo.scorers import LearningScorer, LogRatio
from apportion.grpo.update import OptimConfig
from apportion.verifiers import InputError

NewRun = Callable[..., Any]


def logprobs(policy: Policy, rows: Sequence[Rollout], temperature: float = 1.0) -> torch.Tensor:
    prompts, completions = [r.prompt_ids for r in rows], [r.completion_ids for r in rows]
    return score_in_parts(policy, prompts, completions, temperature=temperature, rows=99).logprobs


def begun(policy: Policy, *, temperature: float = 1.0, rows: int = 16, lr: float = 1e-2, **options: Any) -> ImplicitPrm:
    scorer = ImplicitPrm(**options)
    rollout, optim = RolloutConfig(temperature=temperature), OptimConfig(lr=lr, micro_batch_rows=rows)
    scorer.begin(policy, rollout=rollout, optim=optim, forwards=ForwardCounter())
    return scorer


@pytest.fixture
def rows(rollout_of: Any) -> list[Rollout]:
    """Answers of other lengths; the third has no reward."""
    return [
        rollout_of([7, 8, 9], reward=1.0),
        rollout_of([9, 8, 7, 10, 11], prompt=(4, 5, 6, 7), reward=0.0),
        rollout_of([12], reward=None),
        rollout_of([7, 7, 8, 8], group=1, reward=0.25),
    ]


def collated(policy: Policy, rows: Sequence[Rollout], temperature: float = 1.0) -> CreditBatch:
    return replace(collate(rows), ref_logprobs=logprobs(policy, rows, temperature))


def weights(scorer: ImplicitPrm) -> torch.Tensor:
    return torch.cat([value.flatten() for value in scorer.state_dict()["model"].values()])


# What it scores and learns


def test_it_is_a_scorer_that_learns_and_a_plain_one_is_none() -> None:
    assert isinstance(ImplicitPrm(), LearningScorer)
    assert not isinstance(LogRatio(), LearningScorer)


def test_it_begins_as_the_reference(policy: Policy, rows: list[Rollout]) -> None:
    scores = begun(policy)(policy, rows, collated(policy, rows))
    assert scores.shape == (4, 5)
    assert scores.eq(0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_an_update_is_that_of_a_slow_loop(policy: Policy, rows: list[Rollout], temperature: float, size: int) -> None:
    """One answer at a time, without padding; the answer without a reward teaches nothing. Weights move by 0.04."""
    slow = copy.deepcopy(policy.model)
    optimizer = torch.optim.AdamW(slow.parameters(), lr=2e-2, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(2):
        optimizer.zero_grad()
        total = 0.0
        for row in (row for row in rows if row.reward is not None):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            start = len(row.prompt_ids)
            table = (slow(input_ids=ids).logits[0, start - 1 : -1] / temperature).log_softmax(dim=1)
            own = table.gather(1, ids[0, start:, None])[:, 0]
            logit = 0.5 * (own - logprobs(policy, [row], temperature)[0]).sum()
            loss = -row.reward * logit.sigmoid().log() - (1 - row.reward) * (-logit).sigmoid().log()
            (loss / 3).backward()
            total += float(loss.detach()) / 3
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.1)))
        optimizer.step()
    scorer = begun(policy, temperature=temperature, rows=size, beta=0.5, max_grad_norm=0.1, updates=2)
    seen = scorer.observe(policy, rows, collated(policy, rows, temperature))
    torch.testing.assert_close(
        weights(scorer), torch.cat([v.flatten() for v in slow.state_dict().values()]), atol=1e-3, rtol=0
    )
    assert seen["loss"] == pytest.approx(losses[0]) == pytest.approx(math.log(2))
    assert seen["grad_norm"] == pytest.approx(norms[1], rel=1e-3)
    assert norms[1] > 0.1  # it was cut
    assert seen["skipped_updates"] == 0
    again = scorer.observe(policy, rows, collated(policy, rows, temperature))
    assert again["loss"] < seen["loss"]


def test_the_scores_are_the_log_ratio_of_what_it_learned(policy: Policy, rows: list[Rollout]) -> None:
    scorer, batch = begun(policy), collated(policy, rows)
    scorer.observe(policy, rows, batch)
    learned = replace(policy, model=copy.deepcopy(policy.model))
    learned.model.load_state_dict(scorer.state_dict()["model"])
    expected = (logprobs(learned, rows) - logprobs(policy, rows)).where(batch.completion_mask, 0.0)
    torch.testing.assert_close(scorer(policy, rows, batch), expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 1e-3


def test_its_rate_is_twice_the_policys_unless_it_is_given_one(policy: Policy) -> None:
    assert begun(policy, lr=3e-4)._optimizer.param_groups[0]["lr"] == 6e-4
    assert begun(policy).lr is None
    scorer = ImplicitPrm(lr=1e-6)
    scorer.begin(policy, rollout=RolloutConfig(), optim=OptimConfig(lr=0.5), forwards=ForwardCounter())
    assert scorer._optimizer.param_groups[0]["lr"] == 1e-6


def test_the_policy_stays_as_it_was(policy: Policy, rows: list[Rollout]) -> None:
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    state, scorer, batch = torch.random.get_rng_state(), begun(policy), collated(policy, rows)
    scorer.observe(policy, rows, batch)
    first = scorer(policy, rows, batch)
    assert torch.equal(first, scorer(policy, rows, batch))  # to be asked changes nothing
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_accuracy_is_over_pairs_of_one_group_before_it_learned(policy: Policy, rollout_of: Any) -> None:
    rows = [rollout_of([7, 8], reward=1.0), rollout_of([9, 8], reward=0.0), rollout_of([9, 9], group=1, reward=1.0)]
    scorer, batch = begun(policy), collated(policy, rows)
    assert scorer.observe(policy, rows, batch)["accuracy"] == 0.5  # a tie
    sums = scorer(policy, rows, batch).sum(dim=1)
    assert sums[0] > sums[1]
    assert scorer.observe(policy, rows, batch)["accuracy"] == 1.0
    assert math.isnan(scorer.observe(policy, rows[1:], collated(policy, rows[1:]))["accuracy"])


def test_rows_left_out_of_training_teach_and_cost_nothing(policy: Policy, rows: list[Rollout]) -> None:
    cut = [replace(row, truncated=True) for row in rows]
    batch = replace(collate(cut, mask_truncated=True), ref_logprobs=logprobs(policy, rows))
    scorer = begun(policy)
    before = weights(scorer)
    assert scorer.observe(policy, cut, batch) == {}
    assert scorer(policy, cut, batch).eq(0).all()
    assert scorer._forwards.take() == 0
    assert torch.equal(weights(scorer), before)


def test_tokens_that_the_policy_did_not_write_do_not_count(policy: Policy, rollout_of: Any) -> None:
    rows = [rollout_of([7, 8, 9], reward=1.0, model_mask=[True, False, True])]
    one, other = begun(policy), begun(policy)
    batch = collated(policy, rows)
    one.observe(policy, rows, batch)
    shifted = replace(batch, ref_logprobs=batch.ref_logprobs + torch.tensor([[0.0, 5.0, 0.0]]))
    other.observe(policy, rows, shifted)
    assert torch.equal(weights(one), weights(other))
    assert one(policy, rows, batch)[0, 1] == 0


def test_a_trained_model_can_be_asked_alone(policy: Policy, rows: list[Rollout], tmp_path: Path) -> None:
    trained = copy.deepcopy(policy.model)
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.2)
    trained.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    scorer, batch = begun(policy, path=str(tmp_path), updates=0), collated(policy, rows)
    expected = logprobs(replace(policy, model=trained), rows) - batch.ref_logprobs
    assert scorer.observe(policy, rows, batch) == {}
    expected = expected.where(batch.completion_mask, 0.0)
    torch.testing.assert_close(scorer(policy, rows, batch), expected, atol=1e-6, rtol=0)


def test_a_model_of_another_vocabulary_is_refused(policy: Policy, new_policy: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: cannot be loaded as an implicit reward model \("):
        begun(policy, path=str(tmp_path / "none"))
    new_policy(symbols="string.digits").model.save_pretrained(tmp_path)
    new_policy(symbols="string.digits").tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has another vocabulary than the policy"):
        begun(policy, path=str(tmp_path))


def test_a_gradient_that_is_not_finite_is_skipped(policy: Policy, rows: list[Rollout]) -> None:
    scorer, batch = begun(policy), collated(policy, rows)
    before = weights(scorer)
    bad = replace(batch, ref_logprobs=batch.ref_logprobs.masked_fill(batch.completion_mask, math.nan))
    assert scorer.observe(policy, rows, bad)["skipped_updates"] == 1
    assert torch.equal(weights(scorer), before)
    assert scorer.observe(policy, rows, batch)["skipped_updates"] == 0
    assert weights(scorer).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learns": "never"}, "learns='never': must be before or after"),
        ({"beta": 0.0}, "beta=0.0: must be over 0"),
        ({"lr": -1.0}, "lr=-1.0: must be over 0"),
        ({"updates": -1}, "updates=-1: must be at least 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImplicitPrm(**options)


def test_a_reward_that_is_no_label_is_named_with_the_remedy(policy: Policy, rollout_of: Any) -> None:
    rows = [rollout_of([7, 8], reward=1.5)]
    with pytest.raises(InputError, match=r"outcome=reward: row 0 has 1.5, .* as in outcome=answer"):
        begun(policy).observe(policy, rows, collated(policy, rows))
    batch = replace(collated(policy, rows), scores={"answer": torch.tensor([1.0]).double()})
    scorer = begun(policy, outcome="answer")
    assert scorer.requires == {"ref_logprobs", "score:answer"}
    assert scorer.observe(policy, rows, batch)["loss"] == pytest.approx(math.log(2))


# In a run

OPTIONS: dict[str, Any] = {
    "strategy": ImplicitReward(),
    "optim": {"epochs": 2, "minibatches": 2, "lr": 0.02},
    "config": {"steps": 2, "eval_every": 0, "save_every": 1, "rollouts_every": 1},
}


def implicit_run(new_run: NewRun, folder: Path, learns: str = "after", **options: Any) -> Any:
    evidence = Evidence({"implicit": ImplicitPrm(learns=learns, updates=2)})
    return new_run(folder, evidence=evidence, **{**OPTIONS, **options})


def left(run: Any) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """All that must not depend on where the run was stopped."""
    scorer = run.trainer.evidence.scorers["implicit"].state_dict()
    state = scorer["optimizer"]["state"]
    moments = [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in run.rows]
    return rows, [*run.weights.values(), *scorer["model"].values(), *moments]


def assert_alike(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert len(one[1]) == len(other[1])
    assert all(torch.equal(left, right) for left, right in zip(one[1], other[1]))


@pytest.mark.parametrize("learns", ["before", "after"])
def test_a_stop_after_any_optimiser_step_changes_nothing(new_run: NewRun, tmp_path: Path, learns: str) -> None:
    whole = implicit_run(new_run, tmp_path / "whole", learns)
    assert whole.train() == "finished"
    assert "implicit/loss" in whole.rows[-1]
    for updates in (1, 4, 6, 7):  # within a window, between two, within the last
        first = implicit_run(new_run, tmp_path / str(updates), learns)
        first.stop_after(updates)
        assert first.train() == "interrupted"
        second = implicit_run(new_run, tmp_path / str(updates), learns)
        assert second.train() == "finished"
        assert_alike(left(second), left(whole))


def test_before_and_after_differ_in_whether_the_batch_is_known_when_it_is_scored(
    new_run: NewRun, tmp_path: Path
) -> None:
    rows = {}
    for learns in ("before", "after"):
        run = implicit_run(new_run, tmp_path / learns, learns)
        run.train()
        rows[learns] = run.rows[1]
    assert rows["before"]["implicit/loss"] == rows["after"]["implicit/loss"] == pytest.approx(math.log(2))
    assert rows["after"]["credit/part_implicit"] == 0  # nothing was learned yet
    assert rows["before"]["credit/part_implicit"] > 0.1


@pytest.mark.parametrize("learns", ["before", "after"])
def test_a_fault_between_what_it_learned_and_the_window_goes_back(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any, learns: str
) -> None:
    """The disk is full when the rollouts of the second batch are to be written: a scorer may have moved on by then."""
    whole = implicit_run(new_run, tmp_path / "whole", learns)
    whole.train()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill(step: int, metrics: Any) -> None:
        if step == 1:
            monkeypatch.setattr("pyarrow.parquet.write_table", full)

    run = implicit_run(new_run, tmp_path / "run", learns, on_step=fill)
    with pytest.raises(InputError, match="cannot be written"):
        run.train()
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000001"
    again = implicit_run(new_run, tmp_path / "run", learns)
    assert again.train() == "finished"
    assert_alike(left(again), left(whole))


def test_its_forwards_are_counted_and_the_policys_are_not_lost(new_run: NewRun, tmp_path: Path) -> None:
    run = implicit_run(new_run, tmp_path, "before")
    calls: list[int] = []
    models = [run.trainer.policy.model, run.trainer.evidence.scorers["implicit"]._model.model]
    for model in models:
        model.register_forward_hook(lambda *_: calls.append(1))
    run.train()
    assert sum(row["cost/forwards"] for row in run.rows) == len(calls)


def test_it_learns_what_the_verifier_likes(new_run: NewRun, tmp_path: Path) -> None:
    """Answers are right that hold no 3: after some batches its sums order fresh answers better than chance."""

    def without_three(samples: Any) -> list[float]:
        return [float("3" not in sample.completion) for sample in samples]

    run = implicit_run(
        new_run,
        tmp_path,
        verifiers={"answer": without_three, "format": without_three},
        rollout={"prompts_per_step": 4, "group_size": 8},
        optim={"lr": 5e-3},
        config={"steps": 12, "eval_every": 0, "rollouts_every": 0},
        strategy=ImplicitReward(rm_coef=0.0, outcome_coef=0.0, whiten=False),  # the policy stays still
    )
    run.train()
    late = [row["implicit/accuracy"] for row in run.rows[-4:] if "implicit/accuracy" in row]
    assert run.rows[1]["implicit/accuracy"] < 0.7
    assert sum(late) / len(late) > 0.9


def test_a_scorer_that_nobody_reads_costs_nothing(new_run: NewRun, tmp_path: Path) -> None:
    scorer = ImplicitPrm()
    run = new_run(tmp_path, evidence=Evidence({"implicit": scorer}), config={"steps": 1})
    run.train()
    assert not hasattr(scorer, "_model")
    assert not any(key.startswith("implicit/") for row in run.rows for key in row)
    assert not run.trainer.state.scorers


def test_a_checkpoint_of_another_scorer_is_one_line(new_run: NewRun, tmp_path: Path) -> None:
    implicit_run(new_run, tmp_path).train()
    with pytest.raises(InputError, match=r"scorers that learn: it has \['implicit'\], not \[\]") as caught:
        new_run(tmp_path, **{**OPTIONS, "strategy": ImplicitReward(), "evidence": Evidence({"implicit": LogRatio()})})
    assert "\n" not in str(caught.value)
