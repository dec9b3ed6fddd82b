"""The GRPO loop. It knows no strategy, no verifier and no task by name; data flows one way through it:

problems -> rollouts -> verdicts -> credit -> loss -> update -> diagnostics.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..credit import CreditStrategy, Rollout, assign_credit, collate
from ..verifiers import InputError
from .checkpoint import (
    global_rng_state,
    latest_checkpoint,
    load_checkpoint,
    restore_global_rng,
    save_checkpoint,
    write_text,
)
from .collect import Collected, collect
from .evaluate import pass_rates
from .interrupt import StopRequest
from .loss import LossConfig, kl_estimate
from .metrics import credit_metrics, drop_missing, length_metrics, reward_metrics
from .policy import Policy
from .records import MetricsFile, write_rollouts
from .reference import frozen_reference, score_rollouts, with_kl_in_reward
from .sampling import Interrupted, RolloutConfig
from .seeds import named_seed
from .signals import check_signals
from .task import Task
from .update import NonFinite, OptimConfig, accumulate_gradients, build_optimizer, optimizer_step, update_metrics
from .window import Window, minibatch_rows

__all__ = ["Logger", "Trainer", "TrainerConfig"]


class Logger(Protocol):
    """An optional second home for the metrics, such as TensorBoard."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TrainerConfig:
    """How long a run is and what it writes.

    Args:
        seed: of problems, sampling and minibatches.
        steps: rollout batches.
        budget_tokens: stop after the rollout batch in which so many tokens were generated, or None.
        eval_every, save_every, rollouts_every: in rollout batches; 0 is never (the first batch's
            rollouts are always kept).
        keep_checkpoints: how many stay.
        success, format: verifiers whose pass rate is reported; ``format`` may be None.
        reference_kl: measure the KL to the starting weights at each evaluation although it is not in the objective.
        max_error_share: stop once a verifier failed on more than this share of a batch.
    """

    seed: int = 0
    steps: int = 60
    budget_tokens: int | None = None
    eval_every: int = 10
    save_every: int = 20
    rollouts_every: int = 10
    keep_checkpoints: int = 2
    success: str = "answer"
    format: str | None = None
    reference_kl: bool = True
    max_error_share: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.budget_tokens is not None and self.budget_tokens < 1):
            raise InputError(f"run.steps={self.steps}, run.budget_tokens={self.budget_tokens}: must not be negative")


