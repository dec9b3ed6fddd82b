"""The report of a synthetic ablation: what it says, what it must not say, and that hostile text stays text."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from apportion.experiments.report import charts, notes
from apportion.experiments.report.build import build_report
from apportion.experiments.report.heat import Fault
from apportion.experiments.report.load import load_ablation, load_cell
from apportion.experiments.report.rollouts import exhibit, read_rollouts
from apportion.experiments.report.summary import COLUMNS, summarise
from apportion.experiments.report.terminal import results_table
from apportion.verifiers import InputError

TOLD = {
    "uniform": ("nothing: the answer's reward alone", ["reward"]),
    "process_return": ("a score for every step", ["spans:steps"]),
    "own_step": ("a score for every step", ["spans:steps"]),
    "localized_cliff": ("where the first error is", ["reward", "spans:steps"]),
    "localized_capo": ("which steps are wrong, in every answer", ["reward", "spans:steps"]),
    "format_composition": ("a second score, for the format, and where it was lost", ["reward", "spans:format"]),
    "shuffled": ("a score for every step, then moved to random places", ["spans:steps"]),
    "oracle": ("the task's own truth of every token: a ceiling, not a method", ["spans:truth"]),
}
REACHES = {"process_return": 0.89, "own_step": 0.94, "localized_cliff": 0.80, "localized_capo": 0.86, "oracle": 0.97}
RATE = {"process_return": 0.055, "own_step": 0.075, "localized_capo": 0.045, "oracle": 0.1}
CREDIT = {name: {"_target_": f"apportion.credit.{name}", "eps": 1e-6} for name in TOLD} | {
    "shuffled": {
        "_target_": "apportion.credit.Shuffled",
        "inner": {"_target_": "apportion.credit.own_step", "eps": 1e-6},
    }
}


def write_ablation(
    folder: Path,
    strategies: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int = 60,
    budget: str = "steps",
    prompts: int = 4,
    group: int = 8,
    completions: Sequence[str] = (),
) -> Path:
    """Lay out an ablation folder as the trainer does. ``completions`` replace the first answers of each batch."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "command": "apportion ablate experiment=synthetic",
        "baseline": "uniform",
        "strategies": list(strategies),
        "seeds": list(seeds),
        "budget": {"kind": budget, "value": steps if budget == "steps" else steps * 1000},
        "threshold": 0.8,
        "task": "chain (mid)",
        "started": "2026-01-05T09:30:00",
        "apportion": "0.1.0",
    }
    (folder / "ablation.json").write_text(json.dumps(plan))
    for strategy in strategies:
        for seed in seeds:
            write_cell(folder, strategy, seed, steps=steps, prompts=prompts, group=group, completions=completions)
    return folder


