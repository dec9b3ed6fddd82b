"""Credit from step scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.process import ProcessReward, StepDifference
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError, Span, Verdict

Batch = Callable[..., CreditBatch]


def steps(*scores: float, width: int = 1) -> list[tuple[int, int, float]]:
    return [(i * width, (i + 1) * width, score) for i, score in enumerate(scores)]


def test_process_supervision_by_hand(batch: Batch) -> None:
    made = batch(
        {"tokens": 6, "reward": 0.0, "spans": steps(0.9, 0.8, 0.1, width=2)},
        {"tokens": 4, "reward": 1.0, "spans": steps(0.7, 0.9, width=2)},
    )
    returns = ProcessReward(eps=0)(made).advantages
    expected = [[-0.8018, -0.8018, -1.5368, -1.5368, -1.9376, -1.9376], [0.8018, 0.8018, 0.7350, 0.7350, 0, 0]]
    torch.testing.assert_close(returns, torch.tensor(expected), rtol=0, atol=1e-4)
    own = ProcessReward(accumulate="own", eps=0)(made).advantages
    expected = [[0.7350, 0.7350, 0.4009, 0.4009, -1.9376, -1.9376], [0.0668, 0.0668, 0.7350, 0.7350, 0, 0]]
    torch.testing.assert_close(own, torch.tensor(expected), rtol=0, atol=1e-4)


def test_separators_and_the_end_token_belong_to_the_step_before_them(batch: Batch) -> None:
    made = batch(
        {"tokens": 7, "reward": 1.0, "spans": [(0, 3, 1.0), (3, 5, -1.0)]},  # token 5 separates, token 6 ends
        {"tokens": 7, "reward": 1.0, "spans": [(0, 3, -1.0), (4, 5, 1.0)]},  # and here token 3 separates as well
    )
    out = ProcessReward(accumulate="own", eps=0)(made).advantages
    assert out.tolist() == [[1, 1, 1, -1, -1, -1, -1], [-1, -1, -1, -1, 1, 1, 1]]


def test_a_missing_piece_at_the_end_falls_on_each_rows_own_last_token(batch: Batch) -> None:
    made = batch(
        {"tokens": 2, "reward": 1.0, "spans": [(0, 1, 1.0), (2, 2, 0.0)]},
        {"tokens": 4, "reward": 1.0, "spans": [(0, 3, 1.0), (4, 4, 0.0)]},
    )
    out = ProcessReward(accumulate="own", eps=0)(made).advantages
    assert out.tolist() == [[1, -1, 0, 0], [1, 1, 1, -1]]


@pytest.mark.parametrize("accumulate", ["return", "own"])
@pytest.mark.parametrize("options", [{}, {"ddof": 1, "eps": 1e-4}])
def test_one_step_per_answer_is_outcome_supervision(batch: Batch, accumulate: str, options: dict) -> None:
    rows = [(3, 0.0, 0), (2, 0.25, 0), (4, 1.0, 0), (1, 1.0, 1), (2, 0.0, 1)]
    made = batch(*({"tokens": n, "reward": r, "group": g, "spans": [(0, n, r)]} for n, r, g in rows))
    process = ProcessReward(accumulate=accumulate, **options)(made).advantages  # type: ignore[arg-type]
    torch.testing.assert_close(process, Uniform(**options)(made).advantages)


def test_a_group_whose_answers_all_fail_is_still_told_right_steps_from_wrong_ones(batch: Batch) -> None:
    made = batch(*({"tokens": 2, "reward": 0.0, "spans": steps(1.0, 0.0)} for _ in range(2)))
    assert ProcessReward(accumulate="own", eps=0)(made).advantages.tolist() == [[1, -1], [1, -1]]


def test_steps_of_other_groups_and_of_rows_left_out_do_not_count(batch: Batch) -> None:
    rows = [
        {"tokens": 2, "reward": 0.0, "spans": steps(1.0, 0.0)},
        {"tokens": 2, "reward": 0.0, "spans": steps(9.0, 9.0), "truncated": True},
        {"tokens": 2, "reward": 0.0, "spans": steps(5.0, 3.0), "group": 1},
    ]
    credit = ProcessReward(accumulate="own", eps=0)(batch(*rows, mask_truncated=True))
    assert credit.advantages.tolist() == [[1, -1], [0, 0], [1, -1]]
    assert credit.metrics == {"steps": pytest.approx(4 / 3)}


def test_a_value_must_not_be_summed() -> None:
    with pytest.raises(InputError, match=r"score_kind=value: .* use credit=process/difference"):
        ProcessReward(score_kind="value")
    with pytest.raises(InputError, match="accumulate must be return or own, not 'sum'"):
        ProcessReward(accumulate="sum")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="score_kind must be correctness, penalty or value, not 'prob'"):
        ProcessReward(score_kind="prob")  # type: ignore[arg-type]


# --- differences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.0, [0.25, -0.5, -0.25]), (1.0, [-0.5, -0.75, -0.25]), (0.5, [-0.0625, -0.625, -0.25])],
)
def test_lambda_reaches_from_the_local_gain_to_outcome_minus_value(
    batch: Batch, lam: float, expected: list[float]
) -> None:
    made = batch(
        {"tokens": 3, "reward": 0.0, "spans": steps(0.75, 0.25, 0.9)},  # V = .5, .75, .25, then R = 0
        {"tokens": 1, "reward": 1.0, "spans": steps(0.9)},
    )
    assert StepDifference(lam=lam)(made).advantages[0].tolist() == pytest.approx(expected)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 1),
)
def test_lambda_agrees_with_the_recursion(rollout: Callable[..., Rollout], answers: list, lam: float) -> None:
    """``A_j = delta_j + lam A_{j+1}`` over the steps that the policy wrote; in sum over them, R - V_0 at lambda 0."""
    rows = [
        rollout(len(row), reward, spans=steps(*(v for v, _ in row)), written=[wrote for _, wrote in row])
        for reward, row in answers
    ]
    made = collate(rows)
    got = StepDifference(lam=lam)(made).advantages
    rewards = [reward for reward, row in answers if any(wrote for _, wrote in row)]
    for index, (reward, row) in enumerate(answers):
        mine = [j for j, (_, wrote) in enumerate(row) if wrote]
        if not mine:
            assert got[index].eq(0).all()
            continue
        # the value after a step the policy wrote is that after the tool's steps behind it
        after = [row[next_ - 1][0] for next_ in mine[1:]] + [reward]
        before = [sum(rewards) / len(rewards), *after[:-1]]
        want, later = [], 0.0
        for gain in reversed([a - b for a, b in zip(after, before)]):
            later = gain + lam * later
            want.insert(0, later)
        assert got[index, mine].tolist() == pytest.approx(want, abs=1e-5)
        if lam == 0:
            assert float(got[index].sum()) == pytest.approx(reward - before[0], abs=1e-5)


def test_what_lambda_conserves_and_what_it_refuses() -> None:
    assert StepDifference().conserves == "potential"
    assert StepDifference(lam=0.5).conserves == "none"
    with pytest.raises(InputError, match=r"lam must be in \[0, 1\], not 1.5"):
        StepDifference(lam=1.5)
    with pytest.raises(
        InputError, match=r"score_kind=penalty: .* use credit=process/own_step or credit=process/return"
    ):
        StepDifference(score_kind="penalty")


def test_step_differences_by_hand(batch: Batch) -> None:
    made = batch(
        {"tokens": 6, "reward": 0.0, "spans": steps(0.75, 0.25, 0.9, width=2)},
        {"tokens": 2, "reward": 1.0, "spans": steps(0.3, width=2)},
    )
    out = StepDifference()(made).advantages
    assert out.tolist() == [[0.25, 0.25, -0.5, -0.5, -0.25, -0.25], [0.5, 0.5, 0, 0, 0, 0]]


def test_differences_sum_to_the_outcome_less_the_groups_mean(batch: Batch) -> None:
    made = batch(
        {"tokens": 3, "reward": 1.0, "spans": steps(0.9, 0.1, 0.4)},
        {"tokens": 2, "reward": 0.0, "spans": steps(0.2, 0.8)},
        {"tokens": 1, "reward": 0.5},
    )
    out = StepDifference()(made).advantages
    torch.testing.assert_close(out.sum(dim=1), torch.tensor([0.5, -0.5, 0.0]))


def test_one_step_per_answer_is_outcome_supervision_without_a_scale_or_with_one(batch: Batch) -> None:
    rewards = [0.0, 0.5, 1.0]  # the second one is at the mean
    made = batch(*({"tokens": 2, "reward": r, "spans": [(0, 2, 0.7)]} for r in rewards))
    torch.testing.assert_close(StepDifference()(made).advantages, Uniform(scale="none")(made).advantages)
    torch.testing.assert_close(StepDifference(normalize=True)(made).advantages, Uniform()(made).advantages)


def test_one_scale_for_all_answers_of_a_group_with_or_without_steps(batch: Batch) -> None:
    made = batch(
        {"tokens": 2, "reward": 0.0, "spans": steps(0.9, 0.0)},
        {"tokens": 2, "reward": 0.5, "spans": steps(0.1, 0.0)},  # at the mean
        {"tokens": 2, "reward": 1.0},
        {"tokens": 2, "reward": 1.0, "spans": steps(0.4, 0.0), "group": 1},  # a group without a spread
    )
    plain, scaled = StepDifference()(made), StepDifference(normalize=True, eps=0)(made)
    unit = (1 / 6) ** 0.5
    torch.testing.assert_close(scaled.advantages[:3], plain.advantages[:3] / unit)
    torch.testing.assert_close(scaled.advantages[3], plain.advantages[3])
    assert plain.advantages[3].tolist() == pytest.approx([-0.6, 0.6])
    assert scaled.parts["outcome_without_steps"][2].tolist() == pytest.approx([0.5 / unit] * 2)


def test_what_a_tool_gained_goes_to_the_step_that_called_it(batch: Batch) -> None:
    written = [True, False, True]
    made = batch(
        {"tokens": 3, "reward": 1.0, "spans": steps(0.25, 0.75, 0.0), "written": written},
        {"tokens": 1, "reward": 0.0, "spans": steps(0.0)},
    )
    # V_0 = .5: the call moves it to .25 and its result to .75, the last step to 1.
    assert StepDifference()(made).advantages[0].tolist() == [0.25, 0, 0.25]


def test_two_steps_in_one_token_share_what_both_gained() -> None:
    verdicts = {"steps": Verdict(1.0, (Span(0, 1, 0.9), Span(1, 2, 0.2), Span(2, 3, 0.0)))}
    kept = {"group_id": 0, "verdicts": verdicts, "text": "abc"}
    rows = [
        Rollout([1], [2, 3], [0.0] * 2, [(0, 2), (2, 3)], reward=1.0, **kept),
        Rollout([1], [2, 3, 4], [0.0] * 3, [(0, 1), (1, 2), (2, 3)], reward=0.0, **kept),
    ]
    out = StepDifference()(collate(rows)).advantages
    torch.testing.assert_close(out, torch.tensor([[-0.3, 0.8, 0.0], [0.4, -0.7, -0.2]]))


def test_an_answer_without_a_reward_gets_nothing_and_is_not_in_the_mean(batch: Batch) -> None:
    rows = [{"tokens": 1, "reward": r, "spans": steps(0.5)} for r in (0.0, 1.0, None)]
    assert StepDifference()(batch(*rows)).advantages[:, 0].tolist() == [-0.5, 0.5, 0]
