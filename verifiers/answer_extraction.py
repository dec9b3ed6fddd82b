r"""Finds the final answer of a completion, as text and where it stands, by a named policy.

The whole text is searched, never a tail of it, and every policy takes the last answer of its kind. All is linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from .errors import InputError
from .number import quantities

__all__ = ["POLICIES", "Answer", "Policy", "extract_answer", "trim"]

Policy = Literal["auto", "boxed", "answer_tag", "hash", "answer_line", "last_number"]
Place = tuple[int, int]


class Answer(NamedTuple):
    """An answer and the half-open range of characters where it stands.

    ``text`` is that range of the completion; only where several boxes make one answer ("\boxed{2} and \boxed{3}") it
    is their contents, joined by commas.
    """

    text: str
    start: int
    stop: int


def extract_answer(text: str, policy: Policy = "auto") -> Answer | None:
    r"""The final answer, without its box, tags, dollar signs, emphasis and full stop; None where there is none.

    Args:
        text: of any length, any Unicode.
        policy: ``boxed`` the last complete and not empty ``\boxed{...}`` or ``\fbox{...}``, also ``\boxed 3``; boxes
            joined by nothing but "and", "or" or a comma are one answer.
            ``answer_tag`` the last ``<answer>...</answer>``; where a box or "Answer:" stands in it, that.
            ``hash`` the last "#### 42".
            ``answer_line`` the last "Answer: ..." (or the line below it), or sentence "the answer is ...".
            ``last_number`` the last number, or the expression without blanks that it is part of.
            ``auto`` what is written behind the last ``</think>`` before the whole; in each the later of tag and box,
            then ``hash``, then ``answer_line``; where none is found, the last number.

    >>> extract_answer(r"We get $\boxed{\frac{1}{3}}$.")
    Answer(text='\\frac{1}{3}', start=15, stop=26)
    >>> extract_answer("Check: 437.\n\nFinal Answer: **73**").text
    '73'
    """
    if policy not in POLICIES:
        raise InputError(f"extract: {policy!r} is no policy; give one of {', '.join(POLICIES)}")
    return POLICIES[policy](text)


def trim(text: str, start: int = 0, stop: int | None = None) -> Place:
    r"""The range without what only wraps it: blanks, emphasis, ``$...$``, ``\(...\)``, ``\text{...}``, a full stop.

    >>> text = r" **\( \text{13}. \)** "
    >>> text[slice(*trim(text))]
    '13'
    """
    stop = len(text) if stop is None else stop
    for _ in range(12):  # wrappers in wrappers; more of them are left to the reader of the answer
        before = start, stop
        start = _BLANK.match(text, start, stop).end()  # type: ignore[union-attr]
        while stop > start and (text[stop - 1].isspace() or text[stop - 1] in ",;:。，"):
            stop -= 1
        if text.endswith((".", "?"), start, stop) and not text.endswith("..", start, stop):
            stop -= 1
        for mark in ("**", "*", "`", "$$"):  # half of a pair whose other half was cut off
            if text.count(mark, start, stop) == 1:
                start += len(mark) * text.startswith(mark, start, stop)
                stop -= len(mark) * text.endswith(mark, start, stop)
        for opening, closing in _PAIRS:
            size = len(opening) + len(closing)
            if stop - start > size and text.startswith(opening, start) and text.endswith(closing, start, stop):
                inner = text[start + len(opening) : stop - len(closing)]
                if opening not in inner:
                    start, stop = start + len(opening), stop - len(closing)
        wrapper = _WRAPPER.match(text, start, stop)
        if wrapper and _closing_brace(text, wrapper.end(), stop) == stop - 1:
            start, stop = wrapper.end(), stop - 1
        if (start, stop) == before:
            break
    return start, stop


_BLANK = re.compile(r"(?:\s|\\[,;:! ]|~)*+")
_DOWN = re.compile(r"(?:\s|\\[,;:! ]|~|(?:\\\[|\$\$)[ \t\r]*+\n)*+")  # to the next line, also into a formula
_PAIRS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("“", "”"),
)  # fmt: skip
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|emph|boxed|fbox|underline)[ ]?\{|\{")
_BRACE = re.compile(r"\\.|[{}]", re.S)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?:(?P<opening>\{)|(?P<bare>[-+−]?\.?[0-9][^\s$\\{}]*+))|\\.|[{}]", re.S)
_NAMED = r"(?P<name>[A-Za-z])(?:_\{?\w\}?)?\s?=[\s$]*+"
_ASSIGNED = re.compile(rf"(?<![A-Za-z\\]){_NAMED}\Z")
_JOIN = re.compile(r"[\s$]*+(?:,|;|(?:,\s?)?(?:and|or|\\text\{\s?(?:and|or)\s?\}|\\quad))[\s$]*+" + f"(?:{_NAMED})?+")
_MAX_JOIN = 40  # characters between two boxes that make one answer
_TAG = re.compile(r"<(?P<slash>/?)answer>", re.I)
_THINK = re.compile(r"</think(?:ing)?>", re.I)
_HASH = re.compile(r"(?<!#)#{4}(?!#)[ \t:]*+(?P<answer>[^\n]*)")
_NUMERIC = re.compile(r"[*_$€£¥(\[{ \\+−–-]*+[.]?[0-9]|\$?\\")
_LINE = re.compile(
    r"^[ \t>#*_•-]*+(?:(?:so|thus|therefore|hence),?[ \t]++)?(?:(?:the|my|our)[ \t]++)?(?:(?:final|correct)[ \t]++)?"
    r"answer(?:[ \t]++is)?[ \t*_]*+(?:[:=](?:[ \t]*+\*\*)?|(?<=[ *_r])$)",
    re.M | re.I,
)
_SENTENCE = re.compile(
    r"\b(?:(?:the|final|correct|our|my)[ \t]++answer|correct[ \t]++(?:option|choice))"
    r"(?:[ \t]++(?:to|for|of)\b[^\n.:?]{0,80}?)?[ \t]++(?:is|=)(?![a-z])"
    r"(?:[ \t]++(?:therefore|thus|then|hence|simply|just)\b)?[ \t]*+:?",
    re.I,
)
_HEDGE = re.compile(
    r"(?:[ \t]*+(?:approximately|about|around|roughly|exactly|equal to)(?=[ \t]*+[*_$\\]*+[ \t]?[-0-9]))?+", re.I
)
_CLAUSE_END = re.compile(
    r"(?:[.;?]|(?<![0-9A-Za-z)}])!)(?=[*_$\"”)]*+(?:\s|\Z))"
    r"|,?[ ](?:because|since|which|where|as|so|for)\b|,[ ](?:and|but)[ ](?:we|so|this)\b"
)


def _auto(text: str) -> Answer | None:
    *_, behind = [0, *(match.end() for match in _THINK.finditer(text))]
    for offset in dict.fromkeys((behind, 0)):
        part = text[offset:]
        marked = [found for found in (_answer_tag(part), _boxed(part)) if found]
        answer = max(marked, key=lambda found: found.stop, default=None) or _hash(part) or _answer_line(part)
        if answer:
            return _shifted(answer, offset)
    return _last_number(text)


def _boxed(text: str) -> Answer | None:
    boxes = _boxes(text)
    joined: list[tuple[int, int, int, int]] = []
    for box in reversed(boxes):
        if joined:
            between = text[box[3] : joined[-1][0]]
            join = _JOIN.fullmatch(between) if len(between) <= _MAX_JOIN else None
            if join is None or (join["name"] and not _named(text, box[0], join["name"])):
                break
        joined.append(box)
    if not joined:
        return None
    contents = [text[slice(*trim(text, box[1], box[2]))] for box in reversed(joined)]
    if len(set(contents)) == 1:
        return _answer(text, joined[0][1], joined[0][2])
    return Answer(", ".join(contents), joined[-1][1], joined[0][2])


def _named(text: str, place: int, letter: str) -> bool:
    """Whether "x =", perhaps with an index, stands before the place."""
    named = _ASSIGNED.search(text, max(0, place - 16), place)
    return named is not None and named["name"] == letter


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Complete boxes that hold something, outermost ones: where box, content, end of content and end of box lie."""
    boxes: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        if match["opening"]:
            opened.append((match.start(), match.end()))
        elif match["bare"]:
            start, stop = match.span("bare")
            boxes.append((match.start(), start, stop, stop))
        elif match.group() == "{":
            opened.append(None)
        elif match.group() == "}" and opened and (box := opened.pop()):
            while boxes and boxes[-1][0] > box[0]:
                boxes.pop()
            if _answer(text, box[1], match.start()):
                boxes.append((*box, match.start(), match.end()))
    return boxes


