"""A state's value is the plain mean of the rewards of its continuations, sampled once for all answers that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.align import decode_text
from apportion.credit.batch import PrefixValues
from apportion.credit.resampled import ResampledCutpoints, ResampledSteps
from apportion.credit.states import prefix_lengths, segment_ids
from apportion.grpo.collect import Collected, collect
from apportion.grpo.policy import Policy
from apportion.grpo.prefix_values import PrefixValuer, Valued
from apportion.grpo.sampling import RolloutConfig, sample_groups
from apportion.grpo.task import Problem
from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.panel import Panel

CONFIG = RolloutConfig(prompts_per_step=2, group_size=3, max_new_tokens=8)
PROBLEMS = [Problem("a", "7+9-a*1=?"), Problem("b", "1+2=?")]
CHAIN = ResampledCutpoints(interval=2).states


def digits(samples: Sequence[Sample]) -> list[Verdict]:
    """The share of digits; every two characters are a step. Truncated texts lose a half."""
    return [
        Verdict(
            sum(c.isdigit() for c in s.completion) / max(len(s.completion), 1) - 0.5 * s.metadata["truncated"],
            tuple(Span(at, min(at + 2, len(s.completion)), 1.0) for at in range(0, len(s.completion), 2)),
        )
        for s in samples
    ]


def never(samples: Sequence[Sample]) -> list[None]:
    raise AssertionError("a verifier without a weight need not see continuations")


PANEL = {"answer": digits, "steps": digits}
WEIGHTS = {"answer": 1.0}


def rolled(policy: Policy, problems: Sequence[Problem] = PROBLEMS, config: RolloutConfig = CONFIG) -> Collected:
    return collect(policy, problems, Panel(PANEL, WEIGHTS), config, seed=3, step=1)


def valued(policy: Policy, collected: Collected, valuer: PrefixValuer, names: Sequence[str] = ("steps",)) -> Valued:
    return ask(policy, collected.problems, collected.rollouts, collate(collected.rollouts), valuer, names)


def ask(
    policy: Policy,
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    batch: CreditBatch,
    valuer: PrefixValuer,
    names: Sequence[str],
    **options: Any,
) -> Valued:
    panel = {"answer": digits, "steps": never}
    options = {"seed": 3, "step": 1, **options}
    return valuer(names, policy, problems, rollouts, batch, Panel(panel, WEIGHTS), CONFIG, **options)


def test_a_value_is_the_mean_of_its_continuations_rewards(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted again from the seeds that the sampler was given, each continuation drawn alone to its own limit."""
    seen: list[tuple[list[int], int]] = []

    def spy(policy: Policy, prompts: Any, row_seeds: Any, **options: Any) -> Any:
        seen.extend((list(prompts[i // 4]), seed) for i, seed in enumerate(row_seeds))
        return sample_groups(policy, prompts, row_seeds, **options)

    collected = rolled(policy)
    monkeypatch.setattr("apportion.grpo.engines.native.sample_groups", spy)
    values = valued(policy, collected, PrefixValuer(num_samples=4)).values["steps"]
    lengths = prefix_lengths(segment_ids("steps", collate(collected.rollouts)))
    checked = 0
    for row, rollout in enumerate(collected.rollouts):
        assert values.value[row].isnan().tolist() == lengths[row].lt(0).tolist()  # the last state among them
        assert values.count[row, lengths[row] < 0].eq(0).all()
        for column, length in ((c, int(n)) for c, n in enumerate(lengths[row]) if n >= 0):
            start = [*rollout.prompt_ids, *rollout.completion_ids[:length]]
            rewards = []
            for seed in (seed for prompt, seed in seen if prompt == start):
                (ending,) = sample_groups(policy, [start], [seed], group_size=1, max_new_tokens=8 - length)
                ids = [*rollout.completion_ids[:length], *ending.ids]
                text = decode_text(policy.tokenizer, ids)
                (verdict,) = digits([Sample("", text, None, {"truncated": ending.truncated})])
                rewards.append(verdict.score)
            sample = torch.tensor(rewards, dtype=torch.float64)
            assert len(rewards) == 4 == int(values.count[row, column])
            assert float(values.value[row, column]) == pytest.approx(float(sample.mean()))
            assert float(values.variance[row, column]) == pytest.approx(float(sample.var(correction=0)))
            checked += 1
    assert checked > 10
    assert values.value[:3, 0].unique().numel() == 1  # the prompt is one state for its whole group


def test_a_state_is_sampled_once_for_all_answers_that_share_it(policy: Policy) -> None:
    collected = rolled(policy)
    twins = [*collected.rollouts, *collected.rollouts]
    result = ask(policy, PROBLEMS, twins, collate(twins), PrefixValuer(num_samples=2), ["steps"])
    alone = valued(policy, collected, PrefixValuer(num_samples=2))
    for name in ("cost/value_tokens", "cost/value_states", "cost/value_forwards"):
        assert result.metrics[name] == alone.metrics[name]
    assert alone.metrics["cost/value_states_shared"] > 0.1  # the prompts
    assert result.metrics["cost/value_states_shared"] > 0.5
    both = result.values["steps"].value
    torch.testing.assert_close(both[:6], both[6:], equal_nan=True)
    torch.testing.assert_close(both[:6], alone.values["steps"].value, equal_nan=True)


def test_a_value_depends_on_nothing_else_in_the_batch(policy: Policy) -> None:
    collected = rolled(policy)
    together = valued(policy, collected, PrefixValuer(num_samples=3)).values["steps"].value
    small = valued(policy, collected, PrefixValuer(num_samples=3, rows=1)).values["steps"].value
    torch.testing.assert_close(together, small, equal_nan=True)
    one = [collected.rollouts[4]]
    alone = ask(policy, PROBLEMS, one, collate(one), PrefixValuer(num_samples=3), ["steps"]).values["steps"].value
    torch.testing.assert_close(alone[0], together[4, : alone.shape[1]], equal_nan=True)


def test_equal_seeds_give_equal_values_and_others_do_not(policy: Policy) -> None:
    collected = rolled(policy)
    batch = collate(collected.rollouts)

    def values(**options: int) -> torch.Tensor:
        valuer = PrefixValuer(num_samples=3)
        result = ask(policy, PROBLEMS, collected.rollouts, batch, valuer, ["steps"], **options)
        return result.values["steps"].value.nan_to_num(9.0)

    assert torch.equal(values(), values())
    assert not torch.equal(values(), values(seed=4))
    assert not torch.equal(values(), values(step=2))


def test_equal_prompts_of_two_problems_are_judged_apart(policy: Policy) -> None:
    problems = [Problem("a", "1+2=?"), Problem("b", "1+2=?")]
    collected = rolled(policy, problems)
    values = valued(policy, collected, PrefixValuer(num_samples=9)).values["steps"].value
    assert values[0, 0] != values[3, 0]


def test_continuations_keep_to_the_answers_limit_and_to_the_models_positions(new_policy: Any) -> None:
    policy = new_policy(max_positions=9 + 8)
    collected = rolled(policy, [PROBLEMS[0]])
    positions: list[int] = []
    handle = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    valued(policy, collected, PrefixValuer(num_samples=2))
    handle.remove()
    assert len(positions) > 8  # one part would do without the limit
    assert max(positions) < 17


def test_at_most_so_many_states_of_an_answer_are_sampled(policy: Policy) -> None:
    whole = Rollout([4, 5], [6] * 8, [-2.0] * 8, [(i, i + 1) for i in range(8)], "6" * 8, 0)
    whole = replace(whole, verdicts={"steps": Verdict(1.0, tuple(Span(i, i + 1) for i in range(8)))}, reward=1.0)
    batch = collate([whole])
    for most, known in ((1, [0, 7]), (2, [0, 4, 7]), (3, [0, 3, 5, 7]), (7, list(range(8))), (99, list(range(8)))):
        valuer = PrefixValuer(num_samples=1, max_states=most)
        values = ask(policy, PROBLEMS, [whole], batch, valuer, ["steps"]).values["steps"].value
        assert (~values[0].isnan()).nonzero()[:, 0].tolist() == known, most
        table = PrefixValues(values, (~values.isnan()).long(), torch.zeros_like(values))
        credit = ResampledSteps()(replace(batch, prefix_values={"steps": table})).advantages
        gains = [float(credit[0, start]) for start in known]  # one for each stretch between two known states
        assert sum(gains) == pytest.approx(1.0 - float(values[0, 0]), abs=1e-6)


def test_several_kinds_of_states_share_their_samples(policy: Policy) -> None:
    collected = rolled(policy)
    both = valued(policy, collected, PrefixValuer(num_samples=2), ["steps", CHAIN])
    for name in ("steps", CHAIN):
        alone = valued(policy, collected, PrefixValuer(num_samples=2), [name])
        torch.testing.assert_close(both.values[name].value, alone.values[name].value, equal_nan=True)
        assert both.tokens >= alone.tokens
    batch = replace(collate(collected.rollouts), prefix_values=both.values)
    for strategy in (ResampledSteps(), ResampledCutpoints(interval=2)):
        assert strategy(batch).advantages.ne(0).any()


def test_rows_left_out_of_training_cost_nothing(policy: Policy) -> None:
    collected = rolled(policy)
    out = [replace(rollout, truncated=True) for rollout in collected.rollouts]
    result = ask(policy, PROBLEMS, out, collate(out, mask_truncated=True), PrefixValuer(), ["steps"])
    assert result.tokens == 0
    assert result.values["steps"].value.isnan().all()
    assert result.metrics["cost/value_forwards"] == 0


def test_a_continuation_on_which_all_abstain_is_no_sample(policy: Policy) -> None:
    collected = rolled(policy)

    def shy(samples: Sequence[Sample]) -> list[float | None]:
        return [None if s.metadata["num_tokens"] == 8 else 1.0 for s in samples]

    result = PrefixValuer(num_samples=5)(
        ["steps"],
        policy,
        PROBLEMS,
        collected.rollouts,
        collate(collected.rollouts),
        Panel({"answer": shy}, WEIGHTS),
        CONFIG,
        seed=3,
        step=1,
    )
    values = result.values["steps"]
    assert ((values.count > 0) == ~values.value.isnan()).all()
    assert values.count.gt(0).any()
    assert (values.count[values.count > 0] < 5).any()
    assert values.value[values.count > 0].eq(1).all()


def test_faults_of_verifiers_are_handed_on(policy: Policy) -> None:
    collected = rolled(policy)

    def broken(samples: Sequence[Sample]) -> list[float]:
        raise RuntimeError("no")

    result = PrefixValuer(num_samples=1)(
        ["steps"],
        policy,
        PROBLEMS,
        collected.rollouts,
        collate(collected.rollouts),
        Panel({"answer": broken}, WEIGHTS),
        CONFIG,
        seed=3,
        step=1,
    )
    assert result.panel.errors["answer"] == result.metrics["cost/value_states"]


def test_bad_options_are_refused() -> None:
    for name in ("num_samples", "max_states", "rows"):
        with pytest.raises(InputError, match=rf"prefix_valuer\.{name}=0: must be at least 1"):
            PrefixValuer(**{name: 0})
