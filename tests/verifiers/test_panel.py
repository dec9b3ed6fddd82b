import asyncio
import functools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.panel import gives_spans, judge, weighted_reward

SAMPLES = [Sample("p0", "one"), Sample("p1", "two\nlines"), Sample("p2", "")]


def scores(result, name):
    return [row[name].score for row in result.verdicts]


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def ask(reply, samples=SAMPLES):
    return judge({"v": lambda _: reply}, samples)


def test_every_sample_has_every_verifier():
    result = judge({"a": lambda s: [1] * len(s), "b": lambda s: [None] * len(s)}, SAMPLES)
    assert [list(row) for row in result.verdicts] == [["a", "b"]] * 3
    assert (scores(result, "a"), scores(result, "b")) == ([1.0] * 3, [None] * 3)
    assert (result.errors, result.first_error) == ({"a": 0, "b": 0}, {})


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (True, 1.0),
        (0, 0.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(3), 3.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (Verdict(0.5), 0.5),
        (Verdict(np.float64(0.5)), 0.5),
        (None, None),
        (Verdict(None), None),
    ],
)
def test_numbers_of_any_kind_become_plain_floats_and_none_abstains(reply, score):
    result = ask([reply] * 3)
    assert scores(result, "v") == [score] * 3
    assert result.errors == {"v": 0}
    assert {type(value) for value in scores(result, "v")} == {type(score)}


@pytest.mark.parametrize(
    "reply", [math.nan, math.inf, -math.inf, "1.0", np.str_("1.0"), b"1", [1.0], np.array([1.0, 2.0]), {"score": 1}, 1j]
)
def test_what_is_no_number_abstains_and_is_counted(reply):
    result = ask([1.0, reply, 0.0])
    assert scores(result, "v") == [1.0, None, 0.0]
    assert result.errors == {"v": 1}


def test_containers_other_than_lists_are_read_and_generators_too():
    for reply in ((1.0, 0.0, 1.0), np.array([1, 0, 1]), (value for value in (1, 0, 1))):
        assert scores(ask(reply), "v") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reply", [1.0, None, "abc", {0: 1.0, 1: 1.0, 2: 1.0}, {1.0, 0.0, 0.5}, Verdict(1.0)])
def test_a_reply_that_is_no_list_is_never_spread_over_the_batch(reply):
    result = ask(reply)
    assert scores(result, "v") == [None] * 3
    assert result.errors == {"v": 3}
    assert "v" in result.first_error["v"]


@pytest.mark.parametrize("length", [0, 1, 2, 4, 1000])
def test_a_reply_of_the_wrong_length_is_never_a_reward(length):
    assert scores(ask([1.0] * length), "v") == [None] * 3


def test_an_endless_reply_is_cut_short():
    def endless(samples):
        while True:
            yield 1.0

    assert judge({"v": endless}, SAMPLES).errors == {"v": 3}


def test_a_bad_sample_does_not_cost_the_others():
    def raises(samples):
        return [1.0 / len(sample.completion) for sample in samples]

    result = judge({"v": raises}, SAMPLES)
    assert (scores(result, "v"), result.errors) == ([1 / 3, 1 / 9, None], {"v": 1})


def test_a_wrong_length_costs_the_batch_for_no_verdict_has_a_sample():
    def drops(samples):
        return [1.0 for sample in samples if sample.completion]

    for verifier, words in ((drops, "returned 2 verdicts for 3 samples"), (lambda _: [1.0], "returned 1 verdicts")):
        result = judge({"v": verifier}, SAMPLES)
        assert (scores(result, "v"), result.errors) == ([None] * 3, {"v": 3})
        assert words in result.first_error["v"]


def test_a_fault_of_the_batch_that_no_sample_shares_is_shown_but_costs_nothing():
    def one_at_a_time(samples):
        if len(samples) > 1:
            raise MemoryError("too many")
        return [0.5]

    result = judge({"v": one_at_a_time}, SAMPLES)
    assert (scores(result, "v"), result.errors) == ([0.5] * 3, {"v": 0})
    assert "MemoryError: too many" in result.first_error["v"]


def test_a_single_sample_is_not_asked_twice():
    calls = []

    def failing(samples):
        calls.append(len(samples))
        raise RuntimeError

    judge({"v": failing}, SAMPLES[:1])
    assert calls == [1]


def test_one_verifier_at_fault_leaves_the_others_alone():
    def broken(samples):
        samples.clear()
        raise RuntimeError("no")

    result = judge({"broken": broken, "sound": lambda s: [len(x.completion) for x in s]}, SAMPLES)
    assert scores(result, "sound") == [3.0, 9.0, 0.0]
    assert result.errors == {"broken": 3, "sound": 0}


