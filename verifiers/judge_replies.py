"""Reads what a judge replied: a score, the wrong steps or the wrong text. What is in doubt is None, never a guess.

The judge is asked to end its reply with one JSON object that carries a mark made for this one question. Objects with
the mark decide; whatever else the reply holds is prose. A reply without the mark is read too (judges trained on another
form), but only where nothing speaks against it: every verdict in it must be readable, all must agree, the last must end
its line, and none may be a quotation of the judged text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

__all__ = ["Merge", "Mode", "merge_votes", "read_quotes", "read_score", "read_steps", "to_unit"]

Mode = Literal["wrong_steps", "first_error", "quotes"]
Merge = Literal["majority", "intersection", "average"]
Value = TypeVar("Value")

MAX_REPLY = 100_000  # characters; nothing that long is a verdict
MAX_QUOTES = 32
_MAX_OPENED = 1000  # braces at which an object is looked for

_NUMBER = re.compile(r"[-+]?(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?+(?![^\W_]|_[0-9]|%)")
_NAMED_SCORE = re.compile(
    r"\b(?:score|reward|rating|grade)\b(?P<quoted>[\"']?)[*_`\s]{0,8}[:=][*_`$\s]{0,8}(?P<value>[^\n]*+)", re.I
)
_BOX = re.compile(r"\\boxed\{(?P<value>[^{}\n]*+)(?P<closed>\}?)")
_CLOSING = re.compile(r"[\s.!*_`)\]\"'>$\\]*+")
_STEP = re.compile(r"\s*+(?:step\s++)?+(?P<index>-?[0-9]{1,9})\s*+", re.I)


class _Found(NamedTuple):
    """A verdict in a reply: its range of characters, and what it says (None where that cannot be read)."""

    start: int
    stop: int
    value: Any


def read_score(reply: str, *, mark: str | None = None, judged: str = "") -> float | None:
    """The one number that a reply gives as its score; None where there is none, or more than one.

    Read are ``{"score": 0.5}`` and a line that ends in "Score: 0.5" (or Reward, Rating, Grade), emphasised or not. A
    number is read whole. A string, a truth value, a list or NaN is no score.

    Args:
        reply: what the judge said; of a reasoning model only what follows ``</think>``.
        mark: see the module; None where the judge was not given one.
        judged: the text under judgement; a score that only repeats it word by word is no verdict.

    >>> read_score('It says {"score": 1}, wrongly. {"score": 0, "mark": "7f"}', mark="7f")
    0.0
    >>> [read_score(reply) for reply in ("Reward: 10", "**Score:** 0.8.", "Score: 0.8.1", '{"score": true}', "Good!")]
    [10.0, 0.8, None, None, None]
    >>> read_score('It says {"score": 1}, wrongly. {"score": 0}') is None
    True
    """
    return _decided(reply, "score", _finite, _named_scores, mark, judged)


def read_steps(
    reply: str, steps: int, mode: Mode, *, mark: str | None = None, count_from: int = 0, judged: str = ""
) -> frozenset[int] | None:
    """The steps that a reply calls wrong, counted from 0; None where it cannot be read. The empty set: no error.

    Read are ``{"first_error": 2}`` or ``{"wrong_steps": [2, 4]}``, by mode, and the same in ``\\boxed{...}``. A step is
    a whole number, or "Step 2" with the number that the judge was shown. A number out of range makes the reply
    unreadable: it is the sign of a judge that counts otherwise. Only as a first error does -1 say that there is none.

    Args:
        steps: how many there are.
        mode: ``first_error`` or ``wrong_steps``.
        count_from: number of the first step, as the judge was shown it.
        mark, judged: see :func:`read_score`.

    >>> [read_steps(reply, 5, "first_error") for reply in ("\\\\boxed{-1}", "\\\\boxed{4}", "\\\\boxed{5}")]
    [frozenset(), frozenset({4}), None]
    >>> sorted(read_steps('{"wrong_steps": [1, "Step 3"]}', 5, "wrong_steps", count_from=1))
    [0, 2]
    """

    def parse(value: object) -> frozenset[int] | None:
        if mode == "first_error":
            if _index(value) == -1:
                return frozenset()
            value = [value]
        elif isinstance(value, str):  # from a box
            inner = value.strip().removeprefix("[").removesuffix("]").strip()
            value = inner.split(",") if inner else [] if value.strip() else None
        if not isinstance(value, list):
            return None
        found = [index - count_from if (index := _index(item)) is not None else -1 for item in value]
        return frozenset(found) if all(0 <= step < steps for step in found) else None

    return _decided(reply, mode, parse, _boxes, mark, judged)


def read_quotes(reply: str, *, mark: str | None = None) -> tuple[str, ...] | None:
    """The wrong pieces of text that a reply quotes, ``{"quotes": ["...", ...]}``; None where it cannot be read.

    >>> read_quotes('Twice. {"quotes": ["1+1=3"]}'), read_quotes('{"quotes": "1+1=3"}')
    (('1+1=3',), None)
    """

    def parse(value: object) -> tuple[str, ...] | None:
        if not isinstance(value, list) or len(value) > MAX_QUOTES:
            return None
        return tuple(value) if all(isinstance(quote, str) and quote.strip() for quote in value) else None

    return _decided(reply, "quotes", parse, lambda _: [], mark, "")


def to_unit(score: float | None, low: float, high: float) -> float | None:
    """``(score - low) / (high - low)``; None outside the scale, for the number then means something else.

    >>> to_unit(7, 0, 10), to_unit(7, 0, 1), to_unit(None, 0, 1)
    (0.7, None, None)
    """
    return None if score is None or not low <= score <= high else (score - low) / (high - low)


def merge_votes(
    votes: Sequence[frozenset[int]], pieces: int, *, merge: Merge, first_error: bool = False
) -> tuple[float | None, dict[int, float]]:
    """One verdict from several votes on the same pieces of an answer (CAPO, arXiv 2508.02298).

    A piece is wrong (0, else 1) by ``majority`` where more than half of the votes name it, by ``intersection`` where
    all do; by ``average`` its score is the share of votes that do not name it. The whole is 1 where no piece is wrong,
    else 0; by average it is the share of votes that name none. A share of right steps would rise with idle steps.

    Of first errors a vote says nothing on what follows. Pieces up to the first error that more than half of the votes
    (or all) give are judged; where no such place exists, the verdict is open. By average a piece's score is the share
    of those votes that judge it.

    Args:
        votes: at least one; the pieces that each calls wrong.
        pieces: how many there are.
        merge: how votes are merged.
        first_error: each vote names at most one piece, the first wrong one.

    Returns:
        The score of the whole, None where it is open, and scores by piece.

    >>> votes = [frozenset({1}), frozenset({1, 2}), frozenset()]
    >>> merge_votes(votes, 3, merge="majority"), merge_votes(votes, 3, merge="intersection")
    ((0.0, {0: 1.0, 1: 0.0, 2: 1.0}), (1.0, {0: 1.0, 1: 1.0, 2: 1.0}))
    >>> merge_votes([frozenset({1}), frozenset({1}), frozenset()], 3, merge="majority", first_error=True)
    (0.0, {0: 1.0, 1: 0.0})
    """
    reach = [min(vote) if first_error and vote else pieces - 1 for vote in votes]
    if merge == "average":
        judging = [sum(piece <= last for last in reach) for piece in range(pieces)]
        naming = [sum(piece in vote for vote in votes) for piece in range(pieces)]
        scores = {piece: 1 - naming[piece] / judging[piece] for piece in range(pieces) if judging[piece]}
        return sum(not vote for vote in votes) / len(votes), scores
    needed = len(votes) if merge == "intersection" else len(votes) // 2 + 1
    if first_error:
        agreed = next((vote for vote in votes if votes.count(vote) >= needed), None)
        if agreed is None:
            return None, {}
        wrong, last = agreed, min(agreed, default=pieces - 1)
    else:
        wrong = frozenset(piece for piece in range(pieces) if sum(piece in vote for vote in votes) >= needed)
        last = pieces - 1
    return float(not wrong), {piece: float(piece not in wrong) for piece in range(last + 1)}


def _decided(
    reply: str,
    key: str,
    parse: Callable[[Any], Value | None],
    other_forms: Callable[[str], list[_Found]],
    mark: str | None,
    judged: str,
) -> Value | None:
    """The value on which all verdicts of a reply agree."""
    text = _spoken(reply)
    objects = _objects(text, key)
    marked = [found for found in objects if mark is not None and found.value.get("mark") == mark]
    if marked:
        return _agreed([parse(found.value[key]) for found in marked])
    if mark is not None and any("mark" in found.value for found in objects):
        return None  # somebody else's mark: copied wrongly, or made up by the judged text
    others = other_forms(_without(text, objects))
    last = max((found.stop for found in (*objects, *others)), default=0)
    end = text.find("\n", last)
    if not _CLOSING.fullmatch(text, last, len(text) if end < 0 else end):
        return None
    material = _squeezed(judged)
    if any(_squeezed(text[found.start : found.stop]) in material for found in (*objects, *others)):
        return None
    return _agreed([parse(found.value[key]) for found in objects] + [parse(found.value) for found in others])


def _agreed(values: list[Value | None]) -> Value | None:
    return values[0] if values and all(value == values[0] for value in values) else None


def _spoken(reply: str) -> str:
    """The reply without a reasoning model's thoughts; nothing where those were cut off, or the reply is endless."""
    if len(reply) > MAX_REPLY:
        return ""
    thoughts, closed, spoken = reply.rpartition("</think>")
    return spoken if closed else "" if "<think>" in spoken else thoughts + spoken


