"""Figures of a Gram matrix are those of the gradients themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from apportion.credit.intervals import bootstrap
from apportion.grpo.gram import (
    GradientGram,
    ReferenceGram,
    agreement,
    bias,
    cosines,
    group_cosines,
    norms,
    reference_cosines,
    reference_is_noise,
    resample_groups,
    signal_to_noise,
)


def as_gram(vectors: torch.Tensor, halves: torch.Tensor | None = None) -> GradientGram:
    """Of explicit gradients (K, N, P), and of the halves (2, P) of a reference."""
    names = tuple(map(str, range(len(vectors))))
    reference = None
    if halves is not None:
        reference = ReferenceGram(torch.einsum("knp,hp->knh", vectors, halves), halves @ halves.T)
    gram = torch.einsum("knp,lmp->knlm", vectors, vectors)
    return GradientGram(names, torch.arange(vectors.shape[1]), gram, reference)


@pytest.fixture
def vectors() -> torch.Tensor:
    """Gradients of three strategies in six groups; the second strategy has none in two of them."""
    draw = torch.Generator().manual_seed(4)
    found = torch.randn(3, 6, 5, generator=draw, dtype=torch.float64) + 0.7
    found[1, 2:4] = 0.0
    return found


def test_cosines_and_norms_are_those_of_the_summed_gradients(vectors: torch.Tensor) -> None:
    gram, total = as_gram(vectors), vectors.sum(dim=1)
    assert torch.allclose(norms(gram), total.norm(dim=1))
    assert torch.allclose(cosines(gram), torch.nn.functional.cosine_similarity(total[:, None], total[None], dim=2))


def test_weights_of_one_change_nothing_and_weights_of_zero_leave_groups_out(vectors: torch.Tensor) -> None:
    halves = vectors[:2, 0]
    gram, some = as_gram(vectors, halves), torch.tensor([1, 0, 1, 0, 1, 1])
    rest = as_gram(vectors[:, some.bool()], halves)
    for figure in (norms, cosines, reference_cosines, signal_to_noise, group_cosines):
        assert torch.allclose(figure(gram, torch.ones(6)), figure(gram))
        assert torch.allclose(figure(gram, some), figure(rest))


def test_a_group_drawn_twice_counts_twice_among_groups_and_pairs_but_makes_no_pair_with_itself(
    vectors: torch.Tensor,
) -> None:
    counts, halves = torch.tensor([2, 0, 1, 0, 3, 0]), vectors[:2, 1]
    drawn = vectors.repeat_interleave(counts, dim=1)
    owner = torch.arange(6).repeat_interleave(counts)
    products = torch.einsum("knp,lmp->klnm", drawn, drawn)
    apart = owner[:, None] != owner[None]
    totals = 6 * products.diagonal(dim1=2, dim2=3).mean(dim=2) + 30 * products[:, :, apart].mean(dim=2)
    length, gram = totals.diagonal().sqrt(), as_gram(vectors, halves)
    assert torch.allclose(norms(gram, counts), length)
    assert torch.allclose(cosines(gram, counts), (totals / length[:, None] / length).clamp(-1, 1))
    whole = halves.sum(dim=0)
    expected = drawn.sum(dim=1) @ whole / length / whole.norm()
    assert torch.allclose(reference_cosines(gram, counts), expected.clamp(-1, 1))


@pytest.mark.parametrize("noise", [0.5, 6.0])
def test_intervals_of_cosine_and_norm_hold_the_mean_of_what_they_estimate(noise: float) -> None:
    """Twenty noisy groups and a fixed reference, 150 times over; 95% percentiles of 300 resamples."""
    draw = torch.Generator().manual_seed(3)
    direction = torch.zeros(200, dtype=torch.float64)
    direction[:2] = torch.tensor([0.6, 0.8])
    halves, weights = torch.eye(200, dtype=torch.float64)[[0, 0]], resample_groups(20, 300, seed=2)
    found = []
    for _ in range(150):
        vectors = direction + noise / 200**0.5 * torch.randn(1, 20, 200, generator=draw, dtype=torch.float64)
        gram = as_gram(vectors, halves)
        for figure in (reference_cosines, norms):
            low, high = figure(gram, weights)[:, 0].quantile(torch.tensor([0.025, 0.975]).double()).tolist()
            found.append((float(figure(gram)), low, high))
    value, low, high = torch.tensor(found).view(150, 2, 3).unbind(dim=2)
    mean = value.mean(dim=0)
    covered = ((low <= mean) & (mean <= high)).double().mean(dim=0)
    assert covered.min() > 0.88
    assert ((low < value) & (value < high)).double().mean(dim=0).min() > 0.97


def test_the_draws_are_those_of_the_figures_of_credit() -> None:
    groups = torch.tensor([4, 7, 7, 9, 2, 2])
    _, drawn = bootstrap(torch.eye(6).double(), groups, lambda sums: sums, resamples=50, seed=3)
    assert torch.equal(resample_groups(4, 50, seed=3), drawn[:, [4, 0, 1, 3]])


def test_many_resamples_at_once_are_each_alone(vectors: torch.Tensor) -> None:
    gram, weights = as_gram(vectors), resample_groups(6, 5, seed=1)
    figures = (norms, cosines, signal_to_noise, group_cosines, lambda g, weights: bias(g, "1", weights))
    for figure in figures:
        together = figure(gram, weights)
        assert len(together) == 5
        alone = torch.stack([figure(gram, row) for row in weights])
        assert torch.allclose(together, alone, equal_nan=True)


def test_the_signal_to_noise_ratio_is_that_of_the_groups_mean_and_sample_variance(vectors: torch.Tensor) -> None:
    found = signal_to_noise(as_gram(vectors))
    for at, groups in enumerate(vectors):
        noise = float(groups.var(dim=0, correction=1).sum())
        signal = float(groups.mean(dim=0).square().sum()) - noise / len(groups)
        assert found[at].item() == pytest.approx(signal / noise)


def test_signal_and_noise_of_a_resample_leave_out_pairs_of_a_group_with_itself(vectors: torch.Tensor) -> None:
    counts, groups = [2, 0, 1, 1, 1, 1], vectors[0]
    pairs = [(n, m) for n, m in itertools.product(range(6), repeat=2) if n != m]
    weight = sum(counts[n] * counts[m] for n, m in pairs)
    signal = sum(counts[n] * counts[m] * float(groups[n] @ groups[m]) for n, m in pairs) / weight
    power = sum(count * float(g @ g) for count, g in zip(counts, groups)) / 6
    found = signal_to_noise(as_gram(vectors), torch.tensor(counts))[0].item()
    assert found == pytest.approx(signal / (power - signal))


def test_the_cosine_between_groups_leaves_out_groups_without_a_gradient(vectors: torch.Tensor) -> None:
    found = group_cosines(as_gram(vectors))
    for at, groups in enumerate(vectors):
        alive = groups[groups.any(dim=1)]
        unit = alive / alive.norm(dim=1, keepdim=True)
        between = unit @ unit.T
        number = len(alive)
        assert found[at].item() == pytest.approx(float(between.sum() - number) / (number * (number - 1)))


def test_one_group_tells_nothing_of_noise(vectors: torch.Tensor) -> None:
    gram = as_gram(vectors[:, :1])
    assert signal_to_noise(gram).isnan().all()
    assert group_cosines(gram).isnan().all()
    assert bias(gram, "0").isnan().all()
    assert torch.allclose(norms(gram), vectors[:, 0].norm(dim=1))
    for figure in (norms, cosines, signal_to_noise):
        assert figure(gram, resample_groups(1, 20, seed=0)).isnan().all()
        assert figure(as_gram(vectors), torch.tensor([0, 0, 0, 0, 6, 0])).isnan().all()
    with pytest.raises(ValueError, match="weights of 3 groups"):
        cosines(gram, torch.ones(3))
    with pytest.raises(ValueError, match="without a reference"):
        reference_cosines(gram)


def test_bias_is_the_sine_to_the_reference_where_groups_agree() -> None:
    direction = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0], [-2.0, 0.0, 0.0]], dtype=torch.float64)
    gram = as_gram(direction[:, None].expand(3, 4, 3).contiguous())
    assert bias(gram, "1").tolist() == pytest.approx([0.8, 0.0, 0.0], abs=1e-7)


def test_bias_sees_through_the_noise_of_the_groups() -> None:
    """The expected gradient lies along the reference; the batch's own gradient, with its noise, does not."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 60, generator=draw, dtype=torch.float64)
    noise[:, :2] = 0.0
    right = torch.tensor([1.0, 0.0, *[0.0] * 58]).double()
    skew = torch.tensor([0.6, 0.8, *[0.0] * 58]).double()
    gram = as_gram(torch.stack([right.expand(400, 60), right + noise, skew + noise]))
    assert bias(gram, "0").tolist() == pytest.approx([0.0, 0.0, 0.8], abs=0.08)
    assert cosines(gram)[0, 1] < 0.95


