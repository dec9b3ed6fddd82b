"""Checks the form of a completion: tagged blocks such as think and answer, and numbered steps."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

from .errors import InputError
from .verdict import Sample, Span, Verdict

__all__ = ["Tags"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]*")
_WORD = re.compile(r"\S+")
_LINE_END = re.compile(r"\r?(?:\n|\Z)")
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"})


@dataclass(frozen=True)
class Tags:
    """The blocks ``<think>…</think><answer>…</answer>``: every tag exactly once, in order, with text in each block.

    White space around and between the blocks never counts. The grammar is of the whole completion: a tag that is
    merely quoted in the reasoning is one too many. A tag written otherwise (``<Think>``, ``< think >``,
    ``<think id="1">``) takes the tag's place and is a fault. What is at fault gets a span of score 0:

    - a tag too many, out of place, misspelt or, in strict mode, not alone on its line: the tag;
    - text outside the blocks: each stretch of it;
    - a block that is empty or holds nothing visible: the block with its tags;
    - a missing tag: what stands in its place, which is the first word of the block for an opening tag, and otherwise
      the next tag. Where the text ends first, it is an empty span at the end, which falls on the end token (see
      :mod:`apportion.credit.align`): a block left open was opened rightly and closed too late. Blocks that are missing
      after one left open are no faults of their own.

    All other tags get spans of score 1.

    Args:
        names: of the blocks, in order.
        mode: ``strict`` wants each tag alone on its line, as in the traces of DeepSeek-R1; ``soft`` does not.
        opened: the block that the prompt has opened already, so that the completion starts inside it: ``auto`` looks
            whether the prompt ends with the first opening tag; null for none.
        outside: whether text outside the blocks is allowed.
        empty: whether blocks without visible text are allowed.
        score: ``binary`` is 1 where nothing is at fault, else 0; ``share`` is the share of rules kept. The rules are:
            each tag as it should be, each block not empty, and, once a block is whole, no text outside.

    >>> text = "<think>2+2</think> so <answer>4</answer>"
    >>> verdict, = Tags()([Sample("2+2=?", text)])
    >>> verdict.score, [(text[span.start : span.stop], span.label) for span in verdict.spans if not span.score]
    (0.0, [('so', 'text outside the blocks')])
    >>> verdict, = Tags(score="share")([Sample("2+2=?", text)])
    >>> round(verdict.score, 3)  # 4 tags and 2 blocks of 7 rules
    0.857
    """

    names: Sequence[str] = field(default_factory=lambda: ["think", "answer"])
    mode: Literal["soft", "strict"] = "soft"
    opened: str | None = "auto"
    outside: bool = False
    empty: bool = False
    score: Literal["binary", "share"] = "binary"

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not self.names:
            raise InputError(f"names must be a list of at least one tag name, not {self.names!r}")
        for name in self.names:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "auto":
                raise InputError(f"names: {name!r} is no tag name; give letters and digits such as 'think'")
        if len({name.lower() for name in self.names}) < len(self.names):
            raise InputError(f"names: {', '.join(self.names)} has a name twice; name each block once")
        if self.mode not in ("soft", "strict"):
            raise InputError(f"mode: {self.mode!r} is unknown; give soft or strict")
        if self.score not in ("binary", "share"):
            raise InputError(f"score: {self.score!r} is unknown; give binary or share")
        if self.opened not in (None, "auto", *self.names):
            raise InputError(f"opened: {self.opened!r} is no block; give one of auto, null, {', '.join(self.names)}")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        pattern = _tag_pattern(tuple(self.names))
        return [self._judge(sample, pattern) for sample in samples]

    def _judge(self, sample: Sample, pattern: re.Pattern[str]) -> Verdict:
        text = sample.completion
        page = _Page(text, self._tags(text, pattern), self._opened_places(sample.prompt), self.names)
        faults = [*page.strays(), *page.gaps(bool(sample.metadata.get("truncated")))]
        faults += page.misspelt(alone=self.mode == "strict")
        if not self.empty:
            faults += page.empties()
        if not self.outside:
            faults += page.outside()
        score = float(not faults) if self.score == "binary" else self._share(page, faults)
        return Verdict(score, tuple(_spans(page.kept.values(), faults)))

    def _opened_places(self, prompt: str) -> int:
        """How many tags stand in the prompt already."""
        name = self.opened
        if name == "auto":
            name = self.names[0] if prompt.rstrip().endswith(f"<{self.names[0]}>") else None
        return 0 if name is None else 2 * list(self.names).index(name) + 1

    def _tags(self, text: str, pattern: re.Pattern[str]) -> list[_Tag]:
        places = {name.lower(): 2 * index for index, name in enumerate(self.names)}
        found = []
        for match in pattern.finditer(text):
            place = places[match["name"].lower()] + bool(match["close"])
            found.append(_Tag(*match.span(), place, match[0] == _written(self.names, place)))
        return found

    def _share(self, page: _Page, faults: Sequence[_Fault]) -> float:
        """Rules kept over rules; a fault names the tag (its place) or the block (its first place) that breaks one."""
        broken = {(fault.rule, fault.place) for fault in faults}
        tags = set(range(page.first, page.width)) | {place for rule, place in broken if rule == "tag"}
        kept = sum(place in page.kept and ("tag", place) not in broken for place in tags)
        rules = len(tags)
        if not self.empty:
            blocks = range(page.first // 2, page.width // 2)
            whole = [index for index in blocks if page.whole(index)]
            rules += len(blocks)
            kept += sum(("empty", 2 * index) not in broken for index in whole)
        if not self.outside:
            rules += 1
            kept += any(map(page.whole, range(page.width // 2))) and all(rule != "outside" for rule, _ in broken)
        return kept / rules


class _Tag(NamedTuple):
    """A tag of the text; ``place`` counts the wanted tags: 0 ``<think>``, 1 ``</think>``, 2 ``<answer>``, ..."""

    start: int
    stop: int
    place: int
    exact: bool


class _Fault(NamedTuple):
    start: int
    stop: int
    label: str
    rule: Literal["tag", "empty", "outside", "gap"]
    place: int = -1


class _Page:
    """A completion cut up at its tags.

    Args:
        text: the completion.
        tags: all tags found, in order.
        first: place of the first tag that the completion should have.
        names: of the blocks.
    """

    def __init__(self, text: str, tags: Sequence[_Tag], first: int, names: Sequence[str]) -> None:
        self.text, self.first, self.names, self.width = text, first, names, 2 * len(names)
        candidates = [tag for tag in tags if tag.place >= first]
        self.kept = {candidates[i].place: candidates[i] for i in _in_order([tag.place for tag in candidates])}
        kept = set(self.kept.values())
        self.extra = [tag for tag in tags if tag not in kept]
        # Edges of the text and all tags, kept ones with their place; between two of them lies plain text.
        edges = [_Tag(0, 0, first - 1, True), *tags, _Tag(len(text), len(text), self.width, True)]
        self.regions: list[tuple[int, int, list[tuple[int, int]]]] = []
        left, pieces = first - 1, []
        for before, after in pairwise(edges):
            pieces.append((before.stop, after.start))
            if after in kept or after.place == self.width:
                self.regions.append((left, after.place, pieces))
                left, pieces = after.place, []

    def whole(self, index: int) -> bool:
        """Whether the block has both its tags, one of which may stand in the prompt."""
        return 2 * index + 1 in self.kept and (2 * index in self.kept or 2 * index < self.first)

    def strays(self) -> Iterator[_Fault]:
        """Tags that are too many or out of place; those inside an empty block go with it."""
        for tag in self.extra:
            double = tag.place in self.kept or tag.place < self.first
            kind = "duplicate" if double else "misplaced"
            yield _Fault(tag.start, tag.stop, f"{kind} {_written(self.names, tag.place)}", "tag", tag.place)

    def misspelt(self, alone: bool) -> Iterator[_Fault]:
        """Tags in their place but not as they should be written."""
        for place, tag in self.kept.items():
            if not tag.exact:
                yield _Fault(tag.start, tag.stop, f"misspelt {_written(self.names, place)}", "tag", place)
            elif alone and not self._alone(tag):
                yield _Fault(tag.start, tag.stop, f"{_written(self.names, place)} not alone on its line", "tag", place)

    def _alone(self, tag: _Tag) -> bool:
        before = tag.start == 0 or self.text[tag.start - 1] == "\n"
        return before and _LINE_END.match(self.text, tag.stop) is not None

    def empties(self) -> Iterator[_Fault]:
        for left, right, pieces in self.regions:
            if left % 2 == 0 and right == left + 1 and not any(_visible(self.text[a:b]) for a, b in pieces):
                start = self.kept[left].start if left in self.kept else 0
                yield _Fault(start, self.kept[right].stop, f"empty {_written(self.names, left)}", "empty", left)

    def outside(self) -> Iterator[_Fault]:
        """Text between blocks. Before a closing tag without an opening one it counts as the block's."""
        for left, right, pieces in self.regions:
            if left % 2 and (right % 2 == 0):
                for start, stop in pieces:
                    body = self.text[start:stop].strip()
                    if body:
                        start += self.text[start:stop].index(body)
                        yield _Fault(start, start + len(body), "text outside the blocks", "outside")

    def gaps(self, truncated: bool) -> Iterator[_Fault]:
        """Missing tags, but for those that stand in another place, which are strays."""
        elsewhere = {tag.place for tag in self.extra}
        for left, right, pieces in self.regions:
            missing = [_written(self.names, place) for place in range(left + 1, right) if place not in elsewhere]
            if not missing:
                continue
            start, stop = self._standing(left, right, pieces)
            label = f"missing {', '.join(missing)}"
            if left % 2 == 0 and right == self.width:
                label = f"{_written(self.names, left)} {'cut off' if truncated else 'not closed'}"
            yield _Fault(start, stop, label, "gap")

    def _standing(self, left: int, right: int, pieces: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """What stands in the place of the tags missing between two kept ones."""
        if left % 2 and right % 2 and right < self.width:
            words = (_WORD.search(self.text, start, stop) for start, stop in pieces)
            word = next((word for word in words if word), None)
            if word:
                return word.span()
        tag = self.kept.get(right)
        return (len(self.text),) * 2 if tag is None else (tag.start, tag.stop)


@cache
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Tags and what was meant as one. Linear: a failed attempt has read no further than the next bracket."""
    options = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    attributes = r"[\s/]*+>|\s[^<>=]*+=[^<>]*+>"
    return re.compile(rf"<\s*+(?P<close>[/\\]?+)\s*+(?P<name>{options})(?:{attributes})", re.I | re.A)


def _written(names: Sequence[str], place: int) -> str:
    return f"<{'/' if place % 2 else ''}{names[place // 2]}>"


def _in_order(places: Sequence[int]) -> list[int]:
    """Indices of a longest strictly increasing run of items, the earliest of equal ones.

    >>> _in_order([0, 0, 1, 1, 2, 3]), _in_order([2, 3, 0, 1, 2, 3])
    ([0, 2, 4, 5], [2, 3, 4, 5])
    """
    lowest: list[int] = []  # the lowest place at which a run of 1, 2, ... items ends
    ends: list[int] = []
    before: list[int] = []
    for index, place in enumerate(places):
        length = bisect_left(lowest, place)
        before.append(ends[length - 1] if length else -1)
        if length == len(lowest):
            lowest.append(place)
            ends.append(index)
        elif place < lowest[length]:
            lowest[length], ends[length] = place, index
    run = [ends[-1]] if ends else []
    while run and before[run[-1]] >= 0:
        run.append(before[run[-1]])
    return run[::-1]


def _visible(text: str) -> bool:
    """Whether anything can be seen: white space, control and zero-width characters cannot."""
    return any(unicodedata.category(char) not in _UNSEEN for char in text)


def _spans(tags: Iterable[_Tag], faults: Iterable[_Fault]) -> list[Span]:
    """Faults at 0 and the other tags at 1, in order: one span for each place, and for a run of the same fault."""
    places = {(tag.start, -tag.stop): "" for tag in tags}
    for fault in faults:
        place = (fault.start, -fault.stop)
        before = places.get(place)
        places[place] = f"{before}; {fault.label}" if before else fault.label
    spans: list[Span] = []
    for (start, minus_stop), label in sorted(places.items()):
        stop, last = -minus_stop, spans[-1] if spans else None
        if last and start < last.stop:  # inside an empty block, which is one fault
            continue
        if last and label and last.label == label and last.stop == start:
            start = spans.pop().start
        spans.append(Span(start, stop, float(not label), label or "tag"))
    return spans
