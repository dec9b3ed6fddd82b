"""The page on credit quality explains every figure that a probe writes and no other, and its code and commands work."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from apportion.experiments.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "credit-quality.md"
SMALL = ["experiment=smoke", "warm_start.steps=60", "threads=1", "probe.problems=4", "probe.resamples=50"]
LEFT_OUT = (
    *("process_return", "pure", "tango", "first_error", "wrong_steps", "good_prefix", "spared_prefix"),
    *("vineppo", "spo_chain", "entropy_mask", "trace_decay", "ktae", "token_baseline"),
)
FEW = [f"probe.strategies.{name}=null" for name in LEFT_OUT]
TABULAR = [
    *("task=tabular", "threads=1", "rollout.group_size=4", "probe.noise.miss=[0.0, 0.5]"),
    *(f"probe.noise.{kind}=[]" for kind in ("false_alarm", "boundary", "calibration")),
    *(f"probe.tabular.{size}" for size in ("policies=2", "groups=2", "noise_policies=2", "runs=1", "steps=2")),
]


def explained() -> list[str]:
    """Keys of the tables of figures; a word in capitals stands for any name."""
    rows = re.findall(r"^\| (`\w+/\w+`(?:, `\w+/\w+`)*) \|", PAGE.read_text(), re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`(.+?)`", row)]


def pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"[A-Z]+", r"\\w+", key))


def figures(folder: Path, file: str = "figures.csv") -> list[dict[str, str]]:
    with (folder / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "outputs" / "mine"
    main(["probe", *SMALL, *FEW, "probe.noise.boundary=[]", f"run.dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def tabular(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "tabular"
    main(["probe", *TABULAR, *FEW, f"run.dir={folder}"])
    return folder


def test_every_figure_is_explained_and_no_other(probed: Path, tabular: Path) -> None:
    files = [(folder, file) for folder in (probed, tabular) for file in ("figures.csv", "noise.csv")]
    rows = [row for place in files for row in figures(*place)]
    written, patterns = {row["figure"] for row in rows}, [pattern(key) for key in explained()]
    assert {key for key in written if not any(one.fullmatch(key) for one in patterns)} == set()
    assert [one.pattern for one in patterns if not any(one.fullmatch(key) for key in written)] == []


def test_no_figure_is_explained_twice() -> None:
    keys = explained()
    assert sorted(keys) == sorted(set(keys))


def test_the_figures_computed_by_hand_are_those_of_the_probe(probed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(probed.parent.parent)
    found: dict[str, float] = {}
    exec(code, found)
    own = {row["figure"]: row["value"] for row in figures(probed) if row["strategy"] == "own_step"}
    assert found["pearson"] == pytest.approx(float(own["quality/pearson"]), abs=1e-6)
    assert found["along"] / found["length"] == pytest.approx(float(own["gradient/cosine"]), abs=1e-9)


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("apportion ")]


@pytest.mark.parametrize("command", commands())
def test_every_command_has_options_that_there_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_each = [re.sub(r"^(credit=[^,]+),.*", r"\1", argument) for argument in shlex.split(command)[1:]]
    main([*one_each, "--cfg", "job"])
    assert "strategies:" in capsys.readouterr().out
