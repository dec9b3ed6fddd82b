"""Laws of the alarms of drift: each rule by hand numbers, and that they read nothing but the metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.grpo.config import TrainerConfig
from apportion.grpo.drift import (
    WATCHED,
    DriftConfig,
    Drifted,
    drift_alarms,
    drift_config,
    drift_metrics,
    read_history,
    watched,
)
from apportion.verifiers import InputError

SHORT = DriftConfig(window=2)


def alarms(rows, config=SHORT):
    return {alarm.name: (alarm.value, alarm.on) for alarm in drift_alarms(rows, config)}


def course(key, *values):
    return [{key: value} for value in values]


def test_entropy_is_held_against_that_of_the_start():
    # mean of the first two is 0.2, of the latest two 0.5
    found = alarms(course("policy/entropy", 0.1, 0.3, 0.9, 0.4, 0.6))
    assert found["entropy_explosion"] == (pytest.approx(2.5), True)
    assert found["entropy_collapse"] == (pytest.approx(2.5), False)
    assert alarms(course("policy/entropy", 0.2, 0.2, 0.01, 0.02))["entropy_collapse"] == (pytest.approx(0.075), True)
    assert alarms(course("policy/entropy", 0.2, 0.2, 0.4, 0.4))["entropy_explosion"] == (pytest.approx(2.0), False)


def test_the_kl_is_the_last_that_was_measured():
    rows = [*course("policy/ref_kl", 0.1, 0.6), {}, {}]
    assert alarms(rows)["kl"] == (0.6, True)
    assert alarms(rows[:1])["kl"] == (0.1, False)


def test_a_gradient_is_held_against_the_median_of_those_before():
    rows = course("optim/grad_norm", 1.0, 2.0, 3.0, 4.0, 50.0)
    assert "grad_spike" not in alarms(rows)  # four before it are too few
    rows = course("optim/grad_norm", 1.0, 2.0, 3.0, 4.0, 50.0, 33.0)
    assert alarms(rows)["grad_spike"] == (pytest.approx(11.0), True)
    later = [*rows, {"optim/grad_norm": 3.0}]
    assert alarms(later)["grad_spike"] == (pytest.approx(3.0 / 3.5), False)  # a spike is over when the norm is small
    assert "grad_spike" not in alarms([*rows, {}])


def test_the_median_looks_back_as_far_as_it_is_told():
    rows = course("optim/grad_norm", *[1.0] * 10, *[10.0] * 5, 20.0)
    assert alarms(rows, DriftConfig(grad_window=5))["grad_spike"] == (pytest.approx(2.0), False)
    assert alarms(rows, DriftConfig(grad_window=15))["grad_spike"] == (pytest.approx(20.0), True)


def test_an_update_that_was_left_out_is_a_spike_without_a_number():
    value, on = alarms([{"optim/skipped_updates": 1.0}])["grad_spike"]
    assert math.isnan(value)
    assert on
    assert "grad_spike" not in alarms([{"optim/skipped_updates": 0.0}])
    assert "grad_spike" not in alarms([{"optim/skipped_updates": 1.0}], DriftConfig(grad_spike=None))


def test_groups_that_are_all_right_are_not_sick():
    starved = [{"reward/dead_groups": 1.0, "reward/dead_groups_right": 0.0}] * 4
    solved = [{"reward/dead_groups": 1.0, "reward/dead_groups_right": 1.0}] * 4
    assert alarms(starved)["dead_groups"] == (1.0, True)
    assert alarms(solved)["dead_groups"] == (0.0, False)


@pytest.mark.parametrize(("late", "on"), [(14.0, False), (16.0, True), (7.0, False), (6.0, True)])
def test_length_drifts_both_ways(late, on):
    assert alarms(course("length/mean", 8.0, 12.0, late, late))["length"] == (pytest.approx(late / 10), on)


def test_format_drifts_by_its_fall_and_a_rise_is_none():
    assert alarms(course("format/pass_rate", 1.0, 0.9, 0.8, 0.8))["format"] == (pytest.approx(0.15), True)
    assert alarms(course("format/pass_rate", 0.5, 0.5, 1.0, 1.0))["format"] == (pytest.approx(-0.5), False)


def test_nothing_is_said_while_start_and_now_overlap():
    rows = [{"policy/entropy": 1.0, "length/mean": 9.0, "format/pass_rate": 1.0, "reward/dead_groups": 1.0}] * 3
    assert alarms(rows) == {}
    assert set(alarms([*rows, rows[0]])) == {"entropy_collapse", "entropy_explosion", "length", "format", "dead_groups"}
    assert drift_alarms([]) == []


def test_null_watches_nothing():
    rows = [dict.fromkeys(WATCHED, 1.0)] * 10
    off = dict.fromkeys(["entropy_low", "entropy_high", "kl", "grad_spike", "dead_groups", "length", "format"])
    assert drift_alarms(rows, DriftConfig(**off)) == []


numbers = st.floats(-1e300, 1e300)
lines = st.lists(st.dictionaries(st.sampled_from(WATCHED), numbers), max_size=14)


@settings(max_examples=100, deadline=None)
@given(lines)
def test_any_history_can_be_told_and_each_flag_is_zero_or_one(rows):
    told = drift_metrics(rows, SHORT)
    assert all(value in (0.0, 1.0) for key, value in told.items() if key.removeprefix("alarm/") in alarms(rows))
    assert len(told) <= 13


@settings(max_examples=50, deadline=None)
@given(lines, numbers)
def test_what_is_not_watched_changes_nothing(rows, value):
    more = [{**row, "reward/mean": value} for row in rows]
    assert repr(drift_alarms(more, SHORT)) == repr(drift_alarms(rows, SHORT))
    assert [watched(row) for row in more] == rows


def test_a_run_that_goes_on_reads_the_same_history_from_its_file(tmp_path: Path):
    rows = [{"step": step, "policy/entropy": 0.1 / (step + 1), "reward/mean": 1.0} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "pol')
    history = read_history(tmp_path / "metrics.jsonl")
    assert history == [{"policy/entropy": row["policy/entropy"]} for row in rows]
    assert read_history(tmp_path / "none.jsonl") == []


def test_a_run_stops_only_where_it_was_asked_to():
    rows = course("policy/ref_kl", 0.7)
    SHORT.heed(3, rows)
    with pytest.raises(
        Drifted, match=r"stopped after step 3: the KL to the starting weights is 0\.7 .*limit 0\.5\); low"
    ):
        DriftConfig(stop=True).heed(3, rows)
    DriftConfig(stop=True).heed(3, course("policy/ref_kl", 0.4))


REFUSED = {
    "no window": ({"window": 0}, r"run\.drift\.window=0: must be a whole number of at least 1"),
    "true for a number": ({"window": True}, r"run\.drift\.window=True: must be a whole number"),
    "a limit under one": ({"length": 0.5}, r"run\.drift\.length=0\.5: must be a number of at least 1, or null"),
    "text": ({"kl": "high"}, r"run\.drift\.kl='high': must be a number of at least 0"),
    "text for the switch": ({"stop": "yes"}, r"run\.drift\.stop='yes': must be true or false"),
    "unknown": ({"entropy": 1}, r"run\.drift\.entropy: no such option; there are window, entropy_low"),
    "not a number": ({"kl": math.nan}, r"run\.drift\.kl=nan: must be a number"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_limits_are_refused_in_one_line(kind):
    options, line = REFUSED[kind]
    with pytest.raises(InputError, match=line):
        drift_config(options)
    with pytest.raises(InputError, match=line):
        TrainerConfig(drift=options)


def test_the_trainers_options_take_them_as_a_mapping():
    assert TrainerConfig(drift={"kl": 0.1}).drift == DriftConfig(kl=0.1)
    assert TrainerConfig(drift=None).drift == DriftConfig()


# In a run


class FallsFromTheThirdBatch:
    """A format that all answers have, and none from the third batch on; the evaluation before them is a call too."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return [float(self.calls <= 3)] * len(samples)


