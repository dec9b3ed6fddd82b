"""Time of every strategy on 512 answers of 1,024 tokens, against one optimiser step of the embedded model.

``python benchmarks/credit.py [--rows 512] [--tokens 1024]`` prints one line a strategy: CPU time, and the ratio to
the optimiser step (forward, backward, AdamW) on as many answers and tokens, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from apportion.credit import CreditBatch, assign_credit
from apportion.credit.align import SpanTable
from apportion.credit.batch import PrefixValues, TreeIndex
from apportion.credit.states import prefix_lengths, segment_ids
from apportion.experiments.catalogue import entries
from apportion.experiments.policies import TinyPolicy
from apportion.grpo.forward import score_completions

STEPS = 20
DEPTH = 3


def evidence(rows: int, tokens: int, signals: Iterable[str]) -> CreditBatch:
    """A batch with all evidence that ``signals`` name: groups of 8, 20 judged steps an answer."""
    generator = torch.Generator().manual_seed(0)
    start = torch.arange(STEPS).expand(rows, STEPS) * tokens // STEPS
    stop = torch.arange(1, STEPS + 1).expand(rows, STEPS) * tokens // STEPS
    score = torch.rand(rows, STEPS, generator=generator).round()
    table = SpanTable(start, stop, score, stop > start)
    uniform = torch.rand(rows, tokens, generator=generator)
    groups, leaf = torch.arange(rows) // 8, torch.arange(rows)
    segment = torch.tensor([0, tokens // 3, 2 * tokens // 3])
    named: dict[str, set[str]] = {}
    for kind, _, name in (signal.partition(":") for signal in signals):
        named.setdefault(kind, set()).add(name)
    judged = sorted(named["spans"] | named["score"])
    batch = CreditBatch(
        completion_mask=torch.ones(rows, tokens, dtype=torch.bool),
        group_ids=groups,
        reward=torch.rand(rows, generator=generator, dtype=torch.float64).round(),
        scores={name: torch.rand(rows, generator=generator, dtype=torch.float64).round() for name in judged},
        spans=dict.fromkeys(judged, table),
        truncated=torch.zeros(rows, dtype=torch.bool),
        completion_ids=torch.randint(0, 32, (rows, tokens), generator=generator),
        old_logprobs=uniform.clamp(min=1e-3).log(),
        entropy=uniform,
        sum_pi_squared=uniform,
        ref_logprobs=uniform.clamp(min=1e-3).log() - 0.1,
        logprobs=uniform.clamp(min=1e-3).log() + 0.05,
        token_scores=dict.fromkeys(sorted(named["token_scores"]), uniform),
        tree=TreeIndex(
            torch.stack([groups * 100, 10_000 + leaf // 4, 20_000 + leaf], dim=1),
            segment.expand(rows, DEPTH).clone(),
            torch.tensor([*segment[1:].tolist(), tokens]).expand(rows, DEPTH).clone(),
        ),
    )
    return replace(batch, prefix_values={name: values(name, batch) for name in sorted(named["prefix_values"])})


def values(name: str, batch: CreditBatch) -> PrefixValues:
    """A value of every state that ``name`` means in the batch."""
    shape = prefix_lengths(segment_ids(name, batch)).shape
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return PrefixValues(drawn, torch.full(shape, 9), drawn * (1 - drawn))


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Median CPU seconds of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return sorted(times)[len(times) // 2]


def optimiser_step(rows: int, tokens: int) -> float:
    """CPU seconds of one optimiser step of the embedded model; measured on a 32nd of the rows and scaled up."""
    policy = TinyPolicy(max_positions=tokens + 16).build()
    optimizer = torch.optim.AdamW(policy.model.parameters())
    part = max(rows // 32, 1)

    def step() -> None:
        scored = score_completions(policy, [[5] * 12] * part, [[6] * tokens] * part, width=tokens)
        scored.logprobs.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step) * rows / part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = optimiser_step(options.rows, options.tokens)
    strategies = entries()
    batch = evidence(options.rows, options.tokens, [s for entry in strategies for s in entry.strategy.requires])
    print(f"optimiser step: {step:.2f} CPU s ({options.rows} answers of {options.tokens} tokens)")
    worst = 0.0
    for entry in strategies:
        cost = seconds(lambda strategy=entry.strategy: assign_credit(strategy, batch))
        worst = max(worst, cost / step)
        print(f"{entry.name:32} {cost * 1000:8.1f} ms  {cost / step:7.2%} of a step")
    print(f"worst: {worst:.2%}")


if __name__ == "__main__":
    main()
