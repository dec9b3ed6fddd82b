"""Laws of problems read from a user's file."""

from __future__ import annotations

import json
import logging
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.experiments.tasks.jsonl import JsonlTask
from apportion.verifiers import InputError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def problems(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{k} + {k} = ?", "answer": 2 * k, **columns} for k in range(count)]


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        JsonlTask(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_reach_the_problem_as_they_are_written(tmp_path: Path) -> None:
    rows = [
        {"prompt": "when?", "answer": "2024-05-01", "level": 2},
        {"prompt": "how many?", "answer": 12},
        {"prompt": "how much?", "answer": 1.5},
        {"prompt": "Ça\u2028va {x}?", "answer": "oui"},
        {"prompt": "true?", "answer": True},
    ]
    task = JsonlTask(write(tmp_path / "mixed.jsonl", rows), held_out=0.0)
    by_prompt = {p.prompt: p for p in task.batch(0, 5, seed=0)}
    assert {p: by_prompt[p].reference for p in by_prompt} == {
        "when?": "2024-05-01",
        "how many?": "12",
        "how much?": "1.5",
        "Ça\u2028va {x}?": "oui",
        "true?": "true",
    }
    assert by_prompt["when?"].metadata == {"level": 2}
    assert by_prompt["when?"].id == "1"
    assert task.held_out() == []


def test_parquet_gives_the_same_problems(tmp_path: Path) -> None:
    import datasets

    rows = problems(8, level="easy")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    lines = JsonlTask(write(tmp_path / "p.jsonl", rows))
    table = JsonlTask(str(tmp_path / "p.parquet"))
    assert list(lines.batch(0, 4, 0)) == list(table.batch(0, 4, 0))
    assert list(lines.held_out()) == list(table.held_out())


def test_an_address_is_read_like_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", problems(6))
    assert list(JsonlTask(f"file://{path}").batch(0, 3, 0)) == list(JsonlTask(path).batch(0, 3, 0))


def test_a_prompt_and_its_copies_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"problem {k % 40}{' ' * (k % 3)}", "answer": k} for k in range(200)]
    task = JsonlTask(write(tmp_path / "p.jsonl", rows), held_out=0.3)
    held_out = {p.prompt.strip() for p in task.held_out()}
    train = {p.prompt.strip() for step in range(20) for p in task.batch(step, 8, seed=1)}
    assert held_out & train == set()
    assert len(held_out) == 10  # of 40; which ones follows from their hashes
    assert len(task.held_out()) == 50


def test_the_split_follows_the_text_not_the_order_or_the_number_of_rows(tmp_path: Path) -> None:
    rows = problems(60)
    all_rows = JsonlTask(write(tmp_path / "a.jsonl", rows), held_out=0.2)
    reversed_rows = JsonlTask(write(tmp_path / "b.jsonl", rows[::-1]), held_out=0.2)
    first_rows = JsonlTask(write(tmp_path / "a.jsonl", rows), held_out=0.2, limit=30)
    names = [{p.prompt for p in task.held_out()} for task in (all_rows, reversed_rows, first_rows)]
    assert names[0] == names[1]
    assert names[2] == {p for p in names[0] if int(p.split()[0]) < 30}
    other = JsonlTask(write(tmp_path / "a.jsonl", rows), held_out=0.2, seed=1)
    assert {p.prompt for p in other.held_out()} != names[0]


def test_a_small_file_still_holds_one_prompt_out(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path / "p.jsonl", problems(3)), held_out=0.01)
    assert len(task.held_out()) == 1


def test_a_batch_is_a_pure_function_and_an_epoch_visits_every_row_once(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", problems(12))
    task = JsonlTask(path, held_out=0.0)
    batches = [list(task.batch(step, 4, seed=3)) for step in range(6)]
    assert list(JsonlTask(path, held_out=0.0).batch(5, 4, seed=3)) == batches[5]
    epochs = [[p.id for batch in batches[k : k + 3] for p in batch] for k in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(k) for k in range(1, 13))
    assert epochs[0] != epochs[1]
    assert [p.id for p in task.batch(0, 12, seed=4)] != epochs[0]


def test_no_batch_holds_a_row_twice_where_the_epoch_is_no_multiple_of_it(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path / "p.jsonl", problems(10)), held_out=0.0)
    for step in range(12):
        assert len({p.id for p in task.batch(step, 4, seed=0)}) == 4


