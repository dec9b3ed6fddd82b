"""Laws for every file of conf/credit: one that is added is tested because it exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from torch.utils._python_dispatch import TorchDispatchMode

import apportion.conf
from apportion.credit import Credit, CreditBatch, Rollout, assign_credit, collate
from apportion.credit.align import SpanTable
from apportion.credit.batch import PrefixValues, TreeIndex
from apportion.credit.ops import group_normalize
from apportion.credit.states import cutpoint_states, prefix_lengths, segment_ids
from apportion.experiments.app import build
from apportion.grpo.evidence import Evidence
from apportion.grpo.sampling import RolloutConfig
from apportion.grpo.signals import check_signals
from apportion.verifiers import InputError, Span, Verdict

CONF = Path(apportion.conf.__file__).parent
FILES = sorted((CONF / "credit").rglob("*.yaml"))
NAMES = [path.relative_to(CONF / "credit").with_suffix("").as_posix() for path in FILES]
VERIFIERS = ("steps", "format", "truth", "answer")
# Further verifiers that say what another one does.
ALIASES = {"plan": "format", "critic_1": "steps", "critic_2": "truth", "critic_3": "format"}
# Kinds of signals that come from neither the verifiers nor the sampler, but from a part of the run of their own.
PROVIDED = ("token_scores", "prefix_values", "tree")
SCORERS = ("implicit", "attention", "influence", "counterfactual", "reward_model", "truth")
CUTPOINTS = cutpoint_states(0.9, 5)
# Options that make another rule of a file's strategy stand beside the files.
VARIANTS = [
    "localized/capo credit.normalize=outcome",
    "localized/boundary_slack credit.around=first_error credit@credit.inner=localized/capo",
    "localized/capo credit.graded=true",
    "localized/capo_votes credit.merge=average credit.inner.graded=true credit.inner.threshold=1",
    "localized/capo_votes credit.merge=intersection credit@credit.inner=localized/cliff",
    "localized/cliff credit.center=false",
    "localized/vppo credit.relu=true",
    "process/difference credit.normalize=true",
    "format/gate credit.baseline=keep",
    "format/gdpo credit.over=token credit.max_abs=1",
    "format/gdpo credit.over=none",
    "format/penalty credit.scale=batch",
    "process/pure credit.baseline=step",
    "process/pure_strict credit.baseline=none credit.outcome_weight=0",
    "redistribution/abc credit.accumulate=own",
    "redistribution/counterfactual credit.invert=true",
    "redistribution/oar credit.quantile=1 credit.boost=3",
    "redistribution/red credit.accumulate=own credit.steps=steps",
    "resampled/vineppo credit.whiten=true",
    "sequence/gpg credit.count=rewarded",
    "sequence/reinforce_pp credit.over=sequence credit.kl_coef=0.1",
    "sequence/reinforce_pp_baseline credit.center=false",
    "sequence/rloo credit.normalize=true",
    "uniform credit.scale=batch credit.source=format",
    "weights/entropy_mask credit.renormalise=true",
    "weights/entropy_weight credit.over=answer credit.strength=1",
    "weights/fipo credit.high_only=false credit.tame_over=1.2",
    "weights/gtpo credit.keep_sign=true",
    "weights/hicra credit@credit.inner=weights/hicra",
    "weights/ktae credit.frequency=false credit.end_ids=[0]",
    "weights/prefix_share credit@credit.inner=weights/prefix_share",
]
every_file = pytest.mark.parametrize("name", NAMES)
every_strategy = pytest.mark.parametrize("name", NAMES + VARIANTS)

# Rules that do not give zeros where all rewards, all scores and all span scores are equal; for which span scores, why.
ALONG = ((0.0, 0.25, 1.0), "values are credited by their change along one answer, not across answers")
AROUND = ((0.0, 0.25), "a span under the threshold is blamed against the tokens around it")
UNEVEN = ((0.0, 0.25, 1.0), "the baseline is per token or step, of which an answer may have more than another")
PENALTY = ((0.0, 0.25), "a faulty span loses what no other answer wins")
MODEL = ((0.0, 0.25, 1.0), "a reward model's score moves along one answer")
NOT_CENTRED = {
    "control/true_advantage": ((0.0, 0.25, 1.0), "true advantages are against the value of the state, not the group"),
    "process/difference": ALONG,
    "resampled/vineppo": ALONG,
    "resampled/vineppo credit.whiten=true": ALONG,
    "resampled/spo_chain": ALONG,
    "redistribution/red": MODEL,
    "redistribution/red credit.accumulate=own credit.steps=steps": MODEL,
    "process/difference credit.normalize=true": ALONG,
    "process/gae": ALONG,
    "process/pav": ALONG,
    "process/prime": ((0.0, 0.25, 1.0), "the implicit rewards are of a second model, and differ by token"),
    "process/pure": UNEVEN,
    "process/pure credit.baseline=step": UNEVEN,
    "process/pure_strict credit.baseline=none credit.outcome_weight=0": ((0.0, 0.25, 1.0), "no baseline"),
    "format/constrained": PENALTY,
    "format/dual": PENALTY,
    "format/gdpo_token": PENALTY,
    "format/penalty": PENALTY,
    "format/penalty credit.scale=batch": PENALTY,
    "localized/boundary_slack credit.around=first_error credit@credit.inner=localized/capo": AROUND,
    "localized/capo": AROUND,
    "localized/capo credit.graded=true": AROUND,
    "localized/capo_votes": AROUND,
    "localized/capo_votes credit.merge=average credit.inner.graded=true credit.inner.threshold=1": AROUND,
    "localized/vppo": ((0.0, 0.25), "the right prefix of a wrong answer is praised against its rest"),
    "localized/vppo credit.relu=true": ((0.0, 0.25), "the right prefix of a wrong answer is praised against its rest"),
    "localized/wrong_only": PENALTY,
    "localized/capo credit.normalize=outcome": AROUND,
    "sequence/raw": ((0.0, 0.25, 1.0), "no baseline"),
    "sequence/reinforce_pp credit.over=sequence credit.kl_coef=0.1": ((0.0, 0.25, 1.0), "the KL differs by token"),
}
# Controls that put the same amounts in random places.
RANDOM = {"control/shuffled"}


@pytest.fixture(scope="module", autouse=True)
def hydra_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def composed(*overrides: str) -> DictConfig:
    return compose("train", list(overrides)).credit


@cache
def strategy_of(name: str) -> Any:
    option, *changes = name.split()
    return build(composed(f"credit={option}", *changes), "credit")


# --- batches ---------------------------------------------------------------------------------------------------------


def read_rollout(data: bytes) -> Rollout:
    """Up to seven tokens of one to three characters, some of a tool, the last one perhaps an end token; any spans."""
    stream = iter(data)

    def pick(options: Sequence[Any]) -> Any:
        return options[next(stream) % len(options)]

    ends = list(accumulate(pick((1, 2, 3)) for _ in range(pick(range(7)))))
    length = ends[-1] if ends else 0
    offsets = [(start, stop) for start, stop in pairwise([0, *ends])] + pick(([], [(length, length)]))
    ids = [stop - start for start, stop in offsets]  # 0 for the end token, else 1 to 3
    by_tool = pick((0, 0, *range(128)))  # one bit a token
    verdicts = {}
    for name in VERIFIERS:
        spans = []
        for _ in range(pick(range(5))):
            start, stop = sorted(pick(range(length + 1)) for _ in range(2))
            spans.append(Span(start, stop, pick((0.0, 0.25, 1.0))))
        verdicts[name] = Verdict(pick((None, 0.0, 0.5, 1.0)), tuple(spans))
    return Rollout(
        prompt_ids=[1],
        completion_ids=ids,
        logprobs=[(-0.5, -0.05, -0.5, -2.0)[token] for token in ids],
        offsets=offsets,
        text="x" * length,
        group_id=pick(range(3)),
        truncated=pick((False, True)),
        verdicts=verdicts,
        reward=pick((None, 0.0, 0.1, 0.3, 1.0)),
        model_mask=[not by_tool >> i & 1 for i in range(len(offsets))] if by_tool else None,
    )


# Bytes draw ten times as fast as a strategy of objects, and shrink as well.
rollout_lists = st.lists(st.binary(min_size=80, max_size=80).map(read_rollout), min_size=1, max_size=6)


def all_equal(rows: Sequence[Rollout], reward: float, span_score: float) -> list[Rollout]:
    def level(verdict: Verdict) -> Verdict:
        return Verdict(reward, tuple(replace(span, score=span_score) for span in verdict.spans))

    return [
        replace(row, reward=reward, verdicts={name: level(verdict) for name, verdict in row.verdicts.items()})
        for row in rows
    ]


def centred_cases() -> Iterator[tuple[str, float]]:
    for name in NAMES + VARIANTS:
        exempt, _ = NOT_CENTRED.get(name, ((), ""))
        yield from ((name, score) for score in (0.0, 0.25, 1.0) if score not in exempt)


def no_rows() -> CreditBatch:
    none = torch.zeros(0, dtype=torch.float64)
    places = torch.zeros(2, 0, 3, dtype=torch.long)
    table = SpanTable(places[0], places[1], torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))
    return CreditBatch(
        completion_mask=torch.zeros(0, 5, dtype=torch.bool),
        group_ids=torch.zeros(0, dtype=torch.long),
        reward=none,
        scores=dict.fromkeys(VERIFIERS, none),
        spans=dict.fromkeys(VERIFIERS, table),
    )


def with_signals(batch: CreditBatch) -> CreditBatch:
    """The batch with the numbers that a run gives for every token, made of the token's id alone, and the aliases."""
    ids = torch.zeros(batch.completion_mask.shape) if batch.completion_ids is None else batch.completion_ids.float()
    old = torch.zeros_like(ids) if batch.old_logprobs is None else batch.old_logprobs
    return replace(
        batch,
        scores={**batch.scores, **{alias: batch.scores[name] for alias, name in ALIASES.items()}},
        spans={**batch.spans, **{alias: batch.spans[name] for alias, name in ALIASES.items()}},
        completion_ids=ids.long(),
        old_logprobs=old,
        entropy=0.3 * ids,
        sum_pi_squared=1 / (1 + ids),
        ref_logprobs=old - 0.1 * ids,
        logprobs=old + 0.3 * (ids - 1),
        token_scores=dict.fromkeys(SCORERS, 0.2 * (ids - 1)),
        prefix_values=prefix_values(batch, old),
        tree=tree(batch, ids.long()),
    )


