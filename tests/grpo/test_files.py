"""Files are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from apportion.grpo.files import make_folder, replacing, write_text
from apportion.verifiers import InputError


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_takes_the_place_of_the_old_one_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_text(path, "old")

    def crash() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise KeyError

    with pytest.raises(KeyError):
        crash()
    assert path.read_text() == "old"
    write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert names(tmp_path) == ["status.json"]


def test_a_full_disk_is_one_clear_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "status.json"
    write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError) as caught:
        write_text(path, "new")
    assert str(caught.value) == (
        f"{path}: cannot be written (No space left on device); free the disk or set run.dir elsewhere"
    )
    assert path.read_text() == "old"
    assert names(tmp_path) == ["status.json"]


def test_a_folder_that_vanished_is_named_and_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone/status.json: cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "gone" / "status.json", "x")
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run: cannot be made \(Not a directory\)"):
        make_folder(tmp_path / "file" / "run")
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