class Trainer:
    """One GRPO run in one folder.

    Args:
        policy: the model that learns; its weights at this moment are the frozen reference.
        task: gives problems.
        verifiers: judge completions, by name.
        reward_weights: the outcome reward is the weighted sum of these verifiers' scores.
        strategy: hands out credit.
        folder: run folder; a checkpoint in it is gone on from.
        retention_verifier: judges ``task.retention()``; None leaves retention out.
        loggers: further homes of the metrics.
        on_step: told after every logged step.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        verifiers: Mapping[str, Callable[..., Any]],
        reward_weights: Mapping[str, float],
        strategy: CreditStrategy,
        *,
        rollout: RolloutConfig,
        loss: LossConfig,
        optim: OptimConfig,
        config: TrainerConfig,
        folder: Path,
        retention_verifier: Callable[..., Any] | None = None,
        loggers: Sequence[Logger] = (),
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        check_signals(strategy, verifiers, reward_weights, success=config.success, format=config.format)
        if optim.minibatches > rollout.prompts_per_step:
            raise InputError(
                f"optim.minibatches={optim.minibatches}: whole groups stay together, so at most "
                f"rollout.prompts_per_step={rollout.prompts_per_step}"
            )
        self.policy, self.task, self.verifiers, self.reward_weights = policy, task, verifiers, dict(reward_weights)
        self.strategy, self.rollout, self.loss, self.optim, self.config = strategy, rollout, loss, optim, config
        self.folder, self.retention_verifier, self.loggers, self.on_step = folder, retention_verifier, loggers, on_step
        self.step = self.tokens = self.skipped = self.forwards = 0
        self.seconds = 0.0
        self.window: Window | None = None
        self.stop = StopRequest()
        self.reference = (
            frozen_reference(
                policy,
                folder / "reference.safetensors",
                resuming=latest_checkpoint(folder / "checkpoints") is not None,
            )
            if loss.kl_coef > 0 or config.reference_kl
            else None
        )
        self.optimizer, self.schedule = build_optimizer(policy, optim, max(config.steps * optim.steps_per_window, 1))
        policy.model.register_forward_hook(self._count_forward)
        self.resumed = self._resume()
        self.metrics_file = MetricsFile(folder / "metrics.jsonl", self.step if self.resumed else None)

    def train(self) -> str:
        """Run to the end of the budget; ``finished``, or ``interrupted`` after a request to stop was obeyed."""
        began = time.perf_counter() - self.seconds
        self._status("running")
        with self.stop.listening():
            try:
                if not self.resumed:
                    self._log(0, self._evaluate(), began)
                while not self._spent():
                    if self.window is None:
                        self.window = self._open_window(self.step + 1)
                    self._work_off(self.window)
                    self._close_window(self.window, began)
            except Interrupted:
                self.seconds = time.perf_counter() - began
                self.save()
                self._status("interrupted")
                return "interrupted"
            except BaseException as error:
                self._status("failed", f"{type(error).__name__}: {error}")
                raise
            finally:
                self.metrics_file.close()
                for logger in self.loggers:
                    logger.close()
        self.save()
        self._status("finished")
        return "finished"

    def _spent(self) -> bool:
        budget = self.config.budget_tokens
        return self.step >= self.config.steps or (budget is not None and self.tokens >= budget)

    def _open_window(self, step: int) -> Window:
        """Sample, verify and credit one rollout batch."""
        problems = self.task.batch(step, self.rollout.prompts_per_step, self.config.seed)
        collected = collect(
            self.policy,
            problems,
            self.verifiers,
            self.reward_weights,
            self.rollout,
            seed=self.config.seed,
            step=step,
            should_stop=self.stop,
        )
        self._check_verifiers(collected)
        self.tokens += collected.num_tokens
        began = time.perf_counter()
        batch = collate(
            collected.rollouts,
            mask_truncated=self.rollout.truncated == "mask",
            seed=named_seed(self.config.seed, "credit", step),
        )
        ref_logprobs = self._score(self.reference, collected.rollouts) if self._wants_reference(step) else None
        scored = time.perf_counter()
        credit = assign_credit(self.strategy, with_kl_in_reward(batch, ref_logprobs, self.loss))
        credited = time.perf_counter()
        metrics = {
            **reward_metrics(batch, success=self.config.success, format=self.config.format),
            **length_metrics(collected.rollouts, success=self.config.success),
            **credit_metrics(batch, credit),
            **{f"verifier/errors_{name}": float(count) for name, count in collected.panel.errors.items()},
            "cost/seconds_sample": collected.seconds_sample,
            "cost/seconds_verify": collected.seconds_verify,
            "cost/seconds_reference": scored - began,
            "cost/seconds_credit": credited - scored,
            "cost/tokens": float(collected.num_tokens),
        }
        if ref_logprobs is not None:
            assert batch.old_logprobs is not None
            metrics["policy/ref_kl"] = _masked_mean(
                kl_estimate(batch.old_logprobs, ref_logprobs), batch.completion_mask
            )
        every = self.config.rollouts_every
        if step == 1 or (every and step % every == 0):
            path = self.folder / "rollouts" / f"step_{step:05d}.parquet"
            write_rollouts(path, step, problems, collected.rollouts, batch, credit)
        return Window(step, collected.rollouts, batch, credit, ref_logprobs, metrics, done=0, sums={})

    def _work_off(self, window: Window) -> None:
        """The remaining optimiser steps of a window; between two of them a request to stop is obeyed."""
        began = time.perf_counter()
        for index in range(window.done, self.optim.steps_per_window):
            if self.stop() and self.strategy.phase == "rollout":
                raise Interrupted
            epoch, part = divmod(index, self.optim.minibatches)
            rows = minibatch_rows(
                window.batch.group_ids,
                minibatches=self.optim.minibatches,
                seed=self.config.seed,
                step=window.step,
                epoch=epoch,
            )[part]
            if self.strategy.phase == "update":
                current = self._score(self.policy, window.rollouts)
                batch = with_kl_in_reward(window.batch, window.ref_logprobs, self.loss)
                window.credit = assign_credit(self.strategy, replace(batch, logprobs=current))
            self._optimise(window, rows)
            window.done = index + 1
        window.metrics["cost/seconds_update"] = time.perf_counter() - began

    def _optimise(self, window: Window, rows: Tensor) -> None:
        try:
            seen = accumulate_gradients(
                self.policy,
                window,
                rows,
                self.loss,
                micro_batch_rows=self.optim.micro_batch_rows,
                max_tokens=self.rollout.max_new_tokens,
                temperature=self.rollout.temperature,
            )
            if not seen:
                return
            if window.done == 0:
                window.metrics["sampling/logprob_gap"] = seen["max/log_ratio_abs"]
            seen["grad_norm"] = optimizer_step(
                self.policy,
                self.optimizer,
                self.schedule,
                max_grad_norm=self.optim.max_grad_norm,
                step=window.step,
            )
        except NonFinite as error:
            self.optimizer.zero_grad(set_to_none=True)
            self.skipped += 1
            window.metrics["optim/skipped_updates"] = window.metrics.get("optim/skipped_updates", 0.0) + 1
            if self.skipped >= self.optim.max_skipped:
                raise InputError(
                    f"{error}; {self.skipped} updates skipped (optim.max_skipped): lower optim.lr"
                ) from error
            return
        seen["updates"] = 1.0
        for key, value in seen.items():
            if key.startswith(("max/", "min/")):
                merge = max if key.startswith("max/") else min
                window.sums[key] = merge(window.sums.get(key, value), value)
            else:
                window.sums[key] = window.sums.get(key, 0.0) + value

    def _close_window(self, window: Window, began: float) -> None:
        self.step, self.window = window.step, None
        updates = window.sums.get("updates", 0.0)
        metrics = window.metrics | update_metrics(window.sums) | {"optim/lr": self.schedule.get_last_lr()[0]}
        metrics["optim/skipped_updates"] = metrics.get("optim/skipped_updates", 0.0)
        if updates:
            metrics["optim/grad_norm"] = window.sums["grad_norm"] / updates
        every = self.config.eval_every
        if self._spent() or (every and self.step % every == 0):
            metrics |= self._evaluate()
        metrics["cost/forwards"] = float(self.forwards)
        self.forwards = 0
        self._log(self.step, metrics, began)
        if self.config.save_every and self.step % self.config.save_every == 0 and not self._spent():
            self.save()
            self._status("running")

    def _evaluate(self) -> dict[str, float]:
        """Greedy success on held-out problems, and on the retention skill."""
        began = time.perf_counter()
        rows = max(self.rollout.prompts_per_step * self.rollout.group_size, 64)
        options = {"max_new_tokens": self.rollout.max_new_tokens, "batch": rows}
        metrics: dict[str, float] = {}
        if held_out := self.task.held_out():
            names = {self.config.success: "eval/success", self.config.format: "eval/format_pass_rate"}
            wanted = {name: self.verifiers[name] for name in names if name is not None}
            rates = pass_rates(self.policy, held_out, wanted, **options)
            metrics = {names[name]: rate for name, rate in rates.items()}
        retention = self.task.retention()
        if retention and self.retention_verifier is not None:
            rates = pass_rates(self.policy, retention, {"retention": self.retention_verifier}, **options)
            metrics["retention/success"] = rates["retention"]
        metrics["cost/seconds_eval"] = time.perf_counter() - began
        return metrics

    def _wants_reference(self, step: int) -> bool:
        every = self.config.eval_every
        due = step == self.config.steps or bool(every and step % every == 0)
        return self.reference is not None and (self.loss.kl_coef > 0 or due)

    def _score(self, policy: Policy | None, rollouts: Sequence[Rollout]) -> Tensor:
        assert policy is not None
        return score_rollouts(policy, rollouts, temperature=self.rollout.temperature, rows=self.optim.micro_batch_rows)

    def save(self) -> Path:
        """A checkpoint of this moment, the window in progress included."""
        window = self.window
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": global_rng_state(),
            "window": None if window is None else window.state(),
        }
        name = f"step_{self.step:06d}" + ("" if window is None else f"_update_{window.done:03d}")
        return save_checkpoint(
            self.folder / "checkpoints", name, self.policy.model, state, keep=self.config.keep_checkpoints
        )

    def _resume(self) -> bool:
        path = latest_checkpoint(self.folder / "checkpoints")
        if path is None:
            return False
        state = load_checkpoint(path, self.policy.model)
        self.step, self.tokens, self.skipped = state["step"], state["tokens"], state["skipped"]
        self.seconds = state["seconds"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.window = None if state["window"] is None else Window.from_state(state["window"])
        restore_global_rng(state["rng"])
        return True

    def _log(self, step: int, metrics: dict[str, float], began: float) -> None:
        self.seconds = time.perf_counter() - began
        row = {"step": step, "tokens": self.tokens, "seconds": round(self.seconds, 3), **drop_missing(metrics)}
        self.metrics_file.log(row)
        for logger in self.loggers:
            logger.log(step, metrics)
        if self.on_step is not None:
            self.on_step(step, metrics)

    def _status(self, state: str, error: str | None = None) -> None:
        status = {
            "state": state,
            "step": self.step,
            "steps": self.config.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "error": error,
        }
        write_text(self.folder / "status.json", json.dumps(status, indent=2) + "\n")

    def _check_verifiers(self, collected: Collected) -> None:
        for name, count in collected.panel.errors.items():
            if count > self.config.max_error_share * len(collected.rollouts):
                raise InputError(
                    f"verifiers.{name} failed on {count} of {len(collected.rollouts)} completions "
                    f"(run.max_error_share={self.config.max_error_share}); first: {collected.panel.first_error[name]}"
                )

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1


def _masked_mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].double().mean()) if mask.any() else math.nan
