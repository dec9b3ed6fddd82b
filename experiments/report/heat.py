"""An answer drawn token by token in the colours of its advantages. It is model output: all of it is escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

__all__ = ["Fault", "Rollout", "token_heat", "visible"]

MOST_TOKENS = 400
ONE_LINE = 120  # characters; a longer answer keeps its line breaks


class Fault(NamedTuple):
    """The first thing judged wrong in an answer: characters [start, stop) and what the judge called it."""

    start: int
    stop: int
    label: str


@dataclass(frozen=True)
class Rollout:
    """One answer as a run recorded it; the four sequences are (T,), one entry for each token."""

    problem_id: str
    prompt: str
    completion: str
    reference: str | None
    group_id: int
    sample: int
    truncated: bool
    reward: float | None
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    trained: Sequence[bool]
    advantages: Sequence[float]
    fault: Fault | None

    @property
    def place(self) -> tuple[int, int]:
        """Which row of the batch it is, for every strategy with this seed."""
        return self.group_id, self.sample


def token_heat(rollout: Rollout, scale: float) -> Markup:
    """The answer's tokens, coloured by advantage (blue up, red down), the first error underlined.

    Args:
        scale: advantage of full colour. Every token that is not zero gets some colour.
    """
    first, last = _shown(rollout)
    pieces = [Markup('<i class="cut">{} tokens … </i>').format(first)] if first else []
    position = rollout.offsets[first][0] if first else 0
    broken = len(rollout.completion) > ONE_LINE
    for token in range(first, last):
        start, stop = rollout.offsets[token]
        if start > position:  # characters that no token covers
            pieces.append(Markup("<span>{}</span>").format(_lines(rollout.completion[position:start], broken)))
        text = rollout.completion[max(start, position) : stop]
        position = max(position, stop)
        pieces.append(_token(rollout, token, text, scale, broken))
    if last < len(rollout.offsets):
        pieces.append(Markup('<i class="cut"> … {} tokens</i>').format(len(rollout.offsets) - last))
    elif position < len(rollout.completion):
        pieces.append(Markup("<span>{}</span>").format(_lines(rollout.completion[position:], broken)))
    return Markup("").join(pieces)


def visible(text: str) -> str:
    """Marks in place of what cannot be seen or would reorder the page: line ends, tabs, control and bidi characters.

    >>> visible("a\\tb\\x07\\u202ec")
    'a⇥b⟨U+0007⟩⟨U+202E⟩c'
    """
    marks = {"\n": "↵", "\t": "⇥", "\u200d": "\u200d"}
    return "".join(
        marks.get(c, f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"} else c) for c in text
    )


def _token(rollout: Rollout, token: int, text: str, scale: float, broken: bool) -> Markup:
    start, stop = rollout.offsets[token]
    advantage, trained = rollout.advantages[token], rollout.trained[token]
    classes, style = [], ""
    if trained and advantage and scale > 0:
        classes.append("p" if advantage > 0 else "n")
        style = f"--w:{min(1.0, max(0.08, abs(advantage) / scale)):.2f}"
    if not trained:
        classes.append("off")
    if start == stop:
        text, name = "∎", f"special token {rollout.ids[token]}"
        classes.append("mark")
    else:
        name = visible(rollout.completion[start:stop])
        text = text or "·"  # a further piece of a character that is already drawn
    if rollout.fault and _touches((start, stop), rollout.fault):
        classes.append("e")
    told = f"{name}  {_signed(advantage)}" if trained else f"{name}  not trained"
    attributes = Markup(' class="{}"').format(" ".join(classes)) if classes else Markup("")
    attributes += Markup(' style="{}"').format(style) if style else Markup("")
    return Markup('<span{} title="{}">{}</span>').format(attributes, told, _lines(text, broken))


def _touches(offset: tuple[int, int], fault: Fault) -> bool:
    """Whether they share a character; an empty range (a special token, a thing that is missing) counts as one."""
    start, stop = offset
    return start < max(fault.stop, fault.start + 1) and fault.start < max(stop, start + 1)


def _lines(text: str, broken: bool) -> Markup:
    """Escaped, with a visible mark at each line end and, in a long answer, the line end itself."""
    mark = Markup('<b class="nl">↵</b>') + (Markup("<br>") if broken else Markup(""))
    return mark.join(escape(visible(line)) for line in text.split("\n"))


def _shown(rollout: Rollout) -> tuple[int, int]:
    """Tokens [first, last) to draw: all, or a window that holds the first error."""
    count = len(rollout.offsets)
    if count <= MOST_TOKENS:
        return 0, count
    fault = rollout.fault
    at = next((t for t, (_, stop) in enumerate(rollout.offsets) if fault and stop > fault.start), 0)
    first = max(0, min(at - MOST_TOKENS // 3, count - MOST_TOKENS))
    return first, first + MOST_TOKENS


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−") if value else "0"
