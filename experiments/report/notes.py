"""What the numbers allow one to say, in plain words, and what must be said beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .load import Ablation
from .statistics import LEVEL, compare_paired, detectable_effect, smallest_sign_flip_p
from .summary import StrategySummary, Summary

__all__ = ["Unfinished", "ceilings", "headline", "interval_sentence", "power_sentence", "remarks", "unfinished"]

UNEQUAL = 0.05
_STATES = {
    "failed": "failed",
    "missing": "not started",
    "running": "still running, or killed",
    "interrupted": "interrupted",
    "finished": "finished without an evaluation",
}


class Unfinished(NamedTuple):
    """Runs of one strategy that do not count, for one reason."""

    strategy: str
    setting: str
    seeds: tuple[int, ...]
    state: str
    progress: str
    error: str


def headline(summary: Summary) -> str:
    """The verdict in one or two sentences; measured by the area under the curve."""
    base, others = summary.baseline, summary.others
    if base is None:
        return f"No comparison: the baseline {summary.ablation.baseline} is not among the strategies."
    if not others:
        return f"Nothing to compare: {base.name} is the only strategy."
    if not any(s.verdict for s in others):
        return f"No comparison yet: no seed is finished for both {base.name} and another strategy."
    if all(len(s.against_baseline.seeds) < 2 for s in others if s.against_baseline):
        return f"No comparison: one seed cannot show a difference from {base.name}."
    top = ceilings(summary)
    rules, parts = [s for s in others if s.name not in top], []
    for verdict, phrase in (("better", "better than"), ("worse", "worse than")):
        names = [s.name for s in rules if s.verdict == verdict]
        if names:
            parts.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {phrase} {base.name}.")
    undecided = [s.name for s in rules if s.verdict == "no difference shown"]
    if undecided and not parts:
        which = "any strategy" if len(undecided) > 1 else undecided[0]
        return f"No difference from {base.name} is shown for {which}."
    if undecided:
        parts.append(f"For {listed(undecided)} no difference is shown.")
    if top:
        parts.append(f"{listed(top)} {'is' if len(top) == 1 else 'are'} told the truth itself: a ceiling, not a rule.")
    return " ".join(parts)


def interval_sentence(ablation: Ablation) -> str:
    """What the intervals cover: what differs between the seeds of one strategy, as the configurations say."""
    differing = differing_settings(ablation)
    text = "Intervals are 95% bootstrap intervals over seeds. They cover the draw of prompts and the sampling"
    warm = [key for key in differing if any(word in key for word in ("warm", "policy", "init"))]
    if warm:
        return f"{text}, and the starting weights, since the seeds also differ in {listed(warm)}."
    return f"{text}, all from one warm start; another warm start could give other numbers."


def differing_settings(ablation: Ablation) -> list[str]:
    """Dotted keys of the configuration in which the seeds of one strategy differ, but for the seed and paths."""
    for strategy in (ablation.baseline, *ablation.strategies):
        flat = [dict(_flat(config)) for cell in ablation.of(strategy) if (config := cell.config())]
        if len(flat) > 1:
            keys = sorted(set().union(*flat))
            told = [key for key in keys if len({repr(config.get(key)) for config in flat}) > 1]
            return [key for key in told if key != "seed" and not key.startswith(("run.", "hydra."))]
    return []


def power_sentence(summary: Summary) -> str:
    """The difference that so many seeds can find, in standard deviations and, where the spread is known, in AUC."""
    sizes = Counter(len(s.against_baseline.seeds) for s in summary.others if s.against_baseline)
    n = max(sizes, key=lambda size: (sizes[size], size), default=0)
    if n < 2:
        return f"With {n} paired {'seed' if n == 1 else 'seeds'} no interval and no test exists: run two seeds or more."
    known = [
        s.against_baseline.detectable
        for s in summary.others
        if s.against_baseline and not math.isnan(s.against_baseline.detectable)
    ]
    text = (
        f"With {n} paired seeds a true difference is found with 80% power (two-sided .05, before correction) "
        f"if it is at least {detectable_effect(n):.2f} standard deviations of the per-seed difference"
    )
    if known:
        span = f"{min(known):.3f}" if len(known) == 1 else f"{min(known):.3f} to {max(known):.3f}"
        text += f": here {span} in AUC, by strategy"
    p = smallest_sign_flip_p(n)
    text += f". The sign-flip test, which assumes no normal distribution, cannot give a p below {p:.3g}."
    if p > 0.05:
        text += " It can therefore not confirm a difference by itself; it is shown as a check."
    return text


def ceilings(summary: Summary) -> list[str]:
    """Strategies that are told the truth itself: ceilings, not methods."""
    return [s.name for s in summary.strategies if s.name.startswith("oracle") or "spans:truth" in s.signals]


def remarks(summary: Summary) -> tuple[list[str], list[str]]:
    """What the controls confirm, and all that a reader must know before trusting the verdict."""
    confirmed, doubts = shuffled_controls(summary)
    cautions = [unequal_compute(summary), *doubts, *_too_short(summary), *_few_seeds(summary)]
    return confirmed, [text for text in cautions if text]


def unequal_compute(summary: Summary) -> str:
    """A sentence where the mean tokens of two strategies differ by more than 5%, else nothing."""
    known = [s for s in summary.strategies if s.tokens > 0]
    if len(known) < 2:
        return ""
    most, least = max(known, key=lambda s: s.tokens), min(known, key=lambda s: s.tokens)
    excess = most.tokens / least.tokens - 1
    if excess <= UNEQUAL:
        return ""
    text = (
        f"Unequal compute: {most.name} generated {excess:.0%} more tokens for each run than {least.name} "
        f"({most.tokens:,.0f} against {least.tokens:,.0f})."
    )
    if summary.ablation.budget_kind == "steps":
        text += " The budget was set in steps; a budget in tokens compares at equal tokens."
    return text


def shuffled_controls(summary: Summary) -> tuple[list[str], list[str]]:
    """For each shuffled control what it says of the strategy whose credit it shuffles: (confirmed, doubted)."""
    confirmed, doubts = [], []
    for control in (s for s in summary.strategies if s.name.startswith("shuffled") and s.counted):
        source = shuffled_source(control, summary)
        if source is None:
            doubts.append(
                f"{control.name} is a control, but the strategy that it shuffles is not part of this ablation: "
                "whether location mattered cannot be told."
            )
            continue
        comparison = compare_paired(source.auc.by_seed, control.auc.by_seed)
        numbers = f"AUC difference {_signed(comparison.mean)}"
        if comparison.interval.known:
            numbers += f", 95% interval {_signed(comparison.interval.low)} to {_signed(comparison.interval.high)}"
        if len(comparison.seeds) < 2:
            doubts.append(f"{control.name} and {source.name} share no two finished seeds: location is not tested.")
        elif comparison.interval.low > 0 and comparison.p_t < LEVEL:
            confirmed.append(
                f"Location matters: {source.name} beats {control.name}, the same amounts of credit in random places "
                f"({numbers})."
            )
        else:
            doubts.append(
                f"{source.name} carries no location information that this ablation can show: it does not beat "
                f"{control.name}, the same amounts of credit in random places ({numbers})."
            )
    return confirmed, doubts


def shuffled_source(control: StrategySummary, summary: Summary) -> StrategySummary | None:
    """The strategy whose settings lie inside the control's, or which the control is named after."""
    inside = _nested(_credit(control))
    for s in summary.strategies:
        own = _credit(s)
        if s is not control and own and any(own == part for part in inside):
            return s
    named = [
        s
        for s in summary.strategies
        if s is not control and control.name in {f"shuffled_{s.name}", f"shuffled-{s.name}"}
    ]
    return named[0] if named else None


