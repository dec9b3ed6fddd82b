"""Read what an ablation left on disk, however far it came."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ...verifiers import InputError
from ..settings import grid, setting_folder
from .outcomes import CollapseRule, collapse_rule

__all__ = ["EVALUATION", "Ablation", "Cell", "load_ablation", "load_cell"]

EVALUATION = "eval/success"
State = Literal["finished", "running", "failed", "interrupted", "missing"]
_STATES = ("finished", "running", "failed", "interrupted")


@dataclass(frozen=True)
class Cell:
    """One training run: one strategy with one seed, at one setting.

    Args:
        strategy, seed: its place in the ablation.
        folder: its run folder, which need not exist.
        state: what the run said of itself last; "running" also stands for one that was killed.
        error: what stopped it, or None.
        about: ``run.json``; empty where it was never written.
        status: ``status.json``; empty where it was never written.
        metrics: the rows of ``metrics.jsonl`` in order of step, one for each step, finite numbers only.
        setting: values of the options that the ablation varies besides; empty where it varies none.
    """

    strategy: str
    seed: int
    folder: Path
    state: State
    error: str | None
    about: Mapping[str, Any]
    status: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether it enters the statistics: it finished and was evaluated."""
        return self.state == "finished" and any(EVALUATION in row for row in self.metrics)

    def series(self, key: str, axis: str = "step") -> tuple[list[float], list[float]]:
        """Positions on ``axis`` ("step" or "tokens") and values of ``key``, where it was measured."""
        rows = [row for row in self.metrics if key in row and axis in row]
        return [row[axis] for row in rows], [row[key] for row in rows]

    def mean(self, key: str) -> float:
        """Mean of ``key`` over the rows that have it; NaN where none has."""
        _, values = self.series(key)
        return sum(values) / len(values) if values else math.nan

    def total(self, key: str) -> float:
        """Sum of ``key`` over the rows that have it; NaN where none has."""
        _, values = self.series(key)
        return sum(values) if values else math.nan

    def last(self, key: str) -> float:
        """The last measured value of ``key``; NaN where there is none."""
        _, values = self.series(key)
        return values[-1] if values else math.nan

    def config(self) -> dict[str, Any]:
        """The resolved configuration, or an empty dict where there is none to read."""
        from omegaconf import OmegaConf

        path = self.folder / "config.yaml"
        try:
            config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except Exception:  # a half-written file of a running cell breaks in many ways; the report goes on without it
            return {}
        return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


@dataclass(frozen=True)
class Ablation:
    """Strategies x seeds with everything that was recorded.

    ``cells`` holds one cell for every pair, in order. Where settings are varied too, these are the cells at
    ``reference``, and ``grid`` holds those at all settings; else both are the same. ``rollouts`` is the number of
    answers of a batch that was held while the group size was varied.
    """

    folder: Path
    command: str
    baseline: str
    strategies: Sequence[str]
    seeds: Sequence[int]
    budget_kind: Literal["steps", "tokens"]
    budget_value: int
    threshold: float
    task: str
    started: str
    version: str
    cells: Sequence[Cell]
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reference: Mapping[str, Any] = field(default_factory=dict)
    rule: CollapseRule = field(default_factory=CollapseRule)
    rollouts: int | None = None
    grid: Sequence[Cell] = ()

    @property
    def axis(self) -> str:
        """Name of the budget's axis in ``metrics.jsonl``."""
        return "tokens" if self.budget_kind == "tokens" else "step"

    def of(self, strategy: str) -> list[Cell]:
        """All cells of one strategy, in the order of the seeds."""
        return [cell for cell in self.cells if cell.strategy == strategy]

    def counted(self, strategy: str) -> list[Cell]:
        """The cells of one strategy that enter the statistics."""
        return [cell for cell in self.of(strategy) if cell.counts]


def load_ablation(folder: Path) -> Ablation:
    """Read an ablation folder.

    Raises:
        InputError: ``ablation.json`` is missing or lacks a key.
    """
    path = folder / "ablation.json"
    if not path.is_file():
        raise InputError(f"{path}: no such file; give the folder that `apportion ablate` printed as its last line")
    plan = _read_json(path)
    try:
        strategies = [str(name) for name in plan["strategies"]]
        seeds = [int(seed) for seed in plan["seeds"]]
        settings = {str(key): list(values) for key, values in (plan.get("settings") or {}).items()}
        chosen = dict(plan["reference"]) if settings else {}
        cells = [
            load_cell(folder, strategy, seed, setting)
            for strategy in strategies
            for setting in grid(settings)
            for seed in seeds
        ]
        return Ablation(
            folder=folder,
            command=str(plan.get("command", "apportion ablate")),
            baseline=str(plan["baseline"]),
            strategies=strategies,
            seeds=seeds,
            budget_kind="tokens" if plan["budget"]["kind"] == "tokens" else "steps",
            budget_value=int(plan["budget"]["value"]),
            threshold=float(plan.get("threshold", 0.8)),
            task=str(plan.get("task", "")),
            started=str(plan.get("started", "")),
            version=str(plan.get("apportion", "")),
            cells=[cell for cell in cells if cell.setting == chosen],
            settings=settings,
            reference=chosen,
            rule=collapse_rule(plan.get("collapse")),
            rollouts=plan.get("rollouts"),
            grid=cells,
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise InputError(f"{path}: cannot read the plan ({problem!r}); run `apportion ablate` on it again") from problem


def load_cell(folder: Path, strategy: str, seed: int, setting: Mapping[str, Any] | None = None) -> Cell:
    """Read ``cells/STRATEGY/seed_K``, or ``cells/STRATEGY/SETTING/seed_K``; what is absent or broken is empty."""
    place = folder / "cells" / strategy / (setting_folder(setting) if setting else "") / f"seed_{seed}"
    status = _read_json(place / "status.json")
    state: State = "missing"
    if place.is_dir():
        said = status.get("state")
        state = cast("State", said) if said in _STATES else "running"
    error = status.get("error")
    return Cell(
        strategy=strategy,
        seed=seed,
        folder=place,
        state=state,
        error=None if error is None else str(error),
        about=_read_json(place / "run.json"),
        status=status,
        metrics=_read_metrics(place / "metrics.jsonl"),
        setting=setting or {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows by step. A cut line (of a run at work or killed) is left out; of a repeated step the last row holds."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows: dict[float, dict[str, float]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and _is_number(row.get("step")):
            rows[float(row["step"])] = {key: float(value) for key, value in row.items() if _is_number(value)}
    return [rows[step] for step in sorted(rows)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
