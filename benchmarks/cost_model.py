"""What ``apportion cost`` predicts against what runs take: two sizes of the embedded policy, five strategies.

``python benchmarks/cost_model.py [--steps 6] [--json FILE]`` prints a line for each size and strategy. The speed of
matrix products and of copying, and what the smallest forward and the smallest decoding step take, are measured first,
in the same process; then lengths, steps and dead groups of the uniform run and the time of judging are put in. Nothing
else is fitted: the shares of the peak are those of ``hardware.cpu``. Times are CPU seconds of one thread, medians over
the steps; learning rate zero keeps the answers of all runs alike. Pairs are predicted / measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from apportion.experiments.app import CONFIG_FOLDER, build
from apportion.experiments.cost import plan_of
from apportion.experiments.cost_ledger import PHASES, Estimate, estimate
from apportion.experiments.cost_model import Hardware, size_of
from apportion.experiments.cost_options import Answers, Engine, Judge, Plan, Rollouts, Run, Update
from apportion.experiments.parts import Parts, build_parts
from apportion.experiments.warmstart import warm_start
from apportion.grpo.collect import as_sample, collect, encode_prompts
from apportion.grpo.forward import score_in_parts
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import Generation, sample_groups
from apportion.grpo.trainer import Trainer, TrainerConfig
from apportion.prm.model import StepModel
from apportion.prm.score import StepRewardModel
from apportion.prm.settings import StepSettings
from apportion.verifiers import Sample
from apportion.verifiers.panel import Panel, judge
from apportion.verifiers.segmenters import Lines

STRATEGIES = ("uniform", "localized/capo", "resampled/vineppo", "redistribution/counterfactual", "redistribution/oar")
SCORED = "localized/capo"  # its steps are judged by a reward model of the policy's size
SIZES = {
    "small": ["policy.hidden_size=64", "policy.layers=2", "policy.intermediate_size=168", "warm_start.lr=0.01"],
    "large": ["policy.hidden_size=160", "policy.layers=4", "policy.intermediate_size=432", "warm_start.lr=0.003"],
}
SHARED = ["warm_start.steps=150", "warm_start.batch_size=32", "optim.lr=0.0", "prefix_valuer.num_samples=4"]


@dataclass(frozen=True)
class Bench:
    """A warm-started policy with the parts of a run around it, and a reward model of its size."""

    policy: Policy
    task: Any
    parts: Parts
    strategies: Mapping[str, Any]
    reward_model: StepRewardModel

    @classmethod
    def build(cls, size: str, folder: Path) -> Bench:
        with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            config = compose("train", overrides=[*SHARED, *SIZES[size]])
            nodes = {name: compose("train", overrides=[f"credit={name}"]).credit for name in STRATEGIES}
        source, task = build(config.policy, "policy"), build(config.task, "task")
        policy = source.build("cpu")
        warm_start(policy, source.key, task, build(config.warm_start, "warm_start"))
        strategies = {name: build(node, "credit") for name, node in nodes.items()}
        return cls(policy, task, build_parts(config), strategies, reward_model(policy, folder))

    def verifiers(self, strategy: str) -> dict[str, Any]:
        own = self.parts.verifiers
        return {"answer": own["answer"], "steps": self.reward_model if strategy == SCORED else own["steps"]}

    def run(self, strategy: str, steps: int) -> list[dict[str, float]]:
        """Metrics of the steps after the first, with their CPU seconds."""
        rows: list[dict[str, float]] = []
        began = time.process_time()

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            nonlocal began
            if step > 1:
                rows.append({**metrics, "cpu": time.process_time() - began})
            began = time.process_time()

        with tempfile.TemporaryDirectory() as folder:
            Trainer(
                self.policy,
                self.task,
                self.verifiers(strategy),
                {"answer": 1.0},
                self.strategies[strategy],
                rollout=self.parts.rollout,
                loss=self.parts.loss,
                optim=self.parts.optim,
                config=TrainerConfig(steps=steps + 1, eval_every=0, save_every=0, rollouts_every=0, reference_kl=False),
                folder=Path(folder),
                evidence=self.parts.evidence,
                on_step=on_step,
            ).train()
        return rows[:steps]


def reward_model(policy: Policy, folder: Path) -> StepRewardModel:
    """A step model with random weights, of the policy's shape; the verifier loads it from ``folder``."""
    from transformers import LlamaForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForTokenClassification(policy.model.config)
    StepModel(model, policy.tokenizer, StepSettings()).save_pretrained(folder)
    return StepRewardModel(str(folder), segmenter=Lines())


# --- what the machine does -------------------------------------------------------------------------------------------


def cpu_seconds(function: Callable[[], object], repeats: int = 9) -> float:
    """Median CPU seconds of a call, after one to warm up."""
    function()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def measured_hardware(policy: Policy, preset: Hardware) -> Hardware:
    """The preset with the speeds of this core: products of the policy's own shape, a copy, the smallest forward."""
    config = policy.model.config
    left = torch.randn(512, config.hidden_size)
    right = torch.randn(config.hidden_size, config.intermediate_size)
    flops = 2 * left.shape[0] * right.numel() / cpu_seconds(lambda: [left @ right for _ in range(20)]) * 20
    block, other = torch.randn(2, 2**23)
    bandwidth = 2 * 4 * block.numel() / cpu_seconds(lambda: other.copy_(block))
    forward = cpu_seconds(lambda: score_in_parts(policy, [[5]], [[6]], temperature=1.0, rows=1))
    return replace(preset, flops=flops, bandwidth=bandwidth, layer_seconds=forward / config.num_hidden_layers)


