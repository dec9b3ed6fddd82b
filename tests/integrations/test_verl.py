"""Laws of credit inside verl: the same numbers as here, on the ids that were sampled, and refused before a rollout."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import apportion.conf
from apportion.credit import Credit, CreditBatch, Rollout, assign_credit, collate
from apportion.credit.compose import Composition
from apportion.credit.uniform import Uniform
from apportion.integrations.samples import make_sample
from apportion.integrations.verl import Evidence, Rows, advantages, decode, encode, read_batch, session_index
from apportion.integrations.verl_config import VerlCredit, build, check_run, read_credit
from apportion.integrations.verl_rewards import EVIDENCE, Judge, problem_of
from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.panel import Panel

NAN = float("nan")
CONF = Path(apportion.conf.__file__).parent / "credit"
NAMES = [str(path.relative_to(CONF).with_suffix("")) for path in sorted(CONF.rglob("*.yaml"))]


# --- stand-ins -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watching:
    """A strategy that keeps what it was shown, and gives every trained token 1."""

    seen: list[CreditBatch] = field(default_factory=list)
    weight: float | None = None
    phase: ClassVar[str] = "rollout"
    conserves: ClassVar[str] = "none"
    requires: ClassVar[frozenset[str]] = frozenset({"reward"})

    def __call__(self, batch: CreditBatch) -> Credit:
        self.seen.append(batch)
        ones = batch.completion_mask.float()
        return Credit(ones, None if self.weight is None else self.weight * ones, metrics={"rows": len(ones)})


@dataclass(frozen=True)
class Updating(Watching):
    phase: ClassVar[str] = "update"


@dataclass(frozen=True)
class Wanting(Watching):
    """Needs whatever ``wants`` says."""

    wants: str = "reward"

    @property
    def requires(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({self.wants})


class Lines:
    """Right where the answer holds no "x"; every line is a step, wrong where it holds one."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(float("x" not in s.completion), tuple(self.steps(s.completion))) for s in samples]

    def steps(self, text: str) -> list[Span]:
        found, start = [], 0
        for line in text.splitlines(keepends=True):
            found.append(Span(start, start + len(line), float("x" not in line), "step"))
            start += len(line)
        return found


@dataclass(frozen=True)
class Plain:
    """Scores without spans."""

    value: float | None = 1.0
    spans: ClassVar[bool] = False

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.value] * len(samples)


def credit_of(strategy: Any, mask_truncated: bool = False, **verifiers: Any) -> VerlCredit:
    weights = dict.fromkeys(list(verifiers)[:1], 1.0)
    return VerlCredit(strategy, Panel(verifiers, weights), None, mask_truncated)


def rows_of(seen: Sequence[Evidence | None], width: int, **changes: Any) -> Rows:
    """Single-output sessions of full width, whose scores are the rewards in the evidence."""
    scores = torch.zeros(len(seen), width)
    scores[:, -1] = torch.tensor([0.0 if one is None or one.reward is None else one.reward for one in seen])
    text = [None if one is None else as_text(one) for one in seen]
    keys = [f"p_{row}_0" for row in range(len(seen))]
    return Rows(**({"keys": keys, "lengths": [width] * len(seen), "evidence": text, "scores": scores} | changes))


def as_text(seen: Evidence) -> str:
    return json.dumps(vars(seen))


def run_of(**credit: Any) -> dict[str, Any]:
    """The keys of verl's configuration that matter here, as a user would set them."""
    node = {"strategy": "uniform", "verifiers": {"steps": f"{__name__}.Lines"}, "reward": {"steps": 1.0}} | credit
    return {
        "algorithm": {"adv_estimator": "apportion", "credit": node},
        "reward": {"reward_manager": {"name": "apportion"}, "reward_model": {"enable": False}},
        "actor_rollout_ref": {"actor": {"use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}},
    }


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: Any) -> None:
    """This file under a name that dotted paths can reach."""
    monkeypatch.setitem(sys.modules, "stand_ins", sys.modules[__name__])


# --- the evidence as text --------------------------------------------------------------------------------------------

numbers = st.floats(-9, 9, allow_nan=False, width=32)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(st.text(max_size=5), st.none() | numbers, max_size=3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), numbers), max_size=5),
    st.none() | numbers,
)
def test_evidence_survives_the_way_through_verl(
    scores: dict[str, float | None], spans: list[tuple[int, int, float]], reward: float | None
) -> None:
    seen = Evidence(7, reward, True, scores, dict.fromkeys(scores, spans), dict.fromkeys(scores, 2), ["a"])
    assert decode(as_text(seen)) == seen


