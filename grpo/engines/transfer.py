"""Weights to a vLLM server over NCCL: the server is told by HTTP what comes, and the tensors go from GPU to GPU.

The trainer is rank 0 of a group of its own with the server's workers. See vLLM's page on weight transfer; its trainer
side changed in 0.28, and whichever of the two is installed is used.
"""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...verifiers import InputError
from .client import Client, Fault

__all__ = ["Stuck", "broadcast", "check_installed", "open_group"]

Made = TypeVar("Made")
GRACE_S = 30.0  # for one side to notice that the other is done


class Stuck(Exception):
    """The transfer hangs in a way that only a new process ends."""


def check_installed() -> None:
    """Refuse a machine without vLLM or CUDA: the trainer's end of the transfer is vLLM's own."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError("engine=vllm_server: needs the package vllm here too; pip install 'apportion[vllm]'")
    if not torch.cuda.is_available():
        raise InputError("engine=vllm_server: weights go from GPU to GPU, and there is no CUDA here; use engine=native")


def open_group(client: Client, device: torch.device, host: str | None) -> Any:
    """The trainer's end of a new group with the workers of the server.

    Args:
        client: of the server.
        device: of the policy.
        host: address of this machine that the server can reach; None takes the one that vLLM finds.
    """
    workers = client.get("/get_world_size")
    if not isinstance(workers, dict) or not isinstance(workers.get("world_size"), int):
        raise Fault("/get_world_size: no number of workers")
    init_info = {
        "master_address": _own_address() if host is None else host,
        "master_port": _free_port(),
        "rank_offset": 1,
        "world_size": workers["world_size"] + 1,
        **({} if _static() else {"packed": True}),
    }
    return _together(
        lambda: client.post("/init_weight_transfer_engine", {"init_info": init_info}),
        lambda: _on(device, lambda: _trainer_init(init_info)),
    )


def broadcast(client: Client, group: Any, device: torch.device, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Have the server replace its weights by these."""
    facts = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in weights]
    names, dtypes, shapes = (list(column) for column in zip(*facts))
    update_info = {"names": names, "dtype_names": dtypes, "shapes": shapes, **({"packed": True} if _static() else {})}
    client.post("/start_weight_update")
    _together(
        lambda: client.post("/update_weights", {"update_info": update_info}),
        lambda: _on(device, lambda: _send(group, weights)),
    )
    client.post("/finish_weight_update")


def _together(request: Callable[[], Any], work: Callable[[], Made]) -> Made:
    """What ``work`` makes, in a thread of its own, while the server waits for it in ``request``.

    Raises:
        Fault: one of the two failed, and the other ended too.
        Stuck: one of the two failed, and the other hangs: NCCL waits for ever for a peer that is gone.
    """
    made: list[Made] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(work())
        except Exception as error:  # of any kind: NCCL's, a socket's, vLLM's
            failed.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    fault = None
    try:
        request()
    except Fault as error:
        fault = error
    thread.join(GRACE_S)
    if thread.is_alive():
        raise Stuck(f"the transfer of weights hangs ({fault or 'the server says that it is done'})")
    if failed:
        raise Fault(f"the transfer of weights failed ({type(failed[0]).__name__}: {failed[0]})") from failed[0]
    if fault is not None:
        raise fault
    return made[0]


def _on(device: torch.device, work: Callable[[], Made]) -> Made:
    """Do ``work`` with ``device`` as the current one, which every thread has of its own."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return work()


def _static() -> bool:
    """Whether the trainer's side is that of vLLM before 0.28: static methods of the worker's engine."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return hasattr(NCCLWeightTransferEngine, "trainer_init")


def _trainer_init(init_info: dict[str, Any]) -> Any:
    if _static():
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        return NCCLWeightTransferEngine.trainer_init(init_info)
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init(init_info)


def _send(group: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    if _static():
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        NCCLWeightTransferEngine.trainer_send_weights(iter(weights), {"group": group, "packed": True})
        return
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(iterator=iter(weights), group=group, src=0, post_iter_func=lambda item: item[1])


def _own_address() -> str:
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
