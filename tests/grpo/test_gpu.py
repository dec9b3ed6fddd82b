"""On a CUDA device: what it computes is what the CPU computes, and runs go on from where they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit import Credit, collate
from apportion.grpo.collect import as_sample
from apportion.grpo.engines import SamplingOptions, awake
from apportion.grpo.forward import packs, score_in_parts
from apportion.grpo.influence import GradientInfluence
from apportion.grpo.loss import LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import Generation, RolloutConfig, sample_groups
from apportion.grpo.scorers import LastTokenAttention
from apportion.grpo.update import accumulate_gradients
from apportion.grpo.window import Window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
SHAPE = {"hidden_size": 64, "layers": 3, "heads": 4, "intermediate_size": 96, "max_positions": 96}


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """No TF32: it keeps ten bits, and the CPU keeps 23."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def pair(new_policy: Callable[..., Policy]) -> tuple[Policy, Policy]:
    """The same policy on the CPU and on the device."""
    on_device = new_policy(**SHAPE)
    on_device.model.to(DEVICE)
    return new_policy(**SHAPE), on_device


def answers(policy: Policy, prompts: list[list[int]]) -> list[Generation]:
    return sample_groups(policy, prompts, list(range(4 * len(prompts))), group_size=4, max_new_tokens=24)