def prefix_values(batch: CreditBatch, old_logprobs: torch.Tensor) -> dict[str, PrefixValues]:
    """Values of the states that strategies ask for: the score of the step before them, or by their number alone."""
    table = batch.spans["steps"]
    steps = torch.cat([table.score.new_full((len(table.score), 1), 0.5), table.score], dim=1).double()
    cut = prefix_lengths(segment_ids(CUTPOINTS, replace(batch, old_logprobs=old_logprobs)))
    cutpoints = torch.arange(cut.shape[1]).expand_as(cut).double() / 10
    return {
        name: PrefixValues(value, torch.full(value.shape, 9), torch.full_like(value, 0.1))
        for name, value in {"steps": steps, CUTPOINTS: cutpoints}.items()
    }


def tree(batch: CreditBatch, ids: torch.Tensor) -> TreeIndex:
    """Answers of a group that begin with the same two tokens share their first segment; the rest is a leaf."""
    rows = torch.arange(len(ids))
    length = (torch.zeros_like(ids) if batch.completion_ids is None else torch.ones_like(ids)).sum(dim=1)
    first = torch.nn.functional.pad(ids, (0, 2))[:, :2]
    shared = 10**6 * batch.group_ids + 10**3 * first[:, 0] + first[:, 1]
    longer = length > 2
    zero = torch.zeros_like(length)
    return TreeIndex(
        node=torch.stack([shared, (10**9 + rows).where(longer, -1)], dim=1),
        start=torch.stack([zero, (zero + 2).where(longer, 0)], dim=1),
        stop=torch.stack([length.clamp(max=2), length.where(longer, 0)], dim=1),
    )


