"""One run, as a whole: what it trains on, what it writes, and how it ends when something goes wrong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import apportion.grpo.learner as learner
from apportion.credit import Credit, CreditBatch
from apportion.credit.process import ProcessReward
from apportion.credit.uniform import Uniform
from apportion.grpo.checkpoint import latest_checkpoint
from apportion.grpo.loss import LossConfig
from apportion.grpo.records import rollouts_path
from apportion.grpo.task import Problem
from apportion.grpo.trainer import Trainer, TrainerConfig
from apportion.grpo.update import NonFinite, OptimConfig
from apportion.verifiers import InputError, Sample, Verdict

NewRun = Callable[..., Any]


class WithoutEvaluation:
    """A task of one problem, sampled again and again."""

    def batch(self, step: int, num_prompts: int, seed: int) -> list[Problem]:
        return [Problem("one", "1+2=?")] * num_prompts

    def held_out(self) -> list[Problem]:
        return []

    def retention(self) -> list[Problem]:
        return []


def updates_of(run: Any, monkeypatch: Any) -> list[dict[str, Any]]:
    """What each optimiser step of the run is given and gives."""
    seen: list[dict[str, Any]] = []
    whole = learner.accumulate_gradients

    def watching(policy: Any, window: Any, rows: torch.Tensor, config: LossConfig, **options: Any) -> dict[str, float]:
        entry = {
            "step": window.step,
            "rows": rows.tolist(),
            "advantages": window.credit.advantages.clone(),
            "mask": window.batch.completion_mask,
            "group_ids": window.batch.group_ids,
            "prompts": [window.prompt_ids[row] for row in rows],
            "weights": torch.cat([p.detach().flatten() for p in policy.model.parameters()]),
        }
        entry["sums"] = whole(policy, window, rows, config, **options)
        seen.append(entry)
        return entry["sums"]

    monkeypatch.setattr(learner, "accumulate_gradients", watching)
    assert run.train() == "finished"
    return seen


# What is trained on


def test_the_rollouts_hold_what_is_trained_on_and_the_metrics_follow_from_them(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any
) -> None:
    run = new_run(
        tmp_path,
        strategy=ProcessReward(steps="answer"),
        rollout={"prompts_per_step": 4, "group_size": 4},
        config={"steps": 4, "rollouts_every": 1},
    )
    updates = updates_of(run, monkeypatch)
    for step in range(1, 5):
        rows = pq.read_table(rollouts_path(tmp_path, step)).to_pylist()
        trained = [entry for entry in updates if entry["step"] == step]
        assert sorted(row for entry in trained for row in entry["rows"]) == list(range(16))
        for entry in trained:
            for row in entry["rows"]:
                length = len(rows[row]["completion_ids"])
                assert rows[row]["advantages"] == entry["advantages"][row, :length].tolist()
                assert rows[row]["completion_mask"] == entry["mask"][row, :length].tolist()
                assert rows[row]["prompt_ids"] == run.trainer.policy.encode(rows[row]["prompt"])
        assert expected_metrics(rows) == pytest.approx(
            {key: run.rows[step][key] for key in expected_metrics(rows)}, rel=1e-6, abs=1e-9
        )
    assert 0 < run.rows[1]["credit/sign_flips"] < 1


def expected_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The logged numbers again, from the rollouts alone."""
    rewards, groups = [row["reward"] for row in rows], sorted({row["group_id"] for row in rows})
    of_group = {g: [row["reward"] for row in rows if row["group_id"] == g] for g in groups}
    dead = [g for g in groups if len(set(of_group[g])) == 1]
    mean = sum(rewards) / len(rewards)
    tokens = [
        (advantage, row["reward"] - sum(of_group[row["group_id"]]) / len(of_group[row["group_id"]]))
        for row in rows
        for advantage, trained in zip(row["advantages"], row["completion_mask"])
        if trained
    ]
    compared = [(advantage, centred) for advantage, centred in tokens if advantage and centred]
    verdicts = [json.loads(row["verdicts"]) for row in rows]
    lengths = [len(row["completion_ids"]) for row in rows]
    passed = [verdict["answer"]["score"] >= 0.5 for verdict in verdicts]
    right = [length for length, good in zip(lengths, passed) if good]
    wrong = [length for length, good in zip(lengths, passed) if not good]
    total = sum(abs(advantage) for advantage, _ in tokens)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "reward/dead_groups": len(dead) / len(groups),
        "reward/dead_groups_right": sum(of_group[g][0] == 1 for g in dead) / len(groups),
        "reward/dead_groups_wrong": sum(of_group[g][0] == 0 for g in dead) / len(groups),
        "reward/effective_samples": float(sum(len(of_group[g]) for g in groups if g not in dead)),
        "task/success": sum(passed) / len(passed),
        "format/pass_rate": sum(verdict["format"]["score"] >= 0.5 for verdict in verdicts) / len(verdicts),
        "length/mean": sum(lengths) / len(lengths),
        "length/min": float(min(lengths)),
        "length/max": float(max(lengths)),
        **({"length/right": sum(right) / len(right)} if right else {}),
        **({"length/wrong": sum(wrong) / len(wrong)} if wrong else {}),
        "length/truncated": sum(row["truncated"] for row in rows) / len(rows),
        "credit/abs_mean": total / len(tokens),
        "credit/nonzero_tokens": sum(advantage != 0 for advantage, _ in tokens) / len(tokens),
        "credit/rows_with_credit": float(sum(any(row["advantages"]) for row in rows)),
        "credit/sign_flips": sum(a * c < 0 for a, c in compared) / len(compared),
        "cost/tokens": float(sum(lengths)),
    }


