"""Engines in this process: the built-in sampler as ever, and vLLM in the order that it wants."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.credit import collate
from apportion.grpo.collect import collect, complete
from apportion.grpo.engines import SamplingOptions, awake
from apportion.grpo.engines.native import Native, NativeEngine
from apportion.grpo.engines.replies import WrongReply, generation, generations
from apportion.grpo.engines.vllm_local import VLLM, LocalEngine
from apportion.grpo.engines.weights import PolicyWeights
from apportion.grpo.evaluate import evaluate
from apportion.grpo.policy import Policy
from apportion.grpo.prefix_values import PrefixValuer
from apportion.grpo.sampling import Generation, Interrupted, RolloutConfig, sample_groups
from apportion.grpo.task import Problem
from apportion.grpo.tree_sampling import TreeRolloutConfig
from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import Panel

CONFIG = RolloutConfig(prompts_per_step=3, group_size=4, max_new_tokens=10, temperature=0.8)
OPTIONS = SamplingOptions.of(CONFIG)
SEEDS = [2**62 + 5 * row for row in range(12)]  # vLLM's come from within 62 bits
PROBLEMS = [Problem("a", "1+2=?", "3"), Problem("b", "7+9-a*1=?", "6")]


def own_seeds(n: int, seeds: list[int] = SEEDS) -> list[int]:
    """The seeds that vLLM gives the completions of a request: that of the first, and one more for each."""
    return [seeds[row - row % n] % 2**62 + row % n for row in range(len(seeds))]


class Double:
    """``vllm.LLM`` as far as the engine calls it: it samples from a model of its own, and minds the order of calls."""

    def __init__(self, template: Policy, model: str, **options: Any) -> None:
        self.options, self.calls, self.parts = options, [], {"weights", "kv_cache"}
        self.config = json.loads((Path(model) / "config.json").read_text())
        self.policy = replace(template, model=deepcopy(template.model))
        self.names = {name for name, _ in self.policy.model.named_parameters()}
        self.blur()

    def blur(self) -> None:
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.normal_()

    def sleep(self, level: int) -> None:
        assert self.parts == {"weights", "kv_cache"}
        self.calls.append(f"sleep {level}")
        self.parts = set()
        if level == 2:
            self.blur()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.parts & set(tags)
        self.calls.append(f"wake {tags}")
        self.parts |= set(tags)

    def apply_model(self, work: Callable[[Any], Any]) -> list[Any]:
        assert "weights" in self.parts, "writes to memory that is not there"
        self.calls.append("load")
        named = SimpleNamespace(load_weights=self.load_weights, named_parameters=lambda: [(n, 0) for n in self.names])
        return [work(named)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            return {name for name, value in weights if own[name].copy_(value) is not None}

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert self.parts == {"weights", "kv_cache"}
        self.calls.append("generate")
        return [self._answer(prompt["prompt_token_ids"], each) for prompt, each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: list[int], params: Any) -> Any:
        assert (params.logprobs, params.ignore_eos, params.detokenize) == (0, True, False)
        assert tuple(params.stop_token_ids) == self.policy.eos_ids
        made = sample_groups(
            self.policy,
            [prompt],
            [(params.seed or 0) + row for row in range(params.n)],
            group_size=params.n,
            max_new_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
        )
        outputs = [
            SimpleNamespace(
                index=row,
                token_ids=one.ids,
                logprobs=[{id: SimpleNamespace(logprob=value)} for id, value in zip(one.ids, one.logprobs)],
                finish_reason="length" if len(one.ids) == params.max_tokens else "stop",
            )
            for row, one in enumerate(made)
        ]
        return SimpleNamespace(outputs=outputs[::-1])


@pytest.fixture
def vllm(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM = lambda **options: Double(policy, **options)  # type: ignore[attr-defined]
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # the user's word counts


@pytest.fixture
def local(vllm: None, policy: Policy) -> LocalEngine:
    return VLLM(llm={"enforce_eager": True}).start(policy, CONFIG)


def near(one: list[Generation], other: list[Generation]) -> None:
    assert [each.ids for each in one] == [each.ids for each in other]
    assert [each.truncated for each in one] == [each.truncated for each in other]
    for left, right in zip(one, other):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_the_built_in_sampler_is_the_sampler_itself(policy: Policy, prompts: list[list[int]]) -> None:
    engine = Native().start(policy, CONFIG)
    Native().prepare()
    finished: dict[int, Generation] = {}
    options = replace(OPTIONS, top_k=5, top_p=0.9, compact_below=1.0)
    found = engine.generate(prompts, 4, options, row_seeds=SEEDS, on_finished=finished.update)
    assert engine.native
    assert finished
    assert found == sample_groups(
        policy, prompts, SEEDS, group_size=4, max_new_tokens=10, temperature=0.8, top_k=5, top_p=0.9, compact_below=1.0
    )
    with pytest.raises(Interrupted):
        engine.generate(prompts, 4, options, row_seeds=SEEDS, should_stop=lambda: True)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    with awake(engine, policy):
        pass
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())


def test_the_gap_between_sampler_and_trainer_is_measured_at_every_step(new_run: Any, tmp_path: Path) -> None:
    run = new_run(tmp_path, config={"steps": 3, "eval_every": 0}, optim={"minibatches": 2, "epochs": 2})
    run.train()
    for row in run.rows[1:]:
        assert 0 <= row["sampling/logprob_gap"] < 1e-4
    assert max(row["policy/ratio_max"] for row in run.rows[1:]) > 1.01  # later updates are not in it


def test_vllm_wakes_loads_forgets_and_sleeps_in_the_order_that_it_wants(
    local: LocalEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    llm = local._llm
    for _ in range(2):
        with awake(local, policy):
            local.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)
            local.generate(prompts, 1, replace(OPTIONS, temperature=0), row_seeds=[0] * 3)
    cycle = ["wake ['weights']", "load", "reset", "wake ['kv_cache']", "generate", "generate", "sleep 2"]
    assert llm.calls == ["sleep 2", *cycle, *cycle]


def test_without_sleep_the_weights_are_still_loaded_each_time(vllm: None, policy: Policy) -> None:
    engine = VLLM(sleep_level=None).start(policy, CONFIG)
    for _ in range(2):
        with awake(engine, policy):
            engine.generate([[4, 5]], 2, OPTIONS, row_seeds=[1, 2])
    assert engine._llm.calls == ["load", "reset", "generate"] * 2
    assert engine._llm.options["enable_sleep_mode"] is False


def test_vllm_samples_from_the_weights_of_the_moment_with_the_seeds_of_the_run(
    local: LocalEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    for shift in (0.0, 0.3):
        with torch.no_grad():
            policy.model.lm_head.weight.add_(shift * torch.randn_like(policy.model.lm_head.weight))
        with awake(local, policy):
            found = local.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)
        near(found, sample_groups(policy, prompts, own_seeds(4), group_size=4, max_new_tokens=10, temperature=0.8))
    with pytest.raises(RuntimeError, match="generate before sync"):
        local.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)


def test_vllm_is_built_of_the_policys_configuration_and_no_defaults_of_its_files(local: LocalEngine) -> None:
    llm = local._llm
    assert llm.config["architectures"] == ["LlamaForCausalLM"]
    assert llm.config["hidden_size"] == 16
    assert llm.options == {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "max_model_len": 64,
        "enable_sleep_mode": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": True,
    }


def test_a_weight_that_vllm_gets_none_for_is_told(local: LocalEngine, policy: Policy) -> None:
    local._llm.names |= {"model.extra.weight"}
    local.wake()
    with pytest.raises(InputError, match=r"1 weights of its model have none in the policy, such as model\.extra"):
        local.sync(PolicyWeights(policy.model))


def test_a_stop_is_obeyed_and_a_fault_inside_leaves_the_engine_asleep(local: LocalEngine, policy: Policy) -> None:
    with pytest.raises(Interrupted), awake(local, policy):
        local.generate([[4, 5]], 2, OPTIONS, row_seeds=[1, 2], should_stop=lambda: True)
    assert local._llm.calls[-1] == "sleep 2"
    local._llm.generate = local._llm.sleep = lambda *_, **__: 1 / 0  # both fail: the first is told
    with pytest.raises(ZeroDivisionError) as caught, awake(local, policy):
        local.generate([[4, 5]], 2, OPTIONS, row_seeds=[1, 2])
    assert caught.value.__context__ is None


def test_where_vllm_cannot_be_it_is_said_before_anything_runs(policy: Policy) -> None:
    with pytest.raises(InputError, match="engine=vllm: there is no CUDA here; use engine=native"):
        VLLM().prepare()
    with pytest.raises(InputError, match=r"needs the package vllm; pip install 'apportion\[vllm\]'"):
        VLLM().start(policy, CONFIG)
    for options in ({"gpu_memory_utilization": 1.5}, {"sleep_level": 3}, {"dtype": "int8"}):
        with pytest.raises(InputError, match=f"engine.{next(iter(options))}="):
            VLLM(**options)  # type: ignore[arg-type]


class Counting(NativeEngine):
    """The built-in sampler, taken for another engine: whoever ought to ask it, asks it."""

    asked: Mapping[str, list[int]] = {"n": [], "prompts": []}
    native = False

    def generate(self, prompts: Any, n: int, options: Any, **others: Any) -> list[Generation]:
        self.asked["n"].append(n)
        self.asked["prompts"].append(len(prompts))
        return super().generate(prompts, n, options, **others)


def digits(samples: list[Sample]) -> list[float]:
    return [float(sum(char.isdigit() for char in sample.completion)) for sample in samples]


def test_rollouts_trees_values_and_evaluations_all_come_from_the_engine(policy: Policy) -> None:
    counting, panel = Counting(policy), Panel({"digits": digits}, {"digits": 1.0})
    asked = counting.asked

    def only(**lists: list[int]) -> None:
        assert asked == lists
        for each in asked.values():
            each.clear()

    def rolled(config: RolloutConfig, engine: Any) -> Any:
        return collect(policy, PROBLEMS, panel, config, seed=0, step=1, engine=engine)

    assert rolled(CONFIG, counting).rollouts == rolled(CONFIG, None).rollouts
    only(n=[4], prompts=[2])
    tree = TreeRolloutConfig(group_size=4, branching=(2, 2), segment_tokens=3, max_new_tokens=10)
    assert rolled(tree, counting).rollouts == rolled(tree, None).rollouts
    assert asked["n"] == [2, 2]
    only(n=[2, 2], prompts=asked["prompts"][:])
    greedy = [complete(policy, PROBLEMS, max_new_tokens=6, batch=1, engine=each) for each in (counting, None)]
    assert greedy[0] == greedy[1]
    only(n=[1], prompts=[2])  # all at once: an engine of its own has its own memory
    task = SimpleNamespace(held_out=lambda: PROBLEMS, retention=lambda: PROBLEMS[:1])
    options = {"success": "digits", "format": None, "max_new_tokens": 6, "batch": 1, "engine": counting}
    evaluate(policy, task, {"digits": digits}, digits, **options)  # type: ignore[arg-type]
    only(n=[1, 1], prompts=[2, 1])
    collected = rolled(CONFIG, None)
    values = [
        PrefixValuer(num_samples=2)(
            ["cutpoints(0.5,3)"],
            policy,
            PROBLEMS,
            collected.rollouts[:1],
            collate(collected.rollouts[:1]),
            panel,
            CONFIG,
            seed=0,
            step=1,
            engine=each,
        )
        for each in (counting, None)
    ]
    means = [one.values["cutpoints(0.5,3)"].value.nan_to_num() for one in values]
    assert means[0].equal(means[1])
    assert set(asked["n"]) == {2}


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "words"),
    [
        ([5, 6], [-0.1, -0.1], "abort", "the reason 'abort'"),
        ([5, 6], [-0.1, -0.1], None, "the reason None"),
        ([5, 2], [-0.1], "stop", "1 log-probabilities for 2 tokens"),
        ([], [], "stop", "a completion of 0 tokens"),
        ([5, 6, 7, 8], [-0.1] * 4, "length", "a completion of 4 tokens, where 1 to 3"),
        ([5, 2, 6], [-0.1] * 3, "length", "goes on behind its end token"),
        ([5, 6], [-0.1, -0.1], "stop", "after 2 tokens without an end token"),
        ([5, 6], [-0.1, -0.1], "length", "--max-model-len"),
        ([5, 2], [-0.1, float("nan")], "stop", "is none"),
        ([5, 2], [-0.1, -9999.0], "stop", "is none"),
        ([5, 2], [-0.1, 0.5], "stop", "is none"),
        ([5, 2], [-0.1, None], "stop", "is none"),
    ],
)
def test_a_completion_that_is_amiss_is_none(ids: Any, logprobs: Any, reason: Any, words: str) -> None:
    with pytest.raises(WrongReply, match=words):
        generation(ids, logprobs, reason, SamplingOptions(3), (2,))


def test_the_ids_say_whether_the_limit_cut_a_completion() -> None:
    options = SamplingOptions(3)
    assert not generation([5, 6, 2], [-0.1] * 3, "length", options, (2,)).truncated  # ended exactly at the limit
    assert not generation([5, 2], [-0.1] * 2, "stop", options, (2,)).truncated
    assert generation([5, 6, 7], [-0.1] * 3, "length", options, (2,)) == Generation([5, 6, 7], [-0.1] * 3, True)


@pytest.mark.parametrize("reply", [None, [], 3, {}, {"choices": None}, {"choices": [1]}, {"choices": []}])
def test_what_is_no_reply_is_no_completion(reply: Any) -> None:
    with pytest.raises(WrongReply):
        generations(reply, [4], 1, SamplingOptions(3), (2,))


def test_weights_are_those_of_the_checkpoint_once_each_and_may_be_read_twice(policy: Policy) -> None:
    weights = PolicyWeights(policy.model)
    first, second = dict(weights), dict(weights)
    assert first.keys() == second.keys() == dict(policy.model.named_parameters()).keys()
    assert all(torch.equal(value, policy.model.state_dict()[name]) for name, value in first.items())
    assert not any(value.requires_grad for value in first.values())
    wrapped = torch.nn.ModuleDict({"module": policy.model})
    assert dict(PolicyWeights(wrapped)).keys() == first.keys()


def test_adapters_are_added_to_the_weights_that_they_adapt_and_the_model_stays(policy: Policy) -> None:
    peft = pytest.importorskip("peft")
    plain = dict(policy.model.named_parameters()).keys()
    adapted = peft.get_peft_model(deepcopy(policy.model), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    found = dict(PolicyWeights(adapted))
    assert found.keys() == plain
    assert all(torch.equal(value, adapted.state_dict()[name]) for name, value in before.items())
    merged = dict(adapted.merge_and_unload().named_parameters())
    for name, value in found.items():
        assert torch.allclose(value, merged[name], atol=1e-6), name
    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"], policy.model.model.layers[0].self_attn.q_proj.weight
    )
