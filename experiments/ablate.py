"""Strategies x seeds on one task, at one setting of the options or at many: same weights, problems and random streams
for every strategy, equal compute.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from ..grpo.files import write_text
from ..verifiers import InputError
from .app import build, hydra_command, task_overrides
from .build import check_value
from .explain import explain
from .parts import Parts, build_parts, build_task, check_line_breaks
from .plan import CellPlan, Sweep, plan_cells, read_sweep
from .progress import StepProgress, console
from .report.outcomes import collapse_rule, has_collapsed
from .rundir import difference, has_results, hold_folder, plain_config, read_status, run_path
from .settings import reference
from .targets import nearest
from .train import check_prompts, device, set_threads, train

__all__ = ["ablate", "main", "run_cell"]

Launch = Callable[[list[list[str]]], Sequence[Any]]
Compose = Callable[[Sequence[str]], DictConfig]
STOP = ".stop"  # in the ablation's folder: cells that have not begun, in whatever process, do not begin


def main(arguments: list[str] | None = None) -> None:
    """``apportion ablate key=value ...``"""
    hydra_command("ablate", run_cell, sys.argv[1:] if arguments is None else arguments)


def run_cell(config: DictConfig) -> str:
    """One cell, in a process of the launcher: "finished", "interrupted", "failed" or, after a stop, "skipped".

    An error stays here: what went wrong is in the cell's ``status.json`` and ``traceback.txt``, and the others go on.
    """
    folder = run_path(config.run.dir)
    stop = _root_of(folder) / STOP
    if stop.exists():
        return "skipped"
    try:
        state = train(config, overrides=task_overrides())
    except Exception as error:
        _leave_failure(folder, config, error)
        return "failed"
    if state == "interrupted":
        stop.touch()
    return state


def ablate(config: DictConfig, arguments: Sequence[str], *, compose: Compose, launch: Launch) -> None:
    """Run every cell that is not finished yet, then build the report and say where it is.

    Args:
        config: composed from ``conf/ablate.yaml``; ``run.dir`` is the folder of the whole ablation.
        arguments: overrides of the command line, sweeps included.
        compose: a configuration from overrides.
        launch: runs one job for each list of overrides, wherever the launcher runs them.

    Raises:
        InputError: before anything is run or written.
        SystemExit: 1 where cells failed, 130 after a request to stop.
    """
    root = run_path(config.run.dir).resolve()
    _check_options(config.ablate)
    sweep = read_sweep(config, arguments)
    plans = plan_cells(root, sweep)
    check_line_breaks([*sweep.shared, *(override for own in sweep.strategies.values() for override in own)])
    budget = _budget(config)
    firsts = plans[:: len(sweep.seeds)]  # of each strategy at each setting
    configs = [_composed(plan, compose) for plan in firsts]
    for plan, cell in zip(firsts, configs):
        _check_compute(plan.strategy, cell, config)
    parts = [_parts(plan, cell) for plan, cell in zip(firsts, configs)]
    starts = _starts(configs)
    tasks = {index: build_task(configs[index]) for index in starts}
    if (root / "config.yaml").exists():
        raise InputError(f"run.dir={root}: holds a run, not an ablation; choose another run.dir")
    with hold_folder(root):
        retry = bool(config.ablate.retry_failed)
        pending = [plan for plan in plans if _is_pending(plan, compose, retry)]
        _write_plan(root, config, sweep, budget)
        if pending:
            for index, task in tasks.items():
                _warm_start_once(configs[index], parts[index], task)
            stopped = _launch(root, plans, pending, launch)
            if stopped:
                _say_stopped(root, plans)
                raise SystemExit(130)
        _report(root, plans)


def _root_of(folder: Path) -> Path:
    """The ablation's folder, of that of a cell."""
    return next((parent for parent in folder.parents if (parent / "ablation.json").exists()), folder)


def _starts(configs: Sequence[DictConfig]) -> list[int]:
    """The first of each kind that needs a warm start of its own: as a rule all need the same."""
    kinds: dict[str, int] = {}
    for index, config in enumerate(configs):
        kinds.setdefault(repr([config.get(key) for key in ("policy", "warm_start", "task")]), index)
    return list(kinds.values())


def _check_options(options: DictConfig) -> None:
    kinds = {"budget": Literal["steps", "tokens"], "threshold": float, "retry_failed": bool, "baseline": str}
    known = [*kinds, "strategies", "seeds", "settings", "collapse"]
    for name in map(str, options):
        if name not in known:
            raise InputError(f"ablate.{name}: nothing reads this key; {nearest(name, known)}")
    for name, kind in kinds.items():
        check_value(options[name], kind, f"ablate.{name}")
    if not isinstance(options.collapse, DictConfig):
        raise InputError(
            f"ablate.collapse={options.collapse}: holds the keys of the rule; give ablate.collapse.KEY=..."
        )
    rule: Any = OmegaConf.to_container(options.collapse, resolve=True)
    collapse_rule(rule)


def _composed(plan: CellPlan, compose: Compose) -> DictConfig:
    try:
        return compose(plan.overrides)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        raise InputError(f"ablate.strategies.{plan.strategy}: {message}") from error


def _parts(plan: CellPlan, config: DictConfig) -> Parts:
    label = plan.strategy
    try:
        return build_parts(config)
    except InputError as error:
        without = f"; or leave it out: ablate.strategies.{label}=null" if str(error).startswith("credit needs") else ""
        at = "".join(f" at {key}={value}" for key, value in plan.setting.items())
        raise InputError(f"ablate.strategies.{label}{at}: {error}{without}") from error


