"""A very small policy on the embedded task, verifiers whose verdicts vary from the start, and runs made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit import Rollout
from apportion.credit.uniform import Uniform
from apportion.experiments.policies import TinyPolicy
from apportion.experiments.tasks.chain import ChainTask
from apportion.grpo.loss import LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import RolloutConfig
from apportion.grpo.trainer import Trainer, TrainerConfig
from apportion.grpo.update import OptimConfig
from apportion.verifiers import Sample, Span, Verdict

torch.set_num_threads(1)

TASK = ChainTask(min_steps=1, max_steps=3, num_held_out=6, num_retention=4)
PROMPTS = ("7+9-a*1=?", "1+2=?", "3*4-5=?")


def even_digits(samples: Sequence[Sample]) -> list[Verdict]:
    """Right where the number of digits is even; every third character on is a step, right where it is a digit."""
    return [
        Verdict(
            float(sum(char.isdigit() for char in s.completion) % 2 == 0),
            tuple(
                Span(start, min(start + 3, len(s.completion)), float(s.completion[start].isdigit()), "step")
                for start in range(0, len(s.completion), 3)
            ),
        )
        for s in samples
    ]


def short(samples: Sequence[Sample]) -> list[float]:
    """Right where the completion ended by itself."""
    return [float(not s.metadata["truncated"]) for s in samples]


def make_policy(seed: int = 0, **options: Any) -> Policy:
    """A tiny random policy; equal seeds give equal weights."""
    shape = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 24, "max_positions": 64}
    return TinyPolicy(seed=seed, **{**shape, **options}).build()


def make_rollout(ids: Sequence[int], prompt: Sequence[int] = (4, 5), group: int = 0, **facts: Any) -> Rollout:
    """A rollout of bare ids, one character each."""
    offsets = [(at, at + 1) for at in range(len(ids))]
    return Rollout(list(prompt), list(ids), [0.0] * len(ids), offsets, "x" * len(ids), group, **facts)


@dataclass
class Run:
    """A trainer in its folder, and what it left."""

    trainer: Trainer
    folder: Path

    def train(self) -> str:
        return self.trainer.train()

    def stop_after(self, updates: int) -> None:
        """Ask the run to stop once it took so many optimiser steps."""
        left = iter(range(updates - 1))

        def ask(*_: Any) -> None:
            if next(left, None) is None:
                self.trainer.stop.signal_number = 15

        self.trainer.state.optimizer.register_step_post_hook(ask)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.trainer.policy.model.state_dict().items()}

    @property
    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())


def make_run(
    folder: Path,
    *,
    strategy: Any = None,
    verifiers: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    task: Any = TASK,
    rollout: Mapping[str, Any] | None = None,
    loss: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A run with small defaults; the mappings change single options."""
    trainer = Trainer(
        policy or make_policy(),
        task,
        verifiers or {"answer": even_digits, "format": short},
        {"answer": 1.0},
        strategy or Uniform(),
        rollout=RolloutConfig(**{"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 8, **(rollout or {})}),
        loss=LossConfig(**(loss or {})),
        optim=OptimConfig(**{"lr": 0.05, "micro_batch_rows": 4, **(optim or {})}),
        config=TrainerConfig(
            **{
                "steps": 3,
                "eval_every": 2,
                "save_every": 0,
                "rollouts_every": 2,
                "format": "format",
                "keep_checkpoints": 2,
                **(config or {}),
            }
        ),
        folder=folder,
        retention_verifier=short,
        **options,
    )
    return Run(trainer, folder)


@pytest.fixture
def policy() -> Policy:
    return make_policy()


@pytest.fixture
def new_policy() -> Callable[..., Policy]:
    return make_policy


@pytest.fixture
def new_run() -> Callable[..., Run]:
    return make_run


@pytest.fixture
def rollout_of() -> Callable[..., Rollout]:
    return make_rollout


@pytest.fixture
def prompts(policy: Policy) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [policy.encode(text) for text in PROMPTS]
