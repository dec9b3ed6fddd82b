"""Writes docs/strategies.md from the YAML files of conf/credit: ``python -m apportion.experiments.catalogue``."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .app import CONFIG_FOLDER, build

__all__ = ["Entry", "entries", "page"]

_HEADER = re.compile(r"^# (?:(?P<key>cost|objective): )?(?P<text>.*)$")
_INTRODUCTION = """# Credit strategies

Made by `python -m apportion.experiments.catalogue` from `conf/credit`; a test holds the page to the files. Every
file opens with the command that runs it, and every option of a strategy is a key of `credit`.

- **needs**: the evidence that must be there; a run stops before its first rollout where it is not. `spans:steps`
  are the judged steps of the verifier named `steps`, `score:format` is the score of the one named `format`; the
  names are options.
- **keeps**: a claim that the tests hold the strategy to. *mass*: an answer's mean advantage is its centred outcome
  times a number of its group; *sign*: no token disagrees with its answer's outcome; *zero mean*: a group's tokens
  sum to zero; *potential*: an answer's steps sum to its centred outcome.
- **objective**: whether the rule moves the expected gradient away from that of the expected reward: *yes*, *no* (it
  changes the variance alone), or *mix* (it depends on how good the evidence is).
"""


@dataclass(frozen=True)
class Entry:
    """One option of ``credit``: its name, what its header says, and the strategy it builds."""

    name: str
    command: str
    about: str
    cost: str
    objective: str
    strategy: Any

    def row(self) -> str:
        signals = ", ".join(f"`{signal}`" for signal in sorted(self.strategy.requires))
        keeps = self.strategy.conserves.replace("_", " ").replace("none", "")
        phase = " (each update)" if self.strategy.phase == "update" else ""
        return f"| `{self.name}` | {self.about} | {signals} | {self.cost} | {keeps}{phase} | {self.objective} |"


def entries(folder: Path = CONFIG_FOLDER / "credit") -> list[Entry]:
    """Every YAML of ``conf/credit``, families in alphabetical order, files without a family first."""
    from hydra import compose, initialize_config_dir

    paths = sorted(folder.rglob("*.yaml"), key=lambda p: (p.parent != folder, p.relative_to(folder).as_posix()))
    with initialize_config_dir(str(folder.parent), version_base="1.3"):
        return [_entry(path, path.relative_to(folder).with_suffix("").as_posix(), compose) for path in paths]


def _entry(path: Path, name: str, compose: Any) -> Entry:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _HEADER.match(line)
        if match is None:
            break
        lines.append((match["key"], match["text"]))
    plain = [text for key, text in lines if key is None]
    facts = {key: text for key, text in lines if key is not None}
    config = compose("train", overrides=[f"credit={name}"])
    return Entry(
        name,
        plain[0],
        " ".join(plain[1:]).rstrip("."),
        facts.get("cost", "none"),
        facts.get("objective", ""),
        build(config.credit, f"credit={name}"),
    )


def page() -> str:
    """The whole page as Markdown."""
    families: dict[str, list[Entry]] = {}
    for entry in entries():
        families.setdefault(entry.name.partition("/")[0] if "/" in entry.name else "", []).append(entry)
    parts = [_INTRODUCTION]
    for family, members in families.items():
        parts.append(f"\n## {family or 'default'}\n")
        parts.append("| `credit=` | rule | needs | extra cost | keeps | objective |\n|---|---|---|---|---|---|")
        parts += [member.row() for member in members]
    notes = CONFIG_FOLDER.parent / "docs" / "strategies-notes.md"
    if notes.exists():
        parts.append("\n" + notes.read_text(encoding="utf-8").strip())
    return "\n".join(parts) + "\n"


def main() -> None:
    target = CONFIG_FOLDER.parent / "docs" / "strategies.md"
    target.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main()