def _answer_tag(text: str) -> Answer | None:
    best, opened = None, None
    for match in _TAG.finditer(text):
        if not match["slash"]:
            opened = match.end()
        elif opened is not None:
            if text[opened : match.start()].strip():
                best = opened, match.start()
            opened = None
    if best is None:
        return None
    inside = text[best[0] : best[1]]
    found = _boxed(inside) or _hash(inside) or _answer_line(inside)
    return _shifted(found, best[0]) if found else _answer(text, *best)


def _hash(text: str) -> Answer | None:
    last, end = None, len(text.rstrip())
    for match in _HASH.finditer(text):
        # "#### Step 2" is a heading; "#### yes" at the end of the text is an answer.
        if _NUMERIC.match(match["answer"]) or match.end() >= end:
            last = match
    return _clause(text, *last.span("answer")) if last else None


def _answer_line(text: str) -> Answer | None:
    leads = sorted(match.end() for pattern in (_LINE, _SENTENCE) for match in pattern.finditer(text))
    for end in reversed(leads):
        line_end = _line_end(text, end)
        if not text[end:line_end].strip(" \t\r*_:$"):
            end = _DOWN.match(text, line_end).end()  # type: ignore[union-attr]
            line_end = _line_end(text, end)
        if found := _clause(text, end, line_end):
            return found
    return None


