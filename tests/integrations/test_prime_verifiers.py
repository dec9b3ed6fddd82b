"""Laws of a rubric of the PyPI package ``verifiers``: its own rewards, its own weights, and its faults as ours."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from apportion.integrations.prime_verifiers import PrimeRubric
from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import gives_spans, judge

TASKS = """
import asyncio
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str
    level: int = 0

class Sums(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        await asyncio.sleep(0)
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def parts(self, task, trace):
        return {"whole": float(not trace.is_truncated), "level": task.level / 10}

    @vf.metric
    async def turns(self, trace):
        return trace.num_turns

class SumsTaskset(vf.Taskset[Sums]):
    def load(self):
        return []

class Seen(vf.Task[Data]):
    @vf.reward
    async def seen(self, trace):
        roles = [(m.role, m.content) for m in trace.messages]
        assert roles == [("system", "Be brief."), ("user", "1+1?"), ("assistant", " 2 ")], roles
        assert trace.task.data.prompt == "1+1?" and trace.ok and trace.is_completed
        assert [m.content for m in trace.assistant_messages] == [" 2 "]
        return 1.0

class Faulty(vf.Task[Data]):
    @vf.reward
    async def inverse(self, trace):
        return 1 / float(trace.last_reply)

    @vf.reward
    async def odd(self, trace):
        return float("nan") if trace.last_reply == "3" else 0.0

class Boxed(vf.Task[Data]):
    @vf.reward
    async def boxed(self, trace):
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)

class Sandboxed(vf.Task[Data]):
    @vf.reward
    async def ran(self, trace, runtime):
        return 1.0

    @vf.reward
    async def may_run(self, trace, runtime=None):
        return 1.0

class Silent(vf.Task[Data]):
    pass

class Empty(vf.Task[Data]):
    @vf.reward
    async def nothing(self, trace):
        return {}

class Slow(vf.Task[Data]):
    running = most = 0

    @vf.reward
    async def waited(self, trace):
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        await asyncio.sleep(0.01)
        Slow.running -= 1
        return 1.0

async def brief(task, trace):
    return float(len(trace.last_reply) < 3)

