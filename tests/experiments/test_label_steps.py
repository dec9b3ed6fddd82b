"""``apportion label-steps``: what it writes is what was labelled, the same each time, and can be read back."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import apportion.conf
from apportion.experiments.build import build
from apportion.experiments.completing import Completer, prefix_ids
from apportion.experiments.label_view import agreement
from apportion.experiments.policies import TinyPolicy, symbol_tokenizer
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import RolloutConfig
from apportion.grpo.seeds import named_seed
from apportion.prm.data import load_steps
from apportion.prm.labels import Solution
from apportion.verifiers import InputError, Sample
from apportion.verifiers.chain import ChainSteps

CONF = Path(apportion.conf.__file__).resolve().parent
SMALL = [
    "policy.hidden_size=16",
    "policy.layers=1",
    "policy.heads=2",
    "policy.intermediate_size=16",
    "task.min_steps=1",
    "task.max_steps=2",
    "task.num_held_out=8",
    "task.num_retention=4",
    "warm_start.steps=60",
    "warm_start.batch_size=16",
    "warm_start.lr=0.03",
    "warm_start.warmup=5",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "num_problems=6",
    "run.batch=2",
]
LINES = "segmenter={_target_: apportion.verifiers.segmenters.Lines}"
OVERLONG = "{_target_: apportion.verifiers.length.SoftOverlong, max_length: 9, buffer: 2}"
CHAIN = "[T]7+9=5\n5-a=7\n[/T][A]7[/A]"
ANSWERS = [
    {"prompt": "7+9-a=?", "completion": CHAIN, "answer": "6"},
    {"prompt": "1+1=?", "completion": "[T]1+1=2\n[/T][A]2[/A]", "answer": "2"},
    {"prompt": "7+9-a=?", "completion": "[T]7+9=5\n5-a=6\n[/T][A]6[/A]", "answer": "6"},
]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def write_answers(folder, rows=ANSWERS, name="answers.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def label(apportion, *arguments):
    outcome = apportion("label-steps", *arguments)
    assert outcome.status == 0, outcome.err
    return outcome


def refused(apportion, *arguments):
    outcome = apportion("label-steps", *arguments)
    assert (outcome.status, len(outcome.err)) == (2, 1), outcome.err
    return outcome.err[0].removeprefix("apportion label-steps: ")


def table(out, heading):
    """The numbers in the row below a heading."""
    at = next(place for place, line in enumerate(out) if line.split()[:1] == [heading])
    return out[at + 2].split()


# ---- freshly sampled


def test_one_command_makes_exact_labels_on_the_embedded_task_that_are_read_back_unchanged(apportion, tmp_path):
    out = label(apportion, *SMALL, "run.dir=out").out
    assert out[-1] == str(tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 24
    assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 6
    assert len({row["problem_id"] for row in rows}) == 6
    for row in rows:
        (verdict,) = ChainSteps()([Sample(row["prompt"], row["completion"], row["reference"])])
        spans = sorted((s.start, s.stop, s.score) for s in verdict.spans if s.start < s.stop)
        assert row["step_spans"] == [[start, stop] for start, stop, _ in spans]
        assert row["labels"] == [score for _, _, score in spans]
        assert (row["label_source"], row["seed"]) == ("exact", 0)
    back = list(load_steps(tmp_path / "out" / "steps.jsonl", format="stepwise"))
    assert [(one.completion, one.problem_id, one.prompt) for one in back] == [
        (row["completion"], row["problem_id"], row["prompt"]) for row in rows
    ]
    assert [[list(step) for step in one.steps] for one in back] == [row["step_spans"] for row in rows]
    assert [list(one.labels) for one in back] == [row["labels"] for row in rows]
    labels = [one for row in rows for one in row["labels"]]
    shown = table(out, "solutions")
    assert shown[:5] == ["24", str(len(labels)), str(labels.count(1.0)), str(labels.count(0.0)), "0"]


@pytest.mark.parametrize("labeler", ["consensus", "binary_search"])
def test_the_same_command_twice_gives_the_same_file_byte_for_byte(apportion, tmp_path, labeler):
    for name in ("a", "b"):
        label(apportion, *SMALL, f"labeler={labeler}", f"run.dir={name}")
    first, second = ((tmp_path / name / "steps.jsonl").read_bytes() for name in ("a", "b"))
    assert first == second
    assert first


def test_another_seed_gives_other_solutions(apportion, tmp_path):
    label(apportion, *SMALL, "run.dir=a")
    label(apportion, *SMALL, "run.dir=b", "seed=1")
    texts = [{row["completion"] for row in rows_of(tmp_path / name)} for name in ("a", "b")]
    assert texts[0] != texts[1]
    assert {row["seed"] for row in rows_of(tmp_path / "b")} == {1}


def test_held_out_problems_are_those_of_the_task(apportion, tmp_path):
    label(apportion, *SMALL, "run.dir=a", "split=held_out")
    label(apportion, *SMALL, "run.dir=b")
    held_out, train = ({row["problem_id"] for row in rows_of(tmp_path / name)} for name in ("a", "b"))
    assert len(held_out) == 6
    assert not held_out & train
    assert "num_problems=9: the task holds out 8; lower it" in refused(
        apportion, *SMALL, "run.dir=c", "split=held_out", "num_problems=9"
    )


def test_soft_labels_are_shares_of_k_and_the_last_step_is_the_outcome(apportion, tmp_path):
    out = label(apportion, *SMALL, "labeler=monte_carlo", "labeler.num_samples=4", "run.dir=out").out
    rows = rows_of(tmp_path / "out")
    for row in rows:
        right = row["completion"].endswith(f"[A]{row['reference']}[/A]") and row["completion"].startswith("[T]")
        assert row["labels"] == row["success_shares"]
        assert row["labels"][-1] in ((0.0, 1.0) if right else (0.0,))
        assert all(one in (0.0, 0.25, 0.5, 0.75, 1.0) for one in row["labels"])
        assert row["k"] == 4
        errors = [(p * (1 - p) / 4) ** 0.5 for p in row["labels"]]
        assert row["standard_errors"] == pytest.approx(errors)
        assert row["num_samples"] == [4] * (len(row["labels"]) - 1) + [0]
    assert len({label for row in rows for label in row["labels"]}) > 2
    # Equal prefixes of a problem were sampled once, and so have the same label.
    prefixes = {}
    for row in rows:
        for (_, stop), p in list(zip(row["step_spans"], row["labels"]))[:-1]:
            assert prefixes.setdefault((row["problem_id"], row["completion"][:stop]), p) == p
    assert f"{4 * len(prefixes)} continuations of {len(prefixes)} prefixes" in out


def test_binary_search_labels_up_to_the_first_error_and_says_what_it_saved(apportion, tmp_path):
    out = label(apportion, *SMALL, "labeler=binary_search", "run.dir=out").out
    rows = rows_of(tmp_path / "out")
    for row in rows:
        known = [one for one in row["labels"] if one is not None]
        assert known
        assert all(one == 1.0 for one in known[:-1])
        assert known == row["labels"][: len(known)]
        assert known[-1] == 0.0 or len(known) == len(row["labels"])
    assert any("saved" in line for line in out)


def test_a_consensus_keeps_what_agrees_and_shows_where_the_sources_differ(apportion, tmp_path):
    out = label(apportion, *SMALL, "labeler=consensus", "run.dir=out").out
    counts = Counter(json.loads((tmp_path / "out" / "progress.json").read_text())["counts"])
    for row in rows_of(tmp_path / "out"):
        mc, exact = (source["labels"] for source in row["sources"])
        assert row["labels"] == [a if (a >= 0.5) == (b >= 0.5) else None for a, b in zip(mc, exact)]
    kept = counts["pair right right"] + counts["pair wrong wrong"]
    steps = sum(count for name, count in counts.items() if name.startswith("pair "))
    assert counts["kept steps"] == kept
    assert f"kept: {kept} of {steps} steps ({kept / steps:.0%})" in out
    accuracy, f1 = agreement(counts)
    assert f"monte_carlo against exact: accuracy {accuracy:.3f}, F1 of wrong steps {f1:.3f}" in out
    assert accuracy == pytest.approx(kept / steps)


def test_the_sources_of_a_consensus_are_options(apportion, tmp_path):
    label(apportion, *SMALL, "labeler=consensus", "labeler@labeler.first=binary_search", "labeler.keep=solutions",
          "run.dir=out")  # fmt: skip
    for row in rows_of(tmp_path / "out"):
        assert row["label_source"] == "consensus of binary_search and exact"


def test_the_smoke_run_makes_a_data_set(apportion, tmp_path):
    label(apportion, "experiment=smoke", "num_problems=4", "warm_start.steps=20", "run.dir=out")
    assert len(rows_of(tmp_path / "out")) == 32


# ---- from a file


def test_a_file_is_labelled_without_a_policy(apportion, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apportion.experiments.completing", None)
    write_answers(tmp_path)
    label(apportion, "answers.jsonl", "run.dir=out")
    rows = rows_of(tmp_path / "out")
    # The solutions of a problem stand together.
    assert [(row["file"], row["row"]) for row in rows] == [(("answers.jsonl"), number) for number in (1, 3, 2)]
    assert [row["labels"] for row in rows] == [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0]]
    assert [row["reference"] for row in rows] == ["6", "6", "2"]


def test_the_rollouts_of_a_run_are_labelled_with_their_own_problems(apportion, apportion_in, tiny, tmp_path):
    assert apportion("train", *tiny, "run.dir=run").status == 0
    label(apportion, "run/rollouts", *SMALL[:-2], "labeler=monte_carlo", "labeler.num_samples=2", "run.dir=out")
    rows = rows_of(tmp_path / "out")
    assert {row["file"] for row in rows} == {"step_00001.parquet", "step_00002.parquet"}
    assert len(rows) == 16
    assert all(row["problem_id"] == row["prompt"] for row in rows)


def test_steps_by_a_segmenter_have_the_labels_of_the_spans_in_them(apportion, tmp_path):
    write_answers(tmp_path)
    label(apportion, "answers.jsonl", LINES, "run.dir=out")
    row = rows_of(tmp_path / "out")[0]
    assert row["completions"] == ["[T]7+9=5", "5-a=7", "[/T][A]7[/A]"]
    assert row["labels"] == [1.0, 0.0, 1.0]


def test_solutions_without_a_step_or_a_label_are_left_out_and_counted(apportion, tmp_path):
    rows = [{"prompt": "2+2?", "completion": text} for text in ("2 + 2 = 4", "no idea", " \n", "2 + 2 = 5\nso 5")]
    write_answers(tmp_path, rows)
    out = label(apportion, "answers.jsonl", "verifier@verifiers.steps=arithmetic", LINES, "run.dir=out").out
    assert [row["labels"] for row in rows_of(tmp_path / "out")] == [[1.0], [0.0, None]]
    assert "not in steps.jsonl: 1 solutions without a step, 1 solutions without any label" in out
    assert table(out, "solutions")[:5] == ["3", "4", "1", "1", "2"]
    assert [one.labels for one in load_steps(tmp_path / "out" / "steps.jsonl")] == [(1.0,), (0.0, None)]


def test_ones_own_step_verifier_is_a_labeler(apportion, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom apportion.verifiers import Span, Verdict\n\n"
        "@dataclass(frozen=True)\nclass Halves:\n    score: float = 0.5\n"
        "    def __call__(self, samples):\n"
        "        return [Verdict(None, (Span(0, 3, self.score),)) for s in samples]\n"
    )
    write_answers(tmp_path)
    label(apportion, "answers.jsonl", "~verifier@verifiers.steps", "+verifiers.steps._target_=mine.Halves",
          "+verifiers.steps.score=0.25", "run.dir=out")  # fmt: skip
    assert [row["labels"] for row in rows_of(tmp_path / "out")] == [[0.25]] * 3


# ---- interruption


STOPS = """
import pathlib
from apportion.verifiers.chain import ChainAnswer

