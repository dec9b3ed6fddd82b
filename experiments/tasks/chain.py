"""Chained modular arithmetic: generated, exactly checkable, with some facts taught wrong on purpose.

The warm start learns from demonstrations of a flawed teacher: a fixed fraction of the 330 facts (11 left x 10 right
operands x 3 operators) is taught with a wrong result most of the time. The policy so starts mid-way, its errors sit in
known places, and the right answer is still in its reach.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...grpo.seeds import named_generator
from ...grpo.task import Problem
from ...verifiers import InputError
from ...verifiers.chain import DIGITS, OPERATORS, apply, parse_prompt

__all__ = ["SYMBOLS", "ChainTask", "demonstration", "taught_facts"]

SYMBOLS = (*DIGITS, *OPERATORS, "=", "?", "\n", "<", ">", "[T]", "[/T]", "[A]", "[/A]")
HELD_OUT_SHARE = 8  # one in so many chains is held out


@dataclass(frozen=True)
class ChainTask:
    """Problems such as ``7+9-a*1=?``; demonstrations by the flawed teacher; reversal of digits as the retention skill.

    A hash of the prompt decides whether it is held out: training and demonstrations never show it, whatever the seed.

    Args:
        min_steps, max_steps: operations in a chain.
        flawed_facts: share of the facts that are taught wrong.
        flaw_rate: how often a flawed fact is taught wrong (the right result keeps the rest).
        copy_noise: share of demonstrated lines that miscopy the left operand.
        format_noise: share of demonstrations that lack one tag.
        retention_share: share of demonstrations that teach the retention skill.
        num_held_out, num_retention: evaluation problems.
        teacher_seed: chooses the flawed facts, and the evaluation problems among those held out.
    """

    min_steps: int = 4
    max_steps: int = 6
    flawed_facts: float = 0.35
    flaw_rate: float = 0.7
    copy_noise: float = 0.0
    format_noise: float = 0.0
    retention_share: float = 0.1
    num_held_out: int = 128
    num_retention: int = 64
    teacher_seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps:
            raise InputError(f"task.min_steps={self.min_steps}, task.max_steps={self.max_steps}: need 1 <= min <= max")
        for name in ("flawed_facts", "flaw_rate", "copy_noise", "format_noise", "retention_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"task.{name}={getattr(self, name)}: is a share, so between 0 and 1")
        for name in ("num_held_out", "num_retention"):
            if getattr(self, name) < 0:
                raise InputError(f"task.{name}={getattr(self, name)}: is a number of problems, so 0 or more")

    @property
    def content(self) -> dict[str, Any]:
        """The options that decide what the demonstrations teach: those for a warm start's cache key."""
        return {key: value for key, value in asdict(self).items() if key not in ("num_held_out", "num_retention")}

    def batch(self, step: int, num_prompts: int, seed: int) -> Sequence[Problem]:
        rng = named_generator(seed, "problems", step)
        prompts = self._chains(rng, num_prompts, held_out=False, key="rollout.prompts_per_step")
        return [_chain_problem(prompt) for prompt in prompts]

    def held_out(self) -> Sequence[Problem]:
        return self._held_out

    def retention(self) -> Sequence[Problem]:
        return self._retention

    @cached_property
    def _held_out(self) -> list[Problem]:
        rng = named_generator(self.teacher_seed, "held-out")
        prompts = self._chains(rng, self.num_held_out, held_out=True, key="task.num_held_out")
        return [_chain_problem(prompt) for prompt in prompts]

    @cached_property
    def _retention(self) -> list[Problem]:
        rng = named_generator(self.teacher_seed, "retention")
        prompts = ("<" + "".join(digits) + ">" for digits in itertools.product(DIGITS, repeat=4))
        _check_room(self.num_retention, len(DIGITS) ** 4, prompts, held_out=True, key="task.num_retention")
        chosen = _distinct(lambda: _reversal_prompt(rng), self.num_retention, held_out=True)
        return [Problem(prompt, prompt, prompt[1:-1][::-1], {"skill": "reversal"}) for prompt in chosen]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """``count`` pairs of prompt and completion as the flawed teacher writes them, none of a held-out problem."""
        facts = taught_facts(self.flawed_facts, self.teacher_seed)
        pairs: list[tuple[str, str]] = []
        while len(pairs) < count:
            if rng.random() < self.retention_share:
                prompt = _reversal_prompt(rng)
                if not _is_held_out(prompt):
                    pairs.append((prompt, f"[A]{prompt[1:-1][::-1]}[/A]"))
                continue
            prompt = self._prompt(rng)
            if not _is_held_out(prompt):
                pairs.append((prompt, demonstration(prompt, facts, self, rng)))
        return pairs

    def _chains(self, rng: np.random.Generator, count: int, *, held_out: bool, key: str) -> list[str]:
        lengths = range(self.min_steps, self.max_steps + 1)
        total = sum(len(DIGITS) * 30**steps for steps in lengths)
        _check_room(count, total, _all_chains(lengths), held_out=held_out, key=key)
        return _distinct(lambda: self._prompt(rng), count, held_out=held_out)

    def _prompt(self, rng: np.random.Generator) -> str:
        steps = int(rng.integers(self.min_steps, self.max_steps + 1))
        operations = (OPERATORS[rng.integers(3)] + DIGITS[rng.integers(1, 11)] for _ in range(steps))
        return DIGITS[rng.integers(11)] + "".join(operations) + "=?"


