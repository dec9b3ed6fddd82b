"""Label the steps of solutions, from a file or by the policy itself, as data to train reward models on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml
from omegaconf import DictConfig

from ..grpo.files import write_text
from ..prm.labels import Ask, Labeler, Solution, label_row, side
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.panel import judge
from .app import build, check_keys, file_override, hydra_command, task_overrides
from .build import check_value
from .label_input import Cut, Work, cut_of, work_of
from .label_view import draw_labels
from .parts import check_line_breaks
from .progress import StepProgress, console
from .rundir import difference, hold_folder, plain_config, run_path
from .train import device, set_threads

if TYPE_CHECKING:  # it loads torch, which labels from a file may do without
    from .completing import Completer

__all__ = ["Journal", "Told", "label_into", "label_steps", "main"]

KEYS = {
    *("file", "completion", "prompt", "reference", "problem_id", "split", "num_problems", "segmenter", "labeler"),
    *("task", "policy", "warm_start", "rollout", "verifiers", "retention_verifier", "seed", "device", "threads"),
    *("run", "command", "optim"),  # a policy brings a learning rate
}


def main(arguments: list[str] | None = None) -> None:
    """``apportion label-steps [FILE] key=value ...``"""
    given = sys.argv[1:] if arguments is None else arguments
    hydra_command("label-steps", run_command, [*map(file_override, given[:1]), *given[1:]])


def run_command(config: DictConfig) -> None:
    """The command around :func:`label_into`."""
    folder = run_path(config.run.dir).resolve()
    check_line_breaks(task_overrides())
    check_keys(config, KEYS)
    try:
        with StepProgress(visible=True) as bar:
            told = label_into(config, folder, bar)
    except KeyboardInterrupt:
        console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
        sys.stdout.write(f"{folder}\n")
        raise
    draw_labels(told.labeler, told.problems, told.journal.counts, told.journal.seconds)
    for note in told.notes:
        console().print(note, markup=False, style="yellow")
    sys.stdout.write(f"{folder}\n")


class Told(NamedTuple):
    """What labelling gave: the labeler, the number of problems, the journal, and a line on each fault of a verifier."""

    labeler: Labeler
    problems: int
    journal: Journal
    notes: list[str]


def label_into(config: DictConfig, folder: Path, bar: StepProgress) -> Told:
    """Label into ``folder/steps.jsonl`` what it does not hold yet.

    Args:
        config: composed from ``conf/label_steps.yaml``, or with its keys.
        folder: made where it is missing.
        bar: shows the progress.

    Raises:
        InputError: bad options, or a folder that holds something else.
    """
    _check_options(config)
    ask = _Asking(config.run.max_error_share, config.run.verifier_timeout_s)
    cut, labeler = cut_of(config, ask), build(config.get("labeler"), "labeler")
    work, plain = work_of(config), plain_config(config)
    with hold_folder(folder):
        _refuse_other(folder, plain)
        journal = Journal.read(folder)
        journal.write()
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        label_steps(
            work,
            journal,
            labeler,
            cut,
            ask,
            lambda: _completer(config, bar),
            batch=config.run.batch,
            seed=config.seed,
            progress=bar.counting("problems", len(work)),
        )
    return Told(labeler, len(work), journal, list(ask.notes.values()))


@dataclass
class Journal:
    """``steps.jsonl``, and beside it in ``progress.json`` how far it is whole.

    Args:
        folder: of the two.
        done: problems that are labelled.
        size: bytes of ``steps.jsonl`` that belong to them; what stands behind was cut by a crash.
        seconds: spent on them.
        counts: summed over them.
    """

    folder: Path
    done: int = 0
    size: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """That of a folder, or a new one."""
        path = folder / "progress.json"
        if not path.exists():
            return cls(folder)
        told = json.loads(path.read_text(encoding="utf-8"))
        steps = folder / "steps.jsonl"
        if (steps.stat().st_size if steps.exists() else 0) < told["size"]:
            raise InputError(f"{steps}: is shorter than it was left; choose another run.dir")
        return cls(folder, told["done"], told["size"], told["seconds"], Counter(told["counts"]))

    def append(self, rows: Sequence[Mapping[str, Any]], done: int, seconds: float, counts: Counter[str]) -> None:
        """Add the rows of the problems up to ``done``."""
        with (self.folder / "steps.jsonl").open("r+b") as out:
            out.seek(self.size)
            out.truncate()
            out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            out.flush()
            os.fsync(out.fileno())
            self.size = out.tell()
        self.done, self.seconds, self.counts = done, self.seconds + seconds, self.counts + counts
        self.write()

    def write(self) -> None:
        """Save all but the rows."""
        (self.folder / "steps.jsonl").touch()
        told = {"done": self.done, "size": self.size, "seconds": self.seconds, "counts": dict(self.counts)}
        write_text(self.folder / "progress.json", json.dumps(told, indent=2))


def label_steps(
    work: Sequence[Work],
    journal: Journal,
    labeler: Labeler,
    cut: Cut,
    ask: Ask,
    completer: Callable[[], Completer],
    *,
    batch: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Label what the journal does not hold yet. All solutions of a problem are labelled together.

    Args:
        work: problems, each once.
        journal: gets the rows.
        labeler, cut: make labels, and steps.
        ask: see :mod:`apportion.prm.labels`.
        completer: makes the policy's side ready; called only where something is to be sampled.
        batch: problems at a time.
        seed: stands in the rows.
        progress: told the number of problems done.
    """
    left = work[journal.done :]
    needed = labeler.continues or any(one.solutions is None for one in left)
    sampler = completer() if left and needed else None
    if sampler and labeler.continues:
        sampler.check([sample for one in left for sample, _ in one.solutions or ()])
    for start in range(journal.done, len(work), batch):
        began, tokens, part = time.perf_counter(), sampler.tokens if sampler else 0, work[start : start + batch]
        samples = _samples(part, sampler)
        steps = cut([sample for _, sample, _ in samples])
        found = [(Solution(name, sample, places), extra) for (name, sample, extra), places in zip(samples, steps)]
        solutions = [(solution, extra) for solution, extra in found if solution.steps]
        said = labeler([solution for solution, _ in solutions], ask, sampler or _no_policy)
        counts = said.counts + Counter(without_steps=len(found) - len(solutions))
        rows = []
        for (solution, extra), told in zip(solutions, said.solutions, strict=True):
            counts.update(["solutions", *map(side, told.labels)])
            if any(label is not None for label in told.labels):
                rows.append(label_row(solution, told, **extra, label_source=labeler.source, seed=seed))
        counts += Counter(without_labels=len(solutions) - len(rows), tokens=(sampler.tokens if sampler else 0) - tokens)
        journal.append(rows, start + len(part), time.perf_counter() - began, counts)
        if progress is not None:
            progress(journal.done)


