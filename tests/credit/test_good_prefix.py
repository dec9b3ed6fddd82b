"""The right beginning of a wrong answer is rewarded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.good_prefix import GoodPrefix, prefix_before
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]


def steps(text: str) -> list[tuple[int, int, float]]:
    return [(i, i + 1, float(char)) for i, char in enumerate(text)]


def right_and_wrong(batch: Batch) -> CreditBatch:
    """A right answer of four tokens and a wrong one of five, whose first error is the third."""
    return batch(
        {"tokens": 4, "reward": 1.0, "spans": steps("1011")},  # a fault in a right answer does not count
        {"tokens": 5, "reward": 0.0, "spans": steps("11010")},
    )


def test_the_published_example(batch: Batch) -> None:
    credit = GoodPrefix(buffer_share=0)(right_and_wrong(batch))
    expected = [[0.4, 0.4, 0.4, 0.4, 0], [-0.1, -0.1, -0.6, -0.6, -0.6]]
    torch.testing.assert_close(credit.advantages, torch.tensor(expected), rtol=0, atol=1e-6)
    assert credit.metrics == {"good_prefix": 0.4}


def test_relu_lifts_the_prefix_to_zero_and_nothing_else(batch: Batch) -> None:
    out = GoodPrefix(buffer_share=0, relu=True)(right_and_wrong(batch)).advantages
    torch.testing.assert_close(
        out, torch.tensor([[0.4, 0.4, 0.4, 0.4, 0], [0, 0, -0.6, -0.6, -0.6]]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("options", [{"buffer": 1, "buffer_share": 0}, {"buffer_share": 0.2}])
def test_the_buffer_shortens_the_prefix(batch: Batch, options: dict) -> None:
    credit = GoodPrefix(**options)(right_and_wrong(batch))  # mean of 1 and .5 * 1 / 5 is .55
    torch.testing.assert_close(credit.advantages[1], torch.tensor([-0.05, -0.55, -0.55, -0.55, -0.55]))
    assert GoodPrefix(buffer=9)(right_and_wrong(batch)).metrics == {"good_prefix": 0.0}


def test_the_buffer_counts_trained_tokens() -> None:
    written = torch.tensor([[True, False, True, False, True, True]])
    out = prefix_before(torch.tensor([5]), written, torch.tensor([1]))
    assert out.tolist() == [[True, False, True, False, False, False]]


def test_all_right_gives_nothing_and_all_wrong_praises_the_longer_prefix(batch: Batch) -> None:
    right = batch(*({"tokens": 4, "reward": 1.0, "spans": steps("1100")} for _ in range(3)))
    assert GoodPrefix()(right).advantages.eq(0).all()
    wrong = batch(
        {"tokens": 4, "reward": 0.0, "spans": steps("1110")},
        {"tokens": 4, "reward": 0.0, "spans": steps("1000")},
    )
    out = GoodPrefix(buffer_share=0)(wrong).advantages  # means .375 and .125
    assert out.tolist() == [[0.25, 0.25, 0.25, -0.25], [0.25, -0.25, -0.25, -0.25]]


def test_answers_weigh_alike_in_the_mean_whatever_their_length(batch: Batch) -> None:
    made = batch({"tokens": 1, "reward": 1.0}, {"tokens": 9, "reward": 0.0})
    assert GoodPrefix()(made).parts["centring"].unique().tolist() == [-0.5, 0]


def test_a_wrong_answer_without_a_located_error_has_no_good_prefix(batch: Batch) -> None:
    made = batch({"tokens": 3, "reward": 1.0}, {"tokens": 3, "reward": 0.0, "spans": steps("111")})
    assert GoodPrefix()(made).advantages.tolist() == [[0.5] * 3, [-0.5] * 3]


def test_rows_without_a_reward_do_not_enter_the_mean(batch: Batch) -> None:
    three = batch(
        {"tokens": 4, "reward": 1.0},
        {"tokens": 5, "reward": 0.0, "spans": steps("11010")},
        {"tokens": 5, "reward": None, "spans": steps("11111")},
    )
    out = GoodPrefix(buffer_share=0)(three).advantages
    assert torch.equal(out[:2], GoodPrefix(buffer_share=0)(right_and_wrong(batch)).advantages)
    assert out[2].eq(0).all()


def test_impossible_buffers_are_refused() -> None:
    with pytest.raises(InputError, match="buffer must be 0 or more tokens, not -1"):
        GoodPrefix(buffer=-1)
    with pytest.raises(InputError, match=r"buffer_share must lie between 0 and 1, not 1\.5"):
        GoodPrefix(buffer_share=1.5)