NOT_A_TASK = 3
"""

SAMPLES = [
    Sample("1+1?", "2", "2", {"level": 3, "id": 7, "truncated": False}),
    Sample("1+2?", "4", "3", {"level": 1, "id": 8, "truncated": True}),
]


def installed() -> bool:
    """Whether the package is there, and not just our own folder of that name."""
    try:
        return importlib.util.find_spec("verifiers.v1") is not None
    except ImportError:
        return False


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: Any) -> str:
    """Name of a module with tasks."""
    if not installed():
        pytest.skip("needs the PyPI package verifiers")
    (tmp_path / "their_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_tasks", raising=False)
    return "their_tasks"


def forget_the_package(monkeypatch: Any) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)


def scores(verifier: PrimeRubric, samples: list[Sample]) -> list[float | None]:
    return [row["it"].score for row in judge({"it": verifier}, samples).verdicts]


@pytest.mark.integration
def test_the_score_is_the_weighted_sum_of_the_rewards(tasks: str) -> None:
    assert scores(PrimeRubric(f"{tasks}.Sums"), SAMPLES) == pytest.approx([2.0 + 1.0 + 0.3, 0.0 + 0.0 + 0.1])
    assert scores(PrimeRubric(f"{tasks}.SumsTaskset"), SAMPLES) == pytest.approx([3.3, 0.1])


@pytest.mark.integration
def test_each_reward_can_be_had_by_name_without_its_weight(tasks: str) -> None:
    named = {name: scores(PrimeRubric(f"{tasks}.Sums", reward=name), SAMPLES) for name in ("right", "whole", "level")}
    assert named == {"right": [1.0, 0.0], "whole": [1.0, 0.0], "level": [0.3, 0.1]}
    result = judge({"it": PrimeRubric(f"{tasks}.Sums", reward="parts")}, SAMPLES)
    assert result.errors == {"it": 2}
    assert "reward=parts: their_tasks.Sums gave no such reward; it gave right, whole, level" in result.first_error["it"]


@pytest.mark.integration
def test_the_trace_is_what_a_rollout_would_have_left(tasks: str) -> None:
    sample = Sample("1+1?", " 2 ", "2", {"system_prompt": "Be brief."})
    result = judge({"it": PrimeRubric(f"{tasks}.Seen")}, [sample])
    assert (result.verdicts[0]["it"].score, result.first_error) == (1.0, {})


@pytest.mark.integration
def test_a_fault_is_that_samples_alone(tasks: str) -> None:
    samples = [Sample("q", text, "x") for text in ("2", "0", "3", "4")] + [Sample("q", "2")]
    result = judge({"it": PrimeRubric(f"{tasks}.Faulty")}, samples)
    assert [row["it"].score for row in result.verdicts] == [0.5, None, None, 0.25, None]
    assert result.errors == {"it": 3}
    assert "ZeroDivisionError" in result.first_error["it"]
    assert "answer" in judge({"it": PrimeRubric(f"{tasks}.Faulty")}, samples[4:]).first_error["it"]


@pytest.mark.integration
def test_their_own_comparison_of_answers_works(tasks: str) -> None:
    samples = [Sample("q", rf"so \boxed{{{answer}}}", r"\frac{1}{2}") for answer in ("0.5", "2", r"\frac{2}{4}")]
    assert scores(PrimeRubric(f"{tasks}.Boxed"), samples) == [1.0, 0.0, 1.0]
    assert not getattr(PrimeRubric, "background", False)
    assert not gives_spans(PrimeRubric(f"{tasks}.Boxed"))


@pytest.mark.integration
def test_rewards_of_the_config_are_plugged_in(tasks: str) -> None:
    config = {"rewards": {"brief": {"fn": f"{tasks}.brief", "weight": 0.5}, "right": {"weight": 1.0}}}
    assert scores(PrimeRubric(f"{tasks}.Sums", config=config), SAMPLES) == pytest.approx([1 + 1 + 0.3 + 0.5, 0.1 + 0.5])
    with pytest.raises(InputError, match=r"config: does not fit TaskConfig of their_tasks\.Sums"):
        PrimeRubric(f"{tasks}.Sums", config={"reward": {}})


@pytest.mark.integration
def test_a_reward_that_needs_a_sandbox_is_refused_and_one_that_can_do_without_is_not(tasks: str) -> None:
    result = judge({"it": PrimeRubric(f"{tasks}.Sandboxed")}, SAMPLES)
    assert [row["it"].score for row in result.verdicts] == [None, None]
    assert "task=their_tasks.Sandboxed: ran of it needs a runtime" in result.first_error["it"]


@pytest.mark.integration
def test_a_task_without_rewards_is_refused_and_one_that_gives_none_abstains(tasks: str) -> None:
    silent = judge({"it": PrimeRubric(f"{tasks}.Silent")}, SAMPLES)
    assert (silent.errors, "has no reward" in silent.first_error["it"]) == ({"it": 2}, True)
    empty = judge({"it": PrimeRubric(f"{tasks}.Empty")}, SAMPLES)
    assert ([row["it"].score for row in empty.verdicts], empty.errors) == ([None, None], {"it": 0})


@pytest.mark.integration
def test_a_reference_goes_to_the_field_that_is_named(tasks: str) -> None:
    result = judge({"it": PrimeRubric(f"{tasks}.Sums", reference="gold")}, SAMPLES)
    assert "reference=gold: their_tasks.Sums has no such field, but answer, level" in result.first_error["it"]
    own = [Sample("1+1?", "2", "ignored", {"answer": "2"})]
    assert scores(PrimeRubric(f"{tasks}.Sums", reward="right", reference=None), own) == [1.0]


@pytest.mark.integration
def test_samples_wait_side_by_side_up_to_a_limit(tasks: str) -> None:
    assert scores(PrimeRubric(f"{tasks}.Slow", concurrency=3), SAMPLES * 6) == [1.0] * 12
    assert sys.modules[tasks].Slow.most == 3  # type: ignore[attr-defined]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("their_tasks.NOT_A_TASK", "is neither a Task nor a Taskset"),
        ("their_tasks.Data", "is neither a Task nor a Taskset"),
        ("their_tasks.Nothing", "cannot be imported"),
        ("nowhere.Task", "cannot be imported"),
        ("no-such-taskset", "cannot be imported"),
    ],
)
def test_a_path_to_no_task_is_refused_at_once(tasks: str, path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrimeRubric(path)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="concurrency=0: must be at least 1"):
        PrimeRubric("their_tasks.Sums", concurrency=0)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: Any) -> None:
    forget_the_package(monkeypatch)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(InputError, match=r"needs the package verifiers .*pip install 'verifiers>=0\.4,<0\.5'"):
        PrimeRubric("their_tasks.Sums")


def test_our_own_folder_of_that_name_is_not_taken_for_the_package(monkeypatch: Any) -> None:
    forget_the_package(monkeypatch)
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    with pytest.raises(InputError, match="Apportion's own folder hides it here; start in another directory"):
        PrimeRubric("their_tasks.Sums")
