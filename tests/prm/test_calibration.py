"""Laws of calibrations: known values, rising, plain numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from apportion.prm.calibration import (
    Isotonic,
    Platt,
    calibration_from_json,
    calibration_to_json,
    fit_calibration,
)
from apportion.verifiers import InputError

CHANCES = st.floats(0, 1)


def test_isotonic_pools_neighbours_that_fall() -> None:
    fitted = fit_calibration([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1])
    assert fitted([0.1, 0.2, 0.25, 0.3, 0.4]).tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 1])
    assert fitted([0.0, 1.0]).tolist() == [0, 1]
    assert fit_calibration([0.3, 0.3, 0.3], [1, 0, 0])([0.9]).tolist() == pytest.approx([1 / 3])


def test_isotonic_is_the_librarys() -> None:
    rng = np.random.default_rng(0)
    x = rng.random(400)
    y = (rng.random(400) < x**2).astype(float)
    grid = np.linspace(0, 1, 101)
    expected = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x, y).predict(grid)
    assert fit_calibration(x.tolist(), y.tolist())(grid) == pytest.approx(expected, abs=1e-12)


def test_platt_has_platts_targets_at_its_fitted_points() -> None:
    # Two scores, two numbers to fit: each score gets the mean of its targets. Four right, two wrong:
    # 5/6 stands for right, 1/4 for wrong.
    fitted = fit_calibration([0.9] * 4 + [0.2] * 2, [1, 1, 1, 0, 0, 1], method="platt")
    assert fitted([0.9, 0.2]) == pytest.approx([(3 * 5 / 6 + 1 / 4) / 4, (5 / 6 + 1 / 4) / 2], abs=1e-5)


def test_platt_of_separable_and_of_one_sided_labels_stays_finite() -> None:
    apart = fit_calibration([0.2, 0.9], [0, 1], method="platt")
    assert apart([0.2, 0.9]) == pytest.approx([1 / 3, 2 / 3], abs=1e-5)
    right = fit_calibration([0.6, 0.7, 0.9], [1, 1, 1], method="platt")
    assert right([0.0, 1.0]) == pytest.approx([0.8, 0.8], abs=1e-3)


def test_soft_labels_count_in_part() -> None:
    assert fit_calibration([0.5], [0.3])([0.1]).tolist() == [0.3]
    fitted = fit_calibration([0.3] * 2 + [0.8] * 2, [0.25, 0.25, 0.75, 0.75], method="platt")
    right = 0.25 * 3 / 4 + 0.75 / 4
    assert fitted([0.3, 0.8]) == pytest.approx([right, 1 - right], abs=1e-5)


def test_unlabelled_steps_are_left_out() -> None:
    with_none = fit_calibration([0.1, 0.5, 0.9], [0, None, 1])
    assert with_none == fit_calibration([0.1, 0.9], [0, 1])


@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_scores_that_go_against_the_labels_become_the_share_of_right(method: Any) -> None:
    fitted = fit_calibration([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0], method=method)
    assert fitted([0.1, 0.9]) == pytest.approx([0.5, 0.5])


@given(
    rows=st.lists(st.tuples(CHANCES, st.booleans()), min_size=1, max_size=30),
    method=st.sampled_from(["isotonic", "platt"]),
)
@settings(max_examples=60, deadline=None)
def test_order_is_never_turned_round_and_json_keeps_every_number(rows: Any, method: Any) -> None:
    fitted = fit_calibration([p for p, _ in rows], [float(label) for _, label in rows], method=method)
    grid = np.array(sorted([0, 1, 1e-12, 1 - 1e-12, *np.linspace(0, 1, 21), *(p for p, _ in rows)]))
    values = fitted(grid)
    assert (np.diff(values) >= 0).all()
    assert 0 <= values[0] <= values[-1] <= 1
    assert calibration_from_json(json.loads(json.dumps(calibration_to_json(fitted)))) == fitted


def test_platt_moves_log_odds() -> None:
    fitted = Platt(2.0, 1.0)
    for p in (0.1, 0.5, 0.97):
        (value,) = fitted([p])
        assert math.log(value / (1 - value)) == pytest.approx(2 * math.log(p / (1 - p)) + 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"method": "beta"}, "unknown"),
        ({"method": "platt", "slope": 1.0}, "intercept"),
        ({"method": "platt", "slope": -1.0, "intercept": 0.0}, "slope -1.0"),
        ({"method": "platt", "slope": float("nan"), "intercept": 0.0}, "slope nan"),
        ({"method": "isotonic", "x": [0.1, 0.1], "y": [0, 1]}, "rising"),
        ({"method": "isotonic", "x": [0.1, 0.2], "y": [1, 0]}, "not falling"),
        ({"method": "isotonic", "x": [], "y": []}, "isotonic"),
        ({"method": "isotonic", "x": [0.1], "y": [1.5]}, "within"),
    ],
)
def test_files_that_hold_no_calibration_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibration_from_json(record)


def test_nothing_to_fit_on_is_refused() -> None:
    for labels in ([], [None]):
        with pytest.raises(InputError, match="no labelled step"):
            fit_calibration([0.5] * len(labels), labels)
    with pytest.raises(InputError, match="isotonic or platt"):
        fit_calibration([0.5], [1.0], method="beta")  # type: ignore[arg-type]
    for probabilities, labels in (([0.5], [2.0]), ([1.5], [1.0]), ([float("nan")], [1.0]), ([0.5, 0.5], [1.0])):
        with pytest.raises(ValueError, match=r"must lie|probabilities and"):
            fit_calibration(probabilities, labels)


def test_an_isotonic_of_one_point_is_flat() -> None:
    assert Isotonic((0.5,), (0.25,))([0.0, 0.5, 1.0]).tolist() == [0.25] * 3
