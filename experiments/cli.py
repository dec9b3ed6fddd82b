"""The console script ``apportion``: picks a command and loads nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "ablate": "compare credit strategies over seeds on one task, with a report",
    "train": "one GRPO run",
    "probe": "every strategy's credit on the same rollouts, against what is known to be true",
    "label-steps": "label the steps of solutions, to train a reward model on",
    "train-prm": "train a process reward model and measure it beside its baselines",
    "eval-prm": "measure trained process reward models on labelled solutions",
    "train-rm": "train a reward model of whole answers on human preferences",
    "cost": "what strategies cost in tokens, forwards, memory and GPU-hours, before a run",
    "verify": "run verifiers over completions in a file: apportion verify FILE.jsonl verifier=...",
    "report": "rebuild the report of a finished or running ablation: apportion report DIR",
}

HELP = """Apportion: credit assignment for reinforcement learning of language models.

usage: apportion COMMAND [key=value ...]

{commands}

Every command takes Hydra overrides, for example
  apportion ablate experiment=smoke                   a small ablation, under 40 seconds
  apportion train credit=process/own_step seed=1      one run with another credit strategy
  apportion train --cfg job                           show the configuration and stop
Options and their values lie in the folders under conf/; --traceback shows where an error came from.
"""


def main(argv: list[str] | None = None) -> None:
    """Run ``apportion COMMAND ...``; exit status 2 for bad input, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP.format(commands="\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items())))
        return
    if arguments[0] in ("--version", "-V"):
        from apportion import __version__

        sys.stdout.write(f"apportion {__version__}\n")
        return
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        sys.stderr.write(f"apportion: no command {command!r}; {hint}\n")
        raise SystemExit(2)
    # A user's own my_verifier.py is found. Last, so that a folder datasets/ or a file tokenizers.py hides no library.
    sys.path.append(str(Path.cwd()))
    import importlib

    importlib.import_module(f"apportion.experiments.{command.replace('-', '_')}").main(rest)


if __name__ == "__main__":
    main()
