"""A language model's server that does as it is told: real HTTP on this machine, replies and faults by script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Answer:
    """What goes over the wire.

    Args:
        body: sent as it stands.
        status, headers: of the answer.
        missing: bytes that the header promises beyond the body; then the connection ends.
        hangs: "before" the first byte or "within" the body, until the server is closed.
    """

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: int = 0
    hangs: str = ""


def say(text: object, finish: str | None = "stop", **members: Any) -> Answer:
    """A chat completion with this reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return Answer(json.dumps(body | members).encode())


def fail(status: int, message: str = "no", **headers: str) -> Answer:
    """A refusal; the names of headers with ``_`` for ``-``."""
    body = json.dumps({"error": {"message": message}}).encode()
    return Answer(body, status, {name.replace("_", "-"): value for name, value in headers.items()})


class ChatServer(ThreadingHTTPServer):
    """Speaks ``/v1/chat/completions`` and ``/v1/models``.

    Attributes:
        script: gives the answer to a request's body and its number among all, from 0.
        models: names that it offers.
        requests, headers: of the chats so far, in the order of their arrival; names of headers in small letters.
        most_at_once: the greatest number of chats under way at the same time.
        meeting: where set, every chat waits there for the others.
    """

    daemon_threads = True
    request_queue_size = 128

    say = staticmethod(say)
    fail = staticmethod(fail)
    Answer = Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.script: Callable[[dict[str, Any], int], Answer] = lambda body, number: say(
            '{"score": 1, "wrong_steps": []}'
        )
        self.models = ["little-judge"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self.meeting: threading.Barrier | None = None
        self.closing = threading.Event()
        self._now = 0
        self._lock = threading.Lock()

    def in_order(self, *answers: Answer | str) -> None:
        """Give these answers one after the other, the last one for ever."""
        fixed = [say(answer) if isinstance(answer, str) else answer for answer in answers]
        self.script = lambda body, number: fixed[min(number, len(fixed) - 1)]

    def by_text(self, answers: Mapping[str, Answer | str]) -> None:
        """Give the answer whose key stands in what is asked."""
        fixed = {key: say(answer) if isinstance(answer, str) else answer for key, answer in answers.items()}
        self.script = lambda body, number: next(fixed[key] for key in fixed if key in body["messages"][1]["content"])

    def chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        if self.meeting is not None:
            with suppress(threading.BrokenBarrierError):
                self.meeting.wait(timeout=5)
        answer = self.script(body, number)
        with self._lock:
            self._now -= 1
        return answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no fault here."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in self.server.models]
        self._send(Answer(json.dumps({"object": "list", "data": models}).encode()))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(self.server.chat(body, self.headers))

    def _send(self, answer: Answer) -> None:
        if answer.hangs == "before":
            self.server.closing.wait(10)
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body) + answer.missing))
        self.end_headers()
        if answer.hangs == "within":
            for byte in answer.body:  # never silent for long, and never done
                self.wfile.write(bytes([byte]))
                if self.server.closing.wait(0.01):
                    break
        else:
            self.wfile.write(answer.body)
        self.close_connection = bool(answer.missing or answer.hangs)

    def log_message(self, *_: object) -> None:
        pass


def running() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    yield from running()


@pytest.fixture(scope="session")
def willing_server() -> Iterator[ChatServer]:
    yield from running()


@pytest.fixture(autouse=True)
def no_other_server(willing_server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is configured from the environment finds a server that is pleased with everything, and nobody's key."""
    monkeypatch.setenv("OPENAI_BASE_URL", willing_server.url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