def _samples(part: Sequence[Work], sampler: Completer | None) -> list[tuple[str, Sample, Mapping[str, Any]]]:
    """Problem, solution and columns of its row, in order; what is not given is sampled."""
    unsolved = [one.problem for one in part if one.solutions is None]
    solved = iter(sampler.solve(unsolved) if sampler and unsolved else [])
    return [
        (one.problem.id, sample, extra)
        for one in part
        for sample, extra in (
            one.solutions
            if one.solutions is not None
            else [(sample, {"sample": index}) for index, sample in enumerate(next(solved))]
        )
    ]


def _no_policy(*_: Any) -> Sequence[Sequence[Sample]]:
    raise RuntimeError("a labeler that says it continues nothing asked for continuations")


@dataclass
class _Asking:
    """Asks a verifier; its faults are abstentions, of which too many stop the run.

    Args:
        max_error_share, timeout_s: of one call.
        notes: a line on the first fault of each verifier.
    """

    max_error_share: float
    timeout_s: float | None
    notes: dict[str, str] = field(default_factory=dict)

    def __call__(self, verifier: Any, samples: Sequence[Sample]) -> list[Verdict]:
        name = getattr(verifier, "__name__", type(verifier).__name__)
        told = judge({name: verifier}, samples, timeout_s=self.timeout_s)
        if name in told.first_error:
            self.notes.setdefault(name, told.first_error[name])
        if told.errors[name] > self.max_error_share * len(samples):
            raise InputError(
                f"{name} failed on {told.errors[name]} of {len(samples)} completions; mend it, or raise "
                f"run.max_error_share={self.max_error_share}; first: {told.first_error[name]}"
            )
        return [verdicts[name] for verdicts in told.verdicts]


def _completer(config: DictConfig, bar: StepProgress) -> Completer:
    """The policy, warm-started, ready to sample."""
    from .completing import Completer
    from .warmstart import warm_start

    set_threads(config)
    rollout, task = build(config.get("rollout"), "rollout"), build(config.get("task"), "task")
    source, start = build(config.get("policy"), "policy"), build(config.get("warm_start"), "warm_start")
    policy = source.build(device(config.device))
    warm_start(policy, source.key, task, start, progress=bar.section("warm start", start.steps))
    return Completer(policy, rollout, config.seed, config.run.rows)


def _check_options(config: DictConfig) -> None:
    """Refuse values of the wrong kind."""
    for key, hint in (("prompt", str), ("completion", str), ("problem_id", str), ("reference", str | None)):
        check_value(config[key], hint, key)
    check_value(config.seed, int, "seed")
    check_value(config.threads, int | None, "threads")
    check_value(config.split, Literal["train", "held_out"], "split")
    check_value(config.run.max_error_share, float, "run.max_error_share")
    check_value(config.run.verifier_timeout_s, float | None, "run.verifier_timeout_s")
    counts = {"num_problems": config.num_problems, **{f"run.{key}": config.run[key] for key in ("batch", "rows")}}
    if config.run.limit is not None:
        counts["run.limit"] = config.run.limit
    for key, value in counts.items():
        check_value(value, int, key)
        if value < 1:
            raise InputError(f"{key}={value}: must be at least 1")


def _refuse_other(folder: Path, plain: dict[str, Any]) -> None:
    """Only the same labels of the same solutions go on in a folder."""
    if not (folder / "progress.json").exists():
        steps = folder / "steps.jsonl"
        # An empty file alone is what a stop at the very beginning leaves.
        if (folder / "config.yaml").exists() or (steps.exists() and steps.stat().st_size):
            raise InputError(f"run.dir={folder}: holds something else; choose another run.dir")
        return
    if (folder / "config.yaml").exists() and (key := difference(folder, plain)) is not None:
        raise InputError(f"run.dir={folder}: holds labels made with other options ({key}); choose another run.dir")


if __name__ == "__main__":
    from .label_steps import main as _main  # so that the functions belong to the module, not to __main__

    _main()
