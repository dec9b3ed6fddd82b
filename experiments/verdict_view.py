"""Verdicts on the terminal: a table over all completions, and the faults underlined in the text of some."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..verifiers import Span

if TYPE_CHECKING:
    from .verdict_file import Judged

__all__ = ["draw_faults", "draw_table", "marked_lines"]

MAX_FAULTS = 50  # of one completion that are shown
MAX_LINE = 160  # characters of a line that are shown around a fault


def draw_table(judged: Sequence[Judged], names: Sequence[str], seconds: Mapping[str, float]) -> None:
    """One row per verifier: how many it judged, abstained from and failed on, its scores and its spans.

    Args:
        judged: all completions.
        names: of the verifiers.
        seconds: that each took in this call; zero where all verdicts were there already.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{len(judged)} completion{'s' * (len(judged) != 1)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("verifier", overflow="fold")
    for heading in ("judged", "abstained", "errors", "mean", "passed", "spans", "faults", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        scores = [s for row in judged if (s := row.verdicts[name].score) is not None]
        errors = sum(name in row.faulted for row in judged)
        spans = [span for row in judged for span in row.verdicts[name].spans]
        table.add_row(
            name,
            str(len(scores)),
            str(len(judged) - len(scores) - errors),
            str(errors),
            f"{sum(scores) / len(scores):.3f}" if scores else "–",
            f"{sum(score >= 0.5 for score in scores) / len(scores):.1%}" if scores else "–",
            str(len(spans)),
            str(sum(span.score < 0.5 for span in spans)),
            f"{seconds[name]:.2f}",
        )
    _console().print(table)


def draw_faults(judged: Sequence[Judged], *, limit: int, threshold: float = 0.5) -> None:
    """The lines of the first ``limit`` completions with a fault, each fault underlined, with what is wrong below.

    Args:
        judged: all completions.
        limit: how many completions are shown.
        threshold: spans that score less are faults.
    """
    console = _console()
    faulty = [row for row in judged if any(_faults(row, threshold))]
    for row in faulty[:limit]:
        console.print(f"\nrow {row.row}", style="bold", markup=False, end="")
        console.print("  " + "  ".join(_score(name, row) for name in row.verdicts), style="dim", markup=False)
        faults = list(_faults(row, threshold))
        for line, notes in marked_lines(row.completion, faults[:MAX_FAULTS]):
            console.print(_styled(line, notes))
            for start, stop, label in notes:
                console.print(_underline(line, start, stop, label), style="red", markup=False, highlight=False)
        if len(faults) > MAX_FAULTS:
            console.print(f"  … {len(faults) - MAX_FAULTS} more faults in this completion", style="dim")
    if len(faulty) > limit:
        console.print(f"\n… {len(faulty) - limit} more with faults; run.show=N shows more, verdicts.jsonl has all")


def marked_lines(text: str, faults: Sequence[tuple[str, Span]]) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Every line that a fault touches, cut around its faults, with their (start, stop, label) in the line.

    Characters that would move the cursor or steer the terminal are shown as visible signs of the same number.

    >>> marked_lines("1+1=2\\n2+1=4", [("steps", Span(6, 11, 0.0, "wrong"))])
    [('2+1=4', [(0, 5, 'steps: wrong')])]
    """
    found = []
    begin = 0
    for line in text.split("\n"):
        end = begin + len(line)
        notes = []
        for name, span in faults:
            start, stop = max(span.start, begin), min(span.stop, end)
            nothing_to_see = not text[span.start : span.stop].strip("\n")
            if start < stop or (nothing_to_see and begin <= span.start <= end):
                notes.append((start - begin, max(start, stop) - begin, f"{name}: {span.label}" if span.label else name))
        if notes:
            found.append(_cut(_visible(line), sorted(notes)))
        begin = end + 1
    return found


def _faults(row: Judged, threshold: float) -> Iterator[tuple[str, Span]]:
    for name, verdict in row.verdicts.items():
        yield from ((name, span) for span in verdict.spans if span.score < threshold)


def _score(name: str, row: Judged) -> str:
    score = row.verdicts[name].score
    return f"{name} {'failed' if name in row.faulted else 'abstains' if score is None else f'{score:.3g}'}"


def _cut(line: str, notes: list[tuple[int, int, str]]) -> tuple[str, list[tuple[int, int, str]]]:
    """A long line is shown from a little before its first fault on."""
    if len(line) <= MAX_LINE:
        return line, notes
    first = max(0, notes[0][0] - MAX_LINE // 4)
    last = min(len(line), first + MAX_LINE)
    inside = [(max(a - first, 0), min(b, last) - first, label) for a, b, label in notes if a < last]
    head, tail = ("…" if first else ""), ("…" if last < len(line) else "")
    return head + line[first:last] + tail, [(a + len(head), b + len(head), label) for a, b, label in inside]


def _visible(line: str) -> str:
    return "".join(char if char.isprintable() else " " if char == "\t" else "�" for char in line)


def _styled(line: str, notes: Sequence[tuple[int, int, str]]) -> Any:
    from rich.text import Text

    text = Text(f"  {line}")
    for start, stop, _ in notes:
        text.stylize("bold red underline", start + 2, stop + 2)
    return text


def _underline(line: str, start: int, stop: int, label: str) -> str:
    """Carets below the fault, as wide as its characters are on a terminal."""
    from rich.cells import cell_len

    return "  " + " " * cell_len(line[:start]) + "^" * max(cell_len(line[start:stop]), 1) + " " + _visible(label)


def _console() -> Any:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)
