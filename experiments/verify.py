"""Run verifiers over completions in a file: a table, the faults underlined, and every verdict as JSONL."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from ..grpo.files import write_text
from ..verifiers import InputError, Sample
from ..verifiers.panel import judge
from .app import build, check_keys, file_override, hydra_command
from .build import check_value
from .parts import prepare
from .progress import StepProgress, console
from .rundir import difference, hold_folder, plain_config, run_path
from .tables import read_rows
from .verdict_file import read_samples, read_verdicts, verdict_rows
from .verdict_view import draw_faults, draw_table

__all__ = ["main", "own_target", "verify"]

KEYS = ("file", "completions", "prompt", "completion", "reference", "verifier", "verifiers", "run", "command")


def main(arguments: list[str] | None = None) -> None:
    """``apportion verify FILE.jsonl verifier=...``"""
    given = sys.argv[1:] if arguments is None else arguments
    hydra_command("verify", run_command, own_target([*map(file_override, given[:1]), *given[1:]]))


def own_target(arguments: list[str]) -> list[str]:
    """``+verifier._target_=...`` stands for a verifier of one's own, in place of the default one."""
    own = any(argument.startswith("+verifier._target_=") for argument in arguments)
    chosen = any(argument.startswith(("~verifier", "verifier=")) for argument in arguments)
    return [*arguments, "~verifier"] if own and not chosen else arguments


def run_command(config: DictConfig) -> None:
    """The command around :func:`verify`."""
    folder = run_path(config.run.dir).resolve()
    check_keys(config, KEYS)
    verifiers = _verifiers(config)
    prepare(verifiers, "")
    samples = list(_samples(config))
    if not samples:
        raise InputError(f"file={config.file}: no row to verify; give one JSON object a line")
    plain = plain_config(config)
    with hold_folder(folder):
        _refuse_other(folder, plain)
        write_text(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        try:
            with StepProgress(visible=True) as bar:
                seconds, notes = verify(
                    verifiers,
                    samples,
                    folder / "verdicts.jsonl",
                    batch=config.run.batch,
                    timeout_s=config.run.verifier_timeout_s,
                    progress=bar.counting("verify", len(samples)),
                )
        except KeyboardInterrupt:
            console().print(f"stopped; the same command with run.dir={folder} goes on from here", markup=False)
            sys.stdout.write(f"{folder}\n")
            raise
        judged = read_verdicts(folder / "verdicts.jsonl")
    draw_table(judged, list(verifiers), seconds)
    draw_faults(judged, limit=config.run.show, threshold=config.run.threshold)
    for name in verifiers:
        if all(row.verdicts[name].score is None and name not in row.faulted for row in judged):
            notes.append(
                f"{name} abstained from every completion: does the file hold what it reads (reference=COLUMN)?"
            )
    for note in notes:
        console().print(note, markup=False, style="yellow")
    sys.stdout.write(f"{folder}\n")


def verify(
    verifiers: Mapping[str, Callable[..., Any]],
    samples: Sequence[tuple[int, Sample]],
    path: Path,
    *,
    batch: int = 256,
    timeout_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], list[str]]:
    """Append the verdicts of all samples that ``path`` does not hold yet.

    Args:
        verifiers: by name.
        samples: with their row numbers.
        path: JSONL, a line per sample; written a batch at a time, so that nothing judged is lost.
        batch: samples in one call.
        timeout_s: of one call, see :func:`apportion.verifiers.panel.judge`.
        progress: told the number of samples done.

    Returns:
        Seconds by verifier, and a line on the first fault of each.
    """
    done = len(read_verdicts(path))
    seconds, notes = dict.fromkeys(verifiers, 0.0), dict[str, str]()
    with path.open("a", encoding="utf-8") as out:
        for start in range(done, len(samples), batch):
            part, told = samples[start : start + batch], {}
            for name, verifier in verifiers.items():
                began = time.perf_counter()
                told[name] = judge({name: verifier}, [sample for _, sample in part], timeout_s=timeout_s)
                seconds[name] += time.perf_counter() - began
                if name in told[name].first_error:
                    notes.setdefault(name, told[name].first_error[name])
            out.writelines(json.dumps(row, ensure_ascii=True) + "\n" for row in verdict_rows(part, told))
            out.flush()
            if progress is not None:
                progress(start + len(part))
    return seconds, list(notes.values())


def _samples(config: DictConfig) -> Iterator[tuple[int, Sample]]:
    columns = {role: config[role] for role in ("prompt", "completion", "reference")}
    for role, column in columns.items():
        check_value(column, str | None if role == "reference" else str, role)
    if config.file is not None:
        path = str(Path(config.file).expanduser()) if "://" not in str(config.file) else config.file
        yield from islice(read_samples(read_rows(path, "file"), path, **columns), config.run.limit)
    elif config.completions is not None:
        given = plain_config(config)["completions"]
        rows = [row if isinstance(row, dict) else {config.completion: row} for row in given]
        yield from read_samples(iter(enumerate(rows, start=1)), "completions", **columns)
    else:
        raise InputError("file: give the file to verify: apportion verify FILE.jsonl verifier=...")


def _verifiers(config: DictConfig) -> dict[str, Any]:
    """``verifier`` under its option's name, and all of ``verifiers``."""
    found = {}
    if config.get("verifier") is not None:
        name = str(_choices().get("verifier") or "verifier")
        found[name] = build(config.verifier, "verifier", function=True)
    for name, node in (config.verifiers or {}).items():
        if node is not None:
            found[str(name)] = build(node, f"verifiers.{name}", function=True)
    if not found:
        raise InputError(
            "verifier: give one: verifier=arithmetic, or '~verifier' +verifier._target_=my_file.my_verifier"
        )
    return found


def _choices() -> dict[str, Any]:
    """Which option of each group is in use."""
    from hydra.core.hydra_config import HydraConfig

    return dict(HydraConfig.get().runtime.choices)


def _refuse_other(folder: Path, plain: dict[str, Any]) -> None:
    """Only the same question over the same file goes on in a folder."""
    if not (folder / "config.yaml").exists():
        return
    if not (folder / "verdicts.jsonl").exists():
        raise InputError(f"run.dir={folder}: holds something else; choose another run.dir")
    if (key := difference(folder, plain)) is not None:
        raise InputError(f"run.dir={folder}: holds verdicts made with other options ({key}); choose another run.dir")


if __name__ == "__main__":
    from .verify import main as _main  # so that the functions belong to the module, not to __main__

    _main()
