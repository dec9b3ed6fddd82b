"""A probe of a tabular task: random policies, exact values, and noise with what is learned under it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ...verifiers import InputError
from ..progress import StepProgress
from ..tasks.tabular_tables import TabularTask
from .choices import Choice
from .files import write_figures
from .noise import affected
from .options import ProbeOptions
from .record import UNIFORM, Probe
from .tabular import draw_rollouts, probe_tabular, sweep_noise

__all__ = ["probe_task"]


def probe_task(
    task: TabularTask,
    choices: Sequence[Choice],
    options: ProbeOptions,
    folder: Path,
    command: str,
    name: str,
    seed: int,
    group_size: int,
    bar: StepProgress,
) -> Probe:
    """Probe all strategies on random policies of the task, and write the files beside the page.

    Args:
        task: a tabular task.
        choices: the strategies.
        options: keys under ``probe``.
        folder: for the files.
        command: the line to be repeated.
        name: of the task.
        seed: of everything random.
        group_size: answers in a group.
        bar: shows the progress.
    """
    if options.rollouts is not None:
        raise InputError("probe.rollouts: a tabular task samples its own answers; leave it out")
    began, size = time.perf_counter(), options.tabular
    told = bar.counting("probe", 2) or (lambda _: None)
    strategies = {choice.label: choice.parts.strategy for choice in choices}
    controls = [choice.label for choice in choices if choice.control]
    probed = probe_tabular(
        task,
        strategies,
        policies=size.policies,
        tau=options.tau,
        controls=controls,
        baseline=UNIFORM,
        groups=size.groups,
        group_size=group_size,
        seed=seed,
    )
    told(1)
    tried = [choice.label for choice in affected(choices, options.steps, options.noise)]
    base = [UNIFORM] if tried and UNIFORM in strategies and UNIFORM not in tried else []
    noise = sweep_noise(
        task,
        {label: strategies[label] for label in [*tried, *base]},
        options.noise.levels if tried else {},
        policies=size.noise_policies,
        tau=options.tau,
        runs=size.runs,
        steps=size.steps,
        lr=size.lr,
        groups=size.groups,
        group_size=group_size,
        seed=seed,
    )
    told(2)
    facts = {
        "policies": f"{size.policies}, random, of a success between .1 and .9",
        "answers": f"{size.groups} groups of {group_size} from each policy",
        "states": f"{len(task.tables.process.reward):,}",
        "seconds": f"{time.perf_counter() - began:.1f}",
    }
    found = Probe(
        command=command,
        task=name,
        seed=seed,
        facts=facts,
        strategies=probed,
        cosines=None,
        truth="dynamic programming, exact",
        noise=noise,
        rollouts=draw_rollouts(task, strategies, count=options.drawn, group_size=group_size, seed=seed),
    )
    write_figures(folder, found)
    return found
