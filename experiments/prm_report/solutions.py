"""Which solutions the report shows, and their steps in the colours of their probabilities. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ...prm.steps import StepExample
from ..report.heat import visible
from .evaluation import Evaluation, Predictor

__all__ = ["ShownSolution", "ShownStep", "show_solutions"]

MOST_STEPS = 24
MOST_CHARACTERS = 900
# What happened -> what is said of it; in the order of showing.
KINDS = {
    "match": "first error named",
    "late": "error named too late",
    "missed": "error missed",
    "early": "right step called wrong before the error",
    "alarm": "no error, but one named",
    "clear": "no error, none named",
}


@dataclass(frozen=True)
class ShownStep:
    """One step of a shown solution; ``html`` is its text with colour, ``label`` what is known of it."""

    number: int
    score: float | None
    others: str
    label: str
    html: Markup


@dataclass(frozen=True)
class ShownSolution:
    """One solution: what happened to it, its steps, and how many before and after them are not shown."""

    problem_id: str
    subset: str
    prompt: Markup
    happened: str
    steps: Sequence[ShownStep]
    before: int
    after: int


def show_solutions(evaluation: Evaluation, *, count: int = 6) -> list[ShownSolution]:
    """A varied choice: for each thing that can happen a solution of the first model, then more of each."""
    model = next(iter(evaluation.predictors), None)
    if model is None:
        return []
    by_kind: dict[str, list[int]] = {kind: [] for kind in KINDS}
    rows, said = _first_error_rows(evaluation), model.fixed.predictions
    truths = [_truth(evaluation.examples[row]) for row in rows]
    for place, (truth, named) in enumerate(zip(truths, said, strict=True)):
        by_kind[_kind(truth, named)].append(place)
    chosen: list[tuple[str, int]] = []
    for turn in range(count):
        chosen += [(kind, places[turn]) for kind, places in by_kind.items() if turn < len(places)]
    shown = sorted(chosen[:count], key=lambda pair: (list(KINDS).index(pair[0]), pair[1]))
    return [_solution(evaluation, model, rows[k], kind, truths[k], said[k]) for kind, k in shown]


def _first_error_rows(evaluation: Evaluation) -> list[int]:
    """Rows of the solutions that the predictions of first errors are about."""
    return [row for row, e in enumerate(evaluation.examples) if e.steps and _truth(e) is not None]


def _truth(example: StepExample) -> int | None:
    from ...prm.process_bench import first_error_label

    return first_error_label(example.labels)


def _kind(truth: int | None, named: int) -> str:
    if truth is None or truth == -1:
        return "clear" if named == -1 else "alarm"
    if named == -1:
        return "missed"
    return "match" if named == truth else "early" if named < truth else "late"


def _solution(
    evaluation: Evaluation, model: Predictor, row: int, kind: str, truth: int | None, named: int
) -> ShownSolution:
    example, texts = evaluation.examples[row], evaluation.examples[row].step_texts
    at = named if truth in (None, -1) else truth
    first = max(0, min((at or 0) - MOST_STEPS // 2, len(texts) - MOST_STEPS))
    steps = []
    for step in range(first, min(len(texts), first + MOST_STEPS)):
        score = model.predictions[row][step]
        others = [(p.name, p.predictions[row][step]) for p in evaluation.predictors if p is not model]
        told = "; ".join(f"{name} {value:.2f}" for name, value in others if value is not None)
        html = _heat(texts[step], score, evaluation.threshold, first_error=step == truth)
        steps.append(ShownStep(step + 1, score, told, _label(example.labels[step]), html))
    happened = KINDS[kind]
    if kind in ("late", "early"):
        happened += f": step {named + 1}, true first error in step {(truth or 0) + 1}"
    return ShownSolution(
        visible(example.problem_id),
        visible(evaluation.subsets[row]),
        _text(example.prompt),
        happened,
        steps,
        first,
        len(texts) - first - len(steps),
    )


def _label(label: float | None) -> str:
    if label is None:
        return "not labelled"
    return {0.0: "wrong", 1.0: "right"}.get(label, f"labelled {label:.2f}")


def _heat(text: str, score: float | None, threshold: float, *, first_error: bool) -> Markup:
    """A step's text: blue from the threshold up to 1, red from it down to 0; underlined where it is the first error."""
    classes, style = [], Markup("")
    if score is not None:
        below = score < threshold
        room = threshold if below else 1 - threshold
        classes.append("n" if below else "p")
        style = Markup(' style="--w:{:.2f}"').format(abs(score - threshold) / room if room else 1.0)
    if first_error:
        classes.append("e")
    attributes = Markup(' class="{}"').format(" ".join(classes)) if classes else Markup("")
    return Markup("<span{}{}>{}</span>").format(attributes, style, _text(text))


def _text(text: str) -> Markup:
    """Escaped, line ends marked and kept, the middle of a long one left out."""
    if len(text) > MOST_CHARACTERS:
        half, left_out = MOST_CHARACTERS // 2, len(text) - MOST_CHARACTERS
        gap = Markup('<i class="cut"> … {:,} characters … </i>').format(left_out)
        return _lines(text[:half]) + gap + _lines(text[-half:])
    return _lines(text)


def _lines(text: str) -> Markup:
    return (Markup('<b class="nl">↵</b><br>')).join(escape(visible(line)) for line in text.split("\n"))