def test_spans_are_written_in_tokens_of_the_sampled_ids() -> None:
    facts = {"offsets": [(0, 2), (2, 2), (2, 5), (5, 6), (6, 6)], "num_tokens": 5, "truncated": True}
    verdict = Verdict(0.5, (Span(5, 6, 0.0), Span(0, 5, 1.0), Span(6, 6, 0.25)))
    seen = decode(encode(Sample("q", "1+2=3x", None, facts), {"v": verdict, "w": Verdict(None)}, None, ["w"]))
    assert seen.spans == {"v": [(0, 3, 1.0), (3, 4, 0.0), (4, 5, 0.25)], "w": []}
    assert (seen.scores, seen.reward, seen.tokens, seen.truncated) == ({"v": 0.5, "w": None}, None, 5, True)
    assert (seen.uncovered, seen.errors) == ({"v": 0, "w": 0}, ["w"])


# --- from verl's batch to ours, and back -----------------------------------------------------------------------------


def test_credit_falls_on_the_tokens_of_the_wrong_step_alone() -> None:
    seen = [
        Evidence(4, 0.0, scores={"steps": 0.0}, spans={"steps": [(0, 2, 1.0), (2, 4, 0.0)]}),
        Evidence(4, 1.0, scores={"steps": 1.0}, spans={"steps": [(0, 4, 1.0)]}),
    ]
    strategy = build({"use": "localized/wrong_only", "penalty": 2.0}, "credit", "k")
    rows = rows_of(seen, 4)
    values, metrics = advantages(credit_of(strategy), rows.scores, torch.ones(2, 4), ["a", "a"], rows)
    assert values.tolist() == [[0.0, 0.0, -2.0, -2.0], [0.0, 0.0, 0.0, 0.0]]
    assert metrics["verifier/steps"] == 0.5
    assert metrics["credit/mass_on_errors"] == 1.0


def test_a_step_that_scores_zero_keeps_its_place() -> None:
    """Boundaries read from non-zero rewards would lose it."""
    watching = Watching()
    spans = [(0, 1, 0.0), (1, 3, 0.0), (3, 4, 0.5)]
    rows = rows_of([Evidence(4, 0.0, scores={"steps": 0.0}, spans={"steps": spans})], 4)
    advantages(credit_of(watching), rows.scores, torch.ones(1, 4), ["a"], rows)
    table = watching.seen[0].judged("steps")
    assert table.step_ids(watching.seen[0].completion_mask).tolist() == [[0, 1, 1, 2]]
    assert table.score.tolist() == [[0.0, 0.0, 0.5]]


def test_an_abstention_is_no_reward_of_zero() -> None:
    rows = rows_of([Evidence(2, 1.0), Evidence(2, 0.0), Evidence(2, None)], 2)
    values, metrics = advantages(credit_of(Uniform()), rows.scores, torch.ones(3, 2), ["a"] * 3, rows)
    torch.testing.assert_close(values, torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]), atol=1e-5, rtol=0)
    assert metrics["reward/unscored"] == 1.0


def test_a_session_has_one_vote_however_often_it_called_the_model() -> None:
    """verl's own grpo gives these numbers; its vectorised one .5 and -1.5."""
    keys = ["a_0_2", "a_1_0", "a_0_0", "a_0_1"]
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    rows = Rows(keys, [2, 1, 2, 2], [None] * 4, scores)
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]])
    values, _ = advantages(credit_of(Uniform(ddof=1)), scores, mask, ["a"] * 4, rows)
    expected = torch.tensor([[0.70711, 0.70711], [-0.70711, 0.0], [0.0, 0.70711], [0.70711, 0.70711]])
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