def test_a_batch_larger_than_the_file_is_refused(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path / "p.jsonl", problems(5)), held_out=0.0)
    with pytest.raises(InputError, match="5 rows to train on, fewer than the 6 prompts"):
        task.batch(0, 6, seed=0)


def test_the_template_takes_every_column_and_leaves_braces_of_the_data_alone(tmp_path: Path) -> None:
    rows = [{"question": "solve {x}", "prompt": "not this", "hint": "easy", "answer": "1"}]
    path = write(tmp_path / "p.jsonl", rows)
    task = JsonlTask(path, prompt="question", template="{prompt} ({hint}) {{}}", held_out=0.0)
    assert task.batch(0, 1, 0)[0].prompt == "solve {x} (easy) {}"
    assert "row 1: task.template='{hnt}' does not fit" in refusal(path, prompt="question", template="{hnt}")


def test_other_files_give_held_out_and_retention_and_training_leaves_their_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = write(tmp_path / "train.jsonl", problems(6))
    held_out = write(tmp_path / "held_out.jsonl", problems(2))
    retention = write(tmp_path / "retention.jsonl", [{"prompt": "5 + 5 = ?", "answer": 10}])
    with caplog.at_level(logging.WARNING):
        task = JsonlTask(train, held_out_path=held_out, retention_path=retention)
    assert [p.id for p in task.held_out()] == ["held-out-1", "held-out-2"]
    assert [p.id for p in task.retention()] == ["retention-1"]
    assert {p.prompt for p in task.batch(0, 3, 0)} == {f"{k} + {k} = ?" for k in (2, 3, 4)}
    assert "3 rows are not trained on: their prompts are evaluation problems" in caplog.text
    assert JsonlTask(train).retention() == []


def test_demonstrations_come_from_training_rows_only(tmp_path: Path) -> None:
    rows = [{**row, "demonstration": f"Answer: {row['answer']}"} for row in problems(30)]
    task = JsonlTask(write(tmp_path / "p.jsonl", rows), held_out=0.3)
    pairs = task.demonstrations(200, np.random.default_rng(0))
    assert len(pairs) == 200
    assert {prompt for prompt, _ in pairs} == {row["prompt"] for row in rows} - {p.prompt for p in task.held_out()}
    assert all(completion == f"Answer: {2 * int(prompt.split()[0])}" for prompt, completion in pairs)


def test_a_changed_file_has_another_content_key(tmp_path: Path) -> None:
    rows = problems(10)
    first = JsonlTask(write(tmp_path / "a.jsonl", rows)).content
    assert JsonlTask(write(tmp_path / "b.jsonl", rows)).content == first
    rows[0]["answer"], rows[1]["answer"] = 7, 9
    assert JsonlTask(write(tmp_path / "b.jsonl", rows)).content != first


def test_a_warm_start_without_demonstrations_is_refused(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path / "p.jsonl", problems(3)))
    with pytest.raises(InputError, match=r"needs the column 'demonstration'.*set warm_start.steps=0"):
        task.demonstrations(1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": 1}, "row 3: no column 'prompt'; the columns are answer; set task.prompt"),
        ({"prompt": "x"}, "row 3: no column 'answer'; the columns are prompt; set task.reference"),
        ({"prompt": " \n", "answer": 1}, "row 3: column 'prompt' (task.prompt) is empty"),
        ({"prompt": "x", "answer": None}, "row 3: column 'answer' (task.reference) is empty; fill it or drop the row"),
        ({"prompt": "x", "answer": ""}, "or set task.reference=null where problems have no answer"),
        ({"prompt": ["x"], "answer": 1}, "row 3: column 'prompt' (task.prompt) is not text but list"),
        ('{"prompt": "x", "answer": 1', "row 3: Expecting ',' delimiter"),
        ('["x", 1]', "row 3: not a JSON object but list"),
    ],
)
def test_a_bad_row_is_named_with_its_column_and_the_remedy(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path / "bad.jsonl", [*problems(2), row, *problems(4)])
    message = refusal(path)
    assert message.startswith(f"{path}, row 3: ")
    assert said in message


