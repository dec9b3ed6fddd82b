"""What a process reward model must beat: constants, the place of a step, its characters.

Step data lean on position and length (errors come late, or early, as the data were made), so a figure of a model says
nothing without these beside it. Each gives probabilities that go through the same measures as a model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from .metrics import Predictions
from .reliability import RIGHT
from .steps import StepExample

__all__ = ["BASELINES", "baseline_predictions", "characters_and_position", "majority_class", "position_only"]

FOLDS = 5
MOST_TERMS = 20_000
Scores = list[list[float | None]]


def baseline_predictions(
    examples: Sequence[StepExample], *, train: Sequence[StepExample] | None = None, folds: int = FOLDS
) -> dict[str, Predictions]:
    """All baselines by name.

    Args:
        examples: solutions to be scored.
        train: solutions to fit on, for a model that was trained on the same; where left out, ``folds`` folds of
            ``examples`` grouped by problem take turns, and every score comes from a fit without its problem.
    """
    return {name: baseline(examples, train=train, folds=folds) for name, baseline in BASELINES.items()}


def majority_class(
    examples: Sequence[StepExample], *, train: Sequence[StepExample] | None = None, folds: int = FOLDS
) -> Scores:
    """The share of right steps as a constant: above .5 it always calls the majority's class.

    Without ``train`` it is the share in ``examples`` themselves: one number for all folds, for a constant that changed
    from fold to fold would rank steps, and the wrong way round.

    >>> example = StepExample("", "a b c d", ((0, 1), (2, 3), (4, 5), (6, 7)), (1.0, 1.0, 1.0, 0.0), "p")
    >>> majority_class([example])
    [[0.75, 0.75, 0.75, 0.75]]
    """
    del folds
    known = [label >= RIGHT for e in (examples if train is None else train) for label in e.labels if label is not None]
    share = sum(known) / len(known) if known else None
    return [[share] * len(example.steps) for example in examples]


def position_only(
    examples: Sequence[StepExample], *, train: Sequence[StepExample] | None = None, folds: int = FOLDS
) -> Scores:
    """Logistic regression on where a step stands and how long it is, without a character of its text.

    Features: index and its log, place among the steps from 0 to 1, first, last, number of steps; where it begins and
    ends in the solution's characters from 0 to 1, and the log of its length. So it knows how long the whole solution
    is, as a model that reads only up to the step does not. Length matters: a short step seldom errs.
    """

    def make() -> Any:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, StandardScaler

        picked = FunctionTransformer(lambda rows: np.array([place for _, place in rows]))
        return make_pipeline(picked, StandardScaler(), LogisticRegression(max_iter=1000))

    return _scores(make, examples, train, folds)


def characters_and_position(
    examples: Sequence[StepExample], *, train: Sequence[StepExample] | None = None, folds: int = FOLDS
) -> Scores:
    """Logistic regression on tf-idf of a step's 1- to 3-grams of characters, and on its place as above."""

    def make() -> Any:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline, make_union
        from sklearn.preprocessing import FunctionTransformer, StandardScaler

        texts = FunctionTransformer(lambda rows: [text for text, _ in rows])
        grams = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), max_features=MOST_TERMS, sublinear_tf=True)
        places = FunctionTransformer(lambda rows: np.array([place for _, place in rows]))
        features = make_union(make_pipeline(texts, grams), make_pipeline(places, StandardScaler()))
        return make_pipeline(features, LogisticRegression(max_iter=1000))

    return _scores(make, examples, train, folds)


BASELINES: dict[str, Callable[..., Scores]] = {
    "majority class": majority_class,
    "position only": position_only,
    "characters and position": characters_and_position,
}

Row = tuple[str, tuple[float, ...]]


def _rows(example: StepExample) -> list[Row]:
    """Text and place of each step."""
    count, whole = len(example.steps), len(example.completion)
    rows = []
    for step, (text, (start, stop)) in enumerate(zip(example.step_texts, example.steps, strict=True)):
        among = (step, math.log1p(step), step / max(1, count - 1), step == 0, step == count - 1, count)
        rows.append((text, tuple(map(float, (*among, start / whole, stop / whole, math.log(stop - start))))))
    return rows


def _scores(
    make: Callable[[], Any], examples: Sequence[StepExample], train: Sequence[StepExample] | None, folds: int
) -> Scores:
    """Probabilities of every step, labelled or not; None where there is nothing to fit on."""
    scores: Scores = [[None] * len(example.steps) for example in examples]
    for fitted_on, held_out in _splits(examples, train, folds):
        rows = [row for number in held_out for row in _rows(examples[number])]
        answers = iter(_fit(make, fitted_on)(rows) if rows else [])
        for number in held_out:
            scores[number] = list(islice(answers, len(examples[number].steps)))
    return scores


def _splits(
    examples: Sequence[StepExample], train: Sequence[StepExample] | None, folds: int
) -> Iterator[tuple[Sequence[StepExample], Sequence[int]]]:
    if train is not None:
        yield train, range(len(examples))
        return
    problems = [example.problem_id for example in examples]
    if len(set(problems)) < 2:
        return
    from sklearn.model_selection import GroupKFold

    for fitted_on, held_out in GroupKFold(min(folds, len(set(problems)))).split(problems, groups=problems):
        yield [examples[number] for number in fitted_on], [int(number) for number in held_out]


def _fit(make: Callable[[], Any], train: Sequence[StepExample]) -> Callable[[Sequence[Row]], list[float | None]]:
    """Fit on the labelled steps; where they are all of one class, its share (0 or 1) is the constant answer."""
    known = [
        (row, label >= RIGHT)
        for example in train
        for row, label in zip(_rows(example), example.labels, strict=True)
        if label is not None
    ]
    if not known:
        return lambda rows: [None] * len(rows)
    classes = {right for _, right in known}
    if len(classes) == 1:
        return lambda rows: [float(known[0][1])] * len(rows)
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    with threadpool_limits(1):  # more threads only spin on vectors this short
        model = make().fit([row for row, _ in known], [right for _, right in known])
    return lambda rows: model.predict_proba(rows)[:, 1].tolist()
