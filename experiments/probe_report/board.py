"""The figures of a probe as a table: which columns there are, how a number is written, one row for each strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..probe.record import Figure, Probe, ProbedStrategy

__all__ = [
    "CLASSES",
    "NOTHING",
    "Board",
    "Cell",
    "Column",
    "Group",
    "board",
    "decimals",
    "digits_of",
    "place_of",
    "written",
]

Better = Literal["high", "low", ""]
NOTHING = Figure(math.nan)
PAIRED = "_minus_uniform"
# class of token -> its name
CLASSES = {
    "first_wrong": "first wrong step",
    "later": "later steps",
    "before": "right steps before",
    "format": "format",
    "answer": "answer",
    "filler": "filler",
}


class Column(NamedTuple):
    """One figure: its key, heading and definition, which direction is good, and decimals (None: as they need)."""

    key: str
    heading: str
    says: str
    better: Better = ""
    decimals: int | None = None


class Cell(NamedTuple):
    """A number as it is written, its interval (or nothing), and the number itself for sorting."""

    text: str
    interval: str
    value: float


@dataclass(frozen=True)
class Group:
    """Columns that belong together, with a sentence on all of them."""

    name: str
    heading: str
    says: str
    columns: Sequence[Column]


@dataclass(frozen=True)
class Board:
    """The whole table.

    Args:
        groups: those in which anything was measured.
        rows: by strategy, cells in the order of the columns of all groups.
        floor: cells of the noise floor, empty where there is none.
    """

    groups: Sequence[Group]
    rows: Mapping[str, Sequence[Cell]]
    floor: Sequence[Cell]

    def floored(self, group: Group) -> bool:
        """Whether the noise floor says anything about a group."""
        start = [column for g in self.groups for column in g.columns].index(group.columns[0])
        return any(not math.isnan(cell.value) for cell in self.floor[start : start + len(group.columns)])


_GROUPS = (
    Group("quality", "Quality", "Credit against the true advantages.", (
        Column("quality/pearson", "Pearson", "correlation of the steps’ credit with the true advantages", "high", 3),
        Column("quality/pearson_minus_uniform", "minus uniform", "difference in Pearson, paired by problem", "high", 3),
        Column("quality/pearson_p", "p", "of that difference, Holm-corrected", "low", 3),
        Column("quality/placed_p", "placed, p", "that its steps' credit is placed by chance", "low", 3),
        Column("quality/sign_accuracy", "sign accuracy", "sign of the truth where it is over tau", "high", 3),
        Column("quality/sign_ties", "sign ties", "share of these with a credit of zero", "", 3),
        Column("quality/error_auc", "error AUC", "wrong tokens have less credit than others", "high", 3),
        Column("quality/blame_at_1", "blame@1", "failed answers whose worst step has the least credit", "high", 3),
        Column("quality/inert_mass", "inert mass", "share of |A| on tokens that make no difference", "low", 3),
    )),
    Group("gradient", "Gradient", "The policy gradient, and the reference: exact, or of further rollouts.", (
        Column("gradient/norm", "norm", "length"),
        Column("gradient/cosine", "cosine", "with the reference gradient", "high", 3),
        Column("gradient/cosine_minus_uniform", "minus uniform", "difference in cosine, paired by policy", "high", 3),
        Column("gradient/bias", "bias", "sine of the angle between expected gradient and reference", "low"),
        Column("gradient/snr", "signal to noise", "of one group’s gradient", "high"),
    )),
    Group("update", "Update", "One real optimiser step on a copy: mean change of log-probability by class of token.", (
        *(Column(f"update/{key}", name, "") for key, name in CLASSES.items()),
        Column("update/kl", "KL", "of the policy before from that after, nats for each token"),
        Column("update/clip_fraction", "clipped", "share of tokens that a second step would clip", "", 3),
    )),
    Group("shape", "Shape", "Where the credit lies: share of |A| on each class of token, and how it is spread.", (
        *(Column(f"shape/{key}", name, "", "", 3) for key, name in CLASSES.items()),
        Column("shape/gini", "Gini", "0: all tokens alike; 1: all on one", "", 3),
        Column("shape/effective_tokens", "effective tokens", "equal tokens that would be as concentrated, by answer"),
        Column("shape/sign_flips", "sign flips", "share of credited tokens against the outcome’s sign", "", 3),
        Column("shape/mass_ratio", "mass ratio", "sum of A along the outcome, uniform’s being 1"),
    )),
    Group("cost", "Cost", "What the evidence took: in all for a language model, for each answer on a table.", (
        Column("cost/rollouts", "rollouts", "answers and continuations sampled", "low"),
        Column("cost/verifier_calls", "verifier calls", "texts judged by a verifier", "low"),
        Column("cost/milliseconds", "milliseconds", "to gather the evidence and compute the credit", "low"),
    )),
)  # fmt: skip


def board(probe: Probe) -> Board:
    """The table of a probe. Columns without a number are left out; unknown keys come last in their group."""
    sources = [strategy.figures for strategy in probe.strategies] + [probe.noise_floor]
    groups = [group for known in _with_unknown(sources) if (group := _measured(known, sources)) is not None]
    columns = [column for group in groups for column in group.columns]
    digits = _digits(columns, probe.strategies)
    rows = {s.name: _cells(s.figures, columns, digits) for s in probe.strategies}
    floor = _cells(probe.noise_floor, columns, digits) if probe.noise_floor else []
    return Board(groups, rows, floor)


def written(value: float, digits: int, *, signed: bool = False) -> str:
    """A number with its decimals and a real minus; a dash where there is none.

    >>> written(-0.12345, 3), written(1234.5, 0), written(float("nan"), 3)
    ('−0.123', '1,234', '–')
    """
    if math.isnan(value):
        return "–"
    text = f"{value:{'+' if signed else ''},.{digits}f}"
    return (text.lstrip("+-") if float(text.replace(",", "")) == 0 else text).replace("-", "−")


def decimals(values: Iterable[float]) -> int:
    """Decimals that show the largest of the values with three digits, at most six; none for whole numbers.

    >>> decimals([12.34, 0.5]), decimals([0.00123]), decimals([8.0, 64.0])
    (1, 5, 0)
    """
    known = [abs(value) for value in values if math.isfinite(value)]
    if all(value == int(value) for value in known):
        return 0
    return max(0, min(6, 2 - math.floor(math.log10(max(known)))))


def place_of(probe: Probe) -> dict[str, int]:
    """Each strategy's place among the colours: 0 is uniform's, the others follow in their order."""
    names = dict.fromkeys([s.name for s in probe.strategies] + [point.strategy for point in probe.noise])
    return {"uniform": 0} | {name: place for place, name in enumerate((n for n in names if n != "uniform"), 1)}


def digits_of(key: str, values: Iterable[float]) -> int:
    """Decimals of a figure by its key, or such as the values need."""
    fixed = next((c.decimals for group in _GROUPS for c in group.columns if c.key == key), None)
    return decimals(values) if fixed is None else fixed


def _with_unknown(sources: Sequence[Mapping[str, Figure]]) -> list[Group]:
    """The groups, each with a column more for every key that it does not know, then groups that are not known."""
    known = {column.key for group in _GROUPS for column in group.columns}
    unknown = dict.fromkeys(key for source in sources for key in source if key not in known)
    names = [group.name for group in _GROUPS]
    more: dict[str, list[Column]] = {}
    for key in unknown:
        name, _, tail = key.rpartition("/")
        says = "difference from uniform’s, paired" if tail.endswith(PAIRED) else ""
        more.setdefault(name, []).append(Column(key, tail.replace("_", " "), says))
    extended = [Group(g.name, g.heading, g.says, (*g.columns, *more.get(g.name, ()))) for g in _GROUPS]
    return extended + [
        Group(name, name.capitalize() or "Other", "", columns) for name, columns in more.items() if name not in names
    ]


def _measured(group: Group, sources: Sequence[Mapping[str, Figure]]) -> Group | None:
    columns = [c for c in group.columns if any(not math.isnan(s.get(c.key, NOTHING).value) for s in sources)]
    return Group(group.name, group.heading, group.says, columns) if columns else None


def _digits(columns: Sequence[Column], strategies: Sequence[ProbedStrategy]) -> list[int]:
    """Decimals of each column; the classes of an update have the same, so that they compare."""
    values = {c.key: [s.figures.get(c.key, NOTHING).value for s in strategies] for c in columns}
    update = decimals(v for key in CLASSES for v in values.get(f"update/{key}", ()))
    classes = {f"update/{key}" for key in CLASSES}
    return [
        c.decimals if c.decimals is not None else update if c.key in classes else decimals(values[c.key])
        for c in columns
    ]


def _cells(figures: Mapping[str, Figure], columns: Sequence[Column], digits: Sequence[int]) -> list[Cell]:
    cells = []
    for column, places in zip(columns, digits, strict=True):
        value, low, high = figures.get(column.key, NOTHING)
        known = not (math.isnan(low) or math.isnan(high))
        interval = f"{written(low, places)} to {written(high, places)}" if known else ""
        cells.append(Cell(written(value, places), interval, value))
    return cells
