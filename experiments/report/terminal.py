"""The end of an ablation on the terminal: what the files of its report say, in few lines."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from .statistics import detectable_effect, smallest_sign_flip_p

__all__ = ["results_table"]

Row = Mapping[str, str]


def results_table(folder: Path) -> str:
    """Results by strategy, the difference that so many seeds can find, and where each strategy trains.

    Args:
        folder: of the ablation, with its report.
    """
    rows = _rows(folder / "summary.csv")
    heads = {"final_success": "final success", "auc": "area", "auc_minus_uniform": "area minus baseline"}
    lines = [["strategy", "seeds", *heads.values(), "p, t-test", "p, sign flips"]]
    for row in rows:
        values = [_interval(row, key) for key in heads]
        tests = [_short(row["p_adjusted"]), _short(row["p_sign_flip_adjusted"])]
        lines.append([row["strategy"], row["seeds"], *values, *tests])
    return _columns(lines) + _power(rows) + _regions(rows)


def _power(rows: Sequence[Row]) -> str:
    """One line; both p are Holm-corrected, as their heads have no room to say."""
    known = [float(row["detectable"]) for row in rows if row["detectable"]]
    pairs = max((int(row["pairs"]) for row in rows if row["pairs"]), default=0)
    if pairs < 2:
        return "" if len(rows) < 2 else "two paired seeds or more are needed for an interval and a test\n"
    text = f"{pairs} paired seeds find a true difference of {detectable_effect(pairs):.2f} standard deviations"
    if known:
        span = f"{min(known):.3f}" if len(known) == 1 else f"{min(known):.3f} to {max(known):.3f}"
        text += f", here {span} in area,"
    text += f" with 80% power; sign flips give no p under {smallest_sign_flip_p(pairs):.3g}; p are Holm-corrected"
    return f"{text}\n"


def _regions(rows: Sequence[Row]) -> str:
    """Where settings were varied: the share of runs that train, and what is reached there."""
    if not rows or "stable_area" not in rows[0]:
        return ""
    heads = ["strategy", "trains", "minus baseline", "p, t-test", "collapses", "stable settings", "success there"]
    lines = [[*heads, "tuned success", "best setting"]]
    for row in rows:
        lines.append(
            [
                row["strategy"],
                _interval(row, "stable_area"),
                _interval(row, "stable_area_minus_uniform"),
                _short(row["stable_area_p_adjusted"]),
                _short(row["collapsed_area"]),
                f"{row['stable_settings']} of {row['settings']}",
                _short(row["stable_success"]),
                _interval(row, "tuned_success"),
                row["best_setting"],
            ]
        )
    return "\n" + _columns(lines)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() + "\n" for line in lines)


def _interval(row: Row, key: str) -> str:
    value, low, high = row[key], row[f"{key}_low"], row[f"{key}_high"]
    return f"{_short(value)} [{_short(low)}, {_short(high)}]" if low and high else _short(value)


def _short(value: str) -> str:
    return f"{float(value):.3f}" if value else ""
