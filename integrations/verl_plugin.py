"""What verl loads by the entry point ``verl.plugins``: an estimator, a reward manager, an agent loop, the trainers.

verl swallows what a plugin raises and later says "Unknown advantage estimator"; so the reason is logged here first.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..grpo.seeds import named_seed
from ..verifiers import InputError
from .samples import make_sample
from .verl import Rows, advantages
from .verl_config import ESTIMATOR, VerlCredit, check_run, plain, read_credit
from .verl_rewards import EVIDENCE, Judge, problem_of

try:
    from verl.experimental.agent_loop.agent_loop import register as register_agent_loop
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1 import trainer_base
except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    logging.getLogger(__name__).error("apportion cannot plug into verl (made for verl 0.9.1): %s", reason)
    raise

__all__ = ["ApportionRewards", "MaskedToolAgentLoop", "estimate", "with_credit"]


@dataclass
class _Passed:
    """What a trainer passes by verl's dispatcher, and what the estimator leaves for its log."""

    rows: Rows
    metrics: dict[str, float]


# verl's names for what strategies may ask for.
_TENSORS = {
    "responses": "completion_ids",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "entropy": "entropy",
}
_PASSED: ContextVar[_Passed | None] = ContextVar("passed", default=None)


def estimate(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (R, T) by the strategy of ``algorithm.credit``: verl's ``adv_estimator=apportion``.

    Args:
        token_level_rewards: (R, T).
        response_mask: (R, T).
        index: uid of each row's prompt.
        config: verl's node ``algorithm``.
    """
    if index is None:
        raise InputError("algorithm.adv_estimator=apportion: the batch has no uid, so nothing says which rows compete")
    passed = _PASSED.get()
    algorithm = plain(config)
    credit = _credit(json.dumps(algorithm, default=str, sort_keys=True))
    summed = bool(algorithm.get("use_kl_in_reward"))  # the KL has put something on every token
    rows = _bare_rows(token_level_rewards, summed=summed) if passed is None else passed.rows
    values, metrics = advantages(credit, token_level_rewards, response_mask, list(index), rows)
    if passed is not None:
        passed.metrics.update(metrics)
    return values, values


def with_credit(trainer: type[Any]) -> type[Any]:
    """A trainer of verl that checks the run before it starts and hands the evidence to the estimator."""

    class CreditTrainer(trainer):
        def __init__(self, config: Any) -> None:
            if config.algorithm.adv_estimator == ESTIMATOR:
                check_run(config)
            super().__init__(config)

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            if self.config.algorithm.adv_estimator != ESTIMATOR:
                return super()._compute_advantage(batch, metrics)
            share = (self.global_steps - 1) / max(self.total_training_steps, 1)
            rows = _fetched(
                batch, progress=share, seed=named_seed(0, "credit", self.global_steps, self.local_trigger_step)
            )
            with _passing(rows, metrics):
                return super()._compute_advantage(batch, metrics)

    CreditTrainer.__name__ = CreditTrainer.__qualname__ = f"Credit{trainer.__name__}"
    return CreditTrainer


class ApportionRewards(RewardManagerBase):
    """Judges each session by the verifiers of ``algorithm.credit``; its one number is the reward of verl."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.judge = Judge(check_run(config))
        self.limit = config.data.max_response_length
        self.eos_ids = _eos_ids(config.actor_rollout_ref.model.path, tokenizer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Reward and evidence of one session, whose outputs are the rows of ``data``."""
        columns = {name: values[-1] for name, values in data.non_tensor_batch.items()}
        prompts, responses, masks = _ids(data)
        if columns.get("__num_turns__", 0) > 2 and masks is None:
            raise InputError(
                "actor_rollout_ref.rollout.agent: this agent loop does not say which ids its tools wrote; put its "
                "response_mask into extra_fields, as apportion_tool_agent does"
            )
        sample = make_sample(
            self.tokenizer,
            self.eos_ids,
            problem_of(columns),
            prompts[-1],
            list(chain.from_iterable(responses)),
            limit=self.limit + sum(map(len, responses[:-1])),
            response_mask=None if masks is None else list(chain.from_iterable(masks)),
        )
        return await self.judge(sample)


class MaskedToolAgentLoop(ToolAgentLoop):
    """verl's loop with tools, which also tells the reward manager what the tools wrote."""

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Any:
        output = await super().run(sampling_params, **columns)
        output.extra_fields["response_mask"] = list(output.response_mask)
        return output


@functools.lru_cache(maxsize=4)
def _credit(algorithm: str) -> VerlCredit:
    """Made once for each process: strategies that adapt keep what they learned."""
    return read_credit(json.loads(algorithm))


@contextmanager
def _passing(rows: Rows, metrics: dict[str, float]) -> Iterator[None]:
    token = _PASSED.set(_Passed(rows, metrics))
    try:
        yield
    finally:
        _PASSED.reset(token)


def _bare_rows(rewards: Tensor, *, summed: bool) -> Rows:
    """Of a trainer that passes nothing by: each row a session of its own."""
    count, width = rewards.shape
    if summed:
        rewards = rewards.sum(dim=1, keepdim=True) * torch.eye(width)[-1]
    return Rows([f"{row}_0_0" for row in range(count)], [width] * count, [None] * count, rewards)


def _fetched(batch: Any, *, progress: float, seed: int) -> Rows:
    fields = ["extra_fields", "rm_scores", *_TENSORS]
    data = trainer_base.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    found = set(data.keys())
    extras = [getattr(value, "data", value) for value in list(data["extra_fields"])]
    infos = [extra.get("reward_extra_info") or {} for extra in extras]
    return Rows(
        keys=list(batch.keys),
        lengths=data["responses"].offsets().diff().tolist(),
        evidence=[info.get(EVIDENCE) for info in infos],
        scores=data["rm_scores"].to_padded_tensor(0.0),
        tensors={ours: data[name].to_padded_tensor(0) for name, ours in _TENSORS.items() if name in found},
        progress=progress,
        seed=seed,
    )


def _ids(data: Any) -> tuple[list[list[int]], list[list[int]], list[list[int]] | None]:
    """Prompt ids, response ids and, where the agent loop gave them, response masks of each output, without padding."""
    columns = data.non_tensor_batch
    extras = [extra if isinstance(extra, Mapping) else {} for extra in columns["tool_extra_fields"]]
    masks: list[Any] = [extra.get("response_mask") for extra in extras]
    return (
        [row[: int(length)].tolist() for row, length in zip(data.batch["prompts"], columns["prompt_len"])],
        [row[: int(length)].tolist() for row, length in zip(data.batch["responses"], columns["response_len"])],
        None if any(mask is None for mask in masks) else [list(mask) for mask in masks],
    )


def _eos_ids(path: str, tokenizer: Any) -> list[int]:
    """Every id that ends an answer: models often have more of them than their tokenizer names."""
    from transformers import GenerationConfig

    named = [tokenizer.eos_token_id]
    with suppress(OSError, ValueError):  # the model has no such file
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return [int(end) for ids in named if ids is not None for end in (ids if isinstance(ids, list | tuple) else [ids])]


# A module run twice, as verl does with files, registers once.
ADV_ESTIMATOR_REGISTRY.setdefault(ESTIMATOR, estimate)
REWARD_MANAGER.setdefault(ESTIMATOR, ApportionRewards)
register_agent_loop("apportion_tool_agent")(MaskedToolAgentLoop)
for _mode, _trainer in list(trainer_base.TRAINER_REGISTRY.items()):
    if not _trainer.__name__.startswith("Credit"):
        trainer_base.TRAINER_REGISTRY[_mode] = with_credit(_trainer)
