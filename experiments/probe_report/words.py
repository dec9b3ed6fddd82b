"""The sentences of the page. Nothing is called closer to the truth whose interval does not show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ..probe.record import Figure, Probe, ProbedStrategy
from ..report.notes import listed
from .board import NOTHING, written
from .noise import Meeting, Sweep, meeting

__all__ = [
    "Verdict",
    "alike",
    "cautions",
    "crossings",
    "headline",
    "how_compared",
    "level_text",
    "meetings",
    "shuffled_finding",
    "told",
    "verdict",
]

Verdict = Literal["closer", "further", "no difference shown"]
MEASURE, DIFFERENCE, P_VALUE = "quality/pearson", "quality/pearson_minus_uniform", "quality/pearson_p"
LEVEL = 0.05
MOST_NAMED = 4


def verdict(strategy: ProbedStrategy, probe: Probe) -> Verdict | None:
    """Whether a strategy's credit is shown to be closer to the truth than uniform's; None for controls, or no numbers.

    By the interval of the paired difference where the probe has one, and its p where that is known, corrected for all
    strategies; else the two intervals must lie apart, which is the stricter rule.
    """
    mine, uniform = strategy.figures.get(MEASURE, NOTHING), _uniform(probe)
    if strategy.kind == "control" or math.isnan(mine.value) or math.isnan(uniform.value):
        return None
    paired = strategy.figures.get(DIFFERENCE)
    low, high = (paired.low, paired.high) if paired else (mine.low - uniform.high, mine.high - uniform.low)
    if not strategy.figures.get(P_VALUE, Figure(0.0)).value < LEVEL:
        return "no difference shown"
    return "closer" if low > 0 else "further" if high < 0 else "no difference shown"


def headline(probe: Probe) -> list[str]:
    """What is shown about the strategies: the sentence for the head of the page, and what else there is to say."""
    rules = [s for s in probe.strategies if s.kind == "strategy"]
    by_verdict: dict[Verdict | None, list[str]] = {}
    for s in rules:
        by_verdict.setdefault(verdict(s, probe), []).append(s.name)
    closer, further = by_verdict.get("closer", []), by_verdict.get("further", [])
    level = by_verdict.get("no difference shown", [])
    if not closer and not further:
        if not level:
            return [f"{_counted(rules)} on the same rollouts, not compared by their truth."]
        which = level[0] if len(level) == 1 else f"any of {len(level)} strategies"
        return [f"No difference from uniform is shown for {which}."]
    said = []
    for names, phrase in ((closer, "closer to the truth than"), (further, "further from the truth than")):
        if names:
            who = listed(names) if len(names) <= MOST_NAMED else f"{len(names)} of {len(rules)} strategies"
            said.append(f"The credit of {who} is shown to be {phrase} uniform’s.")
    if level:
        which = listed(level) if len(level) <= MOST_NAMED else f"{len(level)} strategies"
        said.append(f"For {which} no difference is shown.")
    return said


def how_compared(probe: Probe) -> str:
    """What a verdict rests on."""
    paired = any(DIFFERENCE in s.figures for s in probe.strategies if s.kind == "strategy")
    rule = (
        "the 95% interval of the difference from uniform, paired by group, must leave out zero"
        if paired
        else "its 95% interval and that of uniform must lie apart"
    )
    if any(P_VALUE in s.figures for s in probe.strategies):
        return f"For “closer” or “further” {rule}, and p, corrected for the number of strategies (Holm), be under .05."
    return f"For “closer” or “further” {rule}; intervals are not corrected for the number of strategies."


def cautions(probe: Probe) -> list[str]:
    """What a reader must know, the probe's own words first."""
    oracle = next((s.figures.get(MEASURE, NOTHING).value for s in probe.strategies if s.name == "oracle"), math.nan)
    said = list(probe.cautions)
    if oracle < 0.9995:
        said.append(
            f"The oracle, which is given the true advantages, correlates with them by {written(oracle, 3)} and not by "
            "1: do not trust these figures before the reason is found."
        )
    return said


