"""How two processes that do not trust each other call one another: plain data by copy, all else by reference.

Runs inside the sandbox on both sides, so it uses the standard library only. The tests live in one process, the
answer's code in another. A call sends copies of its arguments and gets a copy of the result; lists, dicts and sets
among the arguments are brought up to date in place afterwards. What is no plain data (functions, objects, classes)
stays where it is and is stood for by a :class:`~.sandbox_remote.Remote`.
"""

from __future__ import annotations

import builtins
import importlib
import json
import socket
import sys
import types
from typing import Any

from .sandbox_data import PLAIN, REBUILT, bare, contents, exception_class, fill, is_public, line_of
from .sandbox_remote import DEEDS, Remote, RemoteCallable, drive, like

__all__ = ["ENDED", "Closed", "Peer", "Uncrossable"]

MESSAGE_BYTES = 1 << 26
ENDED = "the process ended"
_WIDE = 1 << 53


class Closed(BaseException):
    """The other side is gone, or sent what is no message. No test's ``except Exception`` may catch it."""


class Uncrossable(BaseException):
    """The tests hand over what cannot be handed over; no fault of the answer's."""


class _Memo(list):
    """The containers of one exchange in the order they were met, so that both sides number them alike."""

    def __init__(self) -> None:
        super().__init__()
        self.number: dict[int, int] = {}

    def append(self, container: Any) -> None:
        self.number[id(container)] = len(self)
        super().append(container)


