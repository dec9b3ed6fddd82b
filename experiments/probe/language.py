"""A probe of a language model: its own answers, their true values, and everything that strategies make of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...credit import Credit, CreditBatch
from ...credit.quality_sums import Grading
from ...credit.shape import token_classes
from ...grpo.collect import as_sample, check_panel
from ...grpo.gradient_store import gradient_parts, trainable
from ...grpo.gram import GradientGram, reference_is_noise
from ...grpo.policy import Policy
from ...grpo.sampling import Generation, RolloutConfig
from ...grpo.seeds import named_seed
from ...grpo.task import Problem, Task
from ...grpo.truth_units import Valuation, reward_range
from ...grpo.update import NonFinite
from ...verifiers import InputError
from ...verifiers.panel import Panel
from ..progress import StepProgress
from .choices import Choice, Common
from .evidence import Gatherer, credit_of, effective
from .files import write_files
from .measures import Figures, Measures, Resampling, corrected, figures_of_gram, geometry, located, stacked, updates
from .noise import affected, sweep
from .options import ProbeOptions
from .record import UNIFORM, DrawnRollout, Figure, Probe, ProbedStrategy
from .rollouts import Probed, read_saved, sample

__all__ = ["probe_language"]

REFERENCE = 2  # names the random streams of the rollouts behind the reference gradient; the common ones are of step 1
MOST_GAP = 0.05


def probe_language(
    policy: Policy,
    task: Task,
    truth: Callable[..., Valuation],
    choices: Sequence[Choice],
    common: Common,
    options: ProbeOptions,
    folder: Path,
    command: str,
    name: str,
    bar: StepProgress,
) -> Probe:
    """Probe all strategies, and write the files beside the page.

    Args:
        policy: that samples, or that sampled the saved rollouts.
        task: gives problems.
        truth: values the rollouts, see :mod:`apportion.grpo.true_values`.
        choices, common: the strategies and what they share.
        options: keys under ``probe``.
        folder: for the files.
        command: the line to be repeated.
        name: of the task.
        bar: shows the progress.
    """
    run = _Run(policy, task, truth, choices, common, options, bar.counting("probe", 7) or (lambda _: None))
    state = run.gather()
    try:
        figures, gram, cosines, changes = run.measure(state)
    except NonFinite as error:
        raise InputError(f"probe: {error}; look at its advantages and at the rollouts' log-probabilities") from error
    noise = run.noise(state)
    found = Probe(
        command=command,
        task=name,
        seed=common.parts.run.seed,
        facts=run.facts(state),
        strategies=[_strategy(choice, figures[choice.label]) for choice in choices],
        cosines=cosines,
        truth=state.valuation.truth.method,
        noise_floor={**state.measures.floor(state.valuation.halves, state.batch), **figures.get("reference", {})},
        noise=noise,
        rollouts=_drawn(state, options.drawn),
        cautions=run.cautions(state, gram),
    )
    write_files(folder, found, state, gram, changes)
    return found


@dataclass(frozen=True)
class Probing:
    """What a probe knows before it measures."""

    probed: Probed
    batch: CreditBatch
    credits: Mapping[str, Credit]
    valuation: Valuation
    measures: Measures
    costs: Mapping[str, Mapping[str, Figure]]
    reference: Probed | None


@dataclass
class _Run:
    policy: Policy
    task: Task
    truth: Callable[..., Valuation]
    choices: Sequence[Choice]
    common: Common
    options: ProbeOptions
    told: Callable[[int], None]

    def __post_init__(self) -> None:
        self.began, self.parts = time.perf_counter(), self.common.parts
        if self.options.geometry:  # which else would be refused after everything was sampled
            most = len(self.choices) * self.options.problems + 2
            gradient_parts(trainable(self.policy), most, self.options.memory_gib)
        self.panel = Panel(self.parts.verifiers, self.parts.reward, self.parts.run.verifier_timeout_s)

    def gather(self) -> Probing:
        """Rollouts, evidence, true values and credit."""
        options, parts = self.options, self.parts
        probed = self._rollouts()
        self.told(1)
        gatherer = Gatherer.start(self.common, self.policy, probed, self.panel)
        gatherer.gather(self.choices)
        self.told(2)
        valuation = self.truth(
            self.policy, probed.problems, probed.rollouts, probed.batch, self.panel, parts.rollout, seed=parts.run.seed
        )
        check_panel(valuation.panel, parts.run.max_error_share)
        self.told(3)
        true = valuation.truth.by_token().float()
        batch = replace(gatherer.batch, token_scores={**gatherer.batch.token_scores, "truth": true})
        credits, took = credit_of(self.choices, batch)
        if not (valuation.truth.unit_ids >= 0).any():
            raise InputError(
                f"truth.units={getattr(self.truth, 'units', '')}: no answer has any; give truth.units=tokens, or a "
                "verifier that finds steps in these answers"
            )
        low, high = reward_range(self.panel)
        grading = Grading(tau=options.tau * ((high - low) or 1.0), passing=(low + high) / 2)
        how = Resampling(options.resamples, named_seed(parts.run.seed, "resamples") % 2**31, grading)
        classes = token_classes(batch, steps=options.steps, format=options.format or "", answer=options.answer or "")
        return Probing(
            probed,
            batch,
            credits,
            valuation,
            Measures(valuation.truth, classes, how),
            {choice.label: _cost(gatherer, choice, took[choice.label]) for choice in self.choices},
            self._reference(probed),
        )

    def measure(
        self, state: Probing
    ) -> tuple[Figures, GradientGram | None, list[list[float]] | None, dict[str, Tensor]]:
        """All figures; the Gram matrix, the cosines and the changes of log-probabilities where they are wanted."""
        figures = located(effective(state.credits), state.measures, state.batch, UNIFORM)
        corrected(figures, [choice.label for choice in self.choices if not choice.control])
        _merge(figures, state.costs)
        self.told(4)
        gram, cosines = None, None
        changes: dict[str, Tensor] = {}
        if self.options.geometry:
            gram = geometry(
                self.policy,
                state.probed,
                state.batch,
                state.credits,
                self.parts,
                state.reference,
                memory_gib=self.options.memory_gib,
            )
            found, cosines = figures_of_gram(gram, state.measures.resampling)
            _merge(figures, found)
        self.told(5)
        if self.options.update:
            found, changes = updates(
                self.policy, state.probed, state.batch, state.credits, self.parts, state.measures.classes
            )
            _merge(figures, found)
        self.told(6)
        return figures, gram, cosines, changes

    def noise(self, state: Probing) -> list[Any]:
        """What a worse step verifier does."""
        options = self.options
        tried = affected(self.choices, options.steps, options.noise)
        if not tried or not options.noise.levels:
            return []
        base = [choice for choice in self.choices if choice.label == UNIFORM and choice not in tried]

        def measure(draws: Sequence[Mapping[str, Tensor]]) -> Figures:
            advantages, measures, rows = stacked(draws, state.measures, state.batch)
            return located(advantages, measures, rows, UNIFORM, tests=False)

        samples = [
            as_sample(
                self.policy,
                state.probed.problems[r.group_id],
                r.prompt_ids,
                Generation(list(r.completion_ids), list(r.logprobs), r.truncated),
                located=True,
            )
            for r in state.probed.rollouts
        ]
        points = sweep(
            [*tried, *base],
            state.probed.rollouts,
            samples,
            state.batch,
            options.noise,
            measure,
            steps=options.steps,
            seed=named_seed(self.parts.run.seed, "faults") % 2**31,
        )
        self.told(7)
        return points

    def facts(self, state: Probing) -> dict[str, str]:
        """The head of the page."""
        rewards = [r.reward for r in state.probed.rollouts if r.reward is not None]
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        tokens = int(state.batch.completion_mask.sum())
        metrics = state.valuation.metrics
        facts = {
            "policy": f"{type(self.policy.model).__name__}, {parameters:,} parameters",
            "problems": f"{len(state.probed.problems)}",
            "answers": f"{len(state.probed.rollouts)} ({tokens:,} tokens)",
            "mean reward": f"{sum(rewards) / max(len(rewards), 1):.3f}",
            "true values": f"{state.valuation.truth.method}; {state.valuation.tokens:,} tokens",
        }
        if "truth/standard_error" in metrics:
            facts["standard error of a true advantage"] = f"{metrics['truth/standard_error']:.3f}"
        if state.valuation.bound is not None:
            bound = state.valuation.bound
            known = bound[~bound.isnan()]
            facts["error of a true advantage"] = f"certainly under {known.max():.4f}, {known.mean():.4f} in the mean"
        if state.reference is not None:
            which = "other" if self.options.reference_problems else "the same"
            number = len({r.group_id for r in state.reference.rollouts}) // 2
            facts["reference gradient"] = f"{len(state.reference.rollouts):,} answers to {number} {which} problems"
        facts["seconds"] = f"{time.perf_counter() - self.began:.1f}"
        return facts

    def cautions(self, state: Probing, gram: GradientGram | None) -> list[str]:
        """What a reader must know."""
        said = []
        if gram is not None and gram.reference is not None and reference_is_noise(gram):
            said.append(
                "The two halves of the reference gradient do not agree more than noise would: cosines with it and bias "
                "say nothing here. Raise probe.reference_problems or probe.reference_samples."
            )
        late = [choice.label for choice in self.choices if choice.parts.strategy.phase == "update"]
        if late:
            said.append(
                f"{', '.join(late)} changes with every optimiser step; here it is what the first step would see, where "
                "nothing has changed yet."
            )
        if not state.valuation.truth.advantage.nan_to_num().any():
            said.append(
                "All true advantages are zero: every answer of a problem has the same reward, whatever it says."
            )
        gap = self._gap(state) if self.options.rollouts is not None else 0.0
        if gap > MOST_GAP:
            said.append(
                f"The log-probabilities of the saved answers differ from those of this policy by up to {gap:.2f}: "
                "another policy sampled them, so that true values and gradients are of answers that it would not write."
            )
        return said

    def _rollouts(self) -> Probed:
        options, parts = self.options, self.parts
        if options.rollouts is not None:
            return read_saved(
                options.rollouts, self.policy, self.panel, parts.rollout, seed=parts.run.seed, limit=options.problems
            )
        return sample(
            self.policy,
            self.task,
            self.panel,
            parts.rollout,
            problems=options.problems,
            seed=parts.run.seed,
            max_error_share=parts.run.max_error_share,
        )

    def _reference(self, probed: Probed) -> Probed | None:
        """Further answers, to each problem in two groups: every second group is a half of the whole."""
        options, parts = self.options, self.parts
        if not options.geometry or not options.reference_samples:
            return None
        rollout = _plain(parts.rollout, options.reference_samples // 2)
        return sample(
            self.policy,
            self.task,
            self.panel.rewarding(),
            rollout,
            problems=[problem for problem in self._reference_problems(probed) for _ in range(2)],
            seed=parts.run.seed,
            max_error_share=parts.run.max_error_share,
            step=REFERENCE,
        )

    def _reference_problems(self, probed: Probed) -> Sequence[Problem]:
        """Other ones, or those of the rollouts."""
        number = self.options.reference_problems
        return self.task.batch(REFERENCE, number, self.parts.run.seed) if number else probed.problems

    @torch.no_grad()
    def _gap(self, state: Probing) -> float:
        from ...grpo.forward import score_in_parts

        rollouts, old = state.probed.rollouts, state.batch.old_logprobs
        assert old is not None
        scored = score_in_parts(
            self.policy,
            [r.prompt_ids for r in rollouts],
            [r.completion_ids for r in rollouts],
            temperature=self.parts.rollout.temperature,
            rows=self.parts.optim.micro_batch_rows,
        )
        return float((scored.logprobs - old)[state.batch.completion_mask].abs().max())


def _cost(gatherer: Gatherer, choice: Choice, milliseconds: float) -> dict[str, Figure]:
    cost = gatherer.cost_of(choice)
    return {
        "cost/rollouts": Figure(cost.rollouts),
        "cost/verifier_calls": Figure(cost.verifier_calls),
        "cost/milliseconds": Figure(cost.milliseconds + milliseconds),
    }


def _merge(figures: Figures, more: Mapping[str, Mapping[str, Figure]]) -> None:
    for name, found in more.items():
        figures.setdefault(name, {}).update(found)


def _strategy(choice: Choice, figures: Mapping[str, Figure]) -> ProbedStrategy:
    told = getattr(choice.parts.strategy, "extra_information", "")
    return ProbedStrategy(choice.label, "control" if choice.control else "strategy", figures, told)


def _drawn(state: Probing, count: int) -> list[DrawnRollout]:
    """A varied choice: of each problem the answer with the largest true advantage in size, wrong ones first."""
    rollouts, true = state.probed.rollouts, state.valuation.truth.by_token()
    size = true.abs().max(dim=1).values
    passing = state.measures.resampling.grading.passing
    rewards = [passing if rollout.reward is None else rollout.reward for rollout in rollouts]
    order = sorted(range(len(rollouts)), key=lambda row: (rewards[row] >= passing, -float(size[row])))
    rows: list[int] = []
    for row in order:
        if len(rows) < count and rollouts[row].group_id not in {rollouts[one].group_id for one in rows}:
            rows.append(row)
    return [_draw(state, row) for row in rows]


def _plain(config: RolloutConfig, group_size: int) -> RolloutConfig:
    """The same way of sampling, in plain groups of another size."""
    options = {field.name: getattr(config, field.name) for field in fields(RolloutConfig)}
    return RolloutConfig(**{**options, "group_size": group_size})


def _draw(state: Probing, row: int) -> DrawnRollout:
    rollout = state.probed.rollouts[row]
    length, problem = len(rollout.completion_ids), state.probed.problems[rollout.group_id]
    truth = state.valuation.truth
    return DrawnRollout(
        problem.id,
        problem.prompt,
        rollout.text,
        problem.reference,
        rollout.reward,
        list(rollout.completion_ids),
        [(start, stop) for start, stop in rollout.offsets],
        state.batch.completion_mask[row, :length].tolist(),
        truth.by_token()[row, :length].tolist(),
        truth.wrong[row, :length].tolist(),
        {name: given[row, :length].tolist() for name, given in effective(state.credits).items()},
    )