def test_a_second_epoch_has_the_same_prompts_and_another_policy(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any
) -> None:
    run = new_run(tmp_path, optim={"epochs": 2, "minibatches": 1}, config={"steps": 2})
    updates = updates_of(run, monkeypatch)
    assert [entry["step"] for entry in updates] == [1, 1, 2, 2]
    for first, second in zip(updates[::2], updates[1::2]):
        assert first["prompts"] == second["prompts"]
        assert [first["prompts"].count(prompt) for prompt in first["prompts"]] == [3] * 6
        assert first["sums"]["max/log_ratio_abs"] < 1e-5
        assert second["sums"]["max/log_ratio_abs"] > 1e-3
    assert updates[1]["prompts"] != updates[2]["prompts"]
    for row in run.rows[1:]:
        assert row["policy/ratio_min"] < 1 < row["policy/ratio_max"]
        assert row["sampling/logprob_gap"] < 1e-5
        assert row["policy/approx_kl"] > 0


@dataclass(frozen=True)
class Watching:
    """Credit of one size for all, that remembers when it was asked and what it saw."""

    phase: str = "update"
    conserves: str = "none"
    requires: frozenset[str] = frozenset({"reward"})
    seen: list[torch.Tensor | None] = field(default_factory=list)

    def __call__(self, batch: CreditBatch) -> Credit:
        self.seen.append(None if batch.logprobs is None else batch.logprobs.clone())
        return Credit(batch.completion_mask.float() * len(self.seen))


def test_credit_of_the_update_phase_is_computed_at_each_optimiser_step_under_the_policy_of_that_moment(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any
) -> None:
    strategy = Watching()
    run = new_run(tmp_path, strategy=strategy, optim={"epochs": 2}, config={"steps": 1, "rollouts_every": 1})
    updates = updates_of(run, monkeypatch)
    assert len(strategy.seen) == len(updates) == 4
    rows = pq.read_table(rollouts_path(tmp_path, 1)).to_pylist()
    for index, (entry, logprobs) in enumerate(zip(updates, strategy.seen)):
        assert entry["advantages"].max() == index + 1
        assert logprobs is not None
        for row, record in enumerate(rows):
            kept = torch.tensor(record["logprobs"])
            gap = float((logprobs[row, : len(kept)] - kept).abs().max())
            assert gap < 1e-5 if index == 0 else gap > 1e-4
    assert {value for record in rows for value in record["advantages"]} == {1.0}