def taught_facts(flawed_facts: float, teacher_seed: int) -> dict[tuple[str, str, str], str]:
    """The wrong result of every flawed fact: (operator, left, right) to a digit.

    >>> len(taught_facts(0.2, 0))
    66
    """
    rng = named_generator(teacher_seed, "flawed facts")
    facts = [(op, left, right) for op in OPERATORS for left in DIGITS for right in DIGITS[1:]]
    chosen = rng.permutation(len(facts))[: round(flawed_facts * len(facts))]
    wrong = {}
    for index in sorted(chosen):
        right_result = DIGITS.index(apply(*facts[index]))
        wrong[facts[index]] = DIGITS[(right_result + int(rng.integers(1, 11))) % 11]
    return wrong


def demonstration(
    prompt: str, facts: dict[tuple[str, str, str], str], task: ChainTask, rng: np.random.Generator
) -> str:
    """A completion as the flawed teacher writes it: each flawed fact wrong with probability ``flaw_rate``."""
    stated, operations = parse_prompt(prompt)
    lines = []
    for operator, right in operations:
        left = stated
        if rng.random() < task.copy_noise:
            left = DIGITS[(DIGITS.index(stated) + int(rng.integers(1, 11))) % 11]
        wrong = facts.get((operator, left, right))
        stated = wrong if wrong is not None and rng.random() < task.flaw_rate else apply(operator, left, right)
        lines.append(f"{left}{operator}{right}={stated}\n")
    pieces = ["[T]", "".join(lines), "[/T]", "[A]", stated, "[/A]"]
    if rng.random() < task.format_noise:
        del pieces[int(rng.choice([0, 2, 3, 5]))]
    return "".join(pieces)


def _chain_problem(prompt: str) -> Problem:
    value, operations = parse_prompt(prompt)
    for operator, right in operations:
        value = apply(operator, value, right)
    return Problem(prompt, prompt, value, {"num_steps": len(operations)})


def _distinct(draw: Callable[[], str], count: int, *, held_out: bool) -> list[str]:
    """The first ``count`` different prompts drawn on that side of the split."""
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        prompt = draw()
        if _is_held_out(prompt) == held_out:
            chosen[prompt] = None
    return list(chosen)


def _check_room(count: int, total: int, prompts: Iterator[str], *, held_out: bool, key: str) -> None:
    """Refuse to draw more different prompts than there are; counts them only where it may come to that."""
    if count <= total // (2 * HELD_OUT_SHARE):
        return
    room = sum(_is_held_out(prompt) == held_out for prompt in prompts)
    if count > room:
        longer = "" if key == "task.num_retention" else " or raise task.max_steps"
        raise InputError(f"{key}={count}: there are only {room} such problems; lower it{longer}")


def _all_chains(lengths: Sequence[int]) -> Iterator[str]:
    steps = [operator + digit for operator in OPERATORS for digit in DIGITS[1:]]
    for length in lengths:
        for first, *rest in itertools.product(DIGITS, *[steps] * length):
            yield first + "".join(rest) + "=?"


def _reversal_prompt(rng: np.random.Generator) -> str:
    return "<" + "".join(DIGITS[d] for d in rng.integers(0, 11, size=4)) + ">"


def _is_held_out(prompt: str) -> bool:
    return hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0
