"""``apportion probe``: from the configuration to the files, the page and the table in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig

from ...grpo.files import write_text
from ...verifiers import InputError
from ..app import build
from ..parts import check_line_breaks, prepare
from ..progress import StepProgress, console
from ..rundir import has_results, hold_folder, plain_config, run_path
from ..train import check_prompts, device, set_threads
from .choices import Choice, Common, choose
from .options import ProbeOptions

if TYPE_CHECKING:
    from .record import Probe

__all__ = ["RESULT", "probe", "refuse_jobs"]

Compose = Callable[[Sequence[str]], DictConfig]
RESULT = "probe.json"


def refuse_jobs(config: DictConfig) -> None:
    """The probe is one process without jobs; a launcher that calls this was asked for by mistake."""
    raise InputError(f"run.dir={config.run.dir}: a probe starts no jobs; leave out hydra/launcher")


def probe(config: DictConfig, arguments: Sequence[str], compose: Compose) -> None:
    """Probe what the command line names, and say where the results are.

    Args:
        config: composed from ``conf/probe.yaml``.
        arguments: overrides of the command line.
        compose: a configuration from overrides.

    Raises:
        InputError: before anything costs time, where the options do not fit.
    """
    check_line_breaks(arguments)
    options = ProbeOptions.of(config.probe)
    task = build(config.get("task"), "task")
    choices, common = choose(config, arguments, compose, _signals(task))
    options.check_names(choices)
    folder = run_path(config.run.dir).resolve()
    plain = plain_config(config)
    with hold_folder(folder):
        if (folder / RESULT).exists() or (folder / "ablation.json").exists() or has_results(folder):
            raise InputError(f"run.dir={folder}: holds a finished run; choose another run.dir")
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        command = shlex.join(["apportion", "probe", *arguments])
        with StepProgress(visible=True) as bar:
            found = _probe(config, choices, common, task, options, folder, command, bar)
        _show(found, folder)


def _probe(
    config: DictConfig,
    choices: Sequence[Choice],
    common: Common,
    task: Any,
    options: ProbeOptions,
    folder: Path,
    command: str,
    bar: StepProgress,
) -> Probe:
    if hasattr(task, "tables"):
        from .tabular_command import probe_task

        set_threads(common.config)
        run, group_size = common.parts.run, common.parts.rollout.group_size
        return probe_task(task, choices, options, folder, command, _task_name(config), run.seed, group_size, bar)
    from ...grpo.engines.native import Native
    from .language import probe_language

    if not isinstance(common.parts.engine, Native):
        raise InputError("engine: a probe samples with engine=native")
    truth = build(config.get("truth"), "truth")
    options.check_verifiers(common.parts.verifiers, truth)
    policy = _policy(common, task, bar)
    return probe_language(policy, task, truth, choices, common, options, folder, command, _task_name(config), bar)


def _signals(task: Any) -> set[str]:
    """What the probe can tell strategies besides what verifiers and providers of a run tell."""
    if not hasattr(task, "tables"):
        return {"token_scores:truth"}
    from ..tasks.tabular_sampling import SIGNALS

    return set(SIGNALS)


def _policy(common: Common, task: Any, bar: StepProgress) -> Any:
    from ..warmstart import warm_start

    config, parts = common.config, common.parts
    set_threads(config)
    prepare(parts.verifiers)
    source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
    policy = source.build(device(config.device))
    check_prompts(policy, task, parts)
    warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))
    return policy


def _task_name(config: DictConfig) -> str:
    return str(config.hydra.runtime.choices.get("task", config.task._target_))


def _show(found: Probe, folder: Path) -> None:
    from ..probe_report import build_probe_report
    from .files import write_record
    from .view import table

    path = build_probe_report(found, folder / "probe.html")
    write_record(folder, found)
    sys.stdout.write(table(found))
    for caution in found.cautions:
        console().print(caution, markup=False, style="yellow")
    sys.stdout.write(f"report: {path}\n{folder}\n")
