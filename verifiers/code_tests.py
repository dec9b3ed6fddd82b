"""The forms in which tests for code are given, read into units that a sandbox runs one by one."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import InputError

__all__ = ["Fault", "Outcome", "Programs", "Suite", "Unit", "read_tests", "same_output"]


class Unit(NamedTuple):
    """A piece of the tests; ``counts`` is False where it only prepares the ones behind it."""

    code: str
    counts: bool


@dataclass(frozen=True)
class Suite:
    """Tests written in Python.

    Args:
        units: in order.
        names: what they use that is no builtin; the answer's definitions of these are brought in.
        entry_point: the function under test, also known to the tests as ``candidate``; None where they name it.
        given: code of the problem whose functions ``given_names`` the tests take from here, not from the answer.
    """

    units: tuple[Unit, ...]
    names: frozenset[str]
    entry_point: str | None = None
    given: str = ""
    given_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Programs:
    """Inputs for the whole program, and what it shall print for each."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Fault(NamedTuple):
    """What went wrong in the answer, and on which of its lines (from 1); None where no line is to blame."""

    label: str
    line: int | None


class Outcome(NamedTuple):
    """How many tests passed of how many, and the faults of the others."""

    passed: int
    total: int
    faults: tuple[Fault, ...]


def read_tests(tests: object, entry_point: str | None = None, given: str = "") -> Suite | Programs | None:
    """Tests in one of four forms; None where there is no test.

    - a text of Python: every top-level ``assert`` (or loop, ``with`` or ``try`` around some) is a test. So is every
      assert of a function ``check(candidate)``, every function ``test...()`` and every test method of a
      ``unittest.TestCase``. All other statements prepare them. Asserts of a constant do not count.
    - a list of such texts: each is one test.
    - a list of mappings with ``input`` and ``output``: a run of the whole program on standard input.
    - a list of mappings with ``args`` (a list), perhaps ``kwargs``, and ``output``: a call of the entry point. Lists
      and tuples are alike there, as in JSON.

    Args:
        tests: as above.
        entry_point: name of the function under test.
        given: code that stood before the answer in the prompt.

    >>> suite = read_tests("x = f(2)\\nassert x == 4\\nassert f(3) == 9")
    >>> [unit.counts for unit in suite.units], sorted(suite.names)
    ([False, True, True], ['f', 'x'])
    """
    if tests is None:
        return None
    if entry_point is not None and not entry_point.isidentifier():
        raise InputError(f"entry_point: {entry_point!r} is no name of a function")
    if isinstance(tests, str):
        return _suite(_units_of_text(tests, entry_point), entry_point, given)
    if isinstance(tests, Mapping) or not isinstance(tests, Sequence):
        raise InputError(f"tests: {type(tests).__name__} is no form of tests; give a text or a list")
    if all(isinstance(test, str) for test in tests):
        return _suite(tuple(Unit(ast.unparse(_parse(test)), True) for test in tests), entry_point, given)
    if not all(isinstance(test, Mapping) for test in tests):
        raise InputError("tests: the list mixes forms; give texts only, or mappings only")
    if all({"input", "output"} <= test.keys() for test in tests):
        if entry_point is not None:  # a program that only defines it prints nothing, which may be what is expected
            raise InputError(f"tests: input and output test a whole program, not {entry_point}(); give args and output")
        pairs = [(_text(test["input"], "input"), _text(test["output"], "output")) for test in tests]
        return Programs(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    if all({"args", "output"} <= test.keys() for test in tests):
        if entry_point is None:
            raise InputError("tests: calls need the name of a function; give the column entry_point")
        return _suite((Unit(_ALIKE, False), *(_call(test) for test in tests)), entry_point, given)
    raise InputError("tests: a mapping wants the keys input and output, or args and output")


def same_output(expected: str, printed: str) -> bool:
    r"""Whether two outputs agree but for white space at the ends of lines and at the end of the file.

    >>> [same_output("1\n2", printed) for printed in ("1 \n2\n\n", "1", "1\n2\n3", "12")]
    [True, False, False, False]
    """
    left, right = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, printed))
    return left == right


# Lists and tuples are alike in calls; nan and inf are written by these names.
_ALIKE = """
def _alike(value):
    if type(value) in (list, tuple):
        return [_alike(item) for item in value]
    if type(value) is dict:
        return {key: _alike(item) for key, item in value.items()}
    return value
nan, inf = float("nan"), float("inf")
"""


def _call(test: Mapping[str, Any]) -> Unit:
    args, kwargs, output = test["args"], test.get("kwargs") or {}, test["output"]
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise InputError(f"tests: args is {args!r}; give a list")
    return Unit(f"assert _alike(candidate(*{list(args)!r}, **{dict(kwargs)!r})) == _alike({output!r})", True)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"tests: {key} is a {type(value).__name__}; give a text, or args for a call")
    return value