def unfinished(ablation: Ablation) -> list[Unfinished]:
    """Every run that does not count; those of one strategy that say the same share a row."""
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for cell in ablation.grid:
        if not cell.counts:
            step, steps = cell.status.get("step"), cell.status.get("steps")
            progress = f"step {step} of {steps}" if step is not None and steps is not None else ""
            lines = [line for line in (cell.error or "").strip().splitlines() if line.strip()]
            at = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell.setting.items())
            said = (cell.strategy, at, _STATES[cell.state], progress, lines[-1][:400] if lines else "")
            rows.setdefault(said, []).append(cell.seed)
    return [Unfinished(name, at, tuple(seeds), *said) for (name, at, *said), seeds in rows.items()]


def listed(names: Sequence[str]) -> str:
    """Names as prose.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _too_short(summary: Summary) -> list[str]:
    value, axis = summary.ablation.budget_value, summary.ablation.axis
    if math.isnan(summary.high) or value <= 0 or summary.high - summary.low > 0.9 * value:
        return []
    unit = "tokens" if axis == "tokens" else "steps"
    return [
        f"The AUC covers {unit} {summary.low:,.0f} to {summary.high:,.0f} only, the range that all counted runs share, "
        f"of a budget of {value:,}."
    ]


def _few_seeds(summary: Summary) -> list[str]:
    """Measured on normal data, docs/statistics.md: two to four seeds give intervals that are too short."""
    cover = {2: "50%", 3: "75%", 4: "88%"}  # benchmarks/coverage.py
    few = sorted({n for s in summary.strategies if (n := len(s.counted)) in cover})
    if not few:
        return []
    seeds, shares = f"{few[0]} to {few[-1]}", f"{cover[few[0]]} to {cover[few[-1]]}"
    if len(few) == 1:
        seeds, shares = str(few[0]), cover[few[0]]
    return [
        f"Few seeds: an interval from {seeds} seeds cannot reach beyond their own smallest and largest value; on "
        f"normal data it covers the true mean in about {shares} of cases, not in 95%."
    ]


def _credit(strategy: StrategySummary) -> Any:
    return next((config["credit"] for cell in strategy.cells if (config := cell.config()).get("credit")), None)


def _nested(value: Any) -> list[Any]:
    """All mappings inside a mapping, itself left out."""
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [part for child in children if isinstance(child, Mapping | list) for part in (child, *_nested(child))]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for key, child in value.items() for pair in _flat(child, f"{prefix}.{key}" if prefix else str(key))]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
