"""How often the report's intervals cover the true mean: ``python benchmarks/coverage.py`` prints the docs' table."""

from __future__ import annotations

import argparse

import numpy as np

from apportion.experiments.report.statistics import bootstrap_interval

SEEDS = (2, 3, 4, 5, 6, 8, 10, 20)


def coverage(n: int, samples: int, resamples: int) -> tuple[float, float]:
    """Share of ``samples`` normal samples of n whose interval holds the mean: expanded, then plain percentiles."""
    rng = np.random.default_rng(n)
    index = rng.integers(0, n, size=(resamples, n))
    expanded = plain = 0
    for values in rng.normal(size=(samples, n)):
        low, high = bootstrap_interval(values.tolist(), resamples=resamples)
        expanded += low <= 0 <= high
        low, high = np.quantile(values[index].mean(axis=1), [0.025, 0.975])
        plain += low <= 0 <= high
    return expanded / samples, plain / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=20_000)
    options = parser.parse_args()
    shares = [coverage(n, options.samples, options.resamples) for n in SEEDS]
    print("| seeds |", " | ".join(map(str, SEEDS)), "|")
    print("|---" * (len(SEEDS) + 1) + "|")
    for name, row in zip(("expanded percentile (used)", "plain percentile"), zip(*shares)):
        print(f"| {name} |", " | ".join(f"{share:.0%}" for share in row), "|")


if __name__ == "__main__":
    main()
