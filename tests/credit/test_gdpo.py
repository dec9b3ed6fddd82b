"""Reward channels normalised apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apportion.credit import CreditBatch
from apportion.credit.gdpo import Gdpo, TokenGdpo
from apportion.credit.parts import whiten_parts
from apportion.credit.penalty import SpanPenalty
from apportion.credit.uniform import Uniform
from apportion.verifiers import InputError

Batch = Callable[..., CreditBatch]
CHANNELS = ("answer", "format")


def judged(batch: Batch, *rows: tuple[float | None, float | None], tokens: int = 1) -> CreditBatch:
    """One group; each row the scores of the two channels."""
    return batch(
        *(
            {"tokens": tokens, "reward": sum(s for s in row if s is not None), "scores": dict(zip(CHANNELS, row))}
            for row in rows
        )
    )


def test_mixtures_that_a_sum_would_confuse_stay_apart(batch: Batch) -> None:
    apart, together = Gdpo(over="none", eps=0), Uniform(ddof=1, eps=0)
    one, both = judged(batch, (0, 0), (0, 1)), judged(batch, (0, 0), (1, 1))
    assert together(one).advantages[:, 0].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert together(both).advantages[:, 0].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert apart(one).advantages[:, 0].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert apart(both).advantages[:, 0].tolist() == pytest.approx([-1.4142, 1.4142], abs=1e-4)


def test_a_missing_score_counts_neither_in_its_channel_nor_in_its_row(batch: Batch) -> None:
    rows = [(1, 0), (0, None), (1, 2), (0, 1)]
    credit = Gdpo(over="none", ddof=0, eps=0)(judged(batch, *rows))
    assert credit.advantages[:, 0].tolist() == pytest.approx([-0.2247, -1.0, 2.2247, -1.0], abs=1e-4)
    assert credit.parts["format"][:, 0].tolist() == pytest.approx([-1.2247, 0, 1.2247, 0], abs=1e-4)


def test_channels_that_cancel_give_nothing_and_each_says_that_it_is_alive(batch: Batch) -> None:
    credit = Gdpo(eps=0)(judged(batch, (-3, 2), (2, -3), (0, -1), (-1, 0)))
    assert credit.advantages.eq(0).all()
    assert credit.metrics == {"dead_groups_answer": 0.0, "dead_groups_format": 0.0}


def test_a_constant_channel_adds_nothing_and_its_groups_are_counted_as_dead(batch: Batch) -> None:
    rows = [(0, 1), (1, 1)]
    credit = Gdpo(over="none")(judged(batch, *rows))
    assert credit.parts["format"].eq(0).all()
    assert credit.metrics == {"dead_groups_answer": 0.0, "dead_groups_format": 1.0}


def test_whitening_counts_every_answer_once_or_every_token(batch: Batch) -> None:
    rows = [{"tokens": n, "reward": 0.0, "scores": {"answer": s, "format": 0.0}} for n, s in ((1, 0.0), (4, 1.0))]
    rows += [{"tokens": 2, "reward": 0.0, "group": 1, "scores": {"answer": s, "format": s}} for s in (0.0, 1.0)]
    made = batch(*rows)
    by_sequence = Gdpo(eps=0)(made).advantages
    first = by_sequence[:, 0].double()
    assert float(first.mean()) == pytest.approx(0, abs=1e-6)
    assert float(first.std()) == pytest.approx(1)
    by_token = Gdpo(over="token", eps=0)(made).advantages[made.completion_mask].double()
    assert float(by_token.mean()) == pytest.approx(0, abs=1e-6)
    assert float(by_token.std()) == pytest.approx(1)


def test_answers_that_nobody_judged_stay_out_of_the_batchs_statistics(batch: Batch) -> None:
    rows = [(0, 0), (1, 1), (None, None)]
    got = Gdpo(eps=0)(judged(batch, *rows)).advantages[:, 0]
    assert got.tolist() == pytest.approx([-0.7071, 0.7071, 0], abs=1e-4)


def test_weights_and_the_cut_act_on_each_channel(batch: Batch) -> None:
    rows = [(float(i > 0), float(i % 2)) for i in range(8)]
    made = judged(batch, *rows)
    free = Gdpo(channels={"answer": 2.0}, over="none", ddof=0, eps=0)(made).parts["answer"][0, 0]
    assert float(free) == pytest.approx(-2 * 7**0.5)  # |Z| = 2.65
    cut = Gdpo(channels={"answer": 2.0}, over="none", ddof=0, eps=0, max_abs=2.0)(made).parts["answer"][0, 0]
    assert float(cut) == -4.0


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="channels is empty"):
        Gdpo(channels={})
    with pytest.raises(InputError, match=r"channels\.centring: this name is taken"):
        Gdpo(channels={"centring": 1.0})
    with pytest.raises(InputError, match="over must be sequence, token or none, not 'group'"):
        Gdpo(over="group")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_abs must be over 0, or null for no limit, not 0"):
        Gdpo(max_abs=0)
    with pytest.raises(InputError, match=r"weights\.form: no term has this name"):
        TokenGdpo({"format": SpanPenalty()}, weights={"form": 1.0})
    with pytest.raises(InputError, match=r"terms\.centring: this name is taken"):
        TokenGdpo({"centring": SpanPenalty()})


# --- at the level of tokens ------------------------------------------------------------------------------------------


def token_batch(batch: Batch) -> CreditBatch:
    fault = [(1, 2, 0.0)]
    return batch(
        {"tokens": 3, "reward": 0.0, "scores": {"answer": 0.0, "format": 0.0}, "by_verifier": {"format": fault}},
        {"tokens": 3, "reward": 1.0, "scores": {"answer": 1.0, "format": 1.0}},
    )


def test_each_channel_falls_where_it_belongs_and_one_scale_holds_for_all(batch: Batch) -> None:
    made = token_batch(batch)
    terms = {"answer": Uniform(source="answer", eps=0), "format": SpanPenalty(eps=0)}
    credit = TokenGdpo(terms, eps=0)(made)
    raw = torch.tensor([[-1.0, -3.0, -1.0], [1.0, 1.0, 1.0]])  # the fault costs 1 / .5 beside the outcome
    torch.testing.assert_close(credit.advantages, raw / raw.std())
    assert credit.parts["format"].count_nonzero() == 1
    assert credit.metrics["format/dead_groups"] == 0.0


def test_centring_praises_clean_tokens_for_the_faults_of_others(batch: Batch) -> None:
    made = token_batch(batch)
    plain, centred = (TokenGdpo({"format": SpanPenalty()}, center=center)(made).advantages for center in (False, True))
    assert plain[1].eq(0).all()
    assert centred[1].gt(0).all()
    assert float(centred.sum()) == pytest.approx(0, abs=1e-5)


def test_whitened_parts_sum_to_the_whitened_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    parts = whiten_parts({"first": first, "second": second}, mask, ddof=1, eps=0.0)
    inside = (first + second)[mask]
    whole = torch.stack([*parts.values()]).sum(dim=0)
    torch.testing.assert_close(whole[mask], (inside - inside.mean()) / inside.std())
    assert whole[~mask].eq(0).all()
