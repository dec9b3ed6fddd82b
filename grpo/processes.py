"""Several processes of one run: who does what, and what they tell each other. Alone, everything is as with one.

All processes take the same steps in the same order. Whatever one of them does by itself (sampling, asking verifiers,
reading a file) goes through a method of :class:`Processes`, where all meet: nobody waits for one that has failed.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from ..prm.processes import all_processes, process_count, process_number
from ..verifiers import InputError
from .files import one_line
from .sampling import Interrupted

__all__ = ["ALONE", "Lost", "Processes", "deal", "joined", "shares"]

Result = TypeVar("Result")

BUCKET = 2**24  # numbers that are added up over the processes in one go
PARTING = 0.25  # seconds


class Lost(InputError):
    """Another process is gone, or did not come in time."""


class Processes:
    """The processes of a run, as one of them sees them.

    Args:
        number: of this one, from 0; 0 is the main process, which writes files and shows progress.
        count: how many there are.

    Attributes:
        fault: what failed in some process and was then raised in all.
    """

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number, self.count = number, count
        self.fault: BaseException | None = None

    @property
    def is_main(self) -> bool:
        return self.number == 0

    def each(self, work: Callable[[], Result]) -> list[Result]:
        """What ``work`` gives in each process, in their order; what can be pickled is told.

        Where it raises an exception in any of them, all raise that of the first; a request to stop comes before faults.
        """
        if self.count == 1:
            return [work()]
        result, error = b"", None
        try:
            result = pickle.dumps(work())
        except Exception as fault:
            error = fault
        with self._meeting():
            told = all_processes([(result, None if error is None else _portable(error, self.number))])
        faults = {number: fault for number, (_, fault) in enumerate(told) if fault is not None}
        if faults:
            first = min(faults, key=lambda number: (not isinstance(faults[number], Interrupted), number))
            self.fault = error if first == self.number and error is not None else faults[first]
            raise self.fault
        return [pickle.loads(one) for one, _ in told]

    def all_know(self, error: BaseException) -> bool:
        """Whether the other processes raise this error too: they met over it, or it follows from what all have."""
        cause = error.__cause__ if isinstance(error, SystemExit) else error
        if self.count == 1 or cause is self.fault is not None:
            return True
        return isinstance(cause, InputError) and not isinstance(cause, Lost)

    def jointly(self, work: Callable[[], Result]) -> Result:
        """What ``work`` gives in this process, once it went well in all."""
        kept: list[Result] = []
        self.each(lambda: kept.append(work()))
        return kept[0]

    def main(self, work: Callable[[], Result]) -> Result:
        """What ``work`` gives in the main process, which alone does it."""
        result: Any = self.each(lambda: work() if self.is_main else None)[0]
        return result

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return int(self._reduced(number, distributed.ReduceOp.MAX))

    def total(self, number: float) -> float:
        """The sum of the processes' numbers."""
        return self._reduced(number, distributed.ReduceOp.SUM)

    def copy_from_main(self, model: Any) -> None:
        """Give the model in every process the weights and buffers that it has in the main one."""
        if self.count > 1:
            with torch.no_grad(), self._meeting():
                for value in (*model.parameters(), *model.buffers()):
                    data = value.detach().clone(memory_format=torch.contiguous_format)
                    distributed.broadcast(data.view(-1).view(torch.uint8), 0)
                    value.copy_(data)

    def add_gradients(self, model: Any) -> None:
        """Sum every parameter's gradient over the processes; one that no process has stays without."""
        if self.count == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        known = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        with self._meeting():
            distributed.all_reduce(known, distributed.ReduceOp.MAX)
        chosen = [parameter for parameter, somewhere in zip(parameters, known.tolist()) if somewhere]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in chosen]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            with self._meeting():
                distributed.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
                gradient.copy_(part.view_as(gradient))

    def _reduced(self, number: float, how: Any) -> float:
        if self.count == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64)
        with self._meeting():
            distributed.all_reduce(value, how)
        return float(value)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # how lost connections and long waits show
            raise Lost(
                f"process {self.number} of {self.count}: another one has gone, or did not come within "
                "parallel.timeout_s; see what became of it, and repeat the command to go on from the last checkpoint"
            ) from error