class Stops(ChainAnswer):
    def __call__(self, samples):
        calls = pathlib.Path('calls')
        calls.write_text(calls.read_text() + '.' if calls.exists() else '.')
        if len(calls.read_text()) == 4 and not pathlib.Path('again').exists():
            raise KeyboardInterrupt
        return super().__call__(samples)
"""


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(apportion, tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    own = ["~verifier@verifiers.answer", "+verifiers.answer._target_=stops.Stops", "labeler=monte_carlo", *SMALL]
    outcome = apportion("label-steps", *own, "run.dir=out")
    assert outcome.status == 130
    assert any("goes on from here" in line for line in outcome.err)
    assert outcome.out[-1] == str(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["done"] == 2
    (tmp_path / "again").touch()
    part = (tmp_path / "out" / "steps.jsonl").read_bytes()
    (tmp_path / "out" / "steps.jsonl").write_bytes(part + b'{"prompt": "cut by a cr')  # a crash in the middle of a line
    done = label(apportion, *own, "run.dir=out").out
    whole = label(apportion, *own, "run.dir=whole").out
    assert (tmp_path / "out" / "steps.jsonl").read_bytes() == (tmp_path / "whole" / "steps.jsonl").read_bytes()
    assert table(done, "solutions")[:6] == table(whole, "solutions")[:6]


def test_a_run_that_was_stopped_before_its_first_label_goes_on(apportion, tmp_path):
    write_answers(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.jsonl").touch()
    label(apportion, "answers.jsonl", "run.dir=out")
    label(apportion, "answers.jsonl", "run.dir=whole")
    assert (tmp_path / "out" / "steps.jsonl").read_bytes() == (tmp_path / "whole" / "steps.jsonl").read_bytes()


def test_a_finished_run_is_shown_again_and_nothing_is_sampled(apportion, tmp_path, monkeypatch):
    first = label(apportion, *SMALL, "run.dir=out").out
    before = (tmp_path / "out" / "steps.jsonl").read_bytes()
    monkeypatch.setitem(sys.modules, "apportion.experiments.completing", None)
    assert label(apportion, *SMALL, "run.dir=out").out == first
    assert (tmp_path / "out" / "steps.jsonl").read_bytes() == before


def test_other_options_and_other_files_do_not_mix(apportion, tmp_path):
    write_answers(tmp_path)
    label(apportion, "answers.jsonl", "run.dir=out")
    text = refused(apportion, "answers.jsonl", "run.dir=out", "seed=1")
    assert text.endswith("holds labels made with other options (seed=0, not 1); choose another run.dir")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "steps.jsonl").write_text("precious\n")
    assert refused(apportion, "answers.jsonl", "run.dir=mine").endswith("holds something else; choose another run.dir")
    assert (tmp_path / "mine" / "steps.jsonl").read_text() == "precious\n"
    (tmp_path / "out" / "steps.jsonl").write_text("")
    assert "steps.jsonl: is shorter than it was left" in refused(apportion, "answers.jsonl", "run.dir=out")


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "file=none.jsonl: no such file"),
        (["empty.jsonl"], "file=empty.jsonl: no solution to label"),
        (["folder"], "file=folder: the folder holds no .jsonl or .parquet file"),
        (["answers.jsonl", "completion=text"], "answers.jsonl, row 1: column 'text' is missing"),
        (["answers.jsonl", "prompt=question"], "answers.jsonl, row 1: column 'question' holds no prompt; set prompt="),
        (["half.jsonl"], "half.jsonl, row 1: the text holds half a surrogate pair"),
        (["answers.jsonl", "+credit=uniform"], "credit: "),
        (["answers.jsonl", "labeler=exakt"], "did you mean labeler=exact?"),
        (["answers.jsonl", "split=test"], "split='test': must be 'train' or 'held_out'"),
        (["answers.jsonl", "run.batch=0"], "run.batch=0: must be at least 1"),
        (["answers.jsonl", "num_problems=x"], "num_problems='x': must be a whole number"),
        (["answers.jsonl", "labeler=monte_carlo", "labeler.num_samples=0"], "labeler: num_samples=0: must be at least"),
        (["answers.jsonl", "labeler=consensus", "labeler.keep=x"], "labeler.keep='x': must be 'steps' or 'solutions'"),
        (["answers.jsonl", "~verifier@verifiers.steps"], "nothing cuts solutions into steps; give one, or verifier@"),
        (["answers.jsonl", "segmenter={_target_: bad.cut}"], "segmenter: steps of a text of 27 characters must be in"),
        (
            [
                "answers.jsonl",
                "verifier@verifiers.steps=soft_overlong",
                "verifiers.steps.max_length=9",
                "verifiers.steps.buffer=2",
            ],
            "verifiers.steps: judges whole answers and marks no steps; give a segmenter",
        ),
        (
            [
                "answers.jsonl",
                "labeler.verifier={_target_: apportion.verifiers.length.SoftOverlong, max_length: 9, buffer: 2}",
                LINES,
            ],
            "labeler: SoftOverlong judges whole answers and marks no steps",
        ),
        (
            ["answers.jsonl", "labeler=monte_carlo", "rollout.max_new_tokens=12", *SMALL[:12]],
            f"the solution {CHAIN!r} has 17 tokens, and an answer of the policy at most rollout.max_new_tokens=12",
        ),
        (["words.jsonl", "labeler=monte_carlo", *SMALL[:12]], "policy=tiny knows only the symbols of its task"),
    ],
)
def test_bad_input_is_one_line(apportion, tmp_path, arguments, message):
    write_answers(tmp_path)
    write_answers(tmp_path, [{"prompt": "How many?", "completion": "Two.", "answer": 2}], "words.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a", "completion": "\\ud800"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.py").write_text("def cut(text):\n    return [(3, 5), (0, 2)]\n")
    assert message in refused(apportion, *arguments, "run.dir=out")


def test_a_verifier_that_fails_too_often_stops_the_run_and_seldom_is_told(apportion, tmp_path):
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def __call__(self, samples):\n"
        "        return [1 / (len(s.completion) - 27) for s in samples]\n"
    )
    write_answers(tmp_path)
    own = ["answers.jsonl", "labeler.verifier={_target_: broken.Broken}"]
    text = refused(apportion, *own, "run.dir=a", "run.max_error_share=0.5")
    assert text.startswith("Broken failed on 2 of 3 completions; mend it, or raise run.max_error_share=0.5; first: ")
    outcome = label(apportion, *own, "run.dir=b", "run.max_error_share=0.7")
    assert any("ZeroDivisionError" in line for line in outcome.err)


# ---- options


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "labeler").glob("*.yaml")))
def test_every_labeler_can_be_built_and_its_source_is_named(option):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("label_steps", [f"labeler={option}"])
    labeler = build(config.labeler, "labeler")
    assert labeler.source
    assert labeler.continues == (option not in ("exact", "judge"))


def test_the_judge_is_asked_about_the_same_steps():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(
            "label_steps", ["labeler=judge", "segmenter={_target_: apportion.verifiers.segmenters.BlankLines}"]
        )
    assert type(build(config.labeler, "labeler").verifier.segmenter).__name__ == "BlankLines"


def test_the_files_of_labelers_open_with_their_command():
    for path in (CONF / "labeler").glob("*.yaml"):
        assert path.read_text().startswith(f"# apportion label-steps labeler={path.stem}"), path
        assert yaml.safe_load(path.read_text())


# ---- continuations


def completer(**options):
    source = TinyPolicy(hidden_size=16, layers=1, heads=2, intermediate_size=16)
    return Completer(source.build(), RolloutConfig(max_new_tokens=20), seed=0, **options)


def solution(text=CHAIN, prompt="7+9-a=?", **metadata):
    sample = Sample(prompt, text, "6", metadata)
    (verdict,) = ChainSteps()([sample])
    return Solution(prompt, sample, tuple(sorted((s.start, s.stop) for s in verdict.spans if s.start < s.stop)))


def test_a_continuation_begins_with_the_prefix_and_keeps_to_the_limit_of_the_answer():
    sampler, one = completer(), solution()
    for count, group in zip((0, 1, 2), sampler([(one, 0), (one, 1), (one, 2)], 3)):
        assert len(group) == 3
        for sample in group:
            assert sample.completion.startswith(one.prefix(count))
            assert sample.metadata["num_tokens"] <= 20
            assert (sample.prompt, sample.reference) == ("7+9-a=?", "6")
    assert sampler.tokens > 0


def test_a_continuation_depends_on_nothing_that_is_sampled_beside_it():
    one, other = solution(), solution("[T]1+1=2\n[/T][A]2[/A]", "1+1=?")
    alone = completer()([(one, 1)], 2)[0]
    beside = completer(rows=5)([(other, 1), (one, 2), (one, 1)], 2)[2]
    longer = completer()([(one, 1)], 5)[0]
    assert [s.completion for s in alone] == [s.completion for s in beside] == [s.completion for s in longer[:2]]


def policy_of(*symbols):
    tokenizer = symbol_tokenizer(symbols)
    return Policy(None, tokenizer, lambda text: tokenizer.encode(text), (tokenizer.eos_token_id,))


def pieces(policy, text, steps, count, **metadata):
    from apportion.experiments.completing import _tokens

    one = Solution("p", Sample("?", text, None, metadata), tuple(steps))
    ids = prefix_ids(policy, one, count, _tokens(policy, one.sample))
    return [policy.tokenizer.decode([token]) for token in ids]


def test_a_prefix_is_cut_at_tokens_of_the_whole_solution():
    words = policy_of("a.", " b.", "\n", " ", "b", ".")
    assert pieces(words, "a. b.", [(0, 2), (3, 5)], 1) == ["a."]  # not "a.", " ": the blank belongs to what follows
    assert pieces(words, "a.\nb.", [(0, 2), (3, 5)], 1) == ["a.", "\n"]
    assert pieces(words, "a.\nb.", [(0, 2), (3, 5)], 0) == []


def test_a_token_that_holds_the_end_and_the_beginning_of_two_steps_is_not_used():
    words = policy_of("a.b", "a", ".", "b")
    assert pieces(words, "a.b.", [(0, 2), (2, 4)], 1) == ["a", "."]


def test_the_sampled_ids_are_used_where_they_are_this_policys():
    words = policy_of("a.", "a", ".", "b")
    spelled = [words.tokenizer.convert_tokens_to_ids(one) for one in ("a", ".", "b", ".")]
    assert pieces(words, "a.b.", [(0, 2), (2, 4)], 1) == ["a."]
    assert pieces(words, "a.b.", [(0, 2), (2, 4)], 1, completion_ids=spelled) == ["a", "."]
    assert pieces(words, "a.b.", [(0, 2), (2, 4)], 1, completion_ids=[0, 1, 99]) == ["a."]
    assert pieces(words, "a.b.", [(0, 2), (2, 4)], 1, completion_ids=spelled[:2]) == ["a."]


def test_a_solution_with_unknown_symbols_is_refused():
    with pytest.raises(InputError, match="does not know every symbol"):
        pieces(policy_of("a", "."), "a.b.", [(0, 2), (2, 4)], 1)


def test_random_numbers_of_a_continuation_are_named():
    sampler, one = completer(), solution()
    ids = prefix_ids(sampler.policy, one, 1, None)
    problem = type("P", (), {"id": "7+9-a=?"})
    own = named_seed(0, "continuation", "7+9-a=?", " ".join(map(str, ids)))
    assert sampler._seeds(problem, ids, 2) == [named_seed(own, 0), named_seed(own, 1)]


def test_agreement_is_none_where_there_is_nothing_to_compare():
    assert agreement({"pair right right": 3, "pair wrong unlabelled": 2}) is None
    assert agreement({"pair wrong wrong": 2}) == (1.0, 1.0)
