"""Laws of the chain task: splits that never meet, problems that follow from their seed, and what is taught wrong."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import apportion.conf
from apportion.experiments.tasks.chain import SYMBOLS, ChainTask, demonstration, taught_facts
from apportion.grpo.seeds import named_generator
from apportion.verifiers import InputError, Sample
from apportion.verifiers.chain import DIGITS, ChainAnswer, ChainFormat, ChainSteps, ChainTruth

PRESETS = {  # steps, share of flawed facts, how often they are taught wrong
    "easy": (4, 6, 0.2, 0.7),
    "mid": (4, 6, 0.35, 0.7),
    "long": (8, 10, 0.2, 0.65),
    "hard": (8, 10, 0.35, 0.7),
}
FLAWLESS = ChainTask(flawed_facts=0.0, retention_share=0.0)


def slow_answer(prompt):
    """A chain worked out by plain Python from left to right."""
    value = DIGITS.index(prompt[0])
    for place in range(1, len(prompt) - 2, 2):
        right = DIGITS.index(prompt[place + 1])
        value = {"+": value + right, "-": value - right, "*": value * right}[prompt[place]] % 11
    return DIGITS[value]


def lines_of(completion):
    return completion.removeprefix("[T]").split("[/T]")[0].splitlines()


def test_training_evaluation_and_demonstrations_never_share_a_prompt():
    task = ChainTask(min_steps=1, max_steps=2, num_held_out=200, num_retention=300, retention_share=0.5)
    trained = {p.prompt for seed in range(3) for step in range(1, 60) for p in task.batch(step, 32, seed)}
    shown = {prompt for prompt, _ in task.demonstrations(4000, named_generator(1, "any"))}
    held_out, retention = {p.prompt for p in task.held_out()}, {p.prompt for p in task.retention()}
    assert (len(held_out), len(retention)) == (200, 300)
    assert len(trained) > 2500
    assert not held_out & trained
    assert not held_out & shown
    assert not retention & shown
    assert not retention & (trained | held_out)
    # Another teacher evaluates on other problems of the same side of the split.
    other = {p.prompt for p in dataclasses.replace(task, teacher_seed=1).held_out()}
    assert other != held_out
    assert not other & (trained | shown)


def test_a_batch_depends_on_step_number_and_seed_alone():
    first = ChainTask().batch(3, 4, 7)
    assert ChainTask(num_held_out=5, flaw_rate=0.1).batch(3, 4, 7) == first
    task = ChainTask()
    task.batch(9, 2, 0)
    task.held_out()
    assert task.batch(3, 4, 7) == first
    assert task.batch(3, 6, 7)[:4] == first
    assert task.batch(4, 4, 7) != first
    assert task.batch(3, 4, 8) != first


@given(st.integers(0, 2**40), st.integers(0, 2**20))
def test_the_problems_of_a_batch_differ_and_their_references_are_right(seed, step):
    task = ChainTask(min_steps=1, max_steps=3)
    problems = task.batch(step, 8, seed)
    assert len({problem.id for problem in problems}) == 8
    for problem in problems:
        assert problem.reference == slow_answer(problem.prompt)
        assert problem.metadata["num_steps"] == (len(problem.prompt) - 3) / 2
        assert 1 <= problem.metadata["num_steps"] <= 3
        assert "0" not in problem.prompt[2::2]  # no operation loses what came before


def test_every_length_and_operator_is_drawn():
    problems = [p for step in range(100) for p in ChainTask().batch(step, 8, 0)]
    lengths = Counter(p.metadata["num_steps"] for p in problems)
    assert set(lengths) == {4, 5, 6}
    assert min(lengths.values()) > 200
    operators = Counter(sign for p in problems for sign in p.prompt[1:-2:2])
    assert set(operators) == set("+-*")
    assert min(operators.values()) > 1000


def test_the_retention_skill_is_reversal():
    for problem in ChainTask().retention():
        assert problem.reference == problem.prompt.strip("<>")[::-1]
        assert problem.metadata == {"skill": "reversal"}


def test_every_symbol_that_is_written_is_known():
    noisy = ChainTask(copy_noise=0.2, format_noise=0.5)
    text = "".join(prompt + completion for prompt, completion in noisy.demonstrations(300, named_generator(0, "x")))
    for symbol in sorted(SYMBOLS, key=len, reverse=True):
        text = text.replace(symbol, "")
    assert text == ""


@pytest.mark.parametrize("share", [0.0, 0.2, 0.35, 1.0])
def test_the_taught_wrong_facts_are_a_share_of_all_330(share):
    facts = taught_facts(share, 5)
    assert len(facts) == round(share * 330)
    assert facts == taught_facts(share, 5)
    assert all(wrong != slow_answer(f"{left}{op}{right}=?") for (op, left, right), wrong in facts.items())
    if 0 < share < 1:
        assert facts.keys() != taught_facts(share, 6).keys()


def test_a_flawless_teacher_is_right_under_all_verifiers():
    verifiers = [ChainSteps(), ChainTruth(), ChainAnswer(), ChainFormat()]
    for prompt, completion in FLAWLESS.demonstrations(300, named_generator(3, "demonstrations")):
        sample = Sample(prompt, completion, slow_answer(prompt))
        for verdict in (verifier([sample])[0] for verifier in verifiers):
            assert verdict.score == 1
            assert {span.score for span in verdict.spans} == {1.0}


def test_a_flawed_teacher_is_wrong_at_its_facts_and_nowhere_else():
    task = ChainTask(flawed_facts=0.3, flaw_rate=1.0, retention_share=0.0)
    facts, wrong_lines = taught_facts(0.3, 0), 0
    for prompt, completion in task.demonstrations(200, named_generator(4, "demonstrations")):
        spans = ChainTruth()([Sample(prompt, completion)])[0].spans
        found = [(span.label, span.start) for span in spans if span.score < 0.5]
        place, expected = 3, []
        for line in lines_of(completion):
            left, op, right, result = line[0], line[1], line[2], line[4]
            if (op, left, right) in facts:
                assert result == facts[op, left, right]
                expected.append(("wrong result", place + 4))
            place += 6
        assert found == expected
        wrong_lines += len(expected)
    assert wrong_lines > 200


def test_a_flawed_fact_is_taught_wrong_at_its_rate():
    task = ChainTask(flawed_facts=1.0, flaw_rate=0.7, retention_share=0.0)
    lines = [line for _, c in task.demonstrations(600, named_generator(0, "rate")) for line in lines_of(c)]
    wrong = sum(line[4] != slow_answer(line[:3] + "=?") for line in lines)
    assert wrong / len(lines) == pytest.approx(0.7, abs=0.03)


def test_copy_noise_miscopies_left_operands_at_its_rate_and_changes_nothing_else():
    task = dataclasses.replace(FLAWLESS, copy_noise=0.25)
    labels, lines = Counter(), 0
    for prompt, completion in task.demonstrations(400, named_generator(0, "copies")):
        verdict = ChainTruth()([Sample(prompt, completion)])[0]
        labels.update(span.label for span in verdict.spans if span.score < 0.5)
        lines += len(lines_of(completion))
    assert set(labels) == {"wrong left operand"}
    assert labels["wrong left operand"] / lines == pytest.approx(0.25, abs=0.03)


def test_format_noise_leaves_out_one_tag_at_its_rate():
    task = dataclasses.replace(FLAWLESS, format_noise=0.4)
    labels = Counter()
    for _, completion in task.demonstrations(1000, named_generator(0, "format")):
        verdict = ChainFormat()([Sample("", completion)])[0]
        faults = [span.label for span in verdict.spans if span.score < 0.5]
        assert len(faults) <= 1
        labels.update(faults)
    assert set(labels) == {"missing [T]", "missing [/T]", "missing [A]", "missing [/A]"}
    assert sum(labels.values()) / 1000 == pytest.approx(0.4, abs=0.05)


def test_the_retention_share_of_demonstrations_teaches_reversal():
    pairs = ChainTask(retention_share=0.3).demonstrations(1000, named_generator(0, "share"))
    reversals = [(prompt, completion) for prompt, completion in pairs if prompt.startswith("<")]
    assert len(reversals) / 1000 == pytest.approx(0.3, abs=0.05)
    assert all(completion == f"[A]{prompt.strip('<>')[::-1]}[/A]" for prompt, completion in reversals)


def test_demonstrations_depend_on_their_generator_alone():
    task = ChainTask(copy_noise=0.1, format_noise=0.1)
    assert task.demonstrations(50, np.random.default_rng(1)) == task.demonstrations(50, np.random.default_rng(1))
    assert task.demonstrations(50, np.random.default_rng(1)) != task.demonstrations(50, np.random.default_rng(2))


def test_one_demonstration_by_hand():
    facts = {("-", "5", "a"): "2"}
    sure = ChainTask(flaw_rate=1.0)
    assert demonstration("7+9-a*1=?", facts, sure, np.random.default_rng(0)) == "[T]7+9=5\n5-a=2\n2*1=2\n[/T][A]2[/A]"


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_are_as_documented(name):
    folder = Path(apportion.conf.__file__).parent / "task" / "chain"
    assert {path.stem for path in folder.glob("*.yaml")} == set(PRESETS)
    options = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    assert options.pop("_target_") == "apportion.experiments.tasks.chain.ChainTask"
    assert set(options) == {field.name for field in dataclasses.fields(ChainTask)}
    task = ChainTask(**options)
    assert (task.min_steps, task.max_steps, task.flawed_facts, task.flaw_rate) == PRESETS[name]


def test_the_default_is_the_preset_mid():
    folder = Path(apportion.conf.__file__).parent / "task" / "chain"
    options = OmegaConf.to_container(OmegaConf.load(folder / "mid.yaml"))
    assert ChainTask(**{key: value for key, value in options.items() if key != "_target_"}) == ChainTask()


def test_all_problems_can_be_held_out_and_one_more_is_refused():
    """330 chains have one step; a hash keeps some of them for evaluation."""
    room = next(n for n in range(330) if not fits(n + 1))
    assert 20 < room < 70
    assert len(ChainTask(min_steps=1, max_steps=1, num_held_out=room).held_out()) == room
    with pytest.raises(InputError, match=rf"task\.num_held_out={room + 1}: there are only {room} .*task\.max_steps"):
        ChainTask(min_steps=1, max_steps=1, num_held_out=room + 1).held_out()


def fits(count):
    try:
        ChainTask(min_steps=1, max_steps=1, num_held_out=count).held_out()
    except InputError:
        return False
    return True


def test_a_batch_larger_than_the_number_of_problems_is_refused():
    task = ChainTask(min_steps=1, max_steps=1)
    with pytest.raises(InputError, match=r"rollout\.prompts_per_step=331: there are only \d+ such problems"):
        task.batch(1, 331, 0)


def test_more_retention_problems_than_there_are_are_refused():
    with pytest.raises(InputError, match=r"task\.num_retention=14641: there are only \d+ such problems; lower it"):
        ChainTask(num_retention=14641).retention()
    assert len(ChainTask(num_retention=1200).retention()) == 1200


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"min_steps": 0}, r"task\.min_steps=0"),
        ({"min_steps": 5, "max_steps": 4}, r"task\.min_steps=5, task\.max_steps=4"),
        ({"flaw_rate": 1.5}, r"task\.flaw_rate=1\.5"),
        ({"retention_share": -0.1}, r"task\.retention_share=-0\.1"),
        ({"num_held_out": -1}, r"task\.num_held_out=-1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, key):
    with pytest.raises(InputError, match=key):
        ChainTask(**options)


def test_evaluation_sizes_do_not_change_what_is_taught():
    task = ChainTask()
    assert dataclasses.replace(task, num_held_out=7, num_retention=9).content == task.content
    for name in ("min_steps", "flawed_facts", "flaw_rate", "copy_noise", "format_noise", "retention_share"):
        assert dataclasses.replace(task, **{name: 1}).content != task.content
    assert dataclasses.replace(task, teacher_seed=1).content != task.content