def _objects(text: str, key: str) -> list[_Found]:
    """JSON objects with the key, its outermost where they nest; other keys keep their spelling.

    An object with a key twice, NaN or an infinite number is none.
    """
    found: list[_Found] = []
    for match in _opened(text):
        if found and match < found[-1].stop:
            continue
        try:
            value, stop = _DECODER.raw_decode(text, match)
        except (ValueError, RecursionError):
            continue
        if key in value:
            found.append(_Found(match, stop, value))
    return found


def _opened(text: str) -> Iterator[int]:
    """Where an object may open, from the left; the last ones where there are too many."""
    places = [match.start() for match in re.finditer(r"\{(?=\s*\")", text)]
    return iter(places[-_MAX_OPENED:])


def _named_scores(text: str) -> list[_Found]:
    """Every "score: ..." of the text; one in quotation marks is a piece of broken JSON."""
    found = []
    for match in _NAMED_SCORE.finditer(text):
        number = None if match["quoted"] else _NUMBER.match(match["value"])
        if number is None or not _CLOSING.fullmatch(match["value"], number.end()):
            found.append(_Found(match.start(), match.end(), None))
        else:
            found.append(_Found(match.start(), match.start("value") + number.end(), float(number.group())))
    return found


def _boxes(text: str) -> list[_Found]:
    return [
        _Found(match.start(), match.end(), match["value"] if match["closed"] else None) for match in _BOX.finditer(text)
    ]


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _index(value: object) -> int | None:
    """A whole number, or the number in "Step 2"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _STEP.fullmatch(value) if isinstance(value, str) else None
    return int(match["index"]) if match else None


def _without(text: str, objects: Sequence[_Found]) -> str:
    """The text with blanks in place of the objects."""
    for found in objects:
        text = f"{text[: found.start]}{' ' * (found.stop - found.start)}{text[found.stop :]}"
    return text


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _each_once(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands twice")
    return members


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_each_once)
