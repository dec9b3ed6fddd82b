"""Who does what among several processes, and what is refused before any of them starts."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit.batch import TreeIndex
from apportion.experiments.train import device
from apportion.grpo.parallel import ParallelConfig, as_launched
from apportion.grpo.processes import ALONE, Lost, Processes, deal, joined, shares
from apportion.grpo.sampling import Interrupted
from apportion.grpo.sharding import Shards, _compact, _outline, is_sharded, load_optimizer, optimizer_state, whole
from apportion.grpo.together import _merged_trees, merged_panels
from apportion.verifiers import InputError, Verdict
from apportion.verifiers.panel import PanelResult

counts = st.integers(1, 9)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 6), max_size=20), counts)
def test_equal_ids_share_a_process_and_no_share_is_much_larger(ids: list[int], count: int) -> None:
    parts = shares(ids, count)
    assert len(parts) == count
    assert sorted(place for part in parts for place in part) == list(range(len(ids)))
    assert all(part == sorted(part) for part in parts)
    homes = [{ids[place] for place in part} for part in parts]
    assert sum(map(len, homes)) == len(set(ids))
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


def test_different_ids_are_shared_out_in_order() -> None:
    assert shares(["a", "b", "c", "d", "e"], 2) == [[0, 1, 2], [3, 4]]
    assert shares(["a"], 3) == [[0], [], []]
    assert shares([], 2) == [[], []]


rows = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), max_size=40)


@settings(deadline=None, max_examples=100)
@given(rows, counts)
def test_every_row_is_dealt_once_and_the_load_is_even(rows: list[tuple[int, int]], count: int) -> None:
    groups, costs = torch.tensor([g for g, _ in rows]), torch.tensor([float(c) for _, c in rows])
    parts = deal(costs, groups, count)
    assert len(parts) == count
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(rows)))
    assert all(bool((part[1:] > part[:-1]).all()) for part in parts)
    load = [float(costs[part].sum()) for part in parts]
    fair = float(costs.sum()) / count
    # The last part that the fullest process got came when it had the least, and is one fair share plus one row at most.
    assert max(load) <= 2 * fair + max([c for _, c in rows], default=0) + 1e-6


def test_a_group_is_cut_only_where_it_costs_more_than_a_fair_share() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    parts = deal(torch.ones(9), groups, 3)
    assert sorted(part.tolist() for part in parts) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    dominated = torch.tensor([8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    homes = Counter(group for part in deal(dominated, groups, 3) for group in {int(g) for g in groups[part]})
    assert homes == {0: 3, 1: 1, 2: 1}
    assert [part.tolist() for part in deal(torch.zeros(4), torch.tensor([0, 0, 1, 1]), 2)] == [[0, 1, 2, 3], []]


def test_alone_everything_is_as_with_one() -> None:
    assert ALONE.is_main
    assert ALONE.each(lambda: 7) == [7]
    unpicklable = object()
    assert ALONE.jointly(lambda: unpicklable) is unpicklable
    assert ALONE.main(lambda: unpicklable) is unpicklable
    assert (ALONE.any(False), ALONE.any(True), ALONE.most(3), ALONE.total(0.1)) == (False, True, 3, 0.1)
    with pytest.raises(ZeroDivisionError) as caught:
        ALONE.each(lambda: 1 / 0)
    assert not hasattr(caught.value, "__notes__")
    model = torch.nn.Linear(2, 2)
    ALONE.copy_from_main(model)
    ALONE.add_gradients(model)
    assert model.weight.grad is None


def test_an_error_is_known_to_all_where_they_met_over_it_or_it_follows_from_what_all_have() -> None:
    processes, fault = Processes(1, 2), ValueError("x")
    assert not processes.all_know(fault)
    processes.fault = fault
    assert processes.all_know(fault)
    assert processes.all_know(InputError("too many skipped"))
    assert not processes.all_know(Lost("gone"))
    assert not processes.all_know(KeyboardInterrupt())
    assert ALONE.all_know(ValueError())


PROGRAM = """
import sys
import torch
from apportion.grpo.processes import joined
from apportion.grpo.sampling import Interrupted
from apportion.verifiers import InputError

class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

def fails(processes, errors):
    def work():
        if errors[processes.number] is not None:
            raise errors[processes.number]
    try:
        processes.each(work)
    except Exception as error:
        return type(error).__name__, str(error), processes.all_know(error)

