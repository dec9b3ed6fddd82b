import pickle
import sys

import pytest

from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.isolated import Isolated
from apportion.verifiers.number import NumberAnswer
from apportion.verifiers.panel import judge
from apportion.verifiers.workers import WorkerFailure

MINE = """
import os, re
from apportion.verifiers import Sample, Span, Verdict

class Mine:
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def __call__(self, samples):
        return [self.judge(sample) for sample in samples]

    def judge(self, sample):
        text = sample.completion
        if text == "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        if text == "digits":
            return len(str(7 ** (7 ** 12)))
        if text == "crash":
            os.abort()
        if text == "memory":
            return len(bytearray(4 << 30))
        if text == "raise":
            raise KeyError("gone")
        if text == "nan":
            return float("nan")
        if text == "abstain":
            return None
        if text == "metadata":
            return sample.metadata["scores"][1]["x"]
        return Verdict(len(text) + self.bonus, (Span(0, len(text), 0.25, "all 個 \\ud800"),))

judge = Mine()

def trl(prompts, completions, answer, **columns):
    return [float(prompt + completion == right) for prompt, completion, right in zip(prompts, completions, answer)]

async def later(prompts, completions):
    return [float(len(completion)) for completion in completions]
"""


@pytest.fixture(scope="module", autouse=True)
def on_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "isolated_verifier_of_a_user.py").write_text(MINE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def mine():
    return Isolated("isolated_verifier_of_a_user.Mine", {"bonus": 0.5}, timeout_s=1.0, memory_mb=512, workers=2)


def test_verdicts_come_back_as_they_were_given(mine):
    assert mine([Sample("q", "abc"), Sample("q", "abstain")]) == [
        Verdict(3.5, (Span(0, 3, 0.25, "all 個 \ud800"),)),
        Verdict(None),
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("regex", "timeout"),
        ("digits", "timeout"),
        ("crash", "died"),
        ("memory", "memory"),
        ("raise", "raised"),
        ("nan", "raised"),
    ],
)
def test_a_sample_faults_alone(mine, text, kind):
    replies = mine([Sample("", "ab"), Sample("", text), Sample("", "abc")])
    assert isinstance(replies[1], WorkerFailure)
    assert (replies[0].score, replies[1].kind, replies[2].score) == (2.5, kind, 3.5)


def test_the_panel_counts_the_fault_and_keeps_the_rest(mine):
    result = judge({"mine": mine}, [Sample("", "ab"), Sample("", "raise"), Sample("", "abc")])
    assert [verdicts["mine"].score for verdicts in result.verdicts] == [2.5, None, 3.5]
    assert result.errors == {"mine": 1}
    assert "KeyError: 'gone'" in result.first_error["mine"]


def test_metadata_reaches_the_verifier(mine):
    assert mine([Sample("", "metadata", metadata={"scores": [0, {"x": 7}]})]) == [Verdict(7.0)]


def test_an_instance_and_functions_of_trls_shape_work_as_they_stand():
    sample = Sample("a", "b", metadata={"answer": "ab"})
    targets = ["judge", "trl", "later"]
    replies = [Isolated(f"isolated_verifier_of_a_user.{target}")([sample])[0].score for target in targets]
    assert replies == [1.0, 1.0, 1.0]


def test_it_says_what_the_verifier_itself_says():
    samples = [
        Sample("", "Answer: 12", "12"),
        Sample("", "Answer: 12", "13"),
        Sample("", "Answer: 1"),
        Sample("", "", "1"),
    ]
    isolated = Isolated("apportion.verifiers.number.NumberAnswer", {"extract": "answer_line"})
    assert isolated(samples) == NumberAnswer("answer_line")(samples)


def test_copies_are_equal_and_share_the_processes(mine):
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert hash(mine) == hash(pickle.loads(pickle.dumps(mine)))


@pytest.mark.parametrize("target", ["???", "plain", "a..b", ".a", "a b.c", ""])
def test_a_target_that_is_no_path_is_named(target):
    with pytest.raises(InputError, match=r"^target: .* is no dotted path"):
        Isolated(target)


def test_a_missing_target_is_named():
    with pytest.raises(
        InputError, match=r"target: isolated_verifier_of_a_user.Missing cannot be loaded: AttributeError"
    ):
        Isolated("isolated_verifier_of_a_user.Missing")([Sample("", "a")])


def test_options_that_are_no_plain_values_are_named():
    with pytest.raises(InputError, match=r"^options: "):
        Isolated("isolated_verifier_of_a_user.Mine", {"bonus": object()})([Sample("", "a")])