def test_the_pieces_of_a_session_are_one_answer_in_order() -> None:
    watching = Watching()
    seen = as_text(Evidence(5, 1.0, scores={"steps": 1.0}, spans={"steps": [(0, 2, 1.0), (2, 5, 0.0)]}))
    scores = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    ids = torch.tensor([[13, 14, 15], [11, 12, 0]])
    rows = Rows(["a_0_1", "a_0_0"], [3, 2], [seen, seen], scores, {"completion_ids": ids})
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    values, _ = advantages(credit_of(watching), scores, mask, ["a", "a"], rows)
    batch = watching.seen[0]
    assert batch.completion_ids is not None
    assert batch.completion_ids.tolist() == [[11, 12, 13, 14, 15]]
    assert batch.completion_mask.tolist() == [[True, True, True, False, True]]
    assert batch.judged("steps").start.tolist() == [[0, 2]]
    assert batch.reward.tolist() == [1.0]
    assert values.tolist() == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8), st.randoms())
def test_every_token_finds_its_way_back(sizes: list[tuple[int, int]], random: Any) -> None:
    keys = [f"u_v_{session}_{place}" for place, (session, _) in enumerate(sizes)]
    order = random.sample(range(len(keys)), len(keys))
    keys, lengths = [keys[at] for at in order], [sizes[at][1] for at in order]
    sessions, index = session_index(keys, lengths, 3)
    kept = index[index >= 0]
    assert sorted(kept.tolist()) == [row * 3 + at for row, length in enumerate(lengths) for at in range(length)]
    assert sorted(row for rows in sessions for row in rows) == list(range(len(keys)))
    assert all(
        [int(keys[row].rsplit("_")[-1]) for row in rows] == sorted(int(keys[row].rsplit("_")[-1]) for row in rows)
        for rows in sessions
    )


def test_ids_of_a_tool_get_no_credit() -> None:
    spans = {"steps": [(0, 2, 0.0), (2, 4, 0.0)]}
    rows = rows_of([Evidence(4, 0.0, scores={"steps": 0.0}, spans=spans)], 4)
    strategy = build("localized/wrong_only", "credit", "k")
    values, _ = advantages(credit_of(strategy), rows.scores, torch.tensor([[1, 0, 0, 1]]), ["a"], rows)
    assert values.tolist() == [[-1.0, 0.0, 0.0, -1.0]]


def test_rows_that_fill_a_batch_up_have_no_vote_and_no_verdict() -> None:
    """verl copies the first row's verdicts to them, under a uid of their own, with a mask of zeros."""
    seen = Evidence(3, 1.0, scores={"steps": 1.0}, spans={"steps": [(0, 3, 1.0)]}, errors=["steps"])
    rows = rows_of([seen, Evidence(3, 0.0, scores={"steps": 0.0}), seen], 3, keys=["a_0_0", "a_1_0", "padf_0_0"])
    rows.scores[2] = 0.0
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    values, metrics = advantages(credit_of(Uniform()), rows.scores, mask, ["a", "a", "padf"], replaced(rows, [3, 3, 1]))
    torch.testing.assert_close(values[:, 0], torch.tensor([1.0, -1.0, 0.0]), atol=1e-5, rtol=0)
    assert (metrics["verifier/steps"], metrics["verifier/errors_steps"]) == (0.5, 1.0)
    assert metrics["reward/unscored"] == 0.0


def replaced(rows: Rows, lengths: list[int]) -> Rows:
    return Rows(rows.keys, lengths, rows.evidence, rows.scores)


