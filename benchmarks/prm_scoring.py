"""One forward for all steps of an answer, against a forward for every beginning of it: time, and largest difference.

``python benchmarks/prm_scoring.py [--answers 32] [--tokens 30] [--prompt 60]`` prints a line for each number of steps.
Both ways go through the same function with the same budget of tokens a forward, rows of like length together; the
beginnings only are rows of their own. Order is drawn at random, the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForTokenClassification

from apportion.experiments.policies import symbol_tokenizer
from apportion.prm.encoding import Encoded
from apportion.prm.model import StepModel
from apportion.prm.score import step_probabilities
from apportion.prm.settings import StepSettings


def random_model(hidden: int, layers: int) -> StepModel:
    """A Llama with random weights and a head of two labels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=4096,
        initializer_range=0.1,
        num_labels=2,
    )
    return StepModel(LlamaForTokenClassification(config), symbol_tokenizer(("a",)), StepSettings()).eval()


def random_rows(answers: int, steps: int, tokens: int, prompt: int) -> list[Encoded]:
    """Answers of that many steps, each of about that many tokens (half to one and a half times as many)."""
    draw = random.Random(0)
    rows = []
    for _ in range(answers):
        ends, end = [], prompt - 1
        for _ in range(steps):
            end += draw.randint(tokens // 2, tokens * 3 // 2)
            ends.append(end)
        rows.append(Encoded(tuple(draw.randrange(200) for _ in range(end + 1)), tuple(ends), steps))
    return rows


def beginnings(rows: Sequence[Encoded]) -> list[Encoded]:
    """A row for every step, which ends with it."""
    return [Encoded(row.input_ids[: end + 1], (end,), 1) for row in rows for end in row.step_ends]


def medians(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each way, run in random order after one run to warm up."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways, *draw.sample(list(ways) * repeats, repeats * len(ways))]:
        began = time.process_time()
        ways[name]()
        times[name].append(time.process_time() - began)
    return {name: sorted(taken[1:])[len(taken[1:]) // 2] for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--tokens", type=int, default=30, help="a step")
    parser.add_argument("--prompt", type=int, default=60, help="tokens")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = random_model(options.hidden, options.layers)
    print(f"{'steps':>5} {'one pass s':>11} {'beginnings s':>13} {'ratio':>6} {'difference':>11}")
    for steps in options.steps:
        rows = random_rows(options.answers, steps, options.tokens, options.prompt)
        grown = beginnings(rows)
        found: dict[str, list[float]] = {}

        def score(name: str, some: list[Encoded], found: dict[str, list[float]] = found) -> None:
            scored = step_probabilities(model, some, batch_tokens=options.batch_tokens)
            found[name] = [chance for row in scored for chance in row]

        ways = {"one": lambda rows=rows: score("one", rows), "grown": lambda grown=grown: score("grown", grown)}
        taken = medians(ways, options.repeats)
        apart = max(abs(a - b) for a, b in zip(found["one"], found["grown"], strict=True))
        ratio = taken["grown"] / taken["one"]
        print(f"{steps:>5} {taken['one']:>11.3f} {taken['grown']:>13.3f} {ratio:>6.1f} {apart:>11.1e}")


if __name__ == "__main__":
    main()
