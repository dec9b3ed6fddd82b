"""Reading labelled steps: every source, bad rows, cutting, counting, splitting, and the files of conf/prm_data."""

import json
import logging
import tracemalloc
from pathlib import Path
from typing import get_args

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import apportion.conf
from apportion.credit import Credit, Rollout, collate
from apportion.experiments.build import build
from apportion.grpo.records import rollouts_path, write_rollouts
from apportion.grpo.task import Problem
from apportion.prm import StepExample
from apportion.prm.data import Format, StepData, load_steps, split_by_problem
from apportion.verifiers import InputError, Span, Verdict

ROWS = [
    {"prompt": "1+1=?", "completions": ["1+1=2", "So 2."], "labels": [True, True]},
    {"prompt": "2+1=?", "completions": ["2+1=4"], "labels": [False]},
    {"prompt": "3+1=?", "completions": ["3+1=4", "So 5.", "Yes."], "labels": [1, 0.25, 0]},
]
BAD = {"prompt": "9+9=?", "completions": ["a", "b"], "labels": [1]}


def prompts(data):
    return [example.prompt for example in data]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def characters(prompt, completion):
    return len(prompt) + len(completion)


# ---- sources


def test_rows_in_memory_are_read_anew_each_time_with_a_report():
    data = load_steps(ROWS)
    assert prompts(data) == prompts(data) == ["1+1=?", "2+1=?", "3+1=?"]
    assert str(data.report) == "3 rows, 3 examples, 6 steps; 3 right, 3 wrong, 0 unlabelled"


def test_json_lines_an_array_and_parquet_hold_the_same(tmp_path):
    rows = [{**row, "labels": [float(label) for label in row["labels"]]} for row in ROWS]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    expected = list(load_steps(ROWS))
    for name in ("a.jsonl", "b.json", "c.parquet", "saved"):
        assert list(load_steps(tmp_path / name)) == expected, name
    for name in ("", "*.*", "**/[abc].*"):
        assert list(load_steps(str(tmp_path / name))) == 3 * expected, name


def test_lines_end_at_line_feeds_only_and_blank_ones_are_passed_over(tmp_path):
    row = {**ROWS[1], "completions": ["a\u2028b\x85c"]}
    text = "\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n  \n" + json.dumps(BAD)
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    data = load_steps(tmp_path / "a.jsonl", on_bad_row="skip")
    assert [example.completion for example in data] == ["a\u2028b\x85c"]
    assert data.report.first_skipped == {
        "count_mismatch": f"{tmp_path}/a.jsonl, row 4: 2 steps but 1 labels ['9+9=?']",
    }