def test_credit_of_the_rollout_phase_is_computed_once(new_run: NewRun, tmp_path: Path) -> None:
    strategy = Watching(phase="rollout")
    new_run(tmp_path, strategy=strategy, optim={"epochs": 2}, config={"steps": 2}).train()
    assert strategy.seen == [None, None]


def ends_with_odd_length(samples: list[Sample]) -> list[Verdict]:
    return [Verdict(float(s.metadata["num_tokens"] % 2 and not s.metadata["truncated"])) for s in samples]


@pytest.mark.parametrize("source", ["reward", "answer"])
def test_truncated_rows_leave_the_loss_and_the_baseline(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any, source: str
) -> None:
    run = new_run(
        tmp_path,
        verifiers={"answer": ends_with_odd_length, "format": ends_with_odd_length},
        strategy=Uniform(source=source, scale="none"),
        rollout={"truncated": "mask", "group_size": 8, "max_new_tokens": 16},
        config={"steps": 2, "rollouts_every": 1},
    )
    updates = updates_of(run, monkeypatch)
    seen = set()
    for step in (1, 2):
        rows = pq.read_table(rollouts_path(tmp_path, step)).to_pylist()
        for row in rows:
            kept = [r["reward"] for r in rows if r["group_id"] == row["group_id"] and not r["truncated"]]
            wanted = 0.0 if row["truncated"] else row["reward"] - sum(kept) / len(kept)
            assert row["advantages"] == pytest.approx([wanted] * len(row["completion_ids"]))
            assert row["completion_mask"] == [not row["truncated"]] * len(row["completion_ids"])
            seen.add(row["truncated"])
        trained = sum(len(row["completion_ids"]) for row in rows if not row["truncated"])
        assert sum(entry["sums"]["tokens"] for entry in updates if entry["step"] == step) == trained
        assert run.rows[step]["reward/mean"] == sum(row["reward"] for row in rows) / len(rows)
    assert seen == {True, False}


def test_the_kl_in_the_reward_moves_the_advantages_and_not_the_logged_reward(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(
        tmp_path,
        strategy=Uniform(scale="none"),
        loss={"kl_coef": 0.5, "kl_in": "reward", "kl_kind": "k1"},
        config={"steps": 2, "rollouts_every": 1},
        optim={"epochs": 3},
    )
    reference = run.trainer.reference.model
    assert run.train() == "finished"
    rows = pq.read_table(rollouts_path(tmp_path, 2)).to_pylist()
    less = []
    for row in rows:
        ids, start = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"]) - 1
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids])).logits[0, start:-1]
        scored = logits.log_softmax(-1).gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
        less.append(row["reward"] - 0.5 * float((torch.tensor(row["logprobs"]) - scored).sum()))
    for index, row in enumerate(rows):
        group = [less[i] for i, other in enumerate(rows) if other["group_id"] == row["group_id"]]
        assert row["advantages"][0] == pytest.approx(less[index] - sum(group) / len(group), abs=1e-4)
    assert max(abs(a - row["reward"]) for a, row in zip(less, rows)) > 0.01
    assert run.rows[2]["reward/mean"] == sum(row["reward"] for row in rows) / len(rows)


def test_the_kl_in_the_loss_holds_the_policy_near_the_start(new_run: NewRun, tmp_path: Path) -> None:
    drift = {}
    for coef in (0.0, 20.0):
        run = new_run(
            tmp_path / str(coef), loss={"kl_coef": coef, "kl_kind": "k2"}, config={"steps": 6}, optim={"lr": 0.01}
        )
        run.train()
        drift[coef] = run.rows[-1]["policy/ref_kl"]
        measured = [row["step"] for row in run.rows if "policy/ref_kl" in row]
        assert measured == ([1, 2, 3, 4, 5, 6] if coef else [2, 4, 6])
    assert drift[20.0] < drift[0.0] / 2