HALVES = [(0, 2, 1.0), (2, 4, 0.0)]
HAND_MADE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "empty answers": ([{"tokens": 0, "reward": 1.0}, {"tokens": 0, "reward": 0.0}], {}),
    "an empty answer beside others": (
        [{"tokens": 0, "reward": 1.0}, {"tokens": 4, "reward": 0.0, "spans": HALVES}, {"tokens": 4, "reward": 1.0}],
        {},
    ),
    "all truncated": (
        [{"tokens": 4, "reward": r, "spans": HALVES, "truncated": True} for r in (0.0, 1.0)],
        {"mask_truncated": True},
    ),
    "groups of one": ([{"tokens": 4, "reward": 1.0, "group": g, "spans": HALVES} for g in (0, 1, 2)], {}),
    "one-token answers": ([{"tokens": 1, "reward": r, "spans": [(0, 1, r)]} for r in (0.0, 1.0, 1.0)], {}),
    "no spans": ([{"tokens": 3, "reward": r} for r in (0.0, 1.0)], {}),
    "spans in one row alone": ([{"tokens": 4, "reward": 1.0, "spans": HALVES}, {"tokens": 3, "reward": 0.0}], {}),
    "nobody judged": ([{"tokens": 4, "reward": None, "spans": HALVES}, {"tokens": 3, "reward": None}], {}),
    "all written by a tool": ([{"tokens": 2, "reward": r, "written": [False] * 2} for r in (0.0, 1.0)], {}),
}


