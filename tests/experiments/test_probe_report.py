"""The page of a probe: its numbers, what it may and may not claim, and that hostile text stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.experiments.probe.record import DrawnRollout, Figure, NoisePoint, Probe, ProbedStrategy
from apportion.experiments.probe_report import build_probe_report, noise, words
from apportion.experiments.probe_report.board import board, written
from apportion.experiments.probe_report.heat import MOST_TOKENS, draw_rollout
from apportion.verifiers import InputError

STEPS = "a score for every step"
# strategy -> how much of the truth its credit holds, and what it is told
STRATEGIES = {
    "difference": (0.71, "the value of every prefix"),
    "own_step": (0.66, STEPS),
    "vineppo": (0.64, "nine more answers from every prefix"),
    "localized_cliff": (0.55, "where the first error is"),
    "localized_capo": (0.52, STEPS),
    "process_return": (0.44, STEPS),
    "spared_prefix": (0.41, "where the first error is"),
    "pure": (0.36, STEPS),
    "entropy_gated": (0.27, ""),
    "reinforce_pp": (0.24, ""),
    "opo": (0.23, ""),
    "gtpo_s": (0.12, ""),
}
CONTROLS = {
    "oracle": (1.0, "the truth itself"),
    "shuffled": (0.03, ""),
    "inverted": (-0.55, STEPS),
    "uniform": (0.24, ""),
}
CLASSES = ("first_wrong", "later", "before", "format", "answer", "filler")
# prompt, answer, right answer, and characters of the wrong step
ANSWERS = (
    ("7+9-a*1=?", "[T]7+9=5\n5-a=6\n6*1=6\n[/T][A]6[/A]", "6", None),
    ("3*4+8-2=?", "[T]3*4=1\n1+8=0\n0-2=9\n[/T][A]9[/A]", "7", (9, 14)),
    ("a-7*3+5=?", "[T]a-7=4\n4*3=1\n1+5=6\n[/T][A]6[/A]", "6", None),
    (
        "2+6*9-4+8*3-1=?",
        "[T]2+6=8\n8*9=6\n6-4=1\n1+8=9\n9*3=5\n5-1=4\n[/T][A]4[/A]",
        "9",
        (15, 20),
    ),
)


def figures(name: str, truthful: float, rng: random.Random) -> dict[str, Figure]:
    """Figures like those of a real probe for a strategy whose credit correlates with the truth by ``truthful``."""

    def about(value: float, spread: float) -> Figure:
        return Figure(value, value - spread * rng.uniform(0.8, 1.2), value + spread * rng.uniform(0.8, 1.2))

    shares = [rng.random() for _ in CLASSES]
    spread = 0.0 if name == "oracle" else 0.045
    found = {
        "quality/pearson": Figure(1.0, 1.0, 1.0) if name == "oracle" else about(truthful, spread),
        "quality/sign_accuracy": about(0.5 + truthful / 2, spread),
        "quality/error_auc": about(0.5 + truthful / 2.4, spread),
        "quality/blame_at_1": about(max(0.05, truthful), spread),
        "quality/inert_mass": about(0.4 - 0.35 * truthful, spread),
        "gradient/norm": Figure(math.exp(rng.gauss(-0.4, 0.5))),
        "gradient/cosine": about(0.9 * truthful, 0.06),
        "gradient/bias": Figure(abs(1 - truthful) * 0.4),
        "gradient/snr": about(1.2 + truthful, 0.2),
        "update/kl": Figure(abs(rng.gauss(4e-4, 1e-4))),
        "update/clip_fraction": Figure(abs(rng.gauss(0.01, 0.004))),
        "shape/gini": about(0.3 + 0.4 * truthful, 0.02),
        "shape/effective_tokens": about(14 - 8 * truthful, 0.6),
        "shape/sign_flips": Figure(max(0.0, 0.3 * truthful)),
        "shape/mass_ratio": Figure(0.6 + rng.random()),
        "cost/rollouts": Figure(576.0 if name == "vineppo" else 0.0),
        "cost/verifier_calls": Figure(64.0 if name in STRATEGIES else 0.0),
        "cost/milliseconds": Figure(rng.uniform(0.3, 9.0)),
    }
    for key, share, lean in zip(CLASSES, shares, (-1, -0.3, 0.5, 0.2, -0.4, 0.02), strict=True):
        found[f"shape/{key}"] = Figure(share / sum(shares))
        found[f"update/{key}"] = about(0.012 * lean * (truthful + 0.2) + rng.gauss(0, 0.001), 0.0016)
    if name == "gtpo_s":
        del found["quality/blame_at_1"], found["gradient/snr"]
    return found


def drawn(number: int, rng: random.Random) -> DrawnRollout:
    """An answer of the chain task with credit that mixes its truth with noise, as much as each strategy holds of it."""
    prompt, text, reference, wrong = ANSWERS[number]
    offsets = [m.span() for m in re.finditer(r"\[/?[TA]\]|.", text, re.DOTALL)] + [(len(text), len(text))]
    steps = [m.span() for m in re.finditer(r"[^\n\]\[]+=.", text)]

    def truth(start: int) -> float:
        for place, (first, last) in enumerate(steps):
            if first <= start < last:
                return (
                    -0.62 if wrong == (first, last) else 0.11 + 0.03 * place if not wrong or last <= wrong[0] else 0.0
                )
        return 0.0

    true = [truth(start) for start, _ in offsets]
    outcome = -0.9 if wrong else 1.1
    named = {name: held for name, (held, _) in (STRATEGIES | CONTROLS).items()}
    advantages = {
        name: [held * value + (1 - abs(held)) * (0.25 * outcome + rng.gauss(0, 0.08)) for value in true]
        for name, held in named.items()
    }
    advantages |= {"oracle": true, "uniform": [outcome] * len(true), "shuffled": rng.sample(true, len(true))}
    return DrawnRollout(
        f"chain-{17 + number}", prompt, text, reference, 0.0 if wrong else 1.0, list(range(len(offsets))), offsets,
        [True] * len(offsets), true, [bool(wrong and wrong[0] <= start < wrong[1]) for start, _ in offsets], advantages,
    )  # fmt: skip


def noise_points(rng: random.Random) -> list[NoisePoint]:
    """Located credit gets worse with the evidence, uniform does not."""
    levels = {"miss": (0, 0.1, 0.2, 0.35, 0.5), "false_alarm": (0, 0.1, 0.2, 0.35, 0.5), "boundary": (0, 1, 2, 4)}
    points = []
    for kind, at in (levels | {"calibration": (0.0, 0.25, 0.5, 1.0)}).items():
        for name in ("uniform", "own_step", "localized_cliff", "localized_capo", "process_return", "pure", "oracle"):
            held = (STRATEGIES | CONTROLS)[name][0]
            for level in at:
                loss = 0.0 if name in ("uniform", "oracle") else rng.uniform(0.8, 1.1) * level / at[-1] * 0.8 * held
                middle = held - loss + (0.005 if name == "uniform" else 0)
                found = {"quality/pearson": Figure(middle, middle - 0.04, middle + 0.04)}
                if kind in ("miss", "false_alarm") and name != "oracle":
                    gain = 0.3 * middle + rng.gauss(0, 0.005)
                    found["learning/gain"] = Figure(gain, gain - 0.02, gain + 0.02)
                points.append(NoisePoint(kind, level, name, found))
    return points


def sample() -> Probe:
    """A whole probe: twelve strategies, four controls, four answers, noise of four kinds."""
    rng = random.Random(6)
    strategies = [
        *(ProbedStrategy(n, "strategy", figures(n, held, rng), told) for n, (held, told) in STRATEGIES.items()),
        *(ProbedStrategy(n, "control", figures(n, held, rng), told) for n, (held, told) in CONTROLS.items()),
    ]
    helds = [held for held, _ in (STRATEGIES | CONTROLS).values()]
    cosines = [
        [1.0 if i == j else a * b + 0.3 * rng.uniform(-1, 1) * (1 - abs(a * b)) for j, b in enumerate(helds)]
        for i, a in enumerate(helds)
    ]
    cosines = [[cosines[max(i, j)][min(i, j)] for j in range(len(helds))] for i in range(len(helds))]
    return Probe(
        command="apportion probe experiment=probe_chain probe.problems=64 rollout.group_size=8 seed=0",
        task="chain (mid)",
        seed=0,
        facts={"policy": "warm start, 99,456 parameters", "problems": "64", "rollouts": "512", "mean reward": "0.41"},
        strategies=strategies,
        cosines=cosines,
        truth="tree enumeration, branches below 1e-4 pruned",
        noise_floor={
            "quality/pearson": Figure(0.962, 0.951, 0.971),
            "quality/sign_accuracy": Figure(0.981, 0.97, 0.99),
        },
        noise=noise_points(rng),
        rollouts=[drawn(number, rng) for number in range(4)],
        cautions=("Two of 64 groups have equal rewards: uniform gives them no credit.",),
    )  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: tags, attributes, headings, visible text, the script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.headings: list[str] = []
        self.parts: list[str] = []
        self.script = ""
        self.feed(html)
        self.text = re.sub(r"\s+", " ", "".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.ids.update(value for key, value in attrs if key == "id" and value)

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and not self.script:
            self.script = data
        elif self.lasttag not in {"style", "script"}:
            self.parts.append(data)
            if self.lasttag in {"h1", "h2"} and data.strip():
                self.headings.append(data.strip())


def page_of(probe: Probe, folder: Path) -> Page:
    return Page(build_probe_report(probe, folder / "probe.html").read_text(encoding="utf-8"))


def rows_of(html: str, table: str) -> list[list[str]]:
    """Texts of the cells of a table, by its class."""
    inside = re.findall(rf'<table class="{table}">(.*?)</table>', html, re.DOTALL)
    found = []
    for row in re.findall(r"<tr.*?</tr>", "".join(inside), re.DOTALL):
        cells = re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        found.append([re.sub(r"<[^>]+>", "", cell).strip() for cell in cells])
    return found


def with_figures(probe: Probe, **pearson: Figure) -> Probe:
    """The probe with other correlations for some of its strategies."""
    changed = [
        replace(s, figures={**s.figures, "quality/pearson": pearson[s.name]}) if s.name in pearson else s
        for s in probe.strategies
    ]
    return replace(probe, strategies=changed)


@pytest.fixture(scope="module")
def probe() -> Probe:
    return sample()


@pytest.fixture(scope="module")
def page(probe: Probe, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(probe, tmp_path_factory.mktemp("probe"))


# Every number of the record


def test_every_figure_is_in_the_table_with_its_interval(probe: Probe, page: Page) -> None:
    table = re.findall(r'<table class="board">(.*?)</table>', page.html, re.DOTALL)[0]
    for s in probe.strategies:
        row = re.findall(rf"<tr[^>]*><th[^>]*>(?:(?!</th>).)*<span>{s.name}</span>.*?</tr>", table, re.DOTALL)[0]
        cells = re.findall(r'data-value="([^"]+)">([^<]+)(?:<span class="interval">([^<]+)</span>)?', row)
        for figure in s.figures.values():
            shown = [(text, interval) for value, text, interval in cells if value == f"{figure.value:.6g}"]
            digits = len(shown[0][0].partition(".")[2])
            known = f"{written(figure.low, digits)} to {written(figure.high, digits)}"
            assert (written(figure.value, digits), "" if math.isnan(figure.low) else known) in shown


def test_table_writes_hand_made_figures_so(probe: Probe) -> None:
    figures = {
        "quality/pearson": Figure(0.5, 0.25, 0.75),
        "update/kl": Figure(0.000412),
        "cost/rollouts": Figure(576.0),
    }
    table = board(replace(probe, strategies=[ProbedStrategy("mine", "strategy", figures)], noise_floor={}))
    assert [group.heading for group in table.groups] == ["Quality", "Update", "Cost"]
    cells = [(cell.text, cell.interval) for cell in table.rows["mine"]]
    assert cells == [("0.500", "0.250 to 0.750"), ("0.000412", ""), ("576", "")]


def test_unknown_figures_get_a_column_of_their_own(probe: Probe, tmp_path: Path) -> None:
    strange = ProbedStrategy("strange", "strategy", {"quality/new_thing": Figure(0.125), "later/idea": Figure(7.0)})
    table = board(replace(probe, strategies=[*probe.strategies, strange]))
    assert [column.heading for column in table.groups[0].columns][-1] == "new thing"
    assert table.groups[-1].heading == "Later"
    html = page_of(replace(probe, strategies=[*probe.strategies, strange], cosines=None, noise=()), tmp_path).html
    assert 'data-value="0.125"' in html
    assert 'data-value="7"' in html


def test_missing_figures_are_dashes(probe: Probe, page: Page) -> None:
    row = next(row for row in rows_of(page.html, "board") if row[0] == "gtpo_s")
    assert row.count("–") == 2
    assert 'data-value="nan"' in page.html


def test_cosines_are_a_table_with_strategies_as_headings(probe: Probe, page: Page) -> None:
    head, *rows = rows_of(page.html, "cosines")
    names = [s.name for s in probe.strategies]
    assert head[1:] == names
    assert [row[0] for row in rows] == names
    assert probe.cosines is not None
    for row, cosines in zip(rows, probe.cosines, strict=True):
        assert row[1:] == [written(cosine, 2) for cosine in cosines]


def test_every_noise_point_is_in_a_table(probe: Probe, page: Page) -> None:
    details = " ".join(re.findall(r"<details>.*?</details>", page.html, re.DOTALL))
    for point in probe.noise:
        for value, low, high in point.figures.values():
            ends = f'{written(value, 3)}<span class="interval">{written(low, 3)} to {written(high, 3)}</span>'
            assert ends in details, point


def test_every_token_has_its_number_in_every_row(probe: Probe, page: Page) -> None:
    articles = re.findall(r"<article.*?</article>", page.html, re.DOTALL)
    assert len(articles) == 4
    for rollout, article in zip(probe.rollouts, articles, strict=True):
        rows = rows_of(article, "tokens")[1:]
        assert [re.split(r"±", row[0])[0].strip() for row in rows] == [
            "true advantage",
            *(s.name for s in probe.strategies),
        ]
        for row, values in zip(
            rows, [rollout.truth, *(rollout.advantages[s.name] for s in probe.strategies)], strict=True
        ):
            assert [cell.split()[-1] for cell in row[1:-1]] == [written(v, 3, signed=True) for v in values]


def test_head_and_foot_hold_the_facts(probe: Probe, page: Page) -> None:
    for text in (probe.command, probe.task, probe.truth, *probe.facts.values(), *probe.cautions):
        assert text in page.text
    assert "12 and 4 controls" in page.text
    assert re.search(r"<dt>Seed</dt><dd>0</dd>", page.html)
    assert "Pearson 0.962 (0.951 to 0.971), sign accuracy 0.981 (0.970 to 0.990)" in page.text


def test_what_strategies_are_told_is_said_once_for_all_that_share_it(probe: Probe, page: Page) -> None:
    assert dict(words.told(probe))["where the first error is"] == ["localized_cliff", "spared_prefix"]
    last = "<dt>The reward alone</dt><dd>entropy_gated, reinforce_pp, opo, gtpo_s, shuffled, uniform</dd>"
    assert last in page.html


def test_files_beside_the_page_are_named(tmp_path: Path) -> None:
    assert "probe.parquet" not in page_of(ONE, tmp_path).text
    (tmp_path / "probe.parquet").write_bytes(b"")
    assert "probe.parquet" in page_of(ONE, tmp_path).text


# What it may say


def test_only_what_an_interval_shows_is_called_closer(probe: Probe) -> None:
    verdicts = {s.name: words.verdict(s, probe) for s in probe.strategies}
    assert {n for n, v in verdicts.items() if v == "closer"} == set(list(STRATEGIES)[:8])
    assert verdicts["gtpo_s"] == "further"
    assert verdicts["reinforce_pp"] == verdicts["entropy_gated"] == "no difference shown"
    assert [verdicts[name] for name in CONTROLS] == [None] * 4


def test_headline_names_few_and_counts_many(probe: Probe) -> None:
    assert words.headline(probe) == [
        "The credit of 8 of 12 strategies is shown to be closer to the truth than uniform’s.",
        "The credit of gtpo_s is shown to be further from the truth than uniform’s.",
        "For entropy_gated, reinforce_pp and opo no difference is shown.",
    ]
    few = replace(probe, strategies=[s for s in probe.strategies if s.name in {"own_step", "pure", "opo", *CONTROLS}])
    assert (
        words.headline(few)[0] == "The credit of own_step and pure is shown to be closer to the truth than uniform’s."
    )


def test_no_winner_is_named_whose_interval_reaches_that_of_uniform(probe: Probe, tmp_path: Path) -> None:
    wide = with_figures(probe, **{name: Figure(0.9, 0.2, 1.0) for name in STRATEGIES})
    page = page_of(replace(wide, noise=()), tmp_path)
    assert page.headings[0] == "No difference from uniform is shown for any of 12 strategies."
    assert page.text.count("no difference shown") == 12
    assert ">closer<" not in page.html
    assert "shown to be closer to the truth than uniform" not in page.text


def test_paired_difference_decides_where_there_is_one(probe: Probe) -> None:
    def paired(low: float, high: float) -> words.Verdict | None:
        found = {**probe.strategies[0].figures, "quality/pearson_minus_uniform": Figure((low + high) / 2, low, high)}
        return words.verdict(replace(probe.strategies[0], figures=found), probe)

    assert paired(0.01, 0.9) == "closer"
    assert paired(-0.01, 0.9) == paired(math.nan, math.nan) == "no difference shown"
    assert paired(-0.9, -0.01) == "further"


def test_numbers_without_intervals_show_nothing(probe: Probe) -> None:
    bare = with_figures(probe, own_step=Figure(0.99))
    assert words.verdict(bare.strategies[1], bare) == "no difference shown"


def test_oracle_is_a_ceiling_and_never_a_winner(probe: Probe, tmp_path: Path) -> None:
    controls = replace(probe, strategies=[s for s in probe.strategies if s.kind == "control"], cosines=None, noise=())
    page = page_of(controls, tmp_path)
    assert page.headings[0] == "0 strategies on the same rollouts, not compared by their truth."
    assert '<span class="tag ceiling">ceiling</span>' in page.html
    assert ">closer<" not in page.html


def test_an_oracle_below_one_is_a_caution(probe: Probe) -> None:
    assert words.cautions(probe) == list(probe.cautions)
    said = words.cautions(with_figures(probe, oracle=Figure(0.93)))
    assert said[-1].startswith("The oracle, which is given the true advantages, correlates with them by 0.930 and not")


def test_strategies_that_do_not_beat_shuffled_are_named(probe: Probe) -> None:
    assert words.shuffled_finding(probe).startswith("All strategies are shown to be closer")
    doubted = with_figures(probe, own_step=Figure(0.2, 0.05, 0.3), shuffled=Figure(0.03, 0.0, 0.06))
    assert words.shuffled_finding(doubted).startswith("own_step is not shown to be closer to the truth than shuffled")


# Noise


def test_meeting_is_interpolated_between_levels() -> None:
    flat = [Figure(0.2, 0.1, 0.3)] * 3
    falling = [Figure(0.6, 0.5, 0.7), Figure(0.4, 0.31, 0.5), Figure(0.0, -0.1, 0.1)]
    found = noise.meeting([0.0, 1.0, 2.0], falling, flat)
    assert found == pytest.approx((1.5, 1.0))


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([Figure(0.6, 0.5, 0.7), Figure(0.5, 0.4, 0.6)], (math.inf, 4.0)),  # never within the range
        ([Figure(0.2, 0.1, 0.3), Figure(0.5, 0.4, 0.6)], (-math.inf, math.nan)),  # never above to begin with
        ([Figure(0.3), Figure(0.3)], (math.inf, math.nan)),  # above, but no interval shows it
        ([Figure(math.nan), Figure(0.6, 0.5, 0.7)], (math.inf, 4.0)),
        ([Figure(math.nan), Figure(math.nan)], None),
    ],
)
def test_meeting_knows_never_and_nothing(curve: Sequence[Figure], expected: tuple[float, float] | None) -> None:
    found = noise.meeting([0.0, 4.0], curve, [Figure(0.25, 0.15, 0.35)] * 2)
    assert found == (None if expected is None else pytest.approx(expected, nan_ok=True))


def test_spans_moved_early_are_left_out_of_the_meeting() -> None:
    curve = [Figure(0.0), Figure(0.5), Figure(0.1)]
    found = noise.meeting([-1.0, 0.0, 1.0], curve, [Figure(0.3)] * 3)
    assert found is not None
    assert found.level == pytest.approx(0.5)


def test_level_at_which_located_credit_stops_is_said_in_words(probe: Probe) -> None:
    def points(name: str, *values: float) -> list[NoisePoint]:
        return [NoisePoint("boundary", k, name, {"quality/pearson": Figure(v)}) for k, v in enumerate(values)]

    points_all = [*points("own_step", 0.5, 0.1), *points("pure", 0.9, 0.8), *points("opo", 0.1, 0.1)]
    (sweep,) = noise.sweeps(replace(with_figures(probe, uniform=Figure(0.3)), noise=points_all))
    assert words.crossings(sweep, words.meetings(sweep, probe)) == (
        "Comes down to uniform at a shift of 0.5 (own_step). Never within the range tried, up to a shift of 1: pure. "
        "Not above uniform to begin with: opo."
    )


def test_uniform_is_the_reference_even_where_it_was_not_swept(probe: Probe, tmp_path: Path) -> None:
    swept = [point for point in probe.noise if point.strategy == "own_step" and point.noise == "miss"]
    (sweep,) = [s for s in noise.sweeps(replace(probe, noise=swept)) if s.key == "quality/pearson"]
    assert set(sweep.reference) == {probe.strategies[-1].figures["quality/pearson"]}
    svg = re.findall(r"<figure>.*?</figure>", page_of(replace(probe, noise=swept), tmp_path).html, re.DOTALL)[0]
    assert 'class="series series-0"' in svg


def test_kinds_and_figures_are_drawn_where_they_were_swept(page: Page) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.html)
    assert captions.count("correlation with the truth") == 4
    assert captions.count("success gained by training") == 2
    assert len(re.findall(r'class="chart" role="img" aria-label="[^"]+"', page.html)) == 6


# The answers


def test_rows_are_aligned_truth_first_controls_last(probe: Probe) -> None:
    drawing = draw_rollout(probe.rollouts[3], probe)
    for block in drawing.blocks:
        assert [row.name for row in block.rows] == ["true advantage", *STRATEGIES, *CONTROLS]
        assert {row.cells.count("<td") for row in block.rows} == {len(block.tokens)}


def test_true_error_is_underlined_in_every_row(probe: Probe) -> None:
    drawing = draw_rollout(probe.rollouts[1], probe)
    for row in (row for block in drawing.blocks for row in block.rows):
        marked = re.findall(r'<td class="c(\d+) e[^"]*"', row.cells)
        assert marked == [str(k) for k in range(7, 12)]
    assert drawing.chosen == 7


def test_each_row_has_its_own_scale(probe: Probe) -> None:
    rollout = probe.rollouts[1]
    for row, values in zip(
        draw_rollout(rollout, probe).blocks[0].rows,
        [rollout.truth, *(rollout.advantages[s.name] for s in probe.strategies)],
        strict=True,
    ):
        assert row.scale == max(map(abs, values))
        assert "--w:1.00" in row.cells


def token_rollout(text: str, cuts: Sequence[int], *, wrong: int = -1) -> DrawnRollout:
    """An answer cut into tokens at the given places, with credit that counts up."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    offsets = [*pairwise(ends), (len(text), len(text))]
    values = [0.01 * (k + 1) for k in range(len(offsets))]
    marks = [k == wrong for k in range(len(offsets))]
    return DrawnRollout(
        "p", text, text, text, 1.0, list(range(len(offsets))), offsets, [True] * len(offsets), values, marks,
        {"own_step": values},
    )  # fmt: skip


