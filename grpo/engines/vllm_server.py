"""A vLLM server as an engine: it samples on GPUs of its own, gets its weights over NCCL, and may die and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...verifiers import InputError
from ...verifiers.endpoint import Endpoint
from ..policy import Policy
from ..sampling import Generation, Interrupted, RolloutConfig
from . import SamplingOptions, transfer
from .client import Fault
from .replies import generations
from .session import FAULTS, LOOK_S, Session

__all__ = ["ServerEngine", "VLLMServer"]

SEEDS = 2**62  # vLLM adds the number of a completion to its request's seed, within 63 bits


@dataclass(frozen=True)
class VLLMServer:
    """A server started by vLLM 0.22 or later, with whatever weights of the policy's architecture::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \
            --logprobs-mode processed_logprobs

    A request that fails is tried again, after pauses of 0.5 s, 1 s, 2 s, ..., 30 s. Before each further try the server
    gets the weights anew, since it may have been started anew with others. Once all tries are spent the run ends with
    one line; the same command goes on from the last checkpoint.

    Args:
        base_url: of the server.
        api_key_env: environment variable that holds its key; None for a server that needs none.
        concurrency: prompts in flight at once.
        timeout_s: longest wait for a sign of life; a request gives none before its longest completion is whole.
        retries: further tries in a row; ten of them wait two and a half minutes for a server to come back.
        seeded: send seeds made of the run's own, which costs the server some speed. Equal seeds give equal samples
            only as far as its kernels do not depend on what else is in the batch.
        sleep_level: have a server that shares the trainer's GPU sleep while the policy learns (1 keeps its weights in
            the CPU's memory, 2 drops them); needs ``--enable-sleep-mode``. None lets it stay awake.
        host: address of this machine that the server can reach; None takes the one that vLLM finds.
    """

    base_url: str = "http://localhost:8000"
    api_key_env: str | None = None
    concurrency: int = 64
    timeout_s: float = 600.0
    retries: int = 10
    seeded: bool = True
    sleep_level: Literal[1, 2] | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        self.session()
        if self.sleep_level not in (None, 1, 2):
            raise InputError(f"engine.sleep_level={self.sleep_level!r}: must be 1, 2 or null")

    def session(self) -> Session:
        """A session with the server; refuses what cannot be an address."""
        endpoint = Endpoint(
            model=None,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            retries=self.retries,
        )
        return Session(endpoint, self.host)

    def prepare(self) -> None:
        """Refuse a machine without vLLM or CUDA, and a server that is not there."""
        transfer.check_installed()
        session = self.session()
        session.insist(lambda: session.client.get("/health"))

    def start(self, policy: Policy, rollout: RolloutConfig) -> ServerEngine:
        """The engine, connected with the server."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise InputError(
                "engine=vllm_server: works with one trainer process; start it without torchrun, or use engine=native"
            )
        engine = ServerEngine(self, policy, rollout)
        engine.connect()
        return engine


