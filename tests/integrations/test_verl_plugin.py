"""Laws of the plugin inside verl 0.9.1 itself: its dispatcher, reward path, trainer, configuration and entry points."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from apportion.credit import Credit, CreditBatch
from apportion.verifiers import InputError, Sample, Span, Verdict

WHY = "needs verl 0.9.1: pip install 'apportion[verl]'"
pytest.importorskip("verl", reason=WHY)
pytest.importorskip("transfer_queue", reason=WHY)
pytestmark = [pytest.mark.integration, pytest.mark.slow]

EOS = 99


class Digits:
    """Right where the answer's ids spell no 0; every character is a step, wrong where it is a 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [
            Verdict(
                float("0" not in sample.completion),
                tuple(Span(at, at + 1, float(digit != "0")) for at, digit in enumerate(sample.completion)),
            )
            for sample in samples
        ]


@dataclass(frozen=True)
class Watching:
    """Keeps what it was shown, and gives no credit."""

    seen: ClassVar[list[CreditBatch]] = []
    requires: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "ref_logprobs", "entropy", "completion_ids"})
    phase: ClassVar[str] = "rollout"
    conserves: ClassVar[str] = "none"

    def __call__(self, batch: CreditBatch) -> Credit:
        Watching.seen.append(batch)
        return Credit(torch.zeros(batch.completion_mask.shape))


class Tokenizer:
    """Ids 0 to 9 are digits; all else is special."""

    eos_token_id = EOS
    all_special_ids = (EOS,)

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(str(int(one)) for one in ids if int(one) < 10)

    def encode(self, text: str) -> list[int]:
        raise AssertionError("completions are never encoded")

    def convert_ids_to_tokens(self, index: int) -> str:
        return str(index)

    def get_vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(100)}

    def __len__(self) -> int:
        return 100


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "digits_here", sys.modules[__name__])
        yield importlib.import_module("apportion.integrations.verl_plugin")


@pytest.fixture
def config() -> Callable[..., Any]:
    """``config(*overrides)``: verl's own configuration, composed as its command composes it."""
    from hydra import compose, initialize_config_module

    def composed(*overrides: str) -> Any:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", [*LAUNCH, *overrides])

    return composed


LAUNCH = (
    "algorithm.adv_estimator=apportion",
    "+algorithm.credit.strategy=localized/wrong_only",
    "+algorithm.credit.verifiers.steps=digits_here.Digits",
    "+algorithm.credit.reward.steps=1.0",
    "reward.reward_manager.name=apportion",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.path=/nowhere",
    "data.max_response_length=4",
)


# --- the estimator in verl's dispatcher ------------------------------------------------------------------------------