# What is written


def test_every_step_has_its_line_and_evaluations_come_when_they_are_due(new_run: NewRun, tmp_path: Path) -> None:
    told: list[tuple[int, Mapping[str, float]]] = []

    class Recorder:
        closed = False

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            told.append((step, metrics))

        def close(self) -> None:
            self.closed = True

    logger = Recorder()
    run = new_run(tmp_path, config={"steps": 5, "save_every": 2}, loggers=[logger], on_step=logger.log)
    assert run.train() == "finished"
    rows = run.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 2, 4, 5]
    assert all({"eval/format_pass_rate", "retention/success"} <= row.keys() for row in rows if "eval/success" in row)
    assert [row["tokens"] for row in rows] == [
        sum(row["cost/tokens"] for row in rows[1 : step + 1]) for step in range(6)
    ]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"step_{step:05d}.parquet" for step in (1, 2, 4)
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    assert run.status == {
        "state": "finished",
        "step": 5,
        "steps": 5,
        "tokens": rows[-1]["tokens"],
        "seconds": run.status["seconds"],
        "error": None,
    }
    assert run.status["seconds"] >= rows[-1]["seconds"] > rows[1]["seconds"] > 0
    assert logger.closed
    assert [step for step, _ in told] == [step for step in range(6) for _ in range(2)]
    facts = {"step", "tokens", "seconds"}
    assert [dict(metrics) for _, metrics in told[::2]] == [
        {key: value for key, value in row.items() if key not in facts} for row in rows
    ]


def test_forwards_are_counted_where_they_are_spent(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path, config={"steps": 2, "rollouts_every": 1}, optim={"minibatches": 1})
    calls: list[Any] = []
    handle = run.trainer.policy.model.register_forward_hook(lambda *call: calls.append(call))
    run.train()
    handle.remove()
    assert sum(row["cost/forwards"] for row in run.rows) == len(calls)
    longest = max(len(row["completion_ids"]) for row in pq.read_table(rollouts_path(tmp_path, 1)).to_pylist())
    assert run.rows[1]["cost/forwards"] == longest + 1  # decoding, then the only group whose answers differ
    assert run.rows[1]["cost/forward_tokens"] > run.rows[1]["cost/tokens"]
    assert not run.trainer.policy.model._forward_hooks


def test_a_budget_of_tokens_ends_the_run_with_an_evaluation(new_run: NewRun, tmp_path: Path) -> None:
    whole = new_run(tmp_path / "whole", config={"steps": 6, "eval_every": 0})
    whole.train()
    budget = int(whole.rows[2]["tokens"]) + 1
    run = new_run(tmp_path / "budget", config={"steps": 6, "eval_every": 0, "budget_tokens": budget})
    assert run.train() == "finished"
    assert [row["tokens"] for row in run.rows] == [row["tokens"] for row in whole.rows[:4]]
    assert {"eval/success", "policy/ref_kl"} <= run.rows[-1].keys()
    assert "eval/success" not in run.rows[2]


def test_no_steps_are_an_evaluation_alone(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path, config={"steps": 0})
    start = run.weights
    assert run.train() == "finished"
    assert all(torch.equal(value, start[name]) for name, value in run.weights.items())
    again = new_run(tmp_path, config={"steps": 0})
    assert again.train() == "finished"
    assert [row["step"] for row in again.rows] == [0]


