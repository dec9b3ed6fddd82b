"""Talking to a vLLM server that may be busy, late or dead: how often, how long, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...verifiers import InputError
from ...verifiers.endpoint import Endpoint
from ..sampling import Interrupted, RolloutConfig
from . import transfer
from .client import Client, Fault, Refused
from .replies import WrongReply

__all__ = ["FAULTS", "LOOK_S", "Session"]

Made = TypeVar("Made")
FAULTS = (Fault, Refused, WrongReply, transfer.Stuck)
LONGEST_PAUSE = 30.0  # seconds between two tries
LOOK_S = 0.2  # between two looks at whether the run is to stop
AGAIN = "start the server again, then repeat the command: the run goes on from its last checkpoint"
START = (
    "it needs vLLM 0.22 or later, started by VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
    '--weight-transfer-config \'{"backend": "nccl"}\''
)
REMEDIES = {404: START, 405: START, 401: "is engine.api_key_env right?", 403: "is engine.api_key_env right?"}


class Session:
    """What is known of a server, and the rules for trying again.

    Args:
        endpoint: where it is; ``retries`` are further tries in a row.
        host: address of this machine that the server can reach; None takes the one that vLLM finds.
    """

    def __init__(self, endpoint: Endpoint, host: str | None) -> None:
        self.client = Client(endpoint)
        self.model, self.group = "", None
        self._endpoint, self._host = endpoint, host

    def open(self, device: torch.device, rollout: RolloutConfig) -> None:
        """See that the server is well and as it has to be, and open a new way for weights to it."""
        self.client.get("/health")
        models = self.client.get("/v1/models")
        try:
            self.model = str(models["data"][0]["id"])
        except (TypeError, KeyError, IndexError):
            raise Fault("/v1/models: no list of models") from None
        self._check(self.client.get("/server_info?config_format=json"), rollout)
        self.group = transfer.open_group(self.client, device, self._host)

    def insist(
        self,
        work: Callable[[], Made],
        *,
        first: Callable[[], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Made:
        """Do ``work``, and again where it fails and may do better another time.

        Args:
            first: done before each further try.
        """
        attempt = 0
        while True:
            try:
                if attempt and first is not None:
                    first()
                return work()
            except FAULTS as error:
                fault = self.mendable(error)
            attempt += 1
            self.pause(attempt, fault, should_stop)

    def mendable(self, error: Exception) -> Fault:
        """The fault itself, or the end of the run where trying again is of no use."""
        if isinstance(error, Fault):
            return error
        words = f"engine.base_url={self._endpoint.url}: {error}"
        if isinstance(error, Refused):
            words += f"; {REMEDIES.get(error.status, 'see the log of the server')}"
        if isinstance(error, transfer.Stuck):
            words += f"; {AGAIN}"
        raise InputError(words) from None

    def pause(self, attempt: int, fault: Fault, should_stop: Callable[[], bool] | None) -> None:
        """Wait before the ``attempt``-th further try, or give up."""
        if attempt > self._endpoint.retries:
            tries = f"{attempt} tries" if attempt > 1 else "1 try"
            raise InputError(f"engine.base_url={self._endpoint.url}: {fault} ({tries}); {AGAIN}") from None
        left = min(LONGEST_PAUSE, 0.5 * 2 ** (attempt - 1))
        while left > 0:
            if should_stop is not None and should_stop():
                raise Interrupted
            time.sleep(min(left, LOOK_S))
            left -= LOOK_S

    def _check(self, info: Any, rollout: RolloutConfig) -> None:
        """Refuse a server that gives other log-probabilities than those of the distribution that it samples from."""
        config = info.get("vllm_config") if isinstance(info, dict) else None
        model = config.get("model_config") if isinstance(config, dict) else None
        mode = model.get("logprobs_mode") if isinstance(model, dict) else None  # not every version tells
        plain = (rollout.temperature, rollout.top_k, rollout.top_p) == (1, 0, 1)
        if mode not in (None, "processed_logprobs") and not plain:
            raise InputError(
                f"engine.base_url={self._endpoint.url}: gives {mode}, and rollout.temperature, top_k or top_p change "
                "the distribution; start the server with --logprobs-mode processed_logprobs"
            )
