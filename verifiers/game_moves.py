"""Puzzles whose answers are moves: each move is played, and the first one against the rules is located exactly."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .arithmetic import Arithmetic, equations
from .gym_answers import answer_texts
from .verdict import Sample, Span, Verdict

__all__ = ["GAMES", "GameMoves", "Play", "play"]

State = TypeVar("State")
_DIRECTIONS = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}
_HANOI = re.compile(r"Move disk ([0-9]{1,4}) from Peg ([0-9]{1,4}) to Peg ([0-9]{1,4})")
_POUR = re.compile(r"(fill|empty)\s+([A-Z])|pour\s+([A-Z])->([A-Z])")
_SUM = re.compile(r"[0-9+\-*/() ]+")


class Piece(NamedTuple):
    """A move as it stands in an answer: half-open range of characters, and its text."""

    start: int
    stop: int
    text: str


class Play(NamedTuple):
    """What became of an answer: its moves, the first bad one (None where all keep the rules), why, and the goal."""

    pieces: tuple[Piece, ...]
    bad: int | None
    fault: str
    solved: bool


class _Illegal(Exception):
    """A move against the rules; the message says which."""


@dataclass(frozen=True)
class GameMoves:
    """The share of moves before the first one against the rules, with a span for each of these and for the bad one.

    Read are answers to problems of ``task=reasoning_gym`` that come from one of :data:`GAMES`, as the column ``entry``
    says. Behind the first bad move nothing is judged: the position is unknown. Answers to all other problems are read
    as text with equations, as by :class:`apportion.verifiers.arithmetic.Arithmetic`.

    >>> facts = {"source_dataset": "shortest_path", "matrix": [["O", "#"], ["*", "X"]], "solution": ["up", "right"]}
    >>> columns = {"entry": {"answer": "up right", "metadata": facts}}
    >>> verdict, = GameMoves()([Sample("", "<answer>up left</answer>", metadata=columns)])
    >>> verdict.score, [(span.start, span.stop, span.score, span.label) for span in verdict.spans]
    (0.5, [(8, 10, 1.0, 'legal move'), (11, 15, 0.0, 'leaves the grid')])
    """

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        entry = sample.metadata.get("entry")
        facts = entry.get("metadata", {}) if isinstance(entry, Mapping) else {}
        name = str(facts.get("source_dataset"))
        if name not in GAMES:
            return Arithmetic()([sample])[0]
        found = answer_texts(sample.completion)
        if not found:
            return Verdict(None)
        played = play(name, found[0].text, facts)
        pieces, offset = played.pieces, found[0].start
        if not pieces:
            return Verdict(None)
        legal = len(pieces) if played.bad is None else played.bad
        spans = [Span(offset + p.start, offset + p.stop, 1.0, "legal move") for p in pieces[:legal]]
        if played.bad is not None:
            piece = pieces[played.bad]
            spans.append(Span(offset + piece.start, offset + piece.stop, 0.0, played.fault))
        return Verdict(legal / len(pieces), tuple(spans))


def play(game: str, answer: str, facts: Mapping[str, Any]) -> Play:
    """Play the moves of an answer.

    Args:
        game: a key of :data:`GAMES`.
        answer: the moves alone, in the form that the problem asks for.
        facts: the ``metadata`` of the problem's entry.
    """
    return GAMES[game](answer, facts)


def _played(
    pieces: Sequence[Piece], state: State, move: Callable[[State, str], State], goal: Callable[[State], bool]
) -> Play:
    for place, piece in enumerate(pieces):
        try:
            state = move(state, piece.text)
        except _Illegal as fault:
            return Play(tuple(pieces), place, str(fault), solved=False)
    return Play(tuple(pieces), None, "", solved=bool(pieces) and goal(state))


def _pieces(pattern: str, answer: str) -> list[Piece]:
    return [Piece(*match.span(), match.group()) for match in re.finditer(pattern, answer)]


def _hanoi(answer: str, facts: Mapping[str, Any]) -> Play:
    disks = int(facts["num_disks"])
    pegs: dict[int, list[int]] = {peg: [] for peg in range(1, int(facts["num_pegs"]) + 1)}
    pegs[facts["start_peg"]] = list(range(disks, 0, -1))

    def move(state: dict[int, list[int]], text: str) -> dict[int, list[int]]:
        match = _HANOI.fullmatch(text)
        if match is None:
            raise _Illegal("no move")
        disk, source, target = map(int, match.groups())
        if source not in state or target not in state:
            raise _Illegal("no such peg")
        if not state[source] or state[source][-1] != disk:
            raise _Illegal("the disk is not on top of that peg")
        if state[target] and state[target][-1] < disk:
            raise _Illegal("a smaller disk lies there")
        state[target].append(state[source].pop())
        return state

    goal = facts["target_peg"]
    return _played(_pieces(r"\S[^\n]*(?<=\S)", answer), pegs, move, lambda state: len(state[goal]) == disks)


def _jugs(answer: str, facts: Mapping[str, Any]) -> Play:
    sizes, target = list(facts["puzzle"]["jug_capacities"]), facts["puzzle"]["target"]
    try:
        listed = json.loads(answer)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        return _unread(answer, "no JSON list of moves")
    pieces = _pieces(r'"(?:[^"\\]|\\.)*"', answer)

    def move(state: list[int], text: str) -> list[int]:
        match = _POUR.fullmatch(json.loads(text, strict=False).strip())
        if match is None:
            raise _Illegal("no move")
        jugs = [ord(letter) - ord("A") for letter in match.groups()[1:] if letter]
        if max(jugs) >= len(sizes):
            raise _Illegal("no such jug")
        if match[1]:
            state[jugs[0]] = sizes[jugs[0]] if match[1] == "fill" else 0
        elif jugs[0] != jugs[1]:
            poured = min(state[jugs[0]], sizes[jugs[1]] - state[jugs[1]])
            state[jugs[0]] -= poured
            state[jugs[1]] += poured
        return state

    return _played(pieces, [0] * len(sizes), move, lambda state: target in state)


def _word_ladder(answer: str, facts: Mapping[str, Any]) -> Play:
    start, end = str(facts["start_word"]).upper(), str(facts["end_word"]).upper()
    known = _words(len(end))

    def move(last: str, text: str) -> str:
        word = text.upper()
        if not last and word != start:
            raise _Illegal(f"is not {start}")
        if len(word) != len(end):
            raise _Illegal(f"has not {len(end)} letters")
        if last and sum(a != b for a, b in zip(last, word)) != 1:
            raise _Illegal("does not differ in one letter")
        if known and word not in known:
            raise _Illegal("no known word")
        return word

    pieces = _pieces(r"[^\s,](?:[^,]*[^\s,])?", answer)
    played = _played(pieces, "", move, lambda last: last == end and len(pieces) > 1)
    return played._replace(solved=played.solved and answer.count(",") == len(pieces) - 1)


@cache
def _words(length: int) -> frozenset[str]:
    """Words of so many letters that reasoning-gym knows; none where it is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")  # looked at, not imported: that takes seconds
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "data" / "words.csv"
        if file.is_file():
            with file.open(encoding="utf-8", newline="") as lines:
                return frozenset(word.upper() for row in csv.DictReader(lines) if (word := row.get(f"{length}_letter")))
    return frozenset()