def decoding_seconds(policy: Policy, steps: int = 16) -> float:
    """Of a layer, in a decoding step of two rows that nothing ends."""
    endless = replace(policy, eos_ids=(-1,))
    taken = cpu_seconds(lambda: sample_groups(endless, [[5]], [0, 1], group_size=2, max_new_tokens=steps))
    return taken / steps / policy.model.config.num_hidden_layers


def plan_for(bench: Bench, uniform: Sequence[Mapping[str, float]]) -> Plan:
    """The plan of the runs: measured speeds, lengths of the uniform run, time of the verifiers."""
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        given = plan_of(compose("cost", overrides=["gpu=cpu", "sampler=native", "gpus=1"]))
    rollout, optim = bench.parts.rollout, bench.parts.optim
    problems = bench.task.batch(2, rollout.prompts_per_step, 0)
    panel = Panel(bench.verifiers("uniform"), {"answer": 1.0})
    rollouts = collect(bench.policy, problems, panel, rollout, seed=0, step=2).rollouts
    prompts = encode_prompts(bench.policy, problems, rollout.max_new_tokens)
    written = [(r.group_id, Generation(list(r.completion_ids), [], r.truncated)) for r in rollouts]

    def read() -> list[Sample]:
        return [as_sample(bench.policy, problems[at], prompts[at], one) for at, one in written]

    samples = read()
    per_answer = {
        name: cpu_seconds(lambda one={name: verifier}: judge(one, samples)) / len(samples)
        for name, verifier in bench.verifiers("uniform").items()
    }
    per_answer["answer"] += cpu_seconds(read) / len(samples)  # to make a text of the ids comes before judging
    device = measured_hardware(bench.policy, given.device)
    return replace(
        given,
        policy=size_of(bench.policy.model),
        device=device,
        engine=Engine(decoding_seconds(bench.policy), own_weights=False),
        answers=Answers(
            prompt_tokens=statistics.mean(map(len, prompts)),
            tokens=mean_of(uniform, "length/mean"),
            longest=mean_of(uniform, "length/max"),
            steps=statistics.mean(len(r.verdicts["steps"].spans) for r in rollouts),
            dead_groups=mean_of(uniform, "reward/dead_groups"),
        ),
        rollouts=Rollouts(rollout.prompts_per_step, rollout.group_size, rollout.max_new_tokens),
        update=Update(optim.epochs, optim.minibatches, optim.micro_batch_rows, gradient_checkpointing=False),
        run=Run(steps=1, eval_every=0, reference_kl=False),
        bytes=replace(given.bytes, sampling=4.0, cache=4.0, activation=4.0),
        judges={name: Judge(seconds) for name, seconds in per_answer.items()},
        evidence=bench.parts.evidence,
        sized=lambda _: size_of(bench.policy.model),
    )


def mean_of(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows if key in row)


def predicted(bench: Bench, plan: Plan, strategy: str) -> Estimate:
    if strategy == SCORED:
        plan = replace(plan, judges={**plan.judges, "steps": Judge(0.0, plan.policy.params)})
    return estimate(strategy, bench.strategies[strategy], plan)


# --- the table -------------------------------------------------------------------------------------------------------


def compare(size: str, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.build(size, Path(folder))
        bench.run("uniform", 2)  # to warm up
        runs = {name: bench.run(name, steps) for name in STRATEGIES}
        plan = plan_for(bench, runs["uniform"])
    print(
        f"{size}: {plan.policy.params:,.0f} parameters, {plan.device.flops / 1e9:.0f} GFLOP/s, "
        f"{plan.device.bandwidth / 1e9:.1f} GB/s, {plan.device.layer_seconds * 1e6:.0f} us a layer; "
        f"{plan.answers.tokens:.0f} tokens, {plan.answers.steps:.1f} steps an answer, "
        f"{plan.answers.dead_groups:.0%} of the groups dead"
    )
    rows = []
    for name in STRATEGIES:
        told, seen = predicted(bench, plan, name), runs[name]
        cpu = statistics.median(row["cpu"] for row in seen)
        wall = {phase: mean_of(seen, f"cost/seconds_{phase}") for phase in PHASES if phase != "evaluate"}
        rows.append(
            {
                "size": size,
                "strategy": name,
                "tokens": told.total("generated") / mean_of(seen, "cost/tokens"),
                "seconds_predicted": told.total("seconds"),
                "seconds_measured": cpu,
                # The trainer's clock is the wall's: its shares divide the CPU seconds.
                "phases": {
                    phase: (told.total("seconds", phase), cpu * share / sum(wall.values()))
                    for phase, share in wall.items()
                },
            }
        )
    for row in rows:
        for side in ("predicted", "measured"):
            row[f"times_uniform_{side}"] = row[f"seconds_{side}"] / rows[0][f"seconds_{side}"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for size in options.sizes for row in compare(size, options.steps)]
    print("| model | strategy | tokens | s a step | ratio | x uniform | sample | evidence | update |")
    print("|---" * 9 + "|")
    for row in rows:
        pairs = [row["phases"][phase] for phase in ("sample", "evidence", "update")]
        phases = [f"{told:.2f} / {seen:.2f}" if max(told, seen) > 0.005 else "" for told, seen in pairs]
        print(
            f"| {row['size']} | {row['strategy']} | {row['tokens']:.2f} | {row['seconds_predicted']:.3f} / "
            f"{row['seconds_measured']:.3f} | {row['seconds_predicted'] / row['seconds_measured']:.2f} | "
            f"{row['times_uniform_predicted']:.2f} / {row['times_uniform_measured']:.2f} | {' | '.join(phases)} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