def drifting(new_run, folder, **drift):
    verifiers = {
        "answer": lambda samples: [float(len(s.completion) % 2) for s in samples],
        "format": FallsFromTheThirdBatch(),
    }
    options = {"steps": 6, "eval_every": 0, "reference_kl": False, "drift": {"window": 2, **drift}}
    return new_run(folder, verifiers=verifiers, config=options)


def test_a_run_logs_every_alarm_it_can_tell_and_goes_on(new_run, tmp_path):
    run = drifting(new_run, tmp_path)
    assert run.train() == "finished"
    assert [row.get("alarm/format") for row in run.rows] == [None, None, None, None, 1.0, 1.0, 1.0]
    assert run.rows[4]["alarm/format_fall"] == 1.0
    for step in range(1, 7):
        told = drift_metrics([watched(row) for row in run.rows[: step + 1]], DriftConfig(window=2))
        assert {key: run.rows[step][key] for key in run.rows[step] if key.startswith("alarm/")} == {
            key: value for key, value in told.items() if not math.isnan(value)
        }


def test_a_run_that_was_asked_to_stops_with_a_checkpoint_and_its_reason(new_run, tmp_path):
    run = drifting(new_run, tmp_path, stop=True)
    with pytest.raises(Drifted, match=r"stopped after step 4: .*the format's pass rate fell by 1 \(limit 0\.1\)"):
        run.train()
    assert (run.status["state"], [row["step"] for row in run.rows]) == ("failed", [0, 1, 2, 3, 4])
    with pytest.raises(Drifted, match="stopped after step 4"):  # and the same command does not go on
        drifting(new_run, tmp_path, stop=True).train()


def test_what_was_seen_survives_a_stop(new_run, tmp_path):
    first = drifting(new_run, tmp_path, stop=True)
    first.stop_after(7)  # half-way through the fourth batch
    assert first.train() == "interrupted"
    second = drifting(new_run, tmp_path, stop=True)
    second.trainer.panel.verifiers["format"].calls = 4
    with pytest.raises(Drifted, match="stopped after step 4"):
        second.train()
