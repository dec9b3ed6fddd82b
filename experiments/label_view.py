"""What labelling gave, on the terminal: a table of all steps, what it cost, and where two sources differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ..prm.labels import Consensus, Labeler

__all__ = ["agreement", "draw_labels"]

SIDES = ("right", "wrong", "unlabelled")


def draw_labels(labeler: Labeler, problems: int, counts: Mapping[str, int], seconds: float) -> None:
    """A row for the labels, and lines on what is behind them.

    Args:
        labeler: that made them.
        problems: number of problems.
        counts: as :func:`apportion.experiments.label_steps.label_steps` sums them.
        seconds: spent.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    headings = ("solutions", "steps", "right", "wrong", "unlabelled", "tokens", "seconds")
    numbers = [counts.get(name, 0) for name in ("solutions", *SIDES, "tokens")]
    cells = [f"{number:,}" for number in (numbers[0], sum(numbers[1:4]), *numbers[1:])]
    title = f"{labeler.source}, {problems} problem{'s' * (problems != 1)}"
    console.print(_table(title, headings, [[*cells, f"{seconds:.1f}"]]))
    if isinstance(labeler, Consensus):
        names = labeler.first.source, labeler.second.source
        rows = [[f"{names[0]} {one}", *(str(counts.get(f"pair {one} {other}", 0)) for other in SIDES)] for one in SIDES]
        console.print(_table("steps", ("", *(f"{names[1]} {other}" for other in SIDES)), rows))
    for line in _lines(labeler, counts):
        console.print(line, markup=False)


def agreement(counts: Mapping[str, int]) -> tuple[float, float] | None:
    """Accuracy and F1 of the error class of the first source, the second taken for the truth.

    None where they label no step in common, or neither calls a step wrong.

    >>> agreement({"pair right right": 6, "pair right wrong": 1, "pair wrong right": 1, "pair wrong wrong": 2})
    (0.8, 0.6666666666666666)
    """
    both = {(one, other): counts.get(f"pair {one} {other}", 0) for one in SIDES[:2] for other in SIDES[:2]}
    same, differ = both["wrong", "wrong"], both["right", "wrong"] + both["wrong", "right"]
    if not same + differ:
        return None
    return (both["right", "right"] + same) / sum(both.values()), 2 * same / (2 * same + differ)


def _lines(labeler: Labeler, counts: Mapping[str, int]) -> Iterator[str]:
    sampled, every = counts.get("continuations", 0), counts.get("continuations at every step", 0)
    if sampled:
        unjudged = f", {counts['unjudged']:,} of them without a verdict" if counts.get("unjudged") else ""
        yield f"{sampled:,} continuations of {counts['prefixes']:,} prefixes{unjudged}"
    if every:
        yield f"continuations at every step would have been {every:,}: {1 - sampled / every:.0%} saved"
    if isinstance(labeler, Consensus):
        yield from _consensus(labeler, counts)
    left_out = [
        f"{counts[key]:,} solutions {words}"
        for key, words in (("without_steps", "without a step"), ("without_labels", "without any label"))
        if counts.get(key)
    ]
    if left_out:
        yield f"not in steps.jsonl: {', '.join(left_out)}"


def _consensus(labeler: Consensus, counts: Mapping[str, int]) -> Iterator[str]:
    steps, solutions = sum(counts.get(name, 0) for name in SIDES), counts.get("solutions", 0)
    kept, same = counts.get("kept steps", 0), counts.get("same first error", 0)
    yield f"kept: {kept:,} of {steps:,} steps ({kept / steps if steps else 0:.0%})"
    yield f"same first error, or none: {same:,} of {solutions:,} solutions ({same / solutions if solutions else 0:.0%})"
    measured = agreement(counts)
    if measured is not None:
        yield (
            f"{labeler.first.source} against {labeler.second.source}: accuracy {measured[0]:.3f}, "
            f"F1 of wrong steps {measured[1]:.3f}"
        )


def _table(title: str, headings: tuple[str, ...], rows: list[list[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place or len(rows) == 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
