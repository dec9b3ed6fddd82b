"""Laws of the shell around the commands: what is typed arrives as it was typed, and options are checked by type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import apportion.conf
from apportion.experiments.app import hydra_command, quoted_override
from apportion.experiments.build import build, check_value
from apportion.experiments.targets import locate
from apportion.verifiers import InputError

CONF = str(Path(apportion.conf.__file__).resolve().parent)
HOSTILE = st.text(st.sampled_from("\\'\"${}x:,=[]()#~ \n\t\ré💩\u2028"), max_size=12) | st.text(max_size=20)


def composed(*overrides):
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", list(overrides))


@settings(max_examples=400)
@given(HOSTILE)
@example("\\")
@example("\\'")
@example("${x}")
@example("\\${x}\\\\")
@example("^<think>(.*?)</think>$")
@example("#\\\\")
def test_a_quoted_override_is_read_back_as_it_was(value):
    override = OverridesParser.create().parse_override(quoted_override("label", value))
    assert override.get_key_element() == "label"
    config = OmegaConf.create({"label": override.value()})
    assert config.label == value
    assert OmegaConf.to_container(config, resolve=True) == {"label": value}


@settings(max_examples=15, deadline=None)
@given(HOSTILE)
@example("a\\${x}'\n")
def test_a_quoted_override_survives_the_composition(value):
    assert composed(quoted_override("label", value)).label == value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("label='a=b'", "a=b"),
        ("label='a,b'", "a,b"),
        ("label=a\\,b", "a,b"),
        ("label=[a,b]", ["a", "b"]),
        ("label='^<think>(.*?)</think>$'", "^<think>(.*?)</think>$"),
        ("label='\\${seed}'", "${seed}"),
        ("label='${seed}'", 0),
        ("label='$5'", "$5"),
        ("label=['#\\\\', 'x']", ["#\\", "x"]),
        ("label=['#\\\\\\\\', 'x']", ["#\\\\", "x"]),
        ('label="\\n"', "\\n"),  # a backslash and an n: Hydra unescapes nothing but quotes
        ('label="\n"', "\n"),
    ],
)
def test_what_is_typed_is_what_arrives(override, value):
    assert composed(override).label == value


def test_flags_may_stand_anywhere():
    seen = []
    for arguments in (["--config-dir", CONF, "seed=3"], ["seed=3", "--config-dir", CONF, "label=x"]):
        hydra_command("train", lambda config: seen.append((config.seed, config.label)), arguments)
    assert seen == [(3, None), (3, "x")]


def test_an_error_that_is_not_the_users_keeps_its_traceback():
    def broken(config):
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        hydra_command("train", broken, [])


def test_ctrl_c_ends_with_the_status_of_the_signal():
    def stopped(config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        hydra_command("train", stopped, [])
    assert end.value.code == 130


FITS = [
    (int, [0, -3], [1.0, "1", True, None, [1]]),
    (float, [0, 1.5, float("inf")], ["1", False, None]),
    (bool, [True, False], [0, 1, "true"]),
    (str, ["", "x"], [1, None, ["x"]]),
    (int | None, [None, 3], ["x", 1.5]),
    (Literal["a", "b", 1], ["a", 1], ["c", True, 1.0]),
    (list[int], [[], [1, 2]], [[1, "x"], "12", 3, {"a": 1}]),
    (Sequence[str], [["a"]], ["a", [1]]),
    (tuple[str, ...], [["a", "b"], []], [[1]]),
    (tuple[int, str], [[1, "a"]], ["a"]),
    (Mapping[str, float], [{}, {"a": 1}], [{"a": "x"}, [1]]),
    (dict, [{"a": object()}], [[1]]),
    (Any, [None, "x", object()], []),
    (int, [{"_target_": "builtins.int"}], []),  # what it becomes is not known yet
]


@pytest.mark.parametrize(("hint", "right", "wrong"), FITS)
def test_values_are_checked_against_plain_annotations(hint, right, wrong):
    for value in right:
        check_value(value, hint, "key")
    for value in wrong:
        with pytest.raises(InputError, match=r"^key=.*: must be "):
            check_value(value, hint, "key")


class Outer:
    """For the tests below: an object with an object inside."""

    def __init__(self, inner: Any, names: Sequence[str] = ("a",), limit: int | None = None) -> None:
        self.inner, self.names, self.limit = inner, names, limit


class Inner:
    def __init__(self, size: int) -> None:
        if size < 0:
            raise InputError(f"size={size}: must not be negative")
        self.size = size


def node(**options):
    return OmegaConf.create({"_target_": f"{__name__}.Outer", **options})


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Test files are no modules; give the classes above a path."""
    import sys
    import types

    module = types.ModuleType(__name__)
    module.Outer, module.Inner = Outer, Inner
    monkeypatch.setitem(sys.modules, __name__, module)


def test_an_object_is_built_with_those_inside_it_and_plain_lists():
    made = build(node(inner={"_target_": f"{__name__}.Inner", "size": 3}, names=["x", "y"]), "outer")
    assert (made.inner.size, made.names, type(made.names), made.limit) == (3, ["x", "y"], list, None)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"inner": {"_target_": f"{__name__}.Inner", "size": "x"}}, r"outer\.inner\.size='x': must be a whole number"),
        ({"inner": {"_target_": f"{__name__}.Inner", "sise": 3}}, r"outer\.inner\.size: .*needs the argument 'size'"),
        ({"inner": [{"_target_": f"{__name__}.Innr", "size": 3}]}, r"outer\.inner\.0\._target_=.*has no Innr"),
        ({"inner": {"deep": {"_target_": "nope.X"}}}, r"outer\.inner\.deep\._target_=nope\.X: ModuleNotFoundError"),
        ({"inner": {"_target_": f"{__name__}.Inner", "size": -1}}, r"outer .*size=-1: must not be negative"),
        ({"inner": None, "names": ["a", 1]}, r"outer\.names=\['a', 1\]: must be a list of which each is text"),
        ({"inner": "???"}, r"outer\.inner: needs a value; give outer\.inner=\.\.\."),
    ],
)
def test_a_fault_deep_inside_is_named_by_its_own_key(options, line):
    with pytest.raises(InputError, match=line):
        build(node(**options), "outer")


def test_a_plain_function_is_called_or_taken_as_it_is_with_its_options_bound():
    shorter = OmegaConf.create({"_target_": "textwrap.shorten", "width": 5})
    assert build(shorter, "verifiers.x", function=True)("one two") == "[...]"
    assert build(OmegaConf.create({"_target_": "textwrap.dedent"}), "v", function=True)(" a") == "a"
    with pytest.raises(InputError, match=r"v\.text: textwrap\.dedent needs the argument 'text'"):
        build(OmegaConf.create({"_target_": "textwrap.dedent"}), "v")
    assert build(OmegaConf.create({"_target_": "textwrap.dedent", "text": " a"}), "v", function=True) == "a"


def test_a_path_is_followed_through_packages_modules_and_classes():
    assert locate("apportion.verifiers.chain.ChainSteps", "k").__name__ == "ChainSteps"
    assert locate("os.path.join", "k").__name__ == "join"
    assert locate("collections.OrderedDict.fromkeys", "k").__name__ == "fromkeys"


@pytest.mark.parametrize("path", ["", "a..b", ".a", "a b.C", "a.b-c", "1.x"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InputError, match=r"not a dotted path such as my_file\.MyClass"):
        locate(path, "k")
