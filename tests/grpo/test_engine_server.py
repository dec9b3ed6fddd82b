"""A vLLM server as an engine: the same samples as at home, whatever befalls the server, or one clear line."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from apportion.grpo.checkpoint import latest_checkpoint
from apportion.grpo.engines import SamplingOptions, awake
from apportion.grpo.engines.vllm_server import ServerEngine, VLLMServer
from apportion.grpo.engines.weights import PolicyWeights
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import Generation, Interrupted, RolloutConfig, sample_groups
from apportion.verifiers import InputError

CONFIG = RolloutConfig(prompts_per_step=3, group_size=4, max_new_tokens=10, temperature=0.8)
OPTIONS = SamplingOptions.of(CONFIG)
SEEDS = [7 + 100 * row for row in range(12)]
SYNC = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
OPEN = ["/health", "/v1/models", "/server_info", "/get_world_size", "/init_weight_transfer_engine"]
Change = Callable[[dict[str, Any]], Any]


class Wires:
    """Stands in for NCCL between the two ends of a transfer, both of which wait for each other."""

    def __init__(self) -> None:
        self.by_port: dict[int, queue.Queue[Any]] = {}
        self.changed = threading.Condition()

    def open(self, init_info: dict[str, Any]) -> queue.Queue[Any]:
        assert (init_info["rank_offset"], init_info["world_size"]) == (1, 3)
        with self.changed:
            self.by_port[init_info["master_port"]] = wire = queue.Queue()
            self.changed.notify_all()
        return wire

    def join(self, port: int) -> queue.Queue[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: port in self.by_port, timeout=10)
        return self.by_port[port]


class Server:
    """Speaks the routes of ``vllm serve`` that the engine uses, and samples from a model of its own."""

    def __init__(self, policy: Policy, wires: Wires) -> None:
        self.policy, self.wires = replace(policy, model=deepcopy(policy.model)), wires
        self.log: list[str] = []
        self.prompts: list[list[int]] = []
        self.keys: set[str | None] = set()
        self.amiss: list[str] = []  # what of the run was against the order of things
        self.faults: list[Change | None] = []  # of the next requests for completions; None: none
        self.mode, self.sleeping, self.release = "processed_logprobs", False, threading.Event()
        self.lock, self.http, self.port = threading.Lock(), None, 0
        self.info: dict[str, Any] = {}
        self.restart()

    def restart(self, *_: Any) -> None:
        """As a new process would be: other weights, and no way for new ones."""
        self.wire, self.fresh = None, False
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.normal_()

    def up(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.serve({})

            def do_POST(self) -> None:
                self.serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def serve(self, body: dict[str, Any]) -> None:
                server.keys.add(self.headers["Authorization"])
                status, reply = server.answer(self.path, body)
                if status:
                    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                    with suppress(OSError):  # nobody waits for it any more
                        self.send_response(status)
                        self.send_header("Content-Length", str(len(data)))
                        self.end_headers()
                        self.wfile.write(data)
                self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads, self.dead = True, False
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def down(self) -> None:
        self.dead = True
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None
            self.restart()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        with self.lock:
            self.log.append(path + (f"?{query}" if path in ("/sleep", "/wake_up") else ""))
        routes: dict[str, Callable[[], Any]] = {
            "/health": lambda: b"",
            "/v1/models": lambda: {"data": [{"id": "served"}]},
            "/server_info": lambda: {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}},
            "/get_world_size": lambda: {"world_size": 2},
            "/is_sleeping": lambda: {"is_sleeping": self.sleeping},
            "/sleep": lambda: self.sleep(),
            "/wake_up": lambda: self.wake(),
            "/init_weight_transfer_engine": lambda: self.init(body["init_info"]),
            "/start_weight_update": dict,
            "/update_weights": lambda: self.update(body["update_info"]),
            "/finish_weight_update": dict,
            "/reset_prefix_cache": lambda: b"",
            "/v1/completions": lambda: self.complete(body),
        }
        if path not in routes:
            return 404, {"detail": "Not Found"}
        reply = routes[path]()
        return reply if isinstance(reply, tuple) else (200, reply)

    def init(self, init_info: dict[str, Any]) -> Any:
        self.info = init_info
        self.wire = self.wires.join(init_info["master_port"])
        return {"message": "Weight transfer initialized"}

    def update(self, update_info: dict[str, Any]) -> Any:
        if self.wire is None:
            return 500, {"error": "not initialized"}
        self.info |= {"update": sorted(update_info)}
        own = dict(self.policy.model.named_parameters())
        for name, dtype, shape in zip(*(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True):
            value = self.wire.get(timeout=10)
            assert (str(value.dtype), list(value.shape)) == (f"torch.{dtype}", shape)
            with torch.no_grad():
                own.pop(name).copy_(value)
        self.fresh = not own
        return {"message": "Weights updated"}

    def sleep(self) -> Any:
        self.sleeping, self.fresh = True, False
        return b""

    def wake(self) -> Any:
        self.sleeping = self.log[-1] != "/wake_up?tags=kv_cache"
        return b""

    def complete(self, body: dict[str, Any]) -> Any:
        with self.lock:
            if self.dead:
                return 0, None
            if not self.fresh or self.sleeping:
                self.amiss.append("asked for completions without the policy's weights")
            self.prompts.append(body["prompt"])
            fault = self.faults.pop(0) if self.faults else None
            reply = self.sampled(body)
        if fault is not None:
            return fault(reply)
        return reply

    def sampled(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["model"], body["logprobs"], body["ignore_eos"]) == ("served", 0, True)
        assert tuple(body["stop_token_ids"]) == self.policy.eos_ids
        made = sample_groups(
            self.policy,
            [body["prompt"]],
            [(body["seed"] or 0) + row for row in range(body["n"])],
            group_size=body["n"],
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
        )
        return {"choices": [self.choice(row, one, body) for row, one in enumerate(made)]}

    def choice(self, row: int, one: Generation, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": row,
            "text": "?",
            "finish_reason": "length" if len(one.ids) == body["max_tokens"] else "stop",
            "prompt_token_ids": body["prompt"],
            "token_ids": one.ids,
            "logprobs": {"tokens": [f"token_id:{id}" for id in one.ids], "token_logprobs": one.logprobs},
        }


@pytest.fixture(params=["0.28", "0.22"])
def wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wires:
    """The trainer's side of vLLM, as it is since 0.28 or was before."""
    wires, base = Wires(), "vllm.distributed.weight_transfer"

    def send(iterator: Any, group: Any, **_: Any) -> None:
        for _, value in iterator:
            group.put(value.clone())

    old = SimpleNamespace(trainer_init=wires.open, trainer_send_weights=lambda items, args: send(items, args["group"]))
    contents = {
        f"{base}.nccl_engine": {"NCCLWeightTransferEngine": old if request.param == "0.22" else SimpleNamespace()},
        f"{base}.nccl_common": {"trainer_init": wires.open},
        f"{base}.packed_tensor": {"packed_nccl_broadcast_producer": send},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    }
    for name in ("vllm", "vllm.utils", "vllm.distributed", base, *contents):
        module = ModuleType(name)
        module.__dict__.update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return wires


