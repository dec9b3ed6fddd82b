"""Checkpoints are whole or not there, and bring back the random generators."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apportion.grpo.checkpoint import (
    global_rng_state,
    latest_checkpoint,
    load_checkpoint,
    restore_global_rng,
    save_checkpoint,
)
from apportion.verifiers import InputError


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def loaded(path: Path | None) -> tuple[float, dict[str, Any]]:
    assert path is not None
    model = model_of(-1.0)
    state = load_checkpoint(path, model)
    return float(model.weight[0, 0].detach()), state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_brings_back_weights_and_state(tmp_path: Path) -> None:
    state = {"step": 3, "rate": 0.1, "rows": torch.tensor([[0.25]]), "window": None}
    path = save_checkpoint(tmp_path / "c", "step_3", model_of(2.0), state)
    weight, back = loaded(path)
    assert weight == 2.0
    assert torch.equal(back.pop("rows"), torch.tensor([[0.25]]))
    assert back == {"step": 3, "rate": 0.1, "window": None}


def test_the_newest_stay_and_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in range(4):
        save_checkpoint(tmp_path, f"step_{step}", model_of(step), {"step": step}, keep=2)
    assert names(tmp_path) == ["step_2", "step_3"]
    (tmp_path / "step_4").mkdir()  # no state in it
    (tmp_path / "step_5").write_text("a file")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_3"
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save_checkpoint(tmp_path, "step_6", model_of(6), {}, keep=0)


def test_a_half_done_step_lies_between_the_whole_ones(tmp_path: Path) -> None:
    for name in ("step_000003", "step_000003_update_0002", "step_000003_update_0010", "step_000004"):
        path = save_checkpoint(tmp_path, name, model_of(1), {}, keep=9)
        assert latest_checkpoint(tmp_path) == path


def test_the_same_name_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, "step_1", model_of(step), {"step": step})
    assert names(tmp_path) == ["step_1"]
    assert loaded(latest_checkpoint(tmp_path)) == (2.0, {"step": 2})


@pytest.mark.parametrize("fault", ["safetensors.torch.save_model", "torch.save", "os.fsync", "pathlib.Path.rename"])
def test_a_full_disk_is_one_clear_line_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: Any, fault: str
) -> None:
    save_checkpoint(tmp_path, "step_1", model_of(1), {"step": 1})

    def full(*_: Any, **__: Any) -> None:
        if fault == "torch.save":  # so it reports a full disk
            raise RuntimeError("[enforce fail at inline_container.cc:672] .\n unexpected pos 704 vs 598")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fault, full)
        for name in ("step_1", "step_2"):
            with pytest.raises(InputError) as caught:
                save_checkpoint(tmp_path, name, model_of(2), {"step": 2})
            assert "\n" not in str(caught.value)
            assert str(caught.value).startswith(f"checkpoint {tmp_path / name}: cannot be written (")
            assert str(caught.value).endswith("; free the disk or set run.dir elsewhere")
            assert loaded(latest_checkpoint(tmp_path)) == (1.0, {"step": 1})
    assert names(tmp_path) == ["step_1"]


def test_real_limits_of_the_file_system_are_one_clear_line(tmp_path: Path) -> None:
    """Files may not grow over 20 kB: what torch and safetensors then raise is no OSError."""
    program = """
        import resource, signal, sys, torch
        from pathlib import Path
        from apportion.grpo.checkpoint import save_checkpoint
        from apportion.verifiers import InputError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        for model, state in ((torch.nn.Linear(100, 100), {}), (torch.nn.Linear(1, 1), {"x": torch.zeros(9999)})):
            try:
                save_checkpoint(Path(sys.argv[1]), "step_2", model, state)
            except InputError as error:
                print(error)
    """
    save_checkpoint(tmp_path, "step_1", model_of(1), {"step": 1})
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"checkpoint {tmp_path}/step_2: cannot be written (") for line in lines)
    assert names(tmp_path) == ["step_1"]


def test_a_process_killed_at_any_moment_of_writing_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    """Each system call that changes the folder is, once, the last: what then lies there is old or new, and whole."""
    moments = [
        (Path, "mkdir"),
        (Path, "rename"),
        (os, "fsync"),
        (torch, "save"),
    ]

    class Killed(BaseException):
        pass

    seen = set()
    for holder, name in moments:
        for moment in range(6):
            folder = tmp_path / f"{name}_{moment}"
            save_checkpoint(folder, "step_1", model_of(1), {"step": 1})
            calls = iter(range(moment))
            whole = getattr(holder, name)

            def dying(*arguments: Any, whole: Any = whole, calls: Any = calls, **options: Any) -> Any:
                if next(calls, None) is None:
                    raise Killed
                return whole(*arguments, **options)

            with monkeypatch.context() as patch:
                patch.setattr(holder, name, dying)
                patch.setattr("shutil.rmtree", lambda *_, **__: None)  # a killed process does not tidy up
                try:
                    save_checkpoint(folder, "step_1", model_of(2), {"step": 2})
                except Killed:
                    seen.add(name)
            weight, state = loaded(latest_checkpoint(folder))
            assert (weight, state["step"]) in ((1.0, 1), (2.0, 2))
            save_checkpoint(folder, "step_1", model_of(3), {"step": 3}, keep=1)
            assert names(folder) == ["step_1"]
            assert loaded(latest_checkpoint(folder)) == (3.0, {"step": 3})
    assert seen == {name for _, name in moments}


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("damage", ["cut", "missing", "garbage"])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, file: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, "step_1", model_of(1), {"step": 1})
    content = (path / file).read_bytes()
    (path / file).unlink()
    if damage != "missing":
        (path / file).write_bytes(content[: len(content) // 2] if damage == "cut" else b"\x00garbage" * 9)
    with pytest.raises(InputError) as caught:
        loaded(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"checkpoint {path} cannot be read (")
    assert str(caught.value).endswith("remove it to go on from the one before")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "step_1", model_of(1), {})
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(path, torch.nn.Linear(3, 2))


def test_pickled_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.kill, (os.getpid(), signal.SIGKILL)

    path = save_checkpoint(tmp_path, "step_1", model_of(1), {})
    torch.save({"step": Bomb()}, path / "state.pt")
    with pytest.raises(InputError, match="cannot be read"):
        loaded(path)


def test_the_global_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(0)
    np.random.seed(1)
    torch.manual_seed(2)
    for _ in range(3):
        random.random()
    random.gauss(0, 1)  # leaves a second number in store
    np.random.standard_normal(3)
    torch.randn(3)
    path = save_checkpoint(tmp_path, "step_1", model_of(1), {"rng": global_rng_state()})

    def draws() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.randn(3).tolist()]

    wanted = draws()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    restore_global_rng(loaded(path)[1]["rng"])
    assert draws() == wanted


def test_the_first_draw_after_a_resume_is_not_the_first_draw_of_the_run(tmp_path: Path) -> None:
    random.seed(0)
    first, *_ = (random.random() for _ in range(3))
    path = save_checkpoint(tmp_path, "step_3", model_of(1), {"rng": global_rng_state()})
    random.seed(0)
    restore_global_rng(loaded(path)[1]["rng"])
    assert (first, random.random()) == pytest.approx((0.844421851525, 0.258916750293), abs=1e-12)
