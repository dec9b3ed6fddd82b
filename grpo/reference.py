"""The frozen reference: a copy of the starting weights, also of a model that lies only in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..credit import CreditBatch
from ..verifiers import InputError
from .files import one_line, replacing
from .loss import LossConfig, kl_estimate
from .policy import Policy
from .processes import Processes

__all__ = ["frozen_reference", "reference_of_run", "with_kl_in_reward"]


def frozen_reference(policy: Policy, saved: Path, *, resuming: bool) -> Policy:
    """A frozen copy of ``policy`` as it is now; kept in ``saved``, from where a resumed run takes it again.

    Raises:
        InputError: the file cannot be written, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model, save_model

    reference = _frozen_copy(policy)
    known = resuming and saved.exists()
    try:
        if known:
            load_model(reference.model, str(saved), device=str(policy.device))
        else:
            with replacing(saved) as temporary:
                save_model(reference.model, str(temporary))
    except (SafetensorError, RuntimeError) as error:
        verb = "read" if known else "written"
        raise InputError(
            f"{saved}: cannot be {verb} ({one_line(error)}); free the disk, or start again in another run.dir"
        ) from error
    return reference


def reference_of_run(processes: Processes, policy: Policy, saved: Path, *, resuming: bool) -> Policy:
    """The frozen reference in every process: kept on the disk by the main one, from which the others take it over."""

    def made() -> Policy:
        return frozen_reference(policy, saved, resuming=resuming) if processes.is_main else _frozen_copy(policy)

    reference = processes.jointly(made)
    processes.copy_from_main(reference.model)
    return reference


def _frozen_copy(policy: Policy) -> Policy:
    return replace(policy, model=copy.deepcopy(policy.model).eval().requires_grad_(False))


def with_kl_in_reward(batch: CreditBatch, ref_logprobs: Tensor | None, config: LossConfig) -> CreditBatch:
    """The batch whose rewards are less ``kl_coef`` times their answer's summed KL, where the KL was asked for there."""
    if config.kl_coef == 0 or config.kl_in != "reward":
        return batch
    if ref_logprobs is None or batch.old_logprobs is None:
        raise ValueError("the KL in the reward needs old_logprobs and ref_logprobs")
    kl = kl_estimate(batch.old_logprobs, ref_logprobs, kind=config.kl_kind).where(batch.completion_mask, 0.0)
    return batch.with_reward(batch.reward - config.kl_coef * kl.double().sum(dim=1))