def test_blank_lines_count_as_lines_and_hold_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [problems(1)[0], "", "", {"prompt": "x"}])
    assert "row 4: no column 'answer'" in refusal(path)


def test_bytes_that_are_not_utf8_are_named_with_their_row(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "x", "answer": 1}\n{"prompt": "caf\xe9", "answer": 1}\n'
    )
    assert "row 2: 'utf-8' codec can't decode byte 0xe9" in refusal(tmp_path / "p.jsonl")


def test_files_without_rows_and_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "broken.parquet").write_text("no table")
    assert "empty.jsonl: the file has no rows" in refusal(tmp_path / "empty.jsonl")
    assert "blank.jsonl: the file has no rows" in refusal(tmp_path / "blank.jsonl")
    assert "task.path=" in refusal(tmp_path / "gone.jsonl")
    assert "no such file" in refusal(tmp_path / "gone.jsonl")
    assert "broken.parquet: cannot be read as parquet" in refusal(tmp_path / "broken.parquet")
    path = write(tmp_path / "p.jsonl", problems(2))
    assert "task.held_out_path=gone.jsonl: no such file" in refusal(path, held_out_path="gone.jsonl")


def test_ids_are_unique(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", [{"prompt": "a", "answer": 1, "name": "n"}, {"prompt": "b", "answer": 1, "name": "n"}]
    )
    assert "row 2: name='n' is also the id of row 1" in refusal(path, id="name")


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", problems(2))
    assert "task.held_out=1.0" in refusal(path, held_out=1.0)
    assert "task.limit=0" in refusal(path, limit=0)
    same = write(tmp_path / "same.jsonl", problems(2))
    assert "no row is left to train on" in refusal(path, held_out_path=same)


def test_problems_without_answers_have_no_reference(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path / "p.jsonl", [{"prompt": "write a poem"}]), reference=None, held_out=0.0)
    assert task.batch(0, 1, 0)[0].reference is None


def test_the_example_file_is_what_its_script_makes_and_its_arithmetic_holds() -> None:
    made = runpy.run_path(str(EXAMPLES / "make_word_problems.py"))["make_problems"]()
    lines = (EXAMPLES / "word_problems.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for problem in made:
        stated = [re.fullmatch(r"Step \d: (\d+) (.) (\d+) = (\d+)", line) for line in problem["steps"].split("\n")]
        for left, operator, right, result in (match.groups() for match in stated if match):
            assert operations[operator](int(left), int(right)) == int(result) > 0
        assert all(stated)
        assert problem["demonstration"] == f"{problem['steps']}\nAnswer: {stated[-1][4]}"
        assert problem["answer"] == int(stated[-1][4])
    task = JsonlTask(str(EXAMPLES / "word_problems.jsonl"))
    assert len(made) == 200
    assert 10 <= len(task.held_out()) <= 30
    assert task.batch(0, 1, 0)[0].prompt.endswith("and end with a line `Answer: N`.")


def test_the_configuration_names_every_option() -> None:
    import inspect

    import yaml

    import apportion

    config = Path(apportion.__file__).parent / "conf" / "task" / "jsonl.yaml"
    options = yaml.safe_load(config.read_text())["task"]
    defaults = {name: p.default for name, p in inspect.signature(JsonlTask).parameters.items()}
    assert options.pop("_target_") == "apportion.experiments.tasks.jsonl.JsonlTask"
    assert options.pop("path") == "???"
    assert options == {name: value for name, value in defaults.items() if name != "path"}
