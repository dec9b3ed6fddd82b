"""The report of a process reward model: its numbers, what it must show, and that hostile text stays text."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from apportion.experiments.prm_report import Evaluation, build_prm_report, evaluate_steps, read_scores
from apportion.experiments.prm_report.evaluation import COMPARED
from apportion.experiments.prm_report.records import evaluation_record, score_lines
from apportion.experiments.prm_report.solutions import show_solutions
from apportion.experiments.prm_report.words import cautions, findings, headline, verdict
from apportion.prm import StepExample
from apportion.prm.best_of_n import Candidate, CandidateGroup, measure_best_of_n
from apportion.prm.metrics import Predictions, flatten_steps, roc_auc
from apportion.prm.process_bench import first_error_label, first_error_prediction, first_error_scores
from apportion.verifiers import InputError


def chains(problems: int = 40, seed: int = 0, *, subsets: tuple[str, ...] = ("easy", "hard")) -> list[StepExample]:
    """Two chains for each problem; one in two goes wrong somewhere and is not labelled after that."""
    generator = np.random.default_rng(seed)
    examples = []
    for problem in range(problems):
        for _ in range(2):
            count = int(generator.integers(3, 7))
            wrong = int(generator.integers(0, count)) if generator.random() < 0.5 else count
            labels = [1.0 if k < wrong else 0.0 if k == wrong else None for k in range(count)]
            texts = [f"{generator.integers(10)}+{generator.integers(10)}={generator.integers(10)}" for _ in labels]
            spans = tuple((6 * k, 6 * k + 5) for k in range(count))
            told = {"subset": subsets[problem % len(subsets)]}
            examples.append(
                StepExample(f"chain {problem}", "\n".join(texts), spans, tuple(labels), f"p{problem}", told)
            )
    return examples


def scores(examples: list[StepExample], noise: float, seed: int = 1) -> list[list[float]]:
    """Probabilities that follow the labels through noise; steps without a label hover about a half."""
    generator = np.random.default_rng(seed)
    known = [[0.5 if label is None else label for label in e.labels] for e in examples]
    return [[float(1 / (1 + np.exp(2 - 4 * y - noise * generator.normal()))) for y in row] for row in known]


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    examples = chains()
    generator = np.random.default_rng(2)
    groups = [
        CandidateGroup(
            str(k),
            tuple(
                Candidate(
                    tuple(generator.beta(3 + 3 * right, 2, 3).tolist()),
                    str(0 if right else generator.integers(1, 4)),
                    right,
                )
                for right in (generator.random(4) < 0.5).tolist()
            ),
        )
        for k in range(12)
    ]
    return evaluate_steps(
        examples,
        {"good": scores(examples, 1.0), "noisy": scores(examples, 6.0)},
        resamples=400,
        title="chains",
        command="apportion eval-prm prm.path=x",
        best_of_n=measure_best_of_n(groups, resamples=100),
    )


@pytest.fixture(scope="module")
def folder(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    assert build_prm_report(evaluation, place / "prm_report.html") == place / "prm_report.html"
    return place


class Page(HTMLParser):
    """What a browser would see: tags, attributes, ids and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.headings: list[str] = []
        self.parts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self.ids.update(value for key, value in attrs if key == "id" and value)

    def handle_data(self, data: str) -> None:
        if self.lasttag != "style":
            self.parts.append(data)
        if self.lasttag in {"h1", "h2"} and data.strip():
            self.headings.append(data.strip())


def page_of(evaluation: Evaluation, folder: Path) -> Page:
    return Page(build_prm_report(evaluation, folder / "prm_report.html").read_text("utf-8"))


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "prm_report.html").read_text("utf-8"))


# The numbers


def test_measures_are_those_of_the_functions(evaluation: Evaluation) -> None:
    good = evaluation.predictors[0]
    steps = flatten_steps(evaluation.examples, good.predictions)
    assert good.measures["roc_auc"].value == roc_auc(steps.labels, steps.probabilities)
    low, high = good.intervals["roc_auc"]
    assert low < good.measures["roc_auc"].value < high
    labels = [first_error_label(e.labels) for e in evaluation.examples]
    said = [first_error_prediction(row) for row in good.predictions]
    rows = [k for k, e in enumerate(evaluation.examples) if e.metadata["subset"] == "hard"]
    expected = first_error_scores([labels[k] or 0 for k in rows], [said[k] for k in rows])
    assert good.fixed.scores["hard"] == expected
    assert good.fixed.mean_f1 == pytest.approx((good.fixed.scores["easy"].f1 + expected.f1) / 2)


