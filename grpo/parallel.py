"""How several processes share one run: the options, and what ``accelerate launch`` says of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..verifiers import InputError

__all__ = ["ParallelConfig", "as_launched"]


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share one run.

    Args:
        shard: split weights, gradients and optimiser state over the processes (FSDP2) instead of keeping all of them in
            each; None: as ``accelerate launch`` says, else no.
        reshard: a layer gives its whole weights up after its forward and gathers them again in the backward pass: less
            memory, more traffic.
        timeout_s: longest wait for the slowest process, in seconds.
    """

    shard: bool | None = None
    reshard: bool = True
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise InputError(f"parallel.timeout_s={self.timeout_s}: must be over 0")


def as_launched(config: ParallelConfig, precision: str, environment: Mapping[str, str] = os.environ) -> ParallelConfig:
    """The configuration with what ``accelerate launch`` set in the environment; refuses what it asked for in vain.

    Args:
        config: as the user gave it.
        precision: ``policy.precision``, which says alone how forwards run.
        environment: variables by name.

    >>> as_launched(ParallelConfig(), "fp32", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}).shard
    True
    """
    for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if _yes(environment, f"ACCELERATE_USE_{name}"):
            raise InputError(
                f"accelerate launch asks for {name}, which training knows not; it shards by FSDP2 or not at all"
            )
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if mixed not in ("no", precision):
        raise InputError(
            f"accelerate launch asks for mixed_precision={mixed}, the configuration for policy.precision={precision}; "
            "make them agree (accelerate's may be no)"
        )
    if not _yes(environment, "ACCELERATE_USE_FSDP"):
        return ParallelConfig(bool(config.shard), config.reshard, config.timeout_s)
    if environment.get("FSDP_VERSION", "1") != "2":
        raise InputError("accelerate launch asks for FSDP of version 1; set --fsdp_version 2")
    for name, instead in (
        ("FSDP_OFFLOAD_PARAMS", "take more GPUs, or policy.lora"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "set policy.gradient_checkpointing=true"),
    ):
        if _yes(environment, name):
            raise InputError(f"accelerate launch sets {name.lower()}, which training knows not; {instead}")
    reshard = config.reshard and environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return ParallelConfig(config.shard is not False, reshard, config.timeout_s)


def _yes(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes")