@pytest.mark.parametrize(("left_out", "expected"), [(False, [1.0, -1.0, -1.0, 1.0]), (True, [1.0, -1.0, 0.0, 0.0])])
def test_answers_that_the_limit_cut_can_be_left_out(left_out: bool, expected: list[float]) -> None:
    seen = [Evidence(1, 1.0), Evidence(1, 0.0), Evidence(1, 0.0, truncated=True), Evidence(1, 1.0, truncated=True)]
    rows = rows_of(seen, 1)
    values, _ = advantages(credit_of(Uniform(), left_out), rows.scores, torch.ones(4, 1), ["a"] * 4, rows)
    torch.testing.assert_close(values[:, 0], torch.tensor(expected), atol=1e-5, rtol=0)


def test_a_kl_penalty_in_the_reward_moves_the_reward_and_no_boundary() -> None:
    watching = Watching()
    seen = [Evidence(3, 1.0, scores={"steps": 1.0}, spans={"steps": [(0, 1, 0.0), (1, 3, 1.0)]}), Evidence(3, None)]
    rows = rows_of(seen, 3)
    rewards = rows.scores - 0.25 * torch.ones(2, 3)
    advantages(credit_of(watching), rewards, torch.ones(2, 3), ["a", "a"], rows)
    batch = watching.seen[0]
    assert batch.reward[0] == 0.25
    assert batch.reward[1].isnan()
    assert batch.judged("steps").stop[0].tolist() == [1, 3]


def test_a_penalty_on_every_piece_of_a_session_is_paid_and_its_reward_is_had_once() -> None:
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    rows = Rows(["a_0_0", "a_0_1"], [2, 2], [None, None], scores)
    batch, _, _ = read_batch(scores - 0.125, torch.ones(2, 2), ["a", "a"], rows)
    assert batch.reward.tolist() == [0.5]


def test_a_weight_of_the_objective_is_a_factor_of_the_advantage() -> None:
    rows = rows_of([Evidence(2, 1.0)], 2)
    values, _ = advantages(credit_of(Watching(weight=0.5)), rows.scores, torch.ones(1, 2), ["a"], rows)
    assert values.tolist() == [[0.5, 0.5]]


def test_rewards_on_several_tokens_are_refused_as_their_places_would_be_lost() -> None:
    rows = rows_of([None], 3, scores=torch.tensor([[0.5, 0.0, 1.0]]))
    with pytest.raises(
        InputError, match=r"row p_0_0: rm_scores has rewards on several tokens.*algorithm\.credit\.verif"
    ):
        advantages(credit_of(Uniform()), rows.scores, torch.ones(1, 3), ["a"], rows)


def test_spans_of_another_response_are_refused() -> None:
    rows = rows_of([Evidence(5, 1.0)], 3)
    with pytest.raises(InputError, match="row p_0_0: 5 ids were judged but the session has 3"):
        advantages(credit_of(Uniform()), rows.scores, torch.ones(1, 3), ["a"], rows)


def test_a_strategy_that_adapts_is_told_of_every_batch() -> None:
    strategy = build({"use": "format/dual", "inner": {"use": "uniform"}, "source": "form"}, "credit", "k")
    rows = rows_of([Evidence(1, 1.0, scores={"form": 0.0}), Evidence(1, 0.0, scores={"form": 0.0})], 1)
    before = strategy.weight
    advantages(credit_of(strategy), rows.scores, torch.ones(2, 1), ["a", "a"], rows)
    assert strategy.weight == pytest.approx(before + 0.1 * 0.95)


@pytest.mark.parametrize("wants", ["spans:steps", "score:steps", "entropy", "ref_logprobs", "token_scores:x", "tree"])
def test_a_trainer_that_hands_on_too_little_is_refused(wants: str) -> None:
    rows = rows_of([None], 2)
    with pytest.raises(InputError, match=f"Wanting needs {wants}, which this trainer of verl does not hand on"):
        advantages(credit_of(Wanting(wants=wants)), rows.scores, torch.ones(1, 2), ["a"], rows)


TENSORS = ("old_logprobs", "entropy", "ref_logprobs", "completion_ids")


def runs_in_verl(name: str) -> bool:
    strategy = build(name, "credit", "k")
    kinds = {signal.partition(":")[0] for signal in strategy.requires}
    return strategy.phase == "rollout" and kinds <= {"reward", "score", "spans", *TENSORS}