# --- the contract ----------------------------------------------------------------------------------------------------


def credit_of(name: str, batch: CreditBatch) -> Credit:
    """The strategy's answer: float32, finite, zero outside the mask and made of its parts."""
    credit = assign_credit(strategy_of(name), with_signals(batch))
    mask = batch.completion_mask
    assert credit.advantages.dtype == torch.float32
    assert torch.isfinite(credit.advantages).all()
    assert credit.advantages[~mask].eq(0).all()
    assert credit.parts
    torch.testing.assert_close(torch.stack([*credit.parts.values()]).sum(dim=0), credit.advantages)
    if credit.loss_weight is not None:
        assert torch.isfinite(credit.loss_weight).all()
        assert credit.loss_weight.ge(0).all()
    return credit


@every_strategy
@settings(deadline=None, max_examples=25)
@given(rows=rollout_lists, mask_truncated=st.booleans())
def test_credit_is_finite_inside_the_mask_and_zero_outside(
    name: str, rows: list[Rollout], mask_truncated: bool
) -> None:
    batch = collate(rows, mask_truncated=mask_truncated)
    credit = credit_of(name, batch)
    for row, rollout in enumerate(rows):
        if mask_truncated and rollout.truncated:
            assert credit.advantages[row].eq(0).all()
        if rollout.model_mask is not None:  # a tool's tokens
            by_tool = ~torch.tensor(rollout.model_mask, dtype=torch.bool)
            assert credit.advantages[row, : len(by_tool)][by_tool].eq(0).all()


@every_strategy
@pytest.mark.parametrize("case", HAND_MADE)
def test_extreme_batches_do_not_crash(name: str, case: str, batch: Callable[..., CreditBatch]) -> None:
    rows, options = HAND_MADE[case]
    credit = credit_of(name, batch(*rows, **options))
    if case in ("all truncated", "all written by a tool"):
        assert credit.advantages.eq(0).all()


@every_strategy
def test_no_rows_get_no_credit(name: str) -> None:
    assert credit_of(name, no_rows()).advantages.shape == (0, 5)


@pytest.mark.parametrize(("name", "span_score"), list(centred_cases()))
@settings(deadline=None, max_examples=10)
@given(rows=rollout_lists, reward=st.sampled_from([0.0, 0.1, 1 / 3, 1.0]))
def test_equal_evidence_gives_exactly_zero(name: str, span_score: float, rows: list[Rollout], reward: float) -> None:
    assert credit_of(name, collate(all_equal(rows, reward, span_score))).advantages.eq(0).all()


@pytest.mark.parametrize("name", NOT_CENTRED)
def test_rules_that_are_called_not_centred_are_not(name: str, batch: Callable[..., CreditBatch]) -> None:
    for score in NOT_CENTRED[name][0]:
        more, fewer, none = [(1, 2, score), (3, 4, score)], [(1, 2, score)], []
        rows = [{"tokens": 4, "reward": 0.5, "spans": spans} for spans in (more, fewer, none)]
        assert credit_of(name, batch(*rows)).advantages.ne(0).any()


