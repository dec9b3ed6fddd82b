"""An answer as a grid: a column for each token, rows for the truth and the strategies. All model text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ..probe.record import DrawnRollout, Probe
from ..report.heat import visible
from .board import written

__all__ = ["MOST_TOKENS", "Block", "Drawing", "HeatRow", "Token", "draw_rollout", "shown"]

MOST_TOKENS = 240
WIDEST = 24  # characters drawn of one token
BLOCK = 60  # characters of text side by side
TRUTH = "true advantage"


@dataclass(frozen=True)
class Token:
    """One column: place in the answer (None for characters that no token covers), text, its name for a listener."""

    place: int | None
    text: Markup
    name: str
    width: int
    classes: Sequence[str]
    ends_line: bool


@dataclass(frozen=True)
class HeatRow:
    """One row of a block: whose it is, the |A| of full colour (NaN for none), and its cells as markup."""

    name: str
    kind: str
    scale: float
    cells: Markup


@dataclass(frozen=True)
class Block:
    """Columns that fit side by side, and their rows."""

    tokens: Sequence[Token]
    rows: Sequence[HeatRow]


@dataclass(frozen=True)
class Drawing:
    """One answer: head, blocks, the token whose numbers show at first, tokens drawn, left out before and after."""

    problem_id: str
    prompt: str
    outcome: str
    reference: str | None
    blocks: Sequence[Block]
    chosen: int
    count: int
    before: int
    after: int


def draw_rollout(rollout: DrawnRollout, probe: Probe) -> Drawing:
    """The answer with the truth on top and one row for each strategy, in the probe's order.

    Each row has its own colour scale: full colour is its largest |A|. A long answer is drawn as blocks, every row in
    each; of one of more than ``MOST_TOKENS`` tokens a window that holds its first error.
    """
    first, last = _window(rollout)
    tokens = _tokens(rollout, first, last)
    sources = [(TRUTH, "truth", rollout.truth)] + [
        (s.name, s.kind, rollout.advantages[s.name]) for s in probe.strategies if s.name in rollout.advantages
    ]
    blocks = [
        Block(part, [_row(rollout, part, name, kind, values, first) for name, kind, values in sources])
        for part in _parted(tokens)
    ]
    wrong = (place for place in range(first, last) if rollout.wrong[place])
    return Drawing(
        shown(rollout.problem_id),
        shown(rollout.prompt),
        _outcome(rollout),
        None if rollout.reference is None else shown(rollout.reference),
        blocks,
        next(wrong, first),
        last - first,
        first,
        len(rollout.offsets) - last,
    )


def shown(text: str) -> str:
    """Text of unknown origin with marks in place of what cannot be seen, would reorder the page, or is no character.

    >>> shown("a\\u202eb\\ud800")
    'a⟨U+202E⟩b?'
    """
    return visible(text.encode("utf-8", "replace").decode("utf-8"))


def _outcome(rollout: DrawnRollout) -> str:
    errors = "an error in it" if any(rollout.wrong) else "no error in it"
    return f"reward {rollout.reward:g}, {errors}" if rollout.reward is not None else f"no reward, {errors}"


def _window(rollout: DrawnRollout) -> tuple[int, int]:
    """Tokens [first, last) to draw."""
    count = len(rollout.offsets)
    if count <= MOST_TOKENS:
        return 0, count
    at = next((place for place, wrong in enumerate(rollout.wrong) if wrong), 0)
    first = max(0, min(at - MOST_TOKENS // 3, count - MOST_TOKENS))
    return first, first + MOST_TOKENS


def _tokens(rollout: DrawnRollout, first: int, last: int) -> list[Token]:
    """The columns of tokens [first, last), with one for each stretch of text between them that no token covers."""
    columns, position = [], rollout.offsets[first][0] if first < last else 0
    for place in range(first, last):
        start, stop = rollout.offsets[place]
        if start > position:
            columns.append(_column(rollout.text[position:start], None, []))
        text = rollout.text[max(start, position) : stop] or ("∎" if start == stop else "·")
        position = max(position, stop)
        marks = (("e", rollout.wrong[place]), ("off", not rollout.trained[place]), ("mark", start == stop))
        columns.append(_column(text, place, [name for name, holds in marks if holds]))
    return columns


def _column(text: str, place: int | None, classes: list[str]) -> Token:
    seen = shown(text)
    short = seen if len(seen) <= WIDEST else f"{seen[: WIDEST - 1]}…"
    return Token(place, escape(short), short, len(short), classes, text.endswith("\n"))


def _parted(tokens: Sequence[Token]) -> list[list[Token]]:
    """Blocks of at most ``BLOCK`` characters, cut after a line end if there is one in the second half."""
    blocks, rest = [], list(tokens)
    while rest:
        count = width = 0
        while count < len(rest) and (count == 0 or width + rest[count].width <= BLOCK):
            width += rest[count].width
            count += 1
        if count < len(rest):
            ends = [place + 1 for place in range(count // 2, count) if rest[place].ends_line]
            count = ends[-1] if ends else count
        blocks.append(rest[:count])
        rest = rest[count:]
    return blocks


def _row(
    rollout: DrawnRollout, part: Sequence[Token], name: str, kind: str, values: Sequence[float], first: int
) -> HeatRow:
    known = [abs(v) for v, trained in zip(values, rollout.trained, strict=True) if trained and not math.isnan(v)]
    scale = max(known, default=math.nan)
    cells = (_cell(token, math.nan if token.place is None else values[token.place], scale, first) for token in part)
    return HeatRow(name, kind, scale, Markup("").join(cells))


def _cell(token: Token, value: float, scale: float, first: int) -> Markup:
    """A token in the colour of its number; the number itself is in the cell, shown when its column is chosen."""
    if token.place is None:
        return Markup('<td class="gap">{}</td>').format(token.text)
    classes = [f"c{token.place - first}", *token.classes]
    style = Markup("")
    trained = "off" not in token.classes
    if trained and value and not math.isnan(value) and scale > 0:
        classes.append("p" if value > 0 else "n")
        style = Markup(' style="--w:{:.2f}"').format(max(0.08, abs(value) / scale))
    number = written(value, 3, signed=True) if trained else "not trained"
    return Markup('<td class="{}"{}>{}<i> {}</i></td>').format(" ".join(classes), style, token.text, number)