def drawn(requires: frozenset[str], seed: int) -> list[Rollout]:
    """Twelve answers in three groups, of ids with two characters each, and a verdict of every verifier named."""
    draw = random.Random(seed)
    names = sorted({signal.partition(":")[2] for signal in requires if ":" in signal})
    rollouts = []
    for row in range(12):
        size = draw.randint(2, 9)
        cuts = sorted(draw.sample(range(1, 2 * size), min(3, 2 * size - 1)))
        verdicts = {}
        for name in names:
            spans = [Span(a, b, float(draw.random() < 0.5)) for a, b in pairwise([0, *cuts, 2 * size])]
            verdicts[name] = Verdict(draw.choice([0.0, 1.0, 0.5, None]), tuple(spans))
        offsets = [(2 * at, 2 * at + 2) for at in range(size)]
        facts = {"group_id": row % 3, "truncated": draw.random() < 0.2, "verdicts": verdicts}
        reward = draw.choice([0.0, 1.0, 0.25, None])
        ids = [draw.randint(0, 5) for _ in range(size)]
        written = [at == 0 or draw.random() < 0.9 for at in range(size)]
        text = "ab" * size
        rollouts.append(Rollout([1], ids, [0.0] * size, offsets, text, **facts, reward=reward, model_mask=written))
    return rollouts


@pytest.mark.parametrize("name", [name for name in NAMES if runs_in_verl(name)])
def test_every_strategy_gives_what_it_gives_in_a_run_of_its_own(name: str) -> None:
    strategy, again = build(name, "credit", "k"), build(name, "credit", "k")
    rollouts = drawn(strategy.requires, seed=len(name))
    draw = torch.Generator().manual_seed(3)
    own = collate(rollouts, seed=5)
    shape = own.completion_mask.shape
    tensors = {name: -torch.rand(shape, generator=draw) * (-1 if name == "entropy" else 1) for name in TENSORS[:3]}
    own = replace(own, **tensors)
    assert own.completion_ids is not None
    texts = []
    for rollout in rollouts:
        facts = {"offsets": rollout.offsets, "num_tokens": len(rollout.completion_ids), "truncated": rollout.truncated}
        texts.append(encode(Sample("", rollout.text, None, facts), rollout.verdicts, rollout.reward))
    scores = torch.zeros(shape)
    scores[:, 0] = torch.tensor([rollout.reward or 0.0 for rollout in rollouts])
    rows = Rows(
        [f"u_{row}_0" for row in range(12)],
        [len(rollout.completion_ids) for rollout in rollouts],
        texts,
        scores,
        tensors | {"completion_ids": own.completion_ids},
        seed=5,
    )
    uids = [f"prompt {rollout.group_id}" for rollout in rollouts]
    found, _ = advantages(credit_of(strategy), scores, own.completion_mask.long(), uids, rows)
    wanted = assign_credit(again, own)
    weight = 1.0 if wanted.loss_weight is None else wanted.loss_weight
    torch.testing.assert_close(found, wanted.advantages * weight, atol=1e-6, rtol=1e-6)
    assert found.any()


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_of_the_package_can_be_named(name: str) -> None:
    assert callable(build(name, "credit", "k"))


def test_options_stand_beside_the_name_at_any_depth() -> None:
    composed = build({"use": "format/composed", "terms": {"outcome": {"ddof": 1}}, "max_abs": 3.0}, "credit", "k")
    assert isinstance(composed, Composition)
    assert composed.terms["outcome"] == Uniform(ddof=1)
    assert composed.max_abs == 3.0
    terms = {"a": {"use": "sequence/trl"}, "b": {"_target_": "apportion.credit.uniform.Uniform", "scale": "none"}}
    own = build({"use": "apportion.credit.compose.Composition", "terms": terms}, "credit", "k")
    assert own.terms == {"a": Uniform(ddof=1, eps=1e-4), "b": Uniform(scale="none")}