def test_intervals_belong_to_their_numbers() -> None:
    """Solutions all alike: every resample with both kinds gives the same figure, so its interval has no width."""
    solutions = [
        StepExample("q", "a b", ((0, 1), (2, 3)), labels, f"p{k}")
        for k in range(40)
        for labels in ((1.0, 1.0), (1.0, 0.0))
    ]
    e = evaluate_steps(solutions, {"m": [[0.4, 0.45], [0.4, 0.2]] * 40}, resamples=50)
    fixed, tuned = e.models[0].fixed, e.models[0].tuned
    assert (fixed.mean_f1, fixed.mean_interval, fixed.intervals["all"]) == (0.0, (0.0, 0.0), (0.0, 0.0))
    assert (tuned.mean_f1, tuned.mean_interval, tuned.intervals["all"]) == (100.0, (100.0, 100.0), (100.0, 100.0))
    assert e.models[0].min_at_last_interval == (0.5, 0.5)
    assert e.differences[0].values["first_error_f1_tuned"] == (100.0, (100.0, 100.0))


def test_baselines_always_come_along(evaluation: Evaluation, page: Page) -> None:
    names = [p.name for p in evaluation.predictors]
    assert names == ["good", "noisy", "majority class", "position only", "characters and position"]
    assert [p.is_baseline for p in evaluation.predictors] == [False, False, True, True, True]
    assert len({p.index for p in evaluation.predictors}) == 5
    assert evaluation.predictors[2].measures["roc_auc"].value == 0.5
    for name in names:
        assert page.text.count(name) > 3


def test_model_may_not_take_a_baselines_name() -> None:
    examples = chains(4)
    with pytest.raises(InputError, match="a baseline has this name"):
        evaluate_steps(examples, {"position only": scores(examples, 1.0)}, resamples=10)


def test_differences_are_paired_and_cover_every_baseline(evaluation: Evaluation) -> None:
    pairs = [(d.name, d.other) for d in evaluation.differences]
    assert pairs[:3] == [("good", b.name) for b in evaluation.baselines]
    assert pairs[3] == ("noisy", "good")
    against = evaluation.difference("noisy", "good")
    assert against is not None
    gap, interval = against.values["roc_auc"]
    first, second = (p.measures["roc_auc"].value for p in evaluation.models)
    assert gap == pytest.approx(second - first)
    assert interval.low < gap < interval.high
    assert tuple(against.values) == COMPARED


def test_every_number_comes_back_from_the_scores(evaluation: Evaluation, folder: Path) -> None:
    examples, predictions, baselines = read_scores(folder / "scores.jsonl")
    again = evaluate_steps(
        examples,
        predictions,
        baselines=baselines,
        resamples=400,
        title="chains",
        command=evaluation.command,
        best_of_n=evaluation.best_of_n,
    )
    assert evaluation_record(again) == evaluation_record(evaluation)
    assert score_lines(again) == score_lines(evaluation)
    record = json.loads((folder / "evaluation.json").read_text())
    assert record == json.loads(json.dumps(evaluation_record(evaluation)))
    assert record["predictors"]["good"]["measures"]["brier"]["value"] == evaluation.models[0].measures["brier"].value


def test_broken_row_of_scores_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text(score_lines(evaluate_steps(chains(2), {}, resamples=10)) + '{"steps": 1}\n')
    with pytest.raises(InputError, match="line 5: no row of scores"):
        read_scores(path)


def test_threshold_can_be_tuned_on_one_subset() -> None:
    examples = chains(20)
    e = evaluate_steps(examples, {"m": scores(examples, 1.0)}, tune_on="easy", resamples=10)
    assert len(e.models[0].tuned.thresholds) == 1
    said = [first_error_prediction(row, e.models[0].tuned.thresholds[0]) for row in e.models[0].predictions]
    assert list(e.models[0].tuned.predictions) == said
    with pytest.raises(InputError, match="tune_on=gsm8k: no such subset; there are easy, hard"):
        evaluate_steps(examples, {}, tune_on="gsm8k", resamples=10)


def test_baselines_can_be_fitted_on_the_training_solutions() -> None:
    e = evaluate_steps(chains(6), {}, train=chains(20, seed=5), resamples=10)
    assert e.fitted == "were fitted on 40 training solutions"
    assert headline(e).startswith("Baselines only: ROC-AUC")


# What it says


