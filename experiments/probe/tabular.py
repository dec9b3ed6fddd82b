"""Strategies on a tabular task, where everything that they ought to find is known exactly.

Every random policy is a problem of its own: a batch of its answers, one figure for each strategy. Means and intervals
are over policies. All strategies see the same policies and answers, so that differences are paired.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from ...credit import CreditStrategy
from ...credit.quality import Grading, quality
from ...credit.strategy import assign_credit
from ...credit.truth import solve
from ...grpo.seeds import named_seed
from ..report.statistics import Comparison, bootstrap_interval, compare_paired, correct, mean
from ..tasks.tabular_evidence import PERFECT, Evidence
from ..tasks.tabular_gradient import gradient_figures, group_gradients
from ..tasks.tabular_learning import learn
from ..tasks.tabular_sampling import TabularSample, random_logits, refuse_missing, sample_batch, valued_states
from ..tasks.tabular_tables import TabularTask, TokenTables
from .record import DrawnRollout, Figure, NoisePoint, ProbedStrategy

__all__ = ["CONTROLS", "draw_rollouts", "probe_policies", "probe_tabular", "sweep_noise"]

COMPARED = ("quality/pearson", "gradient/cosine")
CONTROLS = ("oracle", "shuffled", "inverted", "uniform")


def probe_tabular(
    task: TabularTask,
    strategies: Mapping[str, CreditStrategy],
    *,
    policies: int = 60,
    groups: int = 16,
    group_size: int = 8,
    seed: int = 0,
    evidence: Evidence = PERFECT,
    tau: float = 0.05,
    controls: Collection[str] = CONTROLS,
    baseline: str = "uniform",
) -> list[ProbedStrategy]:
    """Figures of every strategy: means over random policies, with bootstrap intervals over them.

    A figure that is not defined for a policy (a correlation with credit that is flat) is left out of its mean.

    Args:
        task: a tabular task.
        strategies: by name.
        policies: random policies, each of a success between .1 and .9.
        groups, group_size: N groups of G answers from each policy. Gradients are of one group.
        seed: of everything random.
        evidence: how good the verifiers and values are.
        tau: see :class:`apportion.credit.quality.Grading`.
        controls: names of the strategies that are controls.
        baseline: name of the strategy that the others are compared with, policy by policy.
    """
    found = probe_policies(
        task,
        strategies,
        policies=policies,
        groups=groups,
        group_size=group_size,
        seed=seed,
        evidence=evidence,
        tau=tau,
    )
    against = _differences(found, baseline, [name for name in strategies if name not in controls])
    return [
        ProbedStrategy(
            name,
            "control" if name in controls else "strategy",
            {**_summary(found[name]), **against.get(name, {})},
            told=getattr(strategy, "extra_information", ""),
        )
        for name, strategy in strategies.items()
    ]


def _differences(
    found: Mapping[str, Sequence[Mapping[str, float]]], baseline: str, family: Sequence[str]
) -> dict[str, dict[str, Figure]]:
    """Differences in figures from the baseline, paired by policy, and Holm-corrected p of that in correlation."""
    if baseline not in found:
        return {}
    compared = {
        name: {key: _compare(found[name], found[baseline], key) for key in COMPARED}
        for name in found
        if name != baseline
    }
    tested = correct({name: compared[name][COMPARED[0]] for name in family if name in compared})
    differences = {
        name: {f"{key}_minus_uniform": Figure(one.mean, *one.interval) for key, one in own.items()}
        for name, own in compared.items()
    }
    for name, one in tested.items():
        differences[name][f"{COMPARED[0]}_p"] = Figure(one.p_adjusted)
    return differences


def _compare(own: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], key: str) -> Comparison:
    return compare_paired(*(dict(enumerate(policy[key] for policy in policies)) for policies in (own, other)))


def probe_policies(
    task: TabularTask,
    strategies: Mapping[str, CreditStrategy],
    *,
    policies: int,
    groups: int,
    group_size: int,
    seed: int,
    evidence: Evidence = PERFECT,
    tau: float = 0.05,
) -> dict[str, list[dict[str, float]]]:
    """By strategy, one set of figures for each policy, in the same order for all; see :func:`probe_tabular`."""
    for name, strategy in strategies.items():
        refuse_missing(strategy, name)
    tables, states = task.tables, valued_states(strategies.values())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in strategies}
    for index in range(policies):
        exact = solve(tables.process, tables.process.policy(random_logits(tables, seed, index)))
        sample = sample_batch(
            tables,
            exact,
            groups=groups,
            group_size=group_size,
            seed=seed,
            names=(index,),
            evidence=evidence,
            states=states,
        )
        for name, strategy in strategies.items():
            found[name].append(_figures(strategy, sample, tau))
    return found


def sweep_noise(
    task: TabularTask,
    strategies: Mapping[str, CreditStrategy],
    levels: Mapping[str, Sequence[float]],
    *,
    policies: int = 20,
    groups: int = 16,
    group_size: int = 8,
    seed: int = 0,
    tau: float = 0.05,
    runs: int = 5,
    steps: int = 60,
    lr: float = 0.1,
    evidence: Evidence = PERFECT,
) -> list[NoisePoint]:
    """What worse evidence does to the figures of strategies, and to what they learn.

    The policies and answers are the same at every level, and a step that is misjudged stays so at a higher one.

    Args:
        task, strategies, policies, groups, group_size, seed, tau: see :func:`probe_tabular`.
        levels: by the kind of noise (see :meth:`Evidence.worse`), how much of it.
        runs: seeds for which a policy is trained; ``learning/gain`` is the mean success gained. 0 trains none.
        steps, lr: of each run, see :func:`.learn`; each step is on one group.
        evidence: what the noise is added to.
    """
    known: dict[tuple[str, Evidence], Mapping[str, Figure]] = {}

    def measure(given: Evidence, names: Collection[str]) -> None:
        chosen = {name: strategies[name] for name in names}
        probed = probe_tabular(
            task, chosen, policies=policies, groups=groups, group_size=group_size, seed=seed, evidence=given, tau=tau
        )
        for found in probed:
            gains = [_gain(task, chosen[found.name], steps, lr, group_size, seed, run, given) for run in range(runs)]
            learned = {"learning/gain": _figure(gains)} if gains else {}
            known[found.name, given] = {**found.figures, **learned}

    points = []
    for kind, amounts in levels.items():
        for level in amounts:
            worse = evidence.worse(kind, level)
            # A strategy that does not read what got worse is not measured again.
            given = {n: worse if evidence.spoils(kind, s.requires) else evidence for n, s in strategies.items()}
            for one in {worse, evidence}:
                if fresh := [name for name, own in given.items() if own == one and (name, one) not in known]:
                    measure(one, fresh)
            points += [NoisePoint(kind, level, name, known[name, own]) for name, own in given.items()]
    return points


def _gain(
    task: TabularTask,
    strategy: CreditStrategy,
    steps: int,
    lr: float,
    group_size: int,
    seed: int,
    run: int,
    evidence: Evidence,
) -> float:
    """Success gained in one training run."""
    start = named_seed(seed, "run", run)
    curve = learn(task, strategy, steps=steps, lr=lr, group_size=group_size, seed=start, evidence=evidence)
    return curve[-1] - curve[0]


def draw_rollouts(
    task: TabularTask,
    strategies: Mapping[str, CreditStrategy],
    *,
    count: int = 4,
    group_size: int = 8,
    seed: int = 0,
    evidence: Evidence = PERFECT,
) -> list[DrawnRollout]:
    """Answers of the first policy of :func:`probe_tabular` as text, with every strategy's credit; failed ones first.

    Args:
        task, strategies, group_size, seed, evidence: see :func:`probe_tabular`.
        count: how many of them at most.
    """
    tables, states = task.tables, valued_states(strategies.values())
    exact = solve(tables.process, tables.process.policy(random_logits(tables, seed, 0)))
    sample = sample_batch(
        tables, exact, groups=1, group_size=group_size, seed=seed, names=(0,), evidence=evidence, states=states
    )
    credit = {name: assign_credit(strategy, sample.batch).advantages for name, strategy in strategies.items()}
    return [
        _drawn(tables, sample, row, {name: given[row].tolist() for name, given in credit.items()})
        for row in sample.answers.reward.argsort(stable=True).tolist()[:count]
    ]


def _drawn(tables: TokenTables, sample: TabularSample, row: int, credit: Mapping[str, Sequence[float]]) -> DrawnRollout:
    answers, length = sample.answers, int(sample.answers.mask[row].sum())
    tokens = answers.tokens[row, :length].tolist()
    words = [tables.words[state][token] for state, token in zip(answers.states[row, :length].tolist(), tokens)]
    ends = list(accumulate(len(word) + 1 for word in words))
    return DrawnRollout(
        problem_id=f"policy 0, answer {row}",
        prompt="",
        text=" ".join(words),
        reference=None,
        reward=float(answers.reward[row]),
        ids=tokens,
        offsets=[(end - len(word) - 1, end - 1) for word, end in zip(words, ends)],
        trained=[True] * length,
        truth=sample.truth.advantage[row, :length].tolist(),
        wrong=sample.truth.wrong[row, :length].tolist(),
        advantages={name: given[:length] for name, given in credit.items()},
    )


def _figures(strategy: CreditStrategy, sample: TabularSample, tau: float) -> dict[str, float]:
    """All figures of one strategy on the answers of one policy."""
    began = time.perf_counter()
    credit = assign_credit(strategy, sample.batch)
    milliseconds = 1000 * (time.perf_counter() - began)
    given = credit.advantages if credit.loss_weight is None else credit.advantages * credit.loss_weight
    return {
        **quality(given, sample.truth, sample.batch, grading=Grading(tau=tau)),
        **gradient_figures(group_gradients(sample, credit), sample.exact.gradient),
        **_cost(strategy, sample),
        "cost/milliseconds": milliseconds,
    }


def _cost(strategy: CreditStrategy, sample: TabularSample) -> dict[str, float]:
    """What an answer costs beyond itself: continuations sampled from inside it, and verifiers that judge it."""
    signals = [signal.partition(":") for signal in strategy.requires]
    valued = {name for kind, _, name in signals if kind == "prefix_values"}
    judges = {name for kind, _, name in signals if kind in ("score", "spans")}
    judges |= {"answer"} if "reward" in strategy.requires else set()
    rollouts = sum(int(sample.batch.prefix_values[name].count.sum()) for name in valued)
    return {"cost/rollouts": rollouts / len(sample.batch.reward), "cost/verifier_calls": float(len(judges))}


def _summary(policies: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    keys = policies[0] if policies else ()
    return {key: _figure([figures[key] for figures in policies]) for key in keys}


def _figure(values: Sequence[float]) -> Figure:
    """Mean of the known values with its bootstrap interval."""
    known = [value for value in values if not math.isnan(value)]
    return Figure(mean(known), *bootstrap_interval(known))