def dispatched(credit: dict[str, Any], rewards: torch.Tensor, mask: torch.Tensor, uids: Sequence[str]) -> torch.Tensor:
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )
    algorithm = OmegaConf.create({"adv_estimator": "apportion", "credit": credit})
    found = compute_advantage(data, adv_estimator="apportion", config=algorithm)
    assert torch.equal(found.batch["advantages"], found.batch["returns"])
    return found.batch["advantages"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("divided", [True, False])
def test_uniform_credit_is_verls_own_grpo(seed: int, divided: bool) -> None:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    draw = torch.Generator().manual_seed(seed)
    rows, width = 24, 7
    mask = (torch.rand(rows, width, generator=draw) < 0.7).long()
    mask[:, 0] = 1
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = (
        torch.randn(rows, generator=draw) if seed % 2 else torch.randint(2, (rows,), generator=draw).float()
    )
    uids = [f"u{int(group)}" for group in torch.randperm(rows, generator=draw) % 6]
    theirs, _ = compute_grpo_outcome_advantage(
        rewards.clone(), mask, np.array(uids, dtype=object), epsilon=1e-6, norm_adv_by_std_in_grpo=divided
    )
    options = {"use": "uniform", "ddof": 1, "eps": 1e-6, "scale": "group" if divided else "none"}
    ours = dispatched({"strategy": options}, rewards, mask, uids)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_the_deviation_is_the_one_that_is_asked_for() -> None:
    rewards = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    for ddof, size in ((0, 1.0), (1, 0.866025)):
        found = dispatched({"strategy": {"use": "uniform", "ddof": ddof}}, rewards, torch.ones(4, 1), ["a"] * 4)
        torch.testing.assert_close(found[:, 0], size * torch.tensor([-1.0, -1.0, 1.0, 1.0]), atol=1e-5, rtol=0)


def test_an_answer_alone_in_its_group_gets_no_credit_where_verl_gives_it_its_reward() -> None:
    assert dispatched({"strategy": "uniform"}, torch.tensor([[5.0]]), torch.ones(1, 1), ["a"]).tolist() == [[0.0]]


def test_a_strategy_that_wants_spans_is_refused_where_none_came_by() -> None:
    with pytest.raises(InputError, match="needs spans:steps, which this trainer of verl does not hand on"):
        dispatched({"strategy": "localized/wrong_only"}, torch.zeros(1, 2), torch.ones(1, 2), ["a"])


def test_a_kl_in_the_reward_is_summed_where_a_trainer_passes_nothing_by(plugin: Any) -> None:
    rewards = torch.tensor([[-0.25, 0.75], [-0.25, -0.25]])
    algorithm = {"use_kl_in_reward": True, "credit": {"strategy": "sequence/raw"}}
    values, _ = plugin.estimate(rewards, torch.ones(2, 2), index=["a", "a"], config=algorithm)
    assert values.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_arguments_that_later_versions_may_add_are_taken(plugin: Any) -> None:
    algorithm = {"credit": {"strategy": "uniform"}}
    ones = torch.ones(2, 1)
    values, _ = plugin.estimate(
        ones, response_mask=ones, index=["a", "a"], config=algorithm, reward_baselines=ones, x=1
    )
    assert values.tolist() == [[0.0], [0.0]]
    with pytest.raises(InputError, match="the batch has no uid"):
        plugin.estimate(ones, ones, config=algorithm)


# --- from sampled ids through verl's reward path to its trainer ------------------------------------------------------


def judged(config: Any, plugin: Any, outputs: Sequence[Any], **columns: Any) -> None:
    """What verl's worker does with a session: score it, and put what came of it on its outputs."""
    from tensordict import TensorDict
    from torch.nn.utils.rnn import pad_sequence
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    manager = load_reward_manager(config, Tokenizer(), reward_router_address=None, reward_model_tokenizer=None)
    assert type(manager) is plugin.ApportionRewards
    prompts, responses = ([torch.tensor(getattr(o, name)) for o in outputs] for name in ("prompt_ids", "response_ids"))
    attention = [torch.ones(len(p) + len(r)) for p, r in zip(prompts, responses)]
    padded = {
        name: pad_sequence(values, batch_first=True)
        for name, values in {"prompts": prompts, "responses": responses, "attention_mask": attention}.items()
    }
    row = {"raw_prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}, **columns}
    data = DataProto(
        batch=TensorDict(padded, batch_size=len(outputs)),
        non_tensor_batch={
            **{name: np.array([value] * len(outputs)) for name, value in row.items()},
            "__num_turns__": np.array([o.num_turns for o in outputs]),
            "tool_extra_fields": np.array([o.extra_fields for o in outputs], dtype=object),
            "prompt_len": np.array([len(o.prompt_ids) for o in outputs]),
            "response_len": np.array([len(o.response_ids) for o in outputs]),
        },
    )
    result = asyncio.new_event_loop().run_until_complete(manager.run_single(data))
    for output in outputs:
        output.reward_score = result["reward_score"]
        output.extra_fields["reward_extra_info"] = result["reward_extra_info"]


def output_of(
    ids: Sequence[int], mask: Sequence[int] | None = None, turns: int = 2, prompt: Sequence[int] = (1,)
) -> Any:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    written = [1] * len(ids) if mask is None else list(mask)
    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=list(ids),
        response_mask=written,
        num_turns=turns,
        metrics=AgentLoopMetrics(),
        extra_fields={} if mask is None else {"response_mask": written},
    )


class Store:
    """TransferQueue's two calls, over rows in memory."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        from tensordict import NonTensorStack, TensorDict

        rows = [self.rows[key] for key in keys]
        found = {}
        for name in (name for name in select_fields if name in rows[0]):
            values = [row[name] for row in rows]
            nested = isinstance(values[0], torch.Tensor)
            found[name] = (
                torch.nested.as_nested_tensor(values, layout=torch.jagged) if nested else NonTensorStack(*values)
            )
        return TensorDict(found, batch_size=[len(rows)])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> Any:
        for at, key in enumerate(keys):
            self.rows[key] |= {name: fields[name].unbind()[at] for name in set(fields.keys())}
        return keys


def trained(config: Any, rows: dict[str, dict[str, Any]], monkeypatch: Any) -> dict[str, Any]:
    """The metrics after verl's own trainer assigned the credit of these rows."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    monkeypatch.setattr(trainer_base, "tq", Store(rows))
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config, trainer.global_steps, trainer.total_training_steps = config, 3, 8
    trainer.local_trigger_step = 0
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=list(rows), tags=[{}] * len(rows)), metrics)
    return metrics


