"""Plain data as two processes see it: what may be copied, and what is read past an object's own tricks."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["ANSWER", "PLAIN", "REBUILT", "bare", "contents", "exception_class", "fill", "is_public", "line_of"]

ANSWER = "<answer>"  # the file name under which the answer is compiled
PLAIN = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)
# Values of the standard library that are rebuilt from plain arguments.
REBUILT: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("fractions", "Fraction"): lambda v: (v.numerator, v.denominator),
    ("decimal", "Decimal"): lambda v: (str(v),),
    ("collections", "deque"): lambda v: (list(v), v.maxlen),
    ("collections", "Counter"): lambda v: (dict(v),),
    ("collections", "OrderedDict"): lambda v: (list(v.items()),),
    ("collections", "defaultdict"): lambda v: (None, dict(v)),
    ("datetime", "date"): lambda v: (v.year, v.month, v.day),
    ("datetime", "timedelta"): lambda v: (v.days, v.seconds, v.microseconds),
    ("datetime", "time"): lambda v: (v.hour, v.minute, v.second, v.microsecond),
    ("datetime", "datetime"): lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
}


def line_of(error: BaseException) -> int | None:
    """Last line of the answer on the way to the error, from 1; of the text itself where it does not compile."""
    if isinstance(error, SyntaxError) and error.filename == ANSWER:
        return error.lineno
    line, place = None, error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == ANSWER:
            line = place.tb_lineno
        place = place.tb_next
    return line


def exception_class(number: int, name: str, base_name: str, module: str) -> type:
    """The standard library's own class where the name is one, else a class of that name with the same base."""
    if module in sys.modules and module.partition(".")[0] in sys.stdlib_module_names:
        found = getattr(sys.modules[module], name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    base = getattr(builtins, base_name)
    if not issubclass(base, BaseException):
        raise TypeError(base_name)
    return type(name, (base,), {"apportion_class": number})


def is_public(value: Any) -> bool:
    """Whether the value is a class or function that every interpreter has under the same name."""
    if not isinstance(value, type | types.BuiltinFunctionType | types.FunctionType):
        return False
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return getattr(sys.modules.get(module), getattr(value, "__qualname__", ""), None) is value


def contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in dict.items(container) for part in pair]
    return list(container)


def fill(container: Any, items: list[Any]) -> None:
    """Replace what a container holds."""
    if isinstance(container, dict):
        container.clear()
        container.update(zip(items[::2], items[1::2]))
    elif isinstance(container, set):
        container.clear()
        container.update(items)
    else:
        container[:] = items


def bare(base: type, value: Any) -> Any:
    """The plain value in an instance of a subclass, read past whatever the subclass overrides."""
    if base is dict:
        return dict(dict.items(value))
    plain: Any = base
    if base in (int, float, str, bytes):
        return plain.__add__(value, plain())
    return plain(plain.__iter__(value))