with joined("cpu", 60.0) as processes:
    me = processes.number
    assert processes.each(lambda: {"n": me}) == [{"n": 0}, {"n": 1}]
    assert processes.main(lambda: me) == 0
    assert processes.jointly(lambda: me) == me
    assert (processes.any(me == 1), processes.any(False)) == (True, False)
    assert (processes.most(5 - me), processes.total(me + 0.25)) == (5, 1.5)
    assert fails(processes, [None, InputError("of one")]) == ("InputError", "of one", True)
    assert fails(processes, [InputError("a"), InputError("b")]) == ("InputError", "a", True)
    assert fails(processes, [InputError("a"), Interrupted()]) == ("Interrupted", "", True)
    assert fails(processes, [None, Stubborn(1, 2)])[0] == ("RuntimeError", "Stubborn")[me]
    assert processes.each(lambda: 1) == [1, 1]
    unpicklable = (lambda: 0) if me else 0
    try:
        processes.each(lambda: unpicklable)
        raise SystemExit("told")
    except Exception as error:
        assert "pickle" in str(error), error
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2, bias=name == "b") for name in "abcd"})
    model["c"].to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(me + 0.5)
    processes.copy_from_main(model)
    assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
    model["a"].weight.grad = torch.full((2, 3), 2.0 + me)
    if me:
        model["b"].bias.grad = torch.ones(2)
        model["c"].weight.grad = torch.ones(2, 3, dtype=torch.bfloat16)
    processes.add_gradients(model)
    assert model["a"].weight.grad.tolist() == [[5.0] * 3] * 2
    assert model["b"].bias.grad.tolist() == [1.0, 1.0]
    assert model["c"].weight.grad.dtype == torch.bfloat16
    assert model["b"].weight.grad is None and model["d"].weight.grad is None
"""


@pytest.mark.slow
def test_two_processes_tell_each_other_results_and_faults(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_verdicts_of_several_panels_are_one(tmp_path: Path) -> None:
    first = PanelResult([{"a": Verdict(1.0)}, {"a": Verdict(None)}], {"a": [1], "b": []}, {"a": "first"})
    second = PanelResult([{"a": Verdict(None)}], {"a": [0], "b": [0]}, {"a": "second", "b": "other"})
    merged = merged_panels([first, second])
    assert [row["a"].score for row in merged.verdicts] == [1.0, None, None]
    assert merged.faulted == {"a": [1, 2], "b": [2]}
    assert merged.errors == {"a": 2, "b": 1}
    assert merged.first_error == {"a": "first", "b": "other"}
    assert merged_panels([first]) == first


def test_trees_of_several_processes_share_no_node() -> None:
    one = TreeIndex(torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 3], [0, 3]]), torch.tensor([[3, 5], [3, 9]]))
    other = TreeIndex(torch.tensor([[0, -1]]), torch.tensor([[0, 0]]), torch.tensor([[4, 0]]))
    merged = _merged_trees([one, None, other], [2, 0, 1])
    assert merged is not None
    assert merged.node.tolist() == [[3, -1], [0, 1], [0, 2]]
    assert merged.stop.tolist() == [[4, 0], [3, 5], [3, 9]]
    assert _merged_trees([None], []) is None


# What a launcher says


def test_what_accelerate_launch_asks_for_is_done_or_refused() -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    config = ParallelConfig()
    assert as_launched(config, "fp32", {}).shard is False
    assert as_launched(ParallelConfig(shard=True), "fp32", {}).shard is True
    assert as_launched(config, "bf16", {**fsdp, "ACCELERATE_MIXED_PRECISION": "bf16"}).shard is True
    assert as_launched(ParallelConfig(shard=False), "fp32", fsdp).shard is False
    assert as_launched(config, "fp32", {**fsdp, "FSDP_RESHARD_AFTER_FORWARD": "false"}).reshard is False
    for further, message in (
        ({"FSDP_VERSION": "1"}, "FSDP of version 1; set --fsdp_version 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "policy.gradient_checkpointing=true"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision=fp16, the configuration for policy.precision=fp32"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "MEGATRON_LM"),
    ):
        with pytest.raises(InputError, match=message):
            as_launched(config, "fp32", {**fsdp, **further})
    with pytest.raises(InputError, match=r"parallel\.timeout_s=0: must be over 0"):
        ParallelConfig(timeout_s=0)


def test_processes_without_an_address_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="WORLD_SIZE=2 is set, but not MASTER_ADDR, MASTER_PORT"), joined("cpu", 1.0):
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined("cpu", 1.0) as processes:
        assert processes is ALONE


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert device("auto") == "cuda"
    assert device("cuda:1") == "cuda:1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (device("auto"), device("cuda"), device("cpu")) == ("cuda:1", "cuda:1", "cpu")
    with pytest.raises(InputError, match="device=cuda:0: several processes take a GPU each; set device=cuda"):
        device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="process 2 of this machine has no GPU of its own, there are 2"):
        device("auto")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert device("auto") == "cpu"


# Weights that are whole


def test_a_whole_copy_has_the_weights_and_ties_of_the_model(new_policy: Any) -> None:
    model = new_policy().model
    shards = Shards(model, _outline(model))
    assert all(parameter.is_meta for parameter in shards.outline.parameters())
    copied = shards.gathered(keep=True)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in model.state_dict().items())
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model(input_ids=ids).logits, copied(input_ids=ids).logits)
    assert shards.gathered(keep=False) is None


def test_what_was_gathered_from_unequal_shards_keeps_no_padding() -> None:
    gathered = torch.arange(28.0).view(14, 2)[:13]
    compact = _compact(gathered)
    assert torch.equal(compact, gathered)
    assert compact.untyped_storage().nbytes() == 13 * 2 * 4


def test_what_is_not_sharded_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    assert not is_sharded(model)
    with whole(model):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).backward()
        optimizer.step()
    state = optimizer_state(optimizer)
    other = torch.optim.AdamW(copy.deepcopy(model).parameters())
    load_optimizer(other, state)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_a_request_to_stop_is_no_fault_of_the_user() -> None:
    assert not isinstance(Interrupted(), InputError)