class ServerEngine:
    """A connection with a server; see :class:`VLLMServer`.

    Args:
        options: of the connection.
        policy, rollout: what is sampled from and how.
    """

    native = False

    def __init__(self, options: VLLMServer, policy: Policy, rollout: RolloutConfig) -> None:
        self._options, self._policy, self._rollout = options, policy, rollout
        self._session = options.session()
        self._asleep = False
        self._weights: Iterable[tuple[str, Tensor]] | None = None

    def connect(self) -> None:
        """Find the server and open the way for weights, trying again for a while."""
        self._session.insist(self._open)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        options: SamplingOptions,
        *,
        row_seeds: Sequence[int],
        should_stop: Callable[[], bool] | None = None,
        on_finished: Callable[[Mapping[int, Generation]], None] | None = None,
    ) -> list[Generation]:
        """One request a prompt; what fails is asked for again once the others have ended, see :class:`VLLMServer`."""
        if len(row_seeds) != len(prompts) * n:
            raise ValueError(f"{len(row_seeds)} row_seeds for {len(prompts)} prompts x {n}")
        if self._weights is None or self._asleep:
            raise RuntimeError("generate before sync: the server's weights are not the policy's")
        bodies = {place: self._body(prompt, n, options, row_seeds[place * n]) for place, prompt in enumerate(prompts)}
        done: dict[int, list[Generation]] = {}
        attempt = 0
        while len(done) < len(bodies):
            before = len(done)
            try:
                if attempt:
                    self._open()
                    self._push(self._weights)
                waiting = {place: body for place, body in bodies.items() if place not in done}
                fault = self._ask(waiting, options, done, should_stop, on_finished)
            except FAULTS as error:
                fault = self._session.mendable(error)
            if fault is not None:
                attempt = 1 if len(done) > before else attempt + 1
                self._session.pause(attempt, fault, should_stop)
        return [one for place in bodies for one in done[place]]

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the weights, then have the server forget what it kept of prompts that it read with the old ones."""
        self._weights = weights
        self._session.insist(lambda: self._push(weights), first=self._open)

    def wake(self) -> None:
        """Have a server that sleeps make room for the weights."""
        if self._asleep:
            self._session.insist(lambda: self._session.client.post("/wake_up?tags=weights"), first=self._open)

    def sleep(self) -> None:
        """Have the server sleep, where it shall."""
        level = self._options.sleep_level
        if level is not None and not self._asleep:
            self._session.insist(lambda: self._session.client.post(f"/sleep?level={level}"), first=self._open)
            self._asleep = True

    def _open(self) -> None:
        self._session.open(self._policy.device, self._rollout)
        if self._options.sleep_level is not None:
            state = self._session.client.get("/is_sleeping")
            self._asleep = isinstance(state, dict) and state.get("is_sleeping") is True

    def _push(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        client = self._session.client
        transfer.broadcast(client, self._session.group, self._policy.device, weights)
        cleared = client.post("/reset_prefix_cache")
        if isinstance(cleared, dict) and cleared.get("success") is False:
            raise Fault("/reset_prefix_cache: the server still uses it")
        if self._asleep:
            client.post("/wake_up?tags=kv_cache")
            self._asleep = False

    def _body(self, prompt: Sequence[int], n: int, options: SamplingOptions, seed: int) -> dict[str, Any]:
        """A request that leaves nothing to the server's own defaults, which come from the model's files."""
        return {
            "model": self._session.model,
            "prompt": list(prompt),
            "n": n,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed % SEEDS if self._options.seeded else None,
            "stop_token_ids": list(self._policy.eos_ids),
            "ignore_eos": True,  # these ids alone end a completion
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _ask(
        self,
        bodies: Mapping[int, dict[str, Any]],
        options: SamplingOptions,
        done: dict[int, list[Generation]],
        should_stop: Callable[[], bool] | None,
        on_finished: Callable[[Mapping[int, Generation]], None] | None,
    ) -> Fault | None:
        """Ask for all of these at once; puts what comes into ``done``, and gives the first fault."""
        first, client = None, self._session.client
        pool = ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="rollouts")
        asked: dict[Future[Any], int] = {
            pool.submit(client.post, "/v1/completions", body): place for place, body in bodies.items()
        }
        left = set(asked)
        try:
            while left:
                if should_stop is not None and should_stop():
                    raise Interrupted
                ended, left = wait(left, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    place = asked[future]
                    try:
                        reply = future.result()
                    except Fault as fault:
                        first = first or fault
                        continue
                    n, prompt = bodies[place]["n"], bodies[place]["prompt"]
                    done[place] = generations(reply, prompt, n, options, self._policy.eos_ids)
                    if on_finished is not None:
                        on_finished({place * n + row: one for row, one in enumerate(done[place])})
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while running := [
                future for future in left if not future.done()
            ]:  # something else failed, or it is to stop
                client.abandon()
                wait(running, timeout=LOOK_S)
        return first