@every_strategy
@settings(deadline=None, max_examples=20)
@given(rows=rollout_lists, columns=st.integers(1, 5), mask_truncated=st.booleans())
def test_padding_changes_nothing(name: str, rows: list[Rollout], columns: int, mask_truncated: bool) -> None:
    batch = collate(rows, mask_truncated=mask_truncated)
    wide = _widen(batch, columns)
    assert_same_credit(name, credit_of(name, wide).advantages[:, :-columns], credit_of(name, batch).advantages)


@every_strategy
@settings(deadline=None, max_examples=20)
@given(rows=rollout_lists, random=st.randoms(), mask_truncated=st.booleans())
def test_order_of_rows_and_groups_changes_nothing(
    name: str, rows: list[Rollout], random: Any, mask_truncated: bool
) -> None:
    order = random.sample(range(len(rows)), len(rows))
    new_ids = random.sample(range(100), 3)
    moved = [replace(rows[index], group_id=new_ids[rows[index].group_id]) for index in order]
    there = credit_of(name, collate(moved, mask_truncated=mask_truncated)).advantages
    here = credit_of(name, collate(rows, mask_truncated=mask_truncated)).advantages
    assert_same_credit(name, there, here[torch.tensor(order)])


@every_strategy
@settings(deadline=None, max_examples=20)
@given(rows=rollout_lists)
def test_rows_left_out_of_training_leave_the_baseline_too(name: str, rows: list[Rollout]) -> None:
    kept = [index for index, row in enumerate(rows) if not row.truncated]
    if not kept:
        return
    alone = credit_of(name, collate([rows[index] for index in kept])).advantages
    beside = credit_of(name, collate(rows, mask_truncated=True)).advantages[torch.tensor(kept), : alone.shape[1]]
    assert_same_credit(name, beside, alone)