@pytest.fixture
def server(policy: Policy, wires: Wires) -> Iterator[Server]:
    server = Server(policy, wires)
    server.up()
    yield server
    server.release.set()
    server.down()
    assert server.amiss == []


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are written down, and not waited for."""
    pauses: list[float] = []
    monkeypatch.setattr("apportion.grpo.engines.session.time.sleep", pauses.append)
    return pauses


only_new = pytest.mark.parametrize("wires", ["0.28"], indirect=True)


def started(server: Server, policy: Policy, rollout: RolloutConfig = CONFIG, **options: Any) -> ServerEngine:
    engine = VLLMServer(server.url, **{"retries": 3, "timeout_s": 20.0, **options}).start(policy, rollout)
    engine.sync(PolicyWeights(policy.model))
    return engine


def at_home(policy: Policy, prompts: list[list[int]]) -> list[Generation]:
    seeds = [SEEDS[row - row % 4] + row % 4 for row in range(12)]
    return sample_groups(policy, prompts, seeds, group_size=4, max_new_tokens=10, temperature=0.8)


def near(one: list[Generation], other: list[Generation]) -> None:
    assert [each.ids for each in one] == [each.ids for each in other]
    for left, right in zip(one, other):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_a_server_gives_the_samples_of_the_policy_of_the_moment(
    server: Server, policy: Policy, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    engine = started(server, policy)
    assert server.log == OPEN + SYNC
    finished: dict[int, Generation] = {}
    near(engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS, on_finished=finished.update), at_home(policy, prompts))
    assert sorted(finished) == list(range(12))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    with awake(engine, policy):
        near(engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS), at_home(policy, prompts))
    greedy = engine.generate(prompts, 1, SamplingOptions(6, 0), row_seeds=[0] * 3)
    near(greedy, sample_groups(policy, prompts, [0] * 3, group_size=1, max_new_tokens=6, temperature=0))
    assert server.log == [*OPEN, *SYNC, *["/v1/completions"] * 3, *SYNC, *["/v1/completions"] * 6]
    told = {"names", "dtype_names", "shapes"}
    packed_at_init = "0.28" in request.node.name
    assert ("packed" in server.info, set(server.info["update"])) == (
        packed_at_init,
        told if packed_at_init else told | {"packed"},
    )


def late(server: Server) -> Change:
    def answer(reply: Any) -> Any:
        server.release.wait(20)
        return reply

    return answer


@only_new
@pytest.mark.parametrize("kind", ["busy", "broken", "cut", "garbage", "late", "restarted"])
def test_a_fault_that_passes_changes_nothing(
    server: Server, policy: Policy, prompts: list[list[int]], pauses: list[float], kind: str
) -> None:
    engine = started(server, policy, timeout_s=0.5 if kind == "late" else 20.0, concurrency=1)
    faults: dict[str, Change] = {
        "busy": lambda reply: (503, b"busy"),
        "broken": lambda reply: (500, b"EngineDeadError"),
        "cut": lambda reply: (0, None),
        "garbage": lambda reply: b'{"choices": [{"index": 0, "tex',
        "late": late(server),
        "restarted": lambda reply: (0, server.restart()),
    }
    server.faults = [None, faults[kind], None] if kind != "restarted" else [None, None, faults[kind]]
    del server.log[:]
    found = engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)
    near(found, at_home(policy, prompts))
    again = OPEN + SYNC  # the server may have been started anew: it gets the weights before it is asked again
    assert server.log == [*["/v1/completions"] * 3, *again, "/v1/completions"]
    assert server.prompts == [*prompts, prompts[1 if kind != "restarted" else 2]]
    assert sum(pauses) == pytest.approx(0.5)


@only_new
def test_a_server_that_dies_is_waited_for_and_gets_the_weights_when_it_is_back(
    server: Server, policy: Policy, prompts: list[list[int]], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(server, policy, retries=5)
    server.faults = [lambda reply: (0, None)] * 3
    monkeypatch.setattr("apportion.grpo.engines.session.time.sleep", lambda s: pauses.append(s) or revive())

    def revive() -> None:
        if sum(pauses) < 0.5:
            server.down()
        elif server.http is None and sum(pauses) > 4:
            server.up()

    near(engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS), at_home(policy, prompts))
    assert sum(pauses) == pytest.approx(0.5 + 1 + 2 + 4)
    server.down()
    pauses.clear()
    engine.sync(PolicyWeights(policy.model))  # so is it between two calls
    near(engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS), at_home(policy, prompts))


@only_new
def test_a_server_that_stays_dead_is_one_clear_line(
    server: Server, policy: Policy, prompts: list[list[int]], pauses: list[float]
) -> None:
    engine = started(server, policy)
    server.down()
    for ask in (
        lambda: engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS),
        lambda: engine.sync(PolicyWeights(policy.model)),
        lambda: VLLMServer(server.url, retries=3).start(policy, CONFIG),
    ):
        pauses.clear()
        with pytest.raises(InputError) as caught:
            ask()
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"engine.base_url={server.url}: /")
        assert str(caught.value).endswith(
            "ConnectionRefusedError: [Errno 111] Connection refused (4 tries); start the server again, then repeat "
            "the command: the run goes on from its last checkpoint"
        )
        assert sum(pauses) == pytest.approx(0.5 + 1 + 2)


def changed(**facts: Any) -> Change:
    def change(reply: Any) -> Any:
        for choice in reply["choices"]:
            choice.update(facts)
        return reply

    return change


def spelled(reply: Any) -> Any:
    for choice in reply["choices"]:
        choice["logprobs"]["tokens"] = ["the", "cat"]
    return reply


@only_new
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda reply: {"choices": reply["choices"][:3]}, "3 completions for a prompt, where 4 were asked for"),
        (lambda reply: {"choices": [*reply["choices"], reply["choices"][0]]}, "5 completions for a prompt, where 4"),
        (changed(index=0), "completions without their numbers"),
        (changed(logprobs=None), "without log-probabilities; vLLM gives them for logprobs=0"),
        (changed(prompt_token_ids=[1, 2, 3]), "read another prompt than the"),
        (changed(token_ids=[5]), "two different lists of the tokens"),
        (changed(finish_reason="abort"), "ended for the reason 'abort'"),
        (spelled, "tokens that are not named by their ids"),
        (lambda reply: {"error": "?"}, "no reply of /v1/completions"),
        (lambda reply: (400, b"prompt is too long"), "HTTP 400 prompt is too long; see the log of the server"),
        (lambda reply: (404, b"Not Found"), "HTTP 404 Not Found; it needs vLLM 0.22 or later, started by VLLM_SERVER"),
        (lambda reply: (401, b"no"), "HTTP 401 no; is engine.api_key_env right?"),
    ],
)
def test_what_trying_again_would_not_mend_is_told_at_once(
    server: Server, policy: Policy, prompts: list[list[int]], pauses: list[float], fault: Any, words: str
) -> None:
    engine = started(server, policy)
    server.faults = [fault] * 9
    with pytest.raises(InputError) as caught:
        engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"engine.base_url={server.url}: ")
    assert "\n" not in str(caught.value)
    assert pauses == []


@only_new
def test_a_stop_breaks_off_what_the_server_still_works_on(
    server: Server, policy: Policy, prompts: list[list[int]]
) -> None:
    engine = started(server, policy, concurrency=2)
    server.faults = [late(server)] * 3
    with pytest.raises(Interrupted):
        engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS, should_stop=lambda: len(server.prompts) == 2)
    assert len(server.prompts) == 2  # the third was not sent any more
    assert not [each for each in threading.enumerate() if each.name.startswith("rollouts")]


@only_new
def test_a_server_that_shares_the_gpu_sleeps_while_the_policy_learns(
    server: Server, policy: Policy, prompts: list[list[int]]
) -> None:
    engine = started(server, policy, sleep_level=2)
    engine.sleep()
    del server.log[:]
    for _ in range(2):
        with awake(engine, policy):
            near(engine.generate(prompts[:1], 4, OPTIONS, row_seeds=SEEDS[:4]), at_home(policy, prompts)[:4])
    cycle = ["/wake_up?tags=weights", *SYNC, "/wake_up?tags=kv_cache", "/v1/completions", "/sleep?level=2"]
    assert server.log == cycle * 2
    with pytest.raises(RuntimeError, match="generate before sync"):
        engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)


@only_new
def test_log_probabilities_of_another_distribution_are_refused(server: Server, policy: Policy) -> None:
    server.mode = "raw_logprobs"
    with pytest.raises(InputError, match=r"gives raw_logprobs.*--logprobs-mode processed_logprobs"):
        started(server, policy)
    started(server, policy, replace(CONFIG, temperature=1.0))  # there the two are the same


@only_new
def test_a_transfer_of_which_one_end_is_gone_ends_the_run(
    server: Server, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(server, policy)
    monkeypatch.setattr("apportion.grpo.engines.transfer.GRACE_S", 0.1)
    module = sys.modules["vllm.distributed.weight_transfer.packed_tensor"]
    hang = threading.Event()
    monkeypatch.setattr(module, "packed_nccl_broadcast_producer", lambda **_: hang.wait(20))
    monkeypatch.setattr(server, "update", lambda info: (500, b"EngineDeadError"))
    with pytest.raises(
        InputError, match=r"the transfer of weights hangs \(/update_weights: HTTP 500 EngineDeadError\)"
    ):
        engine.sync(PolicyWeights(policy.model))
    hang.set()


@only_new
def test_a_failed_transfer_is_tried_again(server: Server, policy: Policy, pauses: list[float]) -> None:
    engine = started(server, policy)
    server.restart()
    module = sys.modules["vllm.distributed.weight_transfer.packed_tensor"]
    whole, calls = module.packed_nccl_broadcast_producer, []

    def failing(**options: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("NCCL error: remote process exited")
        whole(**options)

    module.packed_nccl_broadcast_producer = failing
    engine.sync(PolicyWeights(policy.model))
    assert len(calls) == 2
    assert sum(pauses) == pytest.approx(0.5)
    for own, other in zip(policy.model.parameters(), server.policy.model.parameters(), strict=True):
        assert torch.equal(own, other)


@only_new
def test_the_key_comes_from_the_environment_and_stays_out_of_messages(
    server: Server, policy: Policy, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "secret-of-mine")
    engine = started(server, policy, api_key_env="ROLLOUT_KEY")
    server.faults = [lambda reply: (403, b"secret-of-mine is wrong")] * 3
    with pytest.raises(InputError, match=r"HTTP 403 \*\*\* is wrong"):
        engine.generate(prompts, 4, OPTIONS, row_seeds=SEEDS)
    assert server.keys == {"Bearer secret-of-mine"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "nowhere"}, "base_url"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"retries": -1}, "retries"),
        ({"sleep_level": 3}, "engine.sleep_level=3"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VLLMServer(**options)


def test_a_trainer_without_vllm_or_cuda_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"needs the package vllm here too; pip install 'apportion\[vllm\]'"):
        VLLMServer().prepare()


RUN: dict[str, Any] = {
    "rollout": {"temperature": 0.8},
    "loss": {"importance_cap": 2.0},
    "config": {"steps": 4, "save_every": 1, "eval_every": 2, "rollouts_every": 1},
}


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@only_new
def test_a_run_on_a_server_that_dies_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    server: Server, new_run: Any, new_policy: Any, tmp_path: Path, pauses: list[float]
) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=3, max_new_tokens=8, temperature=0.8)

    def run(folder: Path) -> Any:
        policy = new_policy()
        engine = VLLMServer(server.url, retries=2, timeout_s=20.0).start(policy, rollout)
        return new_run(folder, policy=policy, engine=engine, **RUN)

    straight = run(tmp_path / "straight")
    assert straight.train() == "finished"
    for row in straight.rows[1:]:  # measured at every step, and next to nothing where both compute the same
        assert row["sampling/logprob_gap"] < 1e-4
        assert row["sampling/importance_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["policy/ratio_max"] < 3

    def dies(reply: Any) -> tuple[int, None]:
        server.dead = True
        threading.Thread(target=server.down).start()
        return 0, None

    broken = run(tmp_path / "broken")
    asked = len(server.prompts)
    per_step = (asked - 6 * 3 - 4 * 3) // 4  # besides three evaluations, of six held-out problems and four others
    server.faults = [*[None] * (10 + 2 * per_step), dies]
    with pytest.raises(InputError, match=r"\(3 tries\); start the server again, then repeat the command"):
        broken.train()
    assert broken.status["state"] == "failed"
    step = broken.trainer.state.step
    assert 0 < step < 4
    newest = latest_checkpoint(tmp_path / "broken" / "checkpoints")
    assert newest is not None
    assert newest.name.startswith(f"step_{step:06d}")
    server.faults = []
    server.up()
    mended = run(tmp_path / "broken")
    assert mended.train() == "finished"
    assert without_times(mended.rows) == without_times(straight.rows)
    assert all(torch.equal(value, straight.weights[name]) for name, value in mended.weights.items())


@only_new
def test_weights_bring_back_what_a_sampler_beside_the_policy_takes_away(
    server: Server, new_run: Any, new_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose kernels are off: the ratio of the first update is 1 all the same, and the gap is told."""
    whole = server.update

    def off(info: dict[str, Any]) -> Any:
        told = whole(info)
        with torch.no_grad():
            server.policy.model.lm_head.weight.mul_(1.3)
        return told

    monkeypatch.setattr(server, "update", off)
    policy = new_policy()
    rollout = RolloutConfig(prompts_per_step=2, group_size=3, max_new_tokens=8, temperature=0.8)
    engine = VLLMServer(server.url, retries=0).start(policy, rollout)
    run = new_run(tmp_path, policy=policy, engine=engine, optim={"minibatches": 1}, **RUN)
    run.train()
    for row in run.rows[1:]:
        assert row["sampling/logprob_gap"] > 0.01
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert 0 < row["sampling/importance_ess"] < 1
