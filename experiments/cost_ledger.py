"""What one training step costs under a credit strategy: an item for each kind of evidence that it asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..verifiers import InputError
from .cost_model import Memory
from .cost_options import Plan
from .cost_passes import Item, Passes

if TYPE_CHECKING:  # it loads torch
    from ..credit import CreditStrategy

__all__ = ["PHASES", "Estimate", "estimate"]

PHASES = ("sample", "verify", "reference", "evidence", "update", "evaluate")
_CUTPOINTS = re.compile(r"cutpoints\([^,]+,(\d+)\)")


@dataclass(frozen=True)
class Estimate:
    """What a strategy costs.

    Args:
        label: its name.
        requires: the signals that decide it.
        items: of a training step.
        memory: of one device.
        fits: in the device's memory, a tenth of it left free.
        steps, gpus: of the run.
        assumed: what had to be assumed for this strategy alone.
    """

    label: str
    requires: Sequence[str]
    items: Sequence[Item]
    memory: Memory
    fits: bool
    steps: int
    gpus: int
    assumed: Sequence[str] = ()

    def total(self, field: str, *phases: str) -> float:
        """Sum of one field over the items, of all phases or of some."""
        return math.fsum(getattr(item, field) for item in self.items if not phases or item.phase in phases)

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return self.total("seconds") * self.steps * self.gpus / 3600


def estimate(label: str, strategy: CreditStrategy, plan: Plan) -> Estimate:
    """The cost of a step, from the signals that ``strategy`` requires.

    Args:
        label: for the table.
        strategy: any credit strategy, a user's own too.
        plan: everything else.

    Raises:
        InputError: a signal that nothing in the plan provides.
    """
    requires = plan.evidence.needed(strategy.requires)
    passes = _passes(plan, requires)
    # Mass and sign follow the centred reward, which is zero where all are equal; who claims less may train such groups.
    idle = "reward" in strategy.requires and strategy.conserves in ("mass", "sign") and plan.update.kl_coef == 0
    live = 1 - plan.answers.dead_groups if idle else 1.0
    items = [
        *_sample(passes, requires),
        *_verify(passes, requires),
        *_reference(passes, requires),
        *_gather(passes, requires, each_update=strategy.phase == "update"),
        *_learn(passes, live),
        *_evaluate(passes),
    ]
    memory = passes.memory()
    room = passes.room(plan.answers.prompt_tokens + plan.longest)
    return Estimate(
        label=label,
        requires=sorted(requires),
        items=items,
        memory=memory,
        fits=memory.peak <= 0.9 * plan.device.memory and room >= 1,
        steps=plan.run.steps,
        gpus=plan.gpus,
        assumed=_assumed(plan, requires),
    )


def _judges(plan: Plan, requires: frozenset[str]) -> list[str]:
    """Names of the verifiers that the strategy and the reward read."""
    read = {signal.partition(":")[2] for signal in requires if signal.startswith(("spans:", "score:"))}
    if "reward" in requires or any(signal.startswith("prefix_values:") for signal in requires):
        read |= set(plan.reward)
    return sorted(read)


def _wants_reference(plan: Plan, requires: frozenset[str]) -> bool:
    return plan.update.kl_coef > 0 or "ref_logprobs" in requires


def _scorers(plan: Plan, requires: frozenset[str]) -> dict[str, object]:
    """The token scorers that are asked, by name."""
    names = sorted(signal.partition(":")[2] for signal in requires if signal.startswith("token_scores:"))
    for name in names:
        if name not in plan.evidence.scorers:
            raise InputError(f"credit needs token_scores:{name}; add +scorer@scorers.{name}=... (see conf/scorer)")
    return {name: plan.evidence.scorers[name] for name in names}


def _passes(plan: Plan, requires: frozenset[str]) -> Passes:
    """With the models that are held beside the policy; judges load theirs in each process."""
    from ..grpo.implicit_prm import ImplicitPrm
    from ..grpo.reward_model import RewardModelScorer

    whole = sum(plan.judges[name].params or 0.0 for name in _judges(plan, requires) if name in plan.judges)
    scorers = _scorers(plan, requires).values()
    whole += plan.policy.params * sum(isinstance(scorer, RewardModelScorer) for scorer in scorers)
    reference = _wants_reference(plan, requires) or (plan.run.reference_kl and plan.run.eval_every)
    return Passes(
        plan,
        whole=whole,
        spread=plan.policy.params if reference else 0.0,
        also_trained=plan.policy.params * sum(isinstance(scorer, ImplicitPrm) for scorer in scorers),
    )


def _assumed(plan: Plan, requires: frozenset[str]) -> list[str]:
    judges = [
        f"verifiers.{name} is not described: {plan.other.seconds:g} s an answer"
        for name in _judges(plan, requires)
        if name not in plan.judges
    ]
    scorers = [
        f"scorers.{name} is not one of ours: one forward; +passes.{name}=2 says otherwise"
        for name, scorer in _scorers(plan, requires).items()
        if _scorer_passes(plan, name, scorer) is None
    ]
    return judges + scorers


# --- the phases of a step --------------------------------------------------------------------------------------------


def _sample(passes: Passes, requires: frozenset[str]) -> Iterator[Item]:
    plan, answers = passes.plan, passes.plan.answers
    prompts = float(plan.rollouts.prompts_per_step)
    if "tree" not in requires:
        yield passes.sample(
            "answers",
            "sample",
            rows=plan.rows,
            tokens=answers.tokens,
            longest=plan.longest,
            before=answers.prompt_tokens,
            prefixes=prompts,
        )
        return
    widths = plan.rollouts.widths
    segment = plan.rollouts.segment_tokens or answers.tokens / len(widths)
    for depth, width in enumerate(widths):
        last = depth + 1 == len(widths)
        left = max(answers.tokens - depth * segment, 0.0)
        tokens = left if last else min(segment, left)
        yield passes.sample(
            f"segments of depth {depth + 1}",
            "sample",
            rows=prompts * width,
            tokens=tokens,
            longest=max(plan.longest - depth * segment, tokens) if last else tokens,
            before=answers.prompt_tokens + depth * segment,
            prefixes=prompts,
        )
        prompts *= width


def _verify(passes: Passes, requires: frozenset[str]) -> Iterator[Item]:
    for name in _judges(passes.plan, requires):
        yield from _judge(passes, name, passes.plan.rows, "verify", "answers")


def _judge(passes: Passes, name: str, texts: float, phase: str, what: str) -> Iterator[Item]:
    """``texts`` answers judged by the verifier ``name``; each process judges its own on one core."""
    plan = passes.plan
    judge = plan.judges.get(name, plan.other)
    seconds = judge.seconds * texts
    yield Item(f"verifier {name}, {what}", phase, judging=seconds, seconds=seconds / plan.gpus)
    if judge.params:
        tokens = texts * (plan.answers.prompt_tokens + plan.answers.tokens)
        yield passes.forward(f"reward model {name}, {what}", phase, plan.sized(judge.params), tokens=tokens, rows=texts)


def _reference(passes: Passes, requires: frozenset[str]) -> Iterator[Item]:
    plan, run = passes.plan, passes.plan.run
    at_evaluation = 1 / run.eval_every if run.reference_kl and run.eval_every else 0.0
    times = 1.0 if _wants_reference(plan, requires) else at_evaluation
    if times:
        yield passes.forward("reference", "reference", plan.policy, tokens=plan.texts, rows=plan.rows, times=times)


def _gather(passes: Passes, requires: frozenset[str], *, each_update: bool) -> Iterator[Item]:
    plan = passes.plan
    if requires & {"entropy", "sum_pi_squared"}:
        yield passes.forward("distributions", "evidence", plan.policy, tokens=plan.texts, rows=plan.rows)
    for signal in sorted(requires):
        kind, _, name = signal.partition(":")
        if kind == "prefix_values":
            yield from _continuations(passes, name)
    for name, scorer in _scorers(plan, requires).items():
        yield from _scores(passes, name, scorer)
    if each_update:
        times = plan.update.epochs * plan.update.minibatches
        what = "log-probabilities at each update"
        yield passes.forward(what, "evidence", plan.policy, tokens=plan.texts, rows=plan.rows, times=times)


def _continuations(passes: Passes, name: str) -> Iterator[Item]:
    """K continuations of each state: the prompts, which all answers of a group share, and the starts of segments."""
    plan, answers, valuer = passes.plan, passes.plan.answers, passes.plan.evidence.prefix_valuer
    if valuer is None:
        raise InputError("credit needs prefix values; add prefix_valuer=rollouts")
    cut = _CUTPOINTS.fullmatch(name)
    # The first step begins with the answer, where the prompt's own state lies; the first cutpoint does not.
    inside = answers.tokens * answers.uncertain / int(cut[1]) if cut else max(answers.steps - 1, 0)
    inside = inside if valuer.max_states is None else min(inside, valuer.max_states)
    for what, states, share in (
        ("prompts", plan.rollouts.prompts_per_step, 1.0),
        ("states", plan.rows * inside, answers.continuation),
    ):
        if not states:
            continue
        yield passes.sample(
            f"continuations of {what}",
            "evidence",
            rows=states * valuer.num_samples,
            tokens=share * answers.tokens,
            longest=share * plan.longest,
            before=answers.prompt_tokens + (answers.tokens / 2 if what == "states" else 0.0),
            prefixes=states,
            at_most=valuer.rows,
        )
        for judge in plan.reward:
            yield from _judge(passes, judge, states * valuer.num_samples, "evidence", f"continuations of {what}")


def _scores(passes: Passes, name: str, scorer: object) -> Iterator[Item]:
    from ..grpo.implicit_prm import ImplicitPrm

    plan, size = passes.plan, passes.plan.policy
    times = _scorer_passes(plan, name, scorer)
    tokens = plan.rows * (plan.answers.prompt_tokens + plan.answers.tokens)  # scorers read each answer by itself
    if isinstance(scorer, ImplicitPrm):
        tokens = plan.texts
        for _ in range(scorer.updates):
            yield passes.train(f"{name} learns", "evidence", size, tokens=tokens, rows=plan.rows, checkpointing=False)
    if times != 0:
        times = 1.0 if times is None else times
        yield passes.forward(f"scorer {name}", "evidence", size, tokens=tokens, rows=plan.rows, times=times)


def _scorer_passes(plan: Plan, name: str, scorer: object) -> float | None:
    """Forwards over every answer, or what is as long; None of a scorer that is not known."""
    from ..grpo.implicit_prm import ImplicitPrm
    from ..grpo.influence import CounterfactualSpans, GradientInfluence, PerturbationInfluence
    from ..grpo.reward_model import RewardModelScorer
    from ..grpo.scorers import LastTokenAttention, LogRatio

    if name in plan.passes:
        return plan.passes[name]
    known = {
        LogRatio: 0.0,
        ImplicitPrm: 1.0,
        RewardModelScorer: 1.0,
        LastTokenAttention: 1.0,
        GradientInfluence: 3.0,  # two forwards, and a backward to the embeddings alone
        CounterfactualSpans: 1 + plan.answers.steps,  # the whole answer, and it without each step
        PerturbationInfluence: 1 + plan.answers.tokens,
    }
    return known.get(type(scorer))


def _learn(passes: Passes, live: float) -> Iterator[Item]:
    plan = passes.plan
    yield passes.train(
        "policy",
        "update",
        plan.policy,
        tokens=plan.update.epochs * live * plan.texts,
        rows=plan.update.epochs * live * plan.rows,
        checkpointing=plan.update.gradient_checkpointing,
    )


def _evaluate(passes: Passes) -> Iterator[Item]:
    plan, answers, run = passes.plan, passes.plan.answers, passes.plan.run
    if run.eval_every and run.eval_answers:
        yield passes.sample(
            "evaluation",
            "evaluate",
            rows=run.eval_answers,
            tokens=answers.tokens,
            longest=plan.longest,
            before=answers.prompt_tokens,
            prefixes=run.eval_answers,
            times=1 / run.eval_every,
        )
