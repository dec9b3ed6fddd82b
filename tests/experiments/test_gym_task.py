"""Laws of problems from reasoning-gym: disjoint halves, one seed one set, and a verifier that finds what it needs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from apportion.experiments.tasks.gym import ReasoningGymTask
from apportion.verifiers import InputError, Sample


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"task=reasoning_gym: needs the package reasoning-gym .*'apportion\[data\]'"):
        ReasoningGymTask("gcd")


@pytest.mark.parametrize("options", [{"size": 0}, {"num_held_out": -1}])
def test_sizes_out_of_range_are_refused(options):
    with pytest.raises(InputError, match=r"task\.size=.*need size >= 1, num_held_out >= 0"):
        ReasoningGymTask("gcd", **options)


@pytest.fixture(autouse=True)
def package(request):
    if "integration" in request.keywords:
        pytest.importorskip("reasoning_gym")


SMALL = {"size": 12, "num_held_out": 4}


@pytest.mark.integration
def test_a_batch_is_a_pure_function_and_an_epoch_visits_every_problem_once():
    task = ReasoningGymTask("chain_sum", **SMALL)
    batches = [list(task.batch(step, 4, seed=3)) for step in range(6)]
    assert list(ReasoningGymTask("chain_sum", **SMALL).batch(5, 4, seed=3)) == batches[5]
    epochs = [[p.id for batch in batches[k : k + 3] for p in batch] for k in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"chain_sum-{k}" for k in range(12))
    assert epochs[0] != epochs[1]


@pytest.mark.integration
def test_seeds_and_options_make_other_problems_and_other_keys():
    first, other = (ReasoningGymTask("chain_sum", seed=seed, **SMALL) for seed in (0, 1000))
    assert [p.prompt for p in first.held_out()] != [p.prompt for p in other.held_out()]
    long = ReasoningGymTask("chain_sum", config={"min_terms": 6, "max_terms": 6}, **SMALL)
    assert all(p.metadata["entry"]["metadata"]["num_terms"] == 6 for p in long.held_out())
    assert len({str(task.content) for task in (first, other, long)}) == 3


@pytest.mark.integration
def test_no_problem_that_is_trained_on_is_held_out():
    """Sums of two digits repeat themselves all the time."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGymTask("chain_sum", size=60, num_held_out=40, config=options)
    held_out = {p.prompt for p in task.held_out()}
    drawn = [p for step in range(6) for p in task.batch(step, 10, seed=0)]
    assert held_out & {p.prompt for p in drawn} == set()
    assert all(len({p.id for p in task.batch(step, 10, seed=0)}) == 10 for step in range(6))
    assert held_out & {prompt for prompt, _ in task.demonstrations(50, np.random.default_rng(0))} == set()
    assert any("chain_sum-" in p.id for p in drawn)


@pytest.mark.integration
def test_a_data_set_with_hardly_any_problems_is_refused():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGymTask("chain_sum", size=10, num_held_out=2000, config=options)
    with pytest.raises(InputError, match=r"task\.name=chain_sum: nearly all of its problems are held out"):
        task.batch(0, 8, seed=0)
    with pytest.raises(InputError, match=r"10 rows to train on, fewer than the 11 prompts"):
        task.batch(0, 11, seed=0)


@pytest.mark.integration
def test_problems_whose_answer_is_nothing_are_passed_over():
    task = ReasoningGymTask("ab", size=4, num_held_out=4, seed=11)
    assert [p.id for p in task.held_out()] == ["ab-4", "ab-5", "ab-6"]
    assert task._at(7).metadata["entry"]["answer"] == ""


@pytest.mark.integration
def test_demonstrations_are_worked_where_the_data_set_does_and_pay():
    from apportion.verifiers.reasoning_gym import GymAnswer

    task = ReasoningGymTask("gsm_symbolic", **SMALL)
    by_prompt = {p.prompt: p for step in range(3) for p in task.batch(step, 4, seed=0)}
    pairs = task.demonstrations(6, np.random.default_rng(0))
    assert all(
        "=" in text and text.endswith(f"\n<answer>{by_prompt[prompt].reference}</answer>") for prompt, text in pairs
    )
    samples = [Sample(p, text, None, by_prompt[p].metadata) for p, text in pairs]
    assert [verdict.score for verdict in GymAnswer(workers=1)(samples)] == [1.0] * 6
    with pytest.raises(InputError, match=r"task\.name=rush_hour: a warm start needs answers.*warm_start\.steps=0"):
        ReasoningGymTask("rush_hour", **SMALL).demonstrations(1, np.random.default_rng(0))


@pytest.mark.integration
def test_data_sets_without_a_single_right_answer_have_no_reference():
    problem = ReasoningGymTask("propositional_logic", **SMALL).held_out()[0]
    assert problem.reference is None
    assert problem.metadata["dataset"] == "propositional_logic"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sums", {}, r"task\.name=chain_sums: reasoning-gym has no such data set; did you mean chain_sum\?"),
        ("chain_sum", {"config": {"terms": 3}}, r"task\.config: chain_sum refuses it \(TypeError: .*terms"),
        ("chain_sum", {"config": {"min_terms": 0}}, r"task\.config: chain_sum refuses it \(AssertionError"),
        ("gcd", {"template": "{question} {level}"}, r"task\.template=.*does not fit.*the columns are question"),
    ],
)
def test_what_cannot_be_made_is_named_in_one_line(name, options, said):
    with pytest.raises(InputError, match=said) as caught:
        ReasoningGymTask(name, **SMALL, **options).held_out()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_on_puzzles_goes_through_with_moves_as_steps(apportion, tmp_path):
    """The tiny model writes nonsense; every verdict is one all the same."""
    (tmp_path / "letters.py").write_text("import string\nALL = tuple(string.printable)\n")
    small = ["policy.hidden_size=16", "policy.layers=1", "policy.heads=2", "policy.intermediate_size=16"]
    outcome = apportion(
        "train", "task=reasoning_gym", "task.name=countdown", "task.size=8", "task.num_held_out=2", "policy=tiny",
        "policy.symbols=letters.ALL", "policy.max_positions=1024", *small, "rollout.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_new_tokens=16", "run.steps=1", "run.save_model=false", "run.dir=run",
        "verifiers.answer.workers=1", "credit=localized/capo",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    import json

    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["verifier/errors_answer"], row["verifier/errors_steps"]) == (0, 0)
    assert row["verifier/answer"] == 0
