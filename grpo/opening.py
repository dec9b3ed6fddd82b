"""From problems to a window: one rollout batch sampled, verified, credited, measured and written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..credit import CreditStrategy, Rollout, collate
from ..verifiers import InputError
from ..verifiers.panel import Panel, PanelResult
from .alarms import alarm_metrics
from .collect import check_panel
from .config import TrainerConfig
from .engines import Engine
from .evidence import Evidence, Gathered
from .learner import Learner
from .metrics import rollout_metrics
from .policy import ForwardCounter, Policy
from .processes import Processes
from .records import rollouts_path, write_rollouts
from .sampling import RolloutConfig
from .seeds import named_seed
from .sharding import whole
from .state import RunState
from .strategy_geometry import StrategyGeometry
from .task import Problem, Task
from .together import collect_in_shares, gather_in_shares, token_scores_in_shares
from .window import Window

__all__ = ["Opening"]


class Opening:
    """Opens the windows of one run.

    Args:
        policy, task, panel: sample, give problems, judge.
        evidence: providers of what the strategy needs beyond the rollouts.
        strategy: says what it needs.
        learner: assigns its credit.
        state: of the run; its tokens are counted here.
        engine: samples completions with the policy's weights.
        reference: the frozen policy, or None where nobody asks for it.
        requires: signals that somebody reads.
        geometry: compares other strategies with the trained one, or None.
        always_scores: the reference scores every batch, not only those before an evaluation.
        rollout, config: options.
        rows: rows in one forward.
        folder: of the run.
        forwards: counts those of the policy.
        processes: that share the run.
        should_stop: asked while tokens are sampled.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        panel: Panel,
        evidence: Evidence,
        strategy: CreditStrategy,
        learner: Learner,
        state: RunState,
        *,
        engine: Engine,
        reference: Policy | None,
        requires: frozenset[str],
        geometry: StrategyGeometry | None,
        always_scores: bool,
        rollout: RolloutConfig,
        config: TrainerConfig,
        rows: int,
        folder: Path,
        forwards: ForwardCounter,
        processes: Processes,
        should_stop: Callable[[], bool],
    ) -> None:
        self._policy, self._task, self._panel = policy, task, panel
        self._evidence, self._strategy, self._learner, self._state = evidence, strategy, learner, state
        self._requires, self._geometry = requires, geometry
        self._engine, self._reference, self._always_scores = engine, reference, always_scores
        self._rollout, self._config, self._rows, self._folder = rollout, config, rows, folder
        self._forwards, self._processes, self._should_stop = forwards, processes, should_stop

    def __call__(self, step: int) -> Window:
        """Sample, verify and credit the rollout batch ``step``."""
        config, processes, state = self._config, self._processes, self._state
        self._forwards.take()
        self._forwards.take_tokens()  # those of an evaluation are not charged
        problems = self._problems(step)
        collected = collect_in_shares(
            processes,
            self._policy,
            problems,
            self._panel,
            self._rollout,
            seed=config.seed,
            step=step,
            should_stop=self._should_stop,
            engine=self._engine,
        )
        check_panel(collected.panel, config.max_error_share)
        rollouts, tokens = collected.rollouts, state.tokens + collected.num_tokens
        if step == 1 and "reward" in self._strategy.requires:
            self._refuse_silence(rollouts)
        batch = collate(
            rollouts, mask_truncated=self._rollout.truncated == "mask", seed=named_seed(config.seed, "credit", step)
        )
        batch = replace(batch, tree=collected.tree, progress=(step - 1) / config.steps)
        window = Window.open(step, rollouts, batch)
        began = time.perf_counter()
        gap = {} if self._engine.native else self._learner.take_over(window)
        batch = window.batch
        if self._reference is not None and (self._always_scores or config.evaluates(step, tokens)):
            window.ref_logprobs = self._learner.score(self._reference, window)
            window.batch = replace(batch, ref_logprobs=window.ref_logprobs)
        scored = time.perf_counter()
        gathered = self._gather(window, problems, rollouts)
        tokens += gathered.tokens
        state.torn = bool(state.scorers)
        batch, learned = token_scores_in_shares(
            processes, self._evidence, self._requires, state.scorers, self._policy, rollouts, gathered.batch
        )
        window.batch = batch
        evident = time.perf_counter()
        window.credit = self._learner.assign_credit(window)
        credited = time.perf_counter()
        measured = rollout_metrics(
            rollouts, batch, window.credit, window.ref_logprobs, success=config.success, format=config.format
        )
        measured |= alarm_metrics(rollouts, batch, config.alarms)
        if self._geometry is not None and self._geometry.is_due(step):
            measured |= self._learner.compare(self._geometry, window)
        if config.keeps_rollouts(step):
            path = rollouts_path(self._folder, step)
            processes.main(lambda: write_rollouts(path, step, problems, rollouts, batch, window.credit))
        written = time.perf_counter()
        # Last of all, so that nothing can go wrong between what scorers learn and the window.
        if state.scorers:
            with whole(self._policy.model):
                learned |= processes.jointly(
                    lambda: self._evidence.observe(self._requires, self._policy, rollouts, batch)
                )
        window.metrics = {
            **gap,
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
            "cost/forwards": processes.total(self._forwards.take()),
            "cost/forward_tokens": processes.total(self._forwards.take_tokens()),
            "cost/verifier_seconds": _verifier_seconds(collected.panel, gathered.panel),
            "optim/skipped_updates": 0.0,
        }
        state.tokens = tokens
        return window

    def _problems(self, step: int) -> Sequence[Problem]:
        count, seed = self._rollout.prompts_per_step, self._config.seed
        problems = self._processes.main(lambda: self._task.batch(step, count, seed))
        if not problems:
            raise InputError(f"task: it gave no problem to train on at step {step}")
        return problems

    def _refuse_silence(self, rollouts: Sequence[Rollout]) -> None:
        if all(rollout.reward is None for rollout in rollouts):
            names = ", ".join(self._panel.reward_weights)
            raise InputError(
                f"reward: {names} judged no completion of the first batch; do the problems have reference answers?"
            )

    def _gather(self, window: Window, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> Gathered:
        """The evidence that the strategy needs beyond the rollouts; the verifiers' faults count there too."""
        gathered = gather_in_shares(
            self._processes,
            self._evidence,
            self._requires,
            self._policy,
            problems,
            rollouts,
            window.batch,
            self._panel,
            self._rollout,
            masks_truncated=self._rollout.truncated == "mask",
            rows=self._rows,
            seed=self._config.seed,
            step=window.step,
            should_stop=self._should_stop,
            engine=self._engine,
        )
        if gathered.panel is not None:
            check_panel(gathered.panel, self._config.max_error_share)
        return gathered


def _verifier_seconds(*panels: PanelResult | None) -> float:
    """Wall time of all verifiers' calls, also of those beside the sampling."""
    return sum(sum(panel.seconds.values()) for panel in panels if panel is not None)