# --- whether a reference is worth anything ---------------------------------------------------------------------------


def with_halves(signal: float, groups: int, scale: torch.Tensor, draw: torch.Generator) -> GradientGram:
    """Noise of unequal size along each axis with a signal along the first; the reference has 64 groups."""

    def some(number: int) -> torch.Tensor:
        noise = torch.randn(number, len(scale), generator=draw, dtype=torch.float64) * scale
        noise[:, 0] += signal * scale.norm()
        return noise

    theirs = some(64)
    return as_gram(some(groups)[None], torch.stack([theirs[::2].sum(dim=0), theirs[1::2].sum(dim=0)]))


@pytest.mark.parametrize(("dimensions", "groups"), [(400, 8), (400, 32), (8, 32)])
def test_a_reference_of_noise_is_called_so_and_one_with_signal_is_not(dimensions: int, groups: int) -> None:
    draw, scale = torch.Generator().manual_seed(0), torch.linspace(1, 0.1, dimensions).double()
    noise = [reference_is_noise(with_halves(0.0, groups, scale, draw)) for _ in range(100)]
    assert sum(noise) >= 93
    signal = [reference_is_noise(with_halves(1.0, groups, scale, draw)) for _ in range(100)]
    assert sum(signal) <= 2


def test_halves_that_point_apart_or_are_zero_are_noise_and_few_groups_judge_by_the_sign_alone(
    vectors: torch.Tensor,
) -> None:
    one = vectors[0, :1]
    assert not reference_is_noise(as_gram(vectors, torch.cat([one, 1.01 * one])))
    assert reference_is_noise(as_gram(vectors, torch.cat([one, -one])))
    assert reference_is_noise(as_gram(vectors, 0 * torch.cat([one, one])))
    assert torch.tensor(agreement(as_gram(vectors, torch.cat([one, -one])))).tolist()[0] == pytest.approx(-1.0)
    across = one.clone()
    across[0, 0] += 3 * float(one.norm())
    assert not reference_is_noise(as_gram(vectors[:, :3], torch.cat([one, across])))
    assert reference_is_noise(as_gram(vectors[:, :3], torch.cat([one, -across])))
    alike = vectors[:, :1].expand(-1, 6, -1)
    assert not reference_is_noise(as_gram(alike, torch.cat([one, across])))