def test_page_says_what_was_measured(page: Page, evaluation: Evaluation) -> None:
    assert page.headings[1:] == [
        "Step by step",
        "Curves",
        "By position",
        "The first error",
        "Best of N",
        "Solutions with their scores",
        "To compute this again",
    ]
    assert page.headings[0] == headline(evaluation)
    assert headline(evaluation).startswith("good beats every baseline: ROC-AUC 0.")
    assert "apportion eval-prm prm.path=x" in page.text
    assert (
        f"{evaluation.counts.labelled} are labelled ({evaluation.counts.wrong} wrong, 0 between 0 and 1)" in page.text
    )
    for p in evaluation.predictors:
        assert f"{p.measures['roc_auc'].value:.3f}" in page.text
        assert f"{p.tuned.mean_f1:.1f}" in page.text


def test_page_stands_alone(page: Page) -> None:
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.tags["svg"] >= 4
    assert max(page.ids.values()) == 1
    outside = [v for k, v in page.attributes if k in {"src", "href"} and v and not v.startswith(("#", "data:"))]
    assert outside == []
    targets = {v[1:] for k, v in page.attributes if k == "href" and v and v.startswith("#")}
    assert targets <= set(page.ids)


def test_no_winner_whose_interval_crosses_zero() -> None:
    examples = chains(12)
    e = evaluate_steps(examples, {"blind": scores(examples, 60.0)}, resamples=400)
    words = {b.name: verdict(e, "blind", b.name) for b in e.baselines}
    for b in e.baselines:
        difference = e.difference("blind", b.name)
        assert difference is not None
        assert (words[b.name] == "no difference shown") != difference.values["roc_auc"][1].excludes_zero
    assert "no difference shown" in words.values()
    assert headline(e).startswith(("blind is not shown to beat", "blind is worse than"))


def test_two_models_with_the_same_scores_do_not_differ() -> None:
    examples = chains(10)
    e = evaluate_steps(examples, {"a": scores(examples, 1.0), "b": scores(examples, 1.0)}, resamples=100)
    assert findings(e)[-1].startswith("No difference between b and a is shown")
    difference = e.difference("b", "a")
    assert difference is not None
    assert all(gap == 0 and interval == (0, 0) for gap, interval in difference.values.values())


def test_one_class_and_one_problem_are_said_and_not_made_up(tmp_path: Path) -> None:
    right = StepExample("q", "a\nb", ((0, 1), (2, 3)), (1.0, 1.0), "p")
    e = evaluate_steps([right, right], {"m": [[0.9, 0.8], [0.7, 0.9]]}, resamples=20)
    assert math.isnan(e.models[0].measures["roc_auc"].value)
    assert not e.models[0].intervals["brier"].known
    assert headline(e) == "m has no ROC-AUC: no labelled step is wrong."
    said = " ".join(cautions(e))
    assert "Only one problem" in said
    assert "no labelled step is wrong" in said
    assert "position only could not be computed" in said
    page = page_of(e, tmp_path)
    assert "nan" not in page.text.lower().replace("finance", "")
    assert (
        json.loads((tmp_path / "evaluation.json").read_text())["predictors"]["m"]["measures"]["roc_auc"]["value"]
        is None
    )


def test_nothing_at_all_still_makes_a_page(tmp_path: Path) -> None:
    for examples in ([], [StepExample("q", "a", ((0, 1),), (None,), "p")]):
        e = evaluate_steps(examples, {"m": [[0.5]] * len(examples)}, resamples=10)
        assert page_of(e, tmp_path).headings[0] == "m has no ROC-AUC: no step has both a label and a score."


def test_soft_labels_holes_and_unknown_first_errors_are_counted() -> None:
    examples = [replace(e, labels=(0.7, None, *e.labels[2:])) for e in chains(30)]
    predictions: Predictions = [[None, *row[1:]] for row in scores(examples, 1.0)]
    e = evaluate_steps(examples, {"m": predictions}, resamples=20)
    assert e.counts.soft == 60
    assert e.counts.first_errors == 0
    said = " ".join(cautions(e))
    assert "m gave no score to 60 labelled steps" in said
    assert f"60 of {e.counts.labelled} labels lie between 0 and 1" in said
    assert "60 of 60 solutions have an unlabelled step before any known error" in said


def test_judge_of_answers_is_called_one() -> None:
    examples = [replace(e, labels=tuple(1.0 for _ in e.labels)) for e in chains(30)]
    falling = [[0.9 - 0.1 * k for k in range(len(e.steps))] for e in examples]
    e = evaluate_steps(examples, {"m": falling}, resamples=50)
    assert e.models[0].min_at_last.value == 1.0
    assert any("lowest score on the last step in 100% of solutions" in said for said in cautions(e))


