"""The inner loop: optimiser steps on one rollout batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..credit import Credit, CreditBatch, CreditStrategy, assign_credit
from .geometry import accumulate_by_group
from .importance import weighed, with_trainer_logprobs
from .loss import LossConfig
from .metrics import credit_metrics
from .policy import ForwardCounter, Policy
from .processes import ALONE, Processes, deal
from .reference import with_kl_in_reward
from .sampling import Interrupted, RolloutConfig
from .sharding import is_sharded
from .state import RunState
from .strategy_geometry import StrategyGeometry, geometry_metrics
from .surrogates import refuse_cancelled_credit
from .together import score_in_shares
from .update import (
    Diverged,
    NonFinite,
    OptimConfig,
    accumulate_gradients,
    merge_sums,
    moving_rows,
    optimizer_step,
)
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
        processes: that share the work.
        by_group: take the gradient of one group after the other, for its signal and noise.
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
        processes: Processes = ALONE,
        by_group: bool = False,
    ) -> None:
        self._policy, self._strategy, self._state, self._seed = policy, strategy, state, seed
        self._rollout, self._loss, self._optim = rollout, loss, optim
        self._forwards, self._should_stop, self._processes = forwards, should_stop, processes
        self._by_group = by_group

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
            window.metrics["cost/forwards"] += self._processes.total(self._forwards.take())
            window.metrics["cost/forward_tokens"] += self._processes.total(self._forwards.take_tokens())
            window.done = index + 1

    def take_over(self, window: Window) -> dict[str, float]:
        """Put the trainer's own log-probabilities in place of another engine's; how far apart the two were."""
        scored, cap, level = self.score(self._policy, window), self._loss.importance_cap, self._loss.importance_level
        window.batch, window.importance, gap = with_trainer_logprobs(window.batch, scored, cap=cap, level=level)
        return gap

    def assign_credit(self, window: Window) -> Credit:
        """Credit for the window's evidence, under the policy as it is now."""
        batch = with_kl_in_reward(window.batch, window.ref_logprobs, self._loss)
        if self._strategy.phase == "update":
            batch = replace(batch, logprobs=self.score(self._policy, window))
        return weighed(self._processes.main(lambda: self._credit_of(batch)), window.importance)

    def compare(self, geometry: StrategyGeometry, window: Window) -> dict[str, float]:
        """How the gradients of other strategies lie to that of the window's credit; taken by one process for all."""
        return self._processes.main(
            lambda: geometry.measure(
                self._policy,
                window,
                loss=self._loss,
                max_tokens=self._rollout.max_new_tokens,
                temperature=self._rollout.temperature,
                micro_batch_rows=self._optim.micro_batch_rows,
                micro_batch_tokens=self._optim.micro_batch_tokens,
            )
        )

    def _credit_of(self, batch: CreditBatch) -> Credit:
        credit = assign_credit(self._strategy, batch)
        refuse_cancelled_credit(self._loss.surrogate, credit.advantages, batch.completion_mask, credit.loss_weight)
        return credit

    def _optimise(self, window: Window, rows: Tensor) -> None:
        """One optimiser step; a loss or gradient that is not finite skips it."""
        state = self._state
        try:
            seen = self._accumulate(window, rows)
            if not seen:
                return
            if not window.sums.get("updates"):  # the policy is still the one that sampled
                window.metrics.setdefault("sampling/logprob_gap", seen["max/log_ratio_abs"])
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

    def _accumulate(self, window: Window, rows: Tensor) -> dict[str, float]:
        """Statistics of an optimiser step over all processes, whose summed gradient is in the parameters afterwards.

        Each process works off some groups. With sharded weights all of them run equally often, and every backward sums.
        """
        processes, sharded = self._processes, is_sharded(self._policy.model)
        if self._by_group:
            return self._accumulate_by_group(window, rows)
        moving = moving_rows(window, rows, self._loss)
        costs = torch.tensor([float(len(window.completion_ids[row])) for row in rows.tolist()])
        costs = costs * moving if moving.any() else costs
        own = rows[deal(costs, window.batch.group_ids[rows], processes.count)[processes.number]]

        def work() -> dict[str, float]:
            return accumulate_gradients(
                self._policy,
                window,
                own,
                self._loss,
                micro_batch_rows=self._optim.micro_batch_rows,
                micro_batch_tokens=self._optim.micro_batch_tokens,
                max_tokens=self._rollout.max_new_tokens,
                temperature=self._rollout.temperature,
                step_rows=rows,
                passes=processes.most if sharded else None,
            )

        sums: dict[str, float] = {}
        for seen in processes.each(_told_later(work) if sharded else work):
            merge_sums(sums, seen)
        if not sharded:
            processes.add_gradients(self._policy.model)
        return sums

    def _accumulate_by_group(self, window: Window, rows: Tensor) -> dict[str, float]:
        """The same, one group after the other; what their gradients tell is of the window's last optimiser step."""
        sums, gram = accumulate_by_group(
            self._policy,
            window,
            rows,
            self._loss,
            micro_batch_rows=self._optim.micro_batch_rows,
            micro_batch_tokens=self._optim.micro_batch_tokens,
            max_tokens=self._rollout.max_new_tokens,
            temperature=self._rollout.temperature,
        )
        names = {"geometry/snr": "optim/groups_snr", "geometry/groups_cosine": "optim/groups_cosine"}
        found = geometry_metrics(gram)
        window.metrics |= {name: found[key] for key, name in names.items() if key in found}
        return sums

    def score(self, policy: Policy, window: Window) -> Tensor:
        """Log-probabilities (B, T) of the window's tokens under ``policy``."""
        return score_in_shares(
            self._processes,
            policy,
            window.prompt_ids,
            window.completion_ids,
            window.batch.group_ids,
            temperature=self._rollout.temperature,
            rows=self._optim.micro_batch_rows,
        )


def _told_later(work: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
    """Do the work now, and tell afterwards what came of it. Only a fault after which all still meet can be told."""
    try:
        seen = work()
    except NonFinite as error:
        fault = error

        def fail() -> dict[str, float]:
            raise fault

        return fail
    return lambda: seen
