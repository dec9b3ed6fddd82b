"""The table of a probe for the terminal: what is shown about each strategy, in one line."""

from __future__ import annotations

import math

from .record import Figure, Probe, ProbedStrategy

__all__ = ["table"]

COLUMNS = {
    "quality/pearson": "correlation",
    "quality/sign_accuracy": "signs",
    "quality/error_auc": "error AUC",
    "quality/blame_at_1": "blame@1",
    "quality/inert_mass": "inert",
    "gradient/cosine": "gradient cosine",
    "gradient/snr": "SNR",
    "cost/milliseconds": "ms",
}
WITH_INTERVAL = ("quality/pearson", "gradient/cosine")


def table(found: Probe) -> str:
    """Strategies by their correlation with the truth, then controls, then what the truth itself allows."""
    keys = [key for key in COLUMNS if any(key in one.figures for one in found.strategies)]
    lines = [["strategy", *(COLUMNS[key] for key in keys)]]
    ordered = sorted(found.strategies, key=lambda one: (one.kind == "control", -_value(one, "quality/pearson")))
    for one in ordered:
        name = f"({one.name})" if one.kind == "control" else one.name
        lines.append([name, *(_written(key, one.figures.get(key)) for key in keys)])
    if found.noise_floor:
        lines.append(["noise floor", *(_written(key, found.noise_floor.get(key)) for key in keys)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
    return "\n".join(rows) + "\n"


def _value(one: ProbedStrategy, key: str) -> float:
    value = one.figures.get(key, Figure(math.nan)).value
    return -math.inf if math.isnan(value) else value


def _written(key: str, figure: Figure | None) -> str:
    if figure is None or math.isnan(figure.value):
        return ""
    if key.startswith("cost/"):
        return f"{figure.value:,.0f}"
    text = f"{figure.value:.2f}"
    if key in WITH_INTERVAL and not math.isnan(figure.low):
        text += f" [{figure.low:.2f}, {figure.high:.2f}]"
    return text