def shuffled_finding(probe: Probe) -> str:
    """Which strategies are not shown to be closer to the truth than the shuffled control; nothing without one."""
    control = next((s.figures.get(MEASURE, NOTHING) for s in probe.strategies if s.name == "shuffled"), NOTHING)
    known = [
        s for s in probe.strategies if s.kind == "strategy" and not math.isnan(s.figures.get(MEASURE, NOTHING).value)
    ]
    if math.isnan(control.value) or not known:
        return ""
    doubted = [s.name for s in known if not s.figures[MEASURE].low > control.high]
    if not doubted:
        return "All strategies are shown to be closer to the truth than shuffled, the same amounts in random places."
    be = "is" if len(doubted) == 1 else "are"
    return (
        f"{listed(doubted)} {be} not shown to be closer to the truth than shuffled, the same amounts in random places: "
        "where the credit lies has not been shown to matter there."
    )


def told(probe: Probe) -> list[tuple[str, list[str]]]:
    """What strategies are told beyond the reward -> which; those told nothing more come last."""
    groups: dict[str, list[str]] = {}
    for s in probe.strategies:
        groups.setdefault(s.told, []).append(s.name)
    alone = groups.pop("", [])
    return [*groups.items(), *([("the reward alone", alone)] if alone else [])]


def alike(probe: Probe) -> str:
    """The nearest and the furthest pair of gradients, controls left out."""
    if probe.cosines is None:
        return ""
    names = [s.name if s.kind == "strategy" else "" for s in probe.strategies]
    pairs = [
        (probe.cosines[i][j], names[i], names[j])
        for i in range(len(names))
        for j in range(i)
        if names[i] and names[j] and not math.isnan(probe.cosines[i][j])
    ]
    if len(pairs) < 2:
        return ""
    (most, a, b), (least, c, d) = max(pairs), min(pairs)
    return (
        f"Of the strategies, {b} and {a} pull most alike (cosine {written(most, 2)}), {d} and {c} least so "
        f"({written(least, 2)})."
    )


def meetings(sweep: Sweep, probe: Probe) -> dict[str, Meeting]:
    """For each strategy of a sweep, controls left out, where it comes down to uniform."""
    rules = {s.name for s in probe.strategies if s.kind == "strategy"}
    found = {n: meeting(sweep.levels, c, sweep.reference) for n, c in sweep.curves.items() if n in rules}
    return {name: met for name, met in found.items() if met is not None}


def crossings(sweep: Sweep, found: Mapping[str, Meeting]) -> str:
    """In words, the level at which located credit stops beating uniform; nothing where there is none to compare."""
    met = sorted((m.level, name) for name, m in found.items() if math.isfinite(m.level))
    never = [name for name, m in found.items() if m.level == math.inf]
    below = [name for name, m in found.items() if m.level == -math.inf]
    said = []
    if met:
        places = listed([f"{level_text(level)} ({name})" for level, name in met])
        said.append(f"Comes down to uniform at {sweep.kind.at.format(places)}.")
    if never:
        top = sweep.kind.at.format(level_text(sweep.levels[-1]))
        said.append(f"Never within the range tried, up to {top}: {listed(never)}.")
    if below:
        said.append(f"Not above uniform to begin with: {listed(below)}.")
    return " ".join(said)


def level_text(level: float) -> str:
    """A level with as many digits as it is known to.

    >>> level_text(0.3125), level_text(2.0), level_text(-1.0)
    ('0.31', '2', '−1')
    """
    return f"{level:.2g}".replace("-", "−")


def _uniform(probe: Probe) -> Figure:
    return next((s.figures.get(MEASURE, NOTHING) for s in probe.strategies if s.name == "uniform"), NOTHING)


def _counted(strategies: Sequence[ProbedStrategy]) -> str:
    return "1 strategy" if len(strategies) == 1 else f"{len(strategies)} strategies"
