"""Laws of a reward model behind a server: the same verdicts as at home, and no score where the server fails."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from apportion.prm.model import StepModel
from apportion.prm.remote import RemoteStepRewardModel
from apportion.prm.score import StepRewardModel
from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.panel import judge
from apportion.verifiers.segmenters import Lines

TEXTS = ["12 + 7 = 19.\n19 * 3 = 57.", "", "the cat\nsat\non the mat", "ok 💩"]
SAMPLES = [Sample(f"{place} + 1 = ?", text) for place, text in enumerate(TEXTS)]
Answer = tuple[int, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any, backbones: Any, tokenizers: Any) -> str:
    path = tmp_path_factory.mktemp("prm")
    settings = {"segmenter": Lines(), "calibration": {"method": "platt", "slope": 2.0, "intercept": 0.5}}
    model = StepModel.from_backbone(backbones("llama", tokenizers()), tokenizer=tokenizers(), settings=settings)
    with torch.no_grad():
        model.model.score.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(path)
    return str(path)


@contextmanager
def server(answer: Callable[[dict[str, Any], dict[str, str]], Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on this machine that answers ``POST /pooling``; its address, and the requests that came."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers["Authorization"], **body})
            status, reply = answer(body, {"path": self.path})
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            if status == 307:
                self.send_header("Location", "http://127.0.0.1:1/pooling")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", seen
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def served(folder: str, tags: bool = False, labels: int = 2) -> Callable[[dict[str, Any], dict[str, str]], Answer]:
    """What the model itself would say, token by token, or at every token of a line end and the last."""
    model = StepModel.from_pretrained(folder)
    newline = model.tokenizer("\n")["input_ids"][0]

    def answer(body: dict[str, Any], _: dict[str, str]) -> Answer:
        assert (body["task"], body["use_activation"], body["encoding_format"]) == ("token_classify", True, "float")
        data = []
        for index, ids in enumerate(body["input"]):
            with torch.no_grad():
                chances = model.model(torch.tensor([ids])).logits[0].softmax(-1)
            if tags:
                head = ids.index(newline) + 1
                chances = chances[[i - 1 for i in range(head, len(ids)) if ids[i] == newline] + [len(ids) - 1]]
            data.append(
                {"index": index, "object": "pooling", "data": (chances if labels == 2 else chances[:, 1:]).tolist()}
            )
        return 200, {"data": data[::-1], "model": body["model"]}

    return answer


def remote(folder: str, url: str, **options: Any) -> RemoteStepRewardModel:
    return RemoteStepRewardModel(folder, url, **{"api_key_env": None, "retries": 0, **options})


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 1}, {"calibration": False}, {"aggregate": "prod"}, {"max_length": 14}]
)
def test_a_server_gives_the_verdicts_of_the_model_at_home(folder: str, options: dict[str, Any]) -> None:
    home = {name: value for name, value in options.items() if name != "batch_size"}
    expected = StepRewardModel(folder, **home)(SAMPLES)
    with server(served(folder)) as (url, seen):
        found = remote(folder, f"{url}/v1/", **options)(SAMPLES)
    assert {request["path"] for request in seen} == {"/pooling"}
    assert sum(len(request["input"]) for request in seen) == 3
    assert seen[0]["model"] == folder
    for one, two in zip(found, expected, strict=True):
        assert isinstance(one, Verdict)
        assert one.score == pytest.approx(two.score, abs=1e-5)
        assert [(s.start, s.stop, s.label) for s in one.spans] == [(s.start, s.stop, s.label) for s in two.spans]
        assert [s.score for s in one.spans] == pytest.approx([s.score for s in two.spans], abs=1e-5)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_server_may_give_results_by_step(folder: str, labels: int) -> None:
    expected = StepRewardModel(folder)(SAMPLES[:1])
    with server(served(folder, tags=True, labels=labels)) as (url, _):
        (found,) = remote(folder, url)(SAMPLES[:1])
    assert isinstance(found, Verdict)
    assert [s.score for s in found.spans] == pytest.approx([s.score for s in expected[0].spans], abs=1e-5)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((404, {"error": "no such route"}), "HTTP 404"),
        ((400, b"bad"), "HTTP 400 bad"),
        ((503, b"busy"), "HTTP 503 busy"),
        ((307, b""), "HTTP 307"),
        ((200, b"<html>"), "no JSON"),
        ((200, {}), "no reply of the pooling route"),
        ((200, []), "no reply of the pooling route"),
        ((200, {"data": []}), "no reply of the pooling route"),
        ((200, {"data": [{"index": i, "data": [[0.5, 0.5]] * 9} for i in range(3)]}), "serve it with the task"),
        ((200, {"data": [{"index": i, "data": [[-3.0, 3.0]] * 2} for i in range(3)]}), "no probability"),
    ],
)
def test_a_failing_server_is_a_fault_and_no_score(folder: str, reply: Answer, told: str) -> None:
    with server(lambda *_: reply) as (url, _):
        result = judge({"it": remote(folder, url)}, SAMPLES[:2])
    assert result.errors == {"it": 1}  # the answer without steps was never asked about
    assert told in result.first_error["it"]
    assert [row["it"] for row in result.verdicts] == [Verdict(None)] * 2


def test_a_server_out_of_reach_is_tried_again(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("apportion.prm.remote.time.sleep", pauses.append)
    whole = served(folder)
    with server(lambda body, facts: whole(body, facts) if len(pauses) == 3 else (429, b"wait")) as (url, seen):
        (found,) = remote(folder, url, retries=5)(SAMPLES[:1])
    assert isinstance(found, Verdict)
    assert (pauses, len(seen)) == ([0.5, 1.0, 2.0], 4)
    fault = remote(folder, "http://127.0.0.1:1", retries=1)(SAMPLES[:1])[0]
    assert isinstance(fault, RuntimeError)
    assert "ConnectionRefusedError" in str(fault) or "URLError" in str(fault)


def test_the_key_comes_from_the_environment_and_stays_out_of_messages(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRM_KEY", "secret-of-mine")
    with server(lambda *_: (401, b"secret-of-mine is wrong")) as (url, seen):
        fault = remote(folder, url, api_key_env="PRM_KEY", model="served")(SAMPLES[:1])[0]
    assert (seen[0]["key"], seen[0]["model"]) == ("Bearer secret-of-mine", "served")
    assert "secret" not in str(fault)
    assert "*** is wrong" in str(fault)


def test_it_travels_as_its_options_and_refuses_what_cannot_be(folder: str) -> None:
    verifier = remote(folder, "http://127.0.0.1:1")
    verifier([Sample("q", "")])
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    for options, message in (
        ({"path": "/none"}, "path=/none"),
        ({"base_url": "nowhere"}, "base_url"),
        ({"aggregate": "max"}, "aggregate=max"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"concurrency": 0}, "concurrency"),
    ):
        with pytest.raises(InputError, match=message):
            RemoteStepRewardModel(**{"path": folder, "base_url": "http://127.0.0.1:1", **options})


def test_a_model_read_by_tokens_is_not_served_so(folder: str) -> None:
    with pytest.raises(InputError, match="is read by two tokens"):
        remote(folder, "http://127.0.0.1:1", settings={"style": "tokens"})(SAMPLES)
