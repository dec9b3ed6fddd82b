"""Parts of the report: token heat, the choice of answers, curves over seeds, looks and labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from apportion.experiments.report import build
from apportion.experiments.report.curves import band, mean_curve
from apportion.experiments.report.figures import look, spread_labels
from apportion.experiments.report.heat import Fault, Rollout, token_heat
from apportion.experiments.report.rollouts import choose


def rollout(text: str, offsets: Sequence[tuple[int, int]], advantages: Sequence[float], **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "problem_id": "p",
        "prompt": "",
        "completion": text,
        "reference": None,
        "group_id": 0,
        "sample": 0,
        "truncated": False,
        "reward": 0.0,
        "ids": list(range(len(offsets))),
        "offsets": offsets,
        "trained": [True] * len(offsets),
        "advantages": advantages,
        "fault": None,
    }
    return Rollout(**{**fields, **changes})


def test_heat_of_a_small_answer_by_hand() -> None:
    drawn = token_heat(
        rollout("a<\nb", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)], [1.0, -2.0, 0.0, 0.01, 0.5], fault=Fault(1, 2, "")),
        scale=2.0,
    )
    assert drawn == (
        '<span class="p" style="--w:0.50" title="a  +1.0000">a</span>'
        '<span class="n e" style="--w:1.00" title="&lt;  −2.0000">&lt;</span>'
        '<span title="↵  0"><b class="nl">↵</b></span>'
        '<span class="p" style="--w:0.08" title="b  +0.0100">b</span>'
        '<span class="p mark" style="--w:0.25" title="special token 4  +0.5000">∎</span>'
    )


def test_heat_draws_each_character_once() -> None:
    # three byte tokens of one character, and a character that no token covers
    drawn = token_heat(rollout("é-b", [(0, 1), (0, 1), (2, 3)], [1.0, -1.0, 0.0]), scale=1.0)
    assert re.sub(r"<[^>]+>", "", drawn) == "é·-b"
    untrained = token_heat(rollout("ab", [(0, 1), (1, 2)], [0.0, 0.0], trained=[True, False]), scale=0.0)
    assert untrained == '<span title="a  0">a</span><span class="off" title="b  not trained">b</span>'


def test_long_answer_is_cut_around_its_error() -> None:
    text = "x" * 1000
    drawn = token_heat(rollout(text, [(i, i + 1) for i in range(1000)], [0.0] * 1000, fault=Fault(700, 701, "")), 1.0)
    assert drawn.count("<span") == 400
    assert "567 tokens … " in drawn
    assert " … 33 tokens" in drawn
    assert 'class="e"' in drawn


def test_choice_is_varied() -> None:
    fault, late = Fault(0, 1, "wrong"), Fault(8, 9, "wrong")

    def make(problem: str, group: int, reward: float, fault: Fault | None) -> Rollout:
        return rollout("x" * 10, [], [], problem_id=problem, group_id=group, reward=reward, fault=fault)

    right = [make(f"p{g}", g, 1.0, None) for g in range(4)]
    batch = [*right, make("p0", 0, 0.0, fault), make("p1", 1, 0.0, late), make("dead", 9, 0.0, fault)]
    assert [(r.problem_id, r.reward) for r in choose(batch, 4)] == [("p0", 0), ("p1", 0), ("p2", 1), ("dead", 0)]
    assert len(choose(batch, 6)) == 6
    assert choose([], 5) == []


def test_mean_curve_on_shared_and_on_differing_positions() -> None:
    assert mean_curve([([0, 10], [0.0, 1.0]), ([0, 10, 20], [0.5, 0.5, 9.0])]) == ([0, 10], [0.25, 0.75])
    x, y = mean_curve([([0, 10, 20], [0.0, 1.0, 1.0]), ([0, 5, 16], [0.0, 0.5, 0.5])])
    assert x == [0, 10, 16]
    assert y == pytest.approx([0.0, 0.75, 0.75])
    assert mean_curve([]) == ([], [])
    assert band([([0, 1], [0.5, 0.5])]) == ([], [])


def test_strategies_are_told_apart_by_more_than_colour() -> None:
    looks = [look(index) for index in range(29)]
    assert len({(one.colour, one.marker, one.dashes) for one in looks}) == 29
    assert len({(one.colour, one.marker) for one in looks[:8]}) == 8


def test_labels_keep_their_distance() -> None:
    placed = spread_labels([50.0, 50.0, 51.0, 99.0, 0.0], 10.0, 100.0)
    ordered = sorted(placed)
    assert all(b - a >= 10.0 - 1e-9 for a, b in pairwise(ordered))
    assert min(placed) >= 0.0
    assert max(placed) <= 100.0


def test_ticks_hold_zero_and_stay_few() -> None:
    for low, high in ((-0.01, 0.012), (-0.04, 0.3), (-0.9, 0.2), (-1.0, 1.0)):
        ticks = build._ticks(low, high)
        assert 0.0 in ticks
        assert len(ticks) <= 6
