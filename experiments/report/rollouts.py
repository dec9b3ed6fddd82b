"""Which sampled answers the report shows, the same ones under every strategy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from .heat import Fault, Rollout, token_heat, visible
from .load import Ablation

__all__ = ["Exhibit", "Exhibition", "Heat", "choose", "exhibit", "read_rollouts"]

STEP = 1  # sampled by the starting weights, so all strategies with one seed have the same answers there
_COLUMNS = (
    *("problem_id", "prompt", "completion", "reference", "group_id", "sample", "truncated", "reward"),
    *("completion_ids", "token_start", "token_stop", "completion_mask", "advantages", "verdicts"),
)


@dataclass(frozen=True)
class Heat:
    """One strategy's row: the drawn tokens, or a note why there are none."""

    strategy: str
    html: Markup
    note: str = ""


@dataclass(frozen=True)
class Exhibit:
    """One answer with its prompt, what is known of it, and a row for each strategy."""

    rollout: Rollout
    prompt: str
    caption: str
    heats: Sequence[Heat]


@dataclass(frozen=True)
class Exhibition:
    """The chosen answers of one seed. ``scales`` holds the advantage of full colour for each strategy."""

    seed: int
    scales: Mapping[str, float]
    exhibits: Sequence[Exhibit]


def exhibit(ablation: Ablation, *, count: int = 5) -> Exhibition | None:
    """The same ``count`` answers for every strategy, of the first seed that has any; None where no run kept them."""
    for seed in ablation.seeds:
        cells = {cell.strategy: cell for cell in ablation.cells if cell.seed == seed}
        batches = {
            name: rows
            for name in ablation.strategies
            if (rows := read_rollouts(cells[name].folder / "rollouts" / f"step_{STEP:05d}.parquet"))
        }
        if batches:
            states = {name: cell.state for name, cell in cells.items()}
            return _exhibition(ablation, seed, batches, states, count)
    return None


def read_rollouts(path: Path) -> list[Rollout]:
    """The rows of a rollout file; none where it is missing or half-written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, columns=list(_COLUMNS)).to_pylist()
        return [_rollout(row) for row in rows]
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return []


def choose(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """A varied choice: wrong answers with a located error, early and late, with and without a right sibling; a right
    answer; a wrong one without a located error. One for each problem as far as there are problems enough."""
    best = max((r.reward for r in rollouts if r.reward is not None), default=math.inf)
    solved = {r.group_id for r in rollouts if r.reward == best}

    def wrong(rollout: Rollout) -> bool:
        return rollout.reward is not None and rollout.reward < best

    def early(rollout: Rollout) -> bool:
        return rollout.fault is not None and rollout.fault.start * 2 < len(rollout.completion)

    wishes: list[Callable[[Rollout], bool]] = [
        lambda r: wrong(r) and r.fault is not None and early(r) and r.group_id in solved,
        lambda r: wrong(r) and r.fault is not None and not early(r) and r.group_id in solved,
        lambda r: r.reward == best and r.fault is None,
        lambda r: wrong(r) and r.fault is not None and r.group_id not in solved,
        lambda r: wrong(r) and r.fault is None,
        lambda r: wrong(r) and r.fault is not None,
        lambda r: wrong(r),
    ]
    chosen: list[Rollout] = []
    for wish in wishes:  # a new problem for each wish
        seen = {c.problem_id for c in chosen}
        chosen += [r for r in rollouts if wish(r) and r.problem_id not in seen][: min(1, count - len(chosen))]
    for same_problem in (False, True):  # then whatever there is, errors first
        for rollout in sorted(rollouts, key=lambda r: r.fault is None):
            seen = {c.problem_id for c in chosen}
            if len(chosen) < count and rollout not in chosen and (same_problem or rollout.problem_id not in seen):
                chosen.append(rollout)
    return chosen


def _exhibition(
    ablation: Ablation,
    seed: int,
    batches: Mapping[str, Sequence[Rollout]],
    states: Mapping[str, str],
    count: int,
) -> Exhibition:
    source = ablation.baseline if ablation.baseline in batches else next(iter(batches))
    chosen = choose(batches[source], count)
    found = {name: {row.place: row for row in rows} for name, rows in batches.items()}
    scales = {
        name: max((abs(a) for c in chosen if (r := rows.get(c.place)) for a in r.advantages), default=0.0)
        for name, rows in found.items()
    }
    exhibits = []
    for shown in chosen:
        group = [r for r in batches[source] if r.group_id == shown.group_id]
        heats = []
        for name in ablation.strategies:
            row = found.get(name, {}).get(shown.place)
            if row is None:
                heats.append(Heat(name, Markup(""), f"no record: this run is {states[name]}"))
            else:
                other = (row.prompt, row.completion) != (shown.prompt, shown.completion)
                note = "this run sampled another answer here" if other else ""
                heats.append(Heat(name, token_heat(row, scales[name]), note))
        prompt = "\n".join(visible(line) for line in shown.prompt.split("\n"))
        exhibits.append(Exhibit(shown, prompt, _caption(shown, group), heats))
    return Exhibition(seed, scales, exhibits)


def _caption(shown: Rollout, group: Sequence[Rollout]) -> str:
    rewards = [r.reward for r in group if r.reward is not None]
    parts = [f"reward {shown.reward:g}" if shown.reward is not None else "no reward: the verifiers abstained"]
    if len(rewards) > 1:
        equal = min(rewards) == max(rewards)
        parts.append(
            f"all {len(group)} answers of its group have this reward"
            if equal
            else f"mean of its group of {len(group)}: {sum(rewards) / len(rewards):.2f}"
        )
    if shown.truncated:
        parts.append("cut off at the length limit")
    if shown.fault:
        parts.append(f"first error: {visible(shown.fault.label) or 'judged wrong'}")
    elif shown.reward is not None and shown.reward < max(rewards, default=0.0):
        parts.append("no step judged wrong")
    return "; ".join(parts)


def _rollout(row: Mapping[str, Any]) -> Rollout:
    return Rollout(
        problem_id=str(row["problem_id"]),
        prompt=row["prompt"] or "",
        completion=row["completion"] or "",
        reference=None if row["reference"] is None else str(row["reference"]),
        group_id=int(row["group_id"]),
        sample=int(row["sample"]),
        truncated=bool(row["truncated"]),
        reward=None if row["reward"] is None or math.isnan(row["reward"]) else float(row["reward"]),
        ids=row["completion_ids"],
        offsets=list(zip(row["token_start"], row["token_stop"], strict=True)),
        trained=row["completion_mask"],
        advantages=[0.0 if a is None or math.isnan(a) else float(a) for a in row["advantages"]],
        fault=_first_fault(row["verdicts"]),
    )


def _first_fault(verdicts: str | None) -> Fault | None:
    """The earliest span that the task's own truth judged wrong; where there is no truth, the step verifier."""
    try:
        said = json.loads(verdicts or "{}")
    except ValueError:
        return None
    judge = said.get("truth") or said.get("steps") or {}
    wrong = [Fault(s[0], s[1], str(s[3] or "")) for s in judge.get("spans") or () if s[2] is not None and s[2] < 0.5]
    return min(wrong, default=None)
