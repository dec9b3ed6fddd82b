"""Puts questions to a language model behind an OpenAI-compatible endpoint: many at once, patiently, each only once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .endpoint import Endpoint
from .errors import InputError
from .panel import awaited

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Ask", "ChatError", "ask_all"]

Value = TypeVar("Value")
Message = tuple[str, str]

_CUT_OFF = ("length", "content_filter")
_STATS_LOCK = threading.Lock()


class ChatError(RuntimeError):
    """An endpoint that could not be reached, or refused, or answered in no known form; one line, without the key."""


@dataclass(frozen=True)
class Ask(Generic[Value]):
    """One question. Two with the same messages and number are one and get the same answer.

    Args:
        messages: (role, text) pairs.
        read: the value of a reply, None where it is of no use.
        reminder: what is said to the model after a reply of no use.
        number: tells questions of the same text apart, each of which is to be sampled.
    """

    messages: tuple[Message, ...]
    read: Callable[[str], Value | None] = field(compare=False)
    reminder: str = field(compare=False)
    number: int = 0


def ask_all(
    endpoint: Endpoint, asks: Sequence[Ask[Value]], stats: Counter[str] | None = None
) -> list[Value | ChatError | None]:
    """The values of the replies in order: None where none was of use, a ChatError where the endpoint failed.

    Args:
        endpoint: the model.
        asks: the questions.
        stats: where to add the numbers of ``calls``, ``cached``, ``unusable`` replies, ``prompt_tokens`` and
            ``completion_tokens``.
    """
    counts: Counter[str] = Counter()
    answers = awaited(_ask_all(endpoint, list(dict.fromkeys(asks)), counts)) if asks else {}
    if stats is not None:
        with _STATS_LOCK:
            stats.update(counts)
    return [answers[ask] for ask in asks]


async def _ask_all(
    endpoint: Endpoint, asks: Sequence[Ask[Value]], counts: Counter[str]
) -> dict[Ask[Value], Value | ChatError | None]:
    with _open_cache(endpoint.cache) as cache:
        async with _open_client(endpoint) as client:
            model = endpoint.model or await _only_model(endpoint, client)
            if isinstance(model, ChatError):
                return dict.fromkeys(asks, model)
            slots = asyncio.Semaphore(endpoint.concurrency)
            conversation = _Conversation(endpoint, client, model, cache, slots, counts)
            return dict(zip(asks, await asyncio.gather(*map(conversation.answer, asks))))


@dataclass(frozen=True)
class _Conversation:
    """All that a question needs on its way."""

    endpoint: Endpoint
    client: AsyncOpenAI
    model: str
    cache: sqlite3.Connection
    slots: asyncio.Semaphore
    counts: Counter[str]

    async def answer(self, ask: Ask[Value]) -> Value | ChatError | None:
        from openai import OpenAIError

        try:
            return await self._answer(ask)
        except (OpenAIError, TimeoutError, sqlite3.Error) as fault:
            # Not chained: the fault holds the request with its headers.
            return _in_words(self.endpoint, fault)

    async def _answer(self, ask: Ask[Value]) -> Value | ChatError | None:
        body = self._body(ask)
        key = hashlib.sha256(json.dumps([body, ask.number], sort_keys=True).encode()).hexdigest()
        row = self.cache.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        value = ask.read(row[0]) if row else None
        if value is not None:
            self.counts["cached"] += 1
            return value
        messages, reply = body["messages"], None
        for _ in range(self.endpoint.reasks + 1):
            async with self.slots:
                reply = await self._reply({**body, "messages": messages})
            value = ask.read(reply[0]) if reply and reply[1] else None
            if value is not None and reply:
                self.cache.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply[0]))
                return value
            self.counts["unusable"] += 1
            if reply:
                said = [_message("assistant", reply[0] or "(nothing)"), _message("user", ask.reminder)]
                messages = [*body["messages"], *said]
        return None if reply else ChatError(f"{self.endpoint.host}: what the server sends is no chat completion")

    def _body(self, ask: Ask[Value]) -> dict[str, Any]:
        endpoint = self.endpoint
        sampling = {
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_tokens,
            "seed": None if endpoint.seed is None else endpoint.seed + ask.number,
        }
        return {
            "model": self.model,
            "messages": [_message(role, text) for role, text in ask.messages],
            **{name: value for name, value in sampling.items() if value is not None},
            "extra_body": dict(endpoint.extra_body),
        }

    async def _reply(self, body: Mapping[str, Any]) -> tuple[str, bool] | None:
        """The text of a reply and whether it was said to the end; None where the server sent something else."""
        self.counts["calls"] += 1
        async with asyncio.timeout(self.endpoint.total_s):
            try:
                completion: Any = await self.client.chat.completions.create(**body)
                choice = completion.choices[0]
                text, finish = choice.message.content, choice.finish_reason
            except (AttributeError, IndexError, TypeError, ValueError):  # the library hands on what it cannot read
                return None
        for name in ("prompt_tokens", "completion_tokens"):
            count = getattr(getattr(completion, "usage", None), name, None)
            self.counts[name] += count if isinstance(count, int) else 0
        reply = _plain(text) if isinstance(text, str) else ""
        return self.endpoint.without_key(reply), finish not in _CUT_OFF


def _open_client(endpoint: Endpoint) -> AsyncOpenAI:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise InputError("a judge needs the package openai; pip install 'apportion[judge]'") from None
    return AsyncOpenAI(
        api_key=endpoint.key() or "none",
        base_url=endpoint.url,
        timeout=endpoint.timeout_s,
        max_retries=endpoint.retries,
    )


async def _only_model(endpoint: Endpoint, client: AsyncOpenAI) -> str | ChatError:
    from openai import OpenAIError

    try:
        async with asyncio.timeout(endpoint.total_s):
            names = [str(model.id) for model in (await client.models.list()).data]
    except (OpenAIError, TimeoutError) as fault:
        return _in_words(endpoint, fault)
    except (AttributeError, TypeError, ValueError):
        names = []
    if len(names) == 1:
        return names[0]
    return ChatError(
        f"model: {endpoint.host} offers {', '.join(names[:5]) or 'no list of models'}; give the name of one"
    )


def _in_words(endpoint: Endpoint, fault: Exception) -> ChatError:
    """The fault on one line that holds no key, even where the server sends it back."""
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(fault, APITimeoutError | TimeoutError):
        words = f"no answer within {endpoint.timeout_s:g} s"
    elif isinstance(fault, APIStatusError):
        remedy = f" (is {endpoint.api_key_env} right?)" if fault.status_code in (401, 403) else ""
        words = f"status {fault.status_code}, {fault.message}{remedy}"
    elif isinstance(fault, APIConnectionError):
        words = f"cannot be reached, {fault.__cause__ or fault}; start the server there, or set base_url"
    elif isinstance(fault, sqlite3.Error):
        words = f"the reply cannot be kept in {endpoint.cache}, {fault}"
    else:
        words = f"{type(fault).__name__}, {fault}"
    line = endpoint.without_key(" ".join(words.split()))
    return ChatError(f"{endpoint.host}: {line[:300]}{f' ({endpoint.retries} retries)' if endpoint.retries else ''}")


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": _plain(text)}


def _plain(text: str) -> str:
    """The text with ``?`` for lone surrogates, which can be neither sent nor kept."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def _open_cache(path: str | None) -> Iterator[sqlite3.Connection]:
    """The table of replies; in memory without a path. Every reply is a transaction, readers never wait for a writer."""
    name = ":memory:" if path is None else str(Path(path).expanduser())
    try:
        if path is not None:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(name, timeout=30, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"cache: {path} cannot be used ({error}); give another path, or cache=null") from None
    try:
        yield connection
    finally:
        connection.close()