def test_splits_in_memory_and_on_disk_are_chosen_by_name(tmp_path):
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[:1]), "test": datasets.Dataset.from_list(ROWS[1:2])}
    )
    splits.save_to_disk(tmp_path / "saved")
    for source in (splits, tmp_path / "saved"):
        assert prompts(load_steps(source)) == ["1+1=?"]
        assert prompts(load_steps(source, split="test")) == ["2+1=?"]
        with pytest.raises(InputError, match=r"split=dev: .* has no such split; it has train, test"):
            prompts(load_steps(source, split="dev"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_that_is_no_file_is_asked_for_on_the_hub_when_read(monkeypatch, streaming):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        rows = datasets.Dataset.from_list(ROWS[:2])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_steps("owner/name", split="test", subset="easy", streaming=streaming)
    assert asked == []
    assert prompts(data) == ["1+1=?", "2+1=?"]
    assert asked == [(("owner/name", "easy"), {"split": "test", "streaming": streaming})]


def test_without_a_network_one_line_says_what_to_give(monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach 'owner/name'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError) as caught:
        list(load_steps("owner/name"))
    assert str(caught.value) == (
        """path=owner/name: no file here, and the hub does not give it ("Couldn't reach 'owner/name'"); give a file"""
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.jsonl", r"path=nothing.jsonl: no such file or pattern; paths are relative to /"),
        ("some/nothing.jsonl", r"no such file or pattern"),
        ("some/*.jsonl", r"no such file or pattern"),
        ("steps.csv", r"path=steps.csv: a file of steps ends in .jsonl, .json, .parquet; rename or convert it"),
        ("empty", r"path=empty: the folder holds no .jsonl, .json, .parquet file"),
    ],
)
def test_a_path_is_looked_up_at_once(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        load_steps(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 no more", "no Parquet file, or a damaged one"),
        ("a.json", b'[{"prompt": ', "begins like a JSON array but is none"),
        ("a.jsonl", b"", "no example to use; there are no rows"),
    ],
)
def test_a_damaged_file_is_named_in_one_line_whatever_is_done_with_bad_rows(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(load_steps(tmp_path / name, on_bad_row="skip"))
    assert "\n" not in str(caught.value)


def test_reading_takes_no_more_memory_for_more_rows(tmp_path):
    row = {**ROWS[0], "filler": "x" * 2000}
    path = jsonl(tmp_path / "a.jsonl", [row] * 3000)
    table = pa.Table.from_pylist([row] * 3000)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for file in (path, tmp_path / "a.parquet"):
        data = load_steps(file)
        tracemalloc.start()
        assert sum(1 for _ in data) == 3000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # the rows are 6 MB
        tracemalloc.stop()


def test_the_first_rows_only():
    def rows():
        yield from ROWS[:2]
        raise AssertionError("read too far")

    assert len(list(load_steps(ROWS, limit=2))) == 2
    assert len(list(load_steps(rows(), limit=1))) == 1
    with pytest.raises(InputError, match="limit=0: give a number of rows from 1 on"):
        load_steps(ROWS, limit=0)


# ---- bad rows


@pytest.mark.parametrize(
    ("line", "reason", "told"),
    [
        (json.dumps(BAD), "count_mismatch", "2 steps but 1 labels ['9+9=?']"),
        (
            json.dumps({**BAD, "labels": [1, 7]}),
            "unknown_label",
            "step 2 has the label 7; known are true, false and 0 to 1 ['9+9=?']",
        ),
        (
            json.dumps({**BAD, "labels": [1, 1], "completions": ["a", ""]}),
            "empty_step",
            "step 2 of 2 is empty ['9+9=?']",
        ),
        (json.dumps({**BAD, "labels": [], "completions": []}), "no_steps", "there is no step ['9+9=?']"),
        (json.dumps({**BAD, "labels": [1, None]}), "null", "the label of step 2 is null ['9+9=?']"),
        (json.dumps({"prompt": "p"}), "missing_column", "no column 'completions'; there are 'prompt' ['p']"),
        (json.dumps({**ROWS[0], "prompt": " \n"}), "empty_prompt", "the prompt is empty ['']"),
        ("null", "null", "the row is no object with columns but None"),
        ("[1, 2]", "wrong_type", "the row is no object with columns but [1, 2]"),
        ('"text"', "wrong_type", "the row is no object with columns but 'text'"),
        (
            '{"prompt": "1',
            "invalid_json",
            "the line is no JSON object in UTF-8 (Unterminated string starting at: line 1 column 12 (char 11)): "
            """'{"prompt": "1'""",
        ),
        ("[" * 99_999, "invalid_json", "the line is nested too deep"),
        (
            json.dumps({**ROWS[0], "prompt": "\ud800?"}),
            "invalid_text",
            r"the text holds half a surrogate pair, which no tokenizer reads ['\ud800?']",
        ),
    ],
)
def test_a_bad_row_stops_with_its_place_or_is_skipped_and_counted(tmp_path, caplog, line, reason, told):
    good = json.dumps(ROWS[0])
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{line}\n{line}\n{good}\n")
    with pytest.raises(InputError) as caught:
        list(load_steps(path))
    assert str(caught.value) == f"{path}, row 2: {told}; mend or drop it, or set on_bad_row=skip"
    data = load_steps(path, on_bad_row="skip")
    with caplog.at_level(logging.WARNING):
        assert prompts(data) == ["1+1=?", "1+1=?"]
    assert (data.report.rows, data.report.skipped) == (4, {reason: 2})
    assert data.report.first_skipped == {reason: f"{path}, row 2: {told}"}
    assert caplog.messages == [
        f"skipped: {path}, row 2: {told}",
        f"4 rows, 2 examples, 4 steps; 4 right, 0 wrong, 0 unlabelled; 2 rows skipped (2 {reason})",
    ]


def test_bytes_that_are_no_utf8_are_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n' + json.dumps(ROWS[0]).encode())
    data = load_steps(tmp_path / "a.jsonl", on_bad_row="skip")
    assert (len(list(data)), data.report.skipped) == (1, {"invalid_json": 1})


def test_nulls_in_parquet_are_named_by_file_and_row(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROWS[0], {**ROWS[0], "completions": None}]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"^{tmp_path}/a.parquet, row 2: column 'completions' is null"):
        list(load_steps(tmp_path / "a.parquet"))


def test_a_long_hostile_text_is_shown_short_and_escaped():
    with pytest.raises(InputError) as caught:
        list(load_steps([{**BAD, "prompt": "\x1b[31m\n" + "long " * 10_000}]))
    text = str(caught.value)
    assert (text.isprintable(), len(text) < 180) == (True, True)
    assert r"['\x1b[31m long long" in text


def test_where_no_row_is_left_the_reasons_are_told():
    with pytest.raises(
        InputError, match=r"^no example to use; rows in memory, row 1: 2 steps but 1 labels \['9\+9=\?'\]$"
    ):
        list(load_steps([BAD, BAD], on_bad_row="skip"))


def test_a_row_without_any_label_is_none_to_train_on():
    rows = [{**ROWS[1], "labels": [None]}, {**ROWS[0], "labels": [None, 1]}]
    data = load_steps(rows, null_label="unlabelled", on_bad_row="skip")
    assert [example.labels for example in data] == [(None, 1.0)]
    assert (data.report.skipped, data.report.unlabelled) == ({"no_label": 1}, 1)


# ---- cutting


def test_cutting_drops_steps_with_their_labels_and_says_so(caplog):
    row = {"prompt": "p", "completions": ["aa", "bb", "cc", "dd"], "labels": [1, 1, 0, 0]}
    data = load_steps([row, ROWS[1]], max_length=10, length=characters)
    with caplog.at_level(logging.WARNING):
        first, second = data
    assert (first.completion, first.labels) == ("aa\nbb\ncc", (1.0, 1.0, 0.0))
    assert second.labels == (0.0,)
    assert (data.report.cut_examples, data.report.dropped_steps, data.report.steps) == (1, 1, 4)
    assert caplog.messages == [
        "2 rows, 2 examples, 4 steps; 2 right, 2 wrong, 0 unlabelled; 1 too long, 1 steps dropped"
    ]


def test_a_row_of_which_nothing_is_left_is_bad_and_gives_no_labels():
    long = {"prompt": "ten tokens", "completions": ["abc", "def"], "labels": [1, 0]}
    with pytest.raises(InputError, match=r"row 1: no labelled step fits in max_length=8 tokens \['ten tokens'\]"):
        list(load_steps([long], max_length=8, length=characters))
    data = load_steps([long, {**long, "prompt": "p"}], max_length=8, length=characters, on_bad_row="skip")
    assert [example.labels for example in data] == [(1.0, 0.0)]
    assert data.report.skipped == {"nothing_left": 1}


def test_a_row_whose_labelled_steps_are_cut_off_has_nothing_left():
    row = {"prompt": "p", "completions": ["aa", "bb"], "labels": [None, 1]}
    data = load_steps([row, ROWS[1]], null_label="unlabelled", on_bad_row="skip").within(10, characters)
    assert prompts(data) == ["p", "2+1=?"]
    data = load_steps([row, {**ROWS[1], "prompt": ""}], null_label="unlabelled", on_bad_row="skip").within(
        4, characters
    )
    with pytest.raises(InputError, match="no labelled step fits in max_length=4"):
        prompts(data)
    assert data.report.skipped == {"nothing_left": 1, "empty_prompt": 1}


def test_a_limit_needs_a_measure():
    with pytest.raises(InputError, match="max_length=8: needs length"):
        load_steps(ROWS, max_length=8)


# ---- formats and options


def test_options_go_to_the_reader_and_wrong_ones_are_named():
    assert next(iter(load_steps(ROWS, separator="\n\n"))).completion == "1+1=2\n\nSo 2."
    with pytest.raises(
        InputError, match="separater: no option of this format; it has separator, null_label, problem_id"
    ):
        load_steps(ROWS, separater=" ")
    with pytest.raises(InputError, match="format=prm: is unknown; give one of stepwise, prm800k, math_shepherd"):
        load_steps(ROWS, format="prm")
    with pytest.raises(InputError, match="on_bad_row=warn: give stop or skip"):
        load_steps(ROWS, on_bad_row="warn")


def test_ones_own_reader_is_a_function_and_what_it_returns_is_checked():
    def read(row, *, flip=False):
        label = float(row["ok"] != flip)
        return [StepExample(row["q"], row["a"], ((0, len(row["a"])),), (label,), row["q"])]

    rows = [{"q": "x", "a": "yes", "ok": True}, {"q": "y", "a": "", "ok": True}, {"q": "z", "a": "  ", "ok": True}]
    data = load_steps(rows, read, flip=True, on_bad_row="skip")
    assert [example.labels for example in data] == [(0.0,)]
    assert data.report.skipped == {"invalid_row": 1, "empty_step": 1}
    assert data.report.first_skipped["invalid_row"].startswith("rows in memory, row 2: 'steps must be in order")


def test_rollouts_that_a_run_saved_are_read_by_the_name_of_their_verifier(tmp_path):
    def rollout(text, *spans):
        offsets = [(place, place + 1) for place in range(len(text))]
        verdicts = {"steps": Verdict(0.5, spans), "answer": Verdict(None)}
        return Rollout([1], range(len(text)), [0.0] * len(text), offsets, text, 0, verdicts=verdicts, reward=0.5)

    rollouts = [rollout("1+1=2\n2+1=4", Span(6, 11, 0.0), Span(0, 5, 1.0), Span(11, 11)), rollout("hm")]
    batch = collate(rollouts)
    path = rollouts_path(tmp_path, 3)
    write_rollouts(path, 3, [Problem("p7", "1+1+1=?", "3")], rollouts, batch, Credit(batch.completion_mask.float()))
    data = load_steps(tmp_path / "rollouts", "rollouts", on_bad_row="skip")
    (example,) = data
    assert (example.step_texts, example.labels) == (["1+1=2", "2+1=4"], (1.0, 0.0))
    assert (example.prompt, example.problem_id) == ("1+1+1=?", "p7")
    assert example.metadata == {"step": 3, "sample": 0, "reward": 0.5, "truncated": False, "reference": "3"}
    assert data.report.skipped == {"no_steps": 1}
    with pytest.raises(InputError, match=r"step_00003.parquet, row 1: no verdict of 'prm'; there are 'steps, answer'"):
        list(load_steps(path, "rollouts", verifier="prm"))


# ---- splitting


def example_of(problem, number=0):
    return StepExample(f"{problem}", f"step {number}", ((0, 6),), (1.0,), problem)


def test_a_split_parts_problems_and_keeps_the_order():
    examples = [example_of(f"p{number % 40}", number) for number in range(400)]
    train, held_out = split_by_problem(examples, 0.25, seed=0)
    assert len(train) + len(held_out) == 400
    assert not {one.problem_id for one in train} & {one.problem_id for one in held_out}
    assert train == [one for one in examples if one in train]
    assert split_by_problem(examples, 0.0, seed=0) == (examples, [])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(max_size=3), min_size=2, max_size=20, unique=True),
    st.floats(0.01, 0.99),
    st.integers(0, 9),
    st.randoms(),
)
def test_a_split_does_not_depend_on_the_order_and_leaves_no_side_empty(names, share, seed, random):
    names = [name or "-" for name in names if name != "-"]
    examples = [example_of(name) for name in names]
    shuffled = random.sample(examples, len(examples))
    train, held_out = split_by_problem(examples, share, seed)
    again = split_by_problem(iter(shuffled), share, seed)
    assert [{one.problem_id for one in side} for side in again] == [
        {one.problem_id for one in side} for side in (train, held_out)
    ]
    assert bool(train) or not examples
    assert bool(held_out) == (len(names) > 1)


