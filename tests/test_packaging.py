"""Laws of the layout, the archives and the pinned versions."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import apportion

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED_EXTRAS = ("dev", "math", "gguf")
COMMAND = re.compile(r"# (?:python -m )?apportion[. ]\S+")


def run_python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with the folder first on its path."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)


def pins() -> dict[str, str]:
    """Version of each distribution in constraints.txt, by canonical name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, extras in constraints.txt included."""
    project = PYPROJECT["project"]
    extras = [line for extra in SHIPPED_EXTRAS for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*project["dependencies"], *extras]]


def targets(node: Any) -> list[str]:
    """Every `_target_` in a config, at any depth."""
    if isinstance(node, list):
        return [target for child in node for target in targets(child)]
    if not isinstance(node, dict):
        return []
    own = [node["_target_"]] if "_target_" in node else []
    return own + [target for child in node.values() for target in targets(child)]


def test_each_code_folder_has_a_relative_link_under_the_import_name() -> None:
    links = {path.name: path for path in (ROOT / "src" / "apportion").iterdir() if path.is_symlink()}
    assert sorted(links) == CODE_FOLDERS, "add the link: cd src/apportion && ln -s ../../FOLDER ."
    assert {name: path.readlink().as_posix() for name, path in links.items()} == {
        name: f"../../{name}" for name in CODE_FOLDERS
    }


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_a_bare_import_names_the_right_one(folder: str) -> None:
    result = run_python(f"import {folder}")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"ImportError: import apportion.{folder}, not {folder}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "hydra", "omegaconf", "numpy", "rich"}
    result = run_python(f"import sys, apportion; print(sorted({heavy} & set(sys.modules)))")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_every_data_file_is_declared_as_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["apportion"]
    declared = {path for pattern in patterns for path in ROOT.glob(pattern)}
    found = {path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    code = {path for path in found if path.suffix in {".py", ".pyc"}}
    assert found - code - declared == set()


def test_every_folder_with_code_is_a_package() -> None:
    modules = [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert {path.parent for path in modules if not (path.parent / "__init__.py").exists()} == set()


def test_the_source_archive_builds_a_wheel_that_holds_every_module_and_data_file(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for folder in ["src", *CODE_FOLDERS]:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=skip)
    for name in ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, tmp_path)
    built = run_python("from setuptools import build_meta; build_meta.build_sdist('.')", tmp_path)
    assert built.returncode == 0, built.stderr
    stem = f"apportion-{apportion.__version__}"
    shutil.unpack_archive(tmp_path / f"{stem}.tar.gz", tmp_path)
    assert not any(path.is_symlink() for path in (tmp_path / stem).rglob("*"))
    built = run_python("from setuptools import build_meta; build_meta.build_wheel('.')", tmp_path / stem)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / stem / f"{stem}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [path for folder in CODE_FOLDERS for path in (tmp_path / folder).rglob("*") if path.is_file()]
    own = {"apportion/__init__.py", "apportion/py.typed", "hydra_plugins/apportion_sweeper/__init__.py"}
    assert packed == own | {f"apportion/{path.relative_to(tmp_path).as_posix()}" for path in files}


@pytest.mark.parametrize("group", ["verifier", "credit"])
def test_each_config_opens_with_its_command_and_points_into_the_package(group: str) -> None:
    files = sorted((ROOT / "conf" / group).rglob("*.yaml"))
    assert files
    without_command = [path.name for path in files if not COMMAND.match(path.read_text().splitlines()[0])]
    assert without_command == []
    outside = {
        path.name: found
        for path in files
        if not (found := targets(yaml.safe_load(path.read_text())))
        or not all(target.startswith("apportion.") for target in found)
    }
    assert outside == {}


def test_each_pin_satisfies_the_range_of_pyproject() -> None:
    versions = pins()
    broken = [
        str(requirement)
        for requirement in requirements()
        if not requirement.specifier.contains(versions[canonicalize_name(requirement.name)])
    ]
    assert broken == []


def test_the_pins_are_plain_sorted_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    body = [line for line in lines if not line.startswith("#")]
    assert [line for line in body if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert body == sorted(body, key=str.lower)


def test_everything_an_install_brings_is_pinned() -> None:
    # torch's own needs are left out: a CUDA build brings libraries that the CPU build does not.
    open_ends = requirements()
    brought: set[str] = set()
    while open_ends:
        requirement = open_ends.pop()
        name = canonicalize_name(requirement.name)
        if name in brought:
            continue
        brought.add(name)
        if name == "torch":
            continue
        for line in importlib.metadata.requires(name) or []:
            child = Requirement(line)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                open_ends.append(child)
    assert brought - set(pins()) == set()


def test_one_version_is_stated_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == apportion.__version__
    assert apportion.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    block = re.search(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    commands = [line.split("#")[0].strip() for line in block[1].splitlines()]
    assert {"make ablation", "make test"} <= set(commands)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in commands
