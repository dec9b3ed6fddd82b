"""Baselines: what each can see, no leak between problems, and data that nothing can be fitted on."""

from __future__ import annotations

import random

import pytest

from apportion.prm import StepExample
from apportion.prm.baselines import baseline_predictions, characters_and_position, majority_class, position_only
from apportion.prm.metrics import error_f1, flatten_steps, roc_auc


def solution(texts: list[str], labels: list[float | None], problem: str) -> StepExample:
    steps, place = [], 0
    for text in texts:
        steps.append((place, place + len(text)))
        place += len(text) + 1
    return StepExample("q", "\n".join(texts), tuple(steps), tuple(labels), problem)


def auc(examples: list[StepExample], predictions: object) -> float:
    steps = flatten_steps(examples, predictions)  # type: ignore[arg-type]
    return roc_auc(steps.labels, steps.probabilities)


def by_place(problems: int = 20) -> list[StepExample]:
    """The second of three equally long steps is wrong."""
    return [solution(["aaa", "bbb", "ccc"], [1.0, 0.0, 1.0], f"p{k}") for k in range(problems)]


def by_text(problems: int = 30) -> list[StepExample]:
    """Steps with a ! are wrong, wherever they stand."""
    rng = random.Random(0)
    rows = []
    for k in range(problems):
        labels = [float(rng.random() < 0.6) for _ in range(4)]
        texts = [f"{rng.randrange(10)}+{rng.randrange(10)}" + ("." if right else "!") for right in labels]
        rows.append(solution(texts, list(labels), f"p{k}"))
    return rows


def test_majority_is_the_base_rate_and_ranks_nothing() -> None:
    examples = by_place()
    scores = majority_class(examples)
    assert scores[0] == [pytest.approx(2 / 3)] * 3
    assert auc(examples, scores) == 0.5
    steps = flatten_steps(examples, scores)
    assert error_f1(steps.labels, steps.probabilities) == 0.0
    assert majority_class(examples, train=[solution(["a", "b"], [0.0, 0.0], "t")])[0] == [0.0] * 3


def test_position_sees_place_and_not_text() -> None:
    assert auc(by_place(), position_only(by_place())) == 1.0
    assert auc(by_text(), position_only(by_text())) < 0.65


def test_characters_see_text() -> None:
    assert auc(by_text(), characters_and_position(by_text())) > 0.95


def test_length_counts_as_position() -> None:
    texts = [solution(["x" * (3 if right else 30) for right in row], list(map(float, row)), f"p{k}")
             for k, row in enumerate([[1, 0, 1], [0, 1, 1], [1, 1, 0]] * 6)]  # fmt: skip
    assert auc(texts, position_only(texts)) == 1.0


def test_no_problem_helps_to_judge_itself() -> None:
    """Two solutions of each problem share a text that decides the label within it, and in no other problem."""
    rng = random.Random(1)
    rows = []
    for k in range(40):
        word, right = "".join(rng.choices("abcdefghijkl", k=8)), float(k % 2)
        rows += [solution([word], [right], f"p{k}") for _ in range(2)]
    assert auc(rows, characters_and_position(rows)) < 0.7
    ungrouped = [
        StepExample(r.prompt, r.completion, r.steps, r.labels, f"{r.problem_id}{i}") for i, r in enumerate(rows)
    ]
    assert auc(ungrouped, characters_and_position(ungrouped)) > 0.9


def test_unlabelled_steps_are_scored_but_teach_nothing() -> None:
    examples = [solution(["aaa", "bbb", "ccc"], [1.0, 0.0, None], f"p{k}") for k in range(6)]
    for scores in baseline_predictions(examples).values():
        assert all(isinstance(score, float) for row in scores for score in row)


def test_training_data_take_the_place_of_folds() -> None:
    train = by_place()
    scored = position_only([solution(["aaa", "bbb", "ccc"], [1.0, 1.0, 1.0], "new")], train=train)[0]
    assert scored[1] < 0.5 < scored[0]


def test_one_problem_gives_no_scores_but_a_constant() -> None:
    predictions = baseline_predictions([solution(["a", "b"], [1.0, 0.0], "only")])
    assert predictions == {
        "majority class": [[0.5, 0.5]],
        "position only": [[None, None]],
        "characters and position": [[None, None]],
    }
    assert baseline_predictions([solution(["a"], [None], "p")])["majority class"] == [[None]]
    assert set(map(len, baseline_predictions([]).values())) == {0}


def test_one_class_in_training_is_the_constant_answer() -> None:
    examples = [solution(["a", "b"], [1.0, 1.0], f"p{k}") for k in range(3)]
    assert position_only(examples) == [[1.0, 1.0]] * 3


def test_any_text_is_taken() -> None:
    texts = ["\ud800", " \n\t", "👩‍👩‍👧", "x" * 5000]
    examples = [solution(texts, [1.0, 0.0, 1.0, 0.0], f"p{k}") for k in range(4)]
    assert all(0 <= score <= 1 for row in characters_and_position(examples) for score in row if score is not None)
    assert characters_and_position(examples) == characters_and_position(examples)


def test_solution_without_steps_has_no_scores() -> None:
    empty = StepExample("q", "", (), (), "e")
    assert position_only([*by_place(4), empty])[-1] == []
