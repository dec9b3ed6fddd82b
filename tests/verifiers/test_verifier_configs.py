"""Laws for every file of conf/verifier: one that is added is tested because it exists."""

import dataclasses
import importlib
from pathlib import Path

import pytest
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
    assert {name: options[name] for name in defaults} == defaults


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_junk_is_judged_without_a_fault_and_alike_in_any_batch(path):
    target, options = load(path)
    samples = [Sample("7+9-a*1=?", text, reference) for text in JUNK for reference in (None, "4", "junk")]
    result = judge({"it": target(**options)}, samples)
    assert (result.errors, result.first_error) == ({"it": 0}, {})
    backwards = judge({"it": target(**options)}, samples[::-1])
    assert backwards.verdicts[::-1] == result.verdicts