def test_the_first_error_is_one_line_with_verifier_exception_and_completion():
    def failing(samples):
        raise ValueError("bad\n\x1b[31m" + "x" * 5000)

    line = judge({"judge": failing}, SAMPLES[1:]).first_error["judge"]
    assert line.startswith("verifier 'judge': ValueError: bad ?[31mxxx")
    assert line.endswith("(completion 'two\\nlines')")
    assert len(line) < 300
    assert line.isprintable()


def test_an_exception_that_cannot_be_printed_is_still_only_an_error():
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError

    def failing(samples):
        raise Rude

    assert judge({"v": failing}, SAMPLES).errors == {"v": 3}


def test_a_verifier_cannot_end_the_run_but_its_user_can():
    def leave(samples):
        raise SystemExit(0)

    def interrupted(samples):
        raise KeyboardInterrupt

    assert judge({"v": leave}, SAMPLES).errors == {"v": 3}
    with pytest.raises(KeyboardInterrupt):
        judge({"v": interrupted}, SAMPLES)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, type("PanicException", (BaseException,), {})])
def test_no_kind_of_exception_leaves_the_panel(kind):
    def failing(samples):
        raise kind("gone")

    result = judge({"v": failing}, SAMPLES, timeout_s=5)
    assert (scores(result, "v"), result.errors) == ([None] * 3, {"v": 3})
    assert f"{kind.__name__}: gone" in result.first_error["v"]


def test_spans_lie_inside_the_completion():
    inside, beyond = Verdict(1.0, (Span(0, 3, 1.0),)), Verdict(1.0, (Span(0, 3), Span(3, 4)))
    result = judge({"v": lambda _: [inside, beyond]}, [Sample("", "one")] * 2)
    assert [row["v"] for row in result.verdicts] == [inside, Verdict(None)]
    assert result.errors == {"v": 1}
    assert "[3, 4) for a completion of 3 characters" in result.first_error["v"]


@pytest.mark.parametrize("spans", [[(0, 1)], (None,), [Span(0, 1, 1.0), "x"]])
def test_spans_of_another_kind_are_faults(spans):
    assert ask([Verdict(1.0, spans)] * 3).errors == {"v": 3}


def test_a_list_of_spans_with_numpy_numbers_becomes_plain():
    (row,) = judge({"v": lambda _: [Verdict(1, [Span(np.int64(0), np.int64(2), np.float32(1))])]}, SAMPLES[:1]).verdicts
    assert row["v"] == Verdict(1.0, (Span(0, 2, 1.0),))
    assert type(row["v"].spans[0].start) is int


def test_no_samples_ask_nobody():
    result = judge({"v": lambda _: 1 / 0}, [])
    assert (result.verdicts, result.errors, result.first_error) == ([], {"v": 0}, {})


ROWS = [
    Sample("q0", "4", reference="4", metadata={"level": 1, "only_here": 2, "completion_ids": [7]}),
    Sample("q1", "5", reference="6", metadata={"level": 3, "completion_ids": [8, 9]}),
]


def test_a_trl_function_gets_the_columns_that_every_sample_has():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [float(a == b) for a, b in zip(completions, columns["reference"])]

    assert scores(judge({"v": reward}, ROWS), "v") == [1.0, 0.0]
    assert seen == {
        "prompts": ["q0", "q1"],
        "completions": ["4", "5"],
        "reference": ["4", "6"],
        "level": [1, 3],
        "completion_ids": [[7], [8, 9]],
    }


def test_a_trl_function_without_keywords_gets_what_it_names():
    class Exact:
        def __call__(self, completions, level):
            return [float(x) for x in level]

    assert scores(judge({"v": Exact()}, ROWS), "v") == [1.0, 3.0]
    assert scores(
        judge({"v": functools.partial(lambda scale, completions: [scale] * len(completions), 2)}, ROWS), "v"
    ) == [2, 2]


def test_a_missing_reference_is_a_fault_of_that_sample_and_not_a_wrong_answer():
    def exact(completions, reference, **_):
        return [float(a == b) for a, b in zip(completions, reference)]

    result = judge({"v": exact}, [*ROWS, Sample("q2", "7")])
    assert scores(result, "v") == [1.0, 0.0, None]
    assert result.errors == {"v": 1}


def test_columns_cannot_replace_the_texts():
    def reward(prompts, completions, **columns):
        return [float(prompts == ["q"] and completions == ["c"] and columns == {"reference": ["r"]})]

    metadata = {"completions": "x", "prompts": "y", "reference": "z", 3: "w"}
    assert scores(judge({"v": reward}, [Sample("q", "c", "r", metadata)]), "v") == [1.0]


def test_an_async_function_is_awaited():
    async def reward(completions, **_):
        return [0.5] * len(completions)

    assert scores(judge({"v": reward}, ROWS), "v") == [0.5, 0.5]