def test_groups_of_equal_reward_are_counted_and_do_not_move_the_policy(new_run: NewRun, tmp_path: Path) -> None:
    def alike(samples: list[Sample]) -> list[Verdict]:
        return [Verdict(float(len(s.prompt) % 2)) for s in samples]

    run = new_run(tmp_path, verifiers={"answer": alike, "format": alike}, rollout={"prompts_per_step": 6})
    start = run.weights
    run.train()
    for row in run.rows[1:]:
        assert row["reward/dead_groups"] == 1.0
        assert row["reward/dead_groups_right"] + row["reward/dead_groups_wrong"] == 1.0
        assert row["reward/dead_groups_right"] == pytest.approx(row["reward/mean"])
        assert (row["reward/effective_samples"], row["credit/abs_mean"], row["optim/grad_norm"]) == (0.0, 0.0, 0.0)
        assert "credit/sign_flips" not in row
    assert all(torch.equal(value, start[name]) for name, value in run.weights.items())


def test_strategies_with_one_seed_see_the_same_first_rollouts(new_run: NewRun, tmp_path: Path) -> None:
    first = {}
    for name, strategy in {"uniform": Uniform(), "process": ProcessReward(steps="answer")}.items():
        new_run(tmp_path / name, strategy=strategy, config={"steps": 2, "rollouts_every": 1}).train()
        first[name] = [pq.read_table(rollouts_path(tmp_path / name, step)).to_pylist() for step in (1, 2)]
    same = ("problem_id", "completion_ids", "logprobs", "reward", "verdicts")
    for one, other in zip(first["uniform"][0], first["process"][0]):
        assert [one[key] for key in same] == [other[key] for key in same]
    assert [row["problem_id"] for row in first["uniform"][1]] == [row["problem_id"] for row in first["process"][1]]


# How it ends when something goes wrong


def odd(samples: list[Sample]) -> list[float]:
    return [float(len(sample.completion) % 2) for sample in samples]


def test_a_verifier_that_fails_on_few_is_counted(new_run: NewRun, tmp_path: Path) -> None:
    def picky(sample: Sample) -> float:
        if sample.metadata["truncated"]:
            raise RuntimeError("no\nend")
        return 1.0

    verifiers = {"answer": odd, "format": lambda samples: [picky(sample) for sample in samples]}
    config = {"max_error_share": 1.0, "rollouts_every": 1, "eval_every": 0, "steps": 4}
    run = new_run(tmp_path, verifiers=verifiers, config=config)
    run.train()
    cuts = []
    for row in run.rows[1:-1]:
        records = pq.read_table(rollouts_path(tmp_path, int(row["step"]))).to_pylist()
        cuts.append(sum(record["truncated"] for record in records))
        assert row["verifier/errors_format"] == cuts[-1]
        assert row["verifier/errors_answer"] == 0.0
        assert row.get("format/pass_rate", 1.0) == 1.0  # abstentions are no failures
    assert 0 < sum(cuts) < 18
    assert run.rows[0]["verifier/errors_format"] > 0  # of the evaluation


def test_a_verifier_that_fails_on_most_stops_the_run(new_run: NewRun, tmp_path: Path) -> None:
    def broken(samples: list[Sample]) -> list[float]:
        raise RuntimeError("no\nserver")

    run = new_run(tmp_path, verifiers={"answer": odd, "format": broken}, task=WithoutEvaluation())
    with pytest.raises(InputError) as caught:
        run.train()
    assert str(caught.value).startswith("verifiers.format failed on 6 of 6 completions; mend it, or raise")
    assert "RuntimeError: no server" in str(caught.value)
    assert run.status["state"] == "failed"
    assert run.status["error"] == f"InputError: {caught.value}"
    assert latest_checkpoint(tmp_path / "checkpoints") is None  # nothing was reached yet