def _shortest_path(answer: str, facts: Mapping[str, Any]) -> Play:
    grid, pieces = facts["matrix"], _pieces(r"\S+", answer)
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row)}
    if answer.strip() == "infeasible":
        fault = "there is a path" if facts["solution"] else ""
        return Play(tuple(pieces), 0 if fault else None, fault, solved=not fault)

    def move(place: tuple[int, int], text: str) -> tuple[int, int]:
        if text not in _DIRECTIONS:
            raise _Illegal("no direction")
        down, right = _DIRECTIONS[text]
        place = place[0] + down, place[1] + right
        if place not in cells:
            raise _Illegal("leaves the grid")
        if cells[place] == "X":
            raise _Illegal("runs into a blocked cell")
        return place

    start = next(place for place, cell in cells.items() if cell == "*")
    return _played(pieces, start, move, lambda place: cells[place] == "#")


def _countdown(answer: str, facts: Mapping[str, Any]) -> Play:
    return _expression(answer, facts["numbers"], facts["target"])


def _puzzle24(answer: str, facts: Mapping[str, Any]) -> Play:
    return _expression(answer, facts["numbers"], 24)


def _expression(answer: str, numbers: Sequence[int], target: int) -> Play:
    """The moves are the numbers taken; where all may be taken but the result is wrong, the whole is."""
    if not _SUM.fullmatch(answer.strip()) or "**" in answer or "//" in answer:
        return _unread(answer, "no expression of numbers, + - * / and brackets")

    def take(left: Counter[int], text: str) -> Counter[int]:
        number = int(text) if len(text) < 20 else -1
        if not left[number]:
            raise _Illegal("not among the numbers left")
        return left - Counter([number])

    played = _played(_pieces(r"[0-9]+", answer), Counter(numbers), take, lambda left: not left)
    if played.bad is not None or not played.pieces:
        return played
    if not played.solved:
        return _unread(answer, "does not use all numbers")
    claim = f"({answer.strip()}) = {target}"
    found = equations(claim)
    if [(equation.start, equation.stop) for equation in found] != [(0, len(claim))]:
        return _unread(answer, "cannot be read")
    return played if found[0].holds else _unread(answer, f"is not {target}")


def _unread(answer: str, fault: str) -> Play:
    """The answer as one bad move."""
    whole = _pieces(r"\S(?:[\s\S]*\S)?", answer)
    return Play(tuple(whole), 0 if whole else None, fault, solved=False)


GAMES: Mapping[str, Callable[[str, Mapping[str, Any]], Play]] = {
    "countdown": _countdown,
    "jugs": _jugs,
    "puzzle24": _puzzle24,
    "shortest_path": _shortest_path,
    "tower_of_hanoi": _hanoi,
    "word_ladder": _word_ladder,
}
"""How each game is played, by the name of its data set in reasoning-gym."""