def test_who_gives_spans():
    class Silent:
        spans = False

        def __call__(self, samples):
            return [1.0] * len(samples)

    class Locating:
        spans = True

        def __call__(self, prompts, completions):
            return [Verdict(1.0, (Span(0, 1),))] * len(completions)

    assert not gives_spans(lambda prompts, completions, **columns: [])
    assert gives_spans(lambda samples: [])
    assert not gives_spans(Silent())
    assert gives_spans(Locating())
    assert gives_spans(len)


def test_abstentions_do_not_count_and_all_abstaining_is_no_reward():
    verdicts = {"a": Verdict(1.0), "b": Verdict(None), "c": Verdict(-0.5)}
    assert weighted_reward(verdicts, {"a": 2.0, "b": 5.0, "c": 1.0}) == 1.5
    assert weighted_reward(verdicts, {"b": 5.0}) is None
    assert weighted_reward(verdicts, {}) is None


def test_a_weight_of_zero_does_not_turn_an_abstention_into_a_reward():
    verdicts = {"a": Verdict(None), "b": Verdict(1.0)}
    assert weighted_reward(verdicts, {"a": 1.0, "b": 0.0}) is None
    assert weighted_reward(verdicts, {"b": 0.0}) == 0.0


def test_a_weight_must_name_a_verifier_and_be_a_number():
    with pytest.raises(InputError, match=r"^reward\.speling: no verifier has this name; verifiers: spelling$"):
        weighted_reward({"spelling": Verdict(1.0)}, {"speling": 1.0})
    for weight in (math.nan, math.inf, "1"):
        with pytest.raises(InputError, match=r"^reward\.spelling: "):
            weighted_reward({"spelling": Verdict(1.0)}, {"spelling": weight})


def test_an_exception_among_the_replies_is_the_fault_of_its_sample_alone():
    calls = []

    def verifier(samples):
        calls.append(len(samples))
        return [1.0, ConnectionError("server gone"), 0.0]

    result = judge({"v": verifier}, SAMPLES)
    assert (calls, scores(result, "v"), result.errors) == ([3], [1.0, None, 0.0], {"v": 1})
    assert result.first_error["v"] == "verifier 'v': ConnectionError: server gone (completion 'two\\nlines')"


@pytest.mark.parametrize("run", [lambda call: call(), in_thread], ids=["main thread", "other thread"])
def test_a_hanging_sample_costs_the_others_nothing(run):
    over = threading.Event()

    def hangs_on_two(samples):
        if any("two" in sample.completion for sample in samples):
            over.wait(60)
        return [1.0] * len(samples)

    result = run(lambda: judge({"v": hangs_on_two}, SAMPLES, timeout_s=0.1))
    over.set()
    assert (scores(result, "v"), result.errors) == ([1.0, None, 1.0], {"v": 1})
    assert "TimeoutError: gave no answer in 0.1 s" in result.first_error["v"]


def test_the_time_limit_holds_while_a_reply_is_read():
    class Slow:
        def __float__(self):
            threading.Event().wait(60)
            return 1.0

    def spans():
        threading.Event().wait(60)
        yield Span(0, 1)

    def verifier(samples):
        replies = {"one": Slow(), "two\nlines": Verdict(1.0, spans()), "": 1.0}
        return [replies[sample.completion] for sample in samples]

    result = judge({"v": verifier}, SAMPLES[::-1], timeout_s=0.1)
    assert (scores(result, "v"), result.errors) == ([1.0, None, None], {"v": 2})


def test_after_two_hanging_samples_the_rest_is_not_asked():
    asked = []

    def verifier(samples):
        asked.append(len(samples))
        time.sleep(60)

    result = judge({"v": verifier, "w": lambda s: [1.0] * len(s)}, [Sample("", "x")] * 5, timeout_s=0.05)
    assert (asked, result.errors) == ([5, 1, 1], {"v": 5, "w": 0})
    assert scores(result, "w") == [1.0] * 5


def test_an_async_verifier_works_where_an_event_loop_runs_already():
    async def verifier(samples):
        await asyncio.sleep(0)
        return [0.5] * len(samples)

    async def notebook_cell():
        return judge({"v": verifier}, SAMPLES)

    result = asyncio.run(notebook_cell())
    assert (scores(result, "v"), result.errors) == ([0.5] * 3, {"v": 0})


def test_a_verifier_that_limits_itself_has_the_time_for_each_sample():
    class Slow:
        background = True

        def __call__(self, samples):
            threading.Event().wait(0.05 * len(samples))
            return [1.0] * len(samples)

    result = judge({"v": Slow()}, SAMPLES * 2, timeout_s=0.1)
    assert (scores(result, "v"), result.errors) == ([1.0] * 6, {"v": 0})