def assert_same_credit(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if name in RANDOM:  # the same amounts in each row, wherever they lie
        one, other = one.sort(dim=1).values, other.sort(dim=1).values
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def _widen(batch: CreditBatch, columns: int) -> CreditBatch:
    def pad(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else torch.nn.functional.pad(values, (0, columns))

    names = ("completion_mask", "completion_ids", "old_logprobs", "entropy", "logprobs")
    return replace(batch, **{name: pad(getattr(batch, name)) for name in names})


# --- what is conserved -----------------------------------------------------------------------------------------------


@every_strategy
@settings(deadline=None, max_examples=25)
@given(rows=rollout_lists, mask_truncated=st.booleans())
def test_what_is_declared_is_conserved(name: str, rows: list[Rollout], mask_truncated: bool) -> None:
    strategy, batch = strategy_of(name), collate(rows, mask_truncated=mask_truncated)
    CLAIMS[strategy.conserves](strategy, batch, credit_of(name, batch).advantages)


def centred_outcome(strategy: Any, batch: CreditBatch) -> torch.Tensor:
    outcome = batch.outcome(getattr(strategy, "source", "reward"))
    return group_normalize(outcome, batch.group_ids, scale="none").float()


def assert_proportional(per_row: torch.Tensor, centred: torch.Tensor, group_ids: torch.Tensor) -> None:
    """``per_row`` is ``centred`` times one positive number for each group."""
    assert torch.equal(per_row.ne(0), centred.ne(0))
    ratio = (per_row / centred)[centred.ne(0)]
    assert ratio.gt(0).all()
    torch.testing.assert_close(group_normalize(ratio, group_ids[centred.ne(0)], scale="none") / ratio, 0 * ratio)


def mass(strategy: Any, batch: CreditBatch, advantages: torch.Tensor) -> None:
    tokens = batch.completion_mask.sum(dim=1)
    assert_proportional(advantages.sum(dim=1) / tokens.clamp(min=1), centred_outcome(strategy, batch), batch.group_ids)


def sign(strategy: Any, batch: CreditBatch, advantages: torch.Tensor) -> None:
    assert (advantages * centred_outcome(strategy, batch)[:, None]).ge(0).all()


def zero_mean(strategy: Any, batch: CreditBatch, advantages: torch.Tensor) -> None:
    for group in batch.group_ids.unique():
        rows = advantages[batch.group_ids == group]
        assert abs(float(rows.sum())) < 1e-4 * (1 + float(rows.abs().sum()))


def potential(strategy: Any, batch: CreditBatch, advantages: torch.Tensor) -> None:
    """Each step counted once; an answer without steps is one step."""
    step_ids = batch.judged(strategy.steps).step_ids(batch.completion_mask)
    sums = []
    for credits, steps, mask in zip(advantages, step_ids, batch.completion_mask):
        first = {int(step): float(credit) for step, credit, written in zip(steps, credits, mask) if written}
        sums.append(sum(first.values()))
    total, centred = torch.tensor(sums), centred_outcome(strategy, batch)
    near = centred.abs() > 1e-6
    assert total[~near].abs().lt(1e-5).all()
    assert_proportional(total.where(near, 0.0), centred.where(near, 0.0), batch.group_ids)


def none(strategy: Any, batch: CreditBatch, advantages: torch.Tensor) -> None:
    """No claim."""


CLAIMS: dict[str, Callable[[Any, CreditBatch, torch.Tensor], None]] = {
    claim.__name__: claim for claim in (mass, sign, zero_mean, potential, none)
}


# --- signals, cost and files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    spans: bool = True

    def __call__(self, samples: Sequence[Any]) -> list[Verdict]:
        return [Verdict(None) for _ in samples]


@every_strategy
def test_a_missing_signal_is_named_before_the_first_rollout(name: str) -> None:
    strategy, reward = strategy_of(name), {"another": 1.0}
    panel: Mapping[str, Judge] = dict.fromkeys((*VERIFIERS, *ALIASES, "another"), Judge())
    assert strategy.requires
    if any(signal.startswith(PROVIDED) for signal in strategy.requires):
        with pytest.raises(InputError, match=rf"credit needs ({'|'.join(PROVIDED)}).*; add "):
            check_signals(strategy, panel, reward)
        return
    had = Evidence().available(strategy.requires, RolloutConfig())
    check_signals(strategy, panel, reward, further=had)
    for signal in strategy.requires:
        kind, _, verifier = signal.partition(":")
        if kind == "reward":
            with pytest.raises(InputError, match="reward is empty"):
                check_signals(strategy, panel, {}, further=had)
            continue
        if kind not in ("score", "spans"):  # every run has it
            continue
        with pytest.raises(InputError, match=rf"verifiers\.{verifier}"):
            check_signals(strategy, {n: v for n, v in panel.items() if n != verifier}, reward, further=had)
        if kind == "spans":
            with pytest.raises(InputError, match=rf"spans of verifiers\.{verifier}, which gives scores only"):
                check_signals(strategy, {**panel, verifier: Judge(spans=False)}, reward, further=had)


@every_strategy
def test_a_batch_without_the_signal_is_refused_by_name(name: str) -> None:
    bare = CreditBatch(torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0]), torch.tensor([0.0, 1.0]))
    named = [re.escape(signal.partition(":")[2]) for signal in strategy_of(name).requires if ":" in signal]
    if named:
        with pytest.raises(InputError, match=rf"credit needs .* of (verifiers\.|scorers\.)?({'|'.join(named)})"):
            strategy_of(name)(bare)


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@every_strategy
def test_no_strategy_loops_over_tokens_rows_or_steps(name: str, batch: Callable[..., CreditBatch]) -> None:
    def operations(tokens: int, rows: int) -> int:
        spans = [(i, i + 1, float(i % 3 > 0)) for i in range(0, tokens, 2)]
        made = batch(
            *({"tokens": tokens, "reward": float(i % 2), "spans": spans, "group": i // 4} for i in range(rows))
        )
        made = with_signals(made)
        with CountOperations() as counter:
            strategy_of(name)(made)
        return counter.count

    assert operations(tokens=6, rows=8) == operations(tokens=48, rows=24)


@every_file
def test_the_file_opens_with_a_command_that_makes_the_strategy(name: str) -> None:
    path = CONF / "credit" / f"{name}.yaml"
    program, command, *overrides = shlex.split(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))
    assert (program, command) == ("apportion", "train")
    assert overrides[0] == f"credit={name}"
    assert composed(*overrides)._target_ == composed(f"credit={name}")._target_
    assert type(build(composed(*overrides), "credit")) is type(strategy_of(name))


@every_file
def test_every_option_stands_in_the_file(name: str) -> None:
    options = set(composed(f"credit={name}")) - {"_target_"}
    assert options == {field.name for field in fields(strategy_of(name)) if field.init}