def test_a_fault_after_some_steps_loses_none_of_them(new_run: NewRun, tmp_path: Path) -> None:
    """A verifier breaks in the third batch; mended, the run goes on to what it would have been."""

    class Server:
        up = True
        calls = 0

        def __call__(self, samples: list[Sample]) -> list[float]:
            self.calls += 1
            if not self.up and self.calls > 8:
                raise ConnectionError("server is down")
            return odd(samples)

    def run(folder: Path, server: Server) -> Any:
        options = {"steps": 4, "eval_every": 0, "max_error_share": 0.0}
        return new_run(folder, verifiers={"answer": server, "format": server}, config=options)

    whole = run(tmp_path / "whole", Server())
    whole.train()
    server = Server()
    server.up = False
    broken = run(tmp_path / "broken", server)
    with pytest.raises(InputError, match="server is down"):
        broken.train()
    assert (broken.status["state"], broken.status["step"]) == ("failed", 3)
    server.up = True
    mended = run(tmp_path / "broken", server)
    assert mended.train() == "finished"
    assert all(torch.equal(value, whole.weights[name]) for name, value in mended.weights.items())
    assert [row["reward/mean"] for row in mended.rows[1:]] == [row["reward/mean"] for row in whole.rows[1:]]


def test_a_loss_that_is_not_finite_skips_its_update_and_too_many_stop_the_run(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any
) -> None:
    run = new_run(
        tmp_path,
        strategy=ProcessReward(steps="answer"),
        rollout={"group_size": 8},
        config={"steps": 3, "save_every": 1, "eval_every": 0},
        optim={"max_skipped": 3},
    )
    whole, calls = learner.accumulate_gradients, []

    def failing(policy: Any, window: Any, *arguments: Any, **options: Any) -> dict[str, float]:
        calls.append({name: value.clone() for name, value in policy.model.state_dict().items()})
        seen = whole(policy, window, *arguments, **options)
        if len(calls) in (2, 3, 6):
            raise NonFinite(f"step {window.step}: the loss is not finite in row 1 at token 2 (id 3)")
        return seen

    monkeypatch.setattr(learner, "accumulate_gradients", failing)
    with pytest.raises(InputError) as caught:
        run.train()
    assert str(caught.value) == (
        "step 3: the loss is not finite in row 1 at token 2 (id 3); 3 updates were skipped in all "
        "(optim.max_skipped): lower optim.lr"
    )
    for before, after, moved in ((0, 1, True), (1, 2, False), (2, 3, False), (3, 4, True), (4, 5, True)):
        same = all(torch.equal(value, calls[after][name]) for name, value in calls[before].items())
        assert same != moved
    assert [row.get("optim/skipped_updates") for row in run.rows] == [None, 1.0, 1.0]
    assert all(parameter.grad is None for parameter in run.trainer.policy.model.parameters())
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step_000002"  # the weights of the end are not kept
    assert run.status["state"] == "failed"


