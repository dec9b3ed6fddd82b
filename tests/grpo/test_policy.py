"""What a policy must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from apportion.grpo.policy import ForwardCounter, Policy
from apportion.verifiers import InputError


def test_a_policy_needs_an_end_token_and_a_known_precision(policy: Policy) -> None:
    with pytest.raises(InputError, match="names no end token"):
        replace(policy, eos_ids=())
    with pytest.raises(InputError, match=r"policy\.precision='fp16': must be fp32 or bf16"):
        replace(policy, precision="fp16")


def test_its_length_limit_is_that_of_the_text_model(new_policy: Callable[..., Policy]) -> None:
    assert new_policy(max_positions=64).max_positions == 64

    class Plain:
        config = object()

    assert Policy(Plain(), None, lambda text: [], (1,)).max_positions is None


def test_bf16_computes_in_bf16_and_keeps_the_weights(policy: Policy) -> None:
    half = replace(policy, precision="bf16")
    ids = torch.tensor([[4, 5, 6]])
    with half.autocast():
        assert half.model(input_ids=ids).logits.dtype == torch.bfloat16
    with policy.autocast():
        assert policy.model(input_ids=ids).logits.dtype == torch.float32
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_forwards_count_only_inside_the_block(policy: Policy) -> None:
    counter, ids = ForwardCounter(), torch.tensor([[4]])
    with counter.counting(policy.model):
        policy.model(input_ids=ids)
        policy.model(input_ids=ids)
        assert counter.take() == 2.0
        policy.model(input_ids=ids)
    policy.model(input_ids=ids)
    assert (counter.take(), counter.take()) == (1.0, 0.0)
