"""The report of an ablation: statistics, figures, page. ``apportion report DIR`` builds it anew."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """``apportion report DIR``"""
    from ...verifiers import InputError
    from .build import build_report

    wanted = sys.argv[1:] if arguments is None else arguments
    folders = [argument.removeprefix("run.dir=") for argument in wanted if argument != "--traceback"]
    try:
        if len(folders) != 1:
            raise InputError("give the folder of one ablation: apportion report DIR")
        path = build_report(Path(folders[0]))
    except InputError as error:
        if "--traceback" in wanted:
            raise
        sys.stderr.write(f"apportion report: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.write(f"report: {path}\n{path.parent.resolve()}\n")
