"""Requests to a vLLM server that can be abandoned at any moment."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ...verifiers.endpoint import Endpoint

__all__ = ["Client", "Fault", "Refused"]

BUSY = (408, 429)  # and every 5xx: another try may help


class Fault(Exception):
    """A request failed in a way that another try may mend: out of reach, late, busy, broken, or no JSON."""


class Refused(Exception):
    """The server refuses the request, and would refuse it again.

    Args:
        status: of HTTP.
        words: what it says of it.
    """

    def __init__(self, path: str, status: int, words: str) -> None:
        super().__init__(f"{path}: HTTP {status} {words}".rstrip())
        self.status = status


class Client:
    """One try a request, and nothing kept between them.

    Args:
        endpoint: where the server is, its key, and the longest wait for a sign of life.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """The JSON at ``path``, or None for an empty reply."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What ``path`` replies to a JSON body, or None for an empty reply."""
        return self._ask("POST", path, json.dumps({} if body is None else body).encode())

    def abandon(self) -> None:
        """Break off the requests of other threads; the server stops working on them."""
        with self._lock:
            sockets = [connection.sock for connection in self._open if connection.sock is not None]
        for each in sockets:
            with suppress(OSError):  # it has just ended by itself
                each.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, data: bytes | None) -> Any:
        status, reply = self._exchange(method, path, data)
        if status != 200:
            words = self._endpoint.without_key(" ".join(reply[:300].decode(errors="replace").split()))
            if status in BUSY or status >= 500:
                raise Fault(f"{path}: HTTP {status} {words}".rstrip())
            raise Refused(path, status, words)
        if not reply.strip():
            return None
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise Fault(f"{path}: a reply that is no JSON ({error})") from None

    def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        url, key = urlsplit(self._endpoint.url), self._endpoint.key()
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self._endpoint.timeout_s)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        with self._lock:
            self._open.add(connection)
        try:
            connection.request(method, url.path.rstrip("/").removesuffix("/v1") + path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError:
            raise Fault(f"{path}: no answer within {self._endpoint.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Fault(f"{path}: {type(error).__name__}: {error}") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