ALONE = Processes()


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[Processes]:
    """The processes that ``torchrun`` or ``accelerate launch`` started, connected inside the block.

    Args:
        device: of this process. Gradients meet over NCCL on CUDA devices, and over Gloo on CPUs, as do objects.
        timeout_s: longest wait for another process.

    Raises:
        InputError: they cannot meet.
    """
    if process_count() == 1:
        yield ALONE
        return
    _connect(device, timeout_s)
    processes = Processes(distributed.get_rank(), distributed.get_world_size())
    try:
        yield processes
    except BaseException as error:
        if processes.all_know(error):  # otherwise the others may still wait for this one
            _end(processes)
        raise
    _part()


def _connect(device: str, timeout_s: float) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE={process_count()} is set, but not {', '.join(missing)}; start several processes by torchrun "
            "or accelerate launch, or unset it"
        )
    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Imported later, its default arguments would hold the group, whose threads then outlive it and the interpreter.
        importlib.import_module("torch.distributed.nn.functional")
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"process {process_number()} of {process_count()} cannot meet the others ({one_line(error)}); check the "
            "launcher's address and port"
        ) from error


def _end(processes: Processes) -> None:
    """Have the main process end first, since launchers end all once one has ended, and it says why."""
    if processes.is_main:
        atexit.register(_part)
        return
    with suppress(RuntimeError):  # the connection breaks when the main process has gone
        distributed.recv(torch.zeros(1), 0)
    _part()


def _part() -> None:
    """Disconnect. Gloo's threads let the last tensors go a little later, and abort where the interpreter has gone."""
    distributed.destroy_process_group()
    time.sleep(PARTING)


def shares(ids: Sequence[Hashable], count: int) -> list[list[int]]:
    """Places of each process's share: in order, about equally many different ids each, equal ids in one share.

    >>> shares(["a", "b", "a", "c"], 2)
    [[0, 1, 2], [3]]
    """
    different = {one: index for index, one in enumerate(dict.fromkeys(ids))}
    parts: list[list[int]] = [[] for _ in range(count)]
    for place, one in enumerate(ids):
        parts[different[one] * count // len(different)].append(place)
    return parts


def deal(costs: Tensor, group_ids: Tensor, count: int) -> list[Tensor]:
    """Places of the rows that each process works off, in rising order, so that all have about as much to do.

    A group stays whole, since its rows share their prompt's forward, unless it costs more than a fair share. The
    costliest part goes first, to whoever has least.

    Args:
        costs: (R,) of each row, not negative.
        group_ids: (R,).

    >>> parts = deal(torch.tensor([4.0, 4.0, 1.0, 1.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1, 2, 2]), 2)
    >>> [part.tolist() for part in parts]
    [[0, 1, 2, 3], [4, 5]]
    """
    rows = torch.arange(len(costs))
    if count == 1:
        return [rows]
    fair = float(costs.sum()) / count
    parts: list[Tensor] = []
    for group in group_ids.unique():
        own = rows[group_ids == group]
        pieces = math.ceil(float(costs[own].sum()) / fair - 1e-9) if fair else 1
        parts += own.tensor_split(min(max(pieces, 1), len(own)))
    load, dealt = [0.0] * count, [[rows[:0]] for _ in range(count)]
    for part in sorted(parts, key=lambda part: -float(costs[part].sum())):
        least = load.index(min(load))
        load[least] += float(costs[part].sum())
        dealt[least].append(part)
    return [torch.cat(own).sort().values for own in dealt]


def _buckets(tensors: Sequence[Tensor | None]) -> Iterator[list[Tensor]]:
    """Tensors of one kind in turn, so many that a bucket is not much larger than :data:`BUCKET`."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        assert tensor is not None
        full = sum(one.numel() for one in bucket) + tensor.numel() > BUCKET
        if bucket and (full or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _portable(error: Exception, number: int) -> Exception:
    """The exception as the other processes can raise it, with where it arose if it is no user's error."""
    if not isinstance(error, InputError | Interrupted):
        error.add_note(f"in process {number}:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # exceptions may hold anything, and may not take what they hold
        return RuntimeError(f"{type(error).__name__}: {one_line(error)}")
