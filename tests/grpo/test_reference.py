"""The frozen reference is the starting policy, whatever happens to the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.grpo.loss import LossConfig
from apportion.grpo.policy import Policy
from apportion.grpo.reference import frozen_reference, with_kl_in_reward
from apportion.verifiers import InputError


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def test_training_the_policy_leaves_the_reference(policy: Policy, tmp_path: Path) -> None:
    start = weights(policy)
    reference = frozen_reference(policy, tmp_path / "reference.safetensors", resuming=False)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    assert torch.equal(weights(reference), start)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    assert not reference.model.training


def test_a_resumed_run_gets_the_weights_of_the_start_and_a_new_one_its_own(
    new_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    file = tmp_path / "reference.safetensors"
    first, other = new_policy(0), new_policy(1)
    frozen_reference(first, file, resuming=False)
    assert torch.equal(weights(frozen_reference(other, file, resuming=True)), weights(first))
    assert torch.equal(weights(frozen_reference(other, file, resuming=False)), weights(other))
    assert torch.equal(weights(frozen_reference(first, file, resuming=True)), weights(other))


def test_a_damaged_file_is_one_clear_line(policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    file.write_bytes(b"not safetensors")
    with pytest.raises(InputError, match=r"reference.safetensors: cannot be read \([^\n]*\)"):
        frozen_reference(policy, file, resuming=True)
    with pytest.raises(InputError, match=r"reference.safetensors: cannot be written"):
        frozen_reference(policy, tmp_path / "gone" / "reference.safetensors", resuming=False)


def test_the_kl_in_the_reward_is_summed_over_the_answer_and_leaves_masked_tokens_out() -> None:
    batch = CreditBatch(
        completion_mask=torch.tensor([[True, True, True], [True, False, False], [False, False, False]]),
        group_ids=torch.zeros(3, dtype=torch.long),
        reward=torch.tensor([1.0, 0.0, float("nan")], dtype=torch.float64),
        old_logprobs=torch.zeros(3, 3),
    )
    reference = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -9.0, -9.0], [-9.0, -9.0, -9.0]])
    config = LossConfig(kl_coef=0.1, kl_kind="k1", kl_in="reward")
    reward = with_kl_in_reward(batch, reference, config).reward
    assert reward[:2].tolist() == pytest.approx([1 - 0.1 * 6, -0.1 * 4])
    assert reward[2].isnan()
    assert with_kl_in_reward(batch, reference, LossConfig(kl_coef=0.1)) is batch
    assert with_kl_in_reward(batch, None, LossConfig(kl_in="reward")) is batch
    with pytest.raises(ValueError, match="needs old_logprobs and ref_logprobs"):
        with_kl_in_reward(batch, None, config)
