"""``apportion verify``: what it draws is what it saved, and what it saved is what the verifiers said."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apportion.experiments.cli import main
from apportion.experiments.verdict_view import marked_lines
from apportion.verifiers import Span

ROWS = [
    {"completion": "He has 12 + 7 = 19.\nThen 世界 4 × 2.5 = 12.", "answer": "19", "level": 1},
    {"completion": "Nothing to check.", "answer": 3, "level": 2},
    {"completion": "1 + 1 = 3", "answer": 2, "level": 3},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def verify(*arguments: str) -> None:
    main(["verify", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        verify(*arguments)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("apportion verify: ")


def saved(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


def test_the_faults_are_underlined_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify("answers.jsonl", "verifier=arithmetic", "run.dir=out")
    out = capsys.readouterr().out.splitlines()
    row = next(line for line in out if line.split()[:1] == ["arithmetic"])
    assert row.split()[1:-1] == ["2", "1", "0", "0.250", "50.0%", "3", "2"]
    first = out.index("  Then 世界 4 × 2.5 = 12.")
    assert out[first + 1] == "            ^^^^^^^^^^^^ arithmetic: wrong equation: 4 × 2.5 = 12"
    assert "  ^^^^^^^^^ arithmetic: wrong equation: 1 + 1 = 3" in out
    assert not any("12 + 7" in line for line in out)
    assert out[-1] == str(folder / "out")


def test_every_verdict_is_kept_with_the_text_that_it_is_about(folder: Path) -> None:
    verify("answers.jsonl", "verifier=number", "verifier.extract=last_number", "+verifier@verifiers.eq=arithmetic",
           "run.dir=out", "run.batch=2")  # fmt: skip
    rows = saved(folder / "out")
    assert [row["row"] for row in rows] == [1, 2, 3]
    assert [row["completion"] for row in rows] == [row["completion"] for row in ROWS]
    assert [row["verdicts"]["number"]["score"] for row in rows] == [0.0, 0.0, 0.0]
    assert [row["verdicts"]["eq"]["score"] for row in rows] == [0.5, None, 0.0]
    for row in rows:
        for said in row["verdicts"].values():
            assert all(span["text"] == row["completion"][span["start"] : span["stop"]] for span in said["spans"])


def test_a_fault_of_a_verifier_is_an_error_and_no_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "moody.py").write_text(
        "def moody(completions, level, **rest):\n    return [1 / (2 - x) for x in level]\n"
    )
    verify("answers.jsonl", "~verifier", "+verifier._target_=moody.moody", "run.dir=out")
    shown = capsys.readouterr()
    assert [row["verdicts"]["verifier"] for row in saved(folder / "out")] == [
        {"score": 1.0, "spans": []},
        {"score": None, "spans": [], "error": True},
        {"score": -1.0, "spans": []},
    ]
    row = next(line for line in shown.out.splitlines() if line.split()[:1] == ["verifier"] and "judged" not in line)
    assert row.split()[1:4] == ["2", "0", "1"]
    assert "verifier 'verifier': ZeroDivisionError: division by zero (completion 'Nothing to check.')" in shown.err


def test_what_was_judged_before_an_interruption_is_not_asked_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "stops_at_three.py").write_text(
        "import pathlib\n\ndef stops(samples):\n"
        "    if samples[0].metadata['level'] == 3 and not pathlib.Path('again').exists():\n"
        "        raise KeyboardInterrupt\n"
        "    with open('asked', 'a') as log:\n        log.write(f'{len(samples)} ')\n"
        "    return [0.5] * len(samples)\n"
    )
    command = ["answers.jsonl", "~verifier", "+verifier._target_=stops_at_three.stops", "run.dir=out", "run.batch=1"]
    with pytest.raises(SystemExit) as exit_:
        verify(*command)
    assert exit_.value.code == 130
    assert "goes on from here" in capsys.readouterr().err
    (folder / "again").touch()
    verify(*command)
    verify(*command)  # all is there; nobody is asked
    assert (folder / "asked").read_text() == "1 1 1 "
    assert [row["verdicts"]["verifier"]["score"] for row in saved(folder / "out")] == [0.5] * 3


def test_parquet_and_inline_completions(folder: Path) -> None:
    rows = [{**row, "answer": str(row["answer"]), "completion_ids": [1, 2, 3]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), "answers.parquet")
    verify("answers.parquet", "verifier=soft_overlong", "verifier.max_length=4", "verifier.buffer=2", "run.dir=a")
    assert [row["verdicts"]["soft_overlong"]["score"] for row in saved(folder / "a")] == [-0.5] * 3
    verify("completions=['2 + 2 = 4', {completion: '2 + 2 = 5'}]", "run.dir=b")
    assert [row["verdicts"]["arithmetic"]["score"] for row in saved(folder / "b")] == [1.0, 0.0]


def test_the_smoke_run_needs_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify("experiment=smoke", "run.dir=out")
    assert [row["verdicts"]["arithmetic"]["score"] for row in saved(folder / "out")] == [1.0, 0.5, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "file: give the file to verify: apportion verify FILE.jsonl verifier=..."),
        (["none.jsonl"], "file=none.jsonl: no such file; paths are relative to"),
        (["answers.jsonl", "completion=text"], "answers.jsonl, row 1: column 'text' is missing; the columns are "),
        (["answers.jsonl", "completion=level"], "row 1: column 'level' is not text but int; "),
        (["answers.jsonl", "reference=gold"], "answers.jsonl, row 1: no column 'gold'; set reference=COLUMN, or null"),
        (["answers.jsonl", "~verifier"], "verifier: give one: verifier=arithmetic"),
        (["answers.jsonl", "verifier=arithmetik"], "arithmetik"),
        (["answers.jsonl", "+verifyer.x=1"], "verifyer: nothing reads this key; there are: "),
        (["empty.jsonl"], "file=empty.jsonl: no row to verify; give one JSON object a line"),
        (["bad.jsonl"], "bad.jsonl, row 2: "),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (folder / "empty.jsonl").write_text("\n")
    (folder / "bad.jsonl").write_text('{"completion": "a"}\n{"completion": \n')
    assert message in refused(capsys, *arguments)


def test_other_options_do_not_mix_with_verdicts_that_are_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify("answers.jsonl", "run.dir=out")
    before = (folder / "out" / "verdicts.jsonl").read_text()
    assert "holds verdicts made with other options (verifier." in refused(
        capsys, "answers.jsonl", "run.dir=out", "verifier.allow_rounding=true"
    )
    assert (folder / "out" / "verdicts.jsonl").read_text() == before


def test_what_steers_a_terminal_is_shown_as_a_sign() -> None:
    text = "a\x1b[31mred\rb\u202ec \ud800"
    ((line, notes),) = marked_lines(text, [("v", Span(1, 2, 0.0, "escape"))])
    assert line == "a�[31mred�b�c �"
    assert notes == [(1, 2, "v: escape")]


def test_a_fault_over_several_lines_is_marked_on_each() -> None:
    assert marked_lines("ab\n\ncd", [("v", Span(1, 5, 0.0))]) == [("ab", [(1, 2, "v")]), ("cd", [(0, 1, "v")])]


@pytest.mark.parametrize("span", [Span(2, 2, 0.0), Span(2, 3, 0.0)])
def test_a_fault_without_visible_characters_is_marked_where_it_is(span: Span) -> None:
    assert marked_lines("ab\n\ncd", [("v", span)])[0] == ("ab", [(2, 2, "v")])


def test_a_long_line_is_cut_around_its_fault() -> None:
    text = "x" * 1000 + "BAD" + "y" * 1000
    ((line, ((start, stop, _),)),) = marked_lines(text, [("v", Span(1000, 1003, 0.0))])
    assert line[start:stop] == "BAD"
    assert (line[0], line[-1], len(line)) == ("…", "…", 162)


def test_a_verifier_that_cannot_work_is_refused_before_anything_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "late.py").write_text(
        "from apportion.verifiers import InputError\n\n\nclass Late:\n"
        "    def prepare(self):\n        raise InputError('no model there; get one')\n"
        "    def __call__(self, samples):\n        raise AssertionError\n"
    )
    message = refused(capsys, "nowhere.jsonl", "~verifier", "+verifier._target_=late.Late")
    assert message == "verifier: no model there; get one"


def test_a_verifier_of_ones_own_takes_the_place_of_the_default(folder: Path) -> None:
    (folder / "a_quarter.py").write_text("def mine(samples):\n    return [0.25] * len(samples)\n")
    verify("answers.jsonl", "+verifier._target_=a_quarter.mine", "run.dir=out")
    assert [list(row["verdicts"]) for row in saved(folder / "out")] == [["verifier"]] * 3


def test_a_verifier_that_always_abstains_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify("answers.jsonl", "verifier=python_tests", "run.dir=out")
    assert "python_tests abstained from every completion: does the file hold what it reads" in capsys.readouterr().err