def test_weights_that_are_not_finite_are_found_at_the_first_token(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(tmp_path, optim={"max_skipped": 1}, config={"rollouts_every": 0})
    with torch.no_grad():
        run.trainer.policy.model.lm_head.weight[7, 0] = float("nan")
    with pytest.raises(InputError, match=r"step 1: the loss is not finite in row \d at token 0 \(id \d+\)"):
        run.train()


@pytest.mark.parametrize("place", ["metrics", "rollouts", "checkpoint", "status"])
def test_a_full_disk_is_one_clear_line_and_leaves_the_earlier_checkpoint(
    new_run: NewRun, tmp_path: Path, monkeypatch: Any, place: str
) -> None:
    config = {"steps": 4, "save_every": 1, "rollouts_every": 1}
    targets = {
        "metrics": ("os.write", OSError(28, "No space left on device")),
        "rollouts": ("pyarrow.parquet.write_table", OSError(28, "No space left on device")),
        "checkpoint": ("torch.save", RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")),
        "status": ("pathlib.Path.write_text", OSError(28, "No space left on device")),
    }
    name, error = targets[place]

    def full(*_: Any, **__: Any) -> None:
        raise error

    def fill(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            monkeypatch.setattr(name, full)

    run = new_run(tmp_path, config=config, on_step=fill)
    with pytest.raises(InputError) as caught:
        run.train()
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert "cannot be written" in str(caught.value)
    assert not list(tmp_path.rglob(".*"))
    whole = new_run(tmp_path / "whole", config=config)
    whole.train()
    again = new_run(tmp_path, config=config)
    assert again.trainer.state.step in (1, 2)
    assert again.train() == "finished"
    assert all(torch.equal(value, whole.weights[name]) for name, value in again.weights.items())
    assert [row["reward/mean"] for row in again.rows[1:]] == [row["reward/mean"] for row in whole.rows[1:]]


def test_a_folder_that_vanishes_is_named_and_not_made_anew(new_run: NewRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = new_run(folder, on_step=lambda step, metrics: shutil.rmtree(folder) if step == 1 else None)
    with pytest.raises(InputError, match=rf"{folder}/\S+: cannot be written \(No such file or directory\)"):
        run.train()
    assert not folder.exists()


def test_a_prompt_that_is_too_long_names_its_problem(new_run: NewRun, tmp_path: Path) -> None:
    class Growing(WithoutEvaluation):
        def batch(self, step: int, num_prompts: int, seed: int) -> list[Problem]:
            return [Problem(f"p{step}-{n}", "1" + "+1" * (1 + 30 * (step == 2)) + "=?") for n in range(num_prompts)]

    run = new_run(tmp_path, task=Growing())
    with pytest.raises(InputError, match="problem 'p2-0': prompt of 65 tokens"):
        run.train()
    assert [row["step"] for row in run.rows] == [0, 1]
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step_000001"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optim": {"minibatches": 3}},
            "optim.minibatches=3: whole groups stay together, so at most rollout.prompts_per_step=2",
        ),
        ({"verifiers": {"format": ends_with_odd_length}}, "reward.answer: no verifier of that name"),
        ({"strategy": ProcessReward(steps="steps")}, "credit needs the spans of verifiers.steps"),
        (
            {"loss": {"kl_coef": 1.0, "kl_in": "reward"}, "strategy": Watching(requires=frozenset())},
            "loss.kl_in=reward: Watching",
        ),
        ({"config": {"steps": -1}}, "run.steps=-1: must be a whole number of at least 0"),
        ({"config": {"steps": 1.5}}, "run.steps=1.5: must be a whole number of at least 0"),
        ({"config": {"keep_checkpoints": 0}}, "run.keep_checkpoints=0: must be a whole number of at least 1"),
        ({"config": {"budget_tokens": 0}}, "run.budget_tokens=0: must be a whole number of at least 1"),
        ({"config": {"max_error_share": 2}}, "run.max_error_share=2: is a share, so between 0 and 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    new_run: NewRun, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        new_run(tmp_path / "run", **options)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "run").exists()


def test_bf16_runs_through_the_same_code(new_run: NewRun, tmp_path: Path, new_policy: Callable[..., Any]) -> None:
    policy = new_policy(precision="bf16")
    run = new_run(tmp_path, policy=policy, loss={"kl_coef": 0.1}, config={"steps": 2, "rollouts_every": 1})
    start = run.weights
    assert run.train() == "finished"
    assert {value.dtype for value in run.weights.values()} == {torch.float32}
    assert any(not torch.equal(value, start[name]) for name, value in run.weights.items())
    assert 0 < run.rows[1]["sampling/logprob_gap"] < 0.2
    assert run.rows[1]["policy/ref_kl"] < 0.01
    again = new_run(tmp_path, policy=new_policy(precision="bf16"), loss={"kl_coef": 0.1}, config={"steps": 2})
    assert again.trainer.reference.precision == "bf16"


def test_names_that_callers_import_stay() -> None:
    assert Trainer.train
    assert TrainerConfig().steps == 60
    assert OptimConfig(epochs=3, minibatches=2).steps_per_window == 6
