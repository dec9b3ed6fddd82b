"""Laws for every file of conf/verifier: one that is added is tested because it exists."""

import dataclasses
import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import apportion.conf
from apportion.verifiers import Sample
from apportion.verifiers.panel import judge

FILES = sorted((Path(apportion.conf.__file__).parent / "verifier").glob("*.yaml"))
JUNK = [
    "",
    " ",
    "\n\n",
    "\x00",
    "=",
    "1 = 2 =",
    "Answer:",
    "a b a b a b a b",
    "💩" * 50,
    "\u202e\u0301e\ufeff",
    "<think>" * 9,
    "(" * 999,
]


# Those that need a value from the user (a path, a model) have these laws in tests of their own.
READY = [path for path in FILES if not OmegaConf.missing_keys(OmegaConf.load(path)) and path.stem != "prm"]


def load(path):
    options = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    module, _, name = options.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name), options


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_opens_with_a_command(path):
    assert path.read_text(encoding="utf-8").startswith("# apportion ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_stands_in_the_file_with_its_default(path):
    target, options = load(path)
    fields = {field.name: field.default for field in dataclasses.fields(target) if field.init}
    assert list(options) == list(fields)
    defaults = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    assert {name for name, value in options.items() if value == "???"} <= fields.keys() - defaults.keys()
    assert {name: options[name] for name in defaults} == defaults


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_junk_is_judged_without_a_fault_and_alike_in_any_batch(path):
    target, options = load(path)
    samples = [Sample("7+9-a*1=?", text, reference) for text in JUNK for reference in (None, "4", "junk")]
    result = judge({"it": target(**options)}, samples)
    assert (result.errors, result.first_error) == ({"it": 0}, {})
    backwards = judge({"it": target(**options)}, samples[::-1])
    assert backwards.verdicts[::-1] == result.verdicts


# Any code point, halves of surrogate pairs too, mixed with what the verifiers look for.
PIECES = [
    "\\boxed{",
    "}",
    "<think>",
    "</answer>",
    "```python\n",
    "```",
    '{"a":',
    "=",
    "12",
    "1,000",
    "%",
    "Step 1:",
    "\n",
    "\ud83d",
]
TEXTS = st.text(st.characters(), max_size=60) | st.lists(st.sampled_from(PIECES) | st.characters(), max_size=30).map(
    "".join
)


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_any_text_is_judged_without_a_fault_and_spans_lie_inside(path):
    target, options = load(path)
    verifier = target(**options)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(texts=st.lists(TEXTS, min_size=1, max_size=12))
    def holds(texts):
        result = judge({"it": verifier}, [Sample("7+9-a*1=?", text, "4", {"tests": "assert True"}) for text in texts])
        assert (result.errors, result.first_error) == ({"it": 0}, {})  # a span outside would be an error

    holds()