def sessions(config: Any, plugin: Any, answers: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Rows as verl stores them: one for each output of each session of the prompt p."""
    rows = {}
    for session, outputs in enumerate(answers):
        judged(config, plugin, outputs)
        for place, output in enumerate(outputs):
            row = output.as_dict() | {"uid": "p"}
            for name in ("old_log_probs", "entropy"):
                row[name] = torch.full(row["rm_scores"].shape, 0.5)
            rows[f"p_{session}_{place}"] = row
    return rows


def test_spans_reach_the_tokens_through_all_of_verl(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config()
    rows = sessions(made, plugin, [[output_of([1, 0, 2, EOS])], [output_of([3, EOS])], [output_of([0, 4])]])
    assert [row["rm_scores"].tolist() for row in rows.values()] == [[0, 0, 0, 0.0], [0, 1.0], [0, 0.0]]
    metrics = trained(made, rows, monkeypatch)
    assert [row["advantages"].tolist() for row in rows.values()] == [[0, -1.0, 0, 0], [0, 0], [-1.0, 0]]
    assert metrics["credit/mass_on_errors"] == 1.0
    assert metrics["verifier/steps"] == pytest.approx(1 / 3)
    assert metrics["verifier/errors_steps"] == 0.0


def test_pieces_of_a_session_are_judged_as_one_answer(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config()
    pieces = [output_of([1, 2, EOS], prompt=[7, 7, 7]), output_of([0, EOS], prompt=[7])]
    rows = sessions(made, plugin, [pieces, [output_of([5, EOS])]])
    trained(made, rows, monkeypatch)
    assert [row["advantages"].tolist() for row in rows.values()] == [[0, 0, 0], [-1.0, 0], [0, 0]]


def test_one_trainer_in_verl_gives_grpo_for_sessions_of_any_length(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config("algorithm.credit.strategy=uniform")
    answers = [[output_of([1]), output_of([2]), output_of([3])], [output_of([0])]]
    ours = sessions(made, plugin, answers)
    theirs = {key: dict(row) for key, row in ours.items()}
    trained(made, ours, monkeypatch)
    trained(config("algorithm.adv_estimator=grpo"), theirs, monkeypatch)
    assert [float(row["advantages"][0]) for row in ours.values()] == pytest.approx([1, 1, 1, -1], abs=1e-5)
    assert [float(row["advantages"][0]) for row in theirs.values()] == pytest.approx([0.7071] * 3 + [-0.7071], abs=1e-4)


def test_ids_of_a_tool_are_named_to_the_verifiers_and_get_no_credit(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config("actor_rollout_ref.rollout.agent.default_agent_loop=apportion_tool_agent")
    rows = sessions(made, plugin, [[output_of([1, 0, 0, 2], [1, 0, 1, 1], turns=4)], [output_of([3])]])
    trained(made, rows, monkeypatch)
    assert rows["p_0_0"]["advantages"].tolist() == [0, 0, -1.0, 0]
    with pytest.raises(InputError, match="does not say which ids its tools wrote"):
        judged(made, plugin, [output_of([1, 0], turns=4)])


def test_the_agent_loop_with_tools_hands_its_mask_on(plugin: Any, monkeypatch: Any) -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    async def run(self: Any, sampling_params: Any, **columns: Any) -> Any:
        return SimpleNamespace(response_mask=[1, 0, 1], extra_fields=dict(columns))

    monkeypatch.setattr(ToolAgentLoop, "run", run)
    loop = object.__new__(plugin.MaskedToolAgentLoop)
    output = asyncio.new_event_loop().run_until_complete(loop.run({}, turn=1))
    assert output.extra_fields == {"turn": 1, "response_mask": [1, 0, 1]}
    target = _agent_loop_registry["apportion_tool_agent"]["_target_"]
    assert target == "apportion.integrations.verl_plugin.MaskedToolAgentLoop"


def test_a_kl_in_the_reward_is_in_the_credit(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config("algorithm.credit.strategy=sequence/raw", "algorithm.use_kl_in_reward=true")
    rows = sessions(made, plugin, [[output_of([1, 2])], [output_of([0, 2])]])
    for row in rows.values():
        row["ref_log_prob"] = torch.zeros(2)
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.v1 import get_trainer_cls

    monkeypatch.setattr(get_trainer_cls("sync"), "kl_ctrl_in_reward", FixedKLController(0.25), raising=False)
    trained(made, rows, monkeypatch)
    assert [row["advantages"].tolist() for row in rows.values()] == [[0.75, 0.75], [-0.25, -0.25]]


def test_what_the_actor_and_the_reference_computed_reaches_the_strategy(
    config: Any, plugin: Any, monkeypatch: Any
) -> None:
    made = config("algorithm.credit.strategy=digits_here.Watching", "actor_rollout_ref.actor.use_kl_loss=true")
    rows = sessions(made, plugin, [[output_of([1, 2, EOS])], [output_of([0, 2, 3, 4])]])
    for place, row in enumerate(rows.values()):
        size = len(row["responses"])
        for name, first in (("old_log_probs", -1.0), ("entropy", 1.0), ("ref_log_prob", -3.0)):
            row[name] = first + place + torch.arange(size) / 8
    trained(made, rows, monkeypatch)
    batch = Watching.seen[-1]
    assert batch.completion_ids is not None
    assert batch.completion_ids.tolist() == [[1, 2, EOS, 0], [0, 2, 3, 4]]
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, True]
    for values, first in ((batch.old_logprobs, -1.0), (batch.entropy, 1.0), (batch.ref_logprobs, -3.0)):
        assert values is not None
        assert values.tolist() == [[first, first + 0.125, first + 0.25, 0], [first + 1 + at / 8 for at in range(4)]]
    assert batch.progress == 0.25


def test_other_estimators_are_left_as_they_were(config: Any, plugin: Any, monkeypatch: Any) -> None:
    made = config("algorithm.adv_estimator=grpo")
    rows = sessions(config(), plugin, [[output_of([1])], [output_of([0])]])
    metrics = trained(made, rows, monkeypatch)
    assert float(rows["p_0_0"]["advantages"][0]) == pytest.approx(0.70711, abs=1e-4)
    assert metrics == {}


def test_verls_validation_takes_what_rides_along(config: Any, plugin: Any) -> None:
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    outputs = [output_of([1, 0, 2]), output_of([3])]
    for output in outputs:
        judged(config(), plugin, [output])
    infos = [output.extra_fields["reward_extra_info"] for output in outputs]
    columns = {name: [info[name] for info in infos] for name in infos[0]}
    found = process_validation_metrics(["sums", "sums"], ["p", "p"], columns)
    assert found["sums"]["acc"]["mean@2"] == 0.5
    assert set(found["sums"]) == {"acc"}


def test_all_end_ids_of_the_model_count(plugin: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    assert plugin._eos_ids(str(tmp_path), Tokenizer()) == [EOS]
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
    assert plugin._eos_ids(str(tmp_path), Tokenizer()) == [EOS, 3, 4]


# --- configuration and loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_missing_signal_stops_every_trainer_before_it_is_built(config: Any, mode: str) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = config("~algorithm.credit.verifiers", "~algorithm.credit.reward", "reward.reward_manager.name=naive")
    with pytest.raises(
        InputError, match=r"the spans of a verifier 'steps' .*add \+algorithm\.credit\.verifiers\.steps"
    ):
        get_trainer_cls(mode)(made)


def test_a_missing_signal_stops_the_reward_workers_too(config: Any, plugin: Any) -> None:
    made = config("reward.reward_model.enable=true")
    with pytest.raises(InputError, match=r"reward\.reward_model\.enable=true"):
        plugin.ApportionRewards(made, Tokenizer(), None)


def test_verls_checks_of_the_configuration_pass(config: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from apportion.integrations.verl_config import check_run

    made = config(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    )
    assert not need_critic(made)
    validate_config(made, use_reference_policy=need_reference_policy(made), use_critic=False)
    assert list(check_run(made).panel.verifiers) == ["steps"]


def test_the_launch_line_of_the_page_is_one_that_verl_and_we_take() -> None:
    from hydra import compose, initialize_config_module

    from apportion.integrations.verl_config import check_run

    page = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m verl\.trainer\.main_ppo (.*?)```", page, re.DOTALL)
    with initialize_config_module("verl.trainer.config", version_base=None):
        made = compose("ppo_trainer", shlex.split(command.replace("\\\n", " ")))
    assert made.algorithm.adv_estimator == "apportion"
    assert list(check_run(made).panel.verifiers) == ["answer", "steps"]


def test_strategies_that_need_the_reward_alone_run_on_verls_own(config: Any, monkeypatch: Any) -> None:
    bare = ("~algorithm.credit.verifiers", "~algorithm.credit.reward", "reward.reward_manager.name=naive")
    rows = {}
    for session, reward in enumerate((0.0, 1.0)):
        output = output_of([1, 2])
        output.reward_score = reward
        rows[f"p_{session}_0"] = output.as_dict() | {"uid": "p"}
    trained(config("algorithm.credit.strategy=uniform", *bare), rows, monkeypatch)
    assert [float(row["advantages"][0]) for row in rows.values()] == pytest.approx([-1, 1], abs=1e-5)


def test_a_module_that_verl_runs_twice_registers_once(plugin: Any) -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.v1 import get_trainer_cls

    before = get_adv_estimator_fn("apportion"), get_trainer_cls("sync")
    runpy.run_module("apportion.integrations.verl_plugin")
    assert (get_adv_estimator_fn("apportion"), get_trainer_cls("sync")) == before


def started(tmp_path: Path, target: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that imports verl, where a distribution declares the entry point."""
    info = tmp_path / "pluggable-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pluggable\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[verl.plugins]\napportion = {target}\n")
    code = (
        "import verl; from verl.trainer.ppo import core_algos; print('apportion' in core_algos.ADV_ESTIMATOR_REGISTRY)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )


def test_verl_finds_the_plugin_by_its_entry_point_and_can_be_told_not_to(tmp_path: Path) -> None:
    target = "apportion.integrations.verl_plugin"
    assert started(tmp_path, target).stdout.split() == ["True"]
    assert started(tmp_path, target, VERL_USE_EXTERNAL_PLUGINS="none").stdout.split() == ["False"]


def test_a_plugin_that_cannot_load_says_why(tmp_path: Path) -> None:
    """verl itself keeps silent."""
    (tmp_path / "transfer_queue.py").write_text("raise ImportError('too old')")
    found = started(tmp_path, "apportion.integrations.verl_plugin")
    assert found.stdout.split() == ["False"]
    assert "apportion cannot plug into verl (made for verl 0.9.1): ImportError: too old" in found.stderr
