"""Alarms count what they say, and stop a run by their rule and no earlier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import Rollout, collate
from apportion.grpo.alarms import AlarmConfig, alarm_metrics, check_alarms, divergence, step_labels
from apportion.grpo.checkpoint import latest_checkpoint
from apportion.grpo.config import TrainerConfig
from apportion.verifiers import InputError, Sample, Span, Verdict

NewRun = Callable[..., Any]


def rollout(prm: Sequence[Span], truth: Sequence[Span] = (), score: float | None = 0.0, length: int = 12) -> Rollout:
    """One character a token."""
    verdicts = {"prm": Verdict(0.5, tuple(prm)), "truth": Verdict(score, tuple(truth))}
    offsets = [(at, at + 1) for at in range(length)]
    return Rollout([1], [5] * length, [0.0] * length, offsets, "x" * length, 0, verdicts=verdicts)


BOTH = AlarmConfig("prm", "truth")


def alarms(rows: Sequence[Rollout], config: AlarmConfig = BOTH) -> dict[str, float]:
    found = alarm_metrics(rows, collate(rows), config)
    assert all(key.startswith("alarm/") for key in found)
    return {key.removeprefix("alarm/"): value for key, value in found.items()}


# What is measured


def test_the_numbers_of_a_batch_by_hand() -> None:
    rows = [
        rollout([Span(0, 4, 0.8), Span(4, 10, 0.4)], [Span(0, 4, 1.0), Span(4, 10, 0.0)], 0.0),
        rollout([Span(0, 2, 0.9)], [Span(0, 2, 1.0)], 1.0),
        rollout([], [Span(0, 3, 1.0)], None),
    ]
    found = alarms(rows)
    assert found == pytest.approx(
        {
            "prm_mean": (0.6 + 0.9) / 2,  # of answers: many steps weigh no more than few
            "reference_mean": 0.5,
            "gap": 0.25,
            "steps": 1.0,
            "step_tokens": 4.0,
            "without_steps": 1 / 3,
            "uncovered_steps": 0.0,
            "min_at_last": 1.0,  # of the one answer with two steps
            "min_at_last_chance": 0.5,
            "brier": (0.2**2 + 0.4**2 + 0.1**2) / 3,
            "ece": (0.2 + 0.4 + 0.1) / 3,
        }
    )


def test_without_a_reference_only_the_shape_is_told() -> None:
    found = alarms([rollout([Span(0, 2, 0.25), Span(2, 4, 0.5)])], AlarmConfig("prm"))
    assert found == {
        "prm_mean": 0.375,
        "steps": 2.0,
        "step_tokens": 2.0,
        "without_steps": 0.0,
        "uncovered_steps": 0.0,
        "min_at_last": 0.0,
        "min_at_last_chance": 0.5,
    }
    assert alarms([rollout([])], AlarmConfig()) == {}


def test_a_step_that_no_token_covers_is_counted() -> None:
    rows = [rollout([Span(0, 2, 1.0), Span(7, 9, 1.0)], length=4)]
    found = alarms(rows, AlarmConfig("prm"))
    assert (found["steps"], found["uncovered_steps"], found["step_tokens"]) == (2.0, 1.0, 2.0)


def test_what_cannot_be_told_is_missing_and_not_zero() -> None:
    found = alarms([rollout([], score=None)])
    assert (found["steps"], found["without_steps"]) == (0.0, 1.0)
    untold = {"prm_mean", "reference_mean", "gap", "step_tokens", "min_at_last", "min_at_last_chance", "brier", "ece"}
    assert {key for key, value in found.items() if math.isnan(value)} == untold


def test_scores_that_are_no_probabilities_have_no_calibration() -> None:
    found = alarms([rollout([Span(0, 2, 1.5)], [Span(0, 2, 1.0)])])
    assert math.isnan(found["brier"])
    assert math.isnan(found["ece"])
    assert found["prm_mean"] == 1.5


def test_spans_may_come_in_any_order() -> None:
    falling, rising = Span(0, 2, 0.9), Span(2, 4, 0.1)
    truth = [Span(0, 2, 1.0), Span(2, 4, 0.0)]
    assert alarms([rollout([rising, falling], truth[::-1])]) == alarms([rollout([falling, rising], truth)])
    assert alarms([rollout([rising, falling], truth)])["min_at_last"] == 1.0


def test_one_wrong_character_makes_a_step_wrong() -> None:
    judged = [Span(0, 9, 1.0), Span(4, 5, 0.0)]
    assert step_labels([Span(0, 4), Span(4, 9), Span(9, 12)], judged) == [1.0, 0.0, None]


def test_what_is_missing_falls_on_the_step_in_its_place() -> None:
    steps = [Span(0, 4), Span(4, 9)]
    assert step_labels(steps, [Span(4, 4, 0.0)]) == [None, 0.0]


ranges = st.tuples(st.integers(0, 20), st.integers(0, 6), st.sampled_from([0.0, 0.4, 0.5, 1.0]))
spans = st.lists(ranges.map(lambda at: Span(at[0], at[0] + at[1], at[2])), max_size=8)


@settings(max_examples=100, deadline=None)
@given(spans.map(lambda own: [span for span in own if span.start < span.stop]), spans)
def test_labels_agree_with_a_count_over_characters(steps: list[Span], judged: list[Span]) -> None:
    def characters(span: Span) -> set[int]:
        return set(range(span.start, max(span.stop, span.start + 1)))

    for step, label in zip(steps, step_labels(steps, judged)):
        touching = [other.score for other in judged if characters(step) & characters(other)]
        assert label == (None if not touching else float(min(touching) >= 0.5))


# The rule that stops


def test_a_divergence_needs_two_whole_windows() -> None:
    rising = [(0.1 * n, 1.0 - 0.1 * n) for n in range(4)]
    assert divergence(rising[:3], 2) is None
    assert divergence(rising, 2) == pytest.approx((0.2, 0.2))
    assert divergence([(9.0, 9.0), *rising], 2) == pytest.approx((0.2, 0.2))  # what lies further back is forgotten


@pytest.mark.parametrize(
    ("rise", "fall", "stops"),
    [(0.19, 0.0, True), (0.21, 0.0, False), (0.1, 0.19, True), (0.1, 0.21, False), (None, 0.0, False)],
)
def test_it_stops_only_where_one_rose_and_the_other_fell_by_more(rise: float | None, fall: float, stops: bool) -> None:
    history = [(0.1 * n, 1.0 - 0.1 * n) for n in range(4)]
    config = AlarmConfig("prm", "truth", window=2, rise=rise, fall=fall)
    assert (config.diverged(history) is not None) == stops
    assert config.diverged([(prm, 1 - reference) for prm, reference in history]) is None  # both rise: all is well


def test_a_batch_without_a_mean_is_left_out_of_the_history() -> None:
    config = AlarmConfig("prm", "truth", window=1)
    history = [(0.5, 0.5)]
    assert config.remember(history, {"alarm/prm_mean": 0.6}) is history
    assert config.remember(history, {"alarm/prm_mean": math.nan, "alarm/reference_mean": 0.1}) is history
    assert config.moves(history) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prn": "steps"}, "run.alarms.prn: no such option; there are prm, reference, window, rise, fall"),
        ({"prm": 3}, "run.alarms.prm=3: must be the name of a verifier, or null"),
        ({"prm": "steps", "window": 0}, "run.alarms.window=0: must be a whole number of at least 1"),
        ({"prm": "steps", "reference": "truth", "rise": -0.1}, "run.alarms.rise=-0.1: must be a number of at least 0"),
        ({"prm": "steps", "fall": None}, "run.alarms.fall=None: must be a number of at least 0"),
        ({"reference": "truth"}, "run.alarms.reference: nothing is compared with it; name the model"),
        ({"prm": "steps", "rise": 0.1}, "run.alarms.rise: a divergence from what? Give run.alarms.reference="),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainerConfig(alarms=options)
    assert str(caught.value).startswith(message)


def test_off_is_nothing_a_mapping_or_null() -> None:
    assert TrainerConfig().alarms == TrainerConfig(alarms={}).alarms == TrainerConfig(alarms=None).alarms
    assert TrainerConfig(alarms={"prm": "steps"}).alarms == AlarmConfig("steps")


def test_a_verifier_that_is_not_there_or_scores_no_steps_is_refused(new_run: NewRun, tmp_path: Path) -> None:
    def plain(prompts: Any, completions: Any) -> list[float]:
        return []

    with pytest.raises(InputError, match=r"run.alarms.reference=truth: no such verifier \(there are: prm\)"):
        check_alarms(BOTH, {"prm": lambda samples: []})
    with pytest.raises(InputError, match=r"run\.alarms\.prm=prm: scores no steps; name a verifier that gives spans"):
        check_alarms(AlarmConfig("prm"), {"prm": plain})
    with pytest.raises(InputError, match=r"run\.alarms\.prm=prm: no such verifier"):
        new_run(tmp_path / "run", config={"alarms": {"prm": "prm"}})
    assert not (tmp_path / "run").exists()


class Drifting:
    """A model whose steps score better, and answers worse, from batch to batch."""

    def __init__(self, sign: float) -> None:
        self.calls, self.sign = 0, sign

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        self.calls += 1
        score = 0.5 + self.sign * 0.02 * self.calls
        return [Verdict(score, (Span(0, 1, score),)) for _ in samples]


def hacked(new_run: NewRun, folder: Path, rise: float | None, **config: Any) -> Any:
    verifiers = {"answer": Drifting(-1), "prm": Drifting(1), "format": Drifting(-1)}
    alarms = {"prm": "prm", "reference": "answer", "window": 2, "rise": rise}
    return new_run(folder, verifiers=verifiers, config={"steps": 8, "eval_every": 0, "alarms": alarms, **config})


def test_a_run_that_pleases_the_model_alone_is_stopped_with_a_checkpoint(new_run: NewRun, tmp_path: Path) -> None:
    run = hacked(new_run, tmp_path, rise=0.03)
    with pytest.raises(InputError) as caught:
        run.train()
    assert str(caught.value).startswith(
        "stopped after step 4: run.alarms: over the latest 2 rollout batches the mean step score of verifiers.prm rose "
        "by 0.040 and the mean score of verifiers.answer fell by 0.040;"
    )
    assert "\n" not in str(caught.value)
    assert run.status["state"] == "failed"
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert run.rows[4]["alarm/prm_rise"] == pytest.approx(0.04)
    assert run.rows[4]["alarm/reference_fall"] == pytest.approx(0.04)
    assert "alarm/prm_rise" not in run.rows[3]
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step_000004"
    with pytest.raises(InputError, match="stopped after step 4"):  # and the same command does not go on
        hacked(new_run, tmp_path, rise=0.03).train()


def test_without_the_rule_it_goes_on_and_is_only_told(new_run: NewRun, tmp_path: Path) -> None:
    run = hacked(new_run, tmp_path, rise=None)
    assert run.train() == "finished"
    assert run.rows[8]["alarm/prm_rise"] == pytest.approx(0.04)


def test_the_history_survives_a_stop(new_run: NewRun, tmp_path: Path) -> None:
    first = hacked(new_run, tmp_path, rise=0.03)
    first.stop_after(7)  # half-way through the fourth batch
    assert first.train() == "interrupted"
    second = hacked(new_run, tmp_path, rise=0.03)
    assert len(second.trainer.state.alarms) == 3
    with pytest.raises(InputError, match="stopped after step 4"):
        second.train()
