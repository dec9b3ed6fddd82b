"""Laws of scoring: one pass is all beginnings, a batch is its rows, and an answer that was not scored has no score."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.prm.calibration import Isotonic
from apportion.prm.encoding import Encoded
from apportion.prm.model import StepModel
from apportion.prm.score import StepRewardModel, length_buckets, step_probabilities
from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.panel import judge
from apportion.verifiers.segmenters import Lines, Sentences

TEXTS = [
    "12 + 7 = 19.\n19 * 3 = 57.\nAnswer: 57.",
    "ok",
    "",
    "naïve café\n世界 💩\n\n" + "\n".join(f"Step {n}: {n} + {n} = {2 * n}." for n in range(1, 9)),
    "the cat sat",
    "\n\n",
    "\n".join("abcdefghij"),
]
SAMPLES = [Sample(f"{place} + 1 = ?", text) for place, text in enumerate(TEXTS)]
STYLES: dict[str, dict[str, Any]] = {"head": {}, "tokens": {"style": "tokens", "tokens": ["+", "-"]}}


@pytest.fixture(scope="module", params=[(kind, style) for kind in ("llama", "gpt2") for style in STYLES])
def folder(request: Any, tmp_path_factory: Any, backbones: Any, tokenizers: Any) -> str:
    kind, style = request.param
    return save(tmp_path_factory.mktemp("prm"), backbones, tokenizers(), kind, STYLES[style])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any, backbones: Any, tokenizers: Any) -> str:
    return save(tmp_path_factory.mktemp("prm"), backbones, tokenizers(), "llama", {})


def save(path: Path, backbones: Any, tokenizer: Any, kind: str, changes: dict[str, Any]) -> str:
    changes = {"segmenter": Lines(), "max_length": 256, **changes}
    model = StepModel.from_backbone(backbones(kind, tokenizer), tokenizer=tokenizer, settings=changes)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name.startswith(("score.", "classifier.")):
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(path)
    return str(path)


def chances(verdicts: list[Verdict]) -> list[list[float]]:
    return [[span.score for span in verdict.spans] for verdict in verdicts]


def test_one_pass_gives_what_scoring_every_beginning_gives(folder: str) -> None:
    verifier = StepRewardModel(folder)
    model = verifier.model
    seen: list[float] = []
    for sample, verdict in zip(SAMPLES, verifier(SAMPLES)):
        steps = Lines()(sample.completion)
        assert [(span.start, span.stop) for span in verdict.spans] == steps
        row = model.encode(sample.prompt, sample.completion, steps)
        for end, span in zip(row.step_ends, verdict.spans):
            (grown,) = step_probabilities(model, [Encoded(row.input_ids[: end + 1], (end,), 1)])
            assert span.score == pytest.approx(grown[0], abs=1e-5)
            seen.append(span.score)
    assert max(seen) - min(seen) > 0.1


def test_a_score_does_not_depend_on_the_batch(folder: str) -> None:
    whole = StepRewardModel(folder)(SAMPLES)
    for batch_tokens in (1, 60, 10**6):
        verifier = StepRewardModel(folder, batch_tokens=batch_tokens)
        backwards = verifier(SAMPLES[::-1] + SAMPLES[:2])[: len(SAMPLES)][::-1]
        alone = [verdict for sample in SAMPLES for verdict in verifier([sample])]
        for other in (backwards, alone):
            assert [v.score for v in other] == pytest.approx([v.score for v in whole], abs=1e-5)
            for one, two in zip(chances(other), chances(whole)):
                assert one == pytest.approx(two, abs=1e-5)


def test_the_whole_is_one_of_four_summaries(llama: str) -> None:
    by = {how: StepRewardModel(llama, aggregate=how)([SAMPLES[0]])[0] for how in ("min", "prod", "mean", "last")}
    a, b, c = (span.score for span in by["min"].spans)
    assert {how: verdict.score for how, verdict in by.items()} == pytest.approx(
        {"min": min(a, b, c), "prod": a * b * c, "mean": (a + b + c) / 3, "last": c}
    )
    assert all(span.label == "step" for span in by["min"].spans)


def test_an_answer_without_steps_has_no_score(llama: str) -> None:
    verdicts = StepRewardModel(llama)(SAMPLES)
    assert [place for place, verdict in enumerate(verdicts) if verdict == Verdict(None)] == [2, 5]
    assert StepRewardModel(llama)([]) == []
    assert StepRewardModel(llama)([SAMPLES[2]]) == [Verdict(None)]


def test_an_answer_that_does_not_fit_has_no_score_but_its_first_steps_keep_theirs(llama: str) -> None:
    sample = Sample("9?", "\n".join("abcdefghij"))
    (whole,) = StepRewardModel(llama)([sample])
    prompt = len(StepRewardModel(llama).model.encode("9?", "a", [(0, 1)]).input_ids) - 1
    (cut,) = StepRewardModel(llama, max_length=prompt + 7)([sample])  # four letters, three line ends
    assert whole.score is not None
    assert cut.score is None
    assert [(s.start, s.stop) for s in cut.spans] == [(s.start, s.stop) for s in whole.spans[:4]]
    assert chances([cut])[0] == pytest.approx(chances([whole])[0][:4], abs=1e-6)
    assert [span.label for span in cut.spans] == ["step"] * 3 + ["step; 6 more did not fit"]
    assert StepRewardModel(llama, max_length=prompt)([sample]) == [Verdict(None)]


def test_the_calibration_is_applied_on_request(llama: str) -> None:
    fitted = Isotonic((0.0, 0.5, 1.0), (0.1, 0.2, 0.9))
    record = {"calibration": {"method": "isotonic", "x": list(fitted.x), "y": list(fitted.y)}}
    raw = StepRewardModel(llama)(SAMPLES)
    calibrated = StepRewardModel(llama, settings=record)(SAMPLES)
    assert StepRewardModel(llama, settings=record, calibration=False)(SAMPLES) == raw
    for one, two in zip(chances(calibrated), chances(raw)):
        assert one == pytest.approx(fitted(two).tolist(), abs=1e-9)
    assert calibrated[0].score == pytest.approx(min(fitted(chances(raw)[0])), abs=1e-9)


def test_the_users_segmenter_goes_before_the_models(llama: str) -> None:
    text = "12 + 7 = 19. ok. so\nna"
    (by_line,), (by_sentence,) = (StepRewardModel(llama, segmenter=s)([Sample("", text)]) for s in (None, Sentences()))
    assert [(s.start, s.stop) for s in by_line.spans] == Lines()(text)
    assert [(s.start, s.stop) for s in by_sentence.spans] == Sentences()(text) != Lines()(text)


def test_sampled_ids_of_the_same_vocabulary_are_read(llama: str) -> None:
    verifier = StepRewardModel(llama)
    tokenizer, text = verifier.model.tokenizer, "12 + 7 = 19."
    odd = [i for character in text for i in tokenizer(character)["input_ids"]]
    facts = {"completion_ids": odd, "prompt_ids": [5], "tokenizer": verifier.model.fingerprint}
    by_text, by_ids, foreign = verifier(
        [
            Sample("9?", text),
            Sample("9?", text, metadata=facts),
            Sample("9?", text, metadata={**facts, "tokenizer": ""}),
        ]
    )
    assert by_text == foreign
    assert abs(by_ids.spans[0].score - by_text.spans[0].score) > 1e-3
    row = Encoded((*tokenizer("9?\n")["input_ids"], *odd), (len(tokenizer("9?\n")["input_ids"]) + len(odd) - 1,), 1)
    assert by_ids.spans[0].score == pytest.approx(step_probabilities(verifier.model, [row])[0][0], abs=1e-6)


def test_the_model_is_loaded_late_and_does_not_travel(llama: str) -> None:
    verifier = StepRewardModel(llama, aggregate="mean")
    assert "model" not in vars(verifier)
    before = verifier(SAMPLES)
    size = len(pickle.dumps(verifier))
    assert size < 2000
    copy = pickle.loads(pickle.dumps(verifier))
    assert copy == verifier
    assert "model" not in vars(copy)
    assert copy(SAMPLES) == before
    assert hash(copy) == hash(verifier)


def test_scoring_leaves_mode_and_gradients_as_they_were(llama: str) -> None:
    model = StepModel.from_pretrained(llama)
    rows = [model.encode("9?", TEXTS[0], Lines()(TEXTS[0]))]
    expected = step_probabilities(model, rows)
    for mode in (True, False):
        assert step_probabilities(model.train(mode), rows) == expected  # without the head's dropout
        assert model.training is mode
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@given(lengths=st.lists(st.integers(0, 50), max_size=30), budget=st.integers(1, 120))
@settings(max_examples=100, deadline=None)
def test_buckets_hold_every_row_once_and_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    buckets = length_buckets(lengths, budget)
    assert sorted(row for bucket in buckets for row in bucket) == [r for r, length in enumerate(lengths) if length]
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[row] for row in bucket) <= budget


JUNK = [
    "",
    " ",
    "\n\n",
    "\x00",
    "=",
    "💩" * 50,
    "\u202e\u0301e\ufeff",
    "<eos>" * 9,
    "(" * 999,
    "\ud800\nx\udfff",
    "\r\n\r",
]


def test_junk_is_judged_without_a_fault_and_alike_in_any_batch(llama: str) -> None:
    samples = [Sample("7 + 9 = ?\ud800", text) for text in JUNK]
    verifier = StepRewardModel(llama, batch_tokens=300)
    result = judge({"it": verifier}, samples)
    assert (result.errors, result.first_error) == ({"it": 0}, {})
    backwards = judge({"it": verifier}, samples[::-1]).verdicts[::-1]
    for one, two in zip(backwards, result.verdicts):
        assert chances([one["it"]])[0] == pytest.approx(chances([two["it"]])[0], abs=1e-5)


@pytest.mark.parametrize("text", ["x\n" * 50_000, "x" * 100_000, "\n" * 100_000, "💩\n" * 50_000, "<eos>" * 20_000])
def test_long_texts_take_little_time(llama: str, text: str) -> None:
    verifier = StepRewardModel(llama)
    verifier([SAMPLES[0]])
    began = time.process_time()
    (verdict,) = verifier([Sample("9?", text)])
    assert time.process_time() - began < 5
    assert verdict.score is None
    assert len(verdict.spans) <= 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/none"}, "path=/none: no such folder"),
        ({"aggregate": "max"}, "aggregate=max"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"dtype": "int8"}, "dtype=int8"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(llama: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StepRewardModel(**{"path": llama, **options})


def test_a_broken_model_is_a_fault_and_no_score(tmp_path: Path, backbones: Any, tokenizers: Any) -> None:
    model = StepModel.from_backbone(
        backbones("llama", tokenizers()), tokenizer=tokenizers(), settings={"segmenter": Lines()}
    )
    with torch.no_grad():
        model.model.score.bias.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    result = judge({"it": StepRewardModel(str(tmp_path))}, SAMPLES[:2])
    assert result.errors == {"it": 2}
    assert [row["it"] for row in result.verdicts] == [Verdict(None)] * 2
