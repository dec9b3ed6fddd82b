"""Where a language model is reached and how it is asked; the key comes from the environment and stays there."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from .errors import InputError

__all__ = ["Endpoint", "endpoint_of"]

_OPENAI = "https://api.openai.com/v1"
_LONGEST_PAUSE = 8.0  # seconds; the client library's own pauses between tries grow up to this
_SHORTEST_SECRET = 8  # characters; what is shorter is a placeholder ("EMPTY") and may stand in any text


@dataclass(frozen=True)
class Endpoint:
    """Where to ask and how.

    Args:
        model: the name that the server knows it by, which also keeps cached replies apart; None takes the only one that
            the server offers.
        base_url: such as ``http://localhost:8000/v1``; None is OpenAI's.
        api_key_env: environment variable that holds the key; None for a server that needs none. A server on this
            machine is also asked without a key.
        temperature, max_tokens: of the reply; None leaves them out of the request.
        seed: sent with every question, plus the question's number among those of the same text; None sends none.
        extra_body: further members of the request.
        concurrency: most questions at once.
        timeout_s: longest wait for a sign of life in one try, in seconds. All tries together, with the pauses between
            them, get as many times that and 8 seconds for each pause.
        retries: further tries where the server is out of reach, busy (429) or broken (5xx). The pauses grow from half a
            second to 8, or are what the server asks for (Retry-After).
        reasks: further questions where a reply is of no use.
        cache: SQLite file of usable replies on a local disk, which several processes may share; None keeps none.
    """

    model: str | None
    base_url: str | None
    api_key_env: str | None = "OPENAI_API_KEY"
    temperature: float | None = 0.0
    max_tokens: int | None = 1024
    seed: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 16
    timeout_s: float = 60.0
    retries: int = 3
    reasks: int = 1
    cache: str | None = None

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.concurrency < 1:
            raise InputError(f"concurrency: {self.concurrency} questions at once; give 1 or more")
        if not 0 < self.timeout_s < math.inf:
            raise InputError(f"timeout_s: {self.timeout_s}; give a number of seconds over 0")
        for name in ("retries", "reasks"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: {getattr(self, name)}; give 0 or more")
        try:
            json.dumps(dict(self.extra_body))
        except (TypeError, ValueError) as error:
            raise InputError(f"extra_body: cannot be sent as JSON ({error})") from None
        self.key()

    @property
    def url(self) -> str:
        """Where the requests go."""
        return _OPENAI if self.base_url is None else self.base_url

    @property
    def host(self) -> str:
        """The server's name and port, for messages."""
        return urlsplit(self.url).netloc

    @property
    def total_s(self) -> float:
        """Longest that one question may take with all its tries, in seconds."""
        return (self.retries + 1) * self.timeout_s + self.retries * _LONGEST_PAUSE

    def without_key(self, text: str) -> str:
        """The text with ``***`` for the key."""
        key = self.key()
        return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text

    def key(self) -> str:
        """The key, from the environment; empty where none is needed."""
        if self.api_key_env is None:
            return ""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):  # not shown: it may be the key
            raise InputError("api_key_env: give the name of an environment variable, such as OPENAI_API_KEY")
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InputError(f"api_key_env: the value of {self.api_key_env} is no key; it must be printable ASCII")
        if key and self.url.startswith("http://") and not _is_local(self.url):
            raise InputError(
                f"base_url: {self.host} would get the key of {self.api_key_env} unencrypted; use https, or give "
                "api_key_env=null for a server that needs none"
            )
        if not key and not _is_local(self.url):
            raise InputError(
                f"api_key_env: the environment variable {self.api_key_env} is not set; set it to the key of "
                f"{self.host}, or give api_key_env=null for a server that needs none"
            )
        return key


def endpoint_of(options: object) -> Endpoint:
    """The endpoint described by those fields of ``options`` that bear the names of its own."""
    return Endpoint(**{option.name: getattr(options, option.name) for option in fields(Endpoint)})


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        known = False
    if "@" in url:  # not shown: it may hold a password
        raise InputError("base_url: holds a user name or password; give the key by api_key_env instead")
    if not known:
        raise InputError(f"base_url: {url!r} is no address; give one such as http://localhost:8000/v1")


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
