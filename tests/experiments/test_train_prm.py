"""``train-prm`` and ``eval-prm``: from the policy's solutions to a measured reward model at work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion.experiments.cli import main
from apportion.experiments.eval_prm import verifier_predictions
from apportion.experiments.prm_report import read_scores
from apportion.experiments.train_prm import segmenter_note
from apportion.prm.data import load_steps
from apportion.prm.metrics import flatten_steps, step_measures
from apportion.verifiers import Span, Verdict
from apportion.verifiers.segmenters import Lines

SMALL = ["experiment=smoke", "warm_start.steps=40", "prm.training.epochs=1", "run.resamples=50", "threads=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prm") / "run"
    main(["train-prm", *SMALL, "prm.calibration=platt", f"run.dir={folder}"])
    return folder


def held_out(folder: Path) -> Path:
    return folder / "labels" / "held_out" / "steps.jsonl"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("apportion ")]
    return line


def test_it_leaves_a_model_the_labels_and_a_report(trained: Path) -> None:
    assert (trained / "model" / "prm.json").exists()
    settings = json.loads((trained / "model" / "prm.json").read_text())
    assert settings["segmenter"] == {
        "_target_": "apportion.verifiers.segmenters.Lines",
        "lone_cr": False,
        "ignore": ["[T]"],
    }
    assert settings["calibration"] is not None
    page = (trained / "prm_report.html").read_text()
    assert "apportion train-prm" in page
    assert "position only" in page


def test_the_held_out_problems_are_not_trained_on(trained: Path) -> None:
    train = load_steps(str(trained / "labels" / "train" / "steps.jsonl"), "stepwise")
    assert not {e.prompt for e in train} & {e.prompt for e in load_steps(str(held_out(trained)), "stepwise")}


def test_the_measures_can_be_computed_from_what_was_saved(trained: Path) -> None:
    examples, predictions, baselines = read_scores(trained / "scores.jsonl")
    record = json.loads((trained / "evaluation.json").read_text())
    assert {"majority class", "position only"} <= set(baselines)
    measured = step_measures(flatten_steps(examples, predictions["PRM"], name="PRM"))
    written = json.dumps(record)
    assert json.dumps(measured["roc_auc"].value) in written


def test_the_same_model_scores_the_same_in_eval_prm(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained.parent / "evaluated"
    main(["eval-prm", "prm_data=stepwise", f"prm_data.path={held_out(trained)}", f"+models.again={trained / 'model'}",
          "+verifier@models.exact=chain_steps", "verifier@verifiers.answer=chain_answer",
          f"candidates={held_out(trained)}", "run.resamples=50", f"run.dir={folder}"])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(folder)
    before, after = (read_scores(place / "scores.jsonl")[1] for place in (trained, folder))
    for one, other in zip(before["PRM"], after["again"]):
        assert one == pytest.approx(other, abs=1e-5)
    exact = next(line for line in lines if line.split()[:1] == ["exact"])
    assert exact.split()[1:4] == ["1.000", "1.000", "1.000"]
    assert "majority vote" in (folder / "prm_report.html").read_text()


def test_it_gives_credit_in_a_run(trained: Path) -> None:
    folder = trained.parent / "credited"
    main(["train", "experiment=smoke", "warm_start.steps=40", "run.steps=2", "run.eval_every=0", "threads=1",
          "credit=process/own_step", "verifier@verifiers.steps=prm", f"prm.path={trained / 'model'}",
          f"run.dir={folder}"])  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row.get("verifier/errors_steps", 0) == 0 for row in rows)
    assert any(row.get("credit/uncovered_spans") == 0 for row in rows)


def test_the_folder_of_the_run_in_place_of_the_model_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "eval-prm", "prm_data=stepwise", "prm_data.path=x.jsonl", f"+models.mine={trained}")
    assert line.endswith(f"is the folder of a run; give {trained}/model")


def test_a_finished_run_is_not_overwritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "prm_report.html").read_bytes()
    assert "holds a finished run; choose another run.dir" in refused(capsys, "train-prm", *SMALL, f"run.dir={trained}")
    assert (trained / "prm_report.html").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval-prm"], "prm_data"),
        (["eval-prm", "prm_data=stepwise", "prm_data.path=x.jsonl"], "models: give one: +models.mine=FOLDER"),
        (["eval-prm", "prm_data=stepwise", "prm_data.path=x.jsonl", "+models.mine=nowhere/at/all"], "nowhere/at/all"),
        (["train-prm", "prm_data=stepwise", "prm_data.path=x.jsonl", "threads=1"], "x.jsonl"),
        (["train", "verifier@verifiers.steps=prm"], "prm.path=..."),
        (["train-prm", "+foo=1"], "foo: nothing reads this key"),
        (["train-prm", "held_out=0.5"], "give num_held_out"),
        (["train-prm", "held_out=a", "prm_data=stepwise", "prm_data.path=x.jsonl"], "held_out='a': must be"),
        (["train-prm", "prm_data=stepwise", "prm_data.path=x.jsonl", "labeler=monte_carlo"], "labeler=monte_carlo: no"),
        (["train-prm", "prm_data=stepwise", "prm_data.path=x.jsonl", "num_problems=9"], "num_problems=9: nothing"),
        (["train-prm", "seed=x"], "seed='x': must be a whole number"),
        (["train-prm", "run.resamples=0"], "run.resamples=0: must be at least 1"),
        (["eval-prm", "prm_data=champ", "+models.mine=x", "run.threshold=2"], "run.threshold=2: is a probability"),
        (["eval-prm", "prm_data=champ", "+models.mine=x", "run.threshold=abc"], "run.threshold='abc': must be"),
        (["eval-prm", "prm_data=champ", "+models.mine=x", "run.resamples=x"], "run.resamples='x': must be"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments, f"run.dir={tmp_path / 'run'}")


def test_a_folder_can_be_used_again_after_a_fault(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval-prm", "prm_data=stepwise", f"prm_data.path={held_out(trained)}", f"run.dir={tmp_path / 'out'}",
               "+verifier@models.steps=chain_steps", "run.resamples=20", "threads=1"]  # fmt: skip
    assert "missing.jsonl: no such file" in refused(capsys, *command, "candidates=missing.jsonl")
    unreferenced = tmp_path / "bare.jsonl"
    unreferenced.write_text('{"prompt": "1+1=?", "completion": "2"}\n')
    assert "do the rows have references?" in refused(capsys, *command, f"candidates={unreferenced}")
    main(command)
    assert "holds something already" in refused(capsys, *command)


def test_a_segmenter_that_does_not_fit_the_data_is_told() -> None:
    rows = [{"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]}]
    assert segmenter_note(Lines(), list(load_steps(rows))) is None
    assert segmenter_note(None, list(load_steps(rows, separator=" "))) is None
    note = segmenter_note(Lines(), list(load_steps(rows, separator=" ")))
    assert note is not None
    assert note.startswith("segmenter: cuts 1 of 1 solutions otherwise than the data")


def test_a_verifier_speaks_of_the_steps_that_its_spans_touch(trained: Path) -> None:
    def half(samples):
        return [Verdict(None, (Span(0, 1, 0.25),)) for _ in samples]

    examples = list(load_steps(str(held_out(trained)), "stepwise"))[:5]
    found, note = verifier_predictions(half, examples)
    assert note is None
    for example, row in zip(examples, found):
        assert row == [0.25 if start < 1 else None for start, _ in example.steps]


def test_a_probe_is_measured_by_folds_and_serves_as_a_verifier(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    steps = str(held_out(trained))
    main(["train-prm", "prm=probe", f"prm.backbone.path={trained / 'model'}", "prm_data=stepwise",
          f"prm_data.path={steps}", "held_out=0", "prm.folds=2", "prm.strengths=[0.1]", "run.resamples=50",
          "threads=1", f"run.dir={folder}"])  # fmt: skip
    assert "by folds" in (folder / "prm_report.html").read_text()
    examples, predictions, _ = read_scores(folder / "scores.jsonl")
    assert all(p is not None for row in predictions["PRM"] for p in row)
    judged = tmp_path / "judged"
    main(["verify", steps, "verifier=step_probe", f"verifier.path={folder / 'model'}", f"run.dir={judged}"])
    first = json.loads((judged / "verdicts.jsonl").read_text().split("\n")[0])
    assert len(first["verdicts"]["step_probe"]["spans"]) == len(examples[0].steps)


def test_a_trained_model_is_not_measured_on_its_own_examples(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-prm", *SMALL, "prm_data=stepwise", f"prm_data.path={held_out(trained)}", "held_out=0"]
    assert "held_out=0: a trained model cannot be measured" in refused(capsys, *arguments, f"run.dir={tmp_path / 'x'}")


def test_a_probe_on_the_policy_keeps_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["experiment=smoke", "warm_start.steps=40", "run.resamples=20", "threads=1"]
    main(["train-prm", *small, "prm=probe", "prm.backbone=null", f"run.dir={tmp_path / 'probe'}"])
    capsys.readouterr()
    labelled = ["eval-prm", "prm_data=stepwise", f"prm_data.path={held_out(tmp_path / 'probe')}"]
    probe = tmp_path / "probe" / "model"
    assert "use verifier=step_probe" in refused(capsys, *labelled, f"+models.mine={probe}")
    main([*labelled,
          "+verifier@models.mine=step_probe", f"models.mine.path={tmp_path / 'probe' / 'model'}", "threads=1",
          "run.resamples=20", f"run.dir={tmp_path / 'eval'}"])  # fmt: skip
    _, trained_scores, _ = read_scores(tmp_path / "probe" / "scores.jsonl")
    _, used_scores, _ = read_scores(tmp_path / "eval" / "scores.jsonl")
    for row, other in zip(trained_scores["PRM"], used_scores["mine"], strict=True):
        assert row == pytest.approx(other, abs=1e-6)


def test_a_calibration_needs_right_and_wrong_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "steps.jsonl"
    data.write_text("".join(f'{{"prompt": "p{n}", "completions": ["a"], "labels": [1]}}\n' for n in range(20)))
    line = refused(capsys, "train-prm", "prm_data=stepwise", f"prm_data.path={data}", "prm.calibration=isotonic",
                   "warm_start.steps=1", "threads=1", f"run.dir={tmp_path / 'run'}")  # fmt: skip
    assert "prm.calibration_share=0.1: the" in line


def test_an_implicit_model_is_learned_from_outcomes_and_goes_on_online(trained: Path, tmp_path: Path) -> None:
    steps = [json.loads(line) for line in held_out(trained).read_text().splitlines()]
    rows = [{"prompt": s["prompt"], "completion": s["completion"], "label": n % 2} for n, s in enumerate(steps)]
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "implicit"
    main(["train-prm", "prm=implicit", "prm_data=outcomes", f"prm_data.path={tmp_path / 'outcomes.jsonl'}",
          "experiment=smoke", "warm_start.steps=40", "held_out=0.5", "run.resamples=20", "prm.options.epochs=1",
          "threads=1", f"run.dir={folder}"])  # fmt: skip
    _, predictions, _ = read_scores(folder / "scores.jsonl")
    scores = [p for row in predictions["PRM"] for p in row]
    assert len(set(scores)) > 1
    assert all(0 < p < 1 for p in scores)
    main(["train", "experiment=smoke", "warm_start.steps=40", "run.steps=1", "run.eval_every=0", "threads=1",
          "credit=process/prime", "scorer@scorers.implicit=implicit_online",
          f"scorers.implicit.path={folder / 'model'}", f"run.dir={tmp_path / 'online'}"])  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "online" / "metrics.jsonl").read_text().splitlines()]
    assert any("implicit/loss" in row for row in rows)


def test_a_model_that_no_verifier_reads_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "experiment=smoke", f"prm.path={trained / 'model'}", f"run.dir={tmp_path / 'x'}"]
    assert "no verifier reads it; add verifier@verifiers.steps=prm" in refused(capsys, *arguments)