@given(st.text(st.characters(), max_size=80), st.lists(st.integers(0, 80), max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_text_is_drawn_whole_and_without_anything_that_acts(text: str, cuts: list[int]) -> None:
    drawing = draw_rollout(token_rollout(text, cuts), ONE)
    tokens = [token for block in drawing.blocks for token in block.tokens]
    whole = "".join(token.name for token in tokens if "…" not in token.name)
    assert all(len(token.name) <= 24 for token in tokens)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", whole)
    assert all("<" not in token.text for token in tokens)


ONE = Probe("apportion probe", "t", 0, {}, [ProbedStrategy("own_step", "strategy", {})], None, "exact")


def test_long_answer_wraps_into_blocks_at_line_ends() -> None:
    text = "\n".join("one step of work 1+1=2" for _ in range(8))
    drawing = draw_rollout(token_rollout(text, range(0, len(text), 1)), ONE)
    assert len(drawing.blocks) > 2
    assert all(sum(token.width for token in block.tokens) <= 60 for block in drawing.blocks)
    assert all(block.tokens[-1].ends_line for block in drawing.blocks[:-1])
    assert sum(len(block.tokens) for block in drawing.blocks) == len(text) + 1


def test_very_long_answer_is_shown_around_its_error() -> None:
    text = "x" * 900
    drawing = draw_rollout(token_rollout(text, range(900), wrong=600), ONE)
    assert (drawing.before, drawing.count, drawing.after) == (
        600 - MOST_TOKENS // 3,
        MOST_TOKENS,
        901 - 520 - MOST_TOKENS,
    )
    assert drawing.chosen == 600


def test_text_between_tokens_and_untrained_tokens_are_shown_without_credit() -> None:
    rollout = replace(token_rollout("abcd", [1, 2, 3]), offsets=[(0, 1), (2, 3), (2, 3), (3, 4), (4, 4)])
    drawing = draw_rollout(replace(rollout, trained=[True, True, True, False, True]), ONE)
    cells = drawing.blocks[0].rows[0].cells
    assert '<td class="gap">b</td>' in cells
    assert "·<i>" in cells  # a further token of a character that is drawn already
    assert '<td class="c3 off">d<i> not trained</i></td>' in cells


def test_answers_tokens_and_strategies_can_be_chosen_without_a_mouse(probe: Probe, page: Page) -> None:
    names = Counter(value for tag, key, value in page.attributes if tag == "input" and key == "name")
    assert names["answer"] == 4
    assert names["only"] == 17  # sixteen, and none of them
    assert names["board"] == 5
    assert names["token-1"] == len(probe.rollouts[1].ids)
    assert [value for tag, key, value in page.attributes if tag == "input" and key == "type"] == [
        "radio"
    ] * names.total()
    assert "token 12: 0" in [value for _, key, value in page.attributes if key == "aria-label"]
    checked = re.search(r'<input[^>]*id="answer-(\d)" checked', page.html)
    assert checked is not None
    assert checked[1] == "1"  # the first with an error in it


# One file, without a network, whatever is in it


def test_page_refers_to_nothing_outside(page: Page) -> None:
    assert page.tags["img"] == page.tags["iframe"] == page.tags["object"] == 0
    links = [value for _, key, value in page.attributes if key in {"href", "src"} and not (value or "").startswith("#")]
    assert links == ["data:,"]
    html = page.html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?:|@import|url\((?!#)", html) == []


def test_the_only_script_is_the_one_that_the_policy_allows(page: Page) -> None:
    assert page.tags["script"] == 1
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'" in page.html
    assert all(not key.startswith("on") for _, key, _ in page.attributes)


def test_ids_do_not_clash_and_labels_have_their_inputs(page: Page) -> None:
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert {value for _, key, value in page.attributes if key == "for"} <= set(page.ids)


HOSTILE = (
    "</script></style><script>alert(1)</script><img src=x onerror=1>\u202e\x07\x00\ud800\"'><svg onload=1>{{ 7 * 7 }}"
)


def hostile(probe: Probe) -> Probe:
    """The probe with hostile text wherever there is text."""
    strategies = [
        replace(s, name=s.name if s.name == "uniform" else f"{s.name}{HOSTILE}", told=HOSTILE) for s in probe.strategies
    ]
    own = f"own_step{HOSTILE}"
    rollout = replace(token_rollout(HOSTILE * 2, range(0, 400, 3), wrong=2), problem_id=HOSTILE)
    points = [
        NoisePoint(HOSTILE, level, own, {"quality/pearson": Figure(0.5 - level), HOSTILE: Figure(1.5)})
        for level in (0, 1)
    ]
    return replace(
        probe, command=HOSTILE, task=HOSTILE, facts={HOSTILE: HOSTILE}, truth=HOSTILE, cautions=[HOSTILE], noise=points,
        strategies=[*strategies[:2], strategies[-1]], cosines=[[1.0, 0.5, math.nan]] * 3,
        rollouts=[replace(rollout, advantages={own: rollout.truth})],
    )  # fmt: skip


def test_hostile_text_stays_text(probe: Probe, tmp_path: Path) -> None:
    page = page_of(hostile(probe), tmp_path)
    assert page.tags["script"] == page.tags["style"] == 1
    assert page.tags["img"] == 0
    assert all(not key.startswith("on") for _, key, _ in page.attributes)
    assert "alert" not in page.script
    assert page.text.count("<script>alert(1)</script>") > 10
    assert not re.search("[\u202e\x07\x00]", page.html)
    assert "⟨U+202E⟩⟨U+0007⟩" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert [name for name, count in page.ids.items() if count > 1] == []


def test_empty_parts_leave_no_empty_section(tmp_path: Path) -> None:
    page = page_of(ONE, tmp_path)
    assert page.headings == [
        "1 strategy on the same rollouts, not compared by their truth.",
        "Strategies",
        "How it was made",
    ]
    assert re.findall(r"<nav.*?</nav>", page.html, re.DOTALL)[0].count("<a") == 2
    assert page.tags["table"] == page.tags["fieldset"] == page.tags["details"] == 0
    assert "noise floor" not in page.text


def test_exact_truth_has_no_floor_and_no_noise_no_section(probe: Probe, tmp_path: Path) -> None:
    page = page_of(replace(probe, noise_floor={}, noise=(), cosines=None), tmp_path)
    assert "noise floor" not in page.text.lower()
    assert page.headings[-4:] == ["Where the credit falls", "All figures", "What one update does", "How it was made"]


def test_the_same_probe_gives_the_same_bytes(probe: Probe, page: Page, tmp_path: Path) -> None:
    assert page_of(probe, tmp_path / "new" / "folder").html == page.html


def test_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write the report there") as caught:
        build_probe_report(ONE, tmp_path / "file" / "probe.html")
    assert "\n" not in str(caught.value)


# In a browser

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--dump-dom",
]
USE = """
const order = () => [...document.querySelectorAll("tbody.rules th")].map((head) => head.innerText.trim()).join();
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", {key}));
const said = [order()];
const head = [...document.querySelectorAll("table.board button")].find((button) => button.innerText === "inert mass");
head.focus();
head.click();
said.push(order(), head.closest("th").ariaSort);
head.click();
head.click();
said.push(order());
press("j"); press("j"); press("k");
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).id;
said.push(chosen("only"));
press("Escape"); press("n");
said.push(chosen("only"), chosen("answer"));
document.querySelector("#rollout-2 td.c3").click();
const values = [...document.querySelectorAll("#rollout-2 td i")].filter((i) => getComputedStyle(i).opacity === "1");
said.push(values.length, values[0].innerText.trim());
said.push(document.documentElement.scrollWidth <= window.innerWidth);
document.title = JSON.stringify(said);
"""


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """What headless Chromium makes of a page, and what it writes to its console."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not there: install Chromium to open the report in a browser")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
def test_page_opens_without_a_word_on_the_console(page: Page, probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page.html)
    (tmp_path / "broken.html").write_text(page.html.replace("use strict", "use  strict"))  # not what the policy allows
    build_probe_report(hostile(probe), tmp_path / "hostile.html")
    dom, console = opened(tmp_path / "page.html", tmp_path / "profile")
    assert console == []
    assert dom.count("<button") == dom.count('data-better="')  # the script ran
    assert opened(tmp_path / "hostile.html", tmp_path / "profile")[1] == []
    assert len(opened(tmp_path / "broken.html", tmp_path / "profile")[1]) == 1  # the check can see a complaint


@pytest.mark.browser
def test_headings_sort_and_keys_choose(page: Page, probe: Probe, tmp_path: Path) -> None:
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    used = policy.sub("", page.html).replace("</script>", f"</script><script>{USE}</script>")
    (tmp_path / "used.html").write_text(used)
    dom, console = opened(tmp_path / "used.html", tmp_path / "profile")
    assert console == []
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    said = json.loads(title[1])
    named = ",".join(STRATEGIES)
    mass = {s.name: s.figures["quality/inert_mass"].value for s in probe.strategies if s.kind == "strategy"}
    assert said == [
        named,
        ",".join(sorted(mass, key=mass.__getitem__)),
        "ascending",
        named,
        "only-1",
        "only-none",
        "answer-2",
        17,
        written(probe.rollouts[2].truth[3], 3, signed=True),
        True,
    ]
