"""Phrases that plan, found in text."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import apportion.conf
from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import weighted_reward
from apportion.verifiers.plan_grams import PlanGrams


def found(text: str, *phrases: str) -> list[str]:
    (verdict,) = PlanGrams(phrases)([Sample("", text)])
    assert all(span.score == 1 and span.label == "plan" for span in verdict.spans)
    return [text[span.start : span.stop] for span in verdict.spans]


def test_every_place_is_found_without_regard_to_case() -> None:
    text = "Let me check. 2 + 2 = 4, let me check again."
    assert found(text, "let me check") == ["Let me check", "let me check"]


def test_blanks_and_apostrophes_may_differ() -> None:
    assert found("let’s\n  try x. Let's try y.", "let's try") == ["let’s\n  try", "Let's try"]
    assert found("let's try", "let’s   try") == ["let's try"]


def test_whole_words_only() -> None:
    assert found("outlet me check, let me checkmate, (let me check)", "let me check") == ["let me check"]
    assert found("wait, what? await", "wait,", "wait") == ["wait,"]


def test_the_longer_phrase_wins_and_none_overlap() -> None:
    assert found("we know that x", "we know", "we know that", "know that x") == ["we know that"]


def test_signs_in_a_phrase_are_plain_text() -> None:
    assert found("So (a+b)* then.", "(a+b)*", "s.") == ["(a+b)*"]


def test_characters_beyond_latin_count_as_one() -> None:
    (verdict,) = PlanGrams(["换个方法"])([Sample("", "💩 换个方法 x")])
    assert [(span.start, span.stop) for span in verdict.spans] == [(2, 6)]


def test_planning_is_never_a_reward() -> None:
    (verdict,) = PlanGrams(["let me check"])([Sample("", "let me check let me check")])
    assert verdict.score is None
    assert weighted_reward({"plan": verdict}, {"plan": 1.0}) is None


def test_a_long_text_takes_no_time() -> None:
    assert found("let me " * 50_000, "let me check") == []
    assert found("let" + " " * 200_000, "let me check") == []


@pytest.mark.parametrize("phrases", [[], "let me check", ["wait", " "]])
def test_phrases_that_match_nothing_or_everything_are_refused(phrases: list[str]) -> None:
    with pytest.raises(InputError, match=r"^phrases"):
        PlanGrams(phrases)


def test_each_phrase_of_the_configuration_finds_itself_and_stands_once() -> None:
    folder = Path(apportion.conf.__file__).parent / "verifier"
    phrases = list(OmegaConf.load(folder / "plan_grams.yaml").phrases)
    assert len(set(phrases)) == len(phrases)
    for phrase in phrases:
        assert found(f"So {phrase} now", phrase) == [phrase]