def test_shown_solutions_are_varied_and_mark_the_first_error(evaluation: Evaluation) -> None:
    shown = show_solutions(evaluation)
    assert len(shown) == 6
    kinds = {s.happened.split(":")[0] for s in shown}
    assert len(kinds) >= 4
    assert {"first error named", "no error, none named"} < kinds
    for s in shown:
        underlined = [step for step in s.steps if ' e"' in str(step.html) or 'class="e"' in str(step.html)]
        assert [step.number for step in underlined] == [step.number for step in s.steps if step.label == "wrong"]
        assert all("good" not in step.others and "position only" in step.others for step in s.steps)


def test_step_heat_by_hand() -> None:
    example = StepExample("q", "a<\nb", ((0, 2), (3, 4)), (1.0, 0.0), "p")
    other = StepExample("q", "x", ((0, 1),), (1.0,), "r")
    e = evaluate_steps([example, other], {"m": [[0.75, 0.1], [0.5]]}, resamples=10)
    steps = {s.problem_id: s for s in show_solutions(e)}
    assert [str(step.html) for step in steps["p"].steps] == [
        '<span class="p" style="--w:0.50">a&lt;</span>',
        '<span class="n e" style="--w:0.80">b</span>',
    ]
    assert [str(step.html) for step in steps["r"].steps] == ['<span class="p" style="--w:0.00">x</span>']


def test_long_solution_is_cut_around_its_error() -> None:
    count = 200
    labels = (*[1.0] * 150, 0.0, *[None] * (count - 151))
    long = StepExample("q", "x\n" * count, tuple((2 * k, 2 * k + 1) for k in range(count)), labels, "p")
    wide = StepExample("q", "y" * 5000, ((0, 5000),), (1.0,), "r")
    e = evaluate_steps([long, wide], {"m": [[0.9] * count, [0.9]]}, resamples=10)
    steps = {s.problem_id: s for s in show_solutions(e)}
    assert len(steps["p"].steps) == 24
    assert steps["p"].before + 24 + steps["p"].after == count
    assert "wrong" in {step.label for step in steps["p"].steps}
    assert "4,100 characters" in str(steps["r"].steps[0].html)


HOSTILE = ["<script>alert(1)</script>", "</style></code><b>", "\ud800 \u202eevil\x07", 'x" onload="1']


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    examples = []
    for k, text in enumerate(HOSTILE):
        spans = ((0, len(text)), (len(text) + 1, 2 * len(text) + 1))
        told = {"subset": "<svg onload=x>"}
        examples.append(StepExample(text, f"{text}\n{text}", spans, (1.0, float(k % 2)), f"{text}{k}", told))
    name = "<img src=x onerror=1>"
    e = evaluate_steps(examples, {name: scores(examples, 1.0)}, resamples=20, title="<b>", command="a </pre> & b")
    page = page_of(e, tmp_path)
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.tags["style"] == 1
    assert all(not key.startswith("on") for key, _ in page.attributes)
    assert "<script>alert(1)</script>" in page.text
    assert name in page.text
    assert "a </pre> & b" in page.text
    assert "⟨U+202E⟩" in page.text
    assert "\u202e" not in page.text
    examples_again, _, _ = read_scores(tmp_path / "scores.jsonl")
    assert [e.completion for e in examples_again] == [e.completion for e in examples]


def test_files_appear_whole_or_not_at_all(evaluation: Evaluation, tmp_path: Path, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "prm_report.html", "scores.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the report there"):
        build_prm_report(evaluation, tmp_path / "file" / "prm_report.html")


# In a browser


def chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "/usr/bin/chromium"
    if not Path(program).exists():
        pytest.skip(f"{program} is not there: install Chromium to open the report in a browser")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom"]
    return subprocess.run([program, *flags, *arguments], capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.browser
def test_report_opens_without_a_word_on_the_console(folder: Path, tmp_path: Path) -> None:
    done = chromium(f"--user-data-dir={tmp_path / 'profile'}", (folder / "prm_report.html").as_uri())
    assert "</html>" in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.browser
def test_nothing_is_wider_than_a_small_screen(folder: Path, tmp_path: Path) -> None:
    """Measured by a page around the report, since the report itself runs no script."""
    frame = tmp_path / "frame.html"
    policy = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
    report = policy.sub("", (folder / "prm_report.html").read_text("utf-8"))
    script = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></html>"
    frame.write_text(report.replace("</html>", script), encoding="utf-8")
    done = chromium("--window-size=480,900", f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri())
    found = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert found is not None
    assert int(found[1]) <= int(found[2])