def test_a_file_of_the_users_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("_target_: apportion.credit.uniform.Uniform\neps: 0.5\n")
    assert build(str(tmp_path / "mine.yaml"), "credit", "k") == Uniform(eps=0.5)


def test_the_credit_of_a_run_is_read_from_the_node_algorithm() -> None:
    options = {"success": "steps", "mask_truncated": True, "timeout_s": 2.0}
    found = read_credit({"credit": run_of(**options)["algorithm"]["credit"]})
    assert (found.strategy, found.success, found.mask_truncated) == (Uniform(), "steps", True)
    assert (list(found.panel.verifiers), found.panel.reward_weights, found.panel.timeout_s) == (
        ["steps"],
        {"steps": 1.0},
        2.0,
    )


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ({"strategy": "unifrom"}, r"algorithm\.credit\.strategy=unifrom: no such file in conf/credit"),
        ({"strategy": 3}, r"algorithm\.credit\.strategy: give a name of conf/credit"),
        ({"strategy": "nowhere.Strategy"}, r"algorithm\.credit\.strategy: nowhere\.Strategy cannot be made"),
        ({"strategy": {"use": "uniform", "epss": 1}}, r"algorithm\.credit\.strategy: .*Uniform cannot be made .*epss"),
        ({"strategy": {"use": "uniform", "ddof": 3}}, r"algorithm\.credit\.strategy: ddof must be 0 or 1"),
        ({"strategies": "uniform"}, r"algorithm\.credit\.strategies: nothing reads this key"),
        ({"verifiers": "steps"}, r"algorithm\.credit\.verifiers=steps: must be names with values"),
        ({"verifiers": {"a": "human_labels"}}, r"algorithm\.credit\.verifiers\.a\.path: needs a value"),
        ({"reward": {"answer": 1.0}}, r"algorithm\.credit\.reward\.answer: no verifier 'answer' \(there are: steps\)"),
        ({"reward": {"steps": "much"}}, r"algorithm\.credit\.reward\.steps=much: must be a number"),
        ({"reward": {}}, r"algorithm\.credit\.reward: is empty"),
        ({"success": "answer"}, r"algorithm\.credit\.success: no verifier 'answer'"),
    ],
)
def test_what_is_wrong_in_the_node_is_named(credit: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_run(run_of(**credit))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ("spans:plain", r"needs spans of algorithm\.credit\.verifiers\.plain, which gives scores only"),
        ("spans:truth", r"needs the spans of a verifier 'truth' \(there are: steps, plain\); add \+algorithm\.credit"),
        ("score:truth", r"add \+algorithm\.credit\.verifiers\.truth=\.\.\."),
        ("ref_logprobs", r"set actor_rollout_ref\.actor\.use_kl_loss=true"),
        ("sum_pi_squared", "use apportion train"),
        ("token_scores:influence", "use apportion train"),
        ("prefix_values:steps", "use apportion train"),
        ("tree", "use apportion train"),
    ],
)
def test_a_missing_signal_is_refused_before_the_first_rollout_and_names_the_key(wants: str, message: str) -> None:
    verifiers = {"steps": "stand_ins.Lines", "plain": "stand_ins.Plain"}
    run = run_of(strategy={"use": "stand_ins.Wanting", "wants": wants}, verifiers=verifiers)
    with pytest.raises(
        InputError, match=rf"algorithm\.credit\.strategy: Wanting needs .*{message.removeprefix('needs ')}"
    ):
        check_run(run)


@pytest.mark.parametrize("wants", ["reward", "spans:steps", "score:steps", "old_logprobs", "entropy", "completion_ids"])
def test_what_verl_has_is_not_refused(wants: str) -> None:
    assert check_run(run_of(strategy={"use": "stand_ins.Wanting", "wants": wants})).strategy == Wanting(wants=wants)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("reward.reward_manager.name", "naive", r"reward\.reward_manager\.name: must be apportion"),
        ("reward.reward_model.enable", True, r"reward\.reward_model\.enable=true: takes the reward from its model"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean", r"loss_mode=geo_mean: averages the credit"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "tool_agent", "use apportion_tool_agent"),
    ],
)
def test_settings_of_verl_that_would_undo_the_credit_are_refused(path: str, value: Any, message: str) -> None:
    run = run_of()
    put(run, path, value)
    with pytest.raises(InputError, match=message):
        check_run(run)


