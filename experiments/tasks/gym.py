"""Problems of the package reasoning-gym: any of its data sets, each problem made when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...grpo.task import Problem
from ...verifiers import InputError
from .rows import epoch_order, filled, same_text

__all__ = ["ReasoningGymTask"]

INSTALL = "pip install 'apportion[data]'"


class ReasoningGymTask:
    """Problems of one data set of reasoning-gym, with what its scorer wants in the columns of the problem.

    The package makes problem ``i`` from ``seed + i``: two data sets whose seeds differ by less than their size overlap.
    So held-out and training problems are of one data set, apart by their index, and a training problem whose text is
    also that of a held-out one is passed over. So is a problem whose right answer is an empty text.

    Args:
        name: of the data set, such as ``chain_sum``.
        size: problems to train on.
        num_held_out: further problems, kept for evaluation.
        config: further options of the data set.
        template: what the policy reads; ``{question}`` stands in it.
        seed: of the data set.
    """

    def __init__(
        self,
        name: str,
        size: int = 1000,
        num_held_out: int = 64,
        config: Mapping[str, Any] | None = None,
        template: str = "{question}\n\nThink step by step. Put the final answer alone between <answer> and </answer>.",
        seed: int = 0,
    ) -> None:
        if size < 1 or num_held_out < 0:
            raise InputError(f"task.size={size}, task.num_held_out={num_held_out}: need size >= 1, num_held_out >= 0")
        self.name, self.size, self.num_held_out = name, size, num_held_out
        self.template, self.seed = template, seed
        self.config = dict(config or {})
        self._source = f"task.name={name}"
        self._dataset = _dataset(name, {**self.config, "seed": seed, "size": size + num_held_out})
        self._problems: dict[int, Problem] = {}

    @property
    def content(self) -> dict[str, Any]:
        """What decides the demonstrations: for a warm start's cache key."""
        names = ("name", "size", "num_held_out", "config", "template", "seed")
        return {name: getattr(self, name) for name in names}

    def batch(self, step: int, num_prompts: int, seed: int) -> Sequence[Problem]:
        """Epoch after epoch in an order of its own; what is passed over is replaced by others of the same epoch."""
        places = epoch_order(self.size, step, num_prompts, seed, self._source)
        chosen = [self._at(place) for place in places if self._trains(place)]
        for place in self._others(places, step, num_prompts, seed):
            if len(chosen) == len(places):
                break
            if self._trains(place):
                chosen.append(self._at(place))
        if len(chosen) < len(places):
            raise InputError(
                f"{self._source}: nearly all of its problems are held out; change task.config or lower "
                f"task.num_held_out={self.num_held_out}"
            )
        return chosen

    def held_out(self) -> Sequence[Problem]:
        return self._held_out

    def retention(self) -> Sequence[Problem]:
        return []

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """``count`` pairs of prompt and completion: the worked solution where the data set has one, and the answer."""
        pairs: list[tuple[str, str]] = []
        for _ in range(20 * count):
            place = int(rng.integers(self.size))
            if self._trains(place) and (shown := _demonstration(self._at(place).metadata["entry"])):
                pairs.append((self._at(place).prompt, shown))
            if len(pairs) == count:
                return pairs
        raise InputError(
            f"{self._source}: a warm start needs answers, and this data set has none; set warm_start.steps=0"
        )

    @cached_property
    def _held_out(self) -> list[Problem]:
        problems = (self._at(place) for place in range(self.size, self.size + self.num_held_out))
        return [problem for problem in problems if _is_answerable(problem)]

    @cached_property
    def _held_out_texts(self) -> frozenset[str]:
        return frozenset(same_text(problem.prompt) for problem in self._held_out)

    def _trains(self, place: int) -> bool:
        problem = self._at(place)
        return _is_answerable(problem) and same_text(problem.prompt) not in self._held_out_texts

    def _others(self, places: list[int], step: int, num_prompts: int, seed: int) -> Iterator[int]:
        """The places of the steps that follow, none twice and none of ``places``."""
        seen = set(places)
        for later in range(step + 1, step + 1 + self.size // num_prompts):
            for place in epoch_order(self.size, later, num_prompts, seed, self._source):
                if place not in seen:
                    seen.add(place)
                    yield place

    def _at(self, place: int) -> Problem:
        if place not in self._problems:
            entry = self._entry(place)
            text = filled(self.template, {"question": entry["question"]}, f"{self._source}, problem {place}")
            answer = entry["answer"]
            reference = str(answer).strip() if answer is not None and str(answer).strip() else None
            columns = {"dataset": self.name, "config": self.config, "entry": entry}
            self._problems[place] = Problem(f"{self.name}-{place}", text, reference, columns)
        return self._problems[place]

    def _entry(self, place: int) -> dict[str, Any]:
        try:
            return dict(self._dataset[place])
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            raise InputError(
                f"{self._source}: problem {place} cannot be made ({reason}); change task.config"
            ) from error


def _is_answerable(problem: Problem) -> bool:
    answer = problem.metadata["entry"]["answer"]
    return answer is None or bool(str(answer).strip())


def _dataset(name: str, options: dict[str, Any]) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
        known: Mapping[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise InputError(f"task=reasoning_gym: needs the package reasoning-gym ({error}); {INSTALL}") from error
    if name not in known:
        from ..targets import nearest

        raise InputError(f"task.name={name}: reasoning-gym has no such data set; {nearest(name, sorted(known))}")
    try:
        return package.create_dataset(name, **options)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"task.config: {name} refuses it ({reason})") from error


def _demonstration(entry: Mapping[str, Any]) -> str:
    answer = entry["answer"]
    if answer is None or not str(answer).strip():
        return ""
    worked = str(entry["metadata"].get("answer_cot") or "").partition("####")[0].strip()
    return f"{worked}\n<answer>{answer}</answer>".lstrip()