def write_cell(
    folder: Path, strategy: str, seed: int, *, steps: int, prompts: int, group: int, completions: Sequence[str] = ()
) -> None:
    cell = folder / "cells" / strategy / f"seed_{seed}"
    (cell / "rollouts").mkdir(parents=True)
    told, signals = TOLD.get(strategy, ("", []))
    about = {
        "strategy": strategy,
        "description": f"Credit of the kind {strategy}.",
        "signals": signals,
        "conserves": "none",
        "phase": "rollout",
        "extra_information": told,
        "parameters": 99456,
        "apportion": "0.1.0",
        "command": "apportion train",
    }
    (cell / "run.json").write_text(json.dumps(about))
    config = {"seed": seed, "run": {"dir": str(cell)}, "credit": CREDIT.get(strategy, {"_target_": strategy})}
    (cell / "config.yaml").write_text(yaml.safe_dump(config))
    rows = metric_rows(strategy, seed, steps)
    (cell / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_status(cell, "finished", rows[-1], steps)
    write_rollouts(cell / "rollouts" / "step_00001.parquet", strategy, seed, prompts, group, completions)


def write_status(cell: Path, state: str, last: Mapping[str, float], steps: int, error: str | None = None) -> None:
    status = {"state": state, "step": last["step"], "steps": steps, "tokens": last["tokens"], "error": error}
    (cell / "status.json").write_text(json.dumps({**status, "seconds": last["seconds"]}))


def metric_rows(strategy: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Curves like those of the embedded task; a seed shares its luck across strategies, as in a real ablation."""
    luck, own = random.Random(seed), random.Random(f"{strategy}{seed}")
    shift, speed = luck.gauss(0, 0.02), RATE.get(strategy, 0.035) * math.exp(luck.gauss(0, 0.15) + own.gauss(0, 0.08))
    top = REACHES.get(strategy, 0.78)
    rows, tokens, seconds = [], 0, 0.0
    for step in range(steps + 1):
        progress = 1 - math.exp(-speed * step)
        row: dict[str, float] = {"step": step, "tokens": tokens, "seconds": round(seconds, 3)}
        if step:
            row |= training_row(strategy, own, progress)
            tokens += int(row["cost/tokens"])
            seconds += sum(value for key, value in row.items() if key.startswith("cost/seconds_"))
            row |= {"tokens": tokens, "seconds": round(seconds, 3)}
        if step % max(1, steps // 6) == 0:
            success = 0.2 + shift + (top - 0.2) * progress + own.gauss(0, 0.018) * (step > 0)
            row["eval/success"] = round(min(1.0, max(0.0, success)) * 128) / 128
            row["eval/format_pass_rate"] = 1.0
            row["retention/success"] = 0.9 - 0.05 * progress + own.gauss(0, 0.01)
            row["cost/seconds_eval"] = 0.12
        rows.append(row)
    return rows


def training_row(strategy: str, own: random.Random, progress: float) -> dict[str, float]:
    located = strategy in {"own_step", "process_return", "localized_cliff", "localized_capo", "oracle"}
    return {
        "reward/dead_groups": max(0.0, 0.3 * (1 - progress) + 0.35 * progress + own.gauss(0, 0.12)),
        "policy/entropy": 0.13 - 0.08 * progress + own.gauss(0, 0.006),
        "policy/ref_kl": 0.09 * progress + abs(own.gauss(0, 0.004)),
        "policy/clip_fraction_low": abs(own.gauss(0, 0.0008)),
        "policy/clip_fraction_high": abs(own.gauss(0, 0.0006)),
        "optim/grad_norm": math.exp(own.gauss(-0.6 - 0.4 * progress, 0.35)) * (3 if own.random() < 0.01 else 1),
        "length/mean": 36 + own.gauss(0, 1.1),
        "format/pass_rate": min(1.0, 0.96 + 0.03 * progress + own.gauss(0, 0.008)),
        "credit/abs_mean": 0.62 + own.gauss(0, 0.05),
        "credit/nonzero_tokens": 0.9 if located else 0.7,
        "credit/sign_flips": 0.11 if located else 0.0,
        "credit/mass_on_errors": (0.41 if located else 0.12) + own.gauss(0, 0.02),
        "credit/mass_on_right_steps": (0.38 if located else 0.66) + own.gauss(0, 0.02),
        "cost/seconds_sample": 0.061,
        "cost/seconds_verify": 0.003,
        "cost/seconds_credit": 0.001,
        "cost/seconds_update": 0.041,
        "cost/tokens": round(32 * (36 + own.gauss(0, 0.8))),
        "cost/forwards": 44,
    }


def chain_answer(rng: random.Random) -> tuple[str, str, str, list[list[Any]]]:
    """A chain of arithmetic modulo 11: prompt, right answer, a completion that may err, and its judged steps."""
    digits, value = "0123456789a", rng.randrange(1, 11)
    prompt, text, spans, said = digits[value], "[T]", [], value
    for _ in range(rng.randrange(3, 6)):
        sign, operand = rng.choice("+-*"), rng.randrange(1, 11)
        prompt += sign + digits[operand]

        def apply(x: int, sign: str = sign, operand: int = operand) -> int:
            return {"+": x + operand, "-": x - operand, "*": x * operand}[sign] % 11

        value, result = apply(value), apply(said)
        wrong = rng.random() < 0.22
        result = (result + rng.randrange(1, 11)) % 11 if wrong else result
        line = f"{digits[said]}{sign}{digits[operand]}={digits[result]}"
        spans.append([len(text), len(text) + len(line), float(not wrong), "wrong result" if wrong else "step"])
        text, said = text + line + "\n", result
    return prompt + "=?", digits[value], f"{text}[/T][A]{digits[said]}[/A]", spans


def write_rollouts(
    path: Path, strategy: str, seed: int, prompts: int, group: int, completions: Sequence[str] = ()
) -> None:
    """The first batch: one seed has the same answers under every strategy, with advantages of the strategy's kind."""
    rng, place = random.Random(seed), random.Random(f"{strategy}{seed}")
    rows = []
    for group_id in range(prompts):
        prompt, reference, _, _ = chain_answer(rng)
        for sample in range(group):
            _, _, text, spans = chain_answer(rng)
            if len(rows) < len(completions):
                text, spans = completions[len(rows)], [[0, 3, 0.0, "<b>wrong</b>"]]
            right = all(score == 1.0 for _, _, score, _ in spans) and group_id != prompts - 1
            rows.append((group_id, sample, prompt, reference, text, spans, float(right)))
    records = []
    for group_id, sample, prompt, reference, text, spans, reward in rows:
        of_group = [row[-1] for row in rows if row[0] == group_id]
        centre = sum(of_group) / len(of_group)
        spread = math.sqrt(sum((r - centre) ** 2 for r in of_group) / len(of_group))
        outcome = (reward - centre) / (spread + 1e-6)
        offsets = [m.span() for m in re.finditer(r"\[/?[TA]\]|.", text, re.DOTALL)] + [(len(text), len(text))]
        advantages = [outcome] * len(offsets)
        if strategy not in {"uniform", "format_composition"}:
            advantages = [own_step(span, spans, outcome) for span in offsets]
        if strategy == "shuffled":
            place.shuffle(advantages)
        records.append(
            {
                "step": 1,
                "problem_id": f"chain-{seed}-{group_id}",
                "prompt": prompt,
                "completion": text,
                "reference": reference,
                "group_id": group_id,
                "sample": sample,
                "truncated": False,
                "reward": reward,
                "completion_ids": list(range(len(offsets))),
                "logprobs": [-0.1] * len(offsets),
                "token_start": [start for start, _ in offsets],
                "token_stop": [stop for _, stop in offsets],
                "completion_mask": [True] * len(offsets),
                "advantages": advantages,
                "verdicts": json.dumps(
                    {"answer": {"score": reward, "spans": []}, "steps": {"score": 1, "spans": spans}}
                ),
            }
        )
    pq.write_table(pa.Table.from_pylist(records), path)


def own_step(offset: tuple[int, int], spans: Sequence[Sequence[Any]], outcome: float) -> float:
    for start, stop, score, _ in spans:
        if start <= offset[0] < stop:
            return 0.6 if score else -1.4
    return 0.25 * outcome


class Page(HTMLParser):
    """What a browser would see: tags, ids, references and the visible text of a report."""

    def __init__(self, html: str) -> None:
        super().__init__()
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


def page_of(folder: Path) -> Page:
    return Page(build_report(folder).read_text(encoding="utf-8"))


def csv_rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as lines:
        return {row["strategy"]: row for row in csv.DictReader(lines)}


def evaluations(strategy: str, seed: int) -> list[float]:
    return [row["eval/success"] for row in metric_rows(strategy, seed, 60) if "eval/success" in row]


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole ablation with its report: a strategy that wins, one that does not, and the shuffled control."""
    place = tmp_path_factory.mktemp("whole") / "ablation"
    write_ablation(place, ["uniform", "own_step", "localized_cliff", "shuffled"], range(5))
    build_report(place)
    return place


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# What it says


def test_summary_has_the_promised_columns_first(folder: Path) -> None:
    header = (folder / "summary.csv").read_text().splitlines()[0]
    promised = (
        "strategy,seeds,final_success,final_success_low,final_success_high,auc,auc_low,auc_high,"
        "auc_minus_uniform,auc_minus_uniform_low,auc_minus_uniform_high,p_adjusted,tokens,seconds"
    )
    assert ",".join(COLUMNS) == promised
    further = "pairs,p_t,p_sign_flip,p_sign_flip_adjusted,detectable,forwards,forward_tokens,verifier_seconds"
    assert header == f"{promised},{further}"


def test_both_tests_are_in_the_summary_with_what_they_can_find(folder: Path) -> None:
    row = csv_rows(folder)["own_step"]
    assert (row["pairs"], float(row["p_sign_flip"])) == ("5", 0.0625)  # as low as five seeds can go
    assert float(row["p_sign_flip_adjusted"]) == pytest.approx(3 * 0.0625)
    assert float(row["p_t"]) < float(row["p_adjusted"])
    assert 0 < float(row["detectable"]) < 0.2
    assert [csv_rows(folder)["uniform"][key] for key in ("pairs", "p_t", "detectable")] == ["", "", ""]
    assert (row["forwards"], row["forward_tokens"]) == ("2640", "")  # 60 steps of 44
    assert float(row["verifier_seconds"]) == pytest.approx(0.18)


def test_the_terminal_names_the_tests_and_the_difference_that_can_be_found(folder: Path) -> None:
    lines = results_table(folder).splitlines()
    assert [line.split()[0] for line in lines] == [
        "strategy",
        "uniform",
        "own_step",
        "localized_cliff",
        "shuffled",
        "5",
    ]
    assert re.search(r"area minus baseline +p, t-test +p, sign flips$", lines[0])
    assert re.match(
        r"5 paired seeds find a true difference of 1\.68 standard deviations, here 0\.\d{3} to 0\.\d{3} in area, "
        r"with 80% power; sign flips give no p under 0\.0625; p are Holm-corrected$",
        lines[-1],
    )


def test_summary_numbers_follow_from_the_metrics(folder: Path) -> None:
    rows = csv_rows(folder)
    curves = {name: [evaluations(name, seed) for seed in range(5)] for name in rows}
    area = {name: [(sum(c) - (c[0] + c[-1]) / 2) / (len(c) - 1) for c in curves[name]] for name in rows}
    for name, row in rows.items():
        assert float(row["final_success"]) == pytest.approx(statistics.mean(c[-1] for c in curves[name]), rel=1e-5)
        assert float(row["auc"]) == pytest.approx(statistics.mean(area[name]), rel=1e-5)
        assert float(row["auc_low"]) < float(row["auc"]) < float(row["auc_high"])
        assert row["seeds"] == "5"
        tokens = statistics.mean(metric_rows(name, seed, 60)[-1]["tokens"] for seed in range(5))
        assert float(row["tokens"]) == pytest.approx(tokens, rel=1e-5)
    gain = statistics.mean(a - b for a, b in zip(area["own_step"], area["uniform"], strict=True))
    assert float(rows["own_step"]["auc_minus_uniform"]) == pytest.approx(gain, rel=1e-5)
    assert float(rows["own_step"]["auc_minus_uniform_low"]) > 0
    assert float(rows["own_step"]["p_adjusted"]) < 0.05


def test_baseline_has_no_difference_from_itself(folder: Path) -> None:
    row = csv_rows(folder)["uniform"]
    assert [row[key] for key in COLUMNS[8:12]] == ["", "", "", ""]


def test_only_the_shown_difference_is_named_a_winner(page: Page) -> None:
    assert page.headings[0] == (
        "own_step is better than uniform. For localized_cliff and shuffled no difference is shown."
    )
    assert page.text.count("no difference shown") == 2
    assert "Location matters: own_step beats shuffled" in page.text


def test_contents_come_in_their_order(page: Page) -> None:
    assert page.headings[1:] == [
        "Verdict",
        "Results",
        "Learning curves",
        "What each strategy was told",
        "Stability",
        "Shape of the credit",
        "Cost",
        "Where the credit fell",
        "To compute this again",
    ]


def test_page_says_what_intervals_cover_and_what_seeds_can_find(page: Page) -> None:
    assert "all from one warm start" in page.text
    assert "1.68 standard deviations of the per-seed difference" in page.text
    assert "cannot give a p below 0.0625" in page.text
    assert "may win because of the information and not because of the rule" in page.text
    assert "a score for every step" in page.text
    assert "not within 60" in page.text


def test_page_is_one_file_without_scripts_or_network(folder: Path, page: Page) -> None:
    assert page.tags["script"] == page.tags["img"] == page.tags["iframe"] == 0
    outside = [value for key, value in page.attributes if key in {"href", "src"} and not (value or "").startswith("#")]
    assert outside == ["data:,"]
    html = (folder / "report.html").read_text()
    assert re.findall(r"https?://\S+", html.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


def test_ids_of_charts_do_not_clash(folder: Path, page: Page) -> None:
    assert [name for name, count in page.ids.items() if count > 1] == []
    html = (folder / "report.html").read_text()
    used = set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'<use[^>]* href="#([^"]+)"', html))
    assert used
    assert used <= set(page.ids)


def test_charts_take_every_colour_from_the_page(folder: Path) -> None:
    html = (folder / "report.html").read_text()
    charts_alone = "".join(re.findall(r"<svg viewBox.*?</svg>", html, re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}\b", charts_alone) == []
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", charts_alone))
    assert used <= {"ink", "muted", "grid", "paper", "s0", "s1", "s2", "s3"}
    assert all(f"--{name}:" in html for name in used)


def test_figures_are_whole_files(folder: Path) -> None:
    files = {path.name: ElementTree.parse(path).getroot() for path in (folder / "figures").iterdir()}
    assert {"curves.svg", "against_own_step.svg", "grad_norm.svg", "retention.svg"} <= set(files)
    for root in files.values():
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}title") is not None


def test_metrics_of_all_runs_are_stacked(folder: Path) -> None:
    table = pq.read_table(folder / "metrics.parquet")
    assert table.num_rows == 4 * 5 * 61
    rows = table.to_pylist()
    mine = [row for row in rows if row["strategy"] == "own_step" and row["seed"] == 3]
    assert [row["eval/success"] for row in mine if row["eval/success"] is not None] == evaluations("own_step", 3)
    assert mine[1]["optim/grad_norm"] == metric_rows("own_step", 3, 60)[1]["optim/grad_norm"]


def test_same_folder_gives_the_same_bytes_and_nothing_is_left_behind(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    build_report(folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_failed_build_leaves_the_old_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (folder / "report.html").read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        build_report(folder)
    assert (folder / "report.html").read_bytes() == old
    assert list(folder.rglob("*.tmp")) == []


def test_every_answer_is_shown_for_every_strategy(folder: Path) -> None:
    shown = exhibit(load_ablation(folder))
    assert shown is not None
    assert shown.seed == 0
    assert len(shown.exhibits) == 5
    assert len({item.rollout.problem_id for item in shown.exhibits}) == 4
    for item in shown.exhibits:
        assert [heat.strategy for heat in item.heats] == ["uniform", "own_step", "localized_cliff", "shuffled"]
        assert not any(heat.note for heat in item.heats)
    rewards = [item.rollout.reward for item in shown.exhibits]
    assert rewards.count(1.0) == 1
    assert all(item.rollout.fault for item in shown.exhibits if item.rollout.reward == 0.0)


def test_stability_panel_sums_both_clip_fractions(folder: Path) -> None:
    names = [chart.name for chart in charts.stability(summarise(load_ablation(folder)))]
    assert names == [name for name, _, _ in charts.STABILITY]
    summed = {name: keys for name, _, keys in charts.STABILITY}["clip_fraction"]
    assert summed == ("policy/clip_fraction_low", "policy/clip_fraction_high")


# Runs that did not end well


def test_failed_and_missing_runs_are_listed_and_do_not_count(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "own_step"], range(3))
    failed, gone = tmp_path / "cells/own_step/seed_1", tmp_path / "cells/own_step/seed_2"
    lines = (failed / "metrics.jsonl").read_text().splitlines()[:31]
    (failed / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 31, "toke')
    write_status(failed, "failed", json.loads(lines[-1]), 60, "Traceback\n  line\nFloatingPointError: row 3 <script>")
    shutil.rmtree(gone)
    page = page_of(tmp_path)
    assert "2 of 6 runs do not count." in page.text
    assert "FloatingPointError: row 3 <script>" in page.text
    assert page.tags["script"] == 0
    assert "not started" in page.text
    assert "apportion ablate experiment=synthetic ablate.retry_failed=true" in page.text
    assert "1 of 3" in page.text
    assert page.headings[0] == "No comparison: one seed cannot show a difference from uniform."
    row = csv_rows(tmp_path)["own_step"]
    assert row["seeds"] == "1"
    assert row["auc"] != ""
    assert row["auc_low"] == row["auc_high"] == row["auc_minus_uniform_low"] == row["p_adjusted"] == ""


def test_cut_line_and_repeated_step_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    cell = tmp_path / "cells/a/seed_0"
    cell.mkdir(parents=True)
    (cell / "metrics.jsonl").write_text(
        '{"step": 0, "tokens": 0, "eval/success": 0.25}\n{"step": 1, "x": 1.0, "y": NaN}\n{"step": 1, "x": 2.0}\n'
        'null\n[1]\n{"step": 2, "x": 3'
    )
    (cell / "status.json").write_text('{"state": "fini')
    read = load_cell(tmp_path, "a", 0)
    assert read.metrics == [{"step": 0.0, "tokens": 0.0, "eval/success": 0.25}, {"step": 1.0, "x": 2.0}]
    assert read.state == "running"
    assert not read.counts
    assert load_cell(tmp_path, "a", 1).state == "missing"


@pytest.mark.parametrize("seeds", [[0], [4, 7]])
def test_few_seeds_say_so(tmp_path: Path, seeds: list[int]) -> None:
    page = page_of(write_ablation(tmp_path, ["uniform", "own_step"], seeds))
    if len(seeds) == 1:
        assert "With 1 paired seed no interval and no test exists" in page.text
        assert "no interval" in page.text
    else:
        assert "Few seeds: an interval from 2 seeds" in page.text
        assert "about 50% of cases" in page.text


def test_one_strategy_and_none_finished_still_make_a_page(tmp_path: Path) -> None:
    alone = write_ablation(tmp_path / "alone", ["uniform"], range(3))
    assert page_of(alone).headings[0] == "Nothing to compare: uniform is the only strategy."
    shutil.rmtree(alone / "cells")
    page = page_of(alone)
    assert "3 of 3 runs do not count." in page.text
    assert "No run is finished." in page.text
    assert csv_rows(alone)["uniform"]["seeds"] == "0"
    assert csv_rows(alone)["uniform"]["auc"] == ""


def test_missing_or_broken_plan_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ablation\.json: no such file; give the folder"):
        build_report(tmp_path)
    (tmp_path / "ablation.json").write_text('{"strategies": ["uniform"]')
    with pytest.raises(InputError, match=r"ablation\.json: cannot read the plan") as caught:
        build_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform"], [0])
    (tmp_path / "figures").write_text("in the way")
    with pytest.raises(InputError, match="cannot write the report there"):
        build_report(tmp_path)


# What it must not let pass


def test_unequal_compute_is_said(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "own_step"], range(2))
    assert notes.unequal_compute(summarise(load_ablation(tmp_path))) == ""
    for seed in range(2):
        path = tmp_path / f"cells/own_step/seed_{seed}/metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("\n".join(json.dumps({**row, "tokens": round(1.2 * row["tokens"])}) for row in rows))
    said = notes.unequal_compute(summarise(load_ablation(tmp_path)))
    assert said.startswith("Unequal compute: own_step generated 20% more tokens for each run than uniform")
    assert "a budget in tokens compares at equal tokens" in said


def test_strategy_that_does_not_beat_its_shuffle_is_named(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "own_step", "shuffled"], range(3))
    for seed in range(3):  # the control learns just as fast
        source, control = (tmp_path / f"cells/{name}/seed_{seed}/metrics.jsonl" for name in ("own_step", "shuffled"))
        control.write_text(source.read_text())
    confirmed, doubts = notes.shuffled_controls(summarise(load_ablation(tmp_path)))
    assert confirmed == []
    assert doubts[0].startswith("own_step carries no location information that this ablation can show")
    assert notes.remarks(summarise(load_ablation(tmp_path)))[1][0] == doubts[0]


def test_shuffled_strategy_is_found_by_settings_or_by_name(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "localized_cliff", "own_step", "shuffled"], range(2))
    summary = summarise(load_ablation(tmp_path))
    control = summary.named("shuffled")
    assert control is not None
    assert notes.shuffled_source(control, summary) is summary.named("own_step")
    shutil.move(tmp_path / "cells/shuffled", tmp_path / "cells/shuffled_localized_cliff")
    for config in tmp_path.glob("cells/*/*/config.yaml"):
        config.unlink()
    edit_json(tmp_path / "ablation.json", strategies=["uniform", "localized_cliff", "shuffled_localized_cliff"])
    summary = summarise(load_ablation(tmp_path))
    assert notes.shuffled_source(summary.strategies[2], summary) is summary.strategies[1]


def test_oracle_is_a_ceiling_and_never_a_winner(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "oracle"], range(5))
    page = page_of(tmp_path)
    assert float(csv_rows(tmp_path)["oracle"]["p_adjusted"]) < 0.05
    assert page.headings[0] == "oracle is told the truth itself: a ceiling, not a rule."
    assert "better" not in page.text.replace("“Better” and “worse”", "")


def test_seeds_that_differ_in_the_warm_start_are_reported(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform"], range(2))
    assert notes.differing_settings(load_ablation(tmp_path)) == []
    for seed in range(2):
        path = tmp_path / f"cells/uniform/seed_{seed}/config.yaml"
        path.write_text(path.read_text() + f"policy:\n  warm_start:\n    seed: {seed}\n")
    assert notes.differing_settings(load_ablation(tmp_path)) == ["policy.warm_start.seed"]
    said = notes.interval_sentence(load_ablation(tmp_path))
    assert said.endswith("and the starting weights, since the seeds also differ in policy.warm_start.seed.")


def test_budget_in_tokens_is_compared_on_the_tokens_axis(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "own_step"], range(2), budget="tokens")
    summary = summarise(load_ablation(tmp_path))
    ends = [metric_rows(name, seed, 60)[-1]["tokens"] for name in ("uniform", "own_step") for seed in range(2)]
    assert (summary.low, summary.high) == (0, min(ends))
    page = page_of(tmp_path)
    assert "tokens to 80%" in page.text
    assert "tokens generated" in page.text


HOSTILE = ["<script>alert(1)</script>\n</style></code><b>", "日本語 👩‍👩‍👧 = 5\n\u202eevil\x07", "a & b " * 200]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write_ablation(tmp_path, ["uniform", "own_step"], range(2), prompts=2, completions=HOSTILE)
    for seed in range(2):
        run = tmp_path / f"cells/own_step/seed_{seed}/run.json"
        edit_json(run, description="\ud800</td><script>1</script>", signals=["<img src=x>"], extra_information='"><b>')
    edit_json(tmp_path / "ablation.json", task="<svg onload=x>", command="apportion </pre> & more")
    page = page_of(tmp_path)
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.tags["style"] == 1
    assert all(not key.startswith("on") for key, _ in page.attributes)
    assert "</td><script>1</script>" in page.text
    assert "<svg onload=x>" in page.text
    assert "日" in page.text
    assert "⟨U+202E⟩" in page.text
    assert "\u202e" not in page.text


def test_truth_judges_before_the_step_verifier(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.parquet", "uniform", 0, 1, 2)
    table = pq.read_table(tmp_path / "r.parquet").to_pylist()
    spans = {
        "steps": {"score": 0, "spans": [[0, 2, 0.0, "step"]]},
        "truth": {"score": 0, "spans": [[5, 7, 0.2, "true"]]},
    }
    table[0]["verdicts"], table[1]["verdicts"] = json.dumps(spans), "not json"
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "r.parquet")
    first, second = read_rollouts(tmp_path / "r.parquet")
    assert first.fault == Fault(5, 7, "true")
    assert second.fault is None
    (tmp_path / "r.parquet").write_bytes(b"PAR1 cut")
    assert read_rollouts(tmp_path / "r.parquet") == []


# In a browser


def console_of(chromium: str, page: Path, profile: Path) -> list[str]:
    """What headless Chromium writes to its console for a page."""
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={profile}", page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    assert "</html>" in done.stdout
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
def test_report_opens_without_a_word_on_the_console(folder: Path, tmp_path: Path) -> None:
    chromium = "/usr/bin/chromium"
    if not Path(chromium).exists():
        pytest.skip(f"{chromium} is not there: install Chromium to open the report in a browser")
    broken = tmp_path / "broken.html"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    broken.write_text(f"<!doctype html><html><head>{policy}</head><body><script>1</script></body></html>")
    assert len(console_of(chromium, broken, tmp_path / "profile")) == 1  # the check can see a complaint
    assert console_of(chromium, folder / "report.html", tmp_path / "profile") == []
