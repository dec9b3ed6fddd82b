import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.length import Repetition, SoftOverlong, repetition_penalty, soft_overlong_penalty
from apportion.verifiers.panel import gives_spans

law = settings(derandomize=True, deadline=None, max_examples=150)


def test_the_slope_of_the_overlong_penalty():
    assert [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 101, 10**9)] == [
        0,
        0,
        -0.05,
        -0.5,
        -1,
        -1,
        -1,
    ]
    assert soft_overlong_penalty(18432, 20480, 4096) == -0.5


def test_without_a_buffer_the_penalty_is_a_step():
    assert [soft_overlong_penalty(n, 100, 0) for n in (99, 100, 101)] == [0.0, 0.0, -1.0]


def test_a_buffer_as_long_as_the_limit_slopes_from_zero():
    assert [soft_overlong_penalty(n, 10, 10) for n in (0, 1, 5, 10)] == [0.0, -0.1, -0.5, -1.0]


@pytest.mark.parametrize(("max_length", "buffer"), [(None, 20), (100, None), (None, None)])
def test_none_switches_the_overlong_penalty_off(max_length, buffer):
    assert soft_overlong_penalty(10**6, max_length, buffer) == 0.0
    assert SoftOverlong(max_length, buffer)([Sample("", "", metadata={"num_tokens": 10**6})]) == [Verdict(0.0)]


@pytest.mark.parametrize(("max_length", "buffer"), [(100, 101), (100, -1), (-5, 0)])
def test_a_buffer_that_does_not_fit_is_refused_at_once(max_length, buffer):
    with pytest.raises(InputError, match=r"^buffer: "):
        SoftOverlong(max_length, buffer)


@law
@given(st.integers(0, 300), st.integers(0, 200), st.data())
def test_longer_is_never_better(length, max_length, data):
    buffer = data.draw(st.integers(0, max_length))
    here, longer = (soft_overlong_penalty(n, max_length, buffer) for n in (length, length + 1))
    assert -1.0 <= longer <= here <= 0.0


def test_the_overlong_verifier_counts_tokens_and_abstains_without_them():
    samples = [Sample("", "word " * 500, metadata={"num_tokens": 90}), Sample("", "word " * 500)]
    assert SoftOverlong(100, 20)(samples) == [Verdict(-0.5), Verdict(None)]
    assert not gives_spans(SoftOverlong(100, 20))


def test_the_share_of_repeated_ngrams():
    assert [repetition_penalty(ids, 2, -1.0) for ids in ([1, 2, 3, 4], [5, 5, 5, 5, 5], [7], [])] == [0, -0.75, 0, 0]
    assert repetition_penalty("abcabc", 3, -2.0) == -0.5


@pytest.mark.parametrize(("ngram", "max_penalty"), [(0, -1.0), (2, 0.5), (2, float("nan"))])
def test_senseless_repetition_options_are_refused(ngram, max_penalty):
    with pytest.raises(InputError):
        Repetition(ngram, max_penalty)
    with pytest.raises(InputError):
        repetition_penalty([1], ngram, max_penalty)


def test_an_unknown_unit_is_refused():
    with pytest.raises(InputError, match="unit: 'syllables'"):
        Repetition(2, -1.0, unit="syllables")


def repeated(text, ngram, unit="words"):
    (verdict,) = Repetition(ngram, -1.0, unit)([Sample("", text)])
    return verdict.score, [text[span.start : span.stop] for span in verdict.spans]


def test_the_repeats_are_located_and_the_first_time_is_not():
    assert repeated("add two. Add two. Now stop", 2) == (-0.2, ["Add two."])
    assert repeated("a b a b a b", 2) == (-0.6, ["a b a b"])
    assert repeated("哈哈哈哈", 2, "characters") == (pytest.approx(-2 / 3), ["哈哈哈"])


def test_short_texts_are_not_penalised():
    for text in ("", "  \n", "one", "one one"):
        assert repeated(text, 3) == (0.0, [])


@law
@given(st.lists(st.sampled_from("abc \n💩"), max_size=60).map("".join) | st.text(), st.integers(1, 4))
def test_spans_mark_a_repeat_exactly_where_there_is_a_penalty(text, ngram):
    for unit in ("words", "characters"):
        (verdict,) = Repetition(ngram, -1.0, unit)([Sample("", text)])
        assert (verdict.score < 0) == bool(verdict.spans)
        edges = [0, *(edge for span in verdict.spans for edge in (span.start, span.stop)), len(text)]
        assert edges == sorted(edges)
        assert all(span.start < span.stop and span.score == 0.0 for span in verdict.spans)
