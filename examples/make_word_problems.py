"""Write ``word_problems.jsonl``: worded arithmetic in one or two steps, with exact whole-number answers.

Run ``python examples/make_word_problems.py``; the same file comes out every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ("Ana", "Ben", "Chidi", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
THINGS = ("apples", "stickers", "marbles", "books", "shells", "stamps", "cards", "pencils", "beads", "coins")
INSTRUCTION = (
    "Solve it step by step. Write every step on a line of its own as `Step N: a op b = c` "
    "and end with a line `Answer: N`."
)
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}

# Operators in the order of the steps, and stories that tell them; a, b and c are the numbers in that order.
STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
        "A box holds {a} {things}, another one {b}. How many {things} are there in both boxes?",
        "{name} reads {a} pages on Monday and {b} pages on Tuesday. How many pages is that together?",
    ),
    "-": (
        "{name} has {a} {things} and gives {b} of them to {friend}. How many {things} are left?",
        "A rope is {a} metres long. {name} cuts off {b} metres. How many metres of rope remain?",
        "A bus carries {a} people. At the next stop {b} people get off. How many people stay on the bus?",
    ),
    "*": (
        "{name} fills {a} bags with {b} {things} each. How many {things} are in the bags?",
        "A hall has {a} rows of {b} seats. How many seats are there in the hall?",
        "A ticket costs {b} dollars. How many dollars do {a} tickets cost?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} children. How many {things} does each child get?",
        "{a} {things} are packed into {b} equal boxes. How many {things} are in one box?",
        "{name} walks {a} kilometres in {b} equal stages. How many kilometres long is a stage?",
    ),
    "+-": (
        "{name} has {a} {things}, gets {b} more and then loses {c}. How many {things} does {name} have at the end?",
        "A train leaves with {a} people. At the first stop {b} get on, at the second {c} get off. "
        "How many people are on the train now?",
    ),
    "-+": (
        "{name} has {a} {things}, sells {b} of them and then buys {c} new ones. How many {things} does {name} have?",
        "A tank holds {a} litres. {name} takes out {b} litres and pours {c} litres back. "
        "How many litres are in the tank?",
    ),
    "*+": (
        "{name} buys {a} packs of {b} {things} and already has {c} {things} at home. "
        "How many {things} does {name} have in all?",
        "A taxi costs {b} dollars a kilometre, and {c} dollars to start. "
        "How many dollars does a ride of {a} kilometres cost?",
    ),
    "*-": (
        "{name} makes {a} necklaces of {b} beads each; {c} beads break. How many beads are whole?",
        "A shop gets {a} crates of {b} {things} and sells {c} {things}. How many {things} are left in the shop?",
    ),
    "+*": (
        "On each day {name} picks {a} {things} in the morning and {b} in the evening. "
        "How many {things} does {name} pick in {c} days?",
        "A set has {a} red and {b} blue {things}. How many {things} are there in {c} sets?",
    ),
    "+/": (
        "{name} has {a} {things} and {friend} has {b}. They put them together and fill {c} equal bags. "
        "How many {things} are in a bag?",
        "{a} girls and {b} boys form {c} equal teams. How many children are in a team?",
    ),
    "-/": (
        "{name} has {a} {things}, keeps {b} and shares the rest equally among {c} friends. "
        "How many {things} does each friend get?",
        "A book has {a} pages. {name} has read {b} of them and reads the rest in {c} days, the same number every day. "
        "How many pages does {name} read in a day?",
    ),
    "/+": (
        "{a} {things} are packed into {b} equal boxes. {name} adds {c} {things} to one box. "
        "How many {things} are in that box?",
    ),
    "/*": (
        "{a} {things} fill {b} equal jars. How many {things} are in {c} such jars?",
        "{name} pays {a} dollars for {b} tickets. How many dollars do {c} tickets cost?",
    ),
}


def make_problems(count: int = 200, seed: int = 0) -> list[dict[str, object]]:
    """``count`` problems with different prompts; one in three has a single step."""
    rng = random.Random(seed)
    single = [operators for operators in STORIES if len(operators) == 1]
    double = [operators for operators in STORIES if len(operators) == 2]
    problems: dict[str, dict[str, object]] = {}
    while len(problems) < count:
        operators = rng.choice(single if len(problems) % 3 == 0 else double)
        numbers, steps, answer = draw_numbers(operators, rng)
        name, friend = rng.sample(NAMES, 2)
        words = {"name": name, "friend": friend, "things": rng.choice(THINGS), **dict(zip("abc", numbers))}
        prompt = f"{rng.choice(STORIES[operators]).format(**words)}\n{INSTRUCTION}"
        problems[prompt] = {
            "prompt": prompt,
            "answer": answer,
            "steps": steps,
            "demonstration": f"{steps}\nAnswer: {answer}",
        }
    return list(problems.values())


def draw_numbers(operators: str, rng: random.Random) -> tuple[list[int], str, int]:
    """The numbers of a story, its steps as text, and its answer; every result is a whole number above zero."""
    while True:
        value = rng.randint(2, 60)
        numbers, lines = [value], []
        for operator in operators:
            other = rng.randint(2, 9) if operator in "*/" else rng.randint(2, 40)
            result = OPERATIONS[operator](value, other)
            if result <= 0 or (operator == "/" and value % other):
                break
            numbers.append(other)
            lines.append(f"Step {len(numbers) - 1}: {value} {operator} {other} = {result}")
            value = result
        if len(lines) == len(operators) and value < 500:
            return numbers, "\n".join(lines), value


def main() -> None:
    rows = (json.dumps(problem) for problem in make_problems())
    Path(__file__).with_name("word_problems.jsonl").write_text("".join(row + "\n" for row in rows))


if __name__ == "__main__":
    main()
