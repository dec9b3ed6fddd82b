"""A reward function written for chats sees chats."""

import sys
from types import ModuleType

import pytest

from apportion.verifiers import InputError, Sample
from apportion.verifiers.conversational import Conversational
from apportion.verifiers.panel import gives_spans, judge

SAMPLES = [Sample("q1", "yes", "yes", {"level": 1}), Sample("q2", "no", "yes", {"level": 2})]


@pytest.fixture
def theirs(monkeypatch):
    module = ModuleType("theirs")

    def exact(prompts, completions, reference, bonus=0.0, **columns):
        assert [[m["role"] for m in prompt] for prompt in prompts] == [["user"]] * len(prompts)
        return [
            float(completion[0]["content"] == right) + bonus * level
            for completion, right, level in zip(completions, reference, columns["level"])
        ]

    async def only_completions(completions):
        return [len(completion[-1]["content"]) for completion in completions]

    module.exact, module.only_completions = exact, only_completions
    monkeypatch.setitem(sys.modules, "theirs", module)


def scores(verifier):
    result = judge({"it": verifier}, SAMPLES)
    assert result.errors == {"it": 0}, result.first_error
    return [row["it"].score for row in result.verdicts]


def test_it_gets_messages_and_the_columns_it_takes(theirs):
    assert scores(Conversational("theirs.exact")) == [1.0, 0.0]
    assert scores(Conversational("theirs.exact", {"bonus": 0.5})) == [1.5, 1.0]


def test_it_may_be_a_coroutine_and_take_completions_alone(theirs):
    assert scores(Conversational("theirs.only_completions")) == [3.0, 2.0]


def test_it_gives_no_spans():
    assert not gives_spans(Conversational("builtins.len"))


@pytest.mark.parametrize("target", ["theirs.missing", "nowhere.f", "f", ""])
def test_a_path_to_nothing_is_refused(theirs, target):
    with pytest.raises(InputError, match=rf"^target={target}: .*; give the dotted path of a reward function"):
        Conversational(target)


@pytest.mark.integration
def test_trls_own_rewards_work():
    pytest.importorskip("trl")
    samples = [Sample("p", "<think>\nx\n</think>\n\\boxed{3}", metadata={"solution": "$3$"})]
    result = judge({"it": Conversational("trl.rewards.think_format_reward")}, samples)
    assert [row["it"].score for row in result.verdicts] == [1.0], result.first_error
