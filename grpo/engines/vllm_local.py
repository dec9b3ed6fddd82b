"""vLLM in the trainer's own process and on its GPU: while one works, the other's memory is free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ...verifiers import InputError
from ..policy import Policy
from ..sampling import Generation, Interrupted, RolloutConfig
from . import SamplingOptions
from .replies import WrongReply, generation

__all__ = ["VLLM", "LocalEngine"]

SEEDS = 2**62  # vLLM adds the number of a completion to its request's seed, within 63 bits


@dataclass(frozen=True)
class VLLM:
    """vLLM 0.10 or later on one GPU, in this process.

    It gets the policy's configuration and then its weights, so that any policy that vLLM knows the architecture of
    will do, whatever it was loaded from.

    Args:
        gpu_memory_utilization: share of the GPU's memory that vLLM takes while it is awake.
        sleep_level: while the policy learns, 2 drops the copy of the weights, 1 keeps it in the CPU's memory, and None
            leaves vLLM awake.
        dtype: of the copy: ``bfloat16``, ``float16`` or ``float32``.
        max_model_len: longest prompt and completion; None: what the policy can read.
        seeded: sample from seeds made of the run's own, which costs some speed. Equal seeds give equal samples only as
            far as the kernels do not depend on what else is in the batch.
        llm: further arguments of ``vllm.LLM``.
    """

    gpu_memory_utilization: float = 0.3
    sleep_level: Literal[1, 2] | None = 2
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_model_len: int | None = None
    seeded: bool = True
    llm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization < 1:
            raise InputError(f"engine.gpu_memory_utilization={self.gpu_memory_utilization}: must lie between 0 and 1")
        if self.sleep_level not in (None, 1, 2):
            raise InputError(f"engine.sleep_level={self.sleep_level!r}: must be 1, 2 or null")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"engine.dtype={self.dtype!r}: must be bfloat16, float16 or float32")

    def prepare(self) -> None:
        """Refuse a machine without vLLM or CUDA."""
        if not torch.cuda.is_available():
            raise InputError("engine=vllm: there is no CUDA here; use engine=native")
        _import_vllm()

    def start(self, policy: Policy, rollout: RolloutConfig) -> LocalEngine:
        """The engine, asleep where it can sleep."""
        del rollout
        engine = LocalEngine(self, policy, _start(self, policy))
        engine.sleep()
        return engine


class LocalEngine:
    """See :class:`VLLM`.

    Args:
        options: of the engine.
        policy: whose weights it gets.
        llm: the ``vllm.LLM``.
    """

    native = False

    def __init__(self, options: VLLM, policy: Policy, llm: Any) -> None:
        self._options, self._policy, self._llm = options, policy, llm
        self._asleep, self._ready = False, False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        options: SamplingOptions,
        *,
        row_seeds: Sequence[int],
        should_stop: Callable[[], bool] | None = None,
        on_finished: Callable[[Mapping[int, Generation]], None] | None = None,
    ) -> list[Generation]:
        """All prompts in one call; a request to stop is obeyed before and after it."""
        del on_finished  # nothing is known before the call ends
        if len(row_seeds) != len(prompts) * n:
            raise ValueError(f"{len(row_seeds)} row_seeds for {len(prompts)} prompts x {n}")
        if not self._ready:
            raise RuntimeError("generate before sync: the engine's weights are not the policy's")
        if not prompts:
            return []
        if should_stop is not None and should_stop():
            raise Interrupted
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self._params(n, options, row_seeds[place * n]) for place in range(len(prompts))],
            use_tqdm=False,
        )
        if should_stop is not None and should_stop():
            raise Interrupted
        try:
            return [one for output in outputs for one in self._read(output, n, options)]
        except WrongReply as error:
            raise InputError(f"engine=vllm: {error}") from None

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the weights, then forget what was kept of prompts read with the old ones, then make room for new."""
        self._llm.apply_model(lambda model: _load(model, weights))
        self._llm.reset_prefix_cache()
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._asleep, self._ready = False, True

    def wake(self) -> None:
        """Make room for the weights alone: writing them before that would touch memory that is not there."""
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=["weights"])

    def sleep(self) -> None:
        """Give back the memory, as far as ``sleep_level`` says."""
        self._ready = False
        if self._options.sleep_level is not None and not self._asleep:
            self._llm.sleep(level=self._options.sleep_level)
            self._asleep = True

    def _params(self, n: int, options: SamplingOptions, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            max_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k or -1,
            seed=seed % SEEDS if self._options.seeded else None,
            stop_token_ids=list(self._policy.eos_ids),
            ignore_eos=True,  # these ids alone end a completion
            logprobs=0,
            detokenize=False,
        )

    def _read(self, output: Any, n: int, options: SamplingOptions) -> list[Generation]:
        """The completions of a ``vllm.RequestOutput``."""
        if len(output.outputs) != n:
            raise WrongReply(f"{len(output.outputs)} completions for a prompt, where {n} were asked for")
        made = []
        for one in sorted(output.outputs, key=lambda completion: completion.index):
            ids = [int(id) for id in one.token_ids]
            if one.logprobs is None:
                raise WrongReply("a completion without log-probabilities")
            logprobs = [float(step[id].logprob) for step, id in zip(one.logprobs, ids)]
            made.append(generation(ids, logprobs, one.finish_reason, options, self._policy.eos_ids))
        return made


def _import_vllm() -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are handed over within this process
    try:
        import vllm
    except ImportError:
        raise InputError("engine=vllm: needs the package vllm; pip install 'apportion[vllm]'") from None
    return vllm


def _start(options: VLLM, policy: Policy) -> Any:
    """A ``vllm.LLM`` of the policy's architecture, with weights that mean nothing."""
    vllm = _import_vllm()
    model = policy.model.get_base_model() if hasattr(policy.model, "get_base_model") else policy.model
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    with tempfile.TemporaryDirectory(prefix="apportion-") as folder:
        config.save_pretrained(folder)
        return vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",  # no defaults of sampling from the model's files
            dtype=options.dtype,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_model_len=options.max_model_len or policy.max_positions,
            enable_sleep_mode=options.sleep_level is not None,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, as in training
            **({"distributed_executor_backend": "external_launcher"} if together else {}),
            **options.llm,
        )


def _load(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load into vLLM's own model, and see that nothing of it keeps a weight that means nothing."""
    loaded = model.load_weights(iter(weights))
    missing = [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if missing:
        raise InputError(
            f"engine=vllm: {len(missing)} weights of its model have none in the policy, such as {missing[0]}; use "
            "engine=native"
        )