class Peer:
    """One end of the line.

    Args:
        line: the connected socket.
        guard: name of the only module whose objects the other side may look into; None where it may see all. The
            side that holds the tests has a guard, the side that runs the answer has none.
    """

    def __init__(self, line: socket.socket, guard: str | None) -> None:
        self.line, self.guard = line, guard
        self.received = bytearray()
        self.exports: list[Any] = []
        self.export_of: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}
        self.error_line: tuple[BaseException, int | None] | None = None  # last exception from afar, its line there
        self.broken: str | None = None
        self.uncrossable: str | None = None

    def request(self, deed: str, *operands: Any) -> Any:
        """Ask the other side and serve its own questions until the answer comes."""
        memo = _Memo()
        self._send(["ask", deed, [self.encode(operand, memo) for operand in operands]])
        while (message := self._receive())[0] == "ask":
            self._serve(message)
        try:
            for container, state in zip(list(memo), message[1]):
                fill(container, [self.decode(item, memo) for item in state])
            if message[0] == "value":
                return self.decode(message[2], memo)
            error = self._exception(message[2])
        except (
            ArithmeticError,
            AttributeError,
            ImportError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as fault:
            raise self._close(f"no value: {fault}") from None
        # An iterator of the tests that calls the answer, such as a map, would take it for its own end.
        if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit) and operands[1:2] != ("__next__",):
            raise RuntimeError(f"the answer raised {type(error).__name__}") from None
        raise error

    def serve(self) -> None:
        """Answer questions for ever."""
        while True:
            self._serve(self._receive())

    def _serve(self, message: list[Any]) -> None:
        memo = _Memo()
        try:
            if self.guard is not None and message[2][0][0] != "yours":
                raise TypeError("only what was handed over can be asked for anything")
            operands = [self.decode(operand, memo) for operand in message[2]]
            held = list(memo)
            result = DEEDS[message[1]](self, *operands)
            states = [[self.encode(item, memo) for item in contents(container)] for container in held]
            reply = ["value", states, self.encode(result, memo)]
        except Closed:
            raise
        except BaseException as error:  # also SystemExit: leaving is no way out of a test
            reply = ["error", [], self._describe(error)]
        try:
            self._send(reply)
        except MemoryError:  # the value fits once, but not with its copy
            self._send(["error", [], self._describe(MemoryError("the value is too large"))])

    def _close(self, why: str) -> Closed:
        self.broken = why
        return Closed(why)

    def _send(self, message: list[Any]) -> None:
        try:
            self.line.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise self._close(ENDED) from error

    def _receive(self) -> list[Any]:
        searched = 0
        while (end := self.received.find(b"\n", searched)) < 0:
            searched = len(self.received)
            try:
                chunk = self.line.recv(1 << 20)
            except OSError:
                chunk = b""
            if not chunk or searched > MESSAGE_BYTES:
                raise self._close(ENDED if not chunk else "a value is too large")
            self.received += chunk
        data = bytes(self.received[:end])
        del self.received[: end + 1]
        try:
            message = json.loads(data)
            if message[0] in ("ask", "value", "error") and len(message) == 3:
                return list(message)
        except (ValueError, RecursionError, LookupError, TypeError, MemoryError):
            pass
        raise self._close("no message")

    # Values

    def encode(self, value: Any, memo: _Memo) -> Any:
        """The value as JSON; containers that can change are numbered in ``memo`` in the order they are met."""
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -_WIDE < value < _WIDE):
            return value
        if kind is int:
            return ["i", hex(value)]
        if kind in (list, dict, set, bytearray):
            if id(value) in memo.number:
                return ["m", memo.number[id(value)]]
            memo.append(value)
            return [kind.__name__, [self.encode(item, memo) for item in contents(value)]]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item, memo) for item in value]]
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", *(hex(part) for part in (value.start, value.stop, value.step))]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if issubclass(kind, Remote) or hasattr(kind, "apportion_ref"):
            return ["yours", value.apportion_ref]
        rebuilt = REBUILT.get((kind.__module__, kind.__qualname__))
        if rebuilt is not None:
            return ["rebuilt", kind.__module__, kind.__qualname__, self.encode(rebuilt(value), memo)]
        if kind is types.ModuleType and value.__name__ in sys.stdlib_module_names:
            return ["module", value.__name__]
        if isinstance(value, type) and hasattr(value, "apportion_class"):
            return ["yours", value.apportion_class]
        if is_public(value) and (self.guard is not None or value.__module__ == "builtins"):
            return ["public", value.__module__, value.__qualname__]
        if isinstance(value, PLAIN):
            base = next(base for base in PLAIN if isinstance(value, base))
            return ["like", self._export(value), self.encode(bare(base, value), _Memo())]
        return self._by_reference(value)

    def decode(self, data: Any, memo: _Memo) -> Any:
        """The value that ``data`` stands for, made from builtins alone."""
        if not isinstance(data, list):
            return data
        tag = data[0]
        if tag == "i":
            return int(data[1], 16)
        if tag == "m":
            return memo[data[1]]
        if tag in ("list", "dict", "set", "bytearray"):
            container = getattr(builtins, tag)()
            memo.append(container)
            fill(container, [self.decode(item, memo) for item in data[1]])
            return container
        if tag in ("tuple", "frozenset"):
            return getattr(builtins, tag)(self.decode(item, memo) for item in data[1])
        if tag == "bytes":
            return data[1].encode("latin-1")
        if tag == "complex":
            return complex(data[1], data[2])
        if tag == "range":
            return range(*(int(part, 16) for part in data[1:]))
        if tag == "constant":
            return {"Ellipsis": ..., "NotImplemented": NotImplemented}[data[1]]
        if tag == "yours":
            return self.exports[data[1]]
        if tag == "rebuilt":
            if (data[1], data[2]) not in REBUILT:
                raise ValueError(data[2])
            return getattr(__import__(data[1]), data[2])(*self.decode(data[3], memo))
        if tag == "module" and data[1] in sys.stdlib_module_names:
            return __import__(data[1])
        if tag == "public" and (self.guard is None or isinstance(getattr(builtins, data[2]), type)):
            module = builtins if self.guard is not None else importlib.import_module(data[1])
            return getattr(module, data[2])
        if tag == "pickle" and self.guard is None:
            return __import__("pickle").loads(data[1].encode("latin-1"))
        return self._stand_in(data)

    def _export(self, value: Any) -> int:
        number = self.export_of.get(id(value))
        if number is None:
            number = self.export_of[id(value)] = len(self.exports)
            self.exports.append(value)
        return number

    def _by_reference(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(base for base in value.__mro__ if base.__module__ == "builtins")
            return ["exception", self._export(value), value.__name__, base.__name__, value.__module__]
        if kind is types.CoroutineType:
            return ["coroutine", self._export(value)]
        if self.guard is None or self.is_open(value) or callable(value) or hasattr(kind, "__next__"):
            return ["callable" if callable(value) else "object", self._export(value)]
        try:
            return ["pickle", __import__("pickle").dumps(value).decode("latin-1")]
        except Exception:
            self.uncrossable = f"the tests hand a {kind.__name__} to the answer, which cannot be copied"
            raise Uncrossable(self.uncrossable) from None

    def is_open(self, value: Any) -> bool:
        """Whether the other side may read the attributes of this value."""
        return self.guard is None or getattr(type(value), "__module__", None) == self.guard

    def _stand_in(self, data: list[Any]) -> Any:
        tag, number = data[0], int(data[1])
        if tag == "like":
            value = self.decode(data[2], _Memo())
            made = like(type(value))(value)
            made.apportion_peer, made.apportion_ref = self, number
            return made
        if tag == "coroutine":
            return drive(self, Remote(self, number))
        if number not in self.stand_ins:
            if tag == "exception":
                self.stand_ins[number] = exception_class(number, *data[2:])
            else:
                self.stand_ins[number] = {"callable": RemoteCallable, "object": Remote}[tag](self, number)
        return self.stand_ins[number]

    # Exceptions

    def _describe(self, error: BaseException) -> list[Any]:
        """Class, arguments and line of an exception, whatever tricks its class plays."""
        try:
            kind = self.encode(type(error), _Memo())
            arguments = [self.encode(argument, _Memo()) for argument in error.args]
        except BaseException:
            kind, arguments = ["public", "builtins", "RuntimeError"], ["an exception that cannot be shown"]
        return [kind, arguments, line_of(error)]

    def _exception(self, data: list[Any]) -> BaseException:
        kind = self.decode(data[0], _Memo())
        arguments = [self.decode(argument, _Memo()) for argument in data[1]]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("no exception")
        try:
            error = kind(*arguments)
        except Exception:  # a class whose constructor takes other arguments than it keeps
            error = kind.__new__(kind, *arguments)
        self.error_line = (error, data[2] if type(data[2]) is int else None)
        return error
