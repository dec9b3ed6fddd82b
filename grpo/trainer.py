"""The GRPO loop. It knows no strategy, no verifier and no task by name; data flows one way through it:

problems -> rollouts -> verdicts -> credit -> loss -> update -> diagnostics.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..credit import CreditStrategy, Rollout, collate
from ..credit.adaptive import observe
from ..verifiers import InputError
from ..verifiers.panel import Panel
from .alarms import alarm_metrics, check_alarms
from .checkpoint import latest_checkpoint
from .collect import check_panel, collect
from .config import TrainerConfig
from .evaluate import evaluate
from .evidence import Evidence, Gathered
from .files import make_folder, one_line
from .interrupt import StopRequest
from .journal import Journal, Logger
from .learner import Learner
from .loss import LossConfig
from .metrics import rollout_metrics
from .policy import ForwardCounter, Policy
from .records import rollouts_path, write_rollouts
from .reference import frozen_reference
from .sampling import Interrupted, RolloutConfig
from .seeds import named_seed
from .signals import check_signals
from .state import RunState
from .task import Problem, Task
from .update import Diverged, OptimConfig, build_optimizer, check_minibatches, merge_sums, update_metrics
from .window import Window

__all__ = ["Logger", "Trainer", "TrainerConfig"]


class Trainer:
    """One GRPO run in one folder.

    Args:
        policy: the model that learns; its weights at this moment are the frozen reference.
        task: gives problems.
        verifiers: judge completions, by name.
        reward_weights: the outcome reward is the weighted sum of these verifiers' scores.
        strategy: hands out credit.
        folder: run folder; a checkpoint in it is gone on from.
        evidence: providers of what some strategies need beyond the rollouts.
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
        evidence: Evidence | None = None,
        retention_verifier: Callable[..., Any] | None = None,
        loggers: Sequence[Logger] = (),
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        self.evidence = Evidence() if evidence is None else evidence
        self.requires = self.evidence.needed(strategy.requires)
        check_signals(
            strategy,
            verifiers,
            reward_weights,
            success=config.success,
            format=config.format,
            loss=loss,
            further=self.evidence.available(self.requires, rollout),
            requires=self.requires,
        )
        check_minibatches(optim, rollout)
        check_alarms(config.alarms, verifiers)
        self.policy, self.task = policy, task
        self.panel = Panel(verifiers, dict(reward_weights), config.verifier_timeout_s)
        self.strategy, self.rollout, self.loss, self.optim, self.config = strategy, rollout, loss, optim, config
        self.folder, self.retention_verifier = folder, retention_verifier
        self.stop = StopRequest()
        self._forwards = ForwardCounter()
        make_folder(folder)
        checkpoint = latest_checkpoint(folder / "checkpoints")
        self.reference = (
            frozen_reference(policy, folder / "reference.safetensors", resuming=checkpoint is not None)
            if loss.kl_coef > 0 or config.reference_kl or "ref_logprobs" in self.requires
            else None
        )
        optimizer, schedule = build_optimizer(policy, optim, max(config.steps * optim.steps_per_window, 1))
        learners = self.evidence.begin(self.requires, policy, rollout, optim, self._forwards)
        self.state = RunState(policy.model, optimizer, schedule, strategy, scorers=learners)
        self.learner = Learner(
            policy,
            strategy,
            self.state,
            rollout=rollout,
            loss=loss,
            optim=optim,
            seed=config.seed,
            forwards=self._forwards,
            should_stop=self.stop,
        )
        if checkpoint is not None:
            self.state.load(checkpoint)
        self.journal = Journal(
            folder, config.steps, self.state, resumed=checkpoint is not None, loggers=loggers, on_step=on_step
        )

    def train(self) -> str:
        """Run to the end of the budget; ``finished``, or ``interrupted`` after a request to stop was obeyed.

        Whatever ends the run, a checkpoint of the last sound moment is left, from which the same command goes on.
        """
        self._began = time.perf_counter() - self.state.seconds
        try:
            with self.stop.listening(), self._forwards.counting(self.policy.model):
                self.journal.status("running")
                outcome = self._run()
                if outcome == "finished" or self.state.has_begun:
                    self.save()
                self.journal.status(outcome)
                return outcome
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self.journal.close()

    def _run(self) -> str:
        state = self.state
        try:
            if state.step == 0 and state.window is None and self.journal.is_empty:
                self._log(0, self._evaluate())
            while not self.config.is_last(state.step, state.tokens):
                self.config.alarms.heed(state.step, state.alarms)
                if state.window is None:
                    state.window = self._open_window(state.step + 1)
                    state.torn = False
                self.learner.work_off(state.window)
                self._close_window(state.window)
        except Interrupted:
            state.seconds = time.perf_counter() - self._began
            return "interrupted"
        return "finished"

    def _leave(self, error: BaseException) -> None:
        """Save what can be saved, and say what went wrong; a second fault on the way must not hide the first."""
        if self.state.is_sound and isinstance(error, Exception) and not isinstance(error, Diverged):
            with contextlib.suppress(Exception):
                self.save()
        state = "failed" if isinstance(error, Exception) else "interrupted"
        with contextlib.suppress(Exception):
            self.journal.status(state, f"{type(error).__name__}: {one_line(error, 1000)}")

    def _open_window(self, step: int) -> Window:
        """Sample, verify and credit one rollout batch."""
        config = self.config
        self._forwards.take()
        problems = self.task.batch(step, self.rollout.prompts_per_step, config.seed)
        if not problems:
            raise InputError(f"task: it gave no problem to train on at step {step}")
        collected = collect(
            self.policy, problems, self.panel, self.rollout, seed=config.seed, step=step, should_stop=self.stop
        )
        check_panel(collected.panel, config.max_error_share)
        if step == 1 and "reward" in self.strategy.requires and all(r.reward is None for r in collected.rollouts):
            names = ", ".join(self.panel.reward_weights)
            raise InputError(
                f"reward: {names} judged no completion of the first batch; do the problems have reference answers?"
            )
        rollouts, tokens = collected.rollouts, self.state.tokens + collected.num_tokens
        batch = collate(
            rollouts, mask_truncated=self.rollout.truncated == "mask", seed=named_seed(config.seed, "credit", step)
        )
        batch = replace(batch, tree=collected.tree, progress=(step - 1) / config.steps)
        window = Window.open(step, rollouts, batch)
        began = time.perf_counter()
        if self._needs_reference(step, tokens):
            assert self.reference is not None
            window.ref_logprobs = self.learner.score(self.reference, window)
            window.batch = replace(batch, ref_logprobs=window.ref_logprobs)
        scored = time.perf_counter()
        gathered = self._gather(window, problems, rollouts)
        tokens += gathered.tokens
        self.state.torn = bool(self.state.scorers)
        batch, learned = self.evidence.score(self.requires, self.policy, rollouts, gathered.batch)
        window.batch = batch
        evident = time.perf_counter()
        window.credit = self.learner.assign_credit(window)
        credited = time.perf_counter()
        measured = rollout_metrics(
            rollouts, batch, window.credit, window.ref_logprobs, success=config.success, format=config.format
        )
        measured |= alarm_metrics(rollouts, batch, config.alarms)
        if config.keeps_rollouts(step):
            write_rollouts(rollouts_path(self.folder, step), step, problems, rollouts, batch, window.credit)
        written = time.perf_counter()
        # Last of all, so that nothing can go wrong between what scorers learn and the window.
        learned |= self.evidence.observe(self.requires, self.policy, rollouts, batch)
        window.metrics = {
            **learned,
            **measured,
            **{f"verifier/errors_{name}": float(count) for name, count in collected.panel.errors.items()},
            "cost/seconds_sample": collected.seconds_sample,
            "cost/seconds_verify": collected.seconds_verify,
            "cost/seconds_reference": scored - began,
            "cost/seconds_evidence": evident - scored + time.perf_counter() - written,
            "cost/seconds_credit": credited - evident,
            "cost/seconds_update": 0.0,
            "cost/tokens": float(collected.num_tokens + gathered.tokens),
            **gathered.metrics,
            "cost/forwards": self._forwards.take(),
            "optim/skipped_updates": 0.0,
        }
        self.state.tokens = tokens
        return window

    def _needs_reference(self, step: int, tokens: int) -> bool:
        wanted = self.loss.kl_coef > 0 or "ref_logprobs" in self.requires
        return self.reference is not None and (wanted or self.config.evaluates(step, tokens))

    def _gather(self, window: Window, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> Gathered:
        """The evidence that the strategy needs beyond the rollouts; the verifiers' faults count there too."""
        gathered = self.evidence.gather(
            self.requires,
            self.policy,
            problems,
            rollouts,
            window.batch,
            self.panel,
            self.rollout,
            rows=self.optim.micro_batch_rows,
            seed=self.config.seed,
            step=window.step,
            should_stop=self.stop,
        )
        if gathered.panel is not None:
            check_panel(gathered.panel, self.config.max_error_share)
        return gathered

    def _close_window(self, window: Window) -> None:
        """Evaluate where it is due, log, and only then count the rollout batch as done."""
        metrics = window.metrics | update_metrics(window.sums)
        if self.config.evaluates(window.step, self.state.tokens):
            merge_sums(metrics, self._evaluate())
        history = self.config.alarms.remember(self.state.alarms, metrics)
        self._log(window.step, metrics | self.config.alarms.moves(history))
        self.state.alarms = history
        observe(self.strategy, window.batch)
        self.state.step, self.state.window = window.step, None
        if self.config.saves(window.step) and not self.config.is_last(window.step, self.state.tokens):
            self.save()
            self.journal.status("running")

    def _evaluate(self) -> dict[str, float]:
        began = time.perf_counter()
        self._forwards.take()
        metrics = evaluate(
            self.policy,
            self.task,
            self.panel.verifiers,
            self.retention_verifier,
            success=self.config.success,
            format=self.config.format,
            max_new_tokens=self.rollout.max_new_tokens,
            batch=max(self.rollout.prompts_per_step * self.rollout.group_size, 64),
            max_error_share=self.config.max_error_share,
            timeout_s=self.config.verifier_timeout_s,
            should_stop=self.stop,
        )
        return metrics | {"cost/seconds_eval": time.perf_counter() - began, "cost/forwards": self._forwards.take()}

    def save(self) -> Path:
        """A checkpoint of this moment, the window in progress included."""
        return self.state.save(self.folder / "checkpoints", keep=self.config.keep_checkpoints)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.seconds = time.perf_counter() - self._began
        self.journal.log(step, metrics)