def put(run: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        run = run.setdefault(part, {})
    run[last] = value


def test_a_kl_in_the_reward_is_refused_where_the_strategy_reads_no_reward() -> None:
    run = run_of(strategy={"use": "stand_ins.Wanting", "wants": "spans:steps"})
    run["algorithm"]["use_kl_in_reward"] = True
    with pytest.raises(InputError, match=r"algorithm\.use_kl_in_reward=true: Wanting does not read the reward"):
        check_run(run)
    run["algorithm"]["credit"]["strategy"] = "uniform"
    check_run(run)


def test_entropy_is_not_there_where_verl_takes_the_samplers_log_probabilities() -> None:
    run = run_of(strategy={"use": "stand_ins.Wanting", "wants": "entropy"})
    put(run, "algorithm.rollout_correction.bypass_mode", True)
    with pytest.raises(InputError, match=r"algorithm\.rollout_correction\.bypass_mode=true leaves out"):
        check_run(run)


def test_credit_that_is_assigned_at_each_optimiser_step_is_refused() -> None:
    with pytest.raises(InputError, match="Updating needs logprobs: verl assigns credit once for each batch"):
        check_run(run_of(strategy="stand_ins.Updating"))


def test_verls_own_reward_does_where_no_verifier_is_wanted() -> None:
    run = run_of(verifiers={}, reward={})
    run["reward"]["reward_manager"]["name"] = "naive"
    assert check_run(run).strategy == Uniform()


# --- verifiers inside reward workers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level, with one merge, so that "12" sampled as two ids would be encoded as one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*alphabet, "12", "<eos>", "<tool>"])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", pad_token="<eos>", additional_special_tokens=["<tool>"]
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """One id per byte, whatever the merges."""
    return [
        tokenizer.convert_tokens_to_ids(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(c)[0][0])
        for c in text
    ]


def test_sampled_ids_are_never_encoded_again(tokenizer: Any) -> None:
    ids = [*ids_of(tokenizer, "12=x"), tokenizer.eos_token_id]
    assert tokenizer.encode("12=x") != ids[:-1]
    sample = make_sample(tokenizer, [tokenizer.eos_token_id], problem_of({}), [1, 2], ids)
    assert (sample.completion, sample.metadata["offsets"]) == ("12=x", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)])
    assert (sample.metadata["completion_ids"], sample.metadata["prompt_ids"]) == (tuple(ids), (1, 2))


@pytest.mark.parametrize(
    ("text", "end", "limit", "truncated"),
    [
        ("123", None, 3, True),
        ("123", None, 4, False),
        ("12", 257, 3, False),
        ("12", 258, 3, False),
        ("12", 258, None, False),
    ],
)
def test_an_answer_is_cut_where_it_fills_the_limit_without_an_end(
    tokenizer: Any, text: str, end: int | None, limit: int | None, truncated: bool
) -> None:
    ids = ids_of(tokenizer, text) + ([] if end is None else [end])
    sample = make_sample(tokenizer, [257, 258], problem_of({}), [], ids, limit=limit)
    assert sample.metadata["truncated"] is truncated


def test_verifiers_are_told_what_the_tools_wrote(tokenizer: Any) -> None:
    mask = [1, 1, 0, 0, 1]
    sample = make_sample(tokenizer, [257], problem_of({}), [], ids_of(tokenizer, "ab34c"), response_mask=mask)
    assert sample.metadata["tool_spans"] == [(2, 4)]


