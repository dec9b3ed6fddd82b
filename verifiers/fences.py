"""Fenced code blocks of a text: where their content lies and in which language it is said to be."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Block", "fenced_blocks"]

# A fence is at least three ticks or tildes at the start of a line; the language is the first word behind it.
_FENCE = re.compile(r"^[ ]{0,3}(?P<mark>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^\n]*)(?:\n|\Z)", re.M)


class Block(NamedTuple):
    """Content of one fenced block: half-open range of characters, without the lines of the fence.

    Attributes:
        start, stop: the last line break before the closing fence is inside.
        language: in lower case, empty where none is named.
        closed: False where the text ends first, as in a truncated answer.
    """

    start: int
    stop: int
    language: str
    closed: bool


def fenced_blocks(text: str) -> list[Block]:
    r"""Every fenced block, in order. One that is never closed runs to the end of the text.

    >>> text = "Here:\n```python\nx = 1\n```\nDone."
    >>> [(text[b.start : b.stop], b.language, b.closed) for b in fenced_blocks(text)]
    [('x = 1\n', 'python', True)]
    """
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    for match in _FENCE.finditer(text):
        mark, info = match["mark"], match["info"].strip()
        if opened is None:
            if mark[0] == "~" or "`" not in info:
                opened = mark, "".join(info.split()[:1]).strip("{}.").lower(), match.end()
        elif mark.startswith(opened[0]) and not info:
            found.append(Block(opened[2], match.start(), opened[1], closed=True))
            opened = None
    if opened is not None:
        found.append(Block(opened[2], len(text), opened[1], closed=False))
    return found