@pytest.fixture
def window(pair: tuple[Policy, Policy], prompts: list[list[int]], rollout_of: Callable[..., Any]) -> Window:
    """Answers of the CPU's policy with credit that differs from token to token."""
    rollouts = [
        replace(rollout_of(one.ids, prompt=prompts[row // 4], group=row // 4), logprobs=one.logprobs)
        for row, one in enumerate(answers(pair[0], prompts))
    ]
    window = Window.open(1, rollouts, collate(rollouts))
    mask = window.batch.completion_mask
    draw = torch.Generator().manual_seed(0)
    window.credit = Credit(torch.randn(mask.shape, generator=draw).where(mask, 0.0))
    return window


def gradient(policy: Policy, window: Window) -> torch.Tensor:
    policy.model.zero_grad(set_to_none=True)
    rows = torch.arange(len(window.prompt_ids))
    accumulate_gradients(policy, window, rows, LossConfig(), micro_batch_rows=5, max_tokens=24, temperature=1.0)
    found = [p.grad.flatten().double().cpu() for p in policy.model.parameters() if p.grad is not None]
    return torch.cat(found)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_log_probabilities_and_entropies_are_those_of_the_cpu(pair: tuple[Policy, Policy], window: Window) -> None:
    cpu, device = (
        score_in_parts(policy, window.prompt_ids, window.completion_ids, temperature=0.7, rows=5, squares=True)
        for policy in pair
    )
    assert packs(pair[1])
    for name in ("logprobs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(getattr(device, name), getattr(cpu, name), atol=1e-4, rtol=1e-4)


def test_sampled_log_probabilities_are_those_of_training(pair: tuple[Policy, Policy], prompts: list[list[int]]) -> None:
    made = answers(pair[1], prompts)
    texts = [prompts[row // 4] for row in range(len(made))]
    scored = score_in_parts(pair[1], texts, [one.ids for one in made], temperature=1.0, rows=5).logprobs
    for row, one in enumerate(made):
        torch.testing.assert_close(scored[row, : len(one.ids)], torch.tensor(one.logprobs), atol=1e-4, rtol=1e-4)


def test_equal_seeds_sample_the_tokens_of_the_cpu(pair: tuple[Policy, Policy], prompts: list[list[int]]) -> None:
    """Rounding may flip a token that lies at the edge of two: nearly all answers are equal, not always all."""
    cpu, device = (answers(policy, prompts) for policy in pair)
    assert sum(a.ids == b.ids for a, b in zip(cpu, device)) >= 0.9 * len(cpu)


def test_a_completion_does_not_depend_on_its_neighbours(pair: tuple[Policy, Policy], prompts: list[list[int]]) -> None:
    together = answers(pair[1], prompts)
    alone = sample_groups(pair[1], prompts[1:2], list(range(4, 8)), group_size=4, max_new_tokens=24)
    assert sum(a.ids == b.ids for a, b in zip(together[4:8], alone)) >= 3


def test_the_gradient_is_that_of_the_cpu(pair: tuple[Policy, Policy], window: Window) -> None:
    assert relative_error(gradient(pair[1], window), gradient(pair[0], window)) < 1e-4


def test_packed_rows_give_the_gradient_of_padded_ones(pair: tuple[Policy, Policy], window: Window) -> None:
    assert relative_error(gradient(pair[1], window), gradient(replace(pair[1], packing=False), window)) < 1e-4


def test_in_bf16_the_gradient_points_the_same_way(pair: tuple[Policy, Policy], window: Window) -> None:
    exact, rounded = gradient(pair[1], window), gradient(replace(pair[1], precision="bf16"), window)
    assert float(torch.nn.functional.cosine_similarity(exact, rounded, dim=0)) > 0.99


@pytest.mark.parametrize(
    "scorer", [GradientInfluence(rows=5), LastTokenAttention(rows=5)], ids=["gradient", "attention"]
)
def test_token_scores_are_those_of_the_cpu(
    scorer: Any, pair: tuple[Policy, Policy], window: Window, prompts: list[list[int]], rollout_of: Callable[..., Any]
) -> None:
    rollouts = [
        rollout_of(ids, prompt=prompt, group=int(group))
        for ids, prompt, group in zip(window.completion_ids, window.prompt_ids, window.batch.group_ids)
    ]
    cpu, device = (scorer(policy, rollouts, window.batch) for policy in pair)
    assert device.device.type == "cpu"
    assert relative_error(device, cpu) < 1e-2  # of a difference of distributions that are nearly equal


def test_a_run_goes_on_from_its_checkpoint(
    tmp_path: Path, new_policy: Callable[..., Policy], new_run: Callable[..., Any]
) -> None:
    def run(folder: Path) -> Any:
        policy = new_policy(**SHAPE)
        policy.model.to(DEVICE)
        return new_run(folder, policy=policy, optim={"lr": 1e-3}, config={"steps": 4})

    whole, parts = run(tmp_path / "whole"), run(tmp_path / "parts")
    assert whole.train() == "finished"
    parts.stop_after(3)
    assert parts.train() == "interrupted"
    again = run(tmp_path / "parts")
    assert again.train() == "finished"
    assert [row["step"] for row in again.rows] == [row["step"] for row in whole.rows]
    for name, value in whole.weights.items():
        torch.testing.assert_close(again.weights[name], value, atol=1e-5, rtol=1e-3)


def test_text_of_sampled_ids_needs_no_device(pair: tuple[Policy, Policy], prompts: list[list[int]]) -> None:
    from apportion.grpo.task import Problem

    made = answers(pair[1], prompts[:1])[0]
    sample = as_sample(pair[1], Problem("p", "1+2=?"), prompts[0], made, located=True)
    assert sample.metadata["completion_ids"] == tuple(made.ids)
    assert len(sample.metadata["offsets"]) == len(made.ids)


@pytest.mark.integration
def test_vllm_samples_from_the_weights_that_it_was_given(new_policy: Callable[..., Policy]) -> None:
    pytest.importorskip("vllm")
    from apportion.grpo.engines.vllm_local import VLLM

    policy = new_policy(**{**SHAPE, "hidden_size": 256, "layers": 2})
    policy.model.to(DEVICE)
    prompt = policy.encode("7+9-4*1=?")
    rollout = RolloutConfig(prompts_per_step=1, group_size=4, max_new_tokens=16)
    engine = VLLM(gpu_memory_utilization=0.2, dtype="float32").start(policy, rollout)
    with awake(engine, policy):
        made = engine.generate([prompt], 4, SamplingOptions(16), row_seeds=[1, 2, 3, 4])
    scored = score_in_parts(policy, [prompt] * 4, [one.ids for one in made], temperature=1.0, rows=4).logprobs
    for row, one in enumerate(made):
        torch.testing.assert_close(scored[row, : len(one.ids)], torch.tensor(one.logprobs), atol=2e-2, rtol=2e-2)