def _last_number(text: str) -> Answer | None:
    found = quantities(text)
    if not found:
        return None
    start, stop = found[-1][0].start, found[-1][0].stop
    first, last = start, stop
    while first > 0 and not text[first - 1].isspace():
        first -= 1
    while last < len(text) and not text[last].isspace():
        last += 1
    around = text[first:start] + text[stop:last]
    if re.search(r"[\\^{}√π]", around):  # part of a formula: its last number alone is no answer
        return _answer(text, first, last)
    return _answer(text, start, stop)


def _clause(text: str, start: int, stop: int) -> Answer | None:
    """The answer at ``start``, behind words like "about", up to the end of the sentence or a word like "because"."""
    start = _HEDGE.match(text, start, stop).end()  # type: ignore[union-attr]
    end = _CLAUSE_END.search(text, start, stop)
    return _answer(text, start, end.start() if end else stop)


def _answer(text: str, start: int, stop: int) -> Answer | None:
    start, stop = trim(text, start, stop)
    if re.fullmatch(r"[\s*_${}]*+(?:\\text\s?\{\s*+\})?", text[start:stop]):
        return None
    return Answer(text[start:stop], start, stop)


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _closing_brace(text: str, start: int, stop: int) -> int:
    depth = 1
    for match in _BRACE.finditer(text, start, stop):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return -1


def _shifted(answer: Answer, offset: int) -> Answer:
    return Answer(answer.text, answer.start + offset, answer.stop + offset)


POLICIES: dict[str, Callable[[str], Answer | None]] = {
    "auto": _auto,
    "boxed": _boxed,
    "answer_tag": _answer_tag,
    "hash": _hash,
    "answer_line": _answer_line,
    "last_number": _last_number,
}
