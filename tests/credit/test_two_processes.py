"""Two processes that share the groups of a batch get the gradient of one, whatever the rule."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from apportion.credit import Rollout, assign_credit
from apportion.experiments.catalogue import entries
from apportion.experiments.policies import TinyPolicy
from apportion.grpo.loss import AGGREGATIONS, LossConfig
from apportion.grpo.update import accumulate_gradients
from apportion.grpo.window import Window

ROWS, TOKENS = 16, 24


def windows() -> Iterator[tuple[str, Window]]:
    """One window for every strategy of conf/credit, on the same evidence, with the statistics of the whole batch."""
    path = Path(__file__).parents[2] / "benchmarks" / "credit.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_credit", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    strategies = entries()
    batch = module.evidence(ROWS, TOKENS, [s for entry in strategies for s in entry.strategy.requires])
    batch = replace(batch, completion_ids=batch.completion_ids % 20 + 3)  # ids that the tiny policy knows
    rollouts = [
        Rollout([5, 6, 7], ids, [0.0] * TOKENS, [(0, 0)] * TOKENS, "", int(group))
        for ids, group in zip(batch.completion_ids.tolist(), batch.group_ids)
    ]
    for entry in strategies:
        window = Window.open(1, rollouts, batch)
        window.credit = assign_credit(entry.strategy, batch)
        yield entry.name, window


def gradient(policy: Any, window: Window, rows: torch.Tensor, aggregation: Any) -> torch.Tensor:
    policy.model.zero_grad()
    accumulate_gradients(
        policy,
        window,
        rows,
        LossConfig(aggregation=aggregation),
        micro_batch_rows=5,
        max_tokens=TOKENS,
        temperature=1.0,
        step_rows=torch.arange(ROWS),
    )
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def work(rank: int, folder: str) -> None:
    """Half of the groups, for every strategy; rank 0 keeps the sum over both processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    policy = TinyPolicy(max_positions=64).build()
    sums = {}
    for index, (name, window) in enumerate(windows()):
        mine = gradient(policy, window, torch.arange(ROWS).chunk(2)[rank], AGGREGATIONS[index % 4])
        distributed.all_reduce(mine)
        sums[name] = mine
    if rank == 0:
        torch.save(sums, f"{folder}/sums.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sums() -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        workers = [subprocess.Popen([sys.executable, __file__, str(rank), folder]) for rank in range(2)]
        assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
        found: dict[str, torch.Tensor] = torch.load(f"{folder}/sums.pt", weights_only=True)
        return found


def test_the_gradients_of_two_processes_add_up_to_that_of_one(sums: dict[str, torch.Tensor]) -> None:
    policy = TinyPolicy(max_positions=64).build()
    moved = 0
    for index, (name, window) in enumerate(windows()):
        alone = gradient(policy, window, torch.arange(ROWS), AGGREGATIONS[index % 4])
        scale = max(float(alone.abs().max()), 1e-6)
        assert torch.allclose(sums[name], alone, atol=1e-5 * scale, rtol=1e-4), name
        moved += bool(alone.abs().max() > 0)
    assert moved > 50


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
