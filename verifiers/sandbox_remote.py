"""Stand-ins for objects of another process, and what may be done to an object from there.

Runs inside the sandbox (see :mod:`.sandbox_values`). Two rules keep the answer from judging itself. An object of the
answer never equals plain data and cannot be ordered against it, whatever its ``__eq__`` says; and arithmetic of such
an object with plain data never gives plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sandbox_values import Peer

__all__ = ["DEEDS", "Remote", "RemoteCallable", "drive", "like"]


def like(base: type) -> type:
    """A subclass of a plain type whose further attributes live on the other side, as a named tuple's fields do."""

    def far(self: Any, name: str) -> Any:
        if name.startswith("apportion_"):
            raise AttributeError(name)
        return self.apportion_peer.request("get", Remote(self.apportion_peer, self.apportion_ref), name)

    return type(f"remote_{base.__name__}", (base,), {"__getattr__": far, "apportion_ref": None})


async def drive(peer: Peer, coroutine: Any) -> Any:
    return peer.request("await", coroutine)


class Remote:
    """Stands for an object on the other side; every operation is carried out there."""

    apportion_peer: Peer
    apportion_ref: int
    apportion_mixed: bool
    __slots__ = ("apportion_mixed", "apportion_peer", "apportion_ref")

    def __init__(self, peer: Peer, ref: int) -> None:
        object.__setattr__(self, "apportion_peer", peer)
        object.__setattr__(self, "apportion_ref", ref)
        object.__setattr__(self, "apportion_mixed", False)

    def __getattr__(self, name: str) -> Any:
        return self.apportion_peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.apportion_peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.apportion_peer.request("delete", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        known = isinstance(instance, Remote) or hasattr(type(instance), "apportion_ref")
        return bool(known and self.apportion_peer.request("isinstance", instance, self))

    def __hash__(self) -> int:
        return int(self.apportion_peer.request("special", self, "__hash__"))


class RemoteCallable(Remote):
    """Stands for a function or a class."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apportion_peer.request("call", self, args, kwargs)


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_BINARY = tuple(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r", "i"))
_GENERIC: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__bool__": bool,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__abs__": abs,
    "__reversed__": reversed,
    "__contains__": lambda container, item: item in container,
    "__format__": format,
}
_BY_NAME: tuple[str, ...] = (
    "__neg__",
    "__pos__",
    "__invert__",
    "__index__",
    "__round__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
)
_BY_NAME += ("__enter__", "__exit__")
# What would turn a difference of object and plain data, as in ``abs(f(2) - 4)``, into plain data of its choice.
_TO_NUMBER = frozenset(
    f"__{name}__" for name in ("abs", "neg", "pos", "invert", "round", "int", "float", "complex", "index", "bool")
)
_SPECIAL = frozenset((*_COMPARISONS, *_BINARY, *_GENERIC, *_BY_NAME))


def _special(name: str) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        foreign = bool(operands) and not isinstance(operands[0], Remote)
        if name in _COMPARISONS and foreign:
            return NotImplemented
        result = self.apportion_peer.request("special", self, name, *operands)
        if name in _BINARY and foreign and not isinstance(result, Remote):
            return NotImplemented
        if (name in _BINARY and (foreign or self.apportion_mixed or operands[0].apportion_mixed)) or (
            name in _TO_NUMBER and self.apportion_mixed
        ):
            if result is NotImplemented:
                return result
            if not isinstance(result, Remote):
                raise TypeError("a value made from an object and plain data is no plain data")
            object.__setattr__(result, "apportion_mixed", True)
        return result

    method.__name__ = name
    return method


for _name in _SPECIAL - {"__hash__"}:
    setattr(Remote, _name, _special(_name))


# What one side may ask of the other. The side with the tests answers for functions that it handed over, and for
# objects of classes that the tests define; there only attributes without a leading underscore.


def _check(peer: Peer, target: Any, name: str) -> None:
    if not peer.is_open(target) or (peer.guard is not None and name.startswith("_")):
        raise AttributeError(f"{name!r} is out of reach")


def _get(peer: Peer, target: Any, name: str) -> Any:
    _check(peer, target, name)
    return getattr(target, name)


def _set(peer: Peer, target: Any, name: str, value: Any) -> None:
    _check(peer, target, name)
    setattr(target, name, value)


def _delete(peer: Peer, target: Any, name: str) -> None:
    _check(peer, target, name)
    delattr(target, name)


def _call(_: Peer, target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _do_special(peer: Peer, target: Any, name: str, *operands: Any) -> Any:
    if name not in _SPECIAL or not (peer.is_open(target) or (name in ("__iter__", "__next__") and not operands)):
        raise TypeError(f"{name} is out of reach")
    if name in _GENERIC:
        return _GENERIC[name](target, *operands)
    return getattr(target, name, lambda *_: NotImplemented)(*operands)


def _isinstance(_: Peer, instance: Any, kind: Any) -> bool:
    return isinstance(instance, kind)


def _await(_: Peer, coroutine: Any) -> Any:
    return __import__("asyncio").run(coroutine)


DEEDS: dict[str, Callable[..., Any]] = {
    "get": _get,
    "set": _set,
    "delete": _delete,
    "call": _call,
    "special": _do_special,
    "isinstance": _isinstance,
    "await": _await,
}
