"""What exact gradient geometry costs, on real rollouts of the embedded task after its warm start.

``python benchmarks/geometry.py [--repeats 7] [--prompts 4] [--group-size 8]`` prints, as medians of CPU time measured
in turns within one process:

- all strategies at once against a forward and backward pass for each;
- five strategies, the trained one among them, every tenth step against the mean training step (sample, verify,
  credit, update);
- the gradients of each group against the same optimiser steps without them;
- one realised update.

The first run trains the warm start, which then lies in the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from hydra import compose, initialize_config_dir

from apportion.credit import Credit, CreditStrategy, assign_credit, collate
from apportion.experiments.app import CONFIG_FOLDER, build
from apportion.experiments.parts import Parts, build_parts
from apportion.experiments.warmstart import warm_start
from apportion.grpo.collect import Collected, collect
from apportion.grpo.geometry import accumulate_by_group, group_gram
from apportion.grpo.gram import GradientGram
from apportion.grpo.policy import Policy
from apportion.grpo.realised import realised_update
from apportion.grpo.strategy_geometry import StrategyGeometry
from apportion.grpo.task import Task
from apportion.grpo.update import accumulate_gradients, build_optimizer, optimizer_step
from apportion.grpo.window import Window, minibatch_rows
from apportion.verifiers.panel import Panel

STRATEGIES = (
    "uniform",
    "sequence/maxrl",
    "process/own_step",
    "process/return",
    "process/pure",
    "localized/capo",
    "localized/cliff",
    "localized/vppo",
    "weights/entropy_mask",
    "weights/gtpo",
    "format/composed",
    "weights/ktae",
)
CONTROLS = ("control/oracle", "control/shuffled", "control/inverted")
FOUR = ("process/own_step", "process/return", "localized/capo", "localized/cliff")


@dataclass(frozen=True)
class Bench:
    """A warm-started policy with the parts of a run around it."""

    policy: Policy
    task: Task
    parts: Parts
    panel: Panel
    strategies: Mapping[str, CreditStrategy]

    @classmethod
    def build(cls, prompts: int, group_size: int) -> Bench:
        with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            sizes = [f"rollout.prompts_per_step={prompts}", f"rollout.group_size={group_size}"]
            config = compose("train", overrides=sizes)
            nodes = {name: compose("train", overrides=[f"credit={name}"]).credit for name in (*STRATEGIES, *CONTROLS)}
        parts, task = build_parts(config), build(config.task, "task")
        source = build(config.policy, "policy")
        policy = source.build("cpu")
        warm_start(policy, source.key, task, build(config.warm_start, "warm_start"))
        strategies = {name: build(node, "credit") for name, node in nodes.items()}
        return cls(policy, task, parts, Panel(parts.verifiers, parts.reward), strategies)

    def sample(self, step: int) -> Collected:
        """A rollout batch, judged."""
        problems = self.task.batch(step, self.parts.rollout.prompts_per_step, 0)
        return collect(self.policy, problems, self.panel, self.parts.rollout, seed=0, step=step)

    def window(self, step: int) -> Window:
        """A rollout batch with the evidence that all strategies need, and uniform credit."""
        collected = self.sample(step)
        signals = frozenset(signal for strategy in self.strategies.values() for signal in strategy.requires)
        window = Window.open(step, collected.rollouts, collate(collected.rollouts))
        window.batch = self.parts.evidence.gather(
            signals,
            self.policy,
            collected.problems,
            collected.rollouts,
            window.batch,
            self.panel,
            self.parts.rollout,
            rows=self.parts.optim.micro_batch_rows,
            seed=0,
            step=step,
        ).batch
        window.credit = assign_credit(self.strategies["uniform"], window.batch)
        return window

    @property
    def options(self) -> dict[str, float]:
        rollout = self.parts.rollout
        return {"max_tokens": rollout.max_new_tokens, "temperature": rollout.temperature}


def medians(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU milliseconds of each, called in turns after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = time.process_time()
            function()
            if turn:
                times[name].append(1000 * (time.process_time() - began))
    return {name: statistics.median(seen) for name, seen in times.items()}


def all_at_once(bench: Bench, window: Window, names: tuple[str, ...], repeats: int) -> None:
    """Exact Gram matrix of many strategies against separate passes."""
    credits = {name: assign_credit(bench.strategies[name], window.batch) for name in names}
    rows, micro = torch.arange(len(window.prompt_ids)), bench.parts.optim.micro_batch_rows

    def at_once() -> GradientGram:
        arguments = (bench.policy, window.prompt_ids, window.completion_ids, window.batch, credits, bench.parts.loss)
        return group_gram(*arguments, micro_batch_rows=micro, **bench.options)

    def one_by_one() -> None:
        for credit in credits.values():
            bench.policy.model.zero_grad(set_to_none=True)
            mine = replace(window, credit=credit)
            accumulate_gradients(bench.policy, mine, rows, bench.parts.loss, micro_batch_rows=micro, **bench.options)
        bench.policy.model.zero_grad(set_to_none=True)

    found = medians({"geometry": at_once, "separate": one_by_one}, repeats)
    work, share = at_once().work, found["geometry"] / found["separate"]
    print(
        f"{len(names)} strategies at once: {found['geometry']:.1f} ms, {share:.2f} of {len(names)} separate passes "
        f"({found['separate']:.1f} ms); {work.forwards} forwards, {work.backwards} backwards"
    )


def in_training(bench: Bench, window: Window, repeats: int) -> None:
    """Four strategies beside the trained one every tenth step, against the mean whole step; weights stay (lr 0)."""
    geometry = StrategyGeometry({name.rpartition("/")[2]: bench.strategies[name] for name in FOUR})
    optim = replace(bench.parts.optim, lr=0.0)
    optimizer, schedule = build_optimizer(bench.policy, optim, 1000)
    step = iter(range(2, 1000))

    def training_step() -> None:
        number = next(step)
        rollouts = bench.sample(number).rollouts
        mine = Window.open(number, rollouts, collate(rollouts))
        mine.credit = assign_credit(bench.strategies["uniform"], mine.batch)
        for rows in minibatches(mine, optim.minibatches):
            micro = optim.micro_batch_rows
            accumulate_gradients(bench.policy, mine, rows, bench.parts.loss, micro_batch_rows=micro, **bench.options)
            optimizer_step(bench.policy, optimizer, schedule, max_grad_norm=optim.max_grad_norm, step=number)

    def measure() -> None:
        micro = optim.micro_batch_rows
        geometry.measure(bench.policy, window, loss=bench.parts.loss, micro_batch_rows=micro, **bench.options)

    found = medians({"step": training_step, "geometry": measure}, repeats)
    share = found["geometry"] / found["step"] / 10
    print(f"5 strategies every 10 steps: {found['geometry']:.1f} ms, +{share:.1%} of the step ({found['step']:.1f} ms)")


def minibatches(window: Window, number: int) -> list[torch.Tensor]:
    return minibatch_rows(window.batch.group_ids, minibatches=number, seed=0, step=window.step, epoch=0)


def by_group(bench: Bench, window: Window, number: int, repeats: int) -> None:
    """Gradients of each group, on top of the same optimiser steps."""

    def passes(accumulate: Callable[..., object]) -> Callable[[], None]:
        def work() -> None:
            for rows in minibatches(window, number):
                bench.policy.model.zero_grad(set_to_none=True)
                micro = bench.parts.optim.micro_batch_rows
                accumulate(bench.policy, window, rows, bench.parts.loss, micro_batch_rows=micro, **bench.options)
            bench.policy.model.zero_grad(set_to_none=True)

        return work

    found = medians({"plain": passes(accumulate_gradients), "groups": passes(accumulate_by_group)}, repeats)
    print(
        f"gradients of each group, {number} optimiser steps: {found['groups']:.1f} ms, "
        f"+{found['groups'] / found['plain'] - 1:.1%} of the passes without ({found['plain']:.1f} ms)"
    )


def realised(bench: Bench, window: Window, repeats: int) -> None:
    """One optimiser step on a copy, with the exact KL."""
    classes = torch.zeros(window.batch.completion_mask.shape, dtype=torch.long)

    def update() -> None:
        credit: Credit = window.credit
        arguments = (bench.policy, window.prompt_ids, window.completion_ids, window.batch, credit, bench.parts.loss)
        realised_update(*arguments, bench.parts.optim, classes=classes, class_names=["all"], **bench.options)

    print(f"one realised update: {medians({'update': update}, repeats)['update']:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench.build(options.prompts, options.group_size)
    window = bench.window(2)
    rewards = [round(mean, 2) for mean in window.batch.reward.view(-1, options.group_size).mean(dim=1).tolist()]
    print(f"{len(window.prompt_ids)} rollouts, {int(window.batch.completion_mask.sum())} tokens, rewards {rewards}")
    all_at_once(bench, window, STRATEGIES, options.repeats)
    all_at_once(bench, window, STRATEGIES + CONTROLS, options.repeats)
    in_training(bench, window, options.repeats)
    for number in (1, bench.parts.optim.minibatches):
        by_group(bench, window, number, options.repeats)
    realised(bench, window, options.repeats)


if __name__ == "__main__":
    main()
