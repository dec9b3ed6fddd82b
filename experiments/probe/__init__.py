"""``apportion probe``: every strategy on the same rollouts, against what is known to be true."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """``apportion probe key=value ...``"""
    from ..app import hydra_command
    from .command import refuse_jobs

    hydra_command("probe", refuse_jobs, sys.argv[1:] if arguments is None else arguments)
