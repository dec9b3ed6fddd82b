"""Laws of reasoning-gym's scorers as a verifier: the right answer pays, nothing else does, and nothing is evaluated."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample
from apportion.verifiers.gym_answers import EVALUATED, EXPRESSIONS, FORMS, OPEN, admitted, answer_texts
from apportion.verifiers.gym_scoring import _evaluates, score_entry
from apportion.verifiers.panel import judge
from apportion.verifiers.reasoning_gym import GymAnswer


class Scorer:
    """A data set whose scorer gives what a table says, and raises what stands there."""

    def __init__(self, table, default=0.0):
        self.table, self.default = table, default

    def score_answer(self, answer, entry):
        found = self.table.get(answer, self.default)
        if isinstance(found, Exception):
            raise found
        return found


def entry(answer, name="a_game", **facts):
    return {"question": "?", "answer": answer, "metadata": {"source_dataset": name, **facts}}


def score(dataset, answer, problem, *, partial=False):
    return score_entry(dataset, problem, answer, partial=partial)


def test_only_a_full_score_counts_unless_parts_are_asked_for():
    scorer = Scorer({"ab": 1.0, "b": 0.4, "a": 0.1, "zzz": 0.1})
    problem = entry("ab b a")
    assert [score(scorer, text, problem) for text in ("ab", "b", "a")] == [1.0, 0.0, 0.0]
    assert [score(scorer, text, problem, partial=True) for text in ("ab", "b", "a")] == [1.0, 0.4, 0.0]


def test_scores_lie_between_0_and_1():
    scorer = Scorer({"a": 1.0000000000000002, "b": 7.0, "c": -3.0})
    for partial in (False, True):
        assert [score(scorer, text, entry("a b c"), partial=partial) for text in "abc"] == [1.0, 1.0, 0.0]


def test_an_answer_that_makes_the_scorer_raise_is_wrong_and_a_scorer_that_always_does_is_broken():
    assert score(Scorer({"b": ValueError("no int"), "a b": 1.0}), "b", entry("a b")) == 0.0
    with pytest.raises(RuntimeError, match="the scorer fails on a right answer too: KeyError: 'x'"):
        score(Scorer({}, default=KeyError("x")), "b", entry("a b"))
    with pytest.raises(RuntimeError, match="fails on a right answer too: ValueError: the score is not a number"):
        score(Scorer({}, default=float("nan")), "b", entry("a b"))
    with pytest.raises(MemoryError):
        score(Scorer({"b": MemoryError()}), "b", entry("a b"))


def test_where_no_right_answer_is_known_an_example_stands_in():
    scorer = Scorer({"b": ValueError(), "Q": 1.0}, default=KeyError())
    assert score(scorer, "b", entry(None, example_answer="Q")) == 0.0


def test_an_answer_that_only_contains_the_right_one_gets_no_part():
    scorer = Scorer({"ab.": 0.7, "a b": 0.7}, default=0.3)
    assert score(scorer, "ab.", entry("ab"), partial=True) == 0.0
    assert score(scorer, "a b", entry("ab b a"), partial=True) == 0.7


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (
            "12",
            ["12", "12 apples", "$12", "12.0"],
            ["12 or 13", "12, 13", "1a2 12", "12 and more", "twelve", "12/13 1", "12\nMonday"],
        ),
        ("-4", ["-4"], ["-4 (or 4)"]),
        ("True", ["True", "true."], ["True or False", "yes", "?", "Truezzz"]),
        ("34 days", ["34 days", "34"], ["34 or 59 days", "34 days, or so", "34 days 5"]),
        (r"$\dfrac{3}{7}$", ["3/7", r"\frac{3}{7}"], ["3/7 or 4/7", "3/7zzz", "3/7 = 6/14"]),
        ("(-51.000, 41.000)", ["(-51, 41)"], ["(-51, 41), (2, 3)"]),
        ("Lily is a saint", ["Lily is a saint."], ["Lily is a saint, or Lily is a villain"]),
        ("][", ["]["], ["[]", "][ ]["]),
    ],
)
def test_one_answer_holds_no_more_than_the_right_one(reference, right, wrong):
    assert [admitted("a_game", text, entry(reference)) for text in wrong] == [None] * len(wrong)
    assert None not in [admitted("a_game", text, entry(reference)) for text in right]


def test_a_number_is_handed_on_without_its_unit():
    assert admitted("gsm_symbolic", "12 apples", entry("12")) == "12"
    assert admitted("gsm_symbolic", " -1,200.50 dollars", entry("-1200.5")) == "-1,200.50"


HOSTILE = [
    "__import__('os').system('true')",
    "().__class__",
    "[].append(1)",
    "x.func_globals",
    "lambda: 1",
    "9**9999",
    "9**9**9",
    "9 ** 9 ** 9",
    "2**(9**9)",
    "2**(x)",
    "'a'*9",
    "[1]*9",
    "print(1)",
    "exec('1')",
    "x or y",
    "x if x else x",
    "Integral(x, x)",
    "1_000",
    "x; y",
    "factorial(99999)",
    "99999!",
    "1e999",
    "C(C)",
    "12345678901234567890",
    "x[0]",
    "{x}",
    "@x",
    "x:=1",
    "\u02b0x",
    "2(3)",
]


@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_no_code_reaches_a_scorer_that_evaluates(name):
    problem = entry("x + C", name, variable="x", variables=["x", "y"])
    taken = [text for text in HOSTILE if admitted(name, text, problem) is not None]
    assert taken in ([], ["C(C)"])  # a call of a symbol: sympy refuses it


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_only_what_equals_a_right_answer_reaches_a_scorer_that_calls_eval(name):
    problem = entry("1 2", name, valid_answers=["2 1"])
    texts = ["1 2", " 2 1\n", "[1, 2]", *HOSTILE]
    assert [text for text in texts if admitted(name, text, problem) is not None] == ["1 2", " 2 1\n"]


def test_formulas_are_let_through():
    calculus = entry("", "simple_integration", variable="X")
    for text in ("-X**9 + 7*X**7/2 + C", "2*(4*X + 2)**(3/2)/3 + C", "X*asin(3*X) + sqrt(1 - 9*X**2)/3", "exp(-X)**-2"):
        assert admitted("simple_integration", text, calculus) == text
    assert admitted("simple_integration", "x**2", calculus) is None  # another variable
    assert admitted("countdown", "(94*4) - 61/6", entry("", "countdown")) == "(94*4) - 61/6"


TEXT = 'I think <answer>{"0": 1}</answer> fits.'


def test_the_answer_is_what_stands_between_the_last_tags_braces_and_all():
    first = answer_texts(TEXT)[0]
    assert first.text == TEXT[first.start : first.stop] == '{"0": 1}'
    assert answer_texts("<answer>1</answer> no: <ANSWER>\n a\nb </ANSWER>")[0].text == "a\nb"
    assert [a.text for a in answer_texts("So \\boxed{4}.")] == ["4"]
    assert [a.text for a in answer_texts("<answer>Answer: 4</answer>")] == ["Answer: 4", "4"]
    assert [a.text for a in answer_texts("<answer>3", "answer_tag")] == []
    assert answer_texts("") == []


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(text=st.text(st.characters(), max_size=40), reference=st.sampled_from(["12", "a b", "][", "True", None]))
def test_any_text_is_looked_at_without_a_fault(text, reference):
    for name in ("a_game", "countdown", "simple_integration", "sokoban", "n_queens", "boxnet"):
        found = admitted(name, text, entry(reference, name))
        assert found is None or found in text
    for answer in answer_texts(f"<answer>{text}</answer>"):
        assert answer.text in text


@pytest.mark.parametrize("unit", ["(", "x", "*", "9", "**", "A→", "up ", "<answer>", "\\", "1,", "or "])
def test_a_hundred_thousand_characters_take_no_time(unit):
    text = unit * (100_000 // len(unit))
    began = time.process_time()
    answer_texts(text)
    for name in ("a_game", *EXPRESSIONS, *FORMS, *OPEN):
        admitted(name, text[:20_000], entry("12", name, variable="x"))
        admitted(name, text, entry("a b", name))
    assert time.process_time() - began < 4


def test_options_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(InputError, match="extract: 'first' is no policy"):
        GymAnswer(extract="first")
    with pytest.raises(InputError, match="score: 'half' is unknown; give strict or partial"):
        GymAnswer(score="half")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"reasoning_gym: .*pip install 'apportion\[data\]'"):
        GymAnswer().prepare()


def test_without_a_problem_of_the_package_there_is_no_verdict_and_without_an_answer_the_score_is_0():
    samples = [
        Sample("", "<answer>1</answer>"),
        Sample("", "", metadata={"dataset": "gcd", "entry": entry("1", "gcd")}),
    ]
    assert [verdict.score for verdict in GymAnswer()(samples)] == [None, 0.0]


def gym():
    return pytest.importorskip("reasoning_gym")


def right_answer(problem):
    facts = problem["metadata"]
    return problem["answer"] or facts.get("example_answer") or facts.get("example_correct_answer")


@pytest.mark.integration
def test_the_lists_of_scorers_that_evaluate_are_whole():
    gym()
    from reasoning_gym.factory import DATASETS

    found = {name for name, (kind, _) in DATASETS.items() if _evaluates(kind)}
    assert found == EVALUATED | EXPRESSIONS.keys()
    assert DATASETS.keys() >= {*FORMS, *OPEN}
    assert len(DATASETS) == 106


SLOW_TO_MAKE = {"knight_swap", "zebra_puzzles", "sokoban", "quantum_lock", "futoshiki", "sudoku", "puzzle24"}
WITHOUT_ANSWER = {"boxnet", "graph_color", "rush_hour", "composite"}


@pytest.mark.slow
@pytest.mark.integration
def test_of_every_data_set_the_right_answer_pays_and_hedges_and_junk_do_not():
    package = gym()
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - WITHOUT_ANSWER):
        count = 2 if name in SLOW_TO_MAKE else 5
        dataset = package.create_dataset(name, seed=11, size=count)
        problems = [dataset[place] for place in range(count)]
        for place, problem in enumerate(problems):
            right, other = (str(right_answer(p)) for p in (problem, problems[place - 1]))
            if not right.strip() or not other.strip() or "Integral" in right:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                assert score(dataset, right, problem) == 1.0, (name, right)
                hedges = [f"{right} or {other}", f"{other} or {right}", f"{right}zzz", f"zzz{right}", "zzz", "?"]
                hedges += [f"{right}\n{other}", f"{other}\n{right}", f"{right}, {other}", problem["question"]]
                for text in hedges if other.strip().casefold() != right.strip().casefold() else []:
                    assert score(dataset, text, problem) == 0.0, (name, text)
                    assert score(dataset, text, problem, partial=True) < 0.5, (name, text)


@pytest.mark.integration
def test_answers_are_scored_in_other_processes_and_located():
    dataset = gym().create_dataset("chain_sum", seed=1, size=2)
    problems = [dataset[place] for place in range(2)]
    texts = [f"So <answer>{p['answer']}</answer>." for p in problems]
    texts += [f"{texts[0]} No: <answer>999999</answer>", f"Answer: {problems[1]['answer']}", "<answer>zzz</answer>"]
    rows = [0, 1, 0, 1, 0]
    columns = [{"dataset": "chain_sum", "config": {}, "entry": problems[row]} for row in rows]
    verifier = GymAnswer(workers=1)
    verifier.prepare()
    samples = [Sample("", text, metadata=column) for text, column in zip(texts, columns)]
    result = judge({"it": verifier}, samples)
    assert result.errors == {"it": 0}
    verdicts = [row["it"] for row in result.verdicts]
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 0.0, 1.0, 0.0]
    spans = [span for verdict in verdicts for span in verdict.spans]
    located = [text[span.start : span.stop] for text, span in zip(texts, spans)]
    assert located == [problems[0]["answer"], problems[1]["answer"], "999999", problems[1]["answer"], "zzz"]


@pytest.mark.integration
def test_a_scorer_that_hangs_costs_its_sample_only_and_counts_as_an_error():
    dataset = gym().create_dataset("simple_integration", seed=1, size=1)
    problem = dataset[0]
    variable = problem["metadata"]["variable"]
    heavy = "*".join(f"sin({variable}**{k} + {variable})**99" for k in range(2, 40))
    column = {"dataset": "simple_integration", "config": {}, "entry": problem}
    texts = [f"<answer>{heavy}</answer>", f"<answer>{problem['answer']}</answer>"]
    samples = [Sample("", text, metadata=column) for text in texts]
    result = judge({"it": GymAnswer(workers=1, timeout_s=2.0)}, samples)
    assert (result.errors, result.verdicts[1]["it"].score) == ({"it": 1}, 1.0)
    assert "no result within 2 s" in result.first_error["it"]