def test_more_problems_move_none_of_the_others():
    few, many = ([example_of(f"p{number}") for number in range(count)] for count in (200, 1000))
    held_few, held_many = ({one.problem_id for one in split_by_problem(these, 0.2, seed=3)[1]} for these in (few, many))
    assert held_few == {name for name in held_many if int(name[1:]) < 200}
    assert 160 <= len(held_many) <= 240
    assert held_many != {one.problem_id for one in split_by_problem(many, 0.2, seed=4)[1]}


def test_one_problem_is_trained_on():
    assert split_by_problem([example_of("p"), example_of("p", 1)], 0.9, seed=0)[1] == []
    with pytest.raises(InputError, match=r"held_out=1\.0: is the share of problems"):
        split_by_problem([], 1.0, seed=0)


# ---- conf/prm_data

FILES = sorted((Path(apportion.conf.__file__).parent / "prm_data").glob("*.yaml"))


def test_there_is_a_file_for_every_format():
    assert {path.stem for path in FILES} == {*get_args(Format), "champ", "outcomes"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_builds_and_tells_every_option(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# apportion {'eval' if path.stem == 'processbench' else 'train'}-prm prm_data={path.stem}")
    config = OmegaConf.create(text)
    if OmegaConf.is_missing(config, "path"):
        with pytest.raises(InputError, match=r"prm_data\.path: needs a value"):
            build(config, "prm_data")
        config.path = str(jsonl(tmp_path / "a.jsonl", ROWS))
    data = build(config, "prm_data")
    assert isinstance(data, StepData)
    assert data.on_bad_row == config.on_bad_row
    if path.stem == "champ":
        return
    assert data.reader.func.__name__ == path.stem
    assert data.reader.keywords == data.reader.func.__kwdefaults__
