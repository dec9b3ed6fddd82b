"""Calibration: bins that hold each step once, and their error by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.reliability import bin_edges, calibration_bins, expected_calibration_error


def test_calibration_error_by_hand_in_both_kinds_of_bins() -> None:
    labels, scores = np.array([0.0, 1.0, 1.0, 1.0]), np.array([0.05, 0.15, 0.15, 0.95])
    width = calibration_bins(labels, scores, "width", 10)
    assert [b.steps for b in width] == [1, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    assert expected_calibration_error(width) == pytest.approx((0.05 + 2 * 0.85 + 0.05) / 4)
    mass = calibration_bins(labels, scores, "mass", 2)
    assert [b.steps for b in mass] == [1, 3]  # equal scores share a bin
    assert expected_calibration_error(mass) == pytest.approx((0.05 + 3 * abs(1 - 1.25 / 3)) / 4)


def test_score_of_one_falls_into_the_last_bin() -> None:
    assert calibration_bins(np.ones(2), np.ones(2))[-1].steps == 2
    assert [b.steps for b in calibration_bins(np.ones(4), np.array([0.3, 0.3, 1.0, 1.0]), "mass", 2)] == [2, 2]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_every_step_is_in_exactly_one_bin(rows: list[tuple[bool, float]], bins: int) -> None:
    labels, scores = np.array([float(right) for right, _ in rows]), np.array([score for _, score in rows])
    for kind in ("width", "mass"):
        edges = bin_edges(scores, kind, bins)
        assert np.all(np.diff(edges) > 0)
        assert len(edges) <= bins + 1
        table = calibration_bins(labels, scores, kind, bins)
        assert sum(b.steps for b in table) == len(rows)
        assert 0 <= expected_calibration_error(table) <= 1
        for b in table:
            assert b.steps == 0 or b.low - 1e-12 <= b.probability <= b.high + 1e-12