def _suite(units: tuple[Unit, ...], entry_point: str | None, given: str) -> Suite | None:
    if not any(unit.counts for unit in units):
        return None
    names = {
        node.id
        for unit in units
        for node in ast.walk(_parse(unit.code))
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id)
    }
    trees = [_parse(unit.code) for unit in units]
    inner = {id(n.value) for t in trees for n in ast.walk(t) if isinstance(n, ast.Attribute)}
    bare = {n.id for t in trees for n in ast.walk(t) if isinstance(n, ast.Name) and id(n) not in inner}
    modules = sorted((names & sys.stdlib_module_names) - bare - {entry_point})
    if modules:  # the library's own, whatever the answer calls by that name
        units = (Unit(f"import {', '.join(modules)}", False), *units)
    source, functions = _given_functions(given)
    return Suite(units, frozenset(names), entry_point, source, functions - {entry_point})


@lru_cache(maxsize=1024)
def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"tests: line {error.lineno} is no Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"tests: no Python: {error}") from None


@lru_cache(maxsize=1024)
def _units_of_text(text: str, entry_point: str | None) -> tuple[Unit, ...]:
    statements = [statement for statement in _parse(text).body if not _is_main_guard(statement)]
    functions = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
    called = {name for statement in statements if (name := _called_name(statement))}
    units: list[Unit] = []
    later: list[Unit] = []
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name not in called and entry_point is not None:
            flat = _checks(statement)
        else:
            flat = None
        if flat is not None:
            units.extend(flat)
            continue
        units.append(Unit(ast.unparse(statement), _is_test(statement, functions)))
        if isinstance(statement, ast.FunctionDef) and statement.name not in called:
            later.extend(_function_call(statement, entry_point))
        elif isinstance(statement, ast.ClassDef):
            later.extend(_methods(statement))
    return (*units, *later)


def _is_main_guard(statement: ast.stmt) -> bool:
    """``if __name__ == "__main__":`` and ``unittest.main()``, which only start what is started anyway."""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and isinstance(statement.test.left, ast.Name)
        and statement.test.left.id == "__name__"
    ) or (isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("unittest.main("))


def _called_name(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return function.id if isinstance(function, ast.Name) else None
    return None


def _is_test(statement: ast.stmt, functions: Mapping[str, ast.FunctionDef]) -> bool:
    name = _called_name(statement)
    if name is not None:
        return name in functions and any(map(_holds_assert, functions[name].body))
    return _holds_assert(statement)


def _holds_assert(statement: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in _own_nodes(statement)
    )


def _own_nodes(root: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the statement does: none inside a function or class that it defines."""
    stack = [root]
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            stack.extend(ast.iter_child_nodes(node))


def _checks(function: ast.FunctionDef) -> list[Unit] | None:
    """The statements of ``check(candidate)`` one by one, so that each assert counts; None where it is none such."""
    arguments = function.args
    if [argument.arg for argument in arguments.args] != ["candidate"] or arguments.vararg or arguments.kwonlyargs:
        return None
    leaving = ast.Return | ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal
    if any(isinstance(node, leaving) for statement in function.body for node in _own_nodes(statement)):
        return None
    return [Unit(ast.unparse(statement), _holds_assert(statement)) for statement in function.body]


def _function_call(function: ast.FunctionDef, entry_point: str | None) -> Iterator[Unit]:
    required = len(function.args.args) - len(function.args.defaults)
    if required == 0 and function.name.startswith("test"):
        yield Unit(f"{function.name}()", True)
    elif required == 1 and entry_point is not None and function.args.args[0].arg == "candidate":
        yield Unit(f"{function.name}(candidate)", True)


def _methods(case: ast.ClassDef) -> Iterator[Unit]:
    if any(ast.unparse(base).endswith("TestCase") for base in case.bases):
        for node in case.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield Unit(f"import unittest\nunittest.TestSuite([{case.name}({node.name!r})]).debug()", True)


@lru_cache(maxsize=1024)
def _given_functions(given: str) -> tuple[str, frozenset[str]]:
    """The problem's code as far as it is Python, and its functions that are more than a stub."""
    for source in (given, given.rstrip() + "\n    pass\n"):
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        whole = {node.name for node in body if isinstance(node, ast.FunctionDef) and not _is_stub(node)}
        return (source, frozenset(whole)) if whole else ("", frozenset())
    return "", frozenset()


def _is_stub(function: ast.FunctionDef) -> bool:
    empty = (ast.Pass, ast.Raise)
    return all(
        isinstance(node, empty) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )
