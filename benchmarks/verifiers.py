"""How fast answers are judged: format, arithmetic and equivalence over 1,000 answers in one call each.

Run ``python benchmarks/verifiers.py``. The answers are worked solutions of 100 to 1,500 characters with their final
answer in a box; a third of them are wrong, and equivalence gets fractions, roots and polynomials besides plain numbers.
The start of the worker processes is part of the time.
"""

from __future__ import annotations

import argparse
import random
import time

from apportion.verifiers import Sample
from apportion.verifiers.arithmetic import Arithmetic
from apportion.verifiers.math_answer import MathAnswer
from apportion.verifiers.panel import judge
from apportion.verifiers.tags import Tags


def answers(count: int, seed: int) -> list[Sample]:
    """Worked solutions, alike for a seed."""
    rng = random.Random(seed)
    return [_answer(rng, number) for number in range(count)]


def _answer(rng: random.Random, number: int) -> Sample:
    lines, total = [], rng.randint(2, 99)
    for step in range(rng.randint(2, 30)):
        more = rng.randint(2, 99)
        result = total + more + (rng.random() < 0.1)
        lines.append(f"Step {step + 1}: we add {more}, so {total} + {more} = {result}.")
        total = result
    kinds = [
        (str(total), f"{total:,}"),
        (f"\\frac{{{total}}}{{7}}", f"\\dfrac{{{2 * total}}}{{14}}"),
        (f"{total}\\sqrt{{2}}", f"\\sqrt{{{2 * total * total}}}"),
        (f"x^2-{total * total}", f"(x-{total})(x+{total})"),
    ]
    reference, given = kinds[number % 4]
    given = given if rng.random() < 2 / 3 else given.replace(str(total)[-1], str((total + 3) % 10))
    text = "<think>\n" + "\n".join(lines) + f"\n</think>\n<answer>\\boxed{{{given}}}</answer>"
    return Sample("How much is it?", text, reference)


def main() -> None:
    """Print seconds per verifier and what each said."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    samples = answers(options.answers, options.seed)
    characters = sum(len(sample.completion) for sample in samples)
    print(f"{len(samples):,} answers, {characters:,} characters")
    whole = 0.0
    for name, verifier in {"tags": Tags(), "arithmetic": Arithmetic(), "math_answer": MathAnswer()}.items():
        began = time.perf_counter()
        result = judge({name: verifier}, samples)
        seconds = time.perf_counter() - began
        whole += seconds
        scores = [score for row in result.verdicts if (score := row[name].score) is not None]
        print(f"{name:12} {seconds:6.2f} s  mean {sum(scores) / len(scores):.3f}  errors {result.errors[name]}")
    print(f"{'together':12} {whole:6.2f} s")


if __name__ == "__main__":
    main()
