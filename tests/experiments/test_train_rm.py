"""``train-rm``: from preference pairs to a verifier of whole answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion.experiments.cli import main
from apportion.experiments.policies import TinyPolicy
from apportion.verifiers import Sample


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    policy = TinyPolicy(hidden_size=16, layers=1, heads=2, intermediate_size=32).build()
    policy.model.save_pretrained(tmp_path / "backbone")
    policy.tokenizer.save_pretrained(tmp_path / "backbone")
    rows = [
        {"prompt": f"{a}+{b}=?", "chosen": f"[A]{a}[/A]", "rejected": f"[T]{b}[/T]"} for a in range(8) for b in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


COMMAND = ["train-rm", "preferences.path=pairs.jsonl", "backbone=backbone", "threads=1", "run.dir=out"]


def test_the_better_answers_score_higher_and_the_verifier_reads_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*COMMAND, "held_out=0.25", "training.epochs=10", "training.lr=1e-2"])
    shown = capsys.readouterr().out.splitlines()
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["eval/accuracy"] == 1.0
    assert result["pairs"] + result["held_out"] == 64
    assert shown[0].startswith("held-out pairs: ")
    assert "accuracy 1.000" in shown[0]
    assert shown[-1] == str(folder / "out")
    from apportion.prm.reward_model import RewardModel

    better, worse = RewardModel(str(folder / "out" / "model"))(
        [Sample("1+2=?", "[A]1[/A]"), Sample("1+2=?", "[T]2[/T]")]
    )
    assert better.score > worse.score
    with pytest.raises(SystemExit):
        main([*COMMAND, "held_out=0.25", "training.epochs=10", "training.lr=1e-2"])
    assert "holds a finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["held_out=0"], "held_out=0: of 64 pairs none is left to measure on"),
        (["backbone=nowhere/at/all/x"], "nowhere/at/all/x"),
        (["preferences.path=none.jsonl"], "none.jsonl"),
        (["+lr=1"], "lr: nothing reads this key; there are: "),
        (["training.lr=-1"], "lr=-1"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*COMMAND, *arguments])
    assert exit_.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("apportion ")]
    assert message in line
