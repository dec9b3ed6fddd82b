"""``apportion cost``: hand-made numbers, and what each kind of evidence adds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from apportion.credit import Credit, CreditBatch
from apportion.credit.influence import InfluenceWeight
from apportion.credit.localized import WrongSteps
from apportion.credit.uniform import Uniform
from apportion.experiments.app import CONFIG_FOLDER, build
from apportion.experiments.cost import plan_of
from apportion.experiments.cost_ledger import Estimate, estimate
from apportion.experiments.cost_model import Bytes, Hardware, ModelSize, decode, model_size, size_of, training_memory
from apportion.experiments.cost_options import Answers, Engine, Judge, Plan, Rollouts, Run, Update
from apportion.experiments.policies import TinyPolicy
from apportion.grpo.evidence import Evidence
from apportion.grpo.prefix_values import PrefixValuer
from apportion.grpo.scorers import LogRatio
from apportion.verifiers import InputError

ROOT = Path(__file__).resolve().parents[2]
# 1,000 weights in the layers and 200 in the head; one operation a second at the peaks makes seconds of operations.
SIZE = ModelSize(params=1200, layers=2, hidden_size=10, kv_size=5, vocabulary=20)
DEVICE = Hardware(flops=1, bandwidth=1e30, memory=1e9, train=1, forward=1, decode=1, stream=1)
PLAN = Plan(
    policy=SIZE,
    device=DEVICE,
    gpus=1,
    sharding="ddp",
    engine=Engine(0.0, own_weights=False),
    answers=Answers(prompt_tokens=10, tokens=20, longest=30, steps=4),
    rollouts=Rollouts(prompts_per_step=2, group_size=4, max_new_tokens=40),
    update=Update(epochs=1, minibatches=2, micro_batch_rows=4, gradient_checkpointing=False),
    run=Run(steps=3, eval_every=0, reference_kl=False),
    bytes=Bytes(),
    reward=["answer"],
    judges={"answer": Judge(0.5), "steps": Judge(0.25)},
    other=Judge(1.0),
    evidence=Evidence({}, PrefixValuer(num_samples=3)),
    passes={},
    sized=lambda params: replace(SIZE, params=params),
)
SCORED = Evidence({"s": LogRatio()})
TEXTS = 8 * 20 + 2 * 10  # tokens of the answers and, once a group, of the prompts
FORWARD = TEXTS * (2 * 1000 + 4 * 2 * 10 * 20) + TEXTS * 2 * 200  # a token sees the prompt and half of its answer


class Reads:
    """A strategy that reads ``signals``."""

    conserves = "none"

    def __init__(self, *signals: str, phase: str = "rollout") -> None:
        self.requires, self.phase = frozenset(signals), phase

    def __call__(self, batch: CreditBatch) -> Credit:
        raise AssertionError("a plan runs nothing")


def of(*signals: str, plan: Plan = PLAN, phase: str = "rollout") -> Estimate:
    return estimate("mine", Reads(*signals, phase=phase), plan)  # type: ignore[arg-type]


def seconds(found: Estimate) -> dict[str, float]:
    return {item.what: item.seconds for item in found.items}


# --- passes ----------------------------------------------------------------------------------------------------------


def test_a_forward_takes_two_operations_a_weight_and_four_a_number_of_the_context() -> None:
    assert SIZE.body == 1000
    assert SIZE.forward_flops(1, context=0) == 2400
    assert SIZE.forward_flops(3, context=7, predicted=1) == 3 * (2000 + 4 * 2 * 10 * 7) + 400
    assert replace(SIZE, tied=False).body == 800


def test_the_uniform_step_by_hand() -> None:
    found = of("reward")
    sampling = 8 * 20 * (2400 + 80 * 20)  # operations of a sampled token: weights, and 10 + 20/2 tokens before it
    prompts = 2 * 10 * (2000 + 80 * 10) + 8 * 400
    assert seconds(found) == {
        "answers": sampling + prompts,
        "verifier answer, answers": 4.0,
        "policy": 3 * FORWARD,
    }
    assert found.total("generated") == 160
    assert found.total("trained") == TEXTS
    assert found.total("judging") == 4
    assert found.gpu_hours == pytest.approx((sampling + prompts + 4 + 3 * FORWARD) * 3 / 3600)


def test_decoding_waits_for_memory_where_arithmetic_is_cheap() -> None:
    device = replace(DEVICE, flops=1e30, bandwidth=100.0, stream=0.5)
    done = decode(
        SIZE, device, Bytes(), rows=4, tokens=20, longest=30, context=15, read=0, at_most=4, layer_seconds=0.0
    )
    weights, cache = 30 * 1200 * 2, 4 * 20 * 15 * (2 * 2 * 5 * 2)
    assert done.seconds == (weights + cache) / 50


def test_completions_that_do_not_fit_side_by_side_come_one_after_the_other() -> None:
    device = replace(DEVICE, flops=1e30)

    def took(at_most: float) -> float:
        return decode(
            SIZE, device, Bytes(), rows=8, tokens=20, longest=30, context=15, read=0, at_most=at_most, layer_seconds=1.0
        ).seconds

    assert took(8) == pytest.approx(30 * 2)
    assert took(3) == pytest.approx(3 * 30 * 2)


def test_adamw_in_float32_takes_sixteen_bytes_a_parameter_and_fsdp2_divides_them() -> None:
    def memory(shards: int, checkpointing: bool) -> Any:
        return training_memory(
            SIZE, Bytes(), micro_tokens=100, checkpointing=checkpointing, sharded_over=shards, whole=50, spread=1200,
            also_trained=0,
        )  # fmt: skip

    assert memory(1, False).state == 1200 * 16
    assert memory(4, False).state == 1200 * 4
    assert memory(4, False).frozen == (50 + 300) * 4
    logits = 3 * 4 * 100 * 20
    assert memory(1, False).activations == 100 * 2 * 34 * 10 + logits
    assert memory(1, True).activations == 100 * (34 * 10 + 2 * 10 * 2) + logits


def test_what_does_not_fit_is_said() -> None:
    assert of("reward").fits
    assert not of("reward", plan=replace(PLAN, device=replace(DEVICE, memory=20_000))).fits


# --- evidence --------------------------------------------------------------------------------------------------------


def test_more_gpus_take_less_time_and_the_same_operations() -> None:
    one, four = of("reward"), of("reward", plan=replace(PLAN, gpus=4, sharding="fsdp2"))
    assert four.total("flops") == one.total("flops")
    assert four.total("seconds", "update") == one.total("seconds", "update") / 4
    assert four.total("seconds", "sample") == one.total("seconds", "sample") / 4
    assert four.total("judging") == one.total("judging")


def test_step_verdicts_cost_their_verifier_and_a_reward_model_a_forward_of_each_whole_text() -> None:
    program = of("reward", "spans:steps")
    assert program.total("judging") == 8 * 0.5 + 8 * 0.25
    model = of("reward", "spans:steps", plan=replace(PLAN, judges={"steps": Judge(0.0, params=5200)}))
    item = next(item for item in model.items if item.what.startswith("reward model steps"))
    assert item.read == 8 * 30
    assert item.flops == 8 * 30 * (2 * 5000 + 80 * 20 + 400)
    assert model.memory.frozen == 5200 * 4


def test_prefix_values_cost_continuations_of_each_prompt_and_of_each_later_step() -> None:
    found = of("reward", "spans:steps", "prefix_values:steps")
    generated = {item.what: item.generated for item in found.items if item.generated}
    assert generated == {
        "answers": 160,
        "continuations of prompts": 2 * 3 * 20,
        "continuations of states": 8 * 3 * 3 * 10,  # three steps begin inside an answer; half of it is left on average
    }
    assert found.total("judging", "evidence") == (2 * 3 + 8 * 3 * 3) * 0.5
    two = replace(PLAN, evidence=Evidence({}, PrefixValuer(num_samples=3, max_states=2)))
    assert of("reward", "prefix_values:steps", plan=two).total("generated") == 160 + 120 + 8 * 2 * 3 * 10


def test_cutpoints_lie_at_uncertain_tokens() -> None:
    plan = replace(PLAN, answers=replace(PLAN.answers, uncertain=0.5))
    found = of("reward", "prefix_values:cutpoints(0.9,5)", plan=plan)
    assert found.total("generated") == 160 + 120 + 8 * 2 * 3 * 10  # ten uncertain tokens, each fifth begins a segment


def test_a_tree_samples_shared_beginnings_once_and_trains_whole_answers() -> None:
    plan = replace(PLAN, rollouts=replace(PLAN.rollouts, branching=[2, 2], segment_tokens=8))
    found = of("reward", "tree", plan=plan)
    assert [item.generated for item in found.items if item.phase == "sample"] == [2 * 2 * 8, 2 * 4 * 12]
    assert [item.read for item in found.items if item.phase == "sample"] == [2 * 10, 4 * 18]
    assert found.total("trained") == TEXTS
    assert Rollouts(group_size=12).widths == [3, 2, 2]


def test_entropies_and_each_update_cost_forwards() -> None:
    assert of("reward", "entropy").total("flops", "evidence") == FORWARD
    assert of("reward", "entropy", "sum_pi_squared").total("flops", "evidence") == FORWARD
    assert of("reward", "logprobs", phase="update").total("flops", "evidence") == 2 * FORWARD
    assert of("reward", "ref_logprobs").total("flops", "reference") == FORWARD
    assert (
        of("reward", plan=replace(PLAN, update=replace(PLAN.update, kl_coef=0.1))).total("flops", "reference")
        == FORWARD
    )


@pytest.mark.parametrize(
    ("scorer", "forwards"),
    [
        ({"_target_": "apportion.grpo.scorers.LogRatio"}, 0),
        ({"_target_": "apportion.grpo.scorers.LastTokenAttention"}, 1),
        ({"_target_": "apportion.grpo.influence.GradientInfluence"}, 3),
        ({"_target_": "apportion.grpo.influence.CounterfactualSpans"}, 5),
        ({"_target_": "apportion.grpo.influence.PerturbationInfluence"}, 21),
        ({"_target_": "apportion.grpo.reward_model.RewardModelScorer", "path": "x"}, 1),
    ],
)
def test_token_scorers_cost_passes_over_whole_texts(scorer: dict[str, Any], forwards: float) -> None:
    from omegaconf import OmegaConf

    built = build(OmegaConf.create(scorer), "scorers.s")
    found = of("reward", "token_scores:s", plan=replace(PLAN, evidence=Evidence({"s": built})))
    assert found.total("read", "evidence") == forwards * 8 * 30
    assert not found.assumed


def test_a_model_that_learns_beside_the_policy_costs_its_update_and_its_states() -> None:
    from apportion.grpo.implicit_prm import ImplicitPrm

    plan = replace(PLAN, evidence=Evidence({"s": ImplicitPrm(updates=2)}))
    found = of("reward", "token_scores:s", plan=plan)
    assert found.total("trained", "evidence") == 2 * TEXTS
    assert found.total("flops", "evidence") == 7 * FORWARD
    assert found.total("flops", "reference") == FORWARD  # which it reads
    assert found.memory.state == 2 * 1200 * 16


def test_a_scorer_of_ones_own_is_taken_for_one_forward_unless_told() -> None:
    class Mine:
        requires = frozenset({"old_logprobs"})

    plan = replace(PLAN, evidence=Evidence({"s": Mine()}))  # type: ignore[dict-item]
    found = of("reward", "token_scores:s", plan=plan)
    assert found.total("read", "evidence") == 8 * 30
    assert found.assumed == ["scorers.s is not one of ours: one forward; +passes.s=2 says otherwise"]
    told = of("reward", "token_scores:s", plan=replace(plan, passes={"s": 2.0}))
    assert (told.total("read", "evidence"), told.assumed) == (2 * 8 * 30, [])


def test_dead_groups_save_the_update_where_credit_keeps_the_mass_or_sign_of_the_outcome() -> None:
    plan = replace(PLAN, answers=replace(PLAN.answers, dead_groups=0.5))
    assert estimate("uniform", Uniform(), plan).total("trained") == TEXTS / 2
    assert estimate("steps", WrongSteps(), plan).total("trained") == TEXTS  # it finds faults in any group
    influence = InfluenceWeight(scores="s")
    assert (
        estimate("influence", influence, replace(plan, passes={"s": 1.0}, evidence=SCORED)).total("trained")
        == TEXTS / 2
    )
    kl = replace(plan, update=replace(plan.update, kl_coef=0.1))
    assert estimate("uniform", Uniform(), kl).total("trained") == TEXTS


def test_a_signal_that_nothing_gives_is_refused() -> None:
    with pytest.raises(InputError, match=r"credit needs token_scores:s; add \+scorer@scorers.s="):
        of("token_scores:s")
    with pytest.raises(InputError, match="add prefix_valuer=rollouts"):
        of("prefix_values:steps", plan=replace(PLAN, evidence=Evidence()))


# --- the command -----------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "cost.json").read_text())


def test_the_shape_of_a_policy_is_that_of_a_published_model_of_its_size_or_its_own() -> None:
    near = model_size({"params": 7e9, "path": None})
    assert (near.params, near.layers, near.hidden_size) == (7e9, 28, 3584)
    assert model_size({"params": 7e9, "layers": 32}).layers == 32
    with pytest.raises(InputError, match="fewer than a vocabulary of 49152 takes"):
        model_size({"params": 1e6})
    tiny = size_of(TinyPolicy().build().model)
    assert (tiny.layers, tiny.hidden_size, tiny.kv_size) == (2, 64, 64)
    assert tiny.body == tiny.params - tiny.vocabulary * 64


def test_the_size_of_a_saved_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    model = TinyPolicy(hidden_size=32, layers=3, heads=2).build().model
    model.config.save_pretrained(tmp_path)
    assert model_size({"path": str(tmp_path)}) == size_of(model)


def test_a_strategy_is_compared_with_uniform(apportion: Callable[..., Any], tmp_path: Path) -> None:
    outcome = apportion(
        "cost", "strategy=resampled/vineppo", "policy.params=7e9", "gpus=64", "answer.tokens=600", "run.dir=out"
    )
    assert outcome.status == 0
    assert outcome.out[-1] == str(tmp_path / "out")
    record = read(tmp_path)
    assert list(record["strategies"]) == ["uniform", "resampled/vineppo"]
    both = record["strategies"]
    assert both["uniform"]["times_uniform"] == 1
    assert both["uniform"]["generated_tokens"] == 512 * 600 + 500 * 600 / 25
    assert both["resampled/vineppo"]["generated_tokens"] - both["uniform"]["generated_tokens"] == (
        64 * 9 * 600 + 512 * 7 * 9 * 300
    )
    assert both["resampled/vineppo"]["times_uniform"] > 1.5
    assert (
        record["command"]
        == "apportion cost credit=resampled/vineppo policy.params=7e9 gpus=64 answer.tokens=600 run.dir=out"
    )
    shown = [line.split()[0] for line in outcome.out if line.strip()]
    assert "uniform" in shown
    assert "resampled/vineppo" in shown


def test_several_strategies_keep_what_the_command_line_says(apportion: Callable[..., Any], tmp_path: Path) -> None:
    outcome = apportion(
        "cost",
        "credit=localized/capo,process/prime,tree/treerl",
        "verifiers.steps.params=7e9",
        "gpu=h200",
        "run.dir=out",
    )
    assert outcome.status == 0
    found = read(tmp_path)["strategies"]
    assert list(found) == ["uniform", "localized/capo", "process/prime", "tree/treerl"]
    assert any(item["what"].startswith("reward model steps") for item in found["localized/capo"]["items"])
    assert found["tree/treerl"]["generated_tokens"] < found["uniform"]["generated_tokens"]


@pytest.mark.slow
def test_every_strategy_can_be_planned(apportion: Callable[..., Any], tmp_path: Path) -> None:
    assert apportion("cost", "all=true", "run.dir=out").status == 0
    record = read(tmp_path)
    every = {path.relative_to(CONFIG_FOLDER / "credit").with_suffix("").as_posix()
             for path in (CONFIG_FOLDER / "credit").rglob("*.yaml")}  # fmt: skip
    assert set(record["strategies"]) | set(record["left_out"]) == every
    # Only the control that knows the truth is a matter of the probe.
    assert set(record["left_out"]) == {"control/true_advantage"}
    assert min(one["times_uniform"] for one in record["strategies"].values()) > 0.9


def test_an_experiment_may_hold_what_only_training_reads(apportion: Callable[..., Any], tmp_path: Path) -> None:
    assert apportion("cost", "experiment=smoke", "run.dir=out").status == 0
    found = read(tmp_path)["strategies"]["uniform"]
    assert found["generated_tokens"] == pytest.approx((512 + 500 / 3) * 0.3 * 32)


def test_a_strategy_of_ones_own(apportion: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "own_cost_strategy.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n"
        "    phase, conserves = 'rollout', 'none'\n"
        "    requires = frozenset({'reward', 'entropy', 'spans:plan'})\n"
        "    def __call__(self, batch): ...\n"
    )
    outcome = apportion("cost", "~credit", "+credit._target_=own_cost_strategy.Mine", "run.dir=out")
    assert outcome.status == 0
    found = read(tmp_path)["strategies"]["Mine"]
    assert found["requires"] == ["entropy", "reward", "spans:plan"]
    assert found["assumed"] == ["verifiers.plan is not described: 0.001 s an answer"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("gpus=0", "gpus=0: must be at least 1"),
        ("gpu=h100s", "gpu=h100s: not one of hardware; did you mean h100?"),
        ("answer.steps=many", "answer.steps='many': must be a number"),
        ("answer.tokens=3000", "answer.tokens=3000: the mean cannot be over rollout.max_new_tokens=2048"),
        ("+run.step=3", "run.step: Run has no such option; did you mean steps?"),
        ("+answer.step=3", "answer.step: Answers has no such option; did you mean steps?"),
        ("answer.dead_groups=2", "answer.dead_groups=2: is a share; give 0 to 1"),
        ("policy.params=-1", "policy.params=-1: must be a number over 0; or give policy.path"),
        ("rollout.branching=[2,3]", "rollout.branching=[2, 3]: its product must be rollout.group_size"),
        ("credit=uniform,localized/capoo", "credit=localized/capoo: there is no such option"),
        ("+engine=vllm", "engine: nothing reads this key"),
        ("~prefix_valuer", "credit needs prefix values; add prefix_valuer=rollouts"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    apportion: Callable[..., Any], tmp_path: Path, argument: str, message: str
) -> None:
    strategy = "credit=resampled/vineppo" if argument == "~prefix_valuer" else "run.steps=2"
    outcome = apportion("cost", argument, strategy, "run.dir=out")
    assert outcome.status == 2
    assert len(outcome.err) == 1
    assert message in outcome.err[0]
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(apportion: Callable[..., Any]) -> None:
    assert apportion("cost", "run.dir=out").status == 0
    again = apportion("cost", "run.dir=out")
    assert (again.status, len(again.err)) == (2, 1)


def test_the_presets_plan_what_the_command_says() -> None:
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        plan = plan_of(compose("cost", overrides=["policy.params=70e9", "gpus=64"]))
    assert plan.tensor_parallel == 4  # 140 GB of weights on devices of 80 GB, and room for the cache
    assert plan.device.flops == 9.89e14


@pytest.mark.slow
def test_the_gpu_benchmark_runs_at_toy_size_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--toy", "--seconds", "300", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    found = json.loads((tmp_path / "gpu.json").read_text())
    toy = found["sizes"]["toy"]
    assert toy["rollout"]["tokens"] == toy["update"]["tokens"]
    assert 0 < toy["update"]["utilisation"] < 1
    for part in (found["tests"], found["vllm"], found["trl"]):
        assert part  # numbers, or why there are none
    assert (tmp_path / "gpu.svg").read_text().count("<svg") == 1


def test_the_model_itself_says_how_large_it_is() -> None:
    with pytest.raises(InputError, match=r"policy.params=inf: must be a number over 0"):
        model_size({"params": float("inf")})
    with pytest.raises(InputError, match=r"policy.params=foo: must be a number over 0"):
        model_size({"params": "foo"})