def _budget(config: DictConfig) -> dict[str, Any]:
    """The compute of every cell."""
    kind, tokens = config.ablate.budget, config.run.budget_tokens
    if kind == "tokens" and tokens is None:
        raise InputError("ablate.budget=tokens: give run.budget_tokens, and run.steps large enough to reach it")
    if kind == "steps" and tokens is not None:
        raise InputError(f"run.budget_tokens={tokens}: cells would end at different steps; set ablate.budget=tokens")
    return {"kind": kind, "value": config.run.steps if kind == "steps" else tokens}


def _check_compute(label: str, cell: DictConfig, config: DictConfig) -> None:
    """Refuse a strategy that would get more or less than the others."""
    for key in ("steps", "budget_tokens"):
        if cell.run[key] != config.run[key]:
            raise InputError(
                f"ablate.strategies.{label}: sets run.{key}={cell.run[key]}, and the others have {config.run[key]}; "
                "strategies are compared under equal compute, so set it for all"
            )


def _is_pending(plan: CellPlan, compose: Compose, retry_failed: bool) -> bool:
    """Whether a cell is still to be run; refuses to go on from one that was run with other options."""
    state = read_status(plan.folder).get("state")
    if state == "failed":
        if retry_failed:
            shutil.rmtree(plan.folder)
        return retry_failed
    if state == "finished" or has_results(plan.folder):
        key = difference(plan.folder, plain_config(_composed(plan, compose)))
        if key is not None:
            raise InputError(f"{plan.folder}: was run with other options ({key}); choose another run.dir")
    return state != "finished"


def _write_plan(root: Path, config: DictConfig, sweep: Sweep, budget: dict[str, Any]) -> None:
    from apportion import __version__

    plan = {
        "command": shlex.join(["apportion", "ablate", *sys.argv[1:]]),
        "baseline": sweep.baseline,
        "strategies": list(sweep.strategies),
        "seeds": list(sweep.seeds),
        "budget": budget,
        "threshold": float(config.ablate.threshold),
        "collapse": OmegaConf.to_container(config.ablate.collapse, resolve=True),
        "task": str(config.hydra.runtime.choices.get("task", config.task._target_)),
        "started": datetime.now().isoformat(timespec="seconds"),
        "apportion": __version__,
    }
    if sweep.settings:
        chosen = reference(sweep.settings, config)
        plan |= {"settings": dict(sweep.settings), "reference": chosen, "rollouts": sweep.rollouts}
    write_text(root / "ablation.json", json.dumps(plan, indent=2, ensure_ascii=False) + "\n")


def _warm_start_once(config: DictConfig, parts: Parts, task: Any) -> None:
    """Fill the warm-start cache before the cells start, so that they do not wait for one another."""
    from .warmstart import is_cached, warm_start

    source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
    if is_cached(source.key, task, start):
        return
    set_threads(config)
    policy = source.build(device(config.device))
    check_prompts(policy, task, parts)
    with StepProgress(True) as bar:
        warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))


def _launch(root: Path, plans: Sequence[CellPlan], pending: Sequence[CellPlan], launch: Launch) -> bool:
    """Run the pending cells; whether somebody asked to stop. Running cells are saved or end, others do not begin."""
    from ..grpo.interrupt import StopRequest

    asked, stop = StopRequest(), root / STOP
    stop.unlink(missing_ok=True)

    def pass_on() -> None:
        if asked():
            stop.touch()

    try:
        with asked.listening(), StepProgress(True) as bar, bar.cells(plans, tick=pass_on):
            launch([plan.overrides for plan in pending])
    except Exception:
        if not asked():  # a worker that was stopped while it waited for work looks like a broken pool
            raise
    except KeyboardInterrupt:
        stop.touch()
    stopped = stop.exists() or asked()
    stop.unlink(missing_ok=True)
    return stopped


def _leave_failure(folder: Path, config: DictConfig, error: Exception) -> None:
    """Write down what ended a cell, unless another process holds its folder and has its own story."""
    with contextlib.suppress(InputError), hold_folder(folder):
        if read_status(folder).get("state") == "finished":
            return
        (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        blank = {"step": 0, "steps": config.run.steps, "tokens": 0, "seconds": 0.0}
        text = explain(error) or f"{type(error).__name__}: {error}"
        told = {"state": "failed", "error": " ".join(text.split()), "error_type": type(error).__name__}
        status = {**blank, **read_status(folder), **told}
        write_text(folder / "status.json", json.dumps(status, indent=2) + "\n")


def _say_stopped(root: Path, plans: Sequence[CellPlan]) -> None:
    over = sum(read_status(plan.folder).get("state") in ("finished", "failed") for plan in plans)
    text = f"stopped with {over} of {len(plans)} cells done; the same command with run.dir={root} goes on from here"
    console().print(text, markup=False)
    sys.stdout.write(f"{root}\n")


def _report(root: Path, plans: Sequence[CellPlan]) -> None:
    """Build the report and say what is in it; status 1 where a cell failed, unless what failed is what was measured."""
    from .report.build import build_report
    from .report.terminal import results_table

    path = build_report(root)
    failed = [(plan, status) for plan in plans if (status := read_status(plan.folder)).get("state") == "failed"]
    broken = [(plan, status) for plan, status in failed if not (plan.setting and has_collapsed(status))]
    for plan, status in broken:
        at = "".join(f" {key}={value}" for key, value in plan.setting.items())
        text = f"failed: {plan.strategy}{at} seed {plan.seed}: {status.get('error')} ({plan.folder})"
        console().print(text, markup=False)
    if broken:
        text = f"{len(broken)} of {len(plans)} cells failed; ablate.retry_failed=true run.dir={root} runs them again"
        console().print(text, markup=False)
    sys.stdout.write(results_table(root))
    sys.stdout.write(f"report: {path}\n{root}\n")
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    from .ablate import main as _main  # so that the functions belong to the module, not to __main__

    _main()
