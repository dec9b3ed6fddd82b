"""The inner loop: optimiser steps on one rollout batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..credit import Credit, CreditStrategy, assign_credit
from .forward import score_in_parts
from .loss import LossConfig
from .metrics import credit_metrics
from .policy import ForwardCounter, Policy
from .reference import with_kl_in_reward
from .sampling import Interrupted, RolloutConfig
from .state import RunState
from .surrogates import refuse_cancelled_credit
from .update import Diverged, NonFinite, OptimConfig, accumulate_gradients, merge_sums, optimizer_step
from .window import Window, minibatch_rows

__all__ = ["Learner"]


class Learner:
    """Works rollout batches off: credit where it is due again, gradient, update, and what was seen on the way.

    Args:
        policy: the model that learns.
        strategy: hands out credit.
        state: of the run; holds the optimiser, and counts skipped updates.
        rollout, loss, optim: options.
        seed: of the minibatches.
        forwards: counts those of the policy.
        should_stop: asked before each optimiser step; True raises ``Interrupted``.
    """

    def __init__(
        self,
        policy: Policy,
        strategy: CreditStrategy,
        state: RunState,
        *,
        rollout: RolloutConfig,
        loss: LossConfig,
        optim: OptimConfig,
        seed: int,
        forwards: ForwardCounter,
        should_stop: Callable[[], bool],
    ) -> None:
        self._policy, self._strategy, self._state, self._seed = policy, strategy, state, seed
        self._rollout, self._loss, self._optim = rollout, loss, optim
        self._forwards, self._should_stop = forwards, should_stop

    def work_off(self, window: Window) -> None:
        """The remaining optimiser steps of a window; between two of them a request to stop is obeyed."""
        for index in range(window.done, self._optim.steps_per_window):
            if self._should_stop():
                raise Interrupted
            began = time.perf_counter()
            if self._strategy.phase == "update" and index > 0:  # the first step's was assigned when the window opened
                window.credit = self.assign_credit(window)
                window.metrics |= credit_metrics(window.batch, window.credit)
            epoch, part = divmod(index, self._optim.minibatches)
            rows = minibatch_rows(
                window.batch.group_ids,
                minibatches=self._optim.minibatches,
                seed=self._seed,
                step=window.step,
                epoch=epoch,
            )
            self._optimise(window, rows[part])
            window.metrics["cost/seconds_update"] += time.perf_counter() - began
            window.metrics["cost/forwards"] += self._forwards.take()
            window.done = index + 1

    def assign_credit(self, window: Window) -> Credit:
        """Credit for the window's evidence, under the policy as it is now."""
        batch = with_kl_in_reward(window.batch, window.ref_logprobs, self._loss)
        if self._strategy.phase == "update":
            batch = replace(batch, logprobs=self.score(self._policy, window))
        credit = assign_credit(self._strategy, batch)
        refuse_cancelled_credit(self._loss.surrogate, credit.advantages, batch.completion_mask, credit.loss_weight)
        return credit

    def _optimise(self, window: Window, rows: Tensor) -> None:
        """One optimiser step; a loss or gradient that is not finite skips it."""
        state = self._state
        try:
            seen = accumulate_gradients(
                self._policy,
                window,
                rows,
                self._loss,
                micro_batch_rows=self._optim.micro_batch_rows,
                max_tokens=self._rollout.max_new_tokens,
                temperature=self._rollout.temperature,
            )
            if not seen:
                return
            if window.done == 0:
                window.metrics["sampling/logprob_gap"] = seen["max/log_ratio_abs"]
            window.metrics["optim/lr"] = state.schedule.get_last_lr()[0]
            seen["grad_norm"] = optimizer_step(
                self._policy, state.optimizer, state.schedule, max_grad_norm=self._optim.max_grad_norm, step=window.step
            )
        except NonFinite as error:
            state.optimizer.zero_grad(set_to_none=True)
            state.skipped += 1
            window.metrics["optim/skipped_updates"] += 1
            if state.skipped >= self._optim.max_skipped:
                raise Diverged(
                    f"{error}; {state.skipped} updates were skipped in all (optim.max_skipped): lower optim.lr"
                ) from error
            return
        merge_sums(window.sums, {**seen, "updates": 1.0})

    def score(self, policy: Policy, window: Window) -> Tensor:
        """Log-probabilities (B, T) of the window's tokens under ``policy``."""
        return score_in_parts(
            policy,
            window.prompt_ids,
            window.completion_ids,
            temperature=self._rollout.temperature,
            rows=self._optim.micro_batch_rows,
        ).logprobs
