"""The costs of strategies on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .cost_ledger import Estimate
from .cost_options import Plan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["draw", "short"]


def draw(plan: Plan, found: Sequence[Estimate], left_out: Mapping[str, str]) -> None:
    """A line for each strategy, the first of them being the baseline; of a single one its items as well."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(_strategies(plan, found))
    if len(found) == 2:
        console.print(_items(found[1]))
    for one in found:
        for note in one.assumed:
            console.print(f"{one.label}: {note}", markup=False, style="yellow")
        if not one.fits:
            console.print(f"{one.label}: does not fit the memory: {_memory_words(one)}", markup=False, style="yellow")
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}", markup=False, style="dim")


def short(number: float) -> str:
    """Three digits and a letter.

    >>> short(0), short(1234567), short(2.5e15)
    ('0', '1.23M', '2.5P')
    """
    for power, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.3g}{letter}"
    return f"{number:.3g}"


def _strategies(plan: Plan, found: Sequence[Estimate]) -> Table:
    title = (
        f"{short(plan.policy.params)} parameters on {plan.gpus} devices; a step is {plan.rollouts.prompts_per_step} x "
        f"{plan.rollouts.group_size} answers of {plan.answers.tokens:g} tokens, a run {plan.run.steps} steps"
    )
    seconds = ["s a step", "sample", "verify", "evidence", "update"]
    counts = ["sampled", "read", "trained", "FLOP", "verifier s"]
    table = _table(title, [*counts, *seconds, "GPU-hours", "x uniform", "GB a device", "fits"])
    for one in found:
        phases = [one.total("seconds", phase) for phase in ("sample", "verify", "evidence", "update")]
        table.add_row(
            one.label,
            *(short(one.total(field)) for field in ("generated", "read", "trained", "flops", "judging", "seconds")),
            *map(short, phases),
            short(one.gpu_hours),
            f"{one.gpu_hours / found[0].gpu_hours:.2f}",
            f"{one.memory.peak / 1e9:.1f}",
            "yes" if one.fits else "no",
        )
    return table


def _items(one: Estimate) -> Table:
    table = _table(f"a step of {one.label}", ["phase", "sampled", "read", "trained", "FLOP", "verifier s", "s"])
    for item in one.items:
        numbers = (item.generated, item.read, item.trained, item.flops, item.judging, item.seconds)
        table.add_row(item.what, item.phase, *(short(number) if number else "" for number in numbers))
    return table


def _memory_words(one: Estimate) -> str:
    held = one.memory
    parts = {
        "states": held.state,
        "frozen models": held.frozen,
        "activations": held.activations,
        "sampling weights": held.sampling,
        "cache": held.cache,
    }
    return ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in parts.items())


def _table(title: str, headings: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