def test_a_row_of_verls_data_set_is_a_problem() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "image"}, {"type": "text", "text": "1?"}],
        },
    ]
    columns = {"raw_prompt": messages, "reward_model": {"ground_truth": ["2", "two"]}, "data_source": "sums"}
    problem = problem_of(columns | {"extra_info": {"level": 3}})
    assert (problem.prompt, problem.reference) == ("1+1?", '["2", "two"]')
    assert (problem.metadata["level"], problem.metadata["data_source"]) == (3, "sums")
    assert problem_of({"reward_model": {"ground_truth": "2"}, "extra_info": None}).reference == "2"
    assert problem_of({}).reference is None


def sample_of(text: str) -> Sample:
    offsets = [(at, at + 1) for at in range(len(text))]
    return Sample("q", text, None, {"offsets": offsets, "num_tokens": len(text), "truncated": False})


def ask(credit: VerlCredit, texts: Sequence[str]) -> list[dict[str, Any]]:
    async def all_of_them() -> list[Any]:
        judge = Judge(credit)
        return await asyncio.gather(*(judge(sample_of(text)) for text in texts), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_verl_gets_one_number_its_accuracy_and_the_evidence_as_text() -> None:
    right, wrong = ask(credit_of(Uniform(), steps=Lines()), ["ok\nok", "ok\nx"])
    assert (right["reward_score"], wrong["reward_score"]) == (1.0, 0.0)
    assert [set(one["reward_extra_info"]) for one in (right, wrong)] == [{"acc", EVIDENCE}] * 2
    assert (right["reward_extra_info"]["acc"], wrong["reward_extra_info"]["acc"]) == (1.0, 0.0)
    assert decode(wrong["reward_extra_info"][EVIDENCE]).spans == {"steps": [(0, 2, 1.0), (3, 4, 0.0)]}


def test_accuracy_is_that_of_the_verifier_named_for_it() -> None:
    panel = Panel({"steps": Lines(), "length": Plain(0.25)}, {"steps": 1.0, "length": 2.0})
    (found,) = ask(VerlCredit(Uniform(), panel, success="steps"), ["ok"])
    assert (found["reward_score"], found["reward_extra_info"]["acc"]) == (1.5, 1.0)


def test_an_abstention_is_a_zero_for_verl_alone() -> None:
    (found,) = ask(credit_of(Uniform(), steps=Plain(None)), ["ok"])
    assert (found["reward_score"], found["reward_extra_info"]["acc"]) == (0.0, 0.0)
    assert decode(found["reward_extra_info"][EVIDENCE]).reward is None


def test_answers_that_wait_are_judged_together() -> None:
    sizes: list[int] = []

    def slow(samples: Sequence[Sample]) -> list[float]:
        sizes.append(len(samples))
        return [float(len(sample.completion)) for sample in samples]

    found = ask(credit_of(Uniform(), length=slow), ["a" * n for n in range(1, 8)])
    assert [one["reward_score"] for one in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert sizes == [7] or sizes == [1, 6]


def test_a_verifier_that_fails_on_one_answer_costs_the_others_nothing() -> None:
    def brittle(samples: Sequence[Sample]) -> list[Any]:
        return [ValueError("no") if "x" in sample.completion else 1.0 for sample in samples]

    found = ask(credit_of(Uniform(), brittle=brittle), ["a", "x", "b"])
    seen = [decode(one["reward_extra_info"][EVIDENCE]) for one in found]
    assert [one.reward for one in seen] == [1.0, None, 1.0]
    assert [one.errors for one in seen] == [[], ["brittle"], []]


def test_verifiers_load_once_what_they_load() -> None:
    class Loading(Plain):
        times = 0

        def prepare(self) -> None:
            Loading.times += 1

    loading = Loading()
    ask(credit_of(Uniform(), loading=loading), ["a", "b"])
    assert loading.times == 1


def test_a_panel_that_cannot_judge_is_heard_of_by_all_who_wait() -> None:
    class Broken(Panel):
        def judge(self, samples: Sequence[Sample]) -> Any:
            raise InputError("the sandbox is gone")

    found = ask(VerlCredit(Uniform(), Broken({}, {})), ["a", "b", "c"])
    assert [str(one) for one in found] == ["the sandbox is gone"] * 3
