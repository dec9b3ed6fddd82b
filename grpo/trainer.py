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

from ..credit import CreditStrategy
from ..credit.adaptive import observe
from ..verifiers.panel import Panel
from .alarms import check_alarms
from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .config import TrainerConfig
from .drift import drift_metrics, read_history, watched
from .engines import Engine
from .engines.native import NativeEngine
from .evaluate import evaluate
from .evidence import Evidence
from .files import make_folder, one_line
from .interrupt import StopRequest
from .journal import Journal, Logger, Unwritten
from .learner import Learner
from .loss import LossConfig
from .opening import Opening
from .parallel import ParallelConfig
from .policy import ForwardCounter, Policy
from .processes import ALONE, Processes
from .reference import reference_of_run
from .sampling import Interrupted, RolloutConfig
from .sharding import shard, whole
from .signals import check_signals
from .state import RunState
from .strategy_geometry import StrategyGeometry, check_geometry
from .task import Task
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
        engine: samples completions with the policy's weights; None: the built-in sampler.
        geometry: compares the gradients of other strategies with that of the trained one; None: nobody asks.
        retention_verifier: judges ``task.retention()``; None leaves retention out.
        loggers: further homes of the metrics.
        on_step: told after every logged step.
        processes: that share the run; each has a trainer with the same arguments, and only the main one writes.
        parallel: how they share it.
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
        engine: Engine | None = None,
        geometry: StrategyGeometry | None = None,
        retention_verifier: Callable[..., Any] | None = None,
        loggers: Sequence[Logger] = (),
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
        processes: Processes = ALONE,
        parallel: ParallelConfig | None = None,
    ) -> None:
        self.evidence = evidence = Evidence() if evidence is None else evidence
        wanted = strategy.requires | (frozenset() if geometry is None else geometry.requires)
        requires = evidence.needed(wanted)
        check_signals(
            strategy,
            verifiers,
            reward_weights,
            success=config.success,
            format=config.format,
            loss=loss,
            further=evidence.available(requires, rollout),
            requires=requires,
        )
        check_minibatches(optim, rollout)
        check_alarms(config.alarms, verifiers)
        check_geometry(geometry, processes.count, sharded=parallel is not None and bool(parallel.shard))
        self.policy, self.task = policy, task
        self.panel = Panel(verifiers, dict(reward_weights), config.verifier_timeout_s)
        self.strategy, self.rollout, self.config = strategy, rollout, config
        self.folder, self.retention_verifier, self.processes = folder, retention_verifier, processes
        self.engine: Engine = NativeEngine(policy) if engine is None else engine
        self.stop = StopRequest()
        self._forwards = ForwardCounter()
        processes.main(lambda: make_folder(folder))
        checkpoint = processes.main(lambda: latest_checkpoint(folder / "checkpoints"))
        processes.copy_from_main(policy.model)
        always_scores = loss.kl_coef > 0 or "ref_logprobs" in requires
        self.reference = (
            reference_of_run(processes, policy, folder / "reference.safetensors", resuming=checkpoint is not None)
            if always_scores or config.reference_kl
            else None
        )
        learners = evidence.begin(requires, policy, rollout, optim, self._forwards)
        sharding = parallel is not None and bool(parallel.shard) and processes.count > 1
        saved = None
        if checkpoint is not None:
            saved = processes.jointly(lambda: load_checkpoint(checkpoint, policy.model, lazily=sharding))
        self.shards = None
        if sharding and parallel is not None:
            if self.reference is not None:
                shard(self.reference.model, reshard=parallel.reshard)
            self.shards = shard(policy.model, reshard=parallel.reshard)
        optimizer, schedule = build_optimizer(policy, optim, max(config.steps * optim.steps_per_window, 1))
        self.state = RunState(optimizer, schedule, strategy, scorers=learners)
        self.learner = Learner(
            policy,
            strategy,
            self.state,
            rollout=rollout,
            loss=loss,
            optim=optim,
            seed=config.seed,
            forwards=self._forwards,
            should_stop=lambda: processes.any(self.stop()),
            processes=processes,
            by_group=geometry is not None and geometry.groups,
        )
        if checkpoint is not None and saved is not None:
            self.state.restore(saved, checkpoint)
        self._open_window = Opening(
            policy,
            task,
            self.panel,
            evidence,
            strategy,
            self.learner,
            self.state,
            engine=self.engine,
            reference=self.reference,
            requires=requires,
            geometry=geometry,
            always_scores=always_scores,
            rollout=rollout,
            config=config,
            rows=optim.micro_batch_rows,
            folder=folder,
            forwards=self._forwards,
            processes=processes,
            should_stop=self.stop,
        )
        self.journal: Journal | Unwritten = processes.jointly(
            lambda: (
                Journal(
                    folder, config.steps, self.state, resumed=checkpoint is not None, loggers=loggers, on_step=on_step
                )
                if processes.is_main
                else Unwritten()
            )
        )

        self._history = processes.main(lambda: read_history(folder / "metrics.jsonl"))

    def train(self) -> str:
        """Run to the end of the budget; ``finished``, or ``interrupted`` after a request to stop was obeyed.

        Whatever ends the run, a checkpoint of the last sound moment is left, from which the same command goes on.
        """
        self._began = time.perf_counter() - self.state.seconds
        try:
            with self.stop.listening(), self._forwards.counting(self.policy.model, *self._beside()):
                self.processes.jointly(lambda: self.journal.status("running"))
                outcome = self._run()
                if outcome == "finished" or self.state.has_begun:
                    self.save()
                self.processes.jointly(lambda: self.journal.status(outcome))
                return outcome
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self.journal.close()

    def _beside(self) -> list[Any]:
        """Models whose tokens are charged to the run: the reference, and the ``counted_models`` of who has any."""
        named = (*self.panel.verifiers.values(), *self.evidence.scorers.values())
        beside = [model for one in named for model in getattr(one, "counted_models", ())]
        return beside if self.reference is None else [self.reference.model, *beside]

    def _run(self) -> str:
        state = self.state
        try:
            if state.step == 0 and state.window is None and self.processes.main(lambda: self.journal.is_empty):
                self._log(0, self._evaluate())
            while not self.config.is_last(state.step, state.tokens):
                self.config.alarms.heed(state.step, state.alarms)
                self.config.drift.heed(state.step, self._history)
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
        """Save what can be saved, and say what went wrong; a second fault on the way must not hide the first.

        Where the other processes do not know of the fault there is nobody to save with: the launcher ends them.
        """
        known = self.processes.all_know(error)
        if known and self.state.is_sound and isinstance(error, Exception) and not isinstance(error, Diverged):
            with contextlib.suppress(Exception):
                self.save()
        state = "failed" if isinstance(error, Exception) else "interrupted"
        with contextlib.suppress(Exception):
            self.journal.status(state, f"{type(error).__name__}: {one_line(error, 1000)}")

    def _close_window(self, window: Window) -> None:
        """Evaluate where it is due, log, and only then count the rollout batch as done."""
        metrics = window.metrics | update_metrics(window.sums)
        if self.config.evaluates(window.step, self.state.tokens):
            merge_sums(metrics, self._evaluate())
        history = self.config.alarms.remember(self.state.alarms, metrics)
        self._history.append(watched(metrics))
        moves = self.config.alarms.moves(history) | drift_metrics(self._history, self.config.drift)
        self._log(window.step, metrics | moves)
        self.state.alarms = history
        observe(self.strategy, window.batch)
        self.state.step, self.state.window = window.step, None
        if self.config.saves(window.step) and not self.config.is_last(window.step, self.state.tokens):
            self.save()
            self.processes.jointly(lambda: self.journal.status("running"))

    def _evaluate(self) -> dict[str, float]:
        began = time.perf_counter()
        self._forwards.take()
        with whole(self.policy.model):
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
                engine=self.engine,
                processes=self.processes,
            )
        forwards = self.processes.total(self._forwards.take())
        return metrics | {"cost/seconds_eval": time.perf_counter() - began, "cost/forwards": forwards}

    def save(self) -> Path:
        """A checkpoint of this moment, the window in progress included."""
        name, content = self.state.name, self.state.content()
        policy = self.whole_policy()
        return self.processes.main(
            lambda: save_checkpoint(
                self.folder / "checkpoints", name, policy.model, content, keep=self.config.keep_checkpoints
            )
        )

    def whole_policy(self) -> Policy:
        """The policy, or a whole copy on the CPU of one that is sharded: in the main process, where all ask for it."""
        if self.shards is None:
            return self.policy
        return replace(self.policy, model=self.shards.gathered(keep=self.processes.is_main))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.seconds = time.perf_counter() - self._began
        self.processes.jointly(lambda: self.journal.log(step, metrics))
