"""Passes of the models of a planned run over its devices: tokens, operations, wall time, and what the memory holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .cost_model import Memory, ModelSize, decode, training_memory
from .cost_options import Plan

__all__ = ["Item", "Passes"]


@dataclass(frozen=True)
class Item:
    """One kind of work of a training step.

    Args:
        phase: that it belongs to.
        generated, read, trained: tokens that are sampled, that run through a model without gradient, and with one.
        flops: of all devices.
        judging: seconds of CPU cores that verifiers take.
        seconds: wall time.
    """

    what: str
    phase: str
    generated: float = 0.0
    read: float = 0.0
    trained: float = 0.0
    flops: float = 0.0
    judging: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Passes:
    """Items of work, and the memory around them.

    Args:
        plan: of the run.
        whole, spread, also_trained: parameters of the models beside the policy: frozen ones that each process holds,
            frozen ones that are spread over the devices as the policy is, and those that learn.
    """

    plan: Plan
    whole: float = 0.0
    spread: float = 0.0
    also_trained: float = 0.0

    def forward(
        self, what: str, phase: str, size: ModelSize, *, tokens: float, rows: float, times: float = 1.0
    ) -> Item:
        """A pass without gradient.

        Args:
            tokens, rows: on all devices.
            times: so many passes, or the share of one.
        """
        plan = self.plan
        flops = times * size.forward_flops(tokens, context=plan.context)
        seconds = flops / plan.gpus / (plan.device.flops * plan.device.forward)
        seconds += times * self._calls(rows) * size.layers * plan.device.layer_seconds
        return Item(what, phase, read=times * tokens, flops=flops, seconds=seconds)

    def train(self, what: str, phase: str, size: ModelSize, *, tokens: float, rows: float, checkpointing: bool) -> Item:
        """Forward and backward: three times the forward's operations, four with checkpointing.

        Args:
            tokens, rows: on all devices.
        """
        plan, times = self.plan, 4.0 if checkpointing else 3.0
        flops = times * size.forward_flops(tokens, context=plan.context)
        seconds = flops / plan.gpus / (plan.device.flops * plan.device.train)
        seconds += times * self._calls(rows) * size.layers * plan.device.layer_seconds
        return Item(what, phase, trained=tokens, flops=flops, seconds=seconds)

    def sample(
        self,
        what: str,
        phase: str,
        *,
        rows: float,
        tokens: float,
        longest: float,
        before: float,
        prefixes: float,
        at_most: float = math.inf,
        times: float = 1.0,
    ) -> Item:
        """Completions sampled by all copies of the policy together.

        Args:
            rows: completions.
            tokens, longest: mean length of one, and that of the longest.
            before: tokens before each.
            prefixes: different ones among these beginnings, each read once.
            at_most: completions side by side.
            times: so many calls, or the share of one.
        """
        plan = self.plan
        copies, read = plan.gpus // plan.tensor_parallel, prefixes * before
        done = decode(
            plan.policy,
            plan.device,
            plan.bytes,
            rows=rows / copies,
            tokens=tokens,
            longest=longest,
            context=before + tokens / 2,
            read=read / copies,
            at_most=min(at_most, max(self.room(before + longest), 1.0)),
            layer_seconds=plan.engine.layer_seconds,
            shards=plan.tensor_parallel,
        )
        return Item(
            what,
            phase,
            generated=times * rows * tokens,
            read=times * read,
            flops=times * done.flops * copies,
            seconds=times * done.seconds,
        )

    def room(self, length: float) -> float:
        """Completions of ``length`` tokens whose cache fits on the devices of one copy; a tenth of each stays free."""
        plan, held = self.plan, self._updating()
        free = 0.9 * plan.device.memory - held.state - held.frozen - self._sampling_weights()
        return max(free, 0.0) * plan.tensor_parallel / (length * plan.policy.cache_bytes(plan.bytes.cache))

    def memory(self) -> Memory:
        """Of one device, with the cache of all its answers, or of as many as fit."""
        plan, length = self.plan, self.plan.answers.prompt_tokens + self.plan.longest
        rows = min(plan.rows / (plan.gpus // plan.tensor_parallel), max(self.room(length), 1.0))
        cache = rows * length * plan.policy.cache_bytes(plan.bytes.cache) / plan.tensor_parallel
        return replace(self._updating(), sampling=self._sampling_weights(), cache=cache)

    def _calls(self, rows: float) -> float:
        """Forwards of one device."""
        return math.ceil(rows / self.plan.gpus / self.plan.update.micro_batch_rows)

    def _updating(self) -> Memory:
        plan = self.plan
        return training_memory(
            plan.policy,
            plan.bytes,
            micro_tokens=plan.update.micro_batch_rows * plan.longest + plan.answers.prompt_tokens,
            checkpointing=plan.update.gradient_checkpointing,
            sharded_over=plan.gpus if plan.sharding == "fsdp2" else 1,
            whole=self.whole,
            spread=self.spread,
            also_trained=self.also_trained,
        )

    def _sampling_weights(self) -> float:
        """Of the sampler's own copy; the built-in one reads the trainer's weights, where a device has them all."""
        plan = self.plan
        needed = plan.engine.own_weights or (plan.sharding == "fsdp2" and plan.gpus > 1)
        return plan.policy.params * plan.bytes.sampling / plan.tensor_parallel if needed else 0.0
