"""Strict JSON (RFC 8259) with the place of every value, read without recursion."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["MAX_DEPTH", "Fault", "Node", "differences", "read_json", "read_value"]

MAX_DEPTH = 64  # validators recurse on the value, several calls for each level

_BLANKS = re.compile(r"[ \t\n\r]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?P<fraction>\.[0-9]++)?(?P<exponent>[eE][-+]?[0-9]++)?")
_WORD = re.compile(r'[^ \t\n\r,:\[\]{}"]++')  # what stands where a number, true, false or null may stand
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_ESCAPE = re.compile(r"\\(?:u(?P<high>[dD][89abAB]..)\\u(?P<low>[dD][c-fC-F]..)|u(?P<unit>....)|(?P<short>.))")
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CONSTANTS = {"true": True, "false": False, "null": None}
_MEANT = (  # the first two can only be values
    (re.compile(r"-?(?:NaN|Infinity|inf|nan)\Z"), "is no number in JSON"),
    (re.compile(r"-|[+.]*[0-9]"), "is not written as JSON writes numbers"),
    (re.compile(r"//|/\*|#"), "is a comment; JSON has none"),
    (re.compile("```|~~~"), "is a code fence, not JSON"),
    (re.compile("['‘’“”`]"), "is not in double quotes"),
    (re.compile("\ufeff"), "is a byte order mark"),
)


class Fault(NamedTuple):
    """Where a text stops being JSON, and why, in one line.

    Attributes:
        start, stop: half-open range of characters; empty at the place where something is missing.
        reason: for people.
    """

    start: int
    stop: int
    reason: str


@dataclass(slots=True)
class Node:
    """A value and where it stands.

    Args:
        value: as ``json.loads`` gives it.
        start, stop: half-open range of its characters.
        key: range of its key with the quotes, where it is a member of an object.
        parts: nodes of an object's members by key or of an array's items by index; None for other values.
    """

    value: Any
    start: int
    stop: int
    key: tuple[int, int] | None = None
    parts: dict[str, Node] | list[Node] | None = None

    @property
    def member(self) -> tuple[int, int]:
        """Its range with its key."""
        return (self.key[0] if self.key else self.start), self.stop

    def at(self, path: Iterable[str | int]) -> Node:
        """The node at the end of keys and indices.

        >>> text = '{"a": [1, true]}'
        >>> node = read_json(text).at(["a", 1])
        >>> node.value, text[node.start : node.stop]
        (True, 'true')
        """
        node: Any = self
        for step in path:
            node = node.parts[step]
        return node

    def walk(self) -> Iterator[tuple[tuple[str | int, ...], Node]]:
        """Every value in it with its path, itself first with the empty one."""
        waiting: list[tuple[tuple[str | int, ...], Node]] = [((), self)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            parts = node.parts or []
            steps: Iterable[tuple[str | int, Node]] = parts.items() if isinstance(parts, dict) else enumerate(parts)
            waiting += [((*path, step), part) for step, part in steps]


def read_json(text: str, start: int = 0, stop: int | None = None, *, max_depth: int = MAX_DEPTH) -> Node | Fault:
    """The one JSON value that ``text[start:stop]`` is, or the first fault.

    Beyond the grammar it refuses what readers of JSON take in different ways: a key that comes twice in an object (as
    ``"a"`` and ``"\\u0061"``), numbers beyond the range of a double (1e400, or 400 digits), half a surrogate pair, and
    nesting over ``max_depth``.

    Args:
        text: places are counted in it, from its beginning.
        start, stop: the part to read.
        max_depth: of arrays and objects in each other.

    >>> read_json('{"a": 1,}')
    Fault(start=7, stop=8, reason='a comma with nothing behind it')
    >>> read_json('{"a": 0, "\\\\u0061": 1}')
    Fault(start=9, stop=17, reason="duplicate key 'a'")
    """
    stop = len(text) if stop is None else stop
    node = read_value(text, start, stop, max_depth=max_depth)
    if isinstance(node, Fault):
        return node
    rest = _BLANKS.match(text, node.stop, stop).end()  # type: ignore[union-attr]
    if rest < stop:
        return Fault(rest, max(rest + 1, len(text[:stop].rstrip())), "text behind the value")
    return node


def read_value(text: str, start: int = 0, stop: int | None = None, *, max_depth: int = MAX_DEPTH) -> Node | Fault:
    """Like :func:`read_json`, but whatever stands behind the value is not looked at.

    >>> read_value("[1] and so on").stop
    3
    """
    try:
        return _Reader(text, len(text) if stop is None else stop, max_depth).value(start)
    except _Stopped as stopped:
        return Fault(*stopped.args)


def differences(found: Node, wanted: Node) -> Iterator[tuple[Fault, str | int | None]]:
    """Places of ``found`` that are not as in ``wanted``, each with the key at the top level that it lies under.

    Numbers are compared by value (1 is 1.0), true and 1 are not equal. What is missing is the closing bracket's fault.

    >>> [fault[:2] for fault, _ in differences(read_json('{"a": 1, "b": 2}'), read_json('{"a": 1.0, "b": true}'))]
    [(14, 15)]
    """
    waiting: list[tuple[Node, Node, str | int | None]] = [(found, wanted, None)]
    while waiting:
        mine, theirs, top = waiting.pop()
        if isinstance(mine.parts, dict) and isinstance(theirs.parts, dict):
            for key, part in mine.parts.items():
                if key in theirs.parts:
                    waiting.append((part, theirs.parts[key], key if top is None else top))
                else:
                    yield Fault(*part.member, "not in the reference"), key if top is None else top
            for key in theirs.parts:
                if key not in mine.parts:
                    yield Fault(mine.stop - 1, mine.stop, f"{_shown(key)} is missing"), key if top is None else top
        elif isinstance(mine.parts, list) and isinstance(theirs.parts, list):
            waiting += [(one, other, top) for one, other in zip(mine.parts, theirs.parts)]
            more = mine.parts[len(theirs.parts) :]
            if more:
                yield Fault(more[0].start, more[-1].stop, "not in the reference"), top
            elif len(mine.parts) < len(theirs.parts):
                yield Fault(mine.stop - 1, mine.stop, "items are missing"), top
        elif isinstance(mine.value, bool) is not isinstance(theirs.value, bool) or mine.value != theirs.value:
            yield Fault(mine.start, mine.stop, "differs from the reference"), top


class _Stopped(Exception):
    """Carries what makes a fault: start, stop, reason."""


class _Reader:
    """Reads one value; ``at`` is a place in the text everywhere, ``opened`` the containers not yet closed."""

    def __init__(self, text: str, stop: int, max_depth: int) -> None:
        self.text, self.stop, self.max_depth = text, stop, max_depth
        self.opened: list[Node] = []

    def value(self, at: int) -> Node:
        key: tuple[str, int, int] | None = None
        while True:
            at = self.blanks(at)
            node = self.begin(at)
            self.add(node, key)
            at = node.stop
            if node.parts is not None:
                self.opened.append(node)
                if len(self.opened) > self.max_depth:
                    raise _Stopped(node.start, node.stop, f"nested deeper than {self.max_depth}")
                at = self.blanks(at)
                if self.char(at) != _closing(node):
                    key, at = self.key(node, at)
                    continue
            while self.opened:  # the value is complete: close what ends here, or go on to the next one
                node = self.opened[-1]
                at = self.blanks(at)
                char = self.char(at)
                if char == ",":
                    comma, at = at, self.blanks(at + 1)
                    if self.char(at) == _closing(node):
                        raise _Stopped(comma, comma + 1, "a comma with nothing behind it")
                    key, at = self.key(node, at)
                    break
                if char != _closing(node):
                    raise self.unexpected(at, f"a comma or {_closing(node)}")
                at = node.stop = at + 1
                self.opened.pop()
            else:
                return node

    def begin(self, at: int) -> Node:
        """A number, string or constant, or an empty container whose opening bracket stands here."""
        char = self.char(at)
        if char == "{":
            return Node({}, at, at + 1, parts={})
        if char == "[":
            return Node([], at, at + 1, parts=[])
        if char == '"':
            string, stop = self.string(at)
            return Node(string, at, stop)
        word = _WORD.match(self.text, at, self.stop)
        if word is None:
            raise self.unexpected(at, "a value")
        if word[0] in _CONSTANTS:
            return Node(_CONSTANTS[word[0]], at, word.end())
        number = _NUMBER.fullmatch(self.text, at, word.end())
        if number is None:
            raise self.unexpected(at, "a value")
        if math.isinf(float(number[0])):
            raise _Stopped(at, word.end(), "a number beyond the range of a double")
        kind = float if number["fraction"] or number["exponent"] else int
        return Node(kind(number[0]), at, word.end())

    def add(self, node: Node, key: tuple[str, int, int] | None) -> None:
        """Put a value into the innermost open container."""
        parent = self.opened[-1] if self.opened else None
        if parent and isinstance(parent.parts, list):
            parent.parts.append(node)
            parent.value.append(node.value)
        elif parent and isinstance(parent.parts, dict) and key:
            node.key = key[1:]
            parent.parts[key[0]] = node
            parent.value[key[0]] = node.value

    def key(self, parent: Node, at: int) -> tuple[tuple[str, int, int] | None, int]:
        """The key that stands here in an object, and where its value may begin; none in an array."""
        if not isinstance(parent.parts, dict):
            return None, at
        if self.char(at) != '"':
            raise self.unexpected(at, "a key")
        name, stop = self.string(at)
        if name in parent.parts:
            raise _Stopped(at, stop, f"duplicate key {_shown(name)}")
        colon = self.blanks(stop)
        if self.char(colon) != ":":
            raise self.unexpected(colon, "a colon")
        return (name, at, stop), colon + 1

    def string(self, at: int) -> tuple[str, int]:
        """The string whose opening quote stands here, and its end."""
        end = _CHARACTERS.match(self.text, at + 1, self.stop).end()  # type: ignore[union-attr]
        char = self.char(end)
        if not char:
            raise _Stopped(end, end, "the text ends inside a string")
        if char == "\\":
            raise _Stopped(end, min(end + 2, self.stop), f"{_shown(self.text[end : end + 2])} is no escape")
        if char != '"':
            kind = "half a surrogate pair" if char >= "\ud800" else f"the control character {_shown(char)}"
            raise _Stopped(end, end + 1, f"{kind} in a string")
        body = self.text[at + 1 : end]
        if "\\" in body:
            body = _ESCAPE.sub(lambda escape: self.unescaped(escape, at + 1), body)
        return body, end + 1

    def unescaped(self, escape: re.Match[str], offset: int) -> str:
        if escape["short"]:
            return _SHORT.get(escape["short"], escape["short"])
        if escape["high"]:
            high, low = int(escape["high"], 16), int(escape["low"], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
        char = chr(int(escape["unit"], 16))
        if "\ud800" <= char <= "\udfff":
            raise _Stopped(offset + escape.start(), offset + escape.end(), "half a surrogate pair in a string")
        return char

    def blanks(self, at: int) -> int:
        return _BLANKS.match(self.text, at, self.stop).end()  # type: ignore[union-attr]

    def char(self, at: int) -> str:
        return self.text[at] if at < self.stop else ""

    def unexpected(self, at: int, wanted: str) -> _Stopped:
        """What to raise where something else stands: it is named, with what it was probably meant for."""
        if at >= self.stop:
            return _Stopped(self.stop, self.stop, f"the text ends where {wanted} should stand")
        match = _WORD.match(self.text, at, self.stop)
        word = match[0] if match else self.text[at]
        guesses = _MEANT if wanted == "a value" else _MEANT[2:] if wanted == "a key" else ()
        meaning = next(
            (meaning for pattern, meaning in guesses if pattern.match(word)), f"stands where {wanted} should"
        )
        return _Stopped(at, at + len(word), f"{_shown(word)} {meaning}")


def _closing(container: Node) -> str:
    return "}" if isinstance(container.parts, dict) else "]"


def _shown(text: str) -> str:
    """A piece of the text on one printable line."""
    short = text if len(text) <= 30 else f"{text[:30]}…"
    return repr(short) if short.isprintable() else ascii(short)
