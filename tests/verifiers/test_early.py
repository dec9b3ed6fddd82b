"""Asked early or at the end, the panel says the same."""

import threading

import pytest

from apportion.verifiers import Sample, Verdict
from apportion.verifiers.early import EarlyJudging
from apportion.verifiers.panel import Panel

SAMPLES = [Sample("p", text) for text in ("a", "bb", "", "dddd", "boom")]


class Waiting:
    background = True

    def __init__(self):
        self.asked = []
        self.threads = set()

    def __call__(self, samples):
        self.asked.append([sample.completion for sample in samples])
        self.threads.add(threading.current_thread())
        if any(sample.completion == "boom" for sample in samples):
            raise RuntimeError("boom")
        return [float(len(sample.completion)) for sample in samples]


def here(samples):
    assert threading.current_thread() is threading.main_thread()
    return [Verdict(0.5)] * len(samples)


@pytest.mark.parametrize("parts", [[], [[3], [1, 0]], [[4], [0, 1, 2, 3]]])
def test_the_parts_make_no_difference(parts):
    waiting = Waiting()
    panel = Panel({"here": here, "waiting": waiting}, {})
    with EarlyJudging(panel) as judging:
        for rows in parts:
            judging.submit(rows, [SAMPLES[row] for row in rows])
        result = judging.finish(SAMPLES)
    expected = panel.judge(SAMPLES)
    assert (
        (result.verdicts, result.errors)
        == (expected.verdicts, expected.errors)
        == (
            expected.verdicts,
            {
                "here": 0,
                "waiting": 1,
            },
        )
    )
    assert list(result.verdicts[0]) == ["here", "waiting"]
    assert "RuntimeError: boom" in result.first_error["waiting"]
    assert waiting.asked[: len(parts)] == [[SAMPLES[row].completion for row in rows] for rows in parts]


def test_each_sample_is_asked_about_once():
    waiting = Waiting()
    with EarlyJudging(Panel({"waiting": waiting}, {})) as judging:
        judging.submit([2, 0], [SAMPLES[2], SAMPLES[0]])
        judging.finish(SAMPLES[:4])
    assert sorted(waiting.asked) == [["", "a"], ["bb", "dddd"]]
    assert threading.main_thread() not in waiting.threads


def test_nobody_is_asked_early_who_computes_in_python():
    calls = []

    def counting(samples):
        calls.append(len(samples))
        return here(samples)

    with EarlyJudging(Panel({"counting": counting}, {})) as judging:
        assert not judging.wanted
        judging.submit([0], SAMPLES[:1])
        assert calls == []
        judging.finish(SAMPLES)
    assert calls == [5]


def test_no_samples_no_questions():
    with EarlyJudging(Panel({"waiting": Waiting()}, {})) as judging:
        result = judging.finish([])
    assert (result.verdicts, result.errors) == ([], {"waiting": 0})
